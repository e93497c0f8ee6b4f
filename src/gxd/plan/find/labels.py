"""Labels: for every element of a tensor, which unit it carries and which example it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CONST = -2  # the same for every input: a parameter, a buffer, padding
FOREIGN = -1  # data that no unit of the plan carries: the input, attention scores, the sum of unlike things
STATISTIC = -3  # this and all below: a statistic of several units, by number (STATISTIC - number)
UNKNOWN = -1  # for examples: it is not known which

_BIG = torch.iinfo(torch.int64).max
_LARGE = 2**14  # labels: with fewer, it costs more to look than it saves


@dataclass(frozen=True)
class Value:
    """What is known of one tensor of the graph. All label tensors have the tensor's shape. They are expanded (stride 0)
    along the axes where they repeat, which are mostly the batch and the positions: see :func:`spread`.

    Attributes:
        unit: the unit each element carries, or :data:`CONST` or :data:`FOREIGN`, or the statistic that it is.
        example: the example each element belongs to, or :data:`UNKNOWN`.
        parameter: if the tensor is (a rearranged part of) a parameter: its name ...
        rows: ... and the index along the parameter's first axis that each element comes from.
        concrete: the tensor itself, where it does not depend on the input (index buffers, ``arange``).
        selected: if computed indices select it from a parameter (the weights of each token's experts): its name.
        norm: if the units have just been normalised by operations: the number of the norm that was noted.
    """

    unit: Tensor
    example: Tensor
    parameter: str | None = None
    rows: Tensor | None = None
    concrete: Tensor | None = None
    selected: str | None = None
    norm: int | None = None

    @property
    def shape(self) -> torch.Size:
        return self.unit.shape

    def has_units(self) -> bool:
        return bool((compact(self.unit)[0] >= 0).any())


def filled(shape: Sequence[int], unit: int, example: Tensor | None = None) -> Value:
    """A value whose elements all carry the same label."""
    if example is None:
        example = torch.tensor(UNKNOWN).expand(tuple(shape))
    return Value(torch.tensor(unit).expand(tuple(shape)), example)


def compact(*labels: Tensor) -> list[Tensor]:
    """Label tensors of one shape, with size 1 along every axis where all of them repeat."""
    first = labels[0]
    repeats = [all(label.stride(d) == 0 for label in labels) and first.shape[d] > 1 for d in range(first.dim())]
    if not any(repeats):
        return list(labels)
    index = tuple(slice(0, 1) if once else slice(None) for once in repeats)
    return [label[index] for label in labels]


def spread(function: Callable[..., Tensor], *labels: Tensor) -> Tensor:
    """A function that acts element by element, on label tensors of one shape: computed once along axes where they
    repeat, so that neither the batch nor the number of tokens costs anything.
    """
    return _tightened(function(*compact(*labels))).expand(labels[0].shape)


def _tightened(label: Tensor) -> Tensor:
    """With size 1 along the axes where large labels have come to be all the same: a class token that was joined to the
    others has been added to by the same layers.
    """
    if label.numel() > _LARGE:
        for d in range(label.dim()):
            if torch.equal(label.select(d, 0), label.select(d, -1)) and bool((label == label.narrow(d, 0, 1)).all()):
                label = label.narrow(d, 0, 1)
    return label


def regroup(label: Tensor, shape: Sequence[int]) -> Tensor:
    """``reshape`` that keeps the result expanded along the axes where the labels repeat."""
    if label.numel() == 0:
        return label.reshape(tuple(shape))
    narrow, sizes = [slice(None)] * label.dim(), list(shape)
    start = begin = 0
    while start < label.dim() or begin < len(shape):  # the next axes before and after that hold the same elements
        stop, end, before, after = start, begin, 1, 1
        while stop == start or before != after:
            if stop < label.dim() and before <= after:
                before, stop = before * label.shape[stop], stop + 1
            elif end < len(shape):
                after, end = after * shape[end], end + 1
            else:
                break
        stop, end = (label.dim(), len(shape)) if before != after else (stop, end)
        if all(label.stride(d) == 0 or label.shape[d] == 1 for d in range(start, stop)):
            narrow[start:stop] = [slice(0, 1)] * (stop - start)
            sizes[begin:end] = [1] * (end - begin)
        start, begin = stop, end
    return label[tuple(narrow)].reshape(sizes).expand(tuple(shape))


def collapse(label: Tensor, dims: Sequence[int], ignore: int | None = CONST) -> tuple[Tensor, Tensor]:
    """The label that is common to all elements along ``dims`` (kept, with size 1), and where there is none.

    Elements labelled ``ignore`` do not count, unless there are no others.
    """
    if not dims or label.numel() == 0:
        return label, torch.zeros((), dtype=torch.bool).expand(label.shape)
    shape = [1 if d in {dim % label.dim() for dim in dims} else size for d, size in enumerate(label.shape)]
    (small,) = compact(label)
    low, high = small, small
    if ignore is not None and bool((small == ignore).any()):
        low = small.masked_fill(small == ignore, _BIG)
        high = small.masked_fill(small == ignore, -_BIG)
    low, high = low.amin(list(dims), keepdim=True), high.amax(list(dims), keepdim=True)
    mixed = low != high
    if ignore is not None:
        only_ignored = low == _BIG
        low, mixed = low.masked_fill(only_ignored, ignore), mixed & ~only_ignored
    return low.expand(shape), mixed.expand(shape)


def where_clear(label: Tensor, unclear: Tensor, otherwise: int = FOREIGN) -> Tensor:
    """Labels, with those that are not clear replaced."""
    return spread(lambda one, mask: one.masked_fill(mask, otherwise), label, unclear.expand(label.shape))


def agree(left: Tensor, right: Tensor) -> Tensor:
    """The example labels of a result with two operands: whichever is known, unless they contradict each other."""

    def either(one: Tensor, two: Tensor) -> Tensor:
        clash = (one >= 0) & (two >= 0) & (one != two)
        return torch.where(one >= 0, one, two).masked_fill(clash, UNKNOWN)

    return spread(either, left, right)


@dataclass(frozen=True)
class Statistic:
    """A number made of several units (their mean, their norm). It may scale or shift the units it was made of, as in a
    norm; whatever else reads it reads them all.

    Attributes:
        members: the units.
        reason: why they cannot be reset, if something else reads it.
        total: the node whose sum it is; divided by that, units become shares of a whole, as by a softmax.
    """

    members: Tensor
    reason: str
    total: Any = None


class Units:
    """The units found so far: which are one and the same, and which cannot be reset."""

    def __init__(self) -> None:
        self.root = torch.zeros(0, dtype=torch.int64)
        self.code = torch.zeros(0, dtype=torch.int64)  # 0: fine, else 1 + index of the reason
        self.reasons: list[str] = []
        self.residual = torch.zeros(0, dtype=torch.bool)
        self.statistics: list[Statistic] = []

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
        for statistic in map(self.statistic, self.statistics_among(labels)):
            self.block(statistic.members, statistic.reason)
        ids = self.among(labels)
        if not override:
            ids = ids[self.code[ids] == 0]
        if len(ids):
            self.reasons.append(reason)
            self.code[ids] = len(self.reasons)

    def among(self, labels: Tensor) -> Tensor:
        """The units that are among these labels, each once, in order."""
        (labels,) = compact(labels)
        there = torch.zeros(len(self), dtype=torch.bool)
        there[labels[labels >= 0]] = True
        return there.nonzero().flatten()

    def new_statistic(self, statistic: Statistic) -> int:
        """The label of a new statistic."""
        self.statistics.append(statistic)
        return STATISTIC - len(self.statistics) + 1

    def statistic(self, label: int) -> Statistic:
        return self.statistics[STATISTIC - label]

    def statistics_among(self, labels: Tensor) -> list[int]:
        """The labels of statistics that are among these."""
        if not self.statistics:
            return []
        (labels,) = compact(labels)
        return labels[labels <= STATISTIC].unique().tolist()

    def partners(self, labels: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        """For every unit the lowest and the highest of those that stand at its places in ``others``."""
        low = torch.full((len(self),), _BIG).scatter_reduce_(0, labels, others, "amin")
        return low, torch.full((len(self),), -1).scatter_reduce_(0, labels, others, "amax")

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
        return spread(lambda some: torch.where(some >= 0, self.root[some.clamp(min=0)], some), labels)

    def merged(self, labels: Tensor) -> Tensor:
        """Where the (resolved) labels are of units that were merged from several."""
        counts = torch.bincount(self.root, minlength=max(1, len(self)))
        return spread(lambda some: (some >= 0) & (counts[some.clamp(min=0)] > 1), labels)

    def settle(self) -> None:
        """A unit is blocked, or a residual coordinate, if one of those merged into it is."""
        codes = torch.zeros_like(self.code).scatter_reduce_(0, self.root, self.code, "amax")
        self.code = torch.where(self.code > 0, self.code, codes[self.root])
        flags = torch.zeros_like(self.code).scatter_reduce_(0, self.root, self.residual.long(), "amax")
        self.residual = flags[self.root].bool()
