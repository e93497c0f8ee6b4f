"""The page of ``gxd demo``."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gxd.lab.errors import UserError
from gxd.lab.report import digest, evidence, figures, numbers, page, paper, style, tables
from gxd.lab.report.evidence import Group
from gxd.lab.report.page import Block, Section

NAME, INDEX = "demo", "index.html"
WHAT = (
    "A network that trains on one task after another slowly loses its plasticity: units die or saturate, the "
    "features lie in fewer and fewer directions, and every new task is learned worse than the one before.",
    "A reset gives a few hidden units per task a new start: fresh incoming weights, outgoing weights zero, and the "
    "unit's mean output moved into the biases behind it, so that the network hardly notices.",
    "GXD chooses the units whose reset changes the output least. For each unit it multiplies how far the unit is from "
    "its running mean, which is where the reset puts it, by how much the output depends on it. The paper's rule resets "
    "the units with the lowest product.",
    "The cheapest unit to reset is one that was just reset: nothing depends on it yet. So a rule that resets whatever "
    "is cheapest can recycle the same few units and never reach the others, which grow old and saturate. The "
    "recommended GXD divides the cost by the age of the unit, so it reaches all units. It also needs no extra backward "
    "pass: it uses the gradients of the training loss. Random resets reach all units, too, but they do not look at "
    "what a unit is worth.",
)


def demo_page(run_directories: Sequence[Path], out: Path) -> Path:
    """Write ``index.html``, ``demo.png`` and ``demo.svg`` into ``out`` from the runs given; return the page's path.

    They are written beside their places and then moved there, so that a full disk leaves an earlier demo whole.
    """
    if not run_directories:
        raise UserError("the demo has no runs to show: run `gxd demo` again")
    runs = [digest.read_run(directory) for directory in run_directories]
    by_method: dict[str, list[digest.Run]] = {}
    for run in runs:
        by_method.setdefault(str(run.config.get("method")), []).append(run)
    order = sorted(by_method, key=paper.method_order)
    groups = {method: Group(tuple(by_method[method])) for method in order}
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".", suffix=".part") as beside:
        _write(runs, groups, Path(beside))
        for file in Path(beside).iterdir():
            os.replace(file, out / file.name)
    return out / INDEX


def _write(runs: Sequence[digest.Run], groups: dict[str, Group], out: Path) -> None:
    picture = _picture(groups)
    shown = page.save_pictures([picture], out)
    table = _table(groups)
    config, seeds = runs[0].config, max(len(group.runs) for group in groups.values())
    setting = (
        f"{paper.experiment_label(runs[0].experiment)}, "
        f"{tables.panel_label(next(iter(groups.values())).panel)}, learning rate {tables.short(config.get('lr'))}, "
        f"{runs[0].planned} tasks, {seeds} seed{'s' if seeds > 1 else ''} per method"
    )
    sections = [
        Section("seen", "What one sees", [_seen(groups)], [Block(picture=shown[NAME]), Block(table=table)]),
        Section("why", "Why", list(WHAT), []),
    ]
    made_with = ", ".join(f"{name} {value}" for name, value in runs[0].versions.items() if value)
    sections.append(Section("made", "Made with", [f"{setting}. {made_with}."], []))
    title, lead = "Watch a network lose its plasticity, and keep it", setting + "."
    (out / INDEX).write_text(page.render(title, lead, [], sections, made_by="gxd demo"), encoding="utf-8")


def _picture(groups: dict[str, Group]) -> figures.Picture:
    tasks = max(group.tasks for group in groups.values())
    smooth, seeds = max(1, tasks // 12), max(len(group.runs) for group in groups.values())
    with style.styled():
        figure = style.new_figure(10.4, 4.3)
        outer = figure.add_gridspec(2, 2, width_ratios=[1.75, 1])
        main = figure.add_subplot(outer[:, 0])
        lines = {name: evidence.curve(group, smooth=smooth) for name, group in groups.items()}
        drawn = {name: line for name, line in lines.items() if line is not None}
        for name, line in drawn.items():
            figures.draw(main, line, name, 100.0)
        main.set_title(f"Test accuracy on each new task, %{f', mean of {seeds} seeds' if seeds > 1 else ''}")
        main.set_xlabel("task")
        if drawn:
            figures.fit(main, drawn)
            style.label_ends(main, [figures.end_label(name, line) for name, line in drawn.items()], room=3.3)
        for row, (metric, title, scale) in enumerate(
            [("reach", "Units that the resets reach, %", 100.0), ("effective_rank", "Effective rank", 1.0)]
        ):
            axes = figure.add_subplot(outer[row, 1])
            for name, group in groups.items():
                inner = evidence.curve(group, metric, smooth=smooth)
                if inner is not None:
                    figures.draw(axes, inner, name, scale)
            axes.set_title(title)
            axes.set_xlim(0, tasks)
            axes.set_ylim(bottom=0)
            axes.locator_params(nbins=4)
            if row == 1:
                axes.set_xlabel("task")
    caption = f"Running mean over {smooth} tasks, "
    caption += f"mean over {seeds} seeds, shaded ± SE." if seeds > 1 else "one seed."
    caption += " Reached: of all hidden units, those that were reset in the second half of the tasks so far."
    return figures.Picture(
        NAME, "Accuracy on each new task, and what happens inside", caption, figure, alt=_seen(groups)
    )


def _table(groups: dict[str, Group]) -> tables.Table:
    width = digest.window(max(group.tasks for group in groups.values()))
    table = tables.Table(
        NAME,
        "In numbers",
        f"Means over the first and the last {width} tasks; ± SE over seeds where there are several. A diverged run "
        "is in no mean.",
        [
            "Method",
            f"Accuracy, first {width}, %",
            f"last {width}, %",
            "Units reached, %",
            "Rank at the end",
            "Diverged",
        ],
    )
    lasts = {name: group.last().value for name, group in groups.items() if not group.diverged}
    best = max((value for value in lasts.values() if math.isfinite(value)), default=math.nan)
    for name, group in groups.items():
        reach = numbers.mean(run.last("reach", 1) for run in group.settled)
        rank = numbers.mean(run.last("effective_rank") for run in group.settled)
        table.rows.append(
            [
                tables.Cell(paper.method_label(name)),
                tables.Cell(tables.plus_minus(group.first())),
                tables.Cell(tables.plus_minus(group.last()), "", "best" if lasts.get(name) == best else ""),
                tables.Cell(tables.plus_minus(reach)),
                tables.Cell(tables.plus_minus(rank, scale=1.0)),
                tables.Cell(
                    f"{len(group.diverged)}/{len(group.runs)}{group.so_far}", "", "bad" if group.diverged else ""
                ),
            ]
        )
    return table


def _seen(groups: dict[str, Group]) -> str:
    """One sentence from the numbers, whatever they are."""
    said = []
    for name, group in groups.items():
        first, last = group.first(), group.last()
        if first.n and last.n:
            before, after = round(100 * first.value), round(100 * last.value)
            verb = "falls" if after < before else "rises"
            way = f"holds at {after} %" if abs(after - before) <= 1 else f"{verb} from {before} % to {after} %"
            text = f"{paper.method_label(name)} {way}"
        else:
            text = paper.method_label(name)
        if group.diverged:
            text += f" ({len(group.diverged)} of {len(group.runs)} runs diverged{group.so_far})"
        if group.settled:
            said.append(text)
    return "Test accuracy from the first to the last tasks: " + "; ".join(said) + "." if said else "No run is complete."
