"""Head reset: a new last layer for a new task, the control of every table."""

from __future__ import annotations

from gxd.methods.base import Host
from gxd.methods.event import Event, draw_anew
from gxd.methods.layers import head_of
from gxd.methods.registry import register_method
from gxd.reset.fresh import Distributions, distributions


class HeadReset(Event):
    """Draws the head anew. It remembers what the parameters were drawn from.

    Attributes:
        head: the name of the module; None: the last layer.
    """

    also_changes = ("buffers",)

    def __init__(self, head: str | None, every: int | None) -> None:
        super().__init__(every)
        if head is not None and not isinstance(head, str):
            raise TypeError(f"head={head!r} must be the name of a module, a string, or None for the last layer")
        self.head = head

    def begin(self, host: Host) -> Distributions:
        head_of(host, self.head)
        return distributions(host.model)

    def act(self, host: Host, own: Distributions) -> Distributions:
        draw_anew(host, own, within=head_of(host, self.head))
        return own


@register_method(
    "head_reset",
    description="when a task ends, draw the last layer anew",
    reference="a control; layer resets are studied in Nikishin et al.: The Primacy Bias in Deep Reinforcement "
    "Learning, ICML 2022",
    inert={"every": None},
    changes="the last layer and its optimizer state, when a task ends",
)
def head_reset(head: str | None = None, every: int | None = 0) -> HeadReset:
    """Fresh weights and biases for the head, from the distribution that each began with, and fresh optimizer state for
    them: momentum, moments and counters.

    The tensors are written in place, so that the optimizer trains what was reset: public code that puts a new module in
    place leaves it untrained. Units that the head reads are not told of it: what is known of them catches up at the
    pace of their averages.

    Args:
        head: the name of the module that is reset, with all that is in it. None: the last linear layer or convolution,
            in the order of ``model.named_modules()``, whose weight is trained. A head that shares a parameter with
            another module (tied embeddings) is refused.
        every: 0: when a task ends; else every so many steps instead; None: never.
    """
    return HeadReset(head, every)
