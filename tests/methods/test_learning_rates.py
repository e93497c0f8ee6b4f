"""Optimizers that size their steps themselves, and say lr=None: who can do without, and who says so before any step."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

import gxd
from tests.rig import X, Y, mlp, refused

# Who multiplies by the learning rate, and the options that make it unnecessary.
NEED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{name: ({"decoupled": True}, {"decoupled": False}) for name in ("l2", "l2_init", "spectral", "parseval")},
    "nap": ({}, {"affine": "project"}),
    "upgd": ({}, {"weight_decay": 0.0}),
    "shrink_and_perturb": ({"variant": "lop"}, {"variant": "lop", "decay": 0.0}),
}
# Those that act at the end of a task, or must be made to act within four steps.
LIVELY: dict[str, dict[str, Any]] = {"swr": {"every": 2}, "redo": {"every": 2}, "regrama": {"every": 2}}


class RelativeSteps(Optimizer):
    """As Adafactor's: the step is a share of the length of the parameter."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": None, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (0.01 * p.norm() / p.grad.norm().clamp(min=1e-9)))


def train(model: nn.Module, optimizer: Optimizer, attached: gxd.Attachment) -> None:
    for _ in range(4):
        optimizer.zero_grad()
        logits = model(X)
        attached.observe(logits, Y)
        F.cross_entropy(logits, Y).backward()
        optimizer.step()
    attached.boundary([(X, Y)], F.cross_entropy)
    assert all(p.isfinite().all() for p in model.parameters())


def model_for(name: str) -> nn.Module:
    model = mlp(norm=True)
    return gxd.injectable(model, "head") if name == "plasticity_injection" else model


@pytest.mark.parametrize("name", list(gxd.methods()))
def test_a_method_that_does_without_the_learning_rate_works(name: str):
    options = NEED[name][1] if name in NEED else LIVELY.get(name, {})
    model = model_for(name)
    optimizer = RelativeSteps(model.parameters())
    train(model, optimizer, gxd.attach(model, optimizer, gxd.method(name, **options), example_inputs=X))


@pytest.mark.parametrize("name", list(NEED))
def test_a_method_that_needs_it_says_so_before_any_step_with_the_group_and_the_remedy(name: str):
    model = mlp(norm=True)
    first, *rest = model.parameters()
    optimizer = RelativeSteps([{"params": [first], "lr": 0.1}, {"params": rest}])
    needed, without = NEED[name]
    (option, value), *_ = [pair for pair in without.items() if pair not in needed.items()]
    words = (f"{name} needs the learning rate of", "RelativeSteps", "group 1", "lr=None", "give the group an lr")
    refused(
        lambda: gxd.attach(model, optimizer, gxd.method(name, **needed)), gxd.PlanError, (*words, f"{option}={value!r}")
    )
    assert not optimizer._optimizer_step_post_hooks and not optimizer._optimizer_step_pre_hooks
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    train(model, optimizer, gxd.attach(model, optimizer, gxd.method(name, **needed)))


def test_only_the_groups_of_what_is_treated_need_one():
    """Weights by one optimizer, all else by another that says none; parseval is on weights."""
    model = mlp(norm=True)
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizers = [torch.optim.SGD(weights, 0.1), RelativeSteps(others)]
    attached = gxd.attach(model, optimizers, gxd.method("parseval"))
    F.cross_entropy(model(X), Y).backward()
    for optimizer in optimizers:
        optimizer.step()
    attached.close()
    with pytest.raises(gxd.PlanError, match=r"l2 needs the learning rate of 'fc1.bias'.*RelativeSteps"):
        gxd.attach(model, optimizers, gxd.method("l2"))


def test_what_is_frozen_may_be_trained_later_and_is_refused_too():
    model = mlp().requires_grad_(False)
    with pytest.raises(gxd.PlanError, match=r"l2 needs the learning rate of 'fc1.weight'"):
        gxd.attach(model, RelativeSteps(model.parameters()), gxd.method("l2"))


def test_a_rate_that_is_taken_away_later_is_named_as_the_reason():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    attached = gxd.attach(model, optimizer, gxd.method("l2"))
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(gxd.PlanError, match=r"the optimizer has no learning rate for 'fc1.weight'"):
        attached.stepped()


def test_a_group_without_the_key_has_no_learning_rate():
    model = mlp()
    optimizer = RelativeSteps(model.parameters())
    del optimizer.param_groups[0]["lr"]
    assert {one.lr for one in gxd.attach(model, optimizer).host.trained()} == {None}


@pytest.mark.parametrize("name", ["hare_and_tortoise", "swr", "fire", "shrink_and_perturb"])
def test_adafactor_with_relative_steps_is_an_optimizer_like_others(name: str):
    transformers = pytest.importorskip("transformers")
    model = mlp(norm=True)
    optimizer = transformers.Adafactor(model.parameters())
    train(model, optimizer, gxd.attach(model, optimizer, gxd.method(name, **LIVELY.get(name, {}))))
