"""What a reset does to the state of optimizers: gradients are forgotten, copies of weights written as they are."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gxd
from tests.optimizers import (
    MADGRAD,
    REFERENCES,
    UNITS,
    Kept,
    Lookahead,
    LookaheadInLists,
    MasterWeights,
    SGDScheduleFree,
    mlp,
    reset,
    reset_slices,
    train,
    without_gradient,
)

# --- copies of the weights --------------------------------------------------------------------------------------------

WITH_COPIES = {
    "asgd": lambda p: torch.optim.ASGD(p, 0.1, lambd=0.0),
    "schedule-free": SGDScheduleFree,
    "madgrad": MADGRAD,
    "lookahead": lambda p: Lookahead(torch.optim.Adam(p, 0.01)),
    "lookahead in lists": lambda p: LookaheadInLists(torch.optim.SGD(p, 0.1, momentum=0.9)),
    "master weights": MasterWeights,
}


def copies_of(optimizer: Any, p: Tensor) -> list[Tensor]:
    if isinstance(optimizer, LookaheadInLists):
        pairs = zip(optimizer.param_groups[0]["params"], optimizer.slow_weights[0])
        return [slow for parameter, slow in pairs if parameter is p]
    return [
        value for key, value in optimizer.state[p].items() if key in ("ax", "z", "x0", "slow_param", "master_param")
    ]


@pytest.mark.parametrize("name", WITH_COPIES)
def test_steps_without_gradient_do_not_undo_a_reset(name: str):
    model = mlp(torch.bfloat16 if name == "master weights" else torch.float32)
    optimizer = WITH_COPIES[name](model.parameters())
    train(model, optimizer)
    reset(model, optimizer)
    after = copy.deepcopy(model.state_dict())
    without_gradient(model, optimizer)
    for parameter, where in reset_slices(model):
        now = dict(model.named_parameters())[parameter].detach()
        torch.testing.assert_close(now[where], after[parameter][where], rtol=1e-5, atol=1e-7)
    for reader, layer in ((2, "0"), (4, "2")):
        assert not model[reader].weight[:, UNITS[layer]].any()  # not even nearly


@pytest.mark.parametrize("name", WITH_COPIES)
def test_a_copy_of_the_weights_is_written_as_the_weights_are(name: str):
    model = mlp()
    optimizer = WITH_COPIES[name](model.parameters())
    train(model, optimizer)
    before = {
        name: (p.detach().clone(), copy.deepcopy(copies_of(optimizer, p))) for name, p in model.named_parameters()
    }
    reset(model, optimizer)
    for parameter, where in reset_slices(model):
        p = dict(model.named_parameters())[parameter].detach()
        weight, copies = before[parameter]
        now = copies_of(optimizer, dict(model.named_parameters())[parameter])
        assert len(now) == 1
        for old, new in zip(copies, now):
            assert torch.equal(new[where], p[where])
            torch.testing.assert_close(new[~where] - old[~where], p[~where] - weight[~where])  # the compensation
    assert not torch.equal(model[4].bias, before["4.bias"][0])


def test_lookahead_has_its_own_state_written_and_the_moments_inside_cleared():
    model = mlp()
    optimizer = Lookahead(torch.optim.Adam(model.parameters(), 0.01))
    train(model, optimizer)
    before = copy.deepcopy({p: s["exp_avg"] for p, s in optimizer.optimizer.state.items()})
    reset(model, optimizer)
    for (_, where), p, old in zip(reset_slices(model), model.parameters(), before.values()):
        now = optimizer.optimizer.state[p]["exp_avg"]
        assert torch.equal(now, old.masked_fill(where, 0.0))


def test_a_copy_that_is_met_twice_gets_the_compensation_once():
    model = mlp()
    optimizer = LookaheadInLists(torch.optim.SGD(model.parameters(), 0.1))
    for p, slow in zip(model.parameters(), optimizer.slow_weights[0]):
        optimizer.state[p]["slow_param"] = slow
        optimizer.optimizer.state[p]["x0"] = p.detach()  # the parameter itself
    train(model, optimizer)
    slow, bias = optimizer.slow_weights[0][5].clone(), model[4].bias.detach().clone()
    shift = model[4].weight[:, 0].detach() * REFERENCES["2"][0]  # of the one unit that is reset
    reset(model, optimizer)
    torch.testing.assert_close(model[4].bias.detach(), bias + shift)
    torch.testing.assert_close(optimizer.slow_weights[0][5], slow + shift)


def test_weights_that_were_written_by_hand_are_what_copies_become():
    model = mlp()
    optimizer = MADGRAD(model.parameters())
    train(model, optimizer)
    with torch.no_grad():
        model[0].weight[2] = 0.25
    before = copy.deepcopy(optimizer.state[model[0].weight])
    gxd.reset_optimizer_state(optimizer, model[0].weight, [2])
    state = optimizer.state[model[0].weight]
    assert torch.all(state["x0"][2] == 0.25) and not state["s"][2].any() and not state["grad_sum_sq"][2].any()
    others = [0, 1, 3, 4, 5]
    assert all(torch.equal(state[key][others], before[key][others]) for key in state)


def test_an_anchor_kept_flat_or_as_one_number_is_written_too():
    class Prodigy(Kept):
        pass

    def keep(p: Tensor) -> dict[str, Any]:
        zero = p.dim() == 1  # as where biases begin with zero
        return {"p0": torch.tensor(0.0) if zero else p.detach().flatten().clone(), "s": torch.ones(p.numel())}

    model = mlp()
    optimizer = Prodigy(model.parameters(), keep)
    train(model, optimizer)
    before = {p: (p.detach().clone(), copy.deepcopy(optimizer.state[p])) for p in model.parameters()}
    reset(model, optimizer)
    for (_, where), p in zip(reset_slices(model), model.parameters()):
        weight, old = before[p]
        anchor = optimizer.state[p]["p0"].expand(p.numel()).view_as(p)
        assert torch.equal(anchor[where], p.detach()[where])
        shift = (p.detach() - weight)[~where]
        torch.testing.assert_close(anchor[~where] - old["p0"].expand(p.numel()).view_as(p)[~where], shift)
        assert torch.equal(optimizer.state[p]["s"].view_as(p), torch.ones_like(p).masked_fill(where, 0.0))


# --- memories of gradients --------------------------------------------------------------------------------------------

TORCH: dict[str, Any] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"momentum": 0.9}, {"momentum": 0.9, "fused": True}],
    "Adam": [{"amsgrad": True}, {"fused": True}, {"capturable": False, "foreach": True}],
    "Adagrad": [{"initial_accumulator_value": 0.3}],
    "RMSprop": [{"momentum": 0.9, "centered": True}],
    "ASGD": [{"lambd": 0.0}],
}


@pytest.mark.parametrize(
    ("name", "options"),
    [(n, o) for n in TORCH if n not in ("LBFGS", "SparseAdam") for o in OPTIONS.get(n, [{}])],
    ids=str,
)
def test_the_state_of_what_is_reset_is_that_of_a_new_parameter(name: str, options: dict[str, Any]):
    model = mlp()
    trained = [p for p in model.parameters() if p.dim() == 2 or name != "Muon"]
    optimizer = TORCH[name](trained, **options)
    train(model, optimizer)
    before = copy.deepcopy([optimizer.state[p] for p in trained])
    reset(model, optimizer)
    masks = [where for parameter, where in reset_slices(model) if parameter.endswith("weight") or name != "Muon"]
    for p, old, where in zip(trained, before, masks):
        new = nn.Parameter(p.detach().clone())
        new.grad = torch.zeros_like(new)
        fresh = TORCH[name]([new], **options)
        fresh.step()  # without a gradient, so that the state is what it begins with
        for key, value in optimizer.state[p].items():
            if isinstance(value, Tensor) and value.shape == p.shape:
                torch.testing.assert_close(value[where], fresh.state[new][key][where], rtol=0, atol=2e-8)
                if key != "ax":
                    assert torch.equal(value[~where], old[key][~where]), key
            elif isinstance(value, Tensor) and value.dim() == 2:  # factored: where every element of a line is reset
                lines = where.all(1 if value.shape[1] == 1 else 0, keepdim=True)
                assert torch.equal(value, old[key].where(~lines, fresh.state[new][key]))
            else:
                assert value == old[key], key


def test_all_optimizers_of_torch_are_known_or_refused_by_name():
    known = {"ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam"}
    known |= {"RMSprop", "Rprop", "SGD", "LBFGS", "SparseAdam"}
    assert set(TORCH) <= known, "a new optimizer: enter its state into the table"


def test_moments_factored_without_an_axis_are_cleared_where_they_have_the_slice():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, (3, 2)), nn.ReLU(), nn.Conv2d(4, 3, 1))

    def keep(p: Tensor) -> dict[str, Any]:
        shape = p.shape
        if len(shape) < 2:
            return {"exp_avg_sq": torch.ones(shape)}
        return {"exp_avg_sq_row": torch.ones(shape[:-1]), "exp_avg_sq_col": torch.ones(shape[:-2] + shape[-1:])}

    optimizer = Kept(model.parameters(), keep)
    plan = gxd.find_units(model, torch.randn(2, 2, 8, 8))
    model(torch.randn(2, 2, 8, 8)).square().mean().backward()
    optimizer.step()
    gxd.reset_units(model, plan, {"0": [1, 5], "2": [0]}, optimizer=optimizer)
    for key in ("exp_avg_sq_row", "exp_avg_sq_col"):  # (4, 6, 3) and (4, 6, 2)
        expected = torch.ones_like(optimizer.state[model[2].weight][key])
        expected[0], expected[:, [1, 5]] = 0.0, 0.0
        assert torch.equal(optimizer.state[model[2].weight][key], expected)


def test_one_number_of_a_parameter_of_one_element_is_a_counter_if_its_name_says_so():
    parameter = nn.Parameter(torch.ones(1))
    keep = lambda p: {"step": torch.tensor([7.0]), "exp_avg": torch.tensor([7.0]), "norm": torch.tensor([7.0])}
    optimizer = Kept([parameter], keep)
    parameter.grad = torch.ones(1)
    optimizer.step()
    gxd.reset_optimizer_state(optimizer, parameter, [0])
    assert {key: value.item() for key, value in optimizer.state[parameter].items()} == {
        "step": 7.0,
        "exp_avg": 0.0,
        "norm": 7.0,
    }


@pytest.mark.parametrize("policy", ["keep", "reset"])
@pytest.mark.parametrize("begin", [7, 7.0, torch.tensor(7.0), torch.tensor([7.0])], ids=str)
def test_counters_follow_the_policy_whatever_they_are_kept_in(policy: str, begin: Any):
    model = mlp()
    others = {"norm": 3.0, "name": "x", "none": None}
    optimizer = Kept(model.parameters(), lambda p: {"step": copy.deepcopy(begin), **others})
    train(model, optimizer, 1)
    reset(model, optimizer, step_policy=policy)
    for name, p in model.named_parameters():
        step = optimizer.state[p].pop("step")
        assert type(step) is type(begin) and float(step) == (0 if policy == "reset" and name != "4.bias" else 7)
        assert optimizer.state[p] == others
