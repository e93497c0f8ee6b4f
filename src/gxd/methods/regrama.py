"""ReGraMa: reset neurons that hardly learn, by the gradient of their incoming weights."""

from __future__ import annotations

from gxd.methods.registry import register_method
from gxd.methods.unit_reset import UnitReset
from gxd.reset.operator import Reset
from gxd.select import Threshold


@register_method(
    "regrama",
    description="every so many steps, redraw the units whose incoming weights have small gradients next to their layer",
    reference="Liu et al.: Measure Gradients, not Activations! Enhancing Neuronal Activity in Deep Reinforcement "
    "Learning, NeurIPS 2025",
    inert={"every": 0},
    changes="units: new incoming weights",
)
def regrama(
    threshold: float = 0.1,
    every: int = 1000,
    most: float = 1.0,
    outgoing: float = 1.0,
    memories: str = "keep",
    step_policy: str = "keep",
) -> UnitReset:
    """Every ``every`` steps, reset the units with ``mean_i |dL/dw_oi| / (mean over the layer) <= threshold``.

    The gradient is that of the step just taken, no average. As in the authors' code the outgoing weights and the
    optimizer's moments stay, so the function changes at a reset. Different from it: weights are drawn from the
    distribution that the layer began with (theirs is 2.45 times torch's default); the reset comes after the optimizer's
    step, not before it with the gradient set to zero; the gains of norms are no units of their own, and outputs are no
    hidden units; the global random state is left alone (their metric seeds it at every look).

    Args:
        threshold: 0 or more; the authors' command has 0, their page 0.1, a later study 0.25 with ``every=100``.
        every: steps between two resets; 0: never.
        most: the largest share of a layer that goes at once, the lowest first (their hybrid mode has 0.01).
        outgoing: what the outgoing weights are multiplied by; 0 preserves the function, up to the units' contribution.
        memories: ``reset``: moments of what is written begin anew.
        step_policy: of Adam's ``step``: ``keep`` or ``reset``.
    """
    reset = Reset(outgoing=outgoing, compensate=False, memories=memories, step_policy=step_policy)
    return UnitReset("weight_gradient", Threshold(threshold, every, most), reset=reset, decay=0.0)
