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
        scored: the last step that has shown units.
        gram: for each group ``(n, n)``, the running mean of ``e_i e_j``, the product of the effects of two units on an
            example; none if no selector asks for it.
    """

    step: int
    birth: Tensor
    mean: Tensor
    mean_weight: Tensor
    utility: Tensor
    utility_weight: Tensor
    nonfinite: Tensor
    seen: Tensor | None
    scored: int = 0
    gram: tuple[Tensor, ...] = ()

    @classmethod
    def new(cls, plan: UnitPlan, device: torch.device, dtype: torch.dtype, pairs: bool = False) -> UnitState:
        """Of units that nothing is known of. ``pairs``: with a Gram matrix of each group."""
        units, views = plan.size, sum(len(group.views) * group.size for group in plan.groups)
        none_seen = torch.zeros(units, dtype=torch.bool, device=device)
        births = torch.zeros(units, dtype=torch.int64, device=device)
        mean, utility = (torch.zeros(n, dtype=dtype, device=device) for n in (views, units))
        none = torch.zeros((), dtype=torch.int64, device=device)
        grams = [torch.zeros(group.size, group.size, dtype=dtype, device=device) for group in plan.groups if pairs]
        weight = mean if views == units else utility
        return cls(0, births, mean, mean, utility, weight, none, none_seen, 0, tuple(grams))

    def ages(self) -> Tensor:
        """``(units,)`` optimizer steps since each unit was reset."""
        return self.step - self.birth

    def references(self) -> Tensor:
        """``(views,)`` bias-corrected running mean of h; 0 before the first observation."""
        return corrected((self.mean, self.mean_weight))

    def utilities(self) -> Tensor:
        """``(units,)`` bias-corrected running score; 0 before the first observation."""
        return corrected((self.utility, self.utility_weight))

    def joint(self, group: int, units: slice) -> Tensor:
        """``(n, n)`` bias-corrected ``E[e_i e_j]`` of a group, whose units have these flat numbers; NaN where nothing
        was observed. A pair has been watched since the younger of the two was reset, so its weight is the smaller one.
        """
        weight = self.utility_weight[units]
        return self.gram[group] / torch.minimum(weight.unsqueeze(1), weight)


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


def updated(
    state: UnitState, mean: Average, utility: Average, gram: tuple[Tensor, ...], seen: Tensor | None, wait: bool
) -> UnitState:
    """The state with new averages. If one of them holds an infinity or a NaN, that is counted, and they stay.

    Args:
        seen: which units were observed; None: all.
        wait: whether the host may look. Cheapest on the CPU; elsewhere it would wait for the device, and a trace has
            nothing to look at.
    """
    new, old = (*mean, *utility, *gram), (*state[2:6], *state.gram)
    nonfinite = state.nonfinite
    # A sum is finite if and only if all of its terms are, but for an overflow.
    sums = [one.sum() for one in (new[0], new[2], *gram)]
    if wait:
        if not math.isfinite(sum(one.item() for one in sums)):
            nonfinite, new = nonfinite + 1, old
    else:
        finite = torch.isfinite(sum(sums[1:], sums[0]))
        nonfinite = nonfinite + ~finite
        new = tuple(torch.where(finite, n, o) for n, o in zip(new, old, strict=True))
    return UnitState(state.step, state.birth, new[0], new[1], new[2], new[3], nonfinite, seen, state.scored, new[4:])


def forgotten(state: UnitState, units: Tensor, views: Tensor) -> UnitState:
    """The state with age, reference and utility of the units of these flat numbers at zero."""
    units, views = units.to(state.birth.device), views.to(state.birth.device)
    weight = state.mean_weight.index_fill(0, views, 0.0)
    shared = state.utility_weight is state.mean_weight  # every unit has one view, and was always seen
    gram, start = [], 0
    for pairs in state.gram:
        own = units[(units >= start) & (units < start + len(pairs))] - start
        gram.append(pairs.index_fill(0, own, 0.0).index_fill(1, own, 0.0))
        start += len(pairs)
    return UnitState(
        state.step,
        state.birth.index_fill(0, units, state.step),
        state.mean.index_fill(0, views, 0.0),
        weight,
        state.utility.index_fill(0, units, 0.0),
        weight if shared else state.utility_weight.index_fill(0, units, 0.0),
        state.nonfinite,
        state.seen,
        state.scored,
        tuple(gram),
    )
