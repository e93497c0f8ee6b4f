"""Where the numbers come from: settings beside the paper's, versions, commands, and what is missing."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gxd.lab.errors import UserError
from gxd.lab.experiments import EXPERIMENTS
from gxd.lab.report import paper
from gxd.lab.report.digest import Assay, Collection, Run
from gxd.lab.report.evidence import AssayColumn, Group, Panel, groups, left_out
from gxd.lab.report.figures import Picture
from gxd.lab.report.tables import Cell, Table, diverged_assay, panel_label, settings_table

Panels = Mapping[str, Mapping[Panel, Mapping[str, Group]]]


def settings(panels: Panels, columns: Mapping[paper.Column, AssayColumn]) -> list[Table]:
    """One table per experiment found: the paper's settings beside those of the runs in the figures."""
    made = []
    for name, by_panel in panels.items():
        configs = [run.config for methods in by_panel.values() for group in methods.values() for run in group.runs]
        label = paper.experiment_label(name)
        if name in paper.SETTINGS:
            made.append(settings_table(name, f"{label}: settings", paper.SETTINGS[name], configs))
        elif name == "permuted-digits":
            title = f"{label} (ours) beside the paper's Permuted MNIST: settings"
            made.append(settings_table(name, title, paper.SETTINGS["permuted-mnist"], configs))
    for model, label in paper.MODELS.items():
        assays = [assay for key, column in columns.items() if key[0] == model for assay in column.assays]
        if assays:
            rows = paper.SETTINGS[f"assay-{model}"]
            made.append(settings_table(f"assay-{model}", f"Assay, {label}: settings", rows, list(map(_facts, assays))))
    return made


def _facts(assay: Assay) -> dict[str, Any]:
    """The settings of an assay, with what its checkpoints say themselves."""
    facts = dict(assay.config)
    if assay.checkpoints:
        last = assay.checkpoints[-1]
        facts.update({name: last[name] for name in ("calibration", "probe") if name in last})
        facts["checkpoints"] = [int(point["checkpoint"]) for point in assay.checkpoints]
    return facts


def versions(found: Collection) -> Table:
    """Which versions made how many runs."""
    names = ["gxd", "commit", "torch", "python", "device", "threads"]
    items: list[Run | Assay] = [*found.runs, *found.assays]
    counts = Counter(tuple(_version(item, name) for name in names) for item in items)
    resumed = "2.12 → 2.13: begun with the first, finished with the second." if any(x.resumed for x in items) else ""
    table = Table("versions", "Versions and machines", resumed, [*names, "runs and assays"])
    for key, count in counts.most_common():
        table.rows.append([*map(Cell, key), Cell(str(count))])
        table.records.append({**dict(zip(names, key, strict=True)), "count": count})
    return table


def _version(item: Run | Assay, name: str) -> str:
    """One version, or all that a run went through. A commit is shortened; that it was changed ("-dirty") stays."""
    said: list[str] = []
    for versions in (item.versions, *item.resumed):
        if name in versions or not said:
            text = re.sub(r"^([0-9a-f]{12})[0-9a-f]+", r"\1", str(versions.get(name) or "–"))
            if said[-1:] != [text]:
                said.append(text)
    return " → ".join(said)


def warnings(found: Collection) -> list[str]:
    """What a reader should know of runs that are not all of one version, or not of this one."""
    said = []
    mixed = [group for group in groups(found.runs) if len({_made_with(run) for run in group.runs}) > 1]
    if mixed:
        said.append(f"In {len(mixed)} settings the seeds were made with different versions of gxd or torch.")
    strange = sorted({run.experiment for run in found.runs} - {*EXPERIMENTS})
    if strange:
        said.append(
            f"This version does not know {', '.join(strange)}: what counts there is a guess from what was logged."
        )
    return said


def _made_with(run: Run) -> tuple[str, str]:
    return _version(run, "gxd"), _version(run, "torch")


def commands(found: Collection) -> list[str]:
    """One command per setting, with the seeds it was run on."""
    lines = []
    for group in groups(found.runs):
        seeds = ", ".join(str(run.seed) for run in group.runs)
        lines.append(f"{_command(group.runs[0])}  # seed {seeds}")
    by_setting: dict[tuple[paper.Column, str], list[Assay]] = {}
    for assay in found.assays:
        by_setting.setdefault((assay.column, assay.key), []).append(assay)
    for members in by_setting.values():
        lines.append(f"{_assay_command(members[0])} --seeds {' '.join(str(assay.seed) for assay in members)}")
    return lines


def _assay_command(assay: Assay) -> str:
    from gxd.lab.assay_config import AssayConfig

    config = assay.config
    try:
        standard = AssayConfig(model=str(config.get("model")), activation=str(config.get("activation"))).settings()
    except UserError:
        standard = {}
    words = ["gxd", "assay", "--model", str(config.get("model")), "--activation", str(config.get("activation"))]
    for name, value in config.items():
        if name not in ("model", "activation", "seed") and value != standard.get(name) and value is not None:
            values = value if isinstance(value, list) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return shlex.join(words)


def _command(run: Run) -> str:
    from gxd.lab.experiments import experiment
    from gxd.lab.sweep import command_line

    try:
        made = experiment(run.experiment).from_dict({**run.config, "seed": 0})
        return command_line(made, Path("runs"))
    except UserError:  # of another version of gxd: its settings as they are
        flags = [f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in run.config.items()]
        return " ".join(["gxd run", shlex.quote(run.experiment), *flags])


def missing(
    found: Collection, panels: Panels, columns: Mapping[paper.Column, AssayColumn], pictures: Sequence[Picture]
) -> list[str]:
    """What a full reproduction would have, and these runs do not."""
    said = []
    for name, label in paper.EXPERIMENTS.items():
        here = panels.get(name, {})
        if not here:
            said.append(f"{label}: no runs.")
            continue
        every = [group for methods in here.values() for group in methods.values()]
        for panel, method, fields in left_out([run for run in found.runs if run.experiment == name], here):
            said.append(
                f"{label}, {panel_label(panel)}: {paper.method_label(method)} is not beside the others, for it was "
                f"trained with other settings: {', '.join(fields)}."
            )
        tasks, seeds = max(group.tasks for group in every), min(len(group.settled) for group in every)
        if name in paper.TASKS and tasks < paper.TASKS[name]:
            said.append(f"{label}: {tasks} of the paper's {paper.TASKS[name]} tasks.")
        if name in paper.SEEDS and seeds < paper.SEEDS[name]:
            said.append(f"{label}: as few as {seeds} of the paper's {paper.SEEDS[name]} seeds.")
    for key in paper.COLUMNS:
        column = columns.get(key)
        if column is None:
            said.append(f"Assay, {paper.column_label(key)}: none.")
            continue
        full, planned = paper.SEEDS[f"assay-{key[0]}"], paper.LAST_CHECKPOINT[key[0]]
        if len(column.assays) < full:
            said.append(f"Assay, {paper.column_label(key)}: {len(column.assays)} of the paper's {full} seeds.")
        last = max((int(point["checkpoint"]) for assay in column.assays for point in assay.checkpoints), default=0)
        if last < planned:
            said.append(f"Assay, {paper.column_label(key)}: trained to {last} of {planned} (tasks or epochs).")
    for group in groups(found.runs):
        late = [run for run in group.runs if run not in group.settled]
        if late:
            where = ", ".join(f"seed {run.seed} at task {run.tasks} of {run.planned}" for run in late)
            name = paper.experiment_label(late[0].experiment)
            said.append(f"Not complete, and in no number: {name}, {group.method}, {panel_label(group.panel)}: {where}.")
    for assay in found.assays:
        if assay.status == "diverged":
            said.append(
                f"Not complete: assay of {diverged_assay(assay)}; the checkpoints up to there are in the means."
            )
        elif assay.status != "done":
            said.append(f"Not complete: assay of {paper.column_label(assay.column)}, seed {assay.seed}.")
    said += [f"{picture.title}: no runs." for picture in pictures if picture.drawn is None and not picture.dead]
    return said or ["Nothing: every figure and table has its runs."]
