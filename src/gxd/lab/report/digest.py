"""Reads run directories, assay directories and digests, and writes the digest a report can be made from again."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gxd.lab.errors import UserError
from gxd.lab.report import paper

WINDOW = 50  # tasks at the start and at the end that a summary averages
POINTS = 80  # a series in a digest has about this many blocks at most
REMEDY = "make runs with `gxd run`, `gxd sweep` or `gxd assay`"
# What does not change the numbers of a run, and so does not separate two settings.
NEUTRAL = {"seed", "seeds", "device", "threads", "data_dir"}
SETTLED = ("done", "diverged")


@dataclass(frozen=True)
class Run:
    """One training run. ``series[metric][i]`` is the mean over tasks ``i * block`` to ``(i + 1) * block``."""

    experiment: str
    key: str
    config: Mapping[str, Any]
    versions: Mapping[str, Any]
    status: str
    diverged_at: int | None
    tasks: int
    block: int
    series: Mapping[str, tuple[float, ...]]
    study: str = ""
    seconds: float | None = None

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.config.get("seed", 0))

    @property
    def planned(self) -> int:
        """The number of tasks that the config asks for."""
        return int(self.config.get("tasks") or self.tasks)

    def blocks(self, metric: str) -> tuple[float, ...]:
        """The blocks of a metric in which the run was alive: the one it diverged in is left out."""
        values = self.series.get(metric, ())
        if self.diverged_at is None:
            return values
        return values[: min(self.diverged_at, self.tasks) // self.block]

    def first(self, metric: str = "test_accuracy") -> float | None:
        """The mean over the first tasks (:func:`window`), or None if the run did not live that long."""
        need = -(-window(self.planned) // self.block)
        values = self.blocks(metric)
        return _mean(values[:need]) if len(values) >= need else None

    def last(self, metric: str = "test_accuracy") -> float | None:
        """The mean over the last tasks (:func:`window`), or None for a run that diverged or is not complete."""
        values = self.blocks(metric)
        if self.status != "done" or not values:
            return None
        need = -(-window(self.planned) // self.block)
        sizes = [self.block] * (len(values) - 1) + [self.tasks - self.block * (len(values) - 1)]
        total = sum(value * size for value, size in zip(values[-need:], sizes[-need:], strict=True))
        return total / sum(sizes[-need:])

    def slim(self) -> Run:
        """The run with its accuracy alone."""
        kept = {name: values for name, values in self.series.items() if name == "test_accuracy"}
        return replace(self, series=kept)

    def line(self) -> dict[str, Any]:
        """The run as one line of a digest."""
        return {
            "experiment": self.experiment,
            "key": self.key,
            "study": self.study,
            "config": dict(self.config),
            "versions": dict(self.versions),
            "status": self.status,
            "diverged_at": self.diverged_at,
            "tasks": self.tasks,
            "block": self.block,
            "seconds": self.seconds,
            "series": {name: [_jsonable(value) for value in values] for name, values in self.series.items()},
        }


@dataclass(frozen=True)
class Assay:
    """One reset-cost assay: one model, one seed, several checkpoints (``assay.jsonl`` of docs/lab.md)."""

    key: str
    config: Mapping[str, Any]
    versions: Mapping[str, Any]
    status: str
    checkpoints: tuple[Mapping[str, Any], ...]
    seconds: float | None = None

    @property
    def seed(self) -> int:
        """The seed of the assay."""
        return int(self.config.get("seed", 0))

    @property
    def column(self) -> tuple[str, str]:
        """Model and activation: a column of the paper's Table 1. Other data than the paper's make another model."""
        model, data = paper.model_kind(str(self.config.get("model", "?"))), self.config.get("data")
        if data is not None and data != paper.ASSAY_DATA.get(model, data):
            model = f"{model} on {data}"
        return model, str(self.config.get("activation", "?"))

    def line(self) -> dict[str, Any]:
        """The assay as one line of a digest."""
        return {
            "key": self.key,
            "config": dict(self.config),
            "versions": dict(self.versions),
            "status": self.status,
            "seconds": self.seconds,
            "checkpoints": list(self.checkpoints),
        }


@dataclass
class Collection:
    """Everything that was found below the given directories."""

    runs: list[Run] = field(default_factory=list)
    assays: list[Assay] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)


def collect(directories: Sequence[Path]) -> Collection:
    """Read all runs and assays below ``directories``. The same run found twice counts once."""
    runs: dict[tuple[str, str, str, int], Run] = {}
    assays: dict[tuple[tuple[str, str], str, int], Assay] = {}
    for directory in directories:
        if not directory.exists():
            raise UserError(f"{directory} does not exist: {REMEDY}")
        found = 0
        for item in _walk(directory):
            found += 1
            if isinstance(item, Run):
                place = (item.study, item.experiment, item.key, item.seed)
                if place not in runs or item.tasks > runs[place].tasks:
                    runs[place] = item
            else:
                spot = (item.column, item.key, item.seed)
                if spot not in assays or len(item.checkpoints) > len(assays[spot].checkpoints):
                    assays[spot] = item
        if not found:
            raise UserError(f"{directory} holds no run, no assay and no digest.jsonl: {REMEDY}")
    ordered = sorted(runs.items(), key=lambda pair: pair[0])
    return Collection(
        [run for _, run in ordered],
        [assay for _, assay in sorted(assays.items(), key=lambda pair: pair[0])],
        [str(directory) for directory in directories],
    )


def write(collection: Collection, out: Path, drawn: Container[int]) -> None:
    """Write ``digest.jsonl`` and ``assay.jsonl`` into ``out``, from which the same report can be made.

    Runs whose ``id`` is not among those ``drawn`` (the candidates of a sweep, say) keep their accuracy alone.
    """
    runs = [run if id(run) in drawn else run.slim() for run in collection.runs]
    for name, items in (("digest.jsonl", runs), ("assay.jsonl", collection.assays)):
        lines = [json.dumps(item.line(), separators=(",", ":"), sort_keys=True) + "\n" for item in items]
        if lines:
            (out / name).write_text("".join(lines), encoding="utf-8")


def window(tasks: int) -> int:
    """How many tasks "first" and "last" stand for: 50, or a quarter of a run shorter than 150 tasks."""
    return WINDOW if tasks >= 3 * WINDOW else max(1, tasks // 4)


def block_size(tasks: int) -> int:
    """Tasks per block: a divisor of 50, so that the first and the last 50 tasks are whole blocks."""
    if tasks < 3 * WINDOW:
        return 1
    for size in (2, 5, 10, 25):
        if tasks <= size * POINTS:
            return size
    return WINDOW


def read_run(directory: Path) -> Run:
    """Read one run directory."""
    record, config, status = _head(directory)
    settled = status.get("status") in SETTLED
    lines = _lines(directory / "metrics.jsonl", settled) if (directory / "metrics.jsonl").exists() else []
    block = block_size(int(config.get("tasks") or len(lines)))
    names = sorted({name for line in lines for name, value in line.items() if name != "task" and _numeric(value)})
    series = {}
    for name in names:
        values = [_number(line.get(name)) for line in lines]
        series[name] = tuple(_mean(values[i : i + block]) for i in range(0, len(values), block))
    diverged_at = None
    if status.get("status") == "diverged":
        diverged_at = int(status.get("task", len(lines)))
    parents = directory.resolve().parents
    return Run(
        experiment=str(record.get("experiment") or config.get("experiment") or "unknown"),
        key=_key(directory, config),
        config=config,
        versions={**_mapping(record, "versions"), **_mapping(record, "machine")},
        status=str(status.get("status", "running")),
        diverged_at=diverged_at,
        tasks=len(lines),
        block=block,
        series=series,
        study=parents[2].name if len(parents) > 2 else "",
        seconds=status.get("seconds"),
    )


def read_assay(directory: Path) -> Assay:
    """Read one assay directory."""
    record, config, status = _head(directory)
    lines = _lines(directory / "assay.jsonl", status.get("status") in SETTLED)
    return Assay(
        key=_key(directory, config),
        config=config,
        versions={**_mapping(record, "versions"), **_mapping(record, "machine")},
        status=str(status.get("status", "running")),
        checkpoints=tuple(_rounded(line) for line in lines),
        seconds=status.get("seconds"),
    )


def _walk(directory: Path) -> Iterator[Run | Assay]:
    if directory.is_file():
        yield from _read_digest(directory)
        return
    for where, folders, files in os.walk(directory):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        here = Path(where)
        if "config.json" in files and "assay.jsonl" in files:
            yield read_assay(here)
        elif "config.json" in files and ("metrics.jsonl" in files or "status.json" in files):
            if _json(here / "config.json").get("experiment") != "assay":  # else before its first checkpoint
                yield read_run(here)
        else:
            for name in ("digest.jsonl", "assay.jsonl"):
                if name in files:
                    yield from _read_digest(here / name)


def _read_digest(path: Path) -> Iterator[Run | Assay]:
    for number, line in enumerate(_lines(path, settled=True), 1):
        try:
            if "checkpoints" in line:
                yield Assay(
                    key=line["key"],
                    config=line["config"],
                    versions=line["versions"],
                    status=line["status"],
                    checkpoints=tuple(line["checkpoints"]),
                    seconds=line.get("seconds"),
                )
            else:
                series = {name: tuple(_number(value) for value in values) for name, values in line["series"].items()}
                yield Run(
                    experiment=line["experiment"],
                    key=line["key"],
                    config=line["config"],
                    versions=line["versions"],
                    status=line["status"],
                    diverged_at=line["diverged_at"],
                    tasks=int(line["tasks"]),
                    block=int(line["block"]),
                    series=series,
                    study=line.get("study", path.resolve().parent.name),
                    seconds=line.get("seconds"),
                )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{path}, line {number} is not a line of a digest ({error}): make the digest again"
            ) from None


def _head(directory: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    record = _json(directory / "config.json")
    config = record.get("config", record)
    if not isinstance(config, dict):
        raise UserError(f"{directory / 'config.json'} has no config: remove the directory and run again")
    config = dict(sorted(config.items()))  # as it is in a digest, so that both give the same report
    config.pop("data_dir", None)  # a path of one machine, of no use to a reader of the digest
    status = _json(directory / "status.json") if (directory / "status.json").exists() else {}
    return record, config, status


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): remove the directory and run again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object: remove the directory and run again")
    return value


def _lines(path: Path, settled: bool) -> list[dict[str, Any]]:
    """The objects of a JSONL file. Only a run under way may have a torn last line: it is being written."""
    found: list[dict[str, Any]] = []
    raw = path.read_bytes().split(b"\n")
    while raw and not raw[-1].strip():
        raw.pop()
    for number, text in enumerate(raw, 1):
        try:
            value = json.loads(text)
            if not isinstance(value, dict):
                raise ValueError("not an object")
        except ValueError as error:
            if number == len(raw) and not settled:
                break
            raise UserError(f"{path}, line {number} is not valid ({error}): remove it and make it again") from None
        found.append(value)
    return found


def _key(directory: Path, config: Mapping[str, Any]) -> str:
    """The key at the end of the setting's directory, or one of our own if the directory was renamed."""
    match = re.search(r"_([0-9a-f]{10})$", directory.resolve().parent.name)
    return match.group(1) if match else identity(config)


def identity(config: Mapping[str, Any], without: Sequence[str] = ()) -> str:
    """A hash over what changes the numbers, leaving out the fields in ``without``."""
    kept = {name: value for name, value in config.items() if name not in NEUTRAL and name not in without}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:10]


def _mapping(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = record.get(name)
    return dict(value) if isinstance(value, dict) else {}


def _numeric(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _mean(values: Sequence[float]) -> float:
    """The mean of what is finite, in the five digits that a digest keeps: both ways give the same report."""
    finite = [value for value in values if math.isfinite(value)]
    return _five(sum(finite) / len(finite)) if finite else math.nan


def _five(value: float) -> float:
    return float(f"{value:.5g}")


def _jsonable(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return _five(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return value
