"""The figure of the age study."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from gxd.lab.report import numbers, paper, style, tables
from gxd.lab.report.age_results import LONG, PAPER_MATURITY, RANKINGS, SHOWN_RATE, Results, interval, reported
from gxd.lab.report.evidence import panel_order
from gxd.lab.report.figures import Picture

MARKERS = {
    (0.0, PAPER_MATURITY): "o",
    (0.5, PAPER_MATURITY): "D",
    (1.0, PAPER_MATURITY): "s",
    (0.0, LONG): "^",
}
"""(exponent, maturity) -> the mark of a rule."""
OTHER = "X"  # of any other exponent


def picture(found: Results, stream: str) -> Picture:
    """Above: what ranking by age, or a long maturity, does to every utility. Below: accuracy by age at reset."""
    here = {setting: reported(by_seed) for setting, by_seed in found.items() if setting.stream == stream}
    here = {setting: by_seed for setting, by_seed in here.items() if by_seed}
    panels = sorted({setting.panel for setting in here}, key=panel_order)
    seeds = sorted({len(by_seed) for by_seed in here.values()})
    methods = sorted({setting.method for setting in here if setting.resets}, key=paper.method_order)
    with style.styled():
        figure = style.new_figure(1.2 + 2.7 * len(panels), 5.6)
        grid = figure.subplots(2, len(panels), squeeze=False)
        for column, panel in enumerate(panels):
            mine = {setting: by_seed for setting, by_seed in here.items() if setting.panel == panel}
            _steps(grid[0][column], mine, methods, named=column == 0)
            _scatter(grid[1][column], mine, named=column == 0)
            grid[0][column].set_title(tables.panel_label(panel))
        handles = [
            Line2D(
                [],
                [],
                marker=mark,
                color=style.MUTED,
                markerfacecolor=_face(exponent, maturity, style.MUTED),
                linestyle="",
                label=f"{RANKINGS[exponent]}, maturity {maturity}" if not exponent else RANKINGS[exponent],
            )
            for (exponent, maturity), mark in MARKERS.items()
        ]
        if any(setting.exponent not in RANKINGS for setting in here):
            handles.append(Line2D([], [], marker=OTHER, color=style.MUTED, linestyle="", label="age, other exponent"))
        handles.append(Line2D([], [], color=style.colour("backprop"), linestyle=(0, (3, 2)), label="backprop"))
        figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    counted = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    title = paper.EXPERIMENTS.get(stream, stream)
    return Picture(
        f"age-{stream}",
        f"Ranking by age, {title}",
        f"Accuracy over the last eighth of the tasks, {counted} seed{'s' * (counted != '1')}. Above: rate "
        f"{SHOWN_RATE:g}, ranked by age with maturity {PAPER_MATURITY}, bars are 95 % intervals. Below: every setting, "
        "also of other rates and maturities, by the median age at which its units are reset.",
        figure,
        alt=f"Accuracy by utility and ranking, and against the age at reset, {title}",
    )


def _steps(axes: Axes, here: Results, methods: Sequence[str], *, named: bool) -> None:
    """A row per utility, a mark per rule."""
    for place, method in enumerate(methods):
        means = {
            (s.exponent, s.maturity): interval(r.accuracy for r in b.values())
            for s, b in here.items()
            if s.resets and s.method == method and s.rate == SHOWN_RATE and (s.exponent, s.maturity) in MARKERS
        }
        for k, ((exponent, maturity), mean) in enumerate(
            sorted(means.items(), key=lambda item: list(MARKERS).index(item[0]))
        ):
            height, reach = place + 0.2 * (k - (len(means) - 1) / 2), mean.high - mean.value
            axes.errorbar(
                100 * mean.value,
                height,
                xerr=100 * reach if math.isfinite(reach) else None,
                color=style.colour(method),
                marker=MARKERS[exponent, maturity],
                markersize=5,
                markerfacecolor=_face(exponent, maturity, style.colour(method)),
                elinewidth=1.0,
            )
    _line_of_backprop(axes, here, axes.axvline)
    axes.set_yticks(range(len(methods)), [paper.method_label(method) for method in methods] if named else [])
    axes.tick_params(axis="y", labelcolor=style.INK)
    axes.set_ylim(len(methods) - 0.5, -0.5)
    axes.grid(visible=False)
    axes.grid(visible=True, axis="x")
    axes.locator_params(axis="x", nbins=4)
    axes.set_xlabel("accuracy, %")


def _scatter(axes: Axes, here: Results, *, named: bool) -> None:
    """A mark per setting."""
    for setting, by_seed in here.items():
        age = numbers.mean(result.age for result in by_seed.values())
        if age.n:
            accuracy = numbers.mean(result.accuracy for result in by_seed.values())
            hue = style.colour(setting.method)
            longer = setting.maturity > PAPER_MATURITY and not setting.exponent
            mark = MARKERS.get((setting.exponent, LONG if longer else PAPER_MATURITY), OTHER)
            face = _face(setting.exponent, setting.maturity, hue)
            place = [age.value], [100 * accuracy.value]
            axes.plot(*place, linestyle="", marker=mark, color=hue, markerfacecolor=face, markersize=5)
    _line_of_backprop(axes, here, axes.axhline)
    axes.set_xscale("log")  # not by churn: it is relative to the maturity, which differs here
    axes.set_xlabel("median age at reset, steps")
    if named:
        axes.set_ylabel("accuracy, %")


def _face(exponent: float, maturity: int, hue: str) -> str:
    """Hollow: the paper's rule."""
    return hue if exponent or maturity > PAPER_MATURITY else style.PAPER


def _line_of_backprop(axes: Axes, here: Results, draw: Callable[..., Any]) -> None:
    for setting, by_seed in here.items():
        if not setting.resets:
            mean = numbers.mean(result.accuracy for result in by_seed.values())
            draw(100 * mean.value, color=style.colour("backprop"), linestyle=(0, (3, 2)), linewidth=1.0, zorder=1)
