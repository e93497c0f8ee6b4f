"""gxd: keep a network learning by resetting the right neurons.

Four rooms in a row: :mod:`gxd.observe`, :mod:`gxd.score`, :mod:`gxd.select`, :mod:`gxd.operate`; :mod:`gxd.find`
draws the plan of the house, and :class:`gxd.ContinualBackprop` walks through it after every optimizer step.
"""

from gxd.check import CheckReport, check
from gxd.compiled import CompiledStep, compiled_step
from gxd.continual import ContinualBackprop
from gxd.errors import (
    CompileWarning,
    NonFiniteWarning,
    ObservationError,
    ObservationWarning,
    PlanError,
    TraceError,
)
from gxd.find import find_units
from gxd.find.manual import hand_group
from gxd.operate import reset_optimizer_state, reset_units
from gxd.optimizer_state import register_optimizer_state
from gxd.plan import Group, UnitPlan
from gxd.reset_cost import ResetCost, reset_cost
from gxd.score import Observation, UnitView, register_utility, utilities
from gxd.version import __version__

__all__ = [
    "CheckReport",
    "CompileWarning",
    "CompiledStep",
    "ContinualBackprop",
    "Group",
    "NonFiniteWarning",
    "Observation",
    "ObservationError",
    "ObservationWarning",
    "PlanError",
    "ResetCost",
    "TraceError",
    "UnitPlan",
    "UnitView",
    "__version__",
    "check",
    "compiled_step",
    "find_units",
    "hand_group",
    "register_optimizer_state",
    "register_utility",
    "reset_cost",
    "reset_optimizer_state",
    "reset_units",
    "utilities",
]
