"""The lowest fraction of every layer, every so many steps."""

from __future__ import annotations

import math
from collections.abc import Callable

from gxd import arguments
from gxd.plan.units import UnitPlan
from gxd.score.state import UnitState
from gxd.select.base import Selection, Selector
from gxd.select.lowest import lowest


class LowestFraction(Selector):
    """At every ``every``-th step the units of lowest utility go, a fraction of each group. What is left of a unit is
    carried over, so that small groups have their turn.

    Args:
        fraction: of the units of a group, 0 to 1.
        every: steps between two resets; 0: never.
        anneal: if given, the fraction falls as ``cos(pi / 2 * step / anneal)`` to 0 at that step (ReDo's scheduled
            variant); 0: it is constant.
        maturity: a unit may go when more than this many steps old.
    """

    def __init__(self, fraction: float = 0.01, every: int = 1000, anneal: int = 0, maturity: int = 0) -> None:
        self.fraction = arguments.number("fraction", fraction, 0.0, 1.0)
        self.every = arguments.every("every", every, least=0)
        self.anneal = arguments.every("anneal", anneal, least=0)
        self.maturity = arguments.maturity(maturity)

    def init(self, plan: UnitPlan, units: UnitState) -> tuple[float, ...]:
        return (0.0,) * len(plan.groups)

    def observes(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0 and self._share(step) > 0

    def advance(self, plan: UnitPlan, units: UnitState, state: tuple[float, ...]) -> tuple[tuple[float, ...], bool]:
        if not self.observes(units.step):
            return state, False
        share = self._share(units.step)
        state = tuple([carried + share * group.size for carried, group in zip(state, plan.groups, strict=True)])
        return state, max(state) >= 1

    def select(
        self, plan: UnitPlan, units: UnitState, state: tuple[float, ...], allowed: Callable[[int], bool]
    ) -> tuple[Selection, tuple[float, ...]]:
        utility = units.utility / units.utility_weight  # NaN where nothing was observed, which comes last
        mature, carried = units.ages() > self.maturity, list(state)
        chosen: Selection = {}
        for number, where in enumerate(plan.unit_slices):
            count = min(math.floor(carried[number]), int(mature[where].sum()))
            carried[number] -= math.floor(carried[number])
            if count and allowed(number):
                chosen[number] = lowest(utility[where], mature[where], count)
        return chosen, tuple(carried)

    def idle(self, plan: UnitPlan) -> bool:
        return self.every == 0 or self.fraction == 0

    def earliest(self, plan: UnitPlan) -> tuple[int, ...]:
        return (max(self.every, self.maturity),) * len(plan.groups)

    def _share(self, step: int) -> float:
        if not self.anneal:
            return self.fraction
        return self.fraction * math.cos(math.pi / 2 * min(1.0, step / self.anneal)) if step < self.anneal else 0.0
