"""A small net in training with groups of different learning rates, and penalties by hand: as equations that autograd
differentiates.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd

X = torch.randn(6, 2, 4, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn = nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.fc, self.ln, self.head = nn.Linear(16, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.ln(self.fc(F.relu(self.bn(self.conv(x))).flatten(1)))))


def groups(model: Net) -> list[dict[str, Any]]:
    """Of different learning rates."""
    rest = [p for name, p in model.named_parameters() if not name.startswith("head")]
    return [{"params": rest}, {"params": list(model.head.parameters()), "lr": 0.4}]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "fused": partial(torch.optim.Adam, lr=0.01, fused=True),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, before: Callable[[], None] = lambda: None) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(X.to(next(model.parameters()).dtype)), Y).backward()
    before()
    optimizer.step()


@torch.enable_grad()
def loss_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """As the closure of a step."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(X), Y)
    loss.backward()
    return loss


def lr_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> float:
    return next(float(g["lr"]) for g in optimizer.param_groups if any(p is parameter for p in g["params"]))


def attached(
    name: str, optimizer: str, prepare: Callable[[Net], object] = lambda model: None, **options: Any
) -> tuple[Net, torch.optim.Optimizer, gxd.Attachment]:
    """A method on the net, by name; in float64, for Adam makes much of little differences."""
    model = Net().double()
    prepare(model)
    made = OPTIMIZERS[optimizer](groups(model))
    return model, made, gxd.attach(model, made, gxd.method(name, **options))


class Penalised:
    """The net with a penalty by hand: ``equation(parameters by name)``, in the loss or decoupled."""

    def __init__(
        self,
        optimizer: str,
        equation: Callable[[dict[str, nn.Parameter]], Tensor],
        decoupled: bool,
        strength: float,
        prepare: Callable[[Net], object] = lambda model: None,
    ) -> None:
        self.model = Net().double()
        prepare(self.model)
        self.named = dict(self.model.named_parameters())
        self.optimizer = OPTIMIZERS[optimizer](groups(self.model))
        self.equation, self.decoupled, self.strength = equation, decoupled, strength

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(X.double()), Y)
        (loss if self.decoupled else loss + self.strength * self.equation(self.named)).backward()
        self.optimizer.step()
        if self.decoupled:
            parameters = list(self.named.values())
            gradients = torch.autograd.grad(self.equation(self.named), parameters, allow_unused=True)
            with torch.no_grad():
                for p, gradient in zip(parameters, gradients, strict=True):
                    if gradient is not None:
                        p -= lr_of(self.optimizer, p) * self.strength * gradient


def goes_where_the_equation_says(
    name: str,
    optimizer: str,
    decoupled: bool,
    equation: Callable[[dict[str, nn.Parameter]], Tensor],
    strength: float,
    prepare: Callable[[Net], object] = lambda model: None,
    moved: Callable[[Net], object] = lambda model: None,
    tolerance: float = 1e-9,
    **options: Any,
) -> None:
    """Six steps of a method and of the penalty by hand; a learning rate changes on the way.

    Args:
        prepare, moved: what becomes of the net before the method is attached, and after.
    """
    naive = Penalised(optimizer, equation, decoupled, strength, prepare)
    model, made, _ = attached(name, optimizer, prepare, strength=strength, decoupled=decoupled, **options)
    for one in (model, naive.model):
        moved(one)
    for number in range(6):
        if number == 3:
            for optimizers in (made, naive.optimizer):
                optimizers.param_groups[0]["lr"] *= 0.5
        step(model, made)
        naive.step()
    torch.testing.assert_close(model.state_dict(), naive.model.state_dict(), rtol=tolerance, atol=tolerance)
