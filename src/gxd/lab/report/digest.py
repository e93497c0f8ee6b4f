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

from gxd.lab import methods
from gxd.lab.errors import UserError
from gxd.lab.experiments import EXPERIMENTS
from gxd.lab.report import numbers, paper

WINDOW = 50  # tasks at the start and at the end that a summary averages
POINTS = 80  # a series in a digest has about this many blocks at most
REMEDY = "make runs with `gxd run`, `gxd sweep` or `gxd assay`"
NO_DIGEST = "this is no digest that `gxd report` wrote; name another file, or a directory with runs"
# What does not change the numbers of a run, and so does not separate two settings.
NEUTRAL = {"seed", "seeds", "device", "threads", "data_dir"}
SETTLED = ("done", "diverged")
GUESSED = ("test_accuracy", "online_accuracy", "test_loss", "loss")  # what may count in an unknown experiment, in order

RunName = tuple[str, str, str, int]  # study, experiment, key, seed
AssayName = tuple[tuple[str, str], str, int]  # column, key, seed


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
    resumed: tuple[Mapping[str, Any], ...] = ()  # the versions it went on with, if others than it began with

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.config.get("seed", 0))

    @property
    def progress(self) -> tuple[bool, int]:
        """How far it is: of two copies of a run the larger one is the newer."""
        return self.status in SETTLED, self.tasks

    @property
    def name(self) -> RunName:
        """What tells it from all other runs."""
        return self.study, self.experiment, self.key, self.seed

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

    def last(self, metric: str = "test_accuracy", tasks: int | None = None) -> float | None:
        """The mean over so many of the last tasks (None: :func:`window`; whole blocks), or None for a run that diverged
        or is not complete.
        """
        ending = self._ending(metric, tasks or window(self.planned))
        return sum(value * size for value, size in ending) / sum(size for _, size in ending) if ending else None

    def last_by_resets(self, metric: str, tasks: int) -> float:
        """The mean of what tells of resets over so many of the last tasks (whole blocks), weighted by their number:
        where nothing was reset there is nothing to tell. NaN without resets.
        """
        ending = self._ending(metric, tasks)
        resets = self._ending("resets", tasks) or [(1.0, size) for _, size in ending]
        return numbers.weighted((value for value, _ in ending), (count * size for count, size in resets))

    def _ending(self, metric: str, tasks: int) -> list[tuple[float, int]]:
        """The blocks of the last tasks, each with the number of its tasks; none of a run that is not complete."""
        values = self.blocks(metric)
        if self.status != "done" or not values:
            return []
        need = -(-tasks // self.block)
        sizes = [self.block] * (len(values) - 1) + [self.tasks - self.block * (len(values) - 1)]
        return list(zip(values[-need:], sizes[-need:], strict=True))

    def slim(self) -> Run:
        """The run with its test accuracy and the metric that counts; all that may, if we do not know the experiment."""
        counts = [EXPERIMENTS[self.experiment].metric] if self.experiment in EXPERIMENTS else GUESSED
        names = {"test_accuracy", *counts}
        return replace(self, series={name: values for name, values in self.series.items() if name in names})

    def line(self) -> dict[str, Any]:
        """The run as one line of a digest."""
        return {
            **({"resumed": list(self.resumed)} if self.resumed else {}),
            "experiment": self.experiment,
            "key": self.key,
            "study": self.study,
            "config": methods.on_disk(self.config),
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
    resumed: tuple[Mapping[str, Any], ...] = ()

    @property
    def progress(self) -> tuple[bool, int]:
        """How far it is: of two copies of an assay the larger one is the newer."""
        return self.status in SETTLED, len(self.checkpoints)

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

    @property
    def name(self) -> AssayName:
        """What tells it from all other assays."""
        return self.column, self.key, self.seed

    def line(self) -> dict[str, Any]:
        """The assay as one line of a digest."""
        return {
            **({"resumed": list(self.resumed)} if self.resumed else {}),
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
    """Read all runs and assays below ``directories``. The same run found twice counts once: the copy that is further.

    Raises :class:`UserError` if two copies contradict each other.
    """
    runs: dict[RunName, tuple[Run, Path]] = {}
    assays: dict[AssayName, Assay] = {}
    for directory in directories:
        if not directory.exists():
            raise UserError(f"{directory} does not exist: {REMEDY}")
        found = 0
        for item, place in _walk(directory):
            found += 1
            if isinstance(item, Assay):
                if item.name not in assays or item.progress > assays[item.name].progress:
                    assays[item.name] = item
                continue
            other, elsewhere = runs.get(item.name, (item, place))
            if _contradict(item, other):
                raise UserError(
                    f"{place} and {elsewhere} have different numbers for one run ({item.experiment}, "
                    f"{item.config.get('method')}, key {item.key}, seed {item.seed}): leave one of them out"
                )
            if item.name not in runs or item.progress > other.progress:
                runs[item.name] = item, place
        if not found:
            raise UserError(f"{directory} holds no run, no assay and no digest.jsonl: {REMEDY}")
    return Collection(
        [run for _, (run, _) in sorted(runs.items(), key=lambda pair: pair[0])],
        [assay for _, assay in sorted(assays.items(), key=lambda pair: pair[0])],
        [str(directory) for directory in directories],
    )


def _contradict(run: Run, other: Run) -> bool:
    """Whether two copies of a run differ where both have been; blocks that one has not filled do not count."""
    for one, two in ((run, other), (other, run)):
        if one.diverged_at is not None and two.tasks > one.diverged_at:
            return True
    if run.block != other.block:
        return False
    whole = min(run.tasks, other.tasks) // run.block
    return any(
        a != b and not (math.isnan(a) and math.isnan(b))
        for name in run.series.keys() & other.series.keys()
        for a, b in zip(run.series[name][:whole], other.series[name][:whole], strict=False)
    )


def write(collection: Collection, out: Path, drawn: Container[int]) -> None:
    """Write ``digest.jsonl`` and ``assay.jsonl`` into ``out``, from which the same report can be made.

    Runs whose ``id`` is not among those ``drawn`` (the candidates of a sweep, say) keep the metric that counts alone.
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
    ended = config.get("tasks") if status.get("status") == "done" else status.get("task")
    if settled and ended is not None and len(lines) != int(ended):
        raise UserError(
            f"{directory} has {len(lines)} of the {ended} lines that its metrics.jsonl should have: remove the "
            "directory and run again"
        )
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
        config=methods.from_disk(config),
        versions={**_mapping(record, "versions"), **_mapping(record, "machine")},
        status=str(status.get("status", "running")),
        diverged_at=diverged_at,
        tasks=len(lines),
        block=block,
        series=series,
        study=parents[2].name if len(parents) > 2 else "",
        seconds=status.get("seconds"),
        resumed=_resumed(record),
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
        resumed=_resumed(record),
    )


def _walk(directory: Path) -> Iterator[tuple[Run | Assay, Path]]:
    """Everything below a directory, or in a digest, with the place where it stands."""
    if directory.is_file():
        for item in read_digest(directory):
            yield item, directory
        return
    for where, folders, files in os.walk(directory):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        here = Path(where)
        if "config.json" in files and "assay.jsonl" in files:
            yield read_assay(here), here
        elif "config.json" in files and ("metrics.jsonl" in files or "status.json" in files):
            # Without an experiment it is of another program; an assay is here before its first checkpoint.
            if _json(here / "config.json").get("experiment") not in (None, "assay"):
                yield _readable(here), here
        elif "protocol.json" not in files:  # the digest of a leaderboard is another one
            for name in ("digest.jsonl", "assay.jsonl"):
                if name in files:
                    for item in read_digest(here / name):
                        yield item, here / name


def _readable(directory: Path) -> Run:
    try:
        return read_run(directory)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{directory} cannot be read as a run ({error}): remove it, and run again") from error


def read_digest(path: Path) -> Iterator[Run | Assay]:
    """Read a ``digest.jsonl`` or the ``assay.jsonl`` of a report."""
    for number, line in enumerate(_lines(path, settled=True, remedy=NO_DIGEST), 1):
        try:
            if "checkpoints" in line:
                yield Assay(
                    key=line["key"],
                    config=line["config"],
                    versions=line["versions"],
                    status=line["status"],
                    checkpoints=tuple(line["checkpoints"]),
                    seconds=line.get("seconds"),
                    resumed=_resumed(line),
                )
            else:
                series = {name: tuple(_number(value) for value in values) for name, values in line["series"].items()}
                yield Run(
                    experiment=line["experiment"],
                    key=line["key"],
                    config=methods.from_disk(line["config"]),
                    versions=line["versions"],
                    status=line["status"],
                    diverged_at=line["diverged_at"],
                    tasks=int(line["tasks"]),
                    block=int(line["block"]),
                    series=series,
                    study=line.get("study", path.resolve().parent.name),
                    seconds=line.get("seconds"),
                    resumed=_resumed(line),
                )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{path}, line {number} is not a line of a digest ({error}): {NO_DIGEST}") from None


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


def _lines(path: Path, settled: bool, remedy: str = "remove the directory and run again") -> list[dict[str, Any]]:
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
            raise UserError(f"{path}, line {number} is not valid ({error}): {remedy}") from None
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


def _resumed(record: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """What config.json or a digest says of later versions; older ones say nothing."""
    value = record.get("resumed")
    return tuple(one for one in value if isinstance(one, dict)) if isinstance(value, list) else ()


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
