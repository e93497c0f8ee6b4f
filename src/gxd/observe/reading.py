"""What consumers read, as numbers of units."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gxd.plan.units import View


class Reader:
    """Turns the input of a consumer into ``(examples, positions, units)``."""

    def __init__(self, view: View, positions: str) -> None:
        self.axis, self.batch_axis, self.fold = view.axis, view.batch_axis, view.fold
        self.separate = positions == "abs"
        self.n, self.k = view.columns.shape
        consecutive, tiled = view.columns.flatten(), view.columns.t().flatten()
        self.start = int(consecutive.min())
        straight = torch.arange(self.start, self.start + self.n * self.k)
        self.consecutive = torch.equal(consecutive, straight)
        self.index = None if self.consecutive or torch.equal(tiled, straight) else tiled
        one_each = self.consecutive and self.k == 1 and self.start == 0
        self.plain = one_each and self.axis == -1 and self.fold == "none" and not self.separate

    def __call__(self, tensor: Tensor, examples: int | None) -> Tensor:
        if self.plain and tensor.dim() == 2 and tensor.shape[1] == self.n:
            return tensor.unsqueeze(1)
        x = tensor.movedim(self.axis, -1) if self.axis != -1 else tensor
        if self.index is not None:
            self.index = self.index.to(x.device)
            x = x.index_select(-1, self.index)
        elif x.shape[-1] != self.n * self.k:
            x = x.narrow(-1, self.start, self.n * self.k)
        if self.k > 1:
            x = x.unflatten(-1, (self.n, self.k)).mT if self.consecutive else x.unflatten(-1, (self.k, self.n))
        if x.dim() > 2 or self.k > 1:
            x = self._examples_first(x, examples)
        elif x.dim() == 1:  # an unbatched vector
            x = x.unsqueeze(0)
        elif self.fold != "none":
            x = self._examples_first(x, examples)
        x = x.flatten(1, -2) if x.dim() > 2 else x.unsqueeze(1)
        return x.flatten(0, 1).unsqueeze(1) if self.separate else x

    def _examples_first(self, x: Tensor, examples: int | None) -> Tensor:
        axis = min(self.batch_axis, x.dim() - 2)
        rows = x.shape[axis]
        if self.fold != "none" and examples and rows % examples == 0:
            shape = (examples, rows // examples) if self.fold == "major" else (rows // examples, examples)
            x = x.unflatten(axis, shape)
            axis += self.fold == "minor"
        return x.movedim(axis, 0) if axis else x


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of one or more tensors of the same shape."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total
