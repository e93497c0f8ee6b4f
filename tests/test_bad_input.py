"""What a user can do wrong, and what the library says then: the right exception, in words that name value and remedy.

Whatever is refused leaves no trace: parameters, buffers, optimizer state and statistics are compared bit for bit.
A word of a table below is looked for in the message, in any case; ``a|b`` is found if one of the two is.
"""

import ast
import copy
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd

NAN, INF = math.nan, math.inf
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2])
LOCAL = ["activation", "contribution", "mc_contribution", "mc_adaptable_contribution", "random"]
OBSERVED = ["gxi", "gxd", "gxd_all_logit", "gxd_sketch"]


def mlp(norm: bool = False, hidden: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    layers = OrderedDict(fc1=nn.Linear(4, hidden))
    if norm:
        layers["norm"] = nn.BatchNorm1d(hidden)
    layers |= OrderedDict(
        act1=nn.ReLU(), fc2=nn.Linear(hidden, hidden + 1), act2=nn.ReLU(), head=nn.Linear(hidden + 1, 3)
    )
    return nn.Sequential(layers)


@cache
def plan_of(norm: bool = False, hidden: int = 5) -> gxd.UnitPlan:
    return gxd.find_units(mlp(norm, hidden), X)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@dataclass
class Rig:
    """A model in training."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    cbp: gxd.ContinualBackprop

    def train(self, x: Tensor = X, y: Tensor = Y, observe: bool = True) -> None:
        logits = self.model(x)
        if observe:
            self.cbp.observe(logits, y)
        self.optimizer.zero_grad()
        F.cross_entropy(logits, y).backward()
        self.optimizer.step()


def attach(utility: str = "gxd", **settings: Any) -> Rig:
    model = settings.pop("model", None) or mlp()
    optimizer = settings.pop("optimizer", None) or sgd(model)
    if "example_inputs" not in settings:
        settings.setdefault("plan", plan_of())
    return Rig(model, optimizer, gxd.ContinualBackprop(model, optimizer, utility=utility, **settings))


def refused(call: Callable[[], object], exception: Any, words: tuple[str, ...]) -> str:
    with pytest.raises(exception) as caught:
        call()
    message = str(caught.value)
    for word in words:
        assert any(one.lower() in message.lower() for one in word.split("|")), f"{message!r} does not say {word!r}"
    return message


def same(left: Any, right: Any) -> bool:
    """Bit for bit, through dicts and lists."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    return left == right


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def named(rows: list[tuple]) -> list[Any]:
    """The first entry of each row of a table is the name of its test."""
    return [pytest.param(*row[1:], id=row[0]) for row in rows]


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(gxd.score, "_REGISTRY", dict(gxd.score._REGISTRY))


# --- the constructor --------------------------------------------------------------------------------------------------

OUT_OF_RANGE = {
    "replacement_rate": ([-0.1, 1.5, NAN, INF, True, "0.1", None], "[0, 1]"),
    "maturity": ([-1, 1.5, NAN, True, "100", None], "whole number"),
    "decay": ([-0.1, 1.0, 1.5, NAN, True, False, "0.99", None], "[0, 1)"),
    "score_every": ([0, -1, 2.0, NAN, True, "2", None], "1 or more"),
    "seed": ([-1, 1.0, NAN, True, "0", None, 2**64, 2**64 - 1], "whole number"),
    "positions": (["absolute", "", None, 1], "signed"),
    "step_policy": (["zero", "", None, 1], "keep"),
}


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        pytest.param(name, value, remedy, id=f"{name}={value!r}")
        for name, (values, remedy) in OUT_OF_RANGE.items()
        for value in values
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_value_and_its_range(name, value, remedy):
    refused(lambda: attach(**{name: value}), ValueError, (f"{name}={value!r}", remedy))


@pytest.mark.parametrize("value", ["no", None, 2, 0.5], ids=repr)
def test_a_switch_that_is_not_a_bool_is_not_taken_to_be_on(value):
    refused(lambda: attach(compensate=value), (TypeError, ValueError), (f"compensate={value!r}", "True", "False"))


def test_what_is_not_a_scaler_is_refused_before_the_first_step():
    refused(lambda: attach("loss_gradient", scaler="fp16"), TypeError, ("scaler", "GradScaler", "str"))


NEAR = [("gxd_scetch", "gxd_sketch"), ("contributions", "contribution"), ("lossgradient", "loss_gradient")]
NEAR += [("gdx", "gxd"), ("GXD", "gxd"), ("activations", "activation"), ("GxI", "gxi")]


@pytest.mark.parametrize(("given", "meant"), NEAR)
def test_an_unknown_utility_is_refused_with_the_one_that_was_meant(given, meant):
    message = refused(lambda: attach(given), ValueError, (f"unknown utility {given!r}", "did you mean"))
    assert f"'{meant}'" in message.partition("Did you mean")[2].partition("?")[0]


@pytest.mark.parametrize("given", ["zzz", None, 3, [], gxd.check], ids=["zzz", "None", "3", "[]", "a function"])
def test_a_utility_that_is_like_none_is_refused_with_the_list_of_all(given):
    refused(lambda: attach(given), (ValueError, TypeError), ("utility", "gxd_sketch", "activation"))


def swapped(**changes: Any) -> Callable[[], object]:
    """A constructor call with some arguments replaced."""

    def call() -> object:
        model = mlp()
        arguments: dict[str, Any] = {"model": model, "optimizer": sgd(model), "plan": plan_of(), **changes}
        return gxd.ContinualBackprop(arguments.pop("model"), arguments.pop("optimizer"), **arguments)

    return call


WRONG_PARTS = [
    ("model is a class", {"model": nn.Linear}, TypeError, ("model", "Module", "type")),
    ("model is a string", {"model": "resnet18"}, TypeError, ("model", "Module", "str")),
    ("model is None", {"model": None}, TypeError, ("model", "Module", "NoneType")),
    ("model is its parameters", {"model": [nn.Parameter(X)]}, TypeError, ("model", "Module", "list")),
    ("optimizer is a class", {"optimizer": torch.optim.SGD}, TypeError, ("optimizer", "Optimizer", "type")),
    ("optimizer is a string", {"optimizer": "adam"}, TypeError, ("optimizer", "Optimizer", "str")),
    ("optimizer is None", {"optimizer": None}, TypeError, ("optimizer", "Optimizer", "NoneType")),
    (
        "optimizer is a scheduler",
        {"optimizer": torch.optim.lr_scheduler.StepLR(sgd(mlp()), 1)},
        TypeError,
        ("optimizer", "Optimizer", "StepLR"),
    ),
    ("plan is a string", {"plan": "auto"}, TypeError, ("plan", "find_units", "str")),
    ("plan is a list of groups", {"plan": [gxd.hand_group("fc1", "fc2")]}, TypeError, ("plan", "find_units", "list")),
    ("plan is a tensor", {"plan": X}, TypeError, ("plan", "find_units|example_inputs", "Tensor")),
    ("no plan and no inputs", {"plan": None}, ValueError, ("example_inputs", "plan", "neither")),
    ("a plan and inputs", {"example_inputs": X}, ValueError, ("example_inputs", "plan", "both")),
]


@pytest.mark.parametrize(("changes", "exception", "words"), named(WRONG_PARTS))
def test_a_wrong_part_is_refused_with_what_it_must_be_and_what_it_is(changes, exception, words):
    refused(swapped(**changes), exception, words)


def test_a_refused_constructor_leaves_no_hook_behind():
    model = mlp()
    optimizer = sgd(model)
    everything = [{name: values[0]} for name, (values, _) in OUT_OF_RANGE.items()]
    everything += [{"utility": "zzz"}, {"plan": plan_of(hidden=7)}, {"plan": plan_of().select(exclude="*")}]
    for settings in everything:
        with pytest.raises(ValueError):
            gxd.ContinualBackprop(model, optimizer, **{"plan": plan_of(), **settings})
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()  # a hook left behind would ask for observe()


def test_a_parameter_that_is_not_in_the_optimizer_is_named():
    model = mlp()
    optimizer = sgd(nn.ModuleList([model.fc1, model.fc2]))
    words = ("head.weight", "head.bias", "optimizer", "exclude")
    refused(lambda: attach(model=model, optimizer=optimizer), gxd.PlanError, words)


@pytest.mark.parametrize("trained", [("fc1",), ("fc1", "fc2"), ("fc2", "head")], ids="+".join)
def test_the_groups_proposed_for_exclusion_are_those_that_touch_the_missing_parameters(trained):
    model = mlp()
    optimizer = sgd(nn.ModuleList([getattr(model, name) for name in trained]))
    message = refused(lambda: attach(model=model, optimizer=optimizer), gxd.PlanError, ("exclude=",))
    proposed = ast.literal_eval(re.search(r"exclude=(\[.*?\])", message).group(1))
    untrained = {"fc1", "fc2", "head"} - set(trained)
    assert proposed == [name for name, reads in (("fc1", "fc2"), ("fc2", "head")) if untrained & {name, reads}]


def test_leaving_out_a_group_as_proposed_makes_the_parameter_unnecessary():
    model = mlp()
    optimizer = sgd(nn.ModuleList([model.fc1, model.fc2]))
    attach(model=model, optimizer=optimizer, plan=plan_of().select(exclude="fc2")).train()


def test_a_plan_without_a_unit_is_refused_with_the_reason_of_every_layer():
    words = ("no unit", "head: output layer", "fc1: excluded by name", "fc2: excluded by name")
    refused(lambda: attach(plan=plan_of().select(exclude="*")), gxd.PlanError, words)


def test_a_model_with_one_layer_is_refused_with_its_reason():
    model = nn.Sequential(OrderedDict(only=nn.Linear(4, 3)))
    refused(lambda: attach(model=model, example_inputs=X), gxd.PlanError, ("no unit", "only: output layer"))


def test_a_plan_of_another_model_is_refused_with_the_name_that_is_missing():
    model = nn.Sequential(OrderedDict(encoder=nn.Linear(4, 5), decoder=nn.Linear(5, 3)))
    refused(lambda: attach(model=model), gxd.PlanError, ("'fc1.weight'", "plan", "this model"))


def test_a_plan_of_a_wider_model_is_refused_with_both_shapes():
    words = ("'fc1.weight'", "(5, 4)", "(7, 4)", "plan", "this model")
    refused(lambda: attach(plan=plan_of(hidden=7)), gxd.PlanError, words)


def test_sharded_parameters_are_refused():
    if not torch.distributed.is_available():
        pytest.skip("needs torch.distributed")
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    model = mlp()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model.fc1.weight = nn.Parameter(distribute_tensor(model.fc1.weight.detach(), mesh))
        refused(lambda: attach(model=model), gxd.PlanError, ("'fc1.weight'", "sharded", "DTensor"))
    finally:
        torch.distributed.destroy_process_group()


# --- finding units ----------------------------------------------------------------------------------------------------


class Gate(nn.Module):
    """Its path depends on its values, so that it cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x).relu()
        return self.fc2(h * 2 if h.sum() > 1 else h)


class Broken(Gate):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("the vocabulary is missing")


REMEDIES = ("example_inputs", "hand_group", "find_units")
UNTRACEABLE = [
    ("a path that depends on values", Gate, X, ("Gate", "data-dependent", *REMEDIES)),
    ("a forward that raises", Broken, X, ("Broken", "ValueError", "the vocabulary is missing", *REMEDIES)),
    ("inputs of a wrong shape", mlp, X[:, :3], ("Sequential", "[6, 3]|(6, 3)|6x3", *REMEDIES)),
    ("a keyword that forward has not", mlp, {"pixels": X}, ("Sequential", "pixels|input", *REMEDIES)),
    ("too many inputs", mlp, (X, X), ("Sequential", "argument", *REMEDIES)),
    ("no input", mlp, (), ("Sequential", "input", *REMEDIES)),
    ("a list", mlp, [X], ("Sequential", "list", "tuple", *REMEDIES)),
    ("a string", mlp, "x", ("Sequential", "str", *REMEDIES)),
]


@pytest.mark.parametrize(("build", "inputs", "words"), named(UNTRACEABLE))
def test_what_cannot_be_traced_is_a_trace_error_that_says_why_and_what_to_do(build, inputs, words):
    model = build()
    model.eval()
    before, modes, random = (
        copy.deepcopy(model.state_dict()),
        [m.training for m in model.modules()],
        torch.get_rng_state(),
    )
    refused(lambda: gxd.find_units(model, inputs), gxd.TraceError, words)
    assert same(model.state_dict(), before)
    assert [m.training for m in model.modules()] == modes
    assert same(torch.get_rng_state(), random)


def test_the_call_that_the_trace_error_proposes_works_as_it_stands():
    model = Gate()
    message = refused(lambda: gxd.find_units(model, X), gxd.TraceError, ())
    (proposal,) = re.findall(r"gxd\.find_units\(model,\s*groups=\[.*\]\)", message)
    plan = eval(proposal, {"gxd": gxd, "model": model})
    rig = attach(model=model, plan=plan, replacement_rate=1.0, maturity=0)
    rig.train()
    assert rig.cbp.total_resets == 5


@pytest.mark.parametrize("model", ["resnet18", None, nn.Linear, [nn.Linear(2, 2)]], ids=str)
def test_units_are_found_in_modules_only(model):
    refused(lambda: gxd.find_units(model, X), TypeError, ("model", "Module", type(model).__name__))


WRONG_SEARCHES = [
    ("no inputs and no groups", {}, ValueError, ("example_inputs", "groups")),
    ("an empty batch", {"example_inputs": X[:0]}, (ValueError, gxd.TraceError), ("example_inputs", "empty|batch")),
    ("residual='both'", {"example_inputs": X, "residual": "both"}, ValueError, ("residual='both'", "skip", "group")),
    ("residual=True", {"example_inputs": X, "residual": True}, ValueError, ("residual=True", "skip", "group")),
    ("residual=None", {"example_inputs": X, "residual": None}, ValueError, ("residual=None", "skip", "group")),
    ("batch_dim beyond the inputs", {"example_inputs": X, "batch_dim": 5}, ValueError, ("batch_dim=5",)),
    ("batch_dim=-1", {"example_inputs": X, "batch_dim": -1}, ValueError, ("batch_dim=-1",)),
    ("batch_dim='0'", {"example_inputs": X, "batch_dim": "0"}, (ValueError, TypeError), ("batch_dim='0'",)),
    ("include matches nothing", {"example_inputs": X, "include": "fc9"}, gxd.PlanError, ("include", "fc9", "fc1, fc2")),
    ("exclude matches nothing", {"example_inputs": X, "exclude": "fc9"}, gxd.PlanError, ("exclude", "fc9", "fc1, fc2")),
    ("rates match nothing", {"example_inputs": X, "rates": {"fc9": 0}}, gxd.PlanError, ("rates", "fc9", "fc1, fc2")),
    ("a group alone", {"groups": gxd.hand_group("fc1", "fc2")}, TypeError, ("groups", "list")),
    ("groups is a name", {"groups": "fc1"}, TypeError, ("groups", "hand_group", "str")),
    ("groups are tuples", {"groups": [("fc1", "fc2")]}, TypeError, ("groups", "hand_group", "tuple")),
]


@pytest.mark.parametrize(("arguments", "exception", "words"), named(WRONG_SEARCHES))
def test_a_wrong_search_is_refused_with_the_argument_and_what_it_may_be(arguments, exception, words):
    refused(lambda: gxd.find_units(mlp(), **arguments), exception, words)


WRONG_CHOICES = [
    ("one of several patterns", {"exclude": ["fc1", "fc9"]}, gxd.PlanError, ("exclude", "fc9", "fc1, fc2")),
    ("an empty pattern", {"include": ""}, gxd.PlanError, ("include", "''", "fc1, fc2")),
    ("a regular expression", {"include": "fc[0-9]+"}, gxd.PlanError, ("include", "fc[0-9]+", "fc1, fc2")),
    ("include is a number", {"include": 5}, TypeError, ("include", "pattern", "int|5")),
    ("a pattern is a number", {"exclude": [1]}, TypeError, ("exclude", "pattern", "int|1")),
    ("a rate above 1", {"rates": {"fc1": 1.5}}, ValueError, ("1.5", "fc1", "[0, 1]")),
    ("a rate below 0", {"rates": {"fc*": -1e-4}}, ValueError, ("-0.0001", "fc*", "[0, 1]")),
    ("a rate that is no number", {"rates": {"fc1": NAN}}, ValueError, ("nan", "fc1", "[0, 1]")),
    ("a rate in words", {"rates": {"fc1": "0.1"}}, (ValueError, TypeError), ("'0.1'", "fc1", "[0, 1]")),
    ("a rate that is a switch", {"rates": {"fc1": True}}, (ValueError, TypeError), ("True", "fc1", "[0, 1]")),
    ("no rate", {"rates": {"fc1": None}}, (ValueError, TypeError), ("None", "fc1", "[0, 1]")),
    ("one rate for all", {"rates": 0.1}, TypeError, ("rates", "0.1|float")),
    ("a rate for a group left out", {"exclude": "fc1", "rates": {"fc1": 0.1}}, gxd.PlanError, ("rates", "fc1", "fc2")),
]


@pytest.mark.parametrize(("arguments", "exception", "words"), named(WRONG_CHOICES))
def test_a_wrong_choice_of_groups_is_refused_with_the_groups_there_are(arguments, exception, words):
    refused(lambda: plan_of().select(**arguments), exception, words)


# --- groups by hand ---------------------------------------------------------------------------------------------------

FIVE = torch.arange(5)
WRONG_GROUPS = [
    ("unknown producer", ("fc9", "fc2"), {}, ("'fc9'", "no module", "fc1")),
    ("unknown consumer", ("fc1", "fc9"), {}, ("'fc9'", "no module", "fc2")),
    ("unknown norm", ("fc1", "fc2", "norm9"), {}, ("'norm9'", "no module", "norm")),
    ("producer is no layer", ("act1", "fc2"), {}, ("'act1'", "ReLU", "Linear")),
    ("consumer is no layer", ("fc1", "act1"), {}, ("'act1'", "ReLU", "Linear")),
    ("producer is the model", ("", "fc2"), {}, ("Sequential", "Linear")),
    ("norm is no norm", ("fc1", "fc2", "act1"), {}, ("'act1'", "ReLU", "norm")),
    ("norm of another size", ("fc2", "head", "norm"), {}, ("'norm'", "5", "6 units")),
    ("too many columns", ("fc1", "head"), {}, ("'head'", "6 columns", "5 units", "columns=")),
    ("producers of different sizes", (["fc1", "fc2"], "head"), {}, ("different", "'fc1': 5", "'fc2': 6")),
    ("no producer", ([], "fc2"), {}, ("producer",)),
    ("no consumer", ("fc1", []), {}, ("consumer", "fc1")),
    ("a column beyond the last", ("fc1", "fc2"), {"columns": FIVE + 1}, ("columns", "5", "'fc2'")),
    ("a negative column", ("fc1", "fc2"), {"columns": FIVE - 1}, ("columns", "-1", "'fc2'")),
    ("too few columns", ("fc1", "fc2"), {"columns": FIVE[:4]}, ("columns", "4", "5 units")),
    ("a column of two units", ("fc1", "fc2"), {"columns": FIVE.clamp(max=3)}, ("columns", "3", "twice|once|one unit")),
    ("a producer named twice", (["fc1", "fc1"], "fc2"), {}, ("'fc1'", "twice|once")),
    ("a consumer named twice", ("fc1", ["fc2", "fc2"]), {}, ("'fc2'", "twice|once")),
]


@pytest.mark.parametrize(("names", "options", "words"), named(WRONG_GROUPS))
def test_a_group_by_hand_that_does_not_fit_the_model_is_a_plan_error(names, options, words):
    model = mlp(norm=True)
    refused(lambda: gxd.find_units(model, groups=[gxd.hand_group(*names, **options)]), gxd.PlanError, words)


WRONG_DESCRIPTIONS = [
    ("producers are a number", (3, "fc2"), {}, ("producers", "name")),
    ("producers are a module", (nn.Linear(2, 2), "fc2"), {}, ("producers", "name", "Linear")),
    ("consumers are None", ("fc1", None), {}, ("consumers", "name")),
    ("columns are a string", ("fc1", "fc2"), {"columns": "all"}, ("columns", "str|'all'")),
    ("columns are fractions", ("fc1", "fc2"), {"columns": FIVE + 0.5}, ("columns", "integer|whole|float")),
    ("batch_axis is a string", ("fc1", "fc2"), {"batch_axis": "first"}, ("batch_axis", "'first'|str")),
    ("batch_axis is negative", ("fc1", "fc2"), {"batch_axis": -1}, ("batch_axis", "-1")),
]


@pytest.mark.parametrize(("names", "options", "words"), named(WRONG_DESCRIPTIONS))
def test_a_group_by_hand_of_the_wrong_types_is_refused(names, options, words):
    call = lambda: gxd.find_units(mlp(), groups=[gxd.hand_group(*names, **options)])
    refused(call, (TypeError, ValueError), words)


def test_columns_may_be_given_as_a_list():
    plan = gxd.find_units(mlp(), groups=[gxd.hand_group("fc1", "fc2", columns=[[0], [1], [2], [3], [4]])])
    assert plan["fc1"].views[0].columns.tolist() == [[0], [1], [2], [3], [4]]


def test_two_groups_by_hand_of_the_same_producer_are_refused():
    groups = [gxd.hand_group("fc1", "fc2"), gxd.hand_group("fc1", "fc2")]
    refused(lambda: gxd.find_units(mlp(), groups=groups), gxd.PlanError, ("'fc1'", "twice|two|once"))


def test_a_frozen_producer_is_refused_by_hand_as_it_is_skipped_by_tracing():
    model = mlp()
    model.fc1.weight.requires_grad_(False)
    assert "fc1" not in [group.name for group in gxd.find_units(model, X).groups]
    call = lambda: gxd.find_units(model, groups=[gxd.hand_group("fc1", "fc2")])
    refused(call, gxd.PlanError, ("fc1", "frozen|requires_grad"))


def test_a_layer_whose_weight_is_computed_is_refused_by_hand():
    model = mlp()
    nn.utils.parametrizations.weight_norm(model.fc1)
    call = lambda: gxd.find_units(model, groups=[gxd.hand_group("fc1", "fc2")])
    refused(call, gxd.PlanError, ("'fc1'", "weight", "param"))


def test_a_tied_weight_is_named_by_hand_under_either_name():
    model = nn.Sequential(OrderedDict(fc1=nn.Linear(4, 4), fc2=nn.Linear(4, 4), fc3=nn.Linear(4, 4)))
    model.fc3.weight = model.fc2.weight
    plan = gxd.find_units(model, groups=[gxd.hand_group("fc1", "fc3")])
    assert plan.shapes["fc3.weight"] == (4, 4)


# --- observe() --------------------------------------------------------------------------------------------------------


@dataclass
class CausalLMOutput:
    """Like the outputs of a model of transformers."""

    logits: Tensor


def see(*arguments: Any, **keywords: Any) -> Callable[[Rig], None]:
    """observe() after a forward pass; a function among the arguments is applied to the logits."""

    def call(rig: Rig) -> None:
        logits = rig.model(X)
        given = [a(logits) if callable(a) else a for a in arguments]
        rig.cbp.observe(*given, **{key: a(logits) if callable(a) else a for key, a in keywords.items()})

    return call


def itself(logits: Tensor) -> Tensor:
    return logits


def without_graph(rig: Rig) -> None:
    with torch.no_grad():
        rig.cbp.observe(rig.model(X), Y)


def in_evaluation(rig: Rig) -> None:
    rig.model.eval()
    try:
        rig.cbp.observe(rig.model(X), Y)
    finally:
        rig.model.train()


def in_evaluation_after_training(rig: Rig) -> None:
    rig.model(X)
    in_evaluation(rig)


def after_backward(rig: Rig) -> None:
    logits = rig.model(X)
    F.cross_entropy(logits, Y).backward()
    rig.cbp.observe(logits, Y)


def another_model(rig: Rig) -> None:
    rig.model(X)
    rig.cbp.observe(mlp()(X), Y)


def another_model_alone(rig: Rig) -> None:
    rig.cbp.observe(mlp()(X), Y)


def an_empty_batch(rig: Rig) -> None:
    rig.cbp.observe(rig.model(X[:0]), Y[:0])


TARGETS = [
    ("too short", Y[:3], ValueError, ("target", "(3,)", "(6, 3)", "expected", "(6,)")),
    ("too long", torch.cat([Y, Y]), ValueError, ("target", "(12,)", "(6, 3)", "expected", "(6,)")),
    ("a column", Y[:, None], ValueError, ("target", "(6, 1)", "(6, 3)", "expected", "(6,)")),
    ("a scalar", Y[0], ValueError, ("target", "()", "(6, 3)", "expected", "(6,)")),
    ("one-hot integers", F.one_hot(Y), (ValueError, TypeError), ("target", "(6, 3)", "(6,)|float|prob")),
    ("a class too large", Y + 1, ValueError, ("target", "3", "0 to 2", "-100")),
    ("a negative class", Y - 1, ValueError, ("target", "-1", "0 to 2", "-100")),
    ("a class too large among ignored", Y.where(Y != 0, -100) + (Y == 2), ValueError, ("target", "3", "0 to 2")),
    ("floats", Y.float(), TypeError, ("target", "float32", "integer", "score=")),
    ("bools", Y.bool(), TypeError, ("target", "bool", "integer")),
    ("complex", Y.to(torch.complex64), TypeError, ("target", "complex64", "integer")),
    ("a list", Y.tolist(), TypeError, ("target", "tensor", "list")),
    ("an array", Y.numpy(), TypeError, ("target", "tensor", "ndarray")),
    ("missing", None, ValueError, ("target", "score=")),
]

OBSERVATIONS = [(f"target is {name}", see(itself, target), *rest) for name, target, *rest in TARGETS]
OBSERVATIONS += [
    ("logits are an output object", see(CausalLMOutput, Y), TypeError, ("logits", "CausalLMOutput", ".logits")),
    ("logits are a tuple", see(lambda z: (z,), Y), TypeError, ("logits", "tensor", "tuple")),
    ("logits are an array", see(lambda z: z.detach().numpy(), Y), TypeError, ("logits", "tensor", "ndarray")),
    ("logits are a vector", see(lambda z: z[:, 0], Y), ValueError, ("logits", "(6,)", "(batch, classes)", "score=")),
    ("logits are a loss", see(lambda z: z.sum(), Y), ValueError, ("logits", "()", "(batch, classes)", "score=")),
    ("logits are integers", see(lambda z: z.long(), Y), TypeError, ("logits", "int64", "floating point")),
    ("logits are predictions", see(lambda z: z.argmax(1), Y), TypeError, ("logits", "int64", "floating point")),
    ("logits are detached", see(Tensor.detach, Y), gxd.ObservationError, ("logits", "no graph", "detached")),
    ("logits without gradients", without_graph, gxd.ObservationError, ("logits", "no graph", "no_grad")),
    ("nothing is given", see(), ValueError, ("logits", "target", "score=")),
    ("only a target", see(None, Y), ValueError, ("logits", "score=")),
    ("score and logits", see(itself, score=lambda z: z.sum(1)), ValueError, ("score=", "logits", "one or the other")),
    ("score and target", see(None, Y, score=itself), ValueError, ("score=", "target", "one or the other")),
    ("score is a number", see(score=1.5), TypeError, ("score", "tensor", "float")),
    ("score is integers", see(score=lambda z: z.long()), TypeError, ("score", "int64", "floating point")),
    ("score is detached", see(score=Tensor.detach), gxd.ObservationError, ("score", "no graph", "detached")),
    ("no training pass", in_evaluation, gxd.ObservationError, ("training mode", "model.train()")),
    ("an evaluation pass", in_evaluation_after_training, gxd.ObservationError, ("model.train()|evaluation|eval()",)),
    ("after backward", after_backward, gxd.ObservationError, ("before loss.backward()", "freed")),
    ("another model", another_model, gxd.ObservationError, ("depends on no unit", "output", "model")),
    ("another model alone", another_model_alone, gxd.ObservationError, ("no training forward pass", "model.train()")),
    ("an empty batch", an_empty_batch, (gxd.ObservationError, ValueError), ("empty|no example",)),
]


@pytest.mark.parametrize(("call", "exception", "words"), named(OBSERVATIONS))
def test_a_wrong_observation_is_refused_and_a_right_one_is_then_taken(call, exception, words):
    rig, other = attach(), attach()
    before, weights = rig.cbp.state_dict(), snapshot(rig.model, rig.optimizer)
    refused(lambda: call(rig), exception, words)
    assert same(rig.cbp.state_dict(), before)
    assert same(snapshot(rig.model, rig.optimizer), weights)
    rig.train()
    other.train()
    assert same(rig.cbp.utilities(), other.cbp.utilities())
    assert same(rig.cbp.references(), other.cbp.references())


@pytest.mark.parametrize("utility", ["gxi", "gxd_sketch", "gxd_all_logit"])
@pytest.mark.parametrize(
    "name", ["logits are a tuple", "logits are a vector", "logits are detached", "nothing is given"]
)
def test_every_utility_that_is_observed_checks_its_logits(utility, name):
    _, call, exception, words = next(row for row in OBSERVATIONS if row[0] == name)
    refused(lambda: call(attach(utility)), exception, words)


def test_the_target_of_gxd_all_logit_must_be_a_tensor():
    call = see(itself, Y.tolist())
    refused(lambda: call(attach("gxd_all_logit")), TypeError, ("target", "tensor", "list"))


def test_gxd_all_logit_does_not_guess_which_of_several_axes_holds_the_classes():
    rig = attach("gxd_all_logit")
    logits = rig.model(X.view(2, 3, 4))  # (batch, tokens, classes), or (batch, classes, positions)?
    refused(lambda: rig.cbp.observe(logits), ValueError, ("target", "class"))


def test_an_observation_after_close_is_refused():
    for utility in ("gxd", "activation"):
        rig = attach(utility)
        logits = rig.model(X)
        rig.cbp.close()
        rig.cbp.close()  # twice is fine
        refused(lambda rig=rig, z=logits: rig.cbp.observe(z, Y), gxd.ObservationError, ("close()", "make a new one"))


@pytest.mark.parametrize("utility", OBSERVED)
def test_a_second_observation_of_a_forward_pass_is_refused_and_not_counted(utility):
    rig, once = attach(utility), attach(utility)
    logits = rig.model(X)
    rig.cbp.observe(logits, Y)
    before = {key: value for key, value in rig.cbp.state_dict().items() if key != "noise"}
    with pytest.raises(gxd.ObservationError):
        rig.cbp.observe(logits, Y)
    assert same({key: value for key, value in rig.cbp.state_dict().items() if key != "noise"}, before)
    F.cross_entropy(logits, Y).backward()
    rig.optimizer.step()
    once.train()
    assert same(rig.cbp.utilities(), once.cbp.utilities())
    assert same(rig.cbp.references(), once.cbp.references())


@pytest.mark.parametrize("passes", [1, 2])
def test_the_error_of_a_second_observation_says_that_there_was_a_first(passes):
    rig = attach()
    logits, *_ = [rig.model(X) for _ in range(passes)]
    rig.cbp.observe(logits, Y)
    refused(lambda: rig.cbp.observe(logits, Y), gxd.ObservationError, ("once|already|twice",))


@pytest.mark.parametrize("utility", LOCAL)
def test_a_local_utility_does_not_mind_being_observed_twice(utility):
    rig, never = attach(utility), attach(utility)
    logits = rig.model(X)
    rig.cbp.observe(logits, Y)
    rig.cbp.observe(logits, Y)
    F.cross_entropy(logits, Y).backward()
    rig.optimizer.step()
    never.train(observe=False)
    assert same(rig.cbp.utilities(), never.cbp.utilities())


# --- optimizer.step() -------------------------------------------------------------------------------------------------


def step_alone(rig: Rig) -> None:
    rig.optimizer.step()


def step_without_observe(rig: Rig) -> None:
    rig.train(observe=False)


def step_in_evaluation(rig: Rig) -> None:
    rig.model.eval()
    try:
        rig.train(observe=False)
    finally:
        rig.model.train()


def step_without_backward(rig: Rig) -> None:
    rig.model(X)
    rig.optimizer.step()


def step_with_an_empty_batch(rig: Rig) -> None:
    rig.train(X[:0], Y[:0], observe=False)


UPDATED = "parameters were updated"
STEPS = [
    (f"{u}, not observed", u, step_without_observe, (f"'{u}'", "observe(logits, target)", UPDATED)) for u in OBSERVED
]
STEPS += [(f"{u}, no forward pass", u, step_alone, ("training forward pass", "model.train()", UPDATED)) for u in LOCAL]
STEPS += [
    (f"{u}, evaluation", u, step_in_evaluation, ("training forward pass", "model.train()", UPDATED)) for u in LOCAL
]
STEPS += [
    ("loss_gradient, no forward pass", "loss_gradient", step_alone, ("training forward pass", "model.train()")),
    ("loss_gradient, no backward pass", "loss_gradient", step_without_backward, ("backward",)),
    ("activation, an empty batch", "activation", step_with_an_empty_batch, ("empty|no example",)),
    ("loss_gradient, an empty batch", "loss_gradient", step_with_an_empty_batch, ("empty|no example",)),
]


@pytest.mark.parametrize(("utility", "call", "words"), named(STEPS))
def test_a_step_without_an_observation_is_an_error_and_no_unit_ages_or_is_reset(utility, call, words):
    rig = attach(utility, replacement_rate=1.0, maturity=0)
    message = refused(lambda: call(rig), gxd.ObservationError, ())
    assert all(not ages.any() for ages in rig.cbp.ages().values())
    assert rig.cbp.total_resets == 0
    rig.train()
    assert rig.cbp.total_resets == 11
    for word in words:
        assert any(one in message for one in word.split("|")), f"{message!r} does not say {word!r}"


def test_a_step_that_was_refused_leaves_no_value_of_its_batch_in_the_statistics():
    rig, other = attach(), attach()
    with pytest.raises(gxd.ObservationError):
        rig.model(X * 100)
        rig.optimizer.step()
    rig.train()
    other.train()
    assert same(rig.cbp.references(), other.cbp.references())


class OutOfMemory(RuntimeError):
    """What a forward pass may raise and a training loop may catch."""


def forward_that_raises(rig: Rig, layer: str) -> None:
    def fail(*_: Any) -> None:
        raise OutOfMemory

    handle = getattr(rig.model, layer).register_forward_hook(fail)
    with pytest.raises(OutOfMemory):
        rig.model(X * 100)
    handle.remove()


@pytest.mark.parametrize("layer", ["fc1", "fc2", "head"])
@pytest.mark.parametrize("when", ["before", "after", "twice"])
@pytest.mark.parametrize("utility", ["gxd", "gxd_all_logit", "activation", "loss_gradient"])
def test_a_forward_pass_that_raises_leaves_no_trace(utility, when, layer):
    rig, clean = attach(utility), attach(utility)
    if when != "after":
        forward_that_raises(rig, layer)
    logits = rig.model(X)
    if when != "before":
        forward_that_raises(rig, layer)
    rig.cbp.observe(logits, Y)
    F.cross_entropy(logits, Y).backward()
    rig.optimizer.step()
    clean.train()
    assert same(rig.cbp.utilities(), clean.cbp.utilities())
    assert same(rig.cbp.references(), clean.cbp.references())
    assert same(rig.cbp.ages(), clean.cbp.ages())


@pytest.mark.parametrize("layer", ["fc1", "head"])
@pytest.mark.parametrize("utility", ["gxd", "activation"])
def test_a_step_after_nothing_but_a_forward_pass_that_raised_is_an_error(utility, layer):
    rig = attach(utility)
    forward_that_raises(rig, layer)
    refused(rig.optimizer.step, gxd.ObservationError, ("optimizer.step() without",))
    rig.train()
    assert rig.cbp.ages()["fc1"].tolist() == [1] * 5


@pytest.mark.parametrize("utility", ["gxd", "activation"])
def test_a_consumer_that_was_replaced_is_noticed_and_no_unit_is_half_reset(utility):
    rig = attach(utility, replacement_rate=0.5, maturity=0)
    rig.model.head = nn.Linear(6, 3)  # a new head for a new task
    rig.optimizer.add_param_group({"params": list(rig.model.head.parameters())})
    try:
        rig.train()
    except (gxd.PlanError, gxd.ObservationError) as error:
        assert "head" in str(error)
    else:
        for unit in rig.cbp.last_resets.get("fc2", ()):
            assert not rig.model.head.weight[:, unit].any(), "fresh incoming weights, but the old outgoing ones"


# --- load_state_dict() ------------------------------------------------------------------------------------------------


@cache
def saved(utility: str = "gxd") -> dict[str, Any]:
    """The state of a run in full swing: units were reset, one micro-batch of the next step has been seen."""
    rig = attach(utility, replacement_rate=0.1, maturity=1)
    for _ in range(5):
        rig.train()
    rig.cbp.observe(rig.model(X), Y)
    assert rig.cbp.last_resets
    return rig.cbp.state_dict()


def paths(state: Any, depth: int = 3) -> Iterator[tuple[Any, ...]]:
    """The way to every part of a state, but not into ``last_resets``, whose keys vary."""
    keys = list(state) if isinstance(state, dict) else range(len(state)) if isinstance(state, list) else ()
    for key in keys if depth else ():
        yield (key,)
        if key != "last_resets":
            yield from ((key, *rest) for rest in paths(state[key], depth - 1) if "young" not in rest[:-1])


def damaged(path: tuple[Any, ...], *value: Any) -> dict[str, Any]:
    """The saved state without one of its parts, or with another value in its place."""
    state = copy.deepcopy(saved())
    part = state
    for key in path[:-1]:
        part = part[key]
    if value:
        part[path[-1]] = value[0]
    else:
        del part[path[-1]]
    return state


def refused_state(rig: Rig, state: Any, *words: str) -> None:
    """The state is refused with a PlanError, and the run goes on as if it had not been tried."""
    rig.train()
    before = rig.cbp.state_dict()
    refused(lambda: rig.cbp.load_state_dict(state), gxd.PlanError, words)
    assert same(rig.cbp.state_dict(), before)


@pytest.mark.parametrize("path", list(paths(saved())), ids=lambda path: ".".join(map(str, path)))
def test_a_truncated_state_is_refused_and_nothing_of_it_is_loaded(path):
    names = [str(key) for key in path if isinstance(key, str)]
    refused_state(attach(replacement_rate=0.1), damaged(path), names[-1])


@pytest.mark.parametrize("key", [key for key in saved() if key != "version"])
@pytest.mark.parametrize("value", [None, "x", torch.zeros(2)], ids=["None", "a string", "a short tensor"])
def test_a_state_with_a_part_of_the_wrong_kind_is_refused_and_nothing_of_it_is_loaded(key, value):
    refused_state(attach(replacement_rate=0.1), damaged((key,), value), key if key != "fingerprint" else "another plan")


OTHER_OBJECTS = [
    ("None", None, ("ContinualBackprop",)),
    ("a number", 3, ("ContinualBackprop",)),
    ("a path", "checkpoint.pt", ("ContinualBackprop", "lacks|str")),
    ("a list", [1, 2], ("ContinualBackprop", "lacks|list")),
    ("an empty dict", {}, ("ContinualBackprop", "lacks", "statistics")),
    ("the model's state", mlp().state_dict(), ("ContinualBackprop", "lacks", "statistics")),
    ("the optimizer's state", sgd(mlp()).state_dict(), ("ContinualBackprop", "lacks", "statistics")),
    ("the whole checkpoint", {"model": {}, "cbp": {}}, ("ContinualBackprop", "lacks", "statistics")),
    ("a newer version", damaged(("version",), 99), ("version 99", "gxd")),
]


@pytest.mark.parametrize(("state", "words"), named(OTHER_OBJECTS))
def test_what_is_not_a_state_of_ours_is_refused(state, words):
    refused_state(attach(), state, *words)


def test_the_state_of_another_model_is_refused_with_the_group_that_differs():
    other = attach(model=mlp(hidden=7), plan=plan_of(hidden=7))
    refused_state(attach(), other.cbp.state_dict(), "another model", "'fc1'", "7", "5")


def test_the_state_of_a_plan_with_other_groups_is_refused_with_the_group_that_is_missing():
    other = attach(plan=plan_of().select(exclude="fc2"))
    refused_state(attach(), other.cbp.state_dict(), "another", "plan", "'fc2'", "6")


def test_the_state_of_another_plan_with_the_same_names_is_refused():
    plans = [
        gxd.find_units(mlp(), groups=[gxd.hand_group("fc1", "fc2", columns=columns)])
        for columns in (FIVE, FIVE.flip(0))
    ]
    refused_state(attach(plan=plans[0]), attach(plan=plans[1]).cbp.state_dict(), "another plan", "same group names")


def test_the_state_of_another_utility_is_refused_with_both_names():
    refused_state(attach(), saved("gxi"), "'gxi'", "'gxd'")


def test_the_undamaged_state_is_loaded():
    rig = attach()
    rig.cbp.load_state_dict(saved())
    assert same(rig.cbp.state_dict(), saved())


# --- infinities and NaN -----------------------------------------------------------------------------------------------


def look(rig: Rig, x: Tensor) -> None:
    """A forward pass that is observed, and whose gradients are thrown away."""
    logits = rig.model(x)
    rig.cbp.observe(logits, Y)
    F.cross_entropy(logits, Y).backward()
    rig.optimizer.zero_grad()


def spoiled(value: float) -> Tensor:
    x = X.clone()
    x[2, 1] = value
    return x


@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("utility", [*LOCAL, *OBSERVED, "loss_gradient"])
def test_a_non_finite_batch_is_counted_and_leaves_no_trace_in_the_statistics(utility, value):
    rig, clean = attach(utility), attach(utility)
    rig.train()
    clean.train()
    utilities, references, ages = rig.cbp.utilities(), rig.cbp.references(), rig.cbp.ages()
    look(rig, spoiled(value))
    with pytest.warns(gxd.NonFiniteWarning, match=r"non-finite.*1 so far.*lower the learning rate"):
        rig.optimizer.step()
    assert rig.cbp.nonfinite_observations == 1
    assert same(rig.cbp.utilities(), utilities)
    assert same(rig.cbp.references(), references)
    assert same(rig.cbp.ages(), {name: age + 1 for name, age in ages.items()})
    if utility in ("random", "gxd_sketch"):
        return  # the directions drawn for the spoiled batch are gone
    rig.optimizer.load_state_dict(copy.deepcopy(clean.optimizer.state_dict()))
    rig.model.load_state_dict(clean.model.state_dict())
    for _ in range(3):
        rig.train()
        clean.train()
    assert same(rig.cbp.utilities(), clean.cbp.utilities())
    assert same(rig.cbp.references(), clean.cbp.references())
    assert rig.cbp.nonfinite_observations == 1


def test_an_infinite_gradient_alone_is_a_non_finite_observation():
    rig = attach()
    rig.cbp.observe(score=rig.model(X).sum(1) * INF)
    with pytest.warns(gxd.NonFiniteWarning):
        rig.optimizer.step()
    assert rig.cbp.nonfinite_observations == 1
    assert not any(reference.any() for reference in rig.cbp.references().values())


def test_a_spoiled_micro_batch_spoils_its_step_and_no_other():
    rig, clean = attach(), attach()
    look(rig, X)
    look(rig, spoiled(NAN))
    with pytest.warns(gxd.NonFiniteWarning):
        rig.optimizer.step()
    rig.train()
    clean.train()
    assert rig.cbp.nonfinite_observations == 1
    assert same(rig.cbp.utilities(), clean.cbp.utilities())
    assert same(rig.cbp.references(), clean.cbp.references())


def test_every_non_finite_observation_warns_and_a_finite_one_does_not(recwarn):
    rig = attach()
    for x in (spoiled(NAN), X, spoiled(INF), X):
        look(rig, x)
        rig.optimizer.step()
    warnings = [w for w in recwarn if issubclass(w.category, gxd.NonFiniteWarning)]
    assert [("1 so far" in str(w.message), "2 so far" in str(w.message)) for w in warnings] == [(1, 0), (0, 1)]


@pytest.mark.filterwarnings("ignore::gxd.NonFiniteWarning")
def test_a_reset_on_a_non_finite_step_moves_no_nan_into_the_model():
    rig = attach(replacement_rate=0.5, maturity=0)
    look(rig, X)
    rig.optimizer.step()
    look(rig, spoiled(NAN))
    rig.optimizer.step()
    assert rig.cbp.last_resets
    assert all(p.isfinite().all() for p in rig.model.parameters())


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
def test_a_utility_with_an_unknown_gradient_is_not_registered(gradient, own_registry):
    words = (f"gradient={gradient!r}", "'target'", "'sketch'", "'all'", "'loss'", "None")
    refused(lambda: gxd.register_utility("mine", gradient=gradient), ValueError, words)
    assert "mine" not in gxd.utilities()


def test_a_decorator_without_a_name_is_refused(own_registry):
    def mine(o):
        return o.views[0].h.mean((0, 1))

    refused(lambda: gxd.register_utility(mine), TypeError, ("name", "function|string|str"))


def test_a_utility_that_is_not_a_function_is_refused(own_registry):
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
def test_a_utility_that_returns_something_else_is_refused_with_what_it_returned(
    function, words, gradient, own_registry
):
    gxd.register_utility("mine", gradient=gradient)(function)
    rig = attach("mine", replacement_rate=1.0, maturity=0)
    refused(rig.train, (ValueError, TypeError), words)
    assert rig.cbp.total_resets == 0


@pytest.mark.parametrize("gradient", [None, "target", "loss"])
def test_an_exception_inside_a_utility_reaches_the_user_and_training_can_go_on(gradient, own_registry):
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


def test_a_micro_batch_whose_utility_failed_leaves_nothing_in_the_references(own_registry):
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


def test_a_utility_that_reads_a_gradient_it_did_not_ask_for_is_told_how_to_ask(own_registry):
    gxd.register_utility("mine")(lambda o: o.views[0].g.mean((0, 1)))
    refused(attach("mine").train, gxd.ObservationError, ("gradient", "register", "'target'", "'loss'"))


@pytest.mark.parametrize("value", [NAN, INF], ids=str)
def test_a_utility_that_returns_no_number_is_left_out_with_a_warning(value, own_registry):
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
def test_a_utility_may_return_numbers_of_any_precision(dtype, model_dtype, own_registry):
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
    refused(lambda: gxd.check(**arguments), exception, words)


@pytest.mark.parametrize("inputs", [X[:0], X * NAN, X * INF], ids=["empty", "nan", "inf"])
def test_a_check_on_outputs_that_say_nothing_is_not_passed(inputs):
    report = gxd.check(mlp(), inputs, plan=plan_of())
    assert {group.status for group in report.groups} == {"inconclusive"}


def test_an_unknown_group_of_a_report_is_a_key_error():
    report = gxd.check(mlp(), X, plan=plan_of())
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
