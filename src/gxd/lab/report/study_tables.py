"""The tables of a study."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from gxd.lab.report import chart, numbers, paper, tables
from gxd.lab.report.digest import SETTLED
from gxd.lab.report.study import Best, Facet, Setting, Study, chooser, steps_per_task
from gxd.lab.report.tables import Cell, Table

MARKS = {"done": "good", "diverged": "bad"}


def overview(study: Study, name: str) -> Table:
    """What was run, what was swept, and what was the same in all runs."""
    table = Table(f"{name}-overview", "Runs and settings", "", ["What", "Values"])
    # A run that is not over may be under way or broken off: its files do not tell.
    statuses = Counter(run.status if run.status in SETTLED else "not complete" for run in study.runs)
    rows = {
        "runs": [Cell(f"{count} {one}", "", MARKS.get(one, "unknown")) for one, count in statuses.most_common()],
        "counts": [_chip(f"{study.goal.label} ({study.goal.better})")],
        "methods": [_chip(paper.method_label(method)) for method in study.methods],
        **{field: [_chip(value) for value in values] for field, values in study.swept.items()},
        "seeds": [_chip(str(seed)) for seed in sorted({run.seed for run in study.runs})],
    }
    for what, chips in rows.items():
        table.rows.append([Cell(what), Cell(", ".join(chip.text for chip in chips), chips=tuple(chips))])
    table.caption = f"The same in all runs: {', '.join(f'{one} {value}' for one, value in study.fixed.items())}."
    return table


def best(study: Study, name: str, every: Sequence[Study]) -> Table:
    """The best setting of each method in each facet, and how it was chosen."""
    goal, unit = study.goal, ", %" if study.goal.percent else ""
    table = Table(
        f"{name}-best",
        "The best setting of each method",
        f"{goal.label}, mean ± SE over the seeds that lived, over the first and the last tenth of the tasks that count "
        f"(in whole blocks of the digest). Best ({goal.better}) over the last tenth, as gxd sweep chooses: a run that "
        "diverged counts as a network that has learned nothing, and a setting with fewer seeds than others of its "
        "method takes no part. Bold: the best of all methods, of those without a diverged run.",
        [
            *study.facet_fields,
            "Method",
            "Setting",
            f"First tenth{unit}",
            f"Last tenth{unit}",
            "Seeds",
            "Diverged",
            "Chosen",
        ],
    )
    chosen_by = chooser(study, every)
    for facet in study.facets:
        methods = study.best(facet)
        sound = [one.setting.merit() for one in methods.values() if not one.setting.group.diverged]
        top = max((merit for merit in sound if math.isfinite(merit)), default=math.nan)
        for one in methods.values():
            setting, group = one.setting, one.setting.group
            mark = "best" if setting.merit() == top and not group.diverged else ""
            running = len(group.runs) - len(group.settled)
            table.rows.append(
                [
                    *_place(study, setting),
                    Cell(mean(setting.first(), goal.percent)),
                    Cell(mean(setting.last(), goal.percent), "", mark),
                    Cell(str(len(group.settled)), f"{running} not complete" if running else ""),
                    Cell(f"{len(group.diverged)}/{len(group.runs)}{group.so_far}", "", "bad" if group.diverged else ""),
                    _how(one, chosen_by),
                ]
            )
            record = {**_record(study, setting), **_reached(setting), "diverged": len(group.diverged)}
            table.records.append({**record, "candidates": one.candidates, "key": group.runs[0].key})
    return table


def _how(one: Best, by: Study | None) -> Cell:
    """How a setting was chosen, marked where the numbers flatter it."""
    later = f", {one.waiting} with fewer seeds" if one.waiting else ""
    if one.candidates > 1:
        return Cell(f"best of {one.candidates} on these seeds{later}", "", "bad")
    choosing = sorted({run.seed for run in by.runs}) if by is not None else []
    if choosing and not {run.seed for run in one.setting.group.runs} & {*choosing}:
        return Cell(f"beforehand, on seeds {', '.join(map(str, choosing))}", "", "good")
    return Cell(f"the only one{later}", "", "bad" if later else "")


def divergences(study: Study, name: str) -> Table:
    """Every setting with a run that diverged, and when."""
    table = Table(
        f"{name}-divergences",
        "Settings that diverged",
        "Of all runs that were started, with Wilson's 95 % interval, and after how many tasks, on which seeds.",
        [*study.facet_fields, "Method", "Setting", "Diverged", "After tasks", "Of tasks", "Seeds"],
    )
    for setting in study.settings:
        group = setting.group
        when = sorted((run.diverged_at or 0, run.seed) for run in group.diverged)
        if not when:
            continue
        after, seeds = (" ".join(str(pair[i]) for pair in when) for i in (0, 1))
        cells = [tables.rate(len(when), len(group.runs)) + group.so_far, after.replace(" ", ", "), str(group.tasks)]
        table.rows.append([*_place(study, setting), *(Cell(text) for text in (*cells, seeds.replace(" ", ", ")))])
        counts = {"diverged": len(when), "started": len(group.runs), "after": after, "seeds": seeds}
        table.records.append({**_record(study, setting), **counts, "key": group.runs[0].key})
    return table


def sensitivity(study: Study, name: str) -> Table:
    """For each value of each swept setting: what the best setting with it reaches, and the mean of all."""
    table = Table(
        f"{name}-sensitivity",
        "The same in numbers",
        f"{study.goal.label}, mean over seeds: of the best setting with that value, and the mean over all of them "
        "but those whose runs all diverged.",
        ["Setting", "Value", *study.facet_fields, "Method", "Best", "Mean of all", "Settings"],
    )
    pick, percent = max if study.goal.higher else min, study.goal.percent
    for field, rest, by_method in study.comparisons():
        known = dict(rest)
        for method, settings in by_method.items():
            for value in study.swept[field]:
                reached = [setting.last() for setting in settings if setting.values[field] == value]
                found = [one.value for one in reached if one.n]
                if not found:
                    continue
                top, middle = pick(found), sum(found) / len(found)
                place = [field, value, *(known.get(one, "") for one in study.facet_fields), paper.method_label(method)]
                cells = [*place, chart.number(top, percent), chart.number(middle, percent), str(len(found))]
                table.rows.append([Cell(text) for text in cells])
                record = {"setting": field, "value": value, **known, "method": method}
                table.records.append({**record, "best": f"{top:.5g}", "mean": f"{middle:.5g}", "settings": len(found)})
    return table


def times(study: Study, name: str) -> Table:
    """What the runs took, by method."""
    table = Table(
        f"{name}-times",
        "Time by method",
        "Wall time as the runs have measured it, with measuring and compiling; medians over runs. What shared a "
        "machine with others took longer: gxd bench compares methods alone.",
        [
            "Method",
            "Runs",
            "Seconds per run",
            "Seconds per task",
            "Milliseconds per step",
            "Of backprop",
            "Hours in all",
        ],
    )
    paces: dict[str, list[float]] = defaultdict(list)
    steps: dict[str, list[float]] = defaultdict(list)
    whole: dict[str, list[float]] = defaultdict(list)
    for run in study.runs:
        if run.seconds and run.tasks:
            method, count = str(run.config.get("method")), steps_per_task(run)
            whole[method].append(run.seconds)
            paces[method].append(run.seconds / run.tasks)
            if count:
                steps[method].append(run.seconds / run.tasks / count)
    base = median(paces["backprop"]) if "backprop" in paces else None
    for method in sorted(whole, key=paper.method_order):
        pace, each = median(paces[method]), median(steps[method]) if steps[method] else None
        cells = [paper.method_label(method), str(len(whole[method])), f"{median(whole[method]):.1f}", f"{pace:.3g}"]
        cells += [f"{1000 * each:.3g}" if each else "–", f"{pace / base:.2f}" if base else "–"]
        table.rows.append([Cell(text) for text in (*cells, f"{sum(whole[method]) / 3600:.2f}")])
        record: dict[str, Any] = {
            "method": method,
            "runs": len(whole[method]),
            "seconds_per_run": median(whole[method]),
        }
        table.records.append(
            {**record, "seconds_per_task": f"{pace:.5g}", "seconds_per_step": f"{each:.5g}" if each else ""}
        )
    return table


def every_setting(study: Study, name: str) -> Table:
    """Every setting, with what it reached."""
    fields = [field for field in study.varied if field != "method"]
    table = Table(
        f"{name}-settings",
        f"All {len(study.settings)} settings",
        f"{study.goal.label}: mean ± SE over the seeds that lived, over the first and the last tenth of the tasks. The "
        "key ends the name of a setting's directory.",
        ["Method", *fields, "First", "Last", "Seeds", "Diverged", "Not complete", "Key"],
    )
    for setting in study.settings:
        group, percent = setting.group, study.goal.percent
        running = sum(run.status not in SETTLED for run in group.runs)
        cells = [paper.method_label(setting.method), *(setting.values[field] for field in fields)]
        cells += [mean(setting.first(), percent), mean(setting.last(), percent)]
        cells += [str(len(group.runs)), str(len(group.diverged)), str(running), group.runs[0].key]
        table.rows.append([Cell(text) for text in cells])
        record = {"method": setting.method, **{field: setting.values[field] for field in fields}, **_reached(setting)}
        seeds = {"seeds": " ".join(str(run.seed) for run in group.runs), "diverged": len(group.diverged)}
        table.records.append({**record, **seeds, "not_complete": running, "key": group.runs[0].key})
    return table


def mean(value: numbers.Mean, percent: bool) -> str:
    """A mean with its standard error."""
    if percent or value.n == 0:
        return tables.plus_minus(value)
    return f"{value.value:.4g}" + (f" ± {value.se:.2g}" if math.isfinite(value.se) else "")


def facet_title(facet: Facet) -> str:
    """A facet in words: "ReLU, layer norm, width 64"."""
    named = []
    for field, value in facet:
        if field == "activation":
            named.append(paper.ACTIVATIONS.get(value, value))
        elif value in ("yes", "no"):
            named += [field.replace("_", " ")] if value == "yes" else []
        else:
            named.append(f"{field} {value}")
    return ", ".join(named)


def _chip(text: str) -> Cell:
    return Cell(text, "", "unknown")


def _place(study: Study, setting: Setting) -> list[Cell]:
    words = [*(value for _, value in setting.facet), paper.method_label(setting.method), study.words(setting) or "–"]
    return [Cell(text) for text in words]


def _record(study: Study, setting: Setting) -> dict[str, Any]:
    return {**dict(setting.facet), "method": setting.method, "setting": study.words(setting)}


def _reached(setting: Setting) -> dict[str, str]:
    first, last = setting.first(), setting.last()
    shown = {"first": first.value, "first_se": first.se, "last": last.value, "last_se": last.se}
    return {name: f"{value:.5g}" if math.isfinite(value) else "" for name, value in shown.items()}
