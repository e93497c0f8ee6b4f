"""What a reset writes: a list that is complete before anything is written, and undone as a whole if a write fails."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gxd.plan.layouts import Layout
from gxd.sharded import is_sharded, local, part_of, region, summed, whole

SAMPLE = 64  # slices that the usual one is the mean of, about


class Slices(Protocol):
    """Which elements of a tensor are meant: of a parameter, or of any tensor that is laid out like it."""

    def read(self, tensor: Tensor) -> Tensor:
        """A copy of these elements."""

    def set(self, tensor: Tensor, value: Tensor | float) -> None:
        """Write a number, or what :meth:`read` would then return."""

    def belong_to(self, tensor: Tensor, shape: torch.Size) -> bool:
        """Whether a tensor that has size 1 along some axes of ``shape`` has these elements for itself. Where it has
        size 1 along the axis of the slices, all slices share what it holds.
        """

    def spread(self, amount: Tensor, tensor: Tensor) -> Tensor:
        """``(slices,)`` numbers, one per slice, on the device of a tensor, and shaped to go with what :meth:`read`
        returns.
        """


@dataclass(slots=True, eq=False)
class Whole:
    """All of a tensor."""

    def read(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone()

    def set(self, tensor: Tensor, value: Tensor | float) -> None:
        if isinstance(value, Tensor):
            tensor.copy_(value)
        else:
            tensor.fill_(value)

    def belong_to(self, tensor: Tensor, shape: torch.Size) -> bool:
        return True  # also what its rows, or its columns, share

    def spread(self, amount: Tensor, tensor: Tensor) -> Tensor:
        return amount.to(tensor)


@dataclass(slots=True, eq=False)
class AlongAxis:
    """The slices of these numbers along an axis."""

    axis: int
    index: Tensor

    def read(self, tensor: Tensor) -> Tensor:
        return tensor.index_select(self.axis, self._on(tensor))

    def set(self, tensor: Tensor, value: Tensor | float) -> None:
        if isinstance(value, Tensor):
            tensor.index_copy_(self.axis, self._on(tensor), value.to(tensor))
        else:
            tensor.index_fill_(self.axis, self._on(tensor), value)

    def _on(self, tensor: Tensor) -> Tensor:
        return self.index if self.index.device == tensor.device else self.index.to(tensor.device)

    def belong_to(self, tensor: Tensor, shape: torch.Size) -> bool:
        return tensor.shape[self.axis] == shape[self.axis]

    def spread(self, amount: Tensor, tensor: Tensor) -> Tensor:
        return amount.to(tensor).view(-1, *[1] * (tensor.dim() - self.axis - 1))


@dataclass(slots=True, eq=False)
class InBlocks:
    """The ``rows`` or ``columns`` of these numbers of a weight that counts them block by block."""

    layout: Layout
    kind: str
    index: Tensor

    def read(self, tensor: Tensor) -> Tensor:
        view, where = self._place(tensor)
        return view[where]

    def set(self, tensor: Tensor, value: Tensor | float) -> None:
        view, where = self._place(tensor)
        view[where] = value.to(view) if isinstance(value, Tensor) else value

    def belong_to(self, tensor: Tensor, shape: torch.Size) -> bool:
        return tensor.shape[:2] == shape[:2]

    def spread(self, amount: Tensor, tensor: Tensor) -> Tensor:
        return amount.to(tensor).view(-1, *[1] * (tensor.dim() - 1))

    def _place(self, tensor: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        return (self.layout.row if self.kind == "rows" else self.layout.column)(tensor, self.index)


@dataclass(slots=True, eq=False)
class Entries:
    """The elements of these numbers, counted through the whole tensor."""

    index: Tensor

    def read(self, tensor: Tensor) -> Tensor:
        return tensor[self._place(tensor)]

    def set(self, tensor: Tensor, value: Tensor | float) -> None:
        tensor[self._place(tensor)] = value.to(tensor) if isinstance(value, Tensor) else value

    def belong_to(self, tensor: Tensor, shape: torch.Size) -> bool:
        return tensor.shape == shape

    def spread(self, amount: Tensor, tensor: Tensor) -> Tensor:
        return amount.to(tensor)

    def _place(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Whatever the layout in memory is (channels last): no flat view."""
        index = self.index.to(tensor.device)
        return (index,) if tensor.dim() == 1 else torch.unravel_index(index, tensor.shape)


def read(where: Slices, tensor: Tensor) -> Tensor:
    """Some elements of a tensor, which processes may share out: on each of them, and all must ask."""
    if not is_sharded(tensor):
        return where.read(tensor)
    inside, entries = _in_shard(where, tensor)
    found = torch.zeros(inside.shape, dtype=tensor.dtype, device=tensor.device)
    found[inside] = entries.read(local(tensor))
    return summed(found, tensor)


def usual(where: Slices, tensor: Tensor) -> Tensor:
    """What slices like these hold, in the shape of ``where.read``: the mean over a sample of all slices."""
    full = whole(tensor)
    if isinstance(where, AlongAxis):
        slices = full.shape[where.axis]
        sample = torch.arange(0, slices, max(1, slices // SAMPLE), device=full.device)
        mean = full.index_select(where.axis, sample).mean(where.axis, keepdim=True)
    else:
        mean = full.mean()
    return mean.expand(where.read(full).shape)


def _in_shard(where: Slices, tensor: Tensor) -> tuple[Tensor, Entries]:
    """Which of some elements of a tensor lie in this process's shard, in the shape of ``where.read``; and where in the
    shard these are. Whatever the slices are, the places of their elements are read as their values would be.
    """
    inside: Any = True
    number: Any = 0
    here = local(tensor)
    for axis, part in enumerate(region(tensor)):
        places = torch.arange(tensor.shape[axis], device=tensor.device)
        place = where.read(places.view(-1, *[1] * (tensor.dim() - axis - 1)).expand(tensor.shape))
        inside = inside & (place >= part.start) & (place < part.stop)
        number = number * here.shape[axis] + place - part.start
    return inside, Entries(number[inside])


@dataclass(slots=True, eq=False)
class Write:
    """What becomes of some elements of a tensor.

    Attributes:
        value: what they are set to: a number, or a tensor as ``where.read`` returns it.
        times: if given, ``times * value`` is added to the whole tensor instead.
        amount: ``(slices,)`` if given, each slice goes only so far from what it is, when it is written, to the value.
        before: what ``where.read`` returns now, if that is known.
    """

    tensor: Tensor
    where: Slices
    value: Tensor | float
    times: float | None = None
    amount: Tensor | None = None
    before: Tensor | None = None

    @property
    def adds(self) -> bool:
        return self.times is not None

    def on(self, tensor: Tensor) -> Write:
        """The same write to another tensor that is laid out like this one: a copy of it."""
        return Write(tensor, self.where, self.value, self.times, self.amount)

    def here(self) -> Write:
        """The part of this write that falls into this process's shard, if the tensor is shared out."""
        if not is_sharded(self.tensor):
            return self
        tensor, value, amount = local(self.tensor), self.value, self.amount
        if isinstance(self.where, Whole):
            return Write(tensor, self.where, part_of(value, self.tensor), self.times, amount)
        inside, entries = _in_shard(self.where, self.tensor)
        if isinstance(value, Tensor):
            value = value.to(tensor)[inside]
        if amount is not None:
            amount = self.where.spread(amount, tensor).expand(inside.shape)[inside]
        return Write(tensor, entries, value, amount=amount)

    def old(self) -> Tensor:
        return self.where.read(self.tensor) if self.before is None else self.before

    def write(self) -> None:
        if self.times is not None:
            assert isinstance(self.value, Tensor)
            new = torch.add(self.tensor, self.value.to(self.tensor), alpha=self.times)
            # A weight that is not finite has no mean to move, and must not spread to what is.
            self.tensor.copy_(torch.where(new.isfinite(), new, self.tensor))
        elif self.amount is None:
            self.where.set(self.tensor, self.value)
        else:
            old, amount = self.where.read(self.tensor), self.where.spread(self.amount, self.tensor)
            value = self.value.to(old) if isinstance(self.value, Tensor) else torch.full_like(old, self.value)
            # All the way is the value itself: on the way from what is not finite there is no number.
            self.where.set(self.tensor, torch.where(amount == 1, value, torch.lerp(old, value, amount)))

    def undo(self, old: Tensor) -> None:
        self.where.set(self.tensor, old)


@dataclass(slots=True, eq=False)
class SetEntry:
    """A value of a dict that is replaced: a counter that is a plain number."""

    entries: MutableMapping[Any, Any]
    key: Any
    value: Any

    def here(self) -> SetEntry:
        return self

    def old(self) -> Any:
        return self.entries[self.key]

    def write(self) -> None:
        self.entries[self.key] = self.value

    def undo(self, old: Any) -> None:
        self.entries[self.key] = old


def carry_out(writes: Sequence[Write | SetEntry]) -> None:
    """Write all of it, in order; under ``no_grad``. If anything fails, or is interrupted, everything is as it was.

    Only the old values of what is written are kept meanwhile. They are read before anything is written.
    """
    here = [write.here() for write in writes]
    before = [write.old() for write in here]
    done = 0
    try:
        for write in here:
            done += 1
            write.write()
    except BaseException:
        last = done - 1
        for number in range(last, -1, -1):
            with suppress(*[Exception] if number == last else []):  # it may be that it cannot be written to at all
                here[number].undo(before[number])
        raise
