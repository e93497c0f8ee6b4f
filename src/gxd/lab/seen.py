"""What run directories say of their runs while these go on. Nothing is written, locked or waited for."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gxd.lab.errors import UserError
from gxd.lab.experiments import EXPERIMENTS
from gxd.lab.leaderboard.records import FAILURES
from gxd.lab.store import CHECKPOINT, CONFIG, METRICS, STATUS
from gxd.lab.workers import SETTLED

LIVE = ("running", "silent")
FAILED = "failed"  # as a leaderboard notes it; a sweep tries again
SILENT = 120.0  # seconds without a line, and ten tasks' worth, after which a run may have stopped
TAIL = 4096  # bytes at the end of a file that hold its last lines


@dataclass(frozen=True)
class Seen:
    """A run as its directory shows it: ``running`` and ``silent`` are those that have not come to an end."""

    path: Path
    study: str
    setting: str
    method: str
    seed: int
    status: str
    task: int
    tasks: int
    metric: str
    value: float | None
    pace: float | None  # seconds per task
    idle: float  # seconds since the last line

    @property
    def name(self) -> str:
        """The run for people."""
        return f"{self.setting.rpartition('_')[0] or self.setting} seed {self.seed}"


class Scanner:
    """Looks below directories, again and again. A run that is over is read once.

    Raises :class:`UserError` for a directory that is none.

    Attributes:
        unreadable: directories that look like runs and cannot be read -> why.
    """

    def __init__(self, directories: Sequence[Path], now: Callable[[], float] = time.time) -> None:
        for directory in directories:
            if not directory.exists():
                raise UserError(f"{directory} does not exist: name the --out of gxd sweep or gxd run")
            if not directory.is_dir():
                raise UserError(f"{directory} is a file: name a directory with runs")
        self.roots = [directory.resolve() for directory in directories]
        self.unreadable: dict[Path, str] = {}
        self._now, self._over = now, dict[Path, Seen]()

    def look(self) -> list[Seen]:
        """All runs as of now, by study and name."""
        self.unreadable = {}
        found: dict[Path, Seen] = {}
        for root in self.roots:
            for path in _walk(root):
                try:
                    seen = self._over.get(path) or self._read(path)
                except FileNotFoundError:  # moved away since
                    continue
                except (OSError, ValueError, KeyError, TypeError) as error:
                    self.unreadable[path] = str(error) or type(error).__name__
                    continue
                if seen is not None:
                    found[path] = seen
                    if seen.status in (*SETTLED, FAILED):
                        self._over[path] = seen
        return sorted(found.values(), key=lambda seen: (seen.study, seen.path))

    def study(self, path: Path) -> str:
        """The name of what a run directory belongs to: its root, from where we look, and its experiment."""
        for root in self.roots:
            if path.is_relative_to(root):
                below = path.relative_to(root).parts[:-2] if path != root else ()
                return "/".join(below) or path.parent.parent.name
        return path.parent.parent.name

    def _read(self, path: Path) -> Seen | None:
        """A run; None if the directory is not of ours, or of an assay, which has no tasks to count."""
        record = json.loads((path / CONFIG).read_bytes())
        if not isinstance(record, dict) or "experiment" not in record or not isinstance(record.get("config"), dict):
            return None
        config, name = record["config"], str(record["experiment"])
        if name == "assay":
            return None
        status = json.loads((path / STATUS).read_bytes()) if (path / STATUS).exists() else {}
        state, seconds = str(status.get("status", "running")), float(status.get("seconds", 0.0))
        metric = EXPERIMENTS[name].metric if name in EXPERIMENTS else "test_accuracy"
        lines = _last_lines(path / METRICS)
        task = int(lines[-1]["task"]) + 1 if lines else 0
        counted = [line for line in lines if _counts(name, int(line["task"]))]
        value = counted[-1].get(metric) if counted else None
        pace = _pace(path, status, seconds, task)
        idle = max(0.0, self._now() - max(_mtime(path / file) for file in (CONFIG, METRICS, STATUS, CHECKPOINT)))
        if state not in SETTLED:
            state = "running" if idle < max(SILENT, 10 * (pace or 0.0)) else "silent"
            if _failed(path):
                state = FAILED
        return Seen(
            path=path,
            study=self.study(path),
            setting=path.parent.name,
            method=str(config.get("method", "?")),
            seed=int(config.get("seed", 0)),
            status=state,
            task=task,
            tasks=int(config.get("tasks") or max(task, 1)),
            metric=metric,
            value=None if value is None else float(value),
            pace=pace,
            idle=idle,
        )


def _walk(root: Path) -> Iterator[Path]:
    for where, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if CONFIG in files:
            yield Path(where)
            folders.clear()


def _last_lines(file: Path) -> list[dict[str, Any]]:
    """The last whole lines of a file that is being written."""
    if not file.exists():
        return []
    with file.open("rb") as text:
        size = text.seek(0, os.SEEK_END)
        text.seek(max(0, size - TAIL))
        whole = text.read().rpartition(b"\n")[0].split(b"\n")
    found = [json.loads(line) for line in (whole[1:] if size > TAIL else whole) if line.strip()]
    return [line for line in found if isinstance(line, dict) and "task" in line]


@cache
def _counts(name: str, task: int) -> bool:
    return name not in EXPERIMENTS or EXPERIMENTS[name]().counts(task)


def _pace(path: Path, status: dict[str, Any], seconds: float, task: int) -> float | None:
    """Seconds per task: as of the last status, else since the run began."""
    if int(status.get("task", 0)) and seconds:
        return seconds / int(status["task"])
    return (_mtime(path / METRICS) - _mtime(path / CONFIG)) / task if task else None


def _failed(path: Path) -> bool:
    """Whether a leaderboard has given the run up: it notes so beside its stages."""
    stage = path.parents[1].parent
    file = stage.parent / FAILURES
    name = [stage.name, path.parent.name.rpartition("_")[2], path.name.removeprefix("seed")]
    return file.exists() and "/".join(name) in json.loads(file.read_bytes())


def _mtime(file: Path) -> float:
    return file.stat().st_mtime if file.exists() else 0.0
