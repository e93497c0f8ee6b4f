"""What is known of every unit, as plain data, and the one step of its running averages.

All units of all groups stand side by side in flat tensors, whatever the number of layers. A state is never written to:
each function returns a new one, so that a step that fails leaves the old one as it was.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gxd.plan.units import UnitPlan


class UnitState(NamedTuple):
    """Age, reference and utility of every unit.

    An average ``f`` and its weight ``w`` (the same average of ones) are read as ``f / w``. This equals ``f / (1 -
    eta**age)`` when every step was observed, and is right when some were not.

    Attributes:
        step: optimizer steps so far.
        birth: ``(units,)`` the step at which each unit was last reset.
        mean, mean_weight: ``(views,)`` running mean of h, one entry per view and unit.
        utility, utility_weight: ``(units,)`` running score.
        nonfinite: how many observations were left out.
        seen: ``(units,)`` which units the last update has seen; None: all of them.
    """

    step: int
    birth: Tensor
    mean: Tensor
    mean_weight: Tensor
    utility: Tensor
    utility_weight: Tensor
    nonfinite: Tensor
    seen: Tensor | None

    @classmethod
    def new(cls, plan: UnitPlan, device: torch.device, dtype: torch.dtype) -> UnitState:
        """Of units that nothing is known of."""
        units, views = plan.size, sum(len(group.views) * group.size for group in plan.groups)
        none_seen = torch.zeros(units, dtype=torch.bool, device=device)
        births = torch.zeros(units, dtype=torch.int64, device=device)
        mean, utility = (torch.zeros(n, dtype=dtype, device=device) for n in (views, units))
        none = torch.zeros((), dtype=torch.int64, device=device)
        return cls(0, births, mean, mean, utility, mean if views == units else utility, none, none_seen)

    def ages(self) -> Tensor:
        """``(units,)`` optimizer steps since each unit was reset."""
        return self.step - self.birth

    def references(self) -> Tensor:
        """``(views,)`` bias-corrected running mean of h; 0 before the first observation."""
        return corrected((self.mean, self.mean_weight))

    def utilities(self) -> Tensor:
        """``(units,)`` bias-corrected running score; 0 before the first observation."""
        return corrected((self.utility, self.utility_weight))


Average = tuple[Tensor, Tensor]  # and its weight


def averaged(average: Average, value: Tensor, seen: Tensor | None, decay: float, one: Tensor | None = None) -> Average:
    """``f <- eta f + (1 - eta) value`` and the same of its weight, where ``seen`` (None: everywhere). ``one``: a tensor
    that holds 1, if there is one at hand.
    """
    one = average[1].new_ones(()) if one is None else one
    if seen is None:
        return torch.lerp(average[0], value, 1 - decay), torch.lerp(average[1], one, 1 - decay)
    gain = (1 - decay) * seen.to(value.dtype)
    return torch.lerp(average[0], value, gain), torch.lerp(average[1], one.expand_as(gain), gain)


def corrected(average: Average) -> Tensor:
    """The value of an average; 0 where nothing was observed."""
    return (average[0] / average[1]).nan_to_num_(0.0)


def updated(state: UnitState, mean: Average, utility: Average, seen: Tensor | None, wait: bool) -> UnitState:
    """The state with new averages. If one of them holds an infinity or a NaN, that is counted, and they stay.

    Args:
        seen: which units were observed; None: all.
        wait: whether the host may look. Cheapest on the CPU; elsewhere it would wait for the device, and a trace has
            nothing to look at.
    """
    new = (*mean, *utility)
    nonfinite = state.nonfinite
    # A sum is finite if and only if all of its terms are, but for an overflow.
    if wait:
        if not math.isfinite(new[0].sum().item() + new[2].sum().item()):
            nonfinite, new = nonfinite + 1, state[2:6]
    else:
        finite = torch.isfinite(new[0].sum() + new[2].sum())
        nonfinite = nonfinite + ~finite
        new = tuple(torch.where(finite, n, o) for n, o in zip(new, state[2:6], strict=True))  # type: ignore[assignment]
    return UnitState(state.step, state.birth, *new, nonfinite, seen)


def forgotten(state: UnitState, units: Tensor, views: Tensor) -> UnitState:
    """The state with age, reference and utility of the units of these flat numbers at zero."""
    units, views = units.to(state.birth.device), views.to(state.birth.device)
    weight = state.mean_weight.index_fill(0, views, 0.0)
    shared = state.utility_weight is state.mean_weight  # every unit has one view, and was always seen
    return UnitState(
        state.step,
        state.birth.index_fill(0, units, state.step),
        state.mean.index_fill(0, views, 0.0),
        weight,
        state.utility.index_fill(0, units, 0.0),
        weight if shared else state.utility_weight.index_fill(0, units, 0.0),
        state.nonfinite,
        state.seen,
    )
