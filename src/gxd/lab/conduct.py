"""What a method must leave as it is: seen at the end of every task, and before the runs of the leaderboard at every
step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import gxd

MAY_NOT = "it changes {}, which a method may not"
EXAMPLES = "the examples that are learned"


class Conduct:
    """How all that is not a method's to change was before the methods were attached.

    They may write to the parameters that are trained, to what the optimizer remembers of them, and to what their
    ``also_changes`` name.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, methods: Sequence[gxd.Method]) -> None:
        self._model, self._optimizer, self._methods = model, optimizer, methods
        self._before = self._fixed()

    def broken(self) -> str:
        """What has been changed since, as a sentence; empty if nothing has."""
        now = self._fixed()
        return next((MAY_NOT.format(what) for what, value in self._before.items() if value != now[what]), "")

    def _fixed(self) -> dict[str, Any]:
        """In words -> what can be compared. It is cheap, for it is asked for at every task."""
        if not self._methods:
            return {}
        model, groups = self._model, self._optimizer.param_groups
        fixed: dict[str, Any] = {
            "which tensors are the parameters": [(n, id(p), p.shape, p.dtype) for n, p in model.named_parameters()],
            "which parameters are trained": [[id(p) for p in group["params"]] for group in groups],
            "the learning rate or another setting of the optimizer": [
                {name: value for name, value in group.items() if name != "params"} for group in groups
            ],
            "the training mode of the model": [module.training for module in model.modules()],
            "torch's global random state": torch.get_rng_state().numpy().tobytes(),
            "torch's default dtype": torch.get_default_dtype(),
            "whether torch computes gradients": torch.is_grad_enabled(),
        }
        if not any("requires_grad" in method.also_changes for method in self._methods):
            fixed["requires_grad of parameters"] = [p.requires_grad for p in model.parameters()]
        return fixed


@contextmanager
def torch_as_it_was() -> Iterator[None]:
    """What holds for all of torch in this process is after the block as it was before, whatever ran in it: what one
    method sets there must not reach the next run.
    """
    threads, dtype, gradients = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    chance = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)
        torch.set_rng_state(chance)
