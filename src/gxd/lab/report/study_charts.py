"""The charts of a study: learning curves, the sensitivity to a setting, and what happens inside the networks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gxd.lab.report import chart, paper
from gxd.lab.report.chart import Chart, Dot, Entry, Facts, Line, Look
from gxd.lab.report.evidence import Curve
from gxd.lab.report.page import Charts
from gxd.lab.report.study import Facet, Setting, Study, is_share
from gxd.lab.report.study_tables import facet_title, mean

LARGE, SMALL = (430, 270), (330, 210)
# In this order, then by name.
METRICS = [
    *("test_accuracy", "online_accuracy", "test_loss", "loss", "dormant_fraction", "effective_rank", "stable_rank"),
    *("weight_norm", "bias_norm", "gradient_norm", "resets", "churn", "median_age_at_reset", "reach"),
    "largest_reference",
]


def learning(study: Study, anchor: str) -> Charts:
    """The metric that counts, task by task: a chart per facet, a line per setting, of which the best are seen."""
    made = []
    for facet, settings in study.facets.items():
        curves = {id(setting): setting.curve() for setting in settings}
        lines = _lines(study, facet, settings, curves, named=True)
        end = _reached(settings)
        svg = chart.over_tasks(
            lines, percent=study.goal.percent, end=end, title=f"{study.goal.label} by task", size=LARGE
        )
        first = sorted(lines, key=lambda line: line.quiet)  # the best, which are drawn last
        legend = [Entry(line.name, line.look, line.facts, line.quiet) for line in first]
        made.append(Chart(facet_title(facet), svg, dict(facet), legend))
    return Charts(anchor, made)


def sensitivity(study: Study, anchor: str) -> list[Charts]:
    """What is reached with each value of each swept setting."""
    looks = chart.looks(study.methods)
    by_field: dict[str, Charts] = {}
    for field, rest, by_method in study.comparisons():
        dots, slots = [], study.swept[field]
        for number, (method, settings) in enumerate(by_method.items()):
            shift = 0.5 * ((number + 0.5) / len(by_method) - 0.5)  # so that methods do not hide each other
            for setting in settings:
                last, words = (
                    setting.last(),
                    [f"{one} {setting.values[one]}" for one in study.varied if one != "method"],
                )
                reached = f"{mean(last, study.goal.percent)}, n={last.n}" if last.n else "all runs diverged"
                said = f"{paper.method_label(method)}, {', '.join(words)}: {reached}"
                slot = slots.index(setting.values[field])
                dots.append(Dot(said, looks[method], slot, shift, last.value, _facts(study, setting)))
        svg = chart.over_values(
            dots,
            slots,
            field,
            percent=study.goal.percent,
            higher=study.goal.higher,
            title=f"{study.goal.label} by {field}",
            size=SMALL,
        )
        made = Chart(facet_title(rest) or study.goal.label, svg, dict(rest), _legend(by_method, looks))
        by_field.setdefault(field, Charts(anchor, [], field, small=True)).charts.append(made)
    return list(by_field.values())


def inside(study: Study, anchor: str) -> tuple[list[Charts], list[str]]:
    """All other metrics of the best settings, and their names. What is always nothing is left out."""
    looks, found, names = chart.looks(study.methods), [], list[str]()
    for facet in study.facets:
        best = {method: one.setting for method, one in study.best(facet).items()}
        made = []
        for name in _logged(study, list(best.values())):
            curves = {id(setting): setting.curve(name) for setting in best.values()}
            lines = _lines(study, facet, list(best.values()), curves, named=False)
            title = name.replace("_", " ") + (", %" if is_share(name) else "")
            end = _reached(list(best.values()))
            svg = chart.over_tasks(lines, percent=is_share(name), end=end, title=f"{title} by task", size=SMALL)
            made.append(Chart(title, svg, dict(facet)))
            names.append(name)
        if made:
            found.append(Charts(anchor, made, facet_title(facet), dict(facet), _legend(best, looks), small=True))
    return found, list(dict.fromkeys(names))


def _reached(settings: Sequence[Setting]) -> int:
    """The last task of any run."""
    return max(run.tasks for setting in settings for run in setting.group.runs)


def _logged(study: Study, settings: Sequence[Setting]) -> list[str]:
    values: dict[str, bool] = {}
    for run in (run for setting in settings for run in setting.group.runs):
        for name in run.series:
            values[name] = values.get(name, False) or any(math.isfinite(v) and v for v in run.blocks(name))
    there = {name for name, moves in values.items() if moves and name != study.goal.metric}
    return [*(name for name in METRICS if name in there), *sorted(there - {*METRICS})]


def _lines(
    study: Study, facet: Facet, settings: Sequence[Setting], curves: Mapping[int, Curve | None], *, named: bool
) -> list[Line]:
    """The lines of a facet, those of the best settings last, so that they lie above the others."""
    looks, best = chart.looks(study.methods), {id(one.setting) for one in study.best(facet).values()}
    made = []
    for setting in sorted(settings, key=lambda one: id(one) in best):
        line, method = curves[id(setting)], paper.method_label(setting.method)
        words, chosen = study.words(setting), id(setting) in best
        if line is None:
            seeds, points, note = len(setting.group.runs), [], ", nothing to draw"
        else:
            seeds, points = line.n, list(zip(line.x, line.mean, line.se, line.alive, strict=True))
            note = f", {line.label}" if line.label else ""
        name = f"{method}{f' ({words})' if words else ''}, {seeds} seed{'s' * (seeds != 1)}{note}"
        label, deaths = f"{method} n={seeds}" if chosen and named else "", line.deaths if line is not None else ()
        made.append(Line(name, looks[setting.method], points, _facts(study, setting), label, not chosen, deaths))
    return made


def _facts(study: Study, setting: Setting) -> Facts:
    shown = {field: setting.values[field] for field in study.varied}
    return {**shown, "method": paper.method_label(setting.method)}


def _legend(methods: Mapping[str, object], looks: Mapping[str, Look]) -> list[Entry]:
    return [Entry(paper.method_label(one), looks[one], {"method": paper.method_label(one)}) for one in methods]
