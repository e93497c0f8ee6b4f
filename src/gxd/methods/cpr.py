"""CPR: calibrated partial resets, of all units, each by a small amount that falls with its utility."""

from __future__ import annotations

from gxd import arguments
from gxd.methods.registry import register_method
from gxd.methods.unit_reset import UnitReset
from gxd.reset.operator import Reset
from gxd.select import Soft


@register_method(
    "cpr",
    description="every so many steps, blend all units with fresh ones, the more the lower their utility in their layer",
    reference="Calibrated Partial Resets, arXiv 2607.24996",
    inert={"every": 0},
    changes="units, in part: incoming weights towards new ones, outgoing ones towards zero",
)
def cpr(
    utility: str = "weight_gradient",
    every: int = 1000,
    blend: float = 0.015,
    sharpness: float = 16.0,
    center: float = 1.0,
    decay: float = 0.99,
    score_every: int = 1,
) -> UnitReset:
    """Every ``every`` steps, with ``a = blend * min(1, 2 sigmoid(-sharpness (u - center)))`` for each unit, ``w_in <-
    (1 - a) w_in + a fresh`` and ``w_out <- (1 - a) w_out``; biases, norms and the optimizer's state stay.

    ``u`` is the running mean of the utility next to the mean of its layer. Different from the authors' code: they
    average the quotient, begin with 1 and go back to 1 after every reset (a weight of ``0.99 ** 1000`` at the next);
    here the average itself is compared with the mean over the layer, and goes on.

    Args:
        utility: the published one is the gradient of the incoming weights; ``gxd`` blends what is cheapest to reset.
        every: steps between two resets; 0: never.
        blend: the largest amount, rho in the paper, {0.01 ... 0.2} there.
        sharpness, center: of the sigmoid; {6 ... 32} and {0.8 ... 1} in the paper.
        decay: of the running averages, per step.
        score_every: score only every so many steps.
    """
    reset = Reset(offset="keep", compensate=False, memories="keep", blend=blend)
    selector = Soft(every, sharpness, center, score_every)
    return UnitReset(utility, selector, reset=reset, decay=arguments.decay(decay) ** score_every)
