"""Optimizer reset: the weights stay, and the optimizer begins anew."""

from __future__ import annotations

from gxd.methods.base import Host
from gxd.methods.event import Event, begin_anew
from gxd.methods.registry import register_method


class OptimizerReset(Event):
    """Lets the optimizer forget. It remembers nothing itself."""

    def act(self, host: Host, own: tuple[()]) -> tuple[()]:
        begin_anew(host)
        return own


@register_method(
    "optimizer_reset",
    description="when a task ends, let the optimizer forget all it remembers",
    reference="a control; Asadi, Fakoor, Sabach: Resetting the Optimizer in Deep RL, NeurIPS 2023",
    inert={"every": None},
    changes="all optimizer state, when a task ends",
)
def optimizer_reset(every: int | None = 0) -> OptimizerReset:
    """Momentum, moments and counters (Adam's ``step``, so that its bias correction begins anew) are those of a new
    optimizer, and copies of the weights (Lookahead's) become what the weights are now. Learning rates, schedules and
    the scale of a ``GradScaler`` are not memories of gradients, and stay.

    State that is not known is refused (docs/optimizers.md). Deviation from a new optimizer: one that lays down its
    first gradient instead of averaging it (SGD with ``dampening``) averages it with 0.

    Args:
        every: 0: when a task ends; else every so many steps instead; None: never.
    """
    return OptimizerReset(every)
