"""The exceptions and warnings of gxd. Each is a subclass of the built-in that a caller would expect."""

import sys
import warnings
from types import FrameType


class TraceError(RuntimeError):
    """The model could not be traced. The message says why and how to describe the units by hand."""


class PlanError(ValueError):
    """A plan does not fit the model, the optimizer or the saved state it is used with."""


class ObservationError(RuntimeError):
    """A step was taken without the observation that the utility needs, or the observation could not be made."""


class NonFiniteWarning(RuntimeWarning):
    """An observation held an infinity or a NaN. It was counted and left out of the statistics."""


class ObservationWarning(UserWarning):
    """Something is not observed, or not reset, that may be meant to be: a branch, a module, a pass, a step."""


class CompileWarning(UserWarning):
    """A compiled step could not be compiled, and runs eagerly; or a compiled model cannot stay compiled while it is
    observed. The message says why.
    """


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the line outside gxd and torch from which this was reached, however deep inside we are."""
    level, frame = 1, sys._getframe()
    while (outer := frame.f_back) is not None and _is_inside(outer):
        level, frame = level + 1, outer
    warnings.warn(message, category, stacklevel=level + 1)


def _is_inside(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in ("gxd", "torch")
