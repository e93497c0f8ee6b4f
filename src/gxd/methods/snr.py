"""SNR: self-normalised resets, by a test of how long each neuron has been silent."""

from __future__ import annotations

from gxd.methods.registry import register_method
from gxd.methods.unit_reset import UnitReset
from gxd.reset.operator import Reset
from gxd.select import SilenceTest


@register_method(
    "snr",
    description="reset a unit that has been silent for longer than nearly all of its own silences so far",
    reference="Farias, Jozefiak: Self-Normalized Resets for Plasticity in Continual Learning, ICLR 2025",
    inert={"every": 0},
    changes="units: new incoming weights, no outgoing ones, optimizer state of these",
)
def snr(
    rejection: float = 0.02, most: int = 1000, calibrate: int = 1000, every: int = 1, step_policy: str = "keep"
) -> UnitReset:
    """A unit goes when it has been silent for ``limit`` steps, the ``1 - rejection`` quantile of its own silences.

    Incoming weights fresh, biases and outgoing weights zero, the moments of these slices begin anew, no compensation,
    as published. Different from the authors' code: silences are counted in steps, not in examples (the same where
    batches are of one size); histograms have bins of half an octave, not one for each of 20,000 lengths; a unit that
    fired in every batch keeps its limit (theirs divides zero by zero, and gives it the tightest one); silences longer
    than the largest limit count in the last bin (theirs are lost). Silence is defined for ReLU; here a unit that is not
    zero but does not vary is silent, too, whatever its activation: see the utility ``silence``.

    Args:
        rejection: the paper's eta, from 0.08 to 0.00125 on Permuted MNIST.
        most: the limit of all units at first, and the largest.
        calibrate: steps between two calibrations of the limits.
        every: steps between two tests; 0: never. A test waits for the device.
        step_policy: of Adam's ``step``: ``keep`` or ``reset``.
    """
    reset = Reset(compensate=False, step_policy=step_policy)
    return UnitReset("silence", SilenceTest(rejection, most, calibrate, every), reset=reset, decay=0.0)
