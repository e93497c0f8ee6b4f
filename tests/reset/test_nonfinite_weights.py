"""Weights that are not finite: a reset puts them right, and nothing spreads them to what is finite."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gxd
from gxd.reset.writes import AlongAxis, Write
from gxd.testing.case import lively
from gxd.testing.training import Net, batch, new_task, plan_of

PLAN = plan_of(torch.float32)
BAD = pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
WEIGHTS = ["conv.weight", "fc1.weight", "fc2.weight", "head.weight", "norm.weight", "bn.running_mean"]


def spoil(model: torch.nn.Module, name: str, bad: float) -> None:
    with torch.no_grad():
        model.state_dict()[name].view(-1)[0] = bad


def spoiled(model: torch.nn.Module, before: dict[str, Tensor]) -> list[str]:
    """What holds an element that was finite before, and is not now."""
    return [n for n, t in model.state_dict().items() if bool((before[n].isfinite() & ~t.isfinite()).any())]


@BAD
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_reset_of_a_unit_whose_weights_are_not_finite_leaves_finite_weights(name: str, bad: float):
    model = Net()
    spoil(model, name, bad)
    means = {group.name: torch.ones(group.size) for group in PLAN.groups}
    gxd.reset_units(model, PLAN, {group.name: [0] for group in PLAN.groups}, references=means)
    assert all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())
    whole, reference = Net(), Net()
    gxd.reset_units(whole, PLAN, {"fc2": [1]}, references=means)
    spoil(reference, "head.weight", bad)  # of another unit
    gxd.reset_units(reference, PLAN, {"fc2": [1]}, references=means)
    assert torch.equal(whole.head.bias, reference.head.bias), "what is finite is compensated"


def test_a_bias_in_sixteen_bits_does_not_overflow():
    model = Net().half()
    with torch.no_grad():
        model.head.weight.fill_(60_000.0)
    gxd.reset_units(model, PLAN, {"fc2": [0, 1]}, references={"fc2": torch.full((8,), 9.0)})
    assert model.head.bias.isfinite().all()


@BAD
def test_a_unit_that_a_soft_selector_resets_all_the_way_is_finite_again(bad: float):
    write = Write(torch.tensor([bad, 2.0]), AlongAxis(0, torch.tensor([0, 1])), 3.0)
    write.amount = torch.tensor([1.0, 0.5])
    write.write()
    assert write.tensor.tolist() == [3.0, 2.5]


@BAD
@pytest.mark.parametrize("when", [2, 5])
@pytest.mark.parametrize("method", gxd.methods())
def test_no_method_spreads_what_is_not_finite(method: str, when: int, bad: float):
    options = lively(gxd.methods()[method].options)
    for name in ("conv.weight", "fc1.weight", "fc2.weight", "norm.weight"):
        model = Net(0.0)
        optimizer = torch.optim.Adam(model.parameters(), 0.02)
        attached = gxd.attach(model, optimizer, gxd.method(method, **options), plan=PLAN)
        for step in range(when + 1):
            x, y = batch(step)
            logits = model(x)
            attached.observe(logits, y)
            F.cross_entropy(logits, y).backward()
            if step == when:
                spoil(model, name, bad)
            before = {n: t.clone() for n, t in model.state_dict().items()}
            optimizer.step()
            assert not spoiled(model, before), f"{name} in step {step}"
            optimizer.zero_grad()
        if method != "dash":  # which refuses
            attached.boundary(*new_task())
            assert not spoiled(model, before), f"{name} at the boundary"
        attached.close()


def test_a_weight_that_was_not_finite_for_a_while_is_averaged_again():
    model = Net(0.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    attached = gxd.attach(model, optimizer, "hare_and_tortoise")
    good = model.fc1.weight.detach().clone()
    spoil(model, "fc1.weight", math.nan)
    model.fc1.bias.grad = torch.zeros_like(model.fc1.bias)
    optimizer.step()
    with torch.no_grad():
        model.fc1.weight.copy_(good)
    attached.boundary()
    assert model.fc1.weight.isfinite().all()
    with attached.evaluating():
        assert model.fc1.weight.isfinite().all()
