"""What a selector is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gxd.plan.units import UnitPlan
from gxd.score.state import UnitState

# Number of the group -> which of its units: their indices, ascending (integers); or how far each of them is reset, an
# amount in [0, 1] for every unit of the group (floating point).
Selection = dict[int, Tensor]
YOUNG = 1.5
"""A unit was reset young if its age was less than this many times the age at which it may first be reset again."""


class Selector:
    """Decides which units go. Its state is plain data (see :mod:`gxd.checkpoint`), and is replaced, not written to.

    Attributes:
        normalise, decay: how it expects utilities, if the user does not say: see :mod:`gxd.select.normalise`, and the
            decay of their running averages. What expects a decay of 0 judges single batches, and takes no other.
        soft: whether it chooses by amounts.
        pairs: whether it reads the joint effects of units, :meth:`gxd.UnitState.joint`.
    """

    normalise: str = "none"
    decay: float = 0.99
    soft: bool = False
    pairs: bool = False

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
            units: with normalised utilities.
            allowed: whether a group may be reset now; one that is frozen, or was not seen in this step, may not.
        """
        raise NotImplementedError

    def recounted(self, state: Any) -> Any:
        """Another method has reset units: forget what was counted of their ages."""
        return state

    def forgotten(self, state: Any, units: Tensor) -> Any:
        """The units of these flat numbers were reset, by this method or by another: forget what is known of each."""
        return state

    def idle(self, plan: UnitPlan) -> bool:
        """Whether it will never choose a unit, as it is set now."""
        return False

    def earliest(self, plan: UnitPlan) -> tuple[int, ...] | None:
        """By group, the age at which a unit may first be reset again, as it is set now; None: that is not known."""
        return None
