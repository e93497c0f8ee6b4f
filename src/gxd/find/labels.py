"""Labels: for every element of a tensor, which unit it carries and which example it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CONST = -2  # the same for every input: a parameter, a buffer, padding
FOREIGN = -1  # data that no unit of the plan carries: the input, attention scores, the sum of unlike things
UNKNOWN = -1  # for examples: it is not known which

_BIG = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Value:
    """What is known of one tensor of the graph. All label tensors have the tensor's shape, and are often expanded.

    Attributes:
        unit: the unit each element carries, or :data:`CONST` or :data:`FOREIGN`.
        example: the example each element belongs to, or :data:`UNKNOWN`.
        parameter: if the tensor is (a rearranged part of) a parameter: its name ...
        rows: ... and the index along the parameter's first axis that each element comes from.
        concrete: the tensor itself, where it does not depend on the input (index buffers, ``arange``).
    """

    unit: Tensor
    example: Tensor
    parameter: str | None = None
    rows: Tensor | None = None
    concrete: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.unit.shape

    def has_units(self) -> bool:
        return bool((self.unit >= 0).any())


def filled(shape: Sequence[int], unit: int, example: Tensor | None = None) -> Value:
    """A value whose elements all carry the same label."""
    if example is None:
        example = torch.tensor(UNKNOWN).expand(tuple(shape))
    return Value(torch.tensor(unit).expand(tuple(shape)), example)


def collapse(label: Tensor, dims: Sequence[int], ignore: int | None = CONST) -> tuple[Tensor, Tensor]:
    """The label that is common to all elements along ``dims`` (kept, with size 1), and where there is none.

    Elements labelled ``ignore`` do not count, unless there are no others.
    """
    if not dims or label.numel() == 0:
        return label, torch.zeros_like(label, dtype=torch.bool)
    low, high = label, label
    if ignore is not None and bool((label == ignore).any()):
        low = label.masked_fill(label == ignore, _BIG)
        high = label.masked_fill(label == ignore, -_BIG)
    low, high = low.amin(list(dims), keepdim=True), high.amax(list(dims), keepdim=True)
    mixed = low != high
    if ignore is not None:
        only_ignored = low == _BIG
        low, mixed = low.masked_fill(only_ignored, ignore), mixed & ~only_ignored
    return low, mixed


def agree(left: Tensor, right: Tensor) -> Tensor:
    """The example labels of a result with two operands: whichever is known, unless they contradict each other."""
    either = torch.where(left >= 0, left, right)
    return either.masked_fill((left >= 0) & (right >= 0) & (left != right), UNKNOWN)


class Units:
    """The units found so far: which are one and the same, and which cannot be reset."""

    def __init__(self) -> None:
        self.root = torch.zeros(0, dtype=torch.int64)
        self.code = torch.zeros(0, dtype=torch.int64)  # 0: fine, else 1 + index of the reason
        self.reasons: list[str] = []
        self.residual = torch.zeros(0, dtype=torch.bool)

    def __len__(self) -> int:
        return len(self.root)

    def new(self, count: int) -> Tensor:
        """Labels of ``count`` new units."""
        ids = torch.arange(len(self), len(self) + count)
        self.root = torch.cat([self.root, ids])
        self.code = torch.cat([self.code, torch.zeros(count, dtype=torch.int64)])
        self.residual = torch.cat([self.residual, torch.zeros(count, dtype=torch.bool)])
        return ids

    def block(self, labels: Tensor, reason: str, override: bool = False) -> None:
        """These units cannot be reset. The first reason given is kept, unless a later one says more."""
        ids = labels[labels >= 0].unique()
        if not override:
            ids = ids[self.code[ids] == 0]
        if len(ids):
            self.reasons.append(reason)
            self.code[ids] = len(self.reasons)

    def merge(self, left: Tensor, right: Tensor, residual: bool = False) -> None:
        """The units at the same position of the two label vectors are one unit."""
        if residual:
            self.residual[left] = self.residual[right] = True
        while True:
            low = torch.minimum(self.root[left], self.root[right])
            root = self.root.clone()
            root.scatter_reduce_(0, self.root[left], low, "amin")
            root.scatter_reduce_(0, self.root[right], low, "amin")
            root = root[root[self.root]]
            if torch.equal(root, self.root):
                return
            self.root = root

    def resolve(self, labels: Tensor) -> Tensor:
        """Labels with every unit replaced by its representative."""
        if len(self) == 0:
            return labels
        return torch.where(labels >= 0, self.root[labels.clamp(min=0)], labels)

    def merged(self, labels: Tensor) -> Tensor:
        """Where the (resolved) labels are of units that were merged from several."""
        counts = torch.bincount(self.root, minlength=max(1, len(self)))
        return (labels >= 0) & (counts[labels.clamp(min=0)] > 1)

    def settle(self) -> None:
        """A unit is blocked, or a residual coordinate, if one of those merged into it is."""
        codes = torch.zeros_like(self.code).scatter_reduce_(0, self.root, self.code, "amax")
        self.code = torch.where(self.code > 0, self.code, codes[self.root])
        flags = torch.zeros_like(self.code).scatter_reduce_(0, self.root, self.residual.long(), "amax")
        self.residual = flags[self.root].bool()
