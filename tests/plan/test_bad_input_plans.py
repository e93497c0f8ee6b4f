"""A wrong constructor, model, search or group by hand is refused, in words that name value and remedy."""

import ast
import copy
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd
from tests.rig import FIVE, INF, NAN, Gate, X, Y, attach, mlp, named, plan_of, refused, same, sgd

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


@pytest.mark.parametrize("given", ["zzz", None, 3, [], gxd.verify_plan], ids=["zzz", "None", "3", "[]", "a function"])
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
    ("plan is a list of groups", {"plan": [gxd.manual_group("fc1", "fc2")]}, TypeError, ("plan", "find_units", "list")),
    ("plan is a tensor", {"plan": X}, TypeError, ("plan", "find_units|example_inputs", "Tensor")),
    ("no plan and no inputs", {"plan": None}, ValueError, ("pass example_inputs=x[:2]", "plan")),
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


class Broken(Gate):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("the vocabulary is missing")


REMEDIES = ("example_inputs", "manual_group", "find_units")
UNTRACEABLE = [
    ("a path that depends on values", Gate, X, ("Gate", "data-dependent", *REMEDIES)),
    ("a forward that raises", Broken, X, ("Broken", "ValueError", "the vocabulary is missing", *REMEDIES)),
    ("inputs of a wrong shape", mlp, X[:, :3], ("Sequential", "[6, 3]|(6, 3)|6x3", *REMEDIES)),
    ("a keyword that forward has not", mlp, {"pixels": X}, ("Sequential", "pixels|input", *REMEDIES)),
    ("too many inputs", mlp, (X, X), ("Sequential", "argument", *REMEDIES)),
    ("no input", mlp, (), ("Sequential", "input", *REMEDIES)),
    ("a list of lists", mlp, [[X]], ("Sequential", "list", "tuple", *REMEDIES)),
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
    ("a group alone", {"groups": gxd.manual_group("fc1", "fc2")}, TypeError, ("groups", "list")),
    ("groups is a name", {"groups": "fc1"}, TypeError, ("groups", "manual_group", "str")),
    ("groups are tuples", {"groups": [("fc1", "fc2")]}, TypeError, ("groups", "manual_group", "tuple")),
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
    refused(lambda: gxd.find_units(model, groups=[gxd.manual_group(*names, **options)]), gxd.PlanError, words)


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
    call = lambda: gxd.find_units(mlp(), groups=[gxd.manual_group(*names, **options)])
    refused(call, (TypeError, ValueError), words)


def test_columns_may_be_given_as_a_list():
    plan = gxd.find_units(mlp(), groups=[gxd.manual_group("fc1", "fc2", columns=[[0], [1], [2], [3], [4]])])
    assert plan["fc1"].views[0].columns.tolist() == [[0], [1], [2], [3], [4]]


def test_two_groups_by_hand_of_the_same_producer_are_refused():
    groups = [gxd.manual_group("fc1", "fc2"), gxd.manual_group("fc1", "fc2")]
    refused(lambda: gxd.find_units(mlp(), groups=groups), gxd.PlanError, ("'fc1'", "twice|two|once"))


def test_a_frozen_producer_is_refused_by_hand_as_it_is_skipped_by_tracing():
    model = mlp()
    model.fc1.weight.requires_grad_(False)
    assert "fc1" not in [group.name for group in gxd.find_units(model, X).groups]
    call = lambda: gxd.find_units(model, groups=[gxd.manual_group("fc1", "fc2")])
    refused(call, gxd.PlanError, ("fc1", "frozen|requires_grad"))


def test_a_layer_whose_weight_is_computed_is_refused_by_hand():
    model = mlp()
    nn.utils.parametrizations.weight_norm(model.fc1)
    call = lambda: gxd.find_units(model, groups=[gxd.manual_group("fc1", "fc2")])
    refused(call, gxd.PlanError, ("'fc1'", "weight", "param"))


def one_parameter(one, other):
    other.weight = one.weight


def one_memory(one, other):
    """As tied autoencoders are often written."""
    other.weight.data = one.weight.data.t()


@pytest.mark.parametrize("tie", [one_parameter, one_memory])
def test_tied_weights_are_refused_traced_and_by_hand(tie):
    model = nn.Sequential(OrderedDict(fc1=nn.Linear(4, 4), relu=nn.ReLU(), fc2=nn.Linear(4, 4), fc3=nn.Linear(4, 4)))
    tie(model.fc2, model.fc3)
    plan = gxd.find_units(model, torch.zeros(2, 4))
    assert not plan.groups
    assert "tied weights: 'fc2.weight' and 'fc3.weight'" in str(plan)
    for names in (("fc1", "fc3"), ("fc2", "fc1")):
        call = lambda names=names: gxd.find_units(model, groups=[gxd.manual_group(*names)])
        refused(call, gxd.PlanError, ("tied weights", "'fc2.weight' and 'fc3.weight'"))


def test_parameters_that_lie_side_by_side_in_one_buffer_are_not_tied():
    model = mlp()
    parameters = list(model.parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters])
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.data = part.view_as(p)
    assert [group.name for group in gxd.find_units(model, torch.zeros(2, 4)).groups] == ["fc1", "fc2"]


def test_a_frozen_bias_is_not_written_by_a_hand_written_group():
    model = mlp()
    model.fc1.bias.requires_grad_(False)
    model.fc2.bias.requires_grad_(False)
    plan = gxd.find_units(model, groups=[gxd.manual_group("fc1", "fc2")])
    assert not {"fc1.bias", "fc2.bias"} & plan.shapes.keys()
    assert "its bias is frozen" in str(plan)


def test_the_reason_why_a_layer_has_no_group_is_part_of_the_error():
    plan = gxd.find_units(mlp(), torch.zeros(2, 4))
    with pytest.raises(KeyError, match="no group 'head' in the plan; it is not reset: output layer"):
        plan["head"]


def test_an_init_function_that_fails_is_refused_before_anything_is_reset():
    x = torch.zeros(2, 4)
    refused(lambda: gxd.find_units(mlp(), x, init={"fc1": lambda w: w.zero_()}), TypeError, ("'fc1'", "generator"))
    refused(lambda: gxd.find_units(mlp(), x, init=nn.init.kaiming_normal_), TypeError, ("init=", "dict"))
