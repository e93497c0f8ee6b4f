"""The figures of the age study: accuracy by how much of a network is renewed, and what every rule gains."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator, StrMethodFormatter

from gxd.diagnose.student import quantile
from gxd.lab.report import numbers, paper, style, tables
from gxd.lab.report.age_results import (
    PAPER_MATURITY,
    Results,
    Rule,
    Setting,
    Stream,
    at_rate,
    interval,
    paired_gains,
    papers,
    rules_at,
)
from gxd.lab.report.evidence import Panel, panel_order
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
MATURITY = (
    Mark("v", "#e58aa0"),
    Mark("^", "#b3123b"),
    Mark("<", "#cc5577"),
    Mark(">", "#d9738f"),
)  # the shortest first
PAPERS = Mark("o", style.MUTED)
RING: dict[str, Any] = {"markerfacecolor": style.PAPER, "markersize": 6, "zorder": 3}
DASHES = (0, (3, 3))
STRAIGHT = 2  # points of gain; beyond, the axis is logarithmic, so that one gain of 30 does not hide all others
GAIN_TICKS = (-10, -2, 0, 2, 10)


def picture(found: Results, stream: Stream, rate: float) -> Picture:
    """Above, at a glance: accuracy by the reach of the resets. Below: what every rule gains over the paper's."""
    here = at_rate(found, stream, rate)
    panels = _networks(setting.panel for setting in here)
    resets = [setting for setting in here if setting.resets]
    compared = [setting for setting in resets if setting != papers(setting)]
    methods = sorted({setting.method for setting in resets}, key=paper.method_order)  # the key to the colours, too
    rules = rules_at(here)
    marks = _marks(rules)
    axis = _axis(here)
    with style.styled():
        figure = style.new_figure(1.2 + 2.0 * len(panels), 3.6 + 0.4 * len(methods))
        heights = (2.4, 0.6 + 0.4 * len(methods))
        grid = figure.subplots(2, len(panels), sharex="row", sharey="row", squeeze=False, height_ratios=heights)
        for above, below, panel in zip(*grid, panels, strict=True):
            _places(
                above, {setting: by_seed for setting, by_seed in here.items() if setting.panel == panel}, axis, marks
            )
            for setting in compared:
                if setting.panel == panel:
                    _gain(below, here, setting, methods.index(setting.method), marks, len(compared))
            _gain_axis(below)
            above.set_title(tables.panel_label(panel))
        first = grid[1, 0]
        first.set_xscale("symlog", linthresh=STRAIGHT, linscale=0.7)
        first.set_xticks(GAIN_TICKS, [f"{tick:+}" if tick else "0" for tick in GAIN_TICKS])
        first.xaxis.set_minor_locator(NullLocator())
        first.set_xlim(*_span(found, compared))
        axis.draw(grid[0, 0])
        grid[0, 0].set_ylabel("accuracy, %")
        first.set_yticks(range(len(methods)), [paper.method_label(method) for method in methods])
        for label, method in zip(first.get_yticklabels(), methods, strict=True):
            label.set_color(style.colour(method))
        first.set_ylim(len(methods) - 0.5, -0.5)
        backprop = Line2D([], [], color=style.MUTED, linestyle=DASHES, linewidth=1.0, label="backprop")
        figure.legend(
            handles=[backprop, *(_handle("paper's rule" if r.is_papers else r.words, marks[r]) for r in rules)],
            loc="outside lower center",
            ncols=4,
            frameon=False,
            fontsize=8.5,
        )
    counts = sorted({len(by_seed) for by_seed in here.values()})
    counted = "–".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return Picture(
        f"age-{stream.name}-rate-{rate:g}",
        f"Sparing newborns, {stream.label}, rate {rate:g}",
        f"{stream.label}, rate {rate:g}, {counted} seed{'s' * (counted != '1')}. Above: accuracy over the last eighth "
        f"of the tasks, by {axis.words}; the mark is the rule, the colour the utility, as it is named below. Below: "
        "points that a rule gains over the paper's, seed by seed, with 95 % intervals. Filled there: the interval "
        f"leaves 0 out after Bonferroni's correction for {len(compared)} comparisons, too.",
        figure,
        alt=f"Accuracy by {axis.words}, and what each rule gains over the paper's, {stream.label}, rate {rate:g}",
    )


def forest(found: Results, method: str) -> list[Picture]:
    """What every rule gains for one utility, on all streams, networks and rates; none where nothing is compared."""
    settings = [s for s in found if s.method == method and s != papers(s) and len(paired_gains(found, s)) > 1]
    if not settings:
        return []
    streams = sorted({setting.stream for setting in settings})
    rates = sorted({setting.rate for setting in settings}, reverse=True)
    panels = {stream: _networks(s.panel for s in settings if s.stream == stream) for stream in streams}
    rules = rules_at(settings)
    looks = _marks(
        list(dict.fromkeys(rule._replace(rate=0.0) for rule in rules))
    )  # a rule looks the same at every rate
    marks = {rule: looks[rule._replace(rate=0.0)] for rule in rules}
    with style.styled():
        heights = [0.45 + 0.42 * len(panels[stream]) for stream in streams]
        figure = style.new_figure(1.6 + 3.6 * len(rates), 1.0 + sum(heights))
        grid = figure.subplots(
            len(streams), len(rates), sharex=True, sharey="row", squeeze=False, height_ratios=heights
        )
        for (stream, across), (column, rate) in product(zip(streams, grid, strict=True), enumerate(rates)):
            axes, rows = across[column], panels[stream]
            mine = {rule: mark for rule, mark in marks.items() if rule.rate == rate}
            axes.set_visible(any((setting.stream, setting.rate) == (stream, rate) for setting in settings))
            for setting in settings:
                if (setting.stream, setting.rate) == (stream, rate):
                    _gain(axes, found, setting, rows.index(setting.panel), mine, len(settings))
            _gain_axis(axes)
            axes.set_xlabel(axes.get_xlabel() if stream == streams[-1] else "")
            axes.set_title(f"{stream.label}, rate {rate:g}")
            axes.set_yticks(range(len(rows)), map(tables.panel_label, rows))
            axes.set_ylim(len(rows) - 0.5, -0.5)
        handles = [_handle(words, mark) for words, mark in {_words(rule): marks[rule] for rule in rules}.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)
    label = paper.method_label(method)
    made = Picture(
        f"age-{method}",
        f"{label}: what sparing newborns gains",
        f"Points that each rule gains over the paper's with {label}, seed by seed, with 95 % intervals. Filled: the "
        f"interval leaves 0 out after Bonferroni's correction for {len(settings)} comparisons, too.",
        figure,
        alt=f"What each rule gains over the paper's with {label}, on every stream and network",
    )
    return [made]


def _networks(panels: Iterable[Panel]) -> list[Panel]:
    return sorted(set(panels), key=panel_order)


def _words(rule: Rule) -> str:
    """Of whatever rate."""
    return rule.words if rule.exponent else f"maturity {rule.maturity:,}"


def _marks(rules: list[Rule]) -> dict[Rule, Mark]:
    by_age = [rule for rule in rules if rule.exponent]
    longer = sorted((rule for rule in rules if not rule.exponent and not rule.is_papers), key=lambda r: r.maturity)
    marks = {rule: AGE[k % len(AGE)] for k, rule in enumerate(by_age)}
    marks |= {rule: MATURITY[k % len(MATURITY)] for k, rule in enumerate(longer)}
    return {rule: marks.get(rule, PAPERS) for rule in rules}


def _handle(words: str, mark: Mark) -> Line2D:
    return Line2D([], [], linestyle="", label=words, **_look(mark))


def _look(mark: Mark, colour: str | None = None) -> dict[str, Any]:
    look = {"marker": mark.shape, "color": colour or mark.colour, "markersize": 5}
    return {**look, **RING} if mark is PAPERS else look


def _gain(axes: Axes, found: Results, setting: Setting, row: int, marks: dict[Rule, Mark], many: int) -> None:
    """What a setting gains over the paper's rule. Open if the interval has 0 in it at a level for ``many`` at once."""
    values = _points(found, setting)
    if not values:
        return
    gain, rule, shown = interval(values), Rule.of(setting), [rule for rule in marks if not rule.is_papers]
    look = _look(marks[rule])
    if not _holds(values, many):
        look["markerfacecolor"] = style.PAPER
    axes.errorbar(
        gain.value,
        row + 0.6 * ((shown.index(rule) + 0.5) / len(shown) - 0.5),
        xerr=gain.high - gain.value if len(values) > 1 else None,
        elinewidth=1.2,
        **look,
    )


def _holds(values: list[float], many: int) -> bool:
    """Whether the t interval of the mean leaves 0 out after Bonferroni's correction."""
    mean = numbers.mean(values)
    return mean.n > 1 and abs(mean.value) > quantile(1 - 0.05 / many, mean.n - 1) * mean.se


def _gain_axis(axes: Axes) -> None:
    axes.axvline(0, color=style.MUTED, linewidth=1.0, zorder=1)
    axes.set_xlabel("points over the paper's rule")
    axes.grid(visible=False)
    axes.grid(visible=True, axis="x")


def _points(found: Results, setting: Setting) -> list[float]:
    return [100 * gain for gain in paired_gains(found, setting).values()]


def _span(found: Results, compared: Sequence[Setting]) -> tuple[float, float]:
    """From the lowest end of an interval to the highest, with room for a tick on both sides of zero."""
    gains = [interval(values) for setting in compared if (values := _points(found, setting))]
    ends = [end for gain in gains for end in (gain.low, gain.high, gain.value) if math.isfinite(end)]
    return 1.2 * min([-STRAIGHT, *ends]), 1.2 * max([STRAIGHT, *ends])


class _Axis(NamedTuple):
    """What accuracy is drawn by."""

    name: str  # of a field of Result
    label: str
    words: str

    def draw(self, axes: Axes) -> None:
        """Reach from 0 to 1, or ages as powers."""
        if self.name == "reach":
            axes.set_xlim(-0.06, 1.06)
            axes.set_xticks((0, 0.5, 1), ("0", "50", "100"))
        else:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xlim(left=0.9 * PAPER_MATURITY)


REACH = _Axis("reach", "units reached, %", "the share of all units that were reset in the second half of the tasks")
AT_RESET = _Axis("age", "median age at reset, steps", "the median age of the units that are reset, in steps")


def _axis(here: Results) -> _Axis:
    """Reach, but of runs from before it was recorded."""
    return REACH if any(math.isfinite(r.reach) for by_seed in here.values() for r in by_seed.values()) else AT_RESET


def _places(axes: Axes, here: Results, axis: _Axis, marks: dict[Rule, Mark]) -> None:
    """A mark of the rule in the colour of the utility; the paper's rule is a ring. Backprop is a dashed line."""
    for setting, by_seed in here.items():
        x = numbers.mean(v for v in (getattr(r, axis.name) for r in by_seed.values()) if math.isfinite(v)).value
        y = 100 * numbers.mean(result.accuracy for result in by_seed.values()).value
        if not setting.resets:
            axes.axhline(y, color=style.MUTED, linestyle=DASHES, linewidth=1.0, zorder=1)
        else:
            axes.plot([x], [y], **_look(marks[Rule.of(setting)], style.colour(setting.method)))
    axes.set_xlabel(axis.label)
