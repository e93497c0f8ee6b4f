"""Data of a task that begins, and gradients on it that leave no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from gxd.plan.find.trace import call_arguments
from gxd.processes import Processes
from gxd.sandbox.randomness import Apart
from gxd.sandbox.substitute import copies, run


class TaskData:
    """What was given to :meth:`gxd.Attachment.boundary`, checked.

    Args:
        batches: of ``(x, y)``.
        loss: ``loss(output, y)``.
    """

    def __init__(self, batches: Iterable[Any] | None, loss: Callable[[Any, Any], Tensor] | None) -> None:
        if isinstance(batches, Tensor) or not isinstance(batches, Iterable):
            raise TypeError(f"data must be batches (x, y), a list or a DataLoader, got {type(batches).__name__}")
        if not callable(loss):
            raise TypeError(f"loss must be a function of (output, y), as F.cross_entropy, got {type(loss).__name__}")
        self.batches, self.loss = batches, loss

    def check_repeatable(self, methods: Sequence[str]) -> None:
        """Raise ValueError if the batches can be gone through only once."""
        if iter(self.batches) is self.batches:
            raise ValueError(
                f"data is an iterator, which can be gone through once, and {', '.join(methods)} each need it: give a "
                "list or a DataLoader"
            )

    def gradients(self, model: nn.Module, names: Sequence[str], processes: Processes) -> Iterator[dict[str, Tensor]]:
        """Parameter name -> gradient, for each batch; of several processes the mean, over those that have one.

        The model runs in the modes it is in, on copies of its parameters and buffers.
        """
        tensors = copies(
            {
                **dict(model.named_parameters(remove_duplicate=False)),
                **dict(model.named_buffers(remove_duplicate=False)),
            }
        )
        wanted = [tensors[name] for name in names]
        apart = Apart()  # a loader that shuffles draws from the global generator
        with apart:
            rest = iter(self.batches)
        for number in count():
            with apart:
                batch = next(rest, None)
            having = torch.tensor(float(batch is not None), device=wanted[0].device if wanted else None)
            if not processes.sum(having):
                if not number:
                    raise ValueError("data holds no batch: give (x, y) batches of the task that begins")
                return
            if batch is None:
                found = [torch.zeros_like(tensor) for tensor in wanted]
            else:
                found = self._of_batch(model, tensors, wanted, batch, seed=2**16 * processes.rank + number)
            yield {name: processes.sum(one).div_(having) for name, one in zip(names, found, strict=True)}

    def _of_batch(
        self, model: nn.Module, tensors: dict[str, Tensor], wanted: list[Tensor], batch: Any, seed: int
    ) -> list[Tensor]:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise TypeError(f"data must hold pairs (x, y), got a {type(batch).__name__}")
        x, y = batch

        def differentiate(output: Any) -> Sequence[Tensor | None]:  # here, as a checkpointed segment runs once more
            loss = self.loss(output, y)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise ValueError(f"loss must return one number for a batch, a tensor, got {what}")
            return torch.autograd.grad(loss, wanted, allow_unused=True)

        found = run(model, tensors, call_arguments(x), seed, output=differentiate)
        return [torch.zeros_like(t) if one is None else one.detach() for t, one in zip(wanted, found, strict=True)]
