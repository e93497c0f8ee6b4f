"""One training step, ``step(x, y) -> (loss, logits)``, both detached and on the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import gxd
from gxd.lab.config import Experiment

Loss = Callable[[Tensor, Tensor], Tensor]
Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def make_step(
    config: Experiment,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    cbp: gxd.ContinualBackprop | None,
) -> Step:
    """The step that the resolved config asks for: the compiled one if ``compile`` is yes."""
    if config.resolved().compile == "yes":
        return gxd.compiled_step(model, optimizer, loss, cbp)
    return eager_step(model, optimizer, loss, cbp)


def eager_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, cbp: gxd.ContinualBackprop | None = None
) -> Step:
    """The training loop of the README as a function."""

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(x)
        value = loss(logits, y)
        if cbp is not None:
            cbp.observe(logits, y)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach(), logits.detach()

    return step
