"""All units whose utility is small next to the mean of their layer, every so many steps."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from gxd import arguments
from gxd.plan.units import UnitPlan
from gxd.score.state import UnitState
from gxd.select.base import Selection, Selector
from gxd.select.lowest import lowest


class Threshold(Selector):
    """ReDo's rule: at every ``every``-th step the units with ``u <= threshold`` go, where ``u`` is the utility next to
    the mean of its layer (unless it is normalised otherwise).

    Args:
        threshold: 0 or more; 0: only units whose utility is exactly 0.
        every: steps between two resets; 0: never.
        most: the largest share of a group that goes at once, the lowest first (ReGraMa's hybrid); rounded up.
        maturity: a unit may go when more than this many steps old.
    """

    normalise = "layer_mean"

    def __init__(self, threshold: float = 0.1, every: int = 1000, most: float = 1.0, maturity: int = 0) -> None:
        self.threshold = arguments.number("threshold", threshold, 0.0)
        self.every = arguments.every("every", every, least=0)
        self.most = arguments.number("most", most, 0.0, 1.0)
        self.maturity = arguments.maturity(maturity)

    def observes(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def advance(self, plan: UnitPlan, units: UnitState, state: tuple[()]) -> tuple[tuple[()], bool]:
        return state, self.observes(units.step)

    def select(
        self, plan: UnitPlan, units: UnitState, state: tuple[()], allowed: Callable[[int], bool]
    ) -> tuple[Selection, tuple[()]]:
        utility = units.utility / units.utility_weight  # NaN where nothing was observed: such a unit stays
        low = (utility <= self.threshold) & (units.ages() > self.maturity)
        chosen: Selection = {}
        for number, where in enumerate(plan.unit_slices):
            count, most = int(low[where].sum()), ceil(self.most * plan.groups[number].size)
            if min(count, most) and allowed(number):
                here = low[where]
                chosen[number] = lowest(utility[where], here, most) if count > most else here.nonzero().flatten()
        return chosen, state

    def idle(self, plan: UnitPlan) -> bool:
        return self.every == 0

    def earliest(self, plan: UnitPlan) -> tuple[int, ...]:
        return (max(self.every, self.maturity),) * len(plan.groups)
