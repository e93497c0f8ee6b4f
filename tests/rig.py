"""A small model in training, and how the tests of bad input look at what was refused.

A word of a table of theirs is looked for in the message, in any case; ``a|b`` is found if one of the two is.
"""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
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
FIVE = torch.arange(5)


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


class Gate(nn.Module):
    """Its path depends on its values, so that it cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x).relu()
        return self.fc2(h * 2 if h.sum() > 1 else h)


def look(rig: Rig, x: Tensor) -> None:
    """A forward pass that is observed, and whose gradients are thrown away."""
    logits = rig.model(x)
    rig.cbp.observe(logits, Y)
    F.cross_entropy(logits, Y).backward()
    rig.optimizer.zero_grad()
