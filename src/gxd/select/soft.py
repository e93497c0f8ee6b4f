"""All units, each by an amount that falls with its utility."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gxd import arguments
from gxd.plan.units import UnitPlan
from gxd.score.state import UnitState
from gxd.select.base import Selection, Selector


class Soft(Selector):
    """CPR's rule: at every ``every``-th step each unit is reset by the amount ``min(1, 2 sigmoid(-sharpness * (u -
    center)))``, where ``u`` is the utility next to the mean of its layer (unless it is normalised otherwise): all the
    way up to the center, and hardly at all well above it.

    Args:
        every: steps between two resets; 0: never.
        sharpness: how fast the amount falls.
        center: the largest utility that is reset all the way.
        score_every: score only every so many steps.
    """

    normalise = "layer_mean"
    soft = True

    def __init__(self, every: int = 1000, sharpness: float = 16.0, center: float = 1.0, score_every: int = 1) -> None:
        self.every = arguments.every("every", every, least=0)
        self.sharpness = arguments.number("sharpness", sharpness, 0.0)
        self.center = arguments.number("center", center, 0.0)
        self.score_every = arguments.every("score_every", score_every)

    def observes(self, step: int) -> bool:
        return self.every > 0 and ((step - 1) % self.score_every == 0 or step % self.every == 0)

    def advance(self, plan: UnitPlan, units: UnitState, state: tuple[()]) -> tuple[tuple[()], bool]:
        return state, self.every > 0 and units.step % self.every == 0

    def select(
        self, plan: UnitPlan, units: UnitState, state: tuple[()], allowed: Callable[[int], bool]
    ) -> tuple[Selection, tuple[()]]:
        utility = units.utility / units.utility_weight
        amount = (2 * torch.sigmoid(-self.sharpness * (utility - self.center))).clamp(max=1.0)
        amount = amount.nan_to_num(0.0)  # nothing was observed: such a unit stays
        numbers = range(len(plan.groups))
        return {n: amount[plan.unit_slices[n]] for n in numbers if allowed(n)}, state

    def idle(self, plan: UnitPlan) -> bool:
        return self.every == 0

    def earliest(self, plan: UnitPlan) -> tuple[int, ...]:
        return (self.every,) * len(plan.groups)
