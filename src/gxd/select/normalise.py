"""What utilities are compared with before units are chosen: nothing, the mean of their layer, or units of their age."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gxd import arguments
from gxd.plan.units import UnitPlan
from gxd.score.state import UnitState

NORMALISATIONS = ("none", "layer_mean", "age")
_TINY = 1e-9  # beside the mean of a layer in which all units are dead


class Normalise:
    """The utilities as they are. A subclass may keep a state of plain data, which is replaced and not written to."""

    def init(self, plan: UnitPlan, units: UnitState) -> Any:
        """The state before the first step."""
        return ()

    def advance(self, plan: UnitPlan, units: UnitState, state: Any, due: bool) -> Any:
        """Another step has been taken; ``due``: units are about to be chosen. The device is not to be asked."""
        return state

    def __call__(self, plan: UnitPlan, units: UnitState, state: Any) -> UnitState:
        """The units with their normalised utilities; NaN where nothing was observed."""
        return units


class LayerMean(Normalise):
    """``u / (mean of u over the layer + 1e-9)``, as in ReDo: layers of any scale have one threshold."""

    def __call__(self, plan: UnitPlan, units: UnitState, state: Any) -> UnitState:
        utility = _utility(units)
        parts = [utility[where] / (utility[where].nanmean() + _TINY) for where in plan.unit_slices]
        return _with_utility(units, torch.cat(parts))


class ByAge(Normalise):
    """``u / age``: the cost of a reset per step that the unit has lived.

    A newborn unit is cheap to lose, because its outgoing weights are still near zero. Ranked by ``u`` alone, a rule may
    reset the same newborns again and again, and never reach the old units. Divided by the age, the newborns of today
    are spared until they have had their time.
    """

    def __call__(self, plan: UnitPlan, units: UnitState, state: Any) -> UnitState:
        utility = _utility(units)
        return _with_utility(units, utility / units.ages().clamp(min=1).to(utility.dtype))


def normalisation(name: str | Normalise) -> Normalise:
    """The one of that name."""
    if isinstance(name, Normalise):
        return name
    arguments.choice("normalise", name, NORMALISATIONS)
    return {"none": Normalise, "layer_mean": LayerMean, "age": ByAge}[name]()


def _utility(units: UnitState) -> Tensor:
    return units.utility / units.utility_weight  # NaN where nothing was observed


def _with_utility(units: UnitState, utility: Tensor) -> UnitState:
    return units._replace(utility=utility, utility_weight=torch.ones_like(utility))
