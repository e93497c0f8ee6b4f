"""What becomes of the units that are chosen, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from gxd import arguments
from gxd.reset import births

OFFSETS = ("zero", "keep")
MEMORIES = ("reset", "peers", "keep")
STEP_POLICIES = ("keep", "reset")


@dataclass(frozen=True)
class Reset:
    """The reset operator. The defaults are those of Continual Backpropagation, and preserve the function: a unit that
    is chosen has no effect at first, and its mean contribution is moved into the biases of those that read it.

    A unit may be reset in part, where a selector chooses by an amount in [0, 1], or ``blend`` is below 1: then all that
    is written goes only so far from what it was to what a whole reset would write.

    Attributes:
        incoming: weights. ``"fresh"``: drawn from the distribution that the layer began with. ``"initial"``: the values
            that they had when the method was attached. A number: a random direction of this length. ``"he"``: the
            same with length ``sqrt(2)``, that of He's initialisation. A function ``(fresh, living, generator) ->
            rows``: ``fresh`` is ``(n, fan_in)``, drawn as for ``"fresh"``; ``living`` is ``(m, fan_in)``, the rows of
            the layer's other units; it returns the rows of the ``n`` newborn units. Embeddings have no fan-in: their
            rows are always drawn fresh. So are layers with an initialiser of the plan's own (``init=``).
        offset: the incoming bias and the unit's entries in norms, ``zero``: the bias 0, gains 1, norm biases 0, running
            statistics 0 and 1; ``keep``: as they are.
        outgoing: what the outgoing weights are multiplied by: 0 zeroes them, 1 keeps them.
        compensate: whether to move the mean contribution that is lost into the consumers' biases.
        memories: of the optimizer, of gradients of what is written. ``"reset"``: they begin at 0. ``"peers"``: averages
            of gradients begin at 0, averages of squared gradients at the mean over the layer's units. Adam divides by
            their root: from 0, with its step count in the thousands, a newborn unit's first hundred steps are up to six
            times as long as those of the other units. ``"keep"``: as they are.
        step_policy: of Adam's ``step``, which the units of a layer share: ``keep`` or ``reset``.
        blend: the largest amount, 1 for whole resets.
    """

    incoming: str | float | births.Birth = "fresh"
    offset: str = "zero"
    outgoing: float = 0.0
    compensate: bool = True
    memories: str = "reset"
    step_policy: str = "keep"
    blend: float = 1.0

    def __post_init__(self) -> None:
        births.check(self.incoming)
        arguments.choice("offset", self.offset, OFFSETS)
        arguments.number("outgoing", self.outgoing, 0.0, 1.0)
        arguments.switch("compensate", self.compensate)
        arguments.choice("memories", self.memories, MEMORIES)
        arguments.choice("step_policy", self.step_policy, STEP_POLICIES)
        arguments.number("blend", self.blend, 0.0, 1.0)

    @property
    def lost(self) -> float:
        """The share of a unit's outgoing weights that a whole reset takes away."""
        return 1.0 - self.outgoing
