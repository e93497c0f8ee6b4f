"""A wrong reset, utility or check is refused before it has written anything; what is odd but right works."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gxd
from tests.rig import (
    FIVE,
    INF,
    LOCAL,
    NAN,
    OBSERVED,
    Gate,
    X,
    Y,
    attach,
    look,
    mlp,
    named,
    plan_of,
    refused,
    same,
    sgd,
    snapshot,
)

# --- reset_units() ----------------------------------------------------------------------------------------------------


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with a norm, and an optimizer that remembers something of every parameter."""
    model = mlp(norm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


ONES = {"fc1": torch.ones(5), "fc2": torch.ones(6)}


def reset(model: nn.Module, optimizer: torch.optim.Optimizer, /, **changes: Any) -> None:
    arguments = {"units": {"fc1": [0], "fc2": [1]}, "references": ONES, "plan": plan_of(norm=True), **changes}
    arguments.setdefault("optimizer", optimizer)
    gxd.reset_units(arguments.pop("model", model), arguments.pop("plan"), arguments.pop("units"), **arguments)


def units(fc1: Any) -> dict[str, Any]:
    return {"units": {"fc2": [0], "fc1": fc1}}


def means(**changes: Any) -> dict[str, Any]:
    return {"references": {**ONES, **changes}}


RESETS = [
    ("an unknown group", {"units": {"fc1": [0], "fc9": [0]}}, KeyError, ("'fc9'", "fc1, fc2")),
    ("the output layer", {"units": {"head": [0]}}, KeyError, ("'head'", "fc1, fc2")),
    ("an index too large", units([0, 5]), IndexError, ("'fc1'", "5", "size is 5")),
    ("a negative index", units([0, -1]), IndexError, ("'fc1'", "-1", "size is 5")),
    ("a negative scalar", units(torch.tensor(-1)), IndexError, ("'fc1'", "-1", "size is 5")),
    ("float indices", units([0.0, 1.0]), TypeError, ("'fc1'", "integers", "float32")),
    ("a complex index", units(torch.tensor([1j])), TypeError, ("'fc1'", "integers", "complex64")),
    ("a mask too short", units([True] * 4), ValueError, ("'fc1'", "mask", "(5,)", "(4,)")),
    ("a mask too long", units(torch.ones(6, dtype=torch.bool)), ValueError, ("'fc1'", "mask", "(5,)", "(6,)")),
    ("a mask of one", units(True), ValueError, ("'fc1'", "mask", "(5,)", "()")),
    ("an index in words", units("0"), TypeError, ("'fc1'", "integers", "str")),
    ("no index", units(None), TypeError, ("'fc1'", "integers", "NoneType")),
    ("a set of indices", units({0, 1}), TypeError, ("'fc1'", "integers", "set")),
    ("ragged indices", units([[0], [1, 2]]), (TypeError, ValueError), ("'fc1'", "integers")),
    ("units are a list", {"units": ["fc1"]}, TypeError, ("units", "list")),
    ("units are None", {"units": None}, TypeError, ("units", "NoneType")),
    ("units are a tensor", {"units": FIVE}, TypeError, ("units", "Tensor")),
    ("references too short", means(fc1=torch.ones(4)), gxd.PlanError, ("'fc1'", "(4,)", "(5,)", "(1, 5)")),
    ("references of too many views", means(fc1=torch.ones(2, 5)), gxd.PlanError, ("'fc1'", "(2, 5)", "(1, 5)")),
    ("a scalar reference", means(fc1=torch.ones(())), gxd.PlanError, ("'fc1'", "()", "(5,)")),
    ("references of an unknown group", means(fc9=torch.ones(5)), (KeyError, gxd.PlanError), ("fc9", "fc1, fc2")),
    ("references that are NaN", means(fc1=torch.full((5,), NAN)), ValueError, ("'fc1'", "finite")),
    ("references that are infinite", means(fc2=torch.full((6,), INF)), ValueError, ("'fc2'", "finite")),
    ("references in words", means(fc1="mean"), TypeError, ("'fc1'", "references", "str")),
    ("references are a tensor", {"references": torch.ones(5)}, TypeError, ("references", "Tensor")),
    ("references are a list", {"references": [1.0] * 5}, TypeError, ("references", "list")),
    ("another step policy", {"step_policy": "zero"}, ValueError, ("step_policy='zero'", "keep", "reset")),
    ("a generator that is a seed", {"generator": 42}, TypeError, ("generator", "torch.Generator", "int")),
    ("a generator that is 0", {"generator": 0}, TypeError, ("generator", "torch.Generator", "int")),
    ("optimizer in words", {"optimizer": "adam"}, TypeError, ("optimizer", "Optimizer", "str")),
    ("optimizer is a class", {"optimizer": torch.optim.Adam}, TypeError, ("optimizer", "Optimizer", "type")),
    ("optimizer of another model", {"optimizer": sgd(mlp())}, ValueError, ("optimizer", "fc1.weight|parameter")),
    ("compensate in words", {"compensate": "no"}, (TypeError, ValueError), ("compensate='no'", "True", "False")),
    ("a plan of a wider model", {"plan": plan_of(True, 7)}, gxd.PlanError, ("'fc1.weight'", "(5, 4)", "(7, 4)")),
    ("a plan in words", {"plan": "auto"}, TypeError, ("plan", "find_units", "str")),
    ("a model in words", {"model": "resnet18"}, TypeError, ("model", "Module", "str")),
    ("a model without the names", {"model": Gate()}, gxd.PlanError, ("fc2.weight", "(3, 5)", "(6, 5)", "this model")),
]


@pytest.mark.parametrize(("changes", "exception", "words"), named(RESETS))
def test_a_refused_reset_writes_nothing(changes, exception, words):
    model, optimizer = trained()
    before = snapshot(model, optimizer)
    message = ""
    try:
        message = refused(lambda: reset(model, optimizer, **changes), exception, words)
    finally:
        assert same(snapshot(model, optimizer), before), f"refused or not, something was written ({message})"


def test_integer_references_count_as_the_numbers_they_are():
    (model, optimizer), (other, its_optimizer) = trained(), trained()
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    reset(model, optimizer, generator=generators[0])
    whole = {name: value.long() for name, value in ONES.items()}
    reset(other, its_optimizer, generator=generators[1], references=whole)
    assert same(snapshot(model, optimizer), snapshot(other, its_optimizer))


def test_a_unit_named_twice_is_reset_once():
    (model, optimizer), (other, its_optimizer) = trained(), trained()
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    reset(model, optimizer, generator=generators[0])
    reset(other, its_optimizer, generator=generators[1], units={"fc1": [0, 0, 0], "fc2": [1, 1]})
    assert same(snapshot(model, optimizer), snapshot(other, its_optimizer))
    assert same(generators[0].get_state(), generators[1].get_state())


@pytest.mark.parametrize(
    "nothing", [[], torch.zeros(5, dtype=torch.bool), torch.tensor([])], ids=["list", "mask", "tensor"]
)
def test_a_reset_of_no_unit_writes_nothing_and_draws_no_random_number(nothing):
    model, optimizer = trained()
    before, generator = snapshot(model, optimizer), torch.Generator().manual_seed(1)
    drawn = generator.get_state()
    reset(model, optimizer, units={"fc1": nothing}, generator=generator, step_policy="reset")
    assert same(snapshot(model, optimizer), before)
    assert same(generator.get_state(), drawn)


# --- reset_optimizer_state() ------------------------------------------------------------------------------------------

FORGETS = [
    ("a foreign parameter", {"parameter": nn.Parameter(X)}, ValueError, ("parameter", "optimizer")),
    ("a copy of the parameter", {"parameter": torch.zeros(5, 4)}, ValueError, ("parameter", "optimizer")),
    ("a parameter in words", {"parameter": "fc1.weight"}, (ValueError, TypeError), ("parameter", "tensor|optimizer")),
    ("an axis too large", {"dim": 2}, (ValueError, IndexError), ("dim=2", "(5, 4)")),
    ("an axis too small", {"dim": -3}, (ValueError, IndexError), ("dim=-3", "(5, 4)")),
    ("an axis in words", {"dim": "rows"}, (ValueError, TypeError), ("dim='rows'",)),
    ("an axis that is a float", {"dim": 1.0}, (ValueError, TypeError), ("dim=1.0",)),
    ("an axis that is a switch", {"dim": True}, (ValueError, TypeError), ("dim=True",)),
    ("an index too large", {"index": [5]}, IndexError, ("5", "size is 5")),
    ("an index too large for the axis", {"index": [4], "dim": 1}, IndexError, ("4", "size is 4")),
    ("a negative index", {"index": [-1]}, IndexError, ("-1", "size is 5")),
    ("a float index", {"index": [0.5]}, TypeError, ("integers", "float32")),
    ("a mask too short", {"index": [True]}, ValueError, ("mask", "(5,)", "(1,)")),
    ("no index", {"index": None}, TypeError, ("index", "integers", "NoneType")),
    ("another step policy", {"step_policy": "zero"}, ValueError, ("step_policy='zero'", "keep", "reset")),
    ("an optimizer in words", {"optimizer": "adam"}, TypeError, ("optimizer", "Optimizer", "str")),
    ("an optimizer class", {"optimizer": torch.optim.Adam}, TypeError, ("optimizer", "Optimizer", "type")),
]


@pytest.mark.parametrize(("changes", "exception", "words"), named(FORGETS))
def test_a_refused_forgetting_forgets_nothing(changes, exception, words):
    model, optimizer = trained()
    before = snapshot(model, optimizer)
    arguments = {"optimizer": optimizer, "parameter": model.fc1.weight, "index": [0], **changes}
    refused(lambda: gxd.reset_optimizer_state(**arguments), exception, words)
    assert same(snapshot(model, optimizer), before)


@pytest.mark.parametrize("policy", ["keep", "reset"])
def test_forgetting_no_slice_forgets_nothing(policy):
    model, optimizer = trained()
    before = snapshot(model, optimizer)
    gxd.reset_optimizer_state(optimizer, model.fc1.weight, [], step_policy=policy)
    assert same(snapshot(model, optimizer), before)


# --- utilities of the user's own --------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", ["logit", "", "Target", 1, True, ["loss"]], ids=repr)
def test_a_utility_with_an_unknown_gradient_is_not_registered(gradient):
    words = (f"gradient={gradient!r}", "'target'", "'sketch'", "'all'", "'loss'", "None")
    refused(lambda: gxd.register_utility("mine", gradient=gradient), ValueError, words)
    assert "mine" not in gxd.utilities()


def test_a_decorator_without_a_name_is_refused():
    def mine(o):
        return o.views[0].h.mean((0, 1))

    refused(lambda: gxd.register_utility(mine), TypeError, ("name", "function|string|str"))


def test_a_utility_that_is_not_a_function_is_refused():
    refused(lambda: gxd.register_utility("mine")(3), TypeError, ("'mine'", "callable|function", "int"))
    assert "mine" not in gxd.utilities()


WRONG_RESULTS = [
    ("a scalar", lambda o: o.views[0].h.mean(), ("'mine'", "one score per unit", "()")),
    ("a score per example", lambda o: o.views[0].h.mean(1), ("'mine'", "one score per unit", "(6, ")),
    ("a score per position", lambda o: o.views[0].h.mean(0), ("'mine'", "one score per unit", "(1, ")),
    ("one score too few", lambda o: o.views[0].h.mean((0, 1))[1:], ("'mine'", "one score per unit")),
    ("a list", lambda o: o.views[0].h.mean((0, 1)).tolist(), ("'mine'", "one score per unit", "list")),
    ("nothing", lambda o: None, ("'mine'", "one score per unit", "NoneType")),
    ("complex numbers", lambda o: o.views[0].h.mean((0, 1)) * 1j, ("'mine'", "complex")),
]


@pytest.mark.parametrize("gradient", [None, "target"])
@pytest.mark.parametrize(("function", "words"), named(WRONG_RESULTS))
def test_a_utility_that_returns_something_else_is_refused_with_what_it_returned(function, words, gradient):
    gxd.register_utility("mine", gradient=gradient)(function)
    rig = attach("mine", replacement_rate=1.0, maturity=0)
    refused(rig.train, (ValueError, TypeError), words)
    assert rig.cbp.total_resets == 0


@pytest.mark.parametrize("gradient", [None, "target", "loss"])
def test_an_exception_inside_a_utility_reaches_the_user_and_training_can_go_on(gradient):
    fails = [True]

    @gxd.register_utility("mine", gradient=gradient)
    def mine(o):
        if fails[0]:
            raise ZeroDivisionError("my own mistake")
        return o.views[0].h.abs().mean((0, 1))

    rig, clean = attach("mine"), attach("mine")
    with pytest.raises(ZeroDivisionError, match="my own mistake"):
        rig.train(X * 2)
    fails[0] = False
    rig.model.load_state_dict(clean.model.state_dict())
    rig.optimizer.load_state_dict(copy.deepcopy(clean.optimizer.state_dict()))
    rig.train()
    clean.train()
    assert same(rig.cbp.utilities(), clean.cbp.utilities())
    assert same(rig.cbp.references(), clean.cbp.references())


def test_a_micro_batch_whose_utility_failed_leaves_nothing_in_the_references():
    fails = [False]

    @gxd.register_utility("mine", gradient="target")
    def mine(o):
        if fails[0]:
            raise ZeroDivisionError("my own mistake")
        return o.views[0].g.abs().mean((0, 1))

    rig, clean = attach("mine"), attach("mine")
    look(rig, X)
    fails[0] = True
    with pytest.raises(ZeroDivisionError):
        look(rig, X * 3)
    fails[0] = False
    rig.optimizer.step()
    clean.train()
    assert same(rig.cbp.references(), clean.cbp.references())


def test_a_utility_that_reads_a_gradient_it_did_not_ask_for_is_told_how_to_ask():
    gxd.register_utility("mine")(lambda o: o.views[0].g.mean((0, 1)))
    refused(attach("mine").train, gxd.ObservationError, ("gradient", "register", "'target'", "'loss'"))


@pytest.mark.parametrize("value", [NAN, INF], ids=str)
def test_a_utility_that_returns_no_number_is_left_out_with_a_warning(value):
    gxd.register_utility("mine")(lambda o: o.views[0].h.mean((0, 1)) * value)
    rig = attach("mine")
    with pytest.warns(gxd.NonFiniteWarning, match="non-finite"):
        rig.train()
    assert rig.cbp.nonfinite_observations == 1
    assert not any(u.any() for u in (*rig.cbp.utilities().values(), *rig.cbp.references().values()))


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
@pytest.mark.parametrize("model_dtype", [torch.float32, torch.float64])
def test_a_utility_may_return_numbers_of_any_precision(dtype, model_dtype):
    gxd.register_utility("mine")(lambda o: (o.views[0].h > 0).any(0).any(0).to(dtype))
    rig = attach("mine", model=mlp().to(model_dtype))
    rig.train(X.to(model_dtype))
    assert all(u.dtype == model_dtype and set(u.tolist()) <= {0.0, 1.0} for u in rig.cbp.utilities().values())


# --- check() ----------------------------------------------------------------------------------------------------------

CHECKS = [
    ("a plan of another model", {"plan": plan_of(hidden=7)}, gxd.PlanError, ("'fc1.weight'", "(5, 4)", "(7, 4)")),
    ("no unit per group", {"units_per_group": 0}, ValueError, ("units_per_group=0", "1")),
    ("less than no unit", {"units_per_group": -1}, ValueError, ("units_per_group=-1", "1")),
    ("a tolerance that is no number", {"tolerance": NAN}, ValueError, ("tolerance=nan",)),
    ("a model in words", {"model": "resnet18"}, TypeError, ("model", "Module", "str")),
    ("a plan in words", {"plan": "auto"}, TypeError, ("plan", "find_units", "str")),
]


@pytest.mark.parametrize(("changes", "exception", "words"), named(CHECKS))
def test_a_check_that_would_prove_nothing_is_refused(changes, exception, words):
    arguments = {"model": mlp(), "example_inputs": X, "plan": plan_of(), **changes}
    refused(lambda: gxd.verify_plan(**arguments), exception, words)


@pytest.mark.parametrize("inputs", [X[:0], X * NAN, X * INF], ids=["empty", "nan", "inf"])
def test_a_check_on_outputs_that_say_nothing_is_not_passed(inputs):
    report = gxd.verify_plan(mlp(), inputs, plan=plan_of())
    assert {group.status for group in report.groups} == {"inconclusive"}


def test_an_unknown_group_of_a_report_is_a_key_error():
    report = gxd.verify_plan(mlp(), X, plan=plan_of())
    refused(lambda: report["fc9"], KeyError, ("'fc9'", "fc1"))


def test_an_unknown_group_of_a_plan_is_a_key_error():
    refused(lambda: plan_of()["fc9"], KeyError, ("'fc9'", "fc1, fc2"))


# --- odd, but right ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"replacement_rate": 0}, {"replacement_rate": 1.0, "maturity": 10**6}], ids=str)
def test_rate_zero_and_a_maturity_beyond_the_run_reset_nothing_and_change_nothing(settings):
    rig, plain = attach(**settings), mlp()
    optimizer = sgd(plain)
    for _ in range(5):
        rig.train()
        optimizer.zero_grad()
        F.cross_entropy(plain(X), Y).backward()
        optimizer.step()
    assert rig.cbp.total_resets == 0
    assert same(rig.model.state_dict(), plain.state_dict())


def test_rate_one_without_maturity_resets_every_unit_at_every_step():
    rig = attach(replacement_rate=1.0, maturity=0)
    for step in range(1, 4):
        rig.train()
        assert {name: index.tolist() for name, index in rig.cbp.last_resets.items()} == {
            "fc1": [0, 1, 2, 3, 4],
            "fc2": [0, 1, 2, 3, 4, 5],
        }
        assert rig.cbp.total_resets == 11 * step
        assert not rig.model.fc2.weight.any() and not rig.model.head.weight.any()
        assert rig.model.fc1.weight.all() and rig.model.head.bias.any()


def test_a_group_of_one_unit_is_reset_like_any_other():
    rig = attach(model=mlp(hidden=1), plan=plan_of(hidden=1), replacement_rate=1.0, maturity=1)
    for _ in range(4):
        rig.train()
    assert rig.cbp.total_resets == 2 * 3


@pytest.mark.parametrize("utility", [*LOCAL, *OBSERVED, "loss_gradient"])
def test_a_batch_of_one_example_is_observed(utility):
    rig = attach(utility)
    rig.train(X[:1], Y[:1])
    hidden = mlp().fc1(X[:1]).relu()[0]
    assert torch.allclose(rig.cbp.references()["fc1"], hidden.detach())


def test_a_target_that_is_ignored_everywhere_is_no_error():
    rig = attach()
    logits = rig.model(X)
    rig.cbp.observe(logits, torch.full_like(Y, -100))
    logits.sum().backward()
    rig.optimizer.step()
    assert not any(u.any() for u in rig.cbp.utilities().values())


def test_on_a_step_that_is_not_scored_observe_is_not_needed():
    rig = attach(score_every=3)
    for step in range(6):
        rig.train(observe=step % 3 == 0)
    assert rig.cbp.ages()["fc1"].tolist() == [6] * 5
