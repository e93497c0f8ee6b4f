"""All units whose utility is small next to the mean of their layer, every so many steps."""

from __future__ import annotations

from collections.abc import Callable

from gxd import arguments
from gxd.plan.units import UnitPlan
from gxd.score.state import UnitState
from gxd.select.base import Selection, Selector

_TINY = 1e-9  # of a layer in which all units are dead


class Threshold(Selector):
    """ReDo's rule: at every ``every``-th step the units with ``u / (mean of u over the layer) <= threshold`` go.

    Args:
        threshold: 0 or more; 0: only units whose utility is exactly 0.
        every: steps between two resets; 0: never.
    """

    def __init__(self, threshold: float, every: int) -> None:
        self.threshold = arguments.number("threshold", threshold, 0.0)
        self.every = arguments.every("every", every, least=0)

    def observes(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def advance(self, plan: UnitPlan, units: UnitState, state: tuple[()]) -> tuple[tuple[()], bool]:
        return state, self.observes(units.step)

    def select(
        self, plan: UnitPlan, units: UnitState, state: tuple[()], allowed: Callable[[int], bool]
    ) -> tuple[Selection, tuple[()]]:
        utility = units.utility / units.utility_weight  # NaN where nothing was observed: such a unit stays
        chosen: Selection = {}
        for number, where in enumerate(plan.unit_slices):
            low = utility[where] <= self.threshold * (utility[where].mean() + _TINY)
            if bool(low.any()) and allowed(number):
                chosen[number] = low.nonzero().flatten()
        return chosen, state

    def idle(self, plan: UnitPlan) -> bool:
        return self.every == 0
