"""What ``--method`` and ``--options`` take: whatever the registry has, checked before anything is trained."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gxd
from gxd.lab import methods
from gxd.lab.errors import UserError


def test_every_registered_method_and_every_utility_is_a_method() -> None:
    assert {"backprop", *gxd.methods(), *gxd.utilities()} == set(methods.names())
    assert methods.utility_of("gxi") == "gxi" and methods.utility_of("continual_backprop") == "gxd"
    assert methods.utility_of("redo") is None and methods.utility_of("backprop") is None
    assert methods.registered("gxi") == "continual_backprop" and methods.registered("redo") == "redo"


def test_the_overview_names_every_method_with_what_it_does_and_its_options() -> None:
    said = "\n".join(methods.overview())
    for name, info in gxd.methods().items():
        assert f"{name}: {info.description}" in said
    assert "(threshold=0.1 every=1000 " in said
    assert "ranking=absolute" in said and "replacement_rate" not in said  # that is --rate
    assert all(utility in said for utility in gxd.utilities())


@pytest.mark.parametrize(
    ("method", "given", "expected"),
    [
        ("redo", ("threshold=0.05", "every=500"), ("every=500", "threshold=0.05")),
        ("redo", {"every": 500, "threshold": 0.05}, ("every=500", "threshold=0.05")),
        ("redo", ["threshold=2"], ("threshold=2.0",)),  # 2 and 2.0 are one setting
        ("redo", ["threshold=0.1", "every=1_000"], ()),  # the defaults
        ("redo", ["step_policy=reset"], ("step_policy=reset",)),
        ("l2_init", ["decoupled=False", "strength=1e-3"], ("decoupled=false", "strength=0.001")),
        ("gxd", ["ranking=age"], ("ranking=age",)),
        ("continual_backprop", {"exponent": 1}, ("exponent=1.0",)),
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
