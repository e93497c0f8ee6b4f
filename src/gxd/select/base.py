"""What a selector is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gxd.plan.units import UnitPlan
from gxd.score.state import UnitState

Selection = dict[int, Tensor]  # number of the group -> indices of its units, ascending, on the host


class Selector:
    """Decides which units go. Its state is plain data (see :mod:`gxd.checkpoint`), and is replaced, not written to."""

    def init(self, plan: UnitPlan, units: UnitState) -> Any:
        """The state before the first step."""
        return ()

    def observes(self, step: int) -> bool:
        """Whether the units have to be scored in this step, the first being 1."""
        return True

    def advance(self, plan: UnitPlan, units: UnitState, state: Any) -> tuple[Any, bool]:
        """Another step has been taken, ``units.step``. Returns the new state, and whether a reset is due.

        Called at every step: the device is not to be asked.
        """
        raise NotImplementedError

    def select(
        self, plan: UnitPlan, units: UnitState, state: Any, allowed: Callable[[int], bool]
    ) -> tuple[Selection, Any]:
        """Which units go, and the new state. Only called if a reset is due.

        Args:
            allowed: whether a group may be reset now; one that is frozen, or was not seen in this step, may not.
        """
        raise NotImplementedError

    def recounted(self, state: Any) -> Any:
        """Another method has reset units: forget what was counted of their ages."""
        return state

    def idle(self, plan: UnitPlan) -> bool:
        """Whether it will never choose a unit, as it is set now."""
        return False
