"""What utilities are compared with before units are chosen: nothing, the mean of their layer, or units of their age."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gxd import arguments
from gxd.plan.units import UnitPlan
from gxd.score.state import UnitState
from gxd.select.age import AgeMeans, expected, with_units

NORMALISATIONS = ("none", "layer_mean", "age")
_TINY = 1e-9  # beside the mean of a layer in which all units are dead
_EVERY = 10  # steps between two looks at what units of each age are worth


class Normalise:
    """The utilities as they are. Its state is plain data, and replaced; all that come with gxd have one form of it, so
    that a checkpoint of one goes on with another.
    """

    def init(self, plan: UnitPlan, units: UnitState) -> Any:
        """The state before the first step."""
        return AgeMeans.new(plan, units)

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
    """``u / E[u | age] ** exponent``, the expectation over the units of the same group and age: newborn units, whose
    outgoing weights are still near zero, are cheap to lose only because they are new.
    """

    def __init__(self, exponent: float = 0.5) -> None:
        self.exponent = arguments.number("exponent", exponent, 0.0, 10.0)

    def advance(self, plan: UnitPlan, units: UnitState, state: AgeMeans, due: bool) -> AgeMeans:
        return with_units(state, plan, units) if due or units.step % _EVERY == 0 else state

    def __call__(self, plan: UnitPlan, units: UnitState, state: AgeMeans) -> UnitState:
        utility, worth = _utility(units), expected(state, plan, units).pow_(self.exponent)
        return _with_utility(units, torch.where(worth > 0, utility / worth, utility))


def normalisation(name: str | Normalise, exponent: float = 0.5) -> Normalise:
    """The one of that name."""
    if isinstance(name, Normalise):
        return name
    arguments.choice("normalise", name, NORMALISATIONS)
    by_age = ByAge(exponent)  # also where it is not used: a wrong exponent is wrong
    return by_age if name == "age" else LayerMean() if name == "layer_mean" else Normalise()


def _utility(units: UnitState) -> Tensor:
    return units.utility / units.utility_weight  # NaN where nothing was observed


def _with_utility(units: UnitState, utility: Tensor) -> UnitState:
    return units._replace(utility=utility, utility_weight=torch.ones_like(utility))
