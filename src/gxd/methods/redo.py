"""ReDo: recycle dormant neurons."""

from __future__ import annotations

from gxd.methods.registry import register_method
from gxd.methods.unit_reset import UnitReset
from gxd.reset.operator import Reset
from gxd.select import Threshold


@register_method(
    "redo",
    description="every so many steps, reset the units whose mean activity is small next to that of their layer",
    reference="Sokar, Agarwal, Castro, Evci: The Dormant Neuron Phenomenon in Deep Reinforcement Learning, ICML 2023",
    inert={"every": 0},
    changes="units: new incoming weights, no outgoing ones, optimizer state of these",
)
def redo(
    threshold: float = 0.1, every: int = 1000, incoming: str = "fresh", outgoing: float = 0.0, step_policy: str = "keep"
) -> UnitReset:
    """Every ``every`` steps, reset the units with ``E|h| / (mean of E|h| over the layer) <= threshold``.

    The activity is that of the batch of this step alone: no running average, and no other step is observed. Incoming
    weights are drawn from the distribution the layer began with (the authors' code draws Xavier's, whatever the layer
    had), the bias and the outgoing weights are zero, and what the optimizer remembers of them begins anew.

    Args:
        threshold: 0 or more; the paper uses 0.025 (DQN) and 0.1.
        every: steps between two resets; 0: never.
        incoming: ``fresh``; ``initial``: the values that the weights began with, as one public port restores.
        outgoing: what the outgoing weights are multiplied by.
        step_policy: what becomes of Adam's ``step``, which a layer's units share: ``keep``, as in the authors' code,
            or ``reset``, which a later study found to be decisive.
    """
    reset = Reset(incoming=incoming, outgoing=outgoing, compensate=False, step_policy=step_policy)
    return UnitReset("activation", Threshold(threshold, every), reset=reset, decay=0.0)
