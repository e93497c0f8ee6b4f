"""The figures of the age study: where ranking by age takes each utility, what every rule gains over the paper's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from gxd.diagnose.student import quantile
from gxd.lab.report import numbers, paper, style, tables
from gxd.lab.report.age_results import (
    Result,
    Results,
    Rule,
    Setting,
    Stream,
    at_rate,
    interval,
    paired_gains,
    papers,
    ranking,
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
MATURITY = (Mark("^", "#b3123b"), Mark("v", "#e58aa0"), Mark("<", "#cc5577"), Mark(">", "#d9738f"))  # the longest first
PAPERS = Mark("o", style.MUTED)
DASHES = (0, (3, 3))


def picture(found: Results, stream: Stream, rate: float) -> Picture:
    """Above, at a glance: from the paper's rule to ranking by age. Below: what every rule gains over the paper's."""
    here = at_rate(found, stream, rate)
    panels = _networks(setting.panel for setting in here)
    methods = sorted({setting.method for setting in here if setting.resets}, key=paper.method_order)
    rules = rules_at(here)
    marks = _marks(rules)
    with style.styled():
        figure = style.new_figure(1.2 + 2.0 * len(panels), 3.6 + 0.4 * len(methods))
        heights = (2.4, 0.6 + 0.4 * len(methods))
        grid = figure.subplots(2, len(panels), sharex="row", sharey="row", squeeze=False, height_ratios=heights)
        for above, below, panel in zip(*grid, panels, strict=True):
            mine = {setting: by_seed for setting, by_seed in here.items() if setting.panel == panel}
            _arrows(above, mine)
            _gains(below, mine, methods, marks)
            above.set_title(tables.panel_label(panel))
        first = grid[1, 0]
        grid[0, 0].set_ylabel("accuracy, %")
        first.set_yticks(range(len(methods)), [paper.method_label(method) for method in methods])
        for label, method in zip(first.get_yticklabels(), methods, strict=True):
            label.set_color(style.colour(method))  # the key to the colours above
        first.set_ylim(len(methods) - 0.5, -0.5)
        handles = [Line2D([], [], color=style.MUTED, linestyle=DASHES, linewidth=1.0, label="backprop")]
        handles += [_handle(f"paper's rule{_goes_to(rules)}" if r.is_papers else r.words, marks[r]) for r in rules]
        figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=8.5)
    counts = sorted({len(by_seed) for by_seed in here.values()})
    counted = "–".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return Picture(
        f"age-{stream.name}-rate-{rate:g}",
        f"Sparing newborns, {stream.label}, rate {rate:g}",
        f"{stream.label}, rate {rate:g}, {counted} seed{'s' * (counted != '1')}. Above: accuracy over the last eighth "
        "of the tasks, and how old the units are that are reset; an arrow leads from the paper's rule to ranking by "
        "age with the same utility. Below: points that a rule gains over the paper's, seed by seed, with 95 % "
        "intervals.",
        figure,
        alt="Where ranking by age takes each utility from the paper's rule, and what each rule gains over it, "
        f"{stream.label}, rate {rate:g}",
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
    longer = sorted((rule for rule in rules if not rule.exponent and not rule.is_papers), key=lambda r: -r.maturity)
    marks = {rule: AGE[k % len(AGE)] for k, rule in enumerate(by_age)}
    marks |= {rule: MATURITY[k % len(MATURITY)] for k, rule in enumerate(longer)}
    return {rule: marks.get(rule, PAPERS) for rule in rules}


def _goes_to(rules: list[Rule]) -> str:
    """What the arrows mean."""
    furthest = max(rule.exponent for rule in rules)
    return f" (\N{RIGHTWARDS ARROW} {ranking(furthest)})" if furthest else ""


def _handle(words: str, mark: Mark) -> Line2D:
    return Line2D([], [], linestyle="", label=words, **_look(mark))


def _look(mark: Mark) -> dict[str, Any]:
    """The paper's rule is a ring, around what lies at the same place."""
    if mark is PAPERS:
        return {"marker": mark.shape, "color": mark.colour, "markerfacecolor": "none", "markersize": 7.5, "zorder": 3}
    return {"marker": mark.shape, "color": mark.colour, "markersize": 5}


def _gains(axes: Axes, here: Results, methods: list[str], marks: dict[Rule, Mark]) -> None:
    """A row per utility, a mark per rule but the paper's, which is the line at zero."""
    for setting in here:
        if setting.resets and setting != papers(setting):
            _gain(axes, here, setting, methods.index(setting.method), marks)
    _gain_axis(axes)


def _gain(axes: Axes, found: Results, setting: Setting, row: int, marks: dict[Rule, Mark], many: int = 1) -> None:
    """What a setting gains over the paper's rule. Open if the interval has 0 in it at a level for ``many`` at once."""
    values = [100 * gain for gain in paired_gains(found, setting).values()]
    if not values:
        return
    gain, rule, shown = interval(values), Rule.of(setting), [rule for rule in marks if not rule.is_papers]
    look = _look(marks[rule])
    if many > 1 and not _holds(values, many):
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


def _arrows(axes: Axes, here: Results) -> None:
    """Accuracy by age at reset. A ring is the paper's rule; its arrow goes to ranking by age, the highest exponent."""
    for setting, by_seed in here.items():
        hue, (age, accuracy) = style.colour(setting.method), _place(by_seed)
        if not setting.resets:
            axes.axhline(accuracy, color=style.MUTED, linestyle=DASHES, linewidth=1.0, zorder=1)
        elif setting == papers(setting):
            axes.plot([age], [accuracy], marker="o", color=hue, markerfacecolor=style.PAPER, markersize=6, zorder=3)
            ranked = [other for other in here if other.exponent and papers(other) == setting]
            if ranked:
                look = {"arrowstyle": "-|>", "color": hue, "linewidth": 1.6, "shrinkA": 3, "shrinkB": 0}
                end = _place(here[max(ranked, key=lambda other: other.exponent)])
                axes.plot(*end, linestyle="")  # an arrow alone is not seen by the limits of the axes
                axes.annotate("", xy=end, xytext=(age, accuracy), arrowprops=look)
    axes.set_xscale("log")  # ages and not churn, which is relative to the maturity
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("median age at reset, steps")


def _place(by_seed: Mapping[int, Result]) -> tuple[float, float]:
    age, accuracy = (numbers.mean(getattr(r, name) for r in by_seed.values()) for name in ("age", "accuracy"))
    return age.value, 100 * accuracy.value
