"""Which setting of a grid is the best, and the second stage that follows from it.

Best is the best *final value*: the metric of the experiment, mostly the test accuracy, averaged over the last tenth of
the tasks that count, then over the seeds of the grid. A run that diverged counts as one that has learned nothing, so a
setting that diverges on some seeds loses to a stable one. The paper says "best final accuracy" and no more. Of equals
the first in the grid wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gxd.lab.errors import UserError
from gxd.lab.experiments import Experiment
from gxd.lab.grid import Sweep, Values, short
from gxd.lab.progress import Progress
from gxd.lab.store import read_metrics, write_json
from gxd.lab.workers import settled, status_of

LAST = 0.1
"""The share of the tasks, at the end of a run, that makes its final value."""


@dataclass(frozen=True)
class Candidate:
    """A setting of the grid and what it reached on each seed: its final value, or None if it diverged."""

    cell: Values
    learned_nothing: float
    reached: tuple[float | None, ...]

    @property
    def value(self) -> float:
        """The mean over the seeds; the diverged ones have learned nothing."""
        return sum(self.learned_nothing if a is None else a for a in self.reached) / len(self.reached)

    @property
    def diverged(self) -> int:
        """On how many seeds it diverged."""
        return sum(a is None for a in self.reached)


@dataclass(frozen=True)
class Choice:
    """All settings that share the fields of ``per``, the best first; without any if runs are missing."""

    per: Values
    candidates: tuple[Candidate, ...] = field(default=())

    @property
    def best(self) -> Candidate | None:
        """The chosen setting."""
        return self.candidates[0] if self.candidates else None


def final_value(config: Experiment, root: Path) -> float | None:
    """The mean of the metric over the last tenth of the tasks that count; None if the run diverged."""
    directory = config.run_directory(root)
    if status_of(config, root).get("status") == "diverged":
        return None
    counted = [line[config.metric] for line in read_metrics(directory) if config.counts(line["task"])]
    last = counted[-max(1, round(LAST * sum(map(config.counts, range(config.tasks))))) :]
    if not last:
        raise UserError(f"{directory} is done but has no metrics: delete it, and start the sweep again")
    return None if None in last else sum(last) / len(last)


def select(sweep: Sweep, out: Path) -> list[Choice]:
    """The best setting for each combination of ``per``, from the runs on disk."""
    root = sweep.grid_root(out)
    if sweep.final is None:
        return []
    kind = sweep.kind
    groups: dict[str, Choice] = {}
    incomplete = set()
    for cell in sweep.cells:
        runs = [sweep.config(cell, seed) for seed in sweep.seeds]
        full = runs[0].resolved()
        per = {name: getattr(full, name) for name in sweep.final.per}
        choice = groups.setdefault(repr(per), Choice(per))
        if not all(settled(run, root) for run in runs):
            incomplete.add(repr(per))
            continue
        candidate = Candidate(cell, kind.learned_nothing, tuple(final_value(run, root) for run in runs))
        sign = -1 if kind.higher_is_better else 1
        ranked = sorted([*choice.candidates, candidate], key=lambda c: sign * c.value)  # stable: the first of equals
        groups[repr(per)] = Choice(per, tuple(ranked))
    return [Choice(choice.per) if name in incomplete else choice for name, choice in groups.items()]


def final_runs(sweep: Sweep, choices: Iterable[Choice]) -> list[Experiment]:
    """The second stage: the chosen settings on the final seeds."""
    if sweep.final is None:
        return []
    best = [{**choice.best.cell, **sweep.final.fixed} for choice in choices if choice.best is not None]
    return [sweep.config(values, seed) for seed in sweep.final.seeds for values in best]


def write_selection(sweep: Sweep, choices: Sequence[Choice], out: Path) -> Path:
    """Keep what was compared and what was chosen."""
    file = sweep.root(out) / "selection.json"
    record = {
        "sweep": sweep.name,
        "experiment": sweep.kind.name,
        "criterion": f"{'highest' if sweep.kind.higher_is_better else 'lowest'} mean {sweep.kind.metric} over the last "
        f"{LAST:.0%} of the tasks that count, then over seeds; diverged: as if nothing was learned",
        "seeds": list(sweep.seeds),
        "choices": [
            {
                "per": choice.per,
                "candidates": [  # the first is the chosen one
                    {
                        "setting": {n: c.cell[n] for n in sweep.varied if n in c.cell},
                        "final": round(c.value, 6) if math.isfinite(c.value) else None,
                        "by_seed": [None if a is None else round(a, 6) for a in c.reached],
                        "diverged": c.diverged,
                    }
                    for c in choice.candidates
                ],
            }
            for choice in choices
        ],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, record)
    return file


def selection_table(sweep: Sweep, choices: Sequence[Choice]) -> str:
    """The chosen settings, one line each."""
    per = sweep.final.per if sweep.final is not None else ()
    searched = [name for name in sweep.varied if name not in per]
    rows = [[*per, *searched, f"final {sweep.kind.metric.replace('_', ' ')}", "of", "diverged"]]
    for choice in choices:
        row = [short(value) for value in choice.per.values()]
        if choice.best is None:
            rows.append([*row, *["-"] * len(searched), "runs are missing", "", ""])
            continue
        full = sweep.config(choice.best.cell, sweep.seeds[0]).resolved()
        row += [short(getattr(full, name)) for name in searched]
        diverged = f"{choice.best.diverged}/{len(sweep.seeds)}"
        reached = Progress(0, 0, choice.best.value, sweep.kind.metric).short
        rows.append([*row, reached, str(len(choice.candidates)), diverged])
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as text, the first one the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
