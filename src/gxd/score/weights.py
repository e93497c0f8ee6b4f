"""The sums of the absolute weights of units, for utilities that ask for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gxd.observe.reading import sum_of
from gxd.plan.layouts import AbsoluteSums
from gxd.plan.units import UnitPlan

Parts = list[list[tuple[str, AbsoluteSums]]]  # by view or group: of which weights


def outgoing_of(plan: UnitPlan) -> Parts:
    """By view."""
    return [
        [(c.weight, AbsoluteSums(c.layout, "columns", view.columns)) for c in view.consumers] for view in plan.views
    ]


def incoming_of(plan: UnitPlan) -> Parts:
    """By group."""
    return [
        [(p.weight, AbsoluteSums(p.layout, "rows", p.rows.unsqueeze(1))) for p in group.producers]
        for group in plan.groups
    ]


class WeightSums:
    """The sums over the weights as they are now.

    Args:
        tensors: the weights, by name.
        several: whether several processes train together. They may share out the weights, and then a sum waits for all
            of them: the first one that is asked for brings all others of its kind, in the order of the plan.
    """

    def __init__(self, parts: Parts, tensors: Mapping[str, Tensor], several: bool) -> None:
        self.parts, self.tensors, self.several = parts, tensors, several
        self.all: list[Tensor] | None = None

    def __call__(self, numbers: Sequence[int]) -> Tensor:
        """The sums of the views, or groups, of these numbers, side by side."""
        if self.several and self.all is None:
            self.all = [self._of(n) for n in range(len(self.parts))]
        return side_by_side([self._of(n) if self.all is None else self.all[n] for n in numbers])

    def _of(self, number: int) -> Tensor:
        return sum_of([sums(self.tensors[name]) for name, sums in self.parts[number]])


class Weights(NamedTuple):
    """The sums of the weights that lead out of the units, by view, and into them, by group."""

    outgoing: WeightSums
    incoming: WeightSums


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Along the last axis; one part is itself."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), -1)
