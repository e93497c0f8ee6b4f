"""A small training that a method is tried on: accumulated micro-batches, two parameter groups, the end of a task."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd

STEPS, PARTS = 6, 2


class Net(nn.Module):
    """Convolution and BatchNorm, Linear and LayerNorm, one without a norm; a shortcut that is prepared for an
    injection; a buffer, and a parameter that is frozen.
    """

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn = nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5)
        self.fc1, self.norm, self.fc2 = nn.Linear(20, 10), nn.LayerNorm(10), nn.Linear(10, 8)
        self.dropout, self.shortcut, self.head = nn.Dropout(dropout), nn.Linear(16, 3), nn.Linear(8, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("temperature", torch.tensor(2.0))
        gxd.injectable(self, "shortcut")

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn(self.conv(x))).flatten(1)
        h = self.dropout(torch.tanh(self.norm(self.fc1(h))))
        return (self.head(F.relu(self.fc2(h))) + self.shortcut(x.flatten(1))) * self.temperature + self.frozen


@cache
def plan_of(dtype: torch.dtype) -> gxd.UnitPlan:
    """Of that network."""
    return gxd.find_units(Net().to(dtype), torch.zeros(2, 1, 4, 4, dtype=dtype))


def batch(number: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    """The examples of a step, always the same."""
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randn(6, 1, 4, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)


def new_task(rank: int = 0, dtype: torch.dtype = torch.float32) -> tuple[list[tuple[Tensor, Tensor]], Any]:
    """What a method may ask for at a boundary."""
    return [(x.to(dtype), y) for x, y in (batch(number, rank) for number in (51, 52))], F.cross_entropy


class Training:
    """A model in training on accumulated micro-batches; the end of a task comes after the third step.

    Attributes:
        attached: what :func:`gxd.attach` returns; None without methods.
    """

    def __init__(
        self,
        *methods: gxd.Method,
        dtype: torch.dtype = torch.float32,
        dropout: float = 0.2,
        wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
        rank: int = 0,
    ) -> None:
        self.model, self.rank, self.dtype, self.wrap = Net(dropout).to(dtype), rank, dtype, wrap
        self.called, self.learns = wrap(self.model), self.what_learns()
        trained = [p for p in self.model.parameters() if p is not self.model.frozen]
        head = len(list(self.model.head.parameters()))
        groups: list[dict[str, Any]] = [{"params": trained[:-head]}, {"params": trained[-head:], "lr": 0.01}]
        self.optimizer = torch.optim.Adam(groups, 0.02)
        self.attached: Any = gxd.attach(self.called, self.optimizer, *methods, plan=plan_of(dtype)) if methods else None

    def what_learns(self) -> list[bool]:
        """Of all parameters."""
        return [p.requires_grad for p in self.model.parameters()]

    def pass_part(self, step: int, part: int, observe: bool = True) -> None:
        """A micro-batch, forward and backward."""
        x, y = (one.chunk(PARTS)[part] for one in batch(step, self.rank))
        torch.manual_seed(PARTS * step + part)  # of dropout
        logits = self.called(x.to(self.dtype))
        if self.attached is not None and observe:
            self.attached.observe(logits, y)
        (F.cross_entropy(logits, y) / PARTS).backward()

    def finish_step(self, step: int, boundary: bool = True) -> None:
        """Of the optimizer, and perhaps the end of a task."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        if boundary and self.attached is not None and step == 2:
            self.attached.boundary(*new_task(self.rank, self.dtype))
        if self.what_learns() != self.learns:  # which a wrapper notes when it is made
            self.called, self.learns = self.wrap(self.model), self.what_learns()

    def run(self, start: int = 0, stop: int = STEPS, observe: bool = True, boundary: bool = True) -> Training:
        """Some steps."""
        with warnings.catch_warnings():
            warnings.simplefilter("error", gxd.ObservationWarning)
            for step in range(start, stop):
                for part in range(PARTS):
                    self.pass_part(step, part, observe)
                self.finish_step(step, boundary)
        return self

    def load(self, other: Training) -> Training:
        """Go on from where another one is."""
        self.model.load_state_dict(other.model.state_dict())
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        for parameter, theirs in zip(self.model.parameters(), other.model.parameters(), strict=True):
            parameter.requires_grad_(theirs.requires_grad)
        return self

    @property
    def weights(self) -> dict[str, Any]:
        """Parameters, buffers, and what the optimizer remembers."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def state(self, method: int = -1) -> Any:
        """Of one of the methods, as it is saved."""
        return list(self.attached.state_dict()["methods"].values())[method]


@cache
def plain(dtype: torch.dtype = torch.float32) -> Training:
    """Without any method."""
    return Training(dtype=dtype).run()
