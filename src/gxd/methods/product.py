"""Any unit method: a score, a normalisation, a selection and an operator, each by its name."""

from __future__ import annotations

import inspect

from gxd import arguments
from gxd.arguments import near
from gxd.methods.registry import register_method
from gxd.methods.unit_reset import UnitReset
from gxd.reset.operator import Reset
from gxd.select import LowestFraction, LowestRate, LowestSet, Selector, SilenceTest, Soft, Threshold
from gxd.select.normalise import normalisation

SELECTIONS: dict[str, type[Selector]] = {
    "lowest_rate": LowestRate,
    "lowest_set": LowestSet,
    "threshold": Threshold,
    "lowest_fraction": LowestFraction,
    "silence_test": SilenceTest,
    "soft": Soft,
}


@register_method(
    "unit_reset",
    description="any score with any normalisation, selection and operator: the product of all unit methods",
    reference="the four axes on which published unit methods differ; continual_backprop, redo, regrama, snr and cpr "
    "are points of it",
    inert={"rate": 0.0},
    changes="units: incoming and outgoing weights, biases, optimizer state, as its options say",
)
def unit_reset(
    score: str = "gxd",
    normalise: str = "auto",
    selection: str = "lowest_rate",
    rate: float | None = None,
    maturity: int | None = None,
    score_every: int | None = None,
    threshold: float | None = None,
    every: int | None = None,
    most: float | None = None,
    fraction: float | None = None,
    anneal: int | None = None,
    rejection: float | None = None,
    calibrate: int | None = None,
    sharpness: float | None = None,
    center: float | None = None,
    incoming: str | float = "fresh",
    offset: str = "zero",
    outgoing: float = 0.0,
    compensate: bool = True,
    memories: str = "reset",
    step_policy: str = "keep",
    blend: float = 1.0,
    decay: float | None = None,
    positions: str = "signed",
) -> UnitReset:
    """A point of the product. Options of a selection that are not given have its defaults; those that it does not have
    are refused.

    Args:
        score: one of :func:`gxd.utilities`.
        normalise: ``none``, ``layer_mean``, ``age``, or ``auto``: what goes with the selection.
        selection: ``lowest_rate`` and ``lowest_set`` (rate, maturity, score_every), ``threshold`` (threshold, every,
            most, maturity), ``lowest_fraction`` (fraction, every, anneal, maturity), ``silence_test`` (rejection, most,
            calibrate, every) or ``soft`` (every, sharpness, center, score_every): see :mod:`gxd.select`.
        incoming, offset, outgoing, compensate, memories, step_policy, blend: see :class:`gxd.Reset`.
        decay: of the running averages, per observation; 0: the last batch alone counts. Default: what goes with the
            selection, 0 for ``silence_test`` and 0.99 for all others.
        positions: ``signed`` or ``abs``, see :class:`gxd.ContinualBackprop`.
    """
    kind = SELECTIONS[arguments.choice("selection", selection, SELECTIONS)]
    options = {
        "rate": rate,
        "maturity": maturity,
        "score_every": score_every,
        "threshold": threshold,
        "every": every,
        "most": most,
        "fraction": fraction,
        "anneal": anneal,
        "rejection": rejection,
        "calibrate": calibrate,
        "sharpness": sharpness,
        "center": center,
    }
    given = {name: value for name, value in options.items() if value is not None}
    known = inspect.signature(kind).parameters
    for name in given:
        if name not in known:
            hint = near(name, known) or "."
            raise TypeError(f"selection={selection!r} has no option {name!r}{hint} It has {', '.join(known)}")
    selector = kind(**given)
    return UnitReset(
        score,
        selector,
        reset=Reset(incoming, offset, outgoing, compensate, memories, step_policy, blend),
        normalise=normalisation(selector.normalise if normalise == "auto" else normalise),
        decay=decay,
        positions=positions,
    )
