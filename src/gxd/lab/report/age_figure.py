"""The figure of the age study: what sparing newborns gains, and how old the units are that each rule resets."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from gxd.lab.report import numbers, paper, style, tables
from gxd.lab.report.age_results import Results, Rule, Stream, at_rate, interval, paired_gains, papers, rules_at
from gxd.lab.report.evidence import panel_order
from gxd.lab.report.figures import Picture


class Mark(NamedTuple):
    """How a rule is drawn."""

    shape: str
    colour: str


AGE = (
    Mark("D", "#7fb0bd"),
    Mark("s", "#14505f"),
    Mark("P", "#3f7f8f"),
    Mark("X", "#5f98a6"),
)  # the lowest exponent first
MATURITY = (Mark("^", "#b3123b"), Mark("v", "#e58aa0"), Mark("<", "#cc5577"), Mark(">", "#d9738f"))  # the longest first
PAPERS = Mark("o", style.MUTED)


def picture(found: Results, stream: Stream, rate: float) -> Picture:
    """Above: what each rule gains over the paper's, utility by utility. Below: the age at which units are reset."""
    here = at_rate(found, stream, rate)
    panels = sorted({setting.panel for setting in here}, key=panel_order)
    methods = sorted({setting.method for setting in here if setting.resets}, key=paper.method_order)
    rules = rules_at(here)
    marks = _marks(rules)
    with style.styled():
        figure = style.new_figure(1.2 + 2.5 * len(panels), 1.4 + 0.62 * len(methods))
        grid = figure.subplots(2, len(panels), sharex="row", sharey=True, squeeze=False, height_ratios=(3, 2))
        for above, below, panel in zip(*grid, panels, strict=True):
            mine = {setting: by_seed for setting, by_seed in here.items() if setting.panel == panel}
            _gains(above, mine, methods, marks)
            _ages(below, mine, methods, marks)
            above.set_title(f"{tables.panel_label(panel)}\n", pad=6)
            text = _levels(mine)
            above.text(0, 1.02, text, transform=above.transAxes, color=style.MUTED, fontsize=8, va="bottom")
        for axes in grid[:, 0]:
            axes.set_yticks(range(len(methods)), [paper.method_label(method) for method in methods])
            axes.tick_params(axis="y", labelcolor=style.INK)
            axes.set_ylim(len(methods) - 0.5, -0.5)
        handles = [_handle(rule.words, marks[rule]) for rule in rules]
        figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=8.5)
    counts = sorted({len(by_seed) for by_seed in here.values()})
    counted = "–".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return Picture(
        f"age-{stream.name}-rate-{rate:g}",
        f"Sparing newborns, {stream.label}, rate {rate:g}",
        f"{stream.label}, rate {rate:g}, {counted} seed{'s' * (counted != '1')}. Above: points of accuracy over the "
        "last eighth of the tasks that a rule gains over the paper's with the same utility, seed by seed, with 95 % "
        "intervals. Below: the median age at which units are reset.",
        figure,
        alt="What each rule gains over the paper's by utility and network, and the age of the units it resets, "
        f"{stream.label}, rate {rate:g}",
    )


def _marks(rules: list[Rule]) -> dict[Rule, Mark]:
    by_age = [rule for rule in rules if rule.exponent]
    longer = sorted((rule for rule in rules if not rule.exponent and not rule.is_papers), key=lambda r: -r.maturity)
    marks = {rule: AGE[k % len(AGE)] for k, rule in enumerate(by_age)}
    marks |= {rule: MATURITY[k % len(MATURITY)] for k, rule in enumerate(longer)}
    return {rule: marks.get(rule, PAPERS) for rule in rules}


def _handle(words: str, mark: Mark) -> Line2D:
    return Line2D([], [], linestyle="", label=words, **_look(mark))


def _look(mark: Mark) -> dict[str, Any]:
    """The paper's rule is a ring, around what lies at the same place."""
    if mark is PAPERS:
        return {"marker": mark.shape, "color": mark.colour, "markerfacecolor": "none", "markersize": 7.5, "zorder": 3}
    return {"marker": mark.shape, "color": mark.colour, "markersize": 5}


def _gains(axes: Axes, here: Results, methods: list[str], marks: dict[Rule, Mark]) -> None:
    """A row per utility, a mark per rule but the paper's, which is the line at zero."""
    shown = [rule for rule in marks if not rule.is_papers]
    for setting in here:
        if setting.resets and setting != papers(setting):
            values = paired_gains(here, setting)
            if not values:
                continue
            gain = interval(values.values())
            reach = 100 * (gain.high - gain.value)
            axes.errorbar(
                100 * gain.value,
                methods.index(setting.method) + 0.6 * ((shown.index(Rule.of(setting)) + 0.5) / len(shown) - 0.5),
                xerr=reach if math.isfinite(reach) else None,
                elinewidth=1.2,
                **_look(marks[Rule.of(setting)]),
            )
    axes.axvline(0, color=style.MUTED, linewidth=1.0, zorder=1)
    axes.set_xlabel("points gained over the paper's rule")
    _rows(axes)


def _ages(axes: Axes, here: Results, methods: list[str], marks: dict[Rule, Mark]) -> None:
    for setting, by_seed in here.items():
        age = numbers.mean(result.age for result in by_seed.values())
        if setting.resets and age.n:
            look = _look(marks[Rule.of(setting)])
            axes.plot([age.value], [methods.index(setting.method)], linestyle="", **look)
    axes.set_xscale("log")  # ages and not churn, which is relative to the maturity
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("median age at reset, steps")
    _rows(axes)


def _rows(axes: Axes) -> None:
    axes.grid(visible=False)
    axes.grid(visible=True, axis="x")


def _levels(here: Results) -> str:
    """Where the gains start from: what backprop and GXD come to with the paper's rule."""
    said = []
    for method in ("backprop", "gxd"):
        for setting, by_seed in here.items():
            if setting.method == method and (not setting.resets or setting == papers(setting)):
                said.append(
                    f"{paper.method_label(method)} {100 * numbers.mean(r.accuracy for r in by_seed.values()).value:.1f}"
                )
    return " · ".join(said) + (" %" if said else "")
