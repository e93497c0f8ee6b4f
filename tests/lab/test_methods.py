"""What ``--method`` and ``--options`` take: whatever the registry has, checked before anything is trained."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gxd
from gxd.lab import methods
from gxd.lab.errors import UserError


def test_every_registered_method_and_every_utility_is_a_method() -> None:
    assert {"backprop", "gxd_paper", *gxd.methods(), *gxd.utilities()} == set(methods.names())
    assert methods.utility_of("gxi") == "gxi" and methods.utility_of("continual_backprop") == "gxd"
    assert methods.utility_of("redo") is None and methods.utility_of("backprop") is None
    assert methods.registered("gxi") == "continual_backprop" and methods.registered("redo") == "redo"


def test_gxd_is_the_method_and_gxd_paper_is_continual_backprop_with_its_utility() -> None:
    assert methods.registered("gxd") == "gxd" and methods.utility_of("gxd") is None
    assert methods.registered("gxd_paper") == "continual_backprop" and methods.utility_of("gxd_paper") == "gxd"
    ours, papers = methods.make("gxd+gxd_paper", {"gxd.replacement_rate": 0.5, "gxd_paper.maturity": 7})
    assert (ours.utility.name, papers.utility.name) == ("gxd_loss", "gxd")
    assert (ours.selector.rates.default, papers.selector.maturities.default) == (0.5, 7)
    assert methods.make("backprop", {}) == ()


@pytest.mark.parametrize("method", methods.names())
@pytest.mark.parametrize(
    "options", [{}, {"ranking": "age"}, {"normalise": "age"}, {"ranking": "age", "every": 3}, None]
)
def test_a_config_is_the_same_after_the_way_to_the_disk_and_back(method, options) -> None:
    config = {"lr": 0.1, "method": method, "options": options, "seed": 3}
    assert methods.from_disk(methods.on_disk(config)) == config
    assert list(methods.on_disk(config)) == list(config)
    on_disk = {methods.on_disk({"method": name})["method"] for name in methods.names()}
    assert len(on_disk) == len(methods.names())


@pytest.mark.parametrize(
    ("before", "shown"),
    [
        ({"method": "gxd"}, {"method": "gxd_paper"}),
        ({"method": "gxd", "options": {}}, {"method": "gxd_paper", "options": {}}),
        (
            {"method": "gxd", "options": {"ranking": "age", "exponent": 1.0}},
            {"method": "gxd_paper", "options": {"ranking": "expected_age", "exponent": 1.0}},
        ),
        (
            {"method": "unit_reset", "options": {"normalise": "age"}},
            {"method": "unit_reset", "options": {"normalise": "expected_age"}},
        ),
        ({"method": "of_mine", "options": {"ranking": "age"}}, {"method": "of_mine", "options": {"ranking": "age"}}),
    ],
)
def test_a_run_of_before_is_shown_by_the_name_that_its_rule_has_now(before, shown) -> None:
    assert methods.from_disk(before) == shown
    if "exponent" not in before.get("options", {}) and "expected_age" in str(shown):
        return
    assert methods.on_disk(shown)["method"] == before["method"]


def test_the_overview_names_every_method_with_what_it_does_and_its_options() -> None:
    said = "\n".join(methods.overview())
    for name, info in gxd.methods().items():
        assert f"{name}: {info.description}" in said
    assert "(threshold=0.1 every=1000 " in said
    assert "ranking=absolute" in said and "(replacement_rate" not in said  # that is --rate
    assert all(name in said for name in methods.names()) and "parseval+gxd" in said


@pytest.mark.parametrize(
    ("method", "given", "expected"),
    [
        ("redo", ("threshold=0.05", "every=500"), ("every=500", "threshold=0.05")),
        ("redo", {"every": 500, "threshold": 0.05}, ("every=500", "threshold=0.05")),
        ("redo", ["threshold=2"], ("threshold=2.0",)),  # 2 and 2.0 are one setting
        ("redo", ["threshold=0.1", "every=1_000"], ()),  # the defaults
        ("redo", ["step_policy=reset"], ("step_policy=reset",)),
        ("l2_init", ["decoupled=False", "strength=1e-3"], ("decoupled=false", "strength=0.001")),
        ("gxd_paper", ["ranking=age"], ("ranking=age",)),
        ("gxd", ["incoming=fresh", "step_policy=keep"], ("incoming=fresh",)),
        ("continual_backprop", {"selection": "set"}, ("selection=set",)),
        (
            "parseval+redo",
            ["strength=1", "every=5"],
            ("parseval.decoupled=false", "parseval.strength=1.0", "redo.every=5"),
        ),
        (
            "parseval+gxd",
            {"gxd": {"maturity": 5}},
            ("gxd.maturity=5", "parseval.decoupled=false"),
        ),  # as TOML reads gxd.maturity = 5
        ("parseval+gxd", ["gxd.replacement_rate=1e-3"], ("parseval.decoupled=false",)),  # the default
        ("backprop", (), ()),
    ],
)
def test_options_have_one_form_however_they_are_given(method, given, expected) -> None:
    assert methods.canonical(method, given) == expected
    assert methods.canonical(method, methods.canonical(method, given)) == expected
    assert methods.canonical(method, methods.values_of(expected)) == expected


@pytest.mark.parametrize(
    ("method", "given", "words"),
    [
        ("redoo", (), ["unknown method 'redoo'", "Did you mean 'redo'?"]),
        (
            "redo",
            ["treshold=1"],
            ["redo has no option 'treshold'", "Did you mean 'threshold'?", "It has threshold, every"],
        ),
        ("redo", ["threshold"], ["'threshold' must be NAME=VALUE"]),
        ("redo", ["=3"], ["'=3' must be NAME=VALUE"]),
        ("redo", ["every=2", "every=3"], ["'every' is given twice"]),
        ("redo", ["every=2.5"], ["every=2.5 of redo must be a whole number"]),
        ("redo", ["every=true"], ["every=True of redo must be a whole number"]),
        ("redo", ["threshold=low"], ["threshold='low' of redo must be a number"]),
        ("redo", ["threshold=-1"], ["an option of redo", "threshold=-1", "0 or more"]),
        ("redo", ["step_policy=forget"], ["step_policy='forget'", "'keep', 'reset'"]),
        ("l2_init", {"decoupled": 1}, ["decoupled=1 of l2_init must be true or false"]),
        ("gxd", ["replacement_rate=0.1"], ["'replacement_rate'", "use --rate"]),
        ("gxd_paper", ["ranking=expected_age", "exponent=1"], ["no longer has", "not continued", "choose age"]),
        ("parseval+gdx", (), ["unknown method 'gdx'", "Did you mean 'gxd'?"]),
        ("gxd+", (), ["unknown method ''"]),
        ("gxd+gxd", (), ["has a method twice"]),
        ("backprop+gxd", (), ["joins backprop with others"]),
        ("redo+cpr", ["every=5"], ["'every' is one of redo and of cpr", "redo.every or cpr.every"]),
        ("redo+gxd", ["redo.every=5", "every=5"], ["redo.every is given twice"]),
        ("redo+gxd", ["threshld=5"], ["'threshld'", "It has redo.threshold", "gxd.maturity"]),
        ("redo+gxd", ["gxd.threshold=5"], ["gxd has no option 'threshold'"]),
        ("redo+gxd", ["redo.treshold=5"], ["redo has no option 'treshold'", "'threshold'"]),
        ("redo+contribution", ["utility=gxd"], ["no option 'utility'"]),
        ("continual_backprop", ["utility=gxi"], ["'utility'", "use --method"]),
        ("gxd", ["score_every=3"], ["use --score-every"]),
        ("backprop", ["threshold=1"], ["backprop has no options"]),
        ("redo", "threshold=1", ["must be NAME=VALUE", "or a table"]),
        ("redo", 3, ["options=3"]),
    ],
)
def test_a_wrong_option_is_one_line_that_names_it(method, given, words) -> None:
    with pytest.raises(UserError) as error:
        methods.canonical(method, given)
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


VALUES = st.one_of(st.none(), st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False), st.text())


@given(VALUES)
def test_every_value_survives_being_written(value) -> None:
    again = methods._value(methods._text(value))
    assert again == value and type(again) is type(value)


def test_infinity_is_a_value() -> None:
    assert methods.values_of(("a=inf", "b=[1, 2]", "c=none")) == {"a": math.inf, "b": (1, 2), "c": None}
