"""gxd: keep a network learning by resetting the right neurons.

A plan says which tensor elements are a unit's (:mod:`gxd.plan`). Then every training step goes through four stages:
:mod:`gxd.observe`, :mod:`gxd.score`, :mod:`gxd.select`, :mod:`gxd.reset`. :mod:`gxd.methods` puts them together, and
:func:`gxd.attach` hangs methods on a model and its optimizer.
"""

from gxd.attachment import Attachment, attach
from gxd.compile.step import CompiledStep, compiled_step
from gxd.cost.reset_cost import ResetCost, reset_cost
from gxd.cost.sets import SetCosts
from gxd.diagnose.diagnosis import Diagnosis, diagnose
from gxd.diagnose.probe import probe
from gxd.diagnose.verdict import Probe
from gxd.errors import (
    CompileWarning,
    NonFiniteWarning,
    ObservationError,
    ObservationWarning,
    PlanError,
    TraceError,
)
from gxd.methods import presets as presets
from gxd.methods.base import Host, Method
from gxd.methods.continual_backprop import ContinualBackprop
from gxd.methods.plasticity_injection import injectable
from gxd.methods.registry import method, methods, register_method
from gxd.methods.unit_reset import UnitReset
from gxd.mirror import mirror_resets
from gxd.plan.find import find_units
from gxd.plan.find.manual import manual_group
from gxd.plan.units import Group, UnitPlan
from gxd.plan.verify import CheckReport, verify_plan
from gxd.reset.operator import Reset
from gxd.reset.optimizer_state import register_optimizer_state
from gxd.reset.units import reset_optimizer_state, reset_units
from gxd.score.state import UnitState
from gxd.score.utilities import Observation, UnitView, register_utility, utilities
from gxd.select import (
    ByAge,
    LayerMean,
    LowestFraction,
    LowestRate,
    LowestSet,
    Normalise,
    Selector,
    SilenceTest,
    Soft,
    Threshold,
)
from gxd.version import __version__

from gxd import testing as testing  # isort: skip; it reads the names above

check, hand_group = verify_plan, manual_group  # their first names

__all__ = [
    "Attachment",
    "ByAge",
    "CheckReport",
    "CompileWarning",
    "CompiledStep",
    "ContinualBackprop",
    "Diagnosis",
    "Group",
    "Host",
    "LayerMean",
    "LowestFraction",
    "LowestRate",
    "LowestSet",
    "Method",
    "NonFiniteWarning",
    "Normalise",
    "Observation",
    "ObservationError",
    "ObservationWarning",
    "PlanError",
    "Probe",
    "Reset",
    "ResetCost",
    "Selector",
    "SetCosts",
    "SilenceTest",
    "Soft",
    "Threshold",
    "TraceError",
    "UnitPlan",
    "UnitReset",
    "UnitState",
    "UnitView",
    "__version__",
    "attach",
    "check",
    "compiled_step",
    "diagnose",
    "find_units",
    "hand_group",
    "injectable",
    "manual_group",
    "method",
    "methods",
    "mirror_resets",
    "probe",
    "register_method",
    "register_optimizer_state",
    "register_utility",
    "reset_cost",
    "reset_optimizer_state",
    "reset_units",
    "utilities",
    "verify_plan",
]
