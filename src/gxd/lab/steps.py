"""One training step, ``step(x, y) -> (loss, logits)``, both detached and on the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import gxd
from gxd.lab.experiments import Experiment

Loss = Callable[[Tensor, Tensor], Tensor]
Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def make_step(
    config: Experiment, model: nn.Module, optimizer: torch.optim.Optimizer, attached: gxd.Attachment | None
) -> Step:
    """The step that the resolved config asks for: the compiled one if ``compile`` is yes."""
    make = gxd.compiled_step if config.resolved().compile == "yes" else eager_step
    return make(model, optimizer, config.loss, attached, score=None if config.classifies else prediction)


def prediction(output: Tensor, target: Tensor) -> Tensor:
    """What a unit has an effect on in regression: the prediction itself."""
    return output


def eager_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    attached: gxd.Attachment | None = None,
    *,
    score: Loss | None = None,
) -> Step:
    """The training loop of the README as a function; arguments as for :func:`gxd.compiled_step`."""

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(x)
        value = loss(logits, y)
        if attached is not None and score is not None:
            attached.observe(score=score(logits, y))
        elif attached is not None:
            attached.observe(logits, y)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach(), logits.detach()

    return step
