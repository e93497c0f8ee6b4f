"""What a training loop is warned of, once each: nothing goes wrong in silence, and nothing is repeated."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gxd.errors import NonFiniteWarning, ObservationWarning, warn
from gxd.score.utilities import Utility

MANY_PASSES = 100  # without a step of the optimizer


class Notices:
    """The warnings of one :class:`gxd.ContinualBackprop`.

    Attributes:
        passes: how many there were since the optimizer's last step.
        nonfinite: the count of non-finite observations above which the user is warned; infinite when that is done.
    """

    def __init__(self, utility: Utility | None) -> None:
        self.utility = utility
        self.passes = 0
        self.nonfinite: float = 0
        self._groups: set[str] = set()  # that a warning has named
        self._told_of_passes = False

    def count_pass(self) -> None:
        """A pass was observed, or has begun where nothing need be observed. Many without a step are a sign."""
        self.passes += 1
        if self.passes >= MANY_PASSES and not self._told_of_passes:
            self._told_of_passes = True
            warn(
                f"{MANY_PASSES} training passes, and the optimizer that gxd is attached to has not "
                "stepped: without its step() no unit ages or is reset. Usually it was made anew (on loading, by a "
                "framework, for new parameter groups), or a wrapper steps another one (SAM its base optimizer). Make "
                "the attachment last, with the optimizer whose step() is called. If gradients are accumulated "
                "over so many passes, all is well",
                ObservationWarning,
            )

    def have_named(self, group: str) -> bool:
        """Whether a warning has."""
        return group in self._groups

    def of_unreached(self, groups: Sequence[str]) -> None:
        """These ran, but the output does not depend on them, which no warning has said yet."""
        self._groups.update(groups)
        if self.utility is not None and self.utility.gradient in ("loss", "weights"):
            what, remedy = "the loss", "Train on all outputs in the same step"
        else:
            what = "the observed output"
            remedy = "Observe all outputs together (of policy and value: cbp.observe(score=log_probability + value))"
        warn(
            f"{what} does not depend on the group {', '.join(map(repr, groups))}: its units are not scored, and not "
            f"reset, on steps where this is so. {remedy}, or leave the group out with exclude=... if that is meant",
            ObservationWarning,
        )

    def of_left_alone(self, group: str, why: str) -> None:
        """It is due for a reset, and cannot be reset."""
        if group not in self._groups:
            self._groups.add(group)
            warn(
                f"the group {group!r} was due for a reset, but {why}: it is not reset as long as this is so. "
                "Leave the group out with exclude=... if that is meant",
                ObservationWarning,
            )

    def of_nonfinite(self, count: int) -> None:
        """There were so many non-finite observations so far."""
        if count > self.nonfinite:
            self.nonfinite = math.inf
            warn(
                "a non-finite observation (inf or NaN in activations, gradients or scores, or a target outside "
                "[0, 1]) was left out of the statistics. Further ones are only counted, in "
                "metrics()['gxd/nonfinite_observations']: if it grows, lower the learning rate or the replacement rate",
                NonFiniteWarning,
            )

    def of_no_boundary(self, method: str, steps: int) -> None:
        """It waits for the end of a task, and none came in so many steps."""
        warn(
            f"{method} acts at the end of a task, and in {steps} steps there was none, so it has done nothing yet. "
            "Call boundary() of what gxd.attach returned where a task ends, or give the number of steps after which it "
            "acts, if it has an option for that (every=..., at=...). If the first task is longer, all is well",
            ObservationWarning,
        )
