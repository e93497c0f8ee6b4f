"""Full reset: a fresh network for every task, the yardstick of every table."""

from __future__ import annotations

from gxd.methods.base import Host
from gxd.methods.event import Event, draw_anew
from gxd.methods.registry import register_method
from gxd.reset.fresh import Distributions, distributions


class FullReset(Event):
    """Draws everything anew. It remembers what the parameters were drawn from."""

    also_changes = ("buffers",)

    def begin(self, host: Host) -> Distributions:
        return distributions(host.model)

    def act(self, host: Host, own: Distributions) -> Distributions:
        draw_anew(host, own, within=host.model, everything=True)
        host.all_units_are_new()
        return own


@register_method(
    "full_reset",
    description="when a task ends, begin with a fresh network and a fresh optimizer",
    reference="a control: what a network that has learnt nothing would do",
    inert={"every": None},
    changes="all parameters, statistics of norms, all optimizer state, when a task ends",
)
def full_reset(every: int | None = 0) -> FullReset:
    """Every trained parameter is drawn anew from the distribution that it began with, the running statistics of norms
    are those of a new network, and all that the optimizer remembers begins anew.

    What is frozen, the statistics of a norm that is, and the rows of padding tokens (``padding_idx``) stay as they are.
    Other attached methods are told that all units are new, so that ages, references and utilities begin anew.
    Distributions are fitted when the method is attached, so attach it before training; a resume has them from the
    checkpoint. Correlations between weights (an orthogonal initialisation) are lost.

    Args:
        every: 0: when a task ends; else every so many steps instead; None: never.
    """
    return FullReset(every)
