"""Which setting of a grid is the best, and the second stage that follows from it.

Best is the highest *final accuracy*: the test accuracy averaged over the last tenth of the tasks, then over the seeds
of the grid. A run that diverged counts with the accuracy of guessing, so a setting that diverges on some seeds loses to
a stable one. The paper says "best final accuracy" and no more. Of equals the first in the grid wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gxd.lab.config import Experiment
from gxd.lab.errors import UserError
from gxd.lab.grid import Sweep, Values, short
from gxd.lab.store import read_metrics, write_json
from gxd.lab.workers import settled, status_of

LAST = 0.1
"""The share of the tasks, at the end of a run, that makes its final accuracy."""


@dataclass(frozen=True)
class Candidate:
    """A setting of the grid and what it reached on each seed: its final accuracy, or None if it diverged."""

    cell: Values
    chance: float
    reached: tuple[float | None, ...]

    @property
    def accuracy(self) -> float:
        """The mean over the seeds, with guessing for the diverged ones."""
        return sum(self.chance if a is None else a for a in self.reached) / len(self.reached)

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


def final_accuracy(config: Experiment, root: Path) -> float | None:
    """The mean test accuracy over the last tenth of the tasks; None if the run diverged."""
    directory = config.run_directory(root)
    if status_of(config, root).get("status") == "diverged":
        return None
    last = [line["test_accuracy"] for line in read_metrics(directory)][-max(1, round(LAST * config.tasks)) :]
    if not last:
        raise UserError(f"{directory} is done but has no metrics: delete it, and start the sweep again")
    return None if None in last else sum(last) / len(last)


def select(sweep: Sweep, out: Path) -> list[Choice]:
    """The best setting for each combination of ``per``, from the runs on disk."""
    root = sweep.grid_root(out)
    if sweep.final is None:
        return []
    chance = 0.5 if sweep.kind.name == "cifar100" else 0.1  # pairs of classes; ten digits
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
        candidate = Candidate(cell, chance, tuple(final_accuracy(run, root) for run in runs))
        ranked = sorted([*choice.candidates, candidate], key=lambda c: -c.accuracy)  # stable: the first of equals
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
        "criterion": f"mean test accuracy over the last {LAST:.0%} of the tasks, then over seeds; diverged: chance",
        "seeds": list(sweep.seeds),
        "choices": [
            {
                "per": choice.per,
                "candidates": [  # the first is the chosen one
                    {
                        "setting": {n: c.cell[n] for n in sweep.varied if n in c.cell},
                        "final_accuracy": round(c.accuracy, 6),
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
    rows = [[*per, *searched, "final accuracy", "of", "diverged"]]
    for choice in choices:
        row = [short(value) for value in choice.per.values()]
        if choice.best is None:
            rows.append([*row, *["-"] * len(searched), "runs are missing", "", ""])
            continue
        full = sweep.config(choice.best.cell, sweep.seeds[0]).resolved()
        row += [short(getattr(full, name)) for name in searched]
        diverged = f"{choice.best.diverged}/{len(sweep.seeds)}"
        rows.append([*row, f"{100 * choice.best.accuracy:.1f}%", str(len(choice.candidates)), diverged])
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as text, the first one the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
