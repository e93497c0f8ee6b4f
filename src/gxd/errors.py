"""The exceptions and warnings of gxd. Each is a subclass of the built-in that a caller would expect."""


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
    """A compiled step could not be compiled, and runs eagerly. The message says why."""
