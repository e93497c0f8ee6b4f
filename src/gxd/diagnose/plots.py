"""The pictures of a diagnosis and of a probe. matplotlib is optional, and imported when one is drawn."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from gxd.diagnose.student import quantile

if TYPE_CHECKING:
    from gxd.diagnose.diagnosis import Diagnosis
    from gxd.diagnose.verdict import Probe

_OLD, _FRESH = "#d1495b", "#2e6f95"
_COLOURS = ("#d1495b", "#edae49", "#2e6f95", "#66a182")


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as pyplot
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install 'gxd[plot]'") from error
    return pyplot


def diagnosis(found: Diagnosis) -> Any:
    """Shares of units, ranks and utilities, side by side, one row for each group."""
    names = list(found.groups)
    height = max(2.6, 1.1 + 0.34 * len(names))
    figure, (shares, ranks, utilities) = _pyplot().subplots(
        1, 3, figsize=(12, height), sharey=True, layout="constrained"
    )
    places = torch.arange(len(names), dtype=torch.float64)
    kinds = {"dormant": "dormant", "saturation": "flat values", "never_active": "never on"}
    kinds["always_active"] = "always on"
    for n, (metric, label) in enumerate(kinds.items()):
        values = [100 * found.groups[name][metric] for name in names]
        shares.barh((places + 0.2 * n - 0.3).tolist(), values, 0.2, color=_COLOURS[n], label=label)
    shares.set(xlabel="% of the units (of the values)", xlim=(0, 100), yticks=places.tolist(), yticklabels=names)
    shares.invert_yaxis()
    for n, (metric, label) in enumerate({"effective_rank": "effective", "stable_rank": "stable"}.items()):
        values = [found.groups[name][metric] for name in names]
        ranks.barh((places + 0.3 * n - 0.15).tolist(), values, 0.3, color=_COLOURS[2 + n], label=label)
    sizes = [found.groups[name]["units"] for name in names]
    ranks.plot(sizes, places.tolist(), "|", color="black", markersize=12, label="units")
    ranks.set(xlabel="rank of the features")
    for place, name in zip(places.tolist(), names, strict=True):
        each = found.utilities[name]
        each = each[each.isfinite()].sort().values
        spread = torch.linspace(-0.3, 0.3, len(each)).tolist() if len(each) > 1 else [0.0] * len(each)
        utilities.plot(each.tolist(), [place + s for s in spread], ".", color=_FRESH, markersize=3)
    utilities.set(xlabel=f"utility of each unit ({found.utility}), sorted")
    if any(bool((each > 0).any()) for each in found.utilities.values()):
        utilities.set_xscale("symlog", linthresh=_smallest(found))
    for axes in (shares, ranks):
        axes.legend(fontsize="small", frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=4)
    for axes in (shares, ranks, utilities):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _smallest(found: Diagnosis) -> float:
    """Below this, a utility is drawn as if the scale were linear: the 5 % quantile of those above 0."""
    every = torch.cat([values.flatten() for values in found.utilities.values()])
    every = every[every.isfinite() & (every > 0)].sort().values
    return float(every[len(every) // 20])


def probe(found: Probe) -> Any:
    """The learning curves of the network and of fresh ones, a little smoothed: the mean, and the range of one run."""
    figure, axes = _pyplot().subplots(figsize=(7, 4), layout="constrained")
    width = max(1, found.steps // 40)
    for name, colour, label in (("old", _OLD, "this network"), ("fresh", _FRESH, "a fresh one")):
        curves = found.losses[name].double()
        blocks = curves[:, : curves.shape[1] // width * width].unflatten(1, (-1, width)).mean(2)
        steps = [(n + 0.5) * width for n in range(blocks.shape[1])]
        mean, half = blocks.mean(0), blocks.std(0) * math.sqrt(1 + 1 / len(blocks))
        half *= quantile(found.confidence, len(blocks) - 1)
        axes.plot(steps, mean.tolist(), color=colour, label=label)
        axes.fill_between(steps, (mean - half).tolist(), (mean + half).tolist(), color=colour, alpha=0.2, linewidth=0)
    axes.axhline(found.start, color="grey", linewidth=0.8, linestyle=":", label="a fresh one before training")
    axes.set(xlabel="step", ylabel="loss of the batch before the step", title=found.headline.partition(" (")[0])
    axes.title.set_fontsize("medium")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
