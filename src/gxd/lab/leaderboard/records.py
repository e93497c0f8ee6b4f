"""What the board knows of a run: one record, read from its directory, and one line of the digest."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from gxd.lab import methods
from gxd.lab.errors import UserError
from gxd.lab.experiments import Experiment
from gxd.lab.leaderboard.protocol import Track
from gxd.lab.report.numbers import weighted
from gxd.lab.selection import LAST
from gxd.lab.store import held, objects, read_json, read_metrics, write_bytes, write_json
from gxd.lab.workers import SETTLED, status_of

V = TypeVar("V")
ByStream = dict[str, dict[str, V]]
"""Stream -> entry -> something."""
TUNING, REPORT = "tuning", "report"
FAILURES, DIGEST = "failures.json", "digest.jsonl"
FORGET = "delete this file alone, and what it says is found out again by gxd leaderboard run"
POINTS = 40  # of a learning curve, at most


@dataclass(frozen=True)
class Record:
    """One run.

    Attributes:
        stage: ``tuning`` or ``report``; runs of the two are never mixed.
        stream, method, setting: of the board, for who reads the digest.
        key, seed: of the run; with the stage, what tells it from the others.
        status: ``done``, ``diverged``, or ``failed``, and then ``note`` says why.
        mean, last: the metric over all tasks that count, and over the last tenth of them; None unless done.
        curve: the metric over blocks of tasks, of reported runs.
        churn, age: share of resets that hit a unit hardly mature, and the median age of units at their reset, over all
            tasks with resets; None without.
    """

    stage: str
    stream: str
    method: str
    setting: str
    key: str
    seed: int
    status: str
    mean: float | None = None
    last: float | None = None
    churn: float | None = None
    age: float | None = None
    seconds: float | None = None
    curve: tuple[float, ...] = ()
    note: str = ""

    @property
    def name(self) -> tuple[str, str, int]:
        """What tells it from all other runs."""
        return self.stage, self.key, self.seed


Records = dict[tuple[str, str, int], Record]


def read(config: Experiment, out: Path, draft: Record, track: Track, failures: Mapping[str, str]) -> Record | None:
    """The record of a run that is over, or failed; None if it is missing. ``draft`` says which run it is."""
    root = out / draft.stage
    status = status_of(config, root)
    if status.get("status") not in SETTLED:
        note = failures.get(failure_name(draft))
        return None if note is None else replace(draft, status="failed", note=note)
    over = replace(draft, status=str(status["status"]), seconds=status.get("seconds"))
    if over.status == "diverged":
        return over
    path = config.run_directory(root)
    lines = [line for line in read_metrics(path) if config.counts(line["task"])]
    values: list[Any] = [line.get(track.metric) for line in lines]
    if len(values) != sum(map(config.counts, range(config.tasks))):
        raise UserError(f"{path} has lost lines: delete it, and run the board again")
    if any(value is None for value in values):  # not finite: JSON has no NaN
        return replace(over, status="diverged")
    last = values[-max(1, round(LAST * len(values))) :]
    block = -(-len(values) // POINTS)
    curve = tuple(_rounded(fmean(values[i : i + block])) for i in range(0, len(values), block))
    return replace(
        over,
        mean=_rounded(fmean(values)),
        last=_rounded(fmean(last)),
        churn=_over_tasks(lines, "churn"),
        age=_over_tasks(lines, "median_age_at_reset"),
        curve=curve if over.stage == REPORT else (),
    )


def _over_tasks(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The mean over the tasks, weighted by their resets."""
    value = weighted((line.get(name) for line in lines), (line["resets"] for line in lines))
    return None if math.isnan(value) else _rounded(value)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


# --- files: in them, entries have the names that their methods have on disk -------------------------------------------


def _on_disk(entry: str) -> str:
    return methods.ON_DISK.get(entry, entry)


def failure_name(record: Record) -> str:
    """The name of a run in failures.json."""
    return "/".join(map(str, record.name))


def timing_name(stream: str, entry: str) -> str:
    """The name there of the timing of an entry."""
    return f"timing/{stream}/{_on_disk(entry)}"


def read_failures(out: Path) -> dict[str, str]:
    """Why runs have failed, by name."""
    file = out / FAILURES
    return {k: str(v) for k, v in read_json(file, FORGET).items()} if file.exists() else {}


def read_by_stream(file: Path, kind: type[V]) -> ByStream[V]:
    """Stream -> entry -> what a file says of it; nothing if there is no such file."""
    found = read_json(file, FORGET) if file.exists() else {}
    for name, values in found.items():
        if not isinstance(values, dict) or not all(isinstance(value, kind) for value in values.values()):
            raise UserError(f"{file} is damaged at {name!r}: {FORGET}")
    return {name: {methods.shown(entry): value for entry, value in of.items()} for name, of in found.items()}


def change_failures(out: Path, now: Mapping[str, str | None]) -> None:
    """Say in failures.json why these have failed, or, with None, that they have not; what it says of others stays."""
    with held(out):  # another process may have written to it since we read it last
        known = {**read_failures(out), **now}
        write_json(out / FAILURES, {name: why for name, why in known.items() if why is not None})


def change_by_stream(file: Path, kind: type[V], change: Callable[[ByStream[V]], ByStream[V]]) -> None:
    """Replace what a file says by what is made of it, and of what other processes have written to it meanwhile."""
    with held(file.parent):
        changed = change(read_by_stream(file, kind)).items()
        write_json(file, {name: {_on_disk(entry): value for entry, value in of.items()} for name, of in changed})


def joined(one: ByStream[V], other: ByStream[V]) -> ByStream[V]:
    """What either says; of what both know, the other counts."""
    return {name: {**one.get(name, {}), **other.get(name, {})} for name in {**one, **other}}


def write_digest(out: Path, records: Iterable[Record]) -> None:
    """One line per run, small enough to commit."""
    lines = []
    for record in records:
        values = {name: value for name, value in asdict(record).items() if value not in (None, "", ())}
        lines.append(json.dumps({**values, "method": _on_disk(record.method)}) + "\n")
    write_bytes(out / DIGEST, "".join(lines).encode())


def read_digest(out: Path) -> Records:
    """What :func:`write_digest` wrote; nothing if there is no such file."""
    file = out / DIGEST
    try:
        found = objects(file.read_bytes(), _record) if file.exists() else []
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}): delete that line, and its run is made again") from error
    records: Records = {}
    for record in found:
        if record.name in records:
            raise UserError(f"{file} has the run {'/'.join(map(str, record.name))} twice: delete one of the lines")
        records[record.name] = record
    return records


def _record(line: Mapping[str, Any]) -> Record:
    record = Record(**{**line, "method": methods.shown(line["method"]), "curve": tuple(line.get("curve", ()))})
    numbers = (record.mean, record.last, *record.curve)
    others = (record.churn, record.age, record.seconds)
    if type(record.seed) is not int or not all(n is None or isinstance(n, (int, float)) for n in others):
        raise ValueError(f"a run has the seed {record.seed!r}, and {others} for churn, age and seconds")
    if record.status == "done" and not all(isinstance(n, (int, float)) and math.isfinite(n) for n in numbers):
        raise ValueError(f"a run that is done has the numbers {numbers[:2]}")
    return record
