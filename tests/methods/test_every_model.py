"""Every registered method on a residual network with BatchNorm and on a transformer: it trains, or says why not.

A new method is covered without a line here, as in the contract.
"""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gxd
from gxd.testing import Case
from gxd.testing.laws import hooks_on
from tests.methods.contract import SELECTIONS, case_of, utility_cases
from tests.models import make
from tests.rig import same, snapshot

Batch = Callable[[], tuple[Tensor, Tensor]]
PLANS = ["resnet", "resnet_coordinates", "transformer"]  # residual="skip", residual="group", attention
OPTIMIZERS = {
    "adam": lambda model: torch.optim.Adam(model.parameters(), 0.01),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
}
STEPS = 6


def build(name: str, injectable: bool) -> tuple[nn.Module, Batch]:
    """With one unit that is dead, for those methods that look for such."""
    model, batch, _ = make(name)
    dead = (
        [model.up.weight[0], model.up.bias[:1], model.down.weight[:, 0]]
        if name == "transformer"
        else [model.block1.conv1.weight[0], model.block1.bn1.weight[:1], model.block1.conv2.weight[:, 0]]
    )
    with torch.no_grad():
        for part in dead:
            part.zero_()
    return gxd.injectable(model, "head") if injectable else model, batch


@cache
def plan_of(name: str, injectable: bool) -> gxd.UnitPlan:
    model, batch = build(name, injectable)
    return gxd.find_units(model, batch()[0], **make(name)[2])


def train(name: str, optimizer: str, method: gxd.Method | None, injectable: bool = False) -> tuple[nn.Module, int]:
    """A few steps, the end of a task among them. Returns the model, and how many units were reset."""
    model, batch = build(name, injectable)
    optimizer = OPTIMIZERS[optimizer](model)
    attached = None
    if method is not None:
        before, hooks = snapshot(model, optimizer), hooks_on(model, optimizer)
        try:
            attached = gxd.attach(model, optimizer, method, plan=plan_of(name, injectable))
        except gxd.PlanError:
            assert same(snapshot(model, optimizer), before) and hooks_on(model, optimizer) == hooks
            raise
    for step in range(STEPS):
        x, y = batch()
        logits = model(x)
        if attached is not None:
            attached.observe(logits, y)
        F.cross_entropy(logits, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        task = [batch() for _ in range(2)]
        if attached is not None and step == STEPS // 2:
            attached.boundary(task, F.cross_entropy)
    return model, 0 if attached is None else attached.total_resets


@cache
def plain(name: str, optimizer: str, injectable: bool) -> nn.Module:
    return train(name, optimizer, None, injectable)[0]


def acts(case: Case, name: str, optimizer: str, injectable: bool = False) -> None:
    model, resets = train(name, optimizer, case.make(), injectable)
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    assert not same(model.state_dict(), plain(name, optimizer, injectable).state_dict())
    if case.make().needs_units and not getattr(getattr(case.make(), "selector", None), "soft", False):
        assert resets > 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", PLANS)
@pytest.mark.parametrize("method", gxd.methods())
def test_every_method_acts_on_a_residual_network_and_a_transformer_or_says_what_to_do(method, model, optimizer) -> None:
    try:
        acts(case_of(method), model, optimizer)
    except gxd.PlanError as refused:  # and what it says is done
        assert str(refused).startswith(f"{method}: ") and "gxd.injectable(model, 'head')" in str(refused)
        acts(case_of(method), model, optimizer, injectable=True)


SCORES = [str(case).removeprefix("utility ") for case in utility_cases()]
PRODUCT = {
    **{f"utility {score}": case_of("continual_backprop", utility=score) for score in SCORES},
    **{
        f"selection {name}": case_of("unit_reset", **{"rate": None, "maturity": None, "selection": name, **options})
        for name, options in SELECTIONS.items()
    },
    "cpr on gxd": case_of("cpr", utility="gxd"),
    "swr by attribution": case_of("swr", score="attribution"),
}


@pytest.mark.parametrize("model", PLANS)
@pytest.mark.parametrize("case", PRODUCT.values(), ids=PRODUCT)
def test_every_score_and_every_selection_acts_on_them(case, model) -> None:
    acts(case, model, "adam")
