"""The recommended rule: reset the units that cost least per step they have lived, by the gradients you have anyway."""

from __future__ import annotations

from gxd import arguments
from gxd.methods.registry import register_method
from gxd.methods.unit_reset import UnitReset
from gxd.reset.births import Birth
from gxd.reset.operator import Reset
from gxd.select import LowestRate


@register_method(
    "gxd",
    description="reset the units that cost least per step lived, scored by the loss's own gradients (recommended)",
    reference="ours: resets by gradient x difference from the reset reference, in the direction of the training loss, "
    "ranked by cost per step lived",
    inert={"replacement_rate": 0.0},
    changes="units: new incoming weights, no outgoing ones, their mean into biases, optimizer state of these",
)
def gxd(
    replacement_rate: float = 1e-3,
    maturity: int = 100,
    incoming: str | float | Birth = "he",
    score_every: int = 1,
    compensate: bool = True,
    decay: float = 0.99,
    positions: str = "signed",
    step_policy: str = "keep",
) -> UnitReset:
    """Each step scores every unit by ``u = E|(h - r) . dL/dh|``, the first-order change of the training loss if the
    unit were reset, as a share of its layer. The units of lowest ``u / age`` are reset, at a rate.

    The gradients are those of ``loss.backward()``. There is nothing to call and nothing to hand over, and the loss may
    be any.

    Args:
        replacement_rate: the share of the mature units of each layer that is reset per step.
        maturity: a unit is mature when more than this many steps old.
        incoming: the incoming weights of a newborn unit, see :class:`gxd.Reset`. ``"he"``: at He's scale. A unit that
            is born weak stays useless, and is the next to go. ``"fresh"``: as the layer began.
        score_every: score only every so many steps, which is cheaper.
        compensate: whether to move a unit's mean contribution into the biases behind it.
        decay: of the running averages, per step.
        positions, step_policy: as for :class:`gxd.ContinualBackprop`.
    """
    return UnitReset(
        "gxd_loss",
        LowestRate(replacement_rate, maturity, score_every),
        reset=Reset(incoming=incoming, compensate=compensate, step_policy=step_policy),
        normalise="age",
        decay=arguments.decay(decay) ** score_every,
        positions=positions,
    )
