"""The run directory: what is on disk is always whole.

Single files are written beside their place and then moved there, which the system does in one go. ``metrics.jsonl``
grows a line per task; the checkpoint holds its length, and a resume cuts off what came after. A killed run therefore
goes on as if nothing had happened.
"""

from __future__ import annotations

import io
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

import gxd
from gxd.lab import methods
from gxd.lab.errors import Elsewhere
from gxd.lab.experiments import Experiment, experiment

T = TypeVar("T")
CONFIG, METRICS, STATUS, CHECKPOINT, LOCK = "config.json", "metrics.jsonl", "status.json", "checkpoint.pt", ".lock"


class RunDirectory:
    """A run directory, held by this process until :meth:`close`.

    Raises :class:`Elsewhere` if the directory cannot be written to, holds another config, or another process is at it.
    """

    def __init__(self, path: Path, config: Experiment) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(path / LOCK)
        except (PermissionError, FileExistsError, FileNotFoundError, NotADirectoryError) as error:
            raise Elsewhere(
                f"cannot write to {path} ({error.strerror}): choose another place with --out, or free this one"
            ) from error
        try:
            for leftover in path.glob("*.part"):  # of a process that was killed while it wrote
                leftover.unlink()
            self._claim(config)
        except BaseException:
            self.close()
            raise

    def _claim(self, config: Experiment) -> None:
        """Write config.json, or check that the one there is of the same run."""
        settings = config.settings()
        if not (self.path / CONFIG).exists():
            strangers = [name for name in (METRICS, STATUS, CHECKPOINT) if (self.path / name).exists()]
            if strangers:
                raise Elsewhere(
                    f"{self.path} has a {strangers[0]} but no {CONFIG}: move it away, or choose another --out"
                )
            record = {
                "experiment": config.name,
                "config": settings,
                "versions": versions(),
                "machine": _machine(config),
            }
            write_json(self.path / CONFIG, record)
            return
        theirs = _record(self.path)
        if theirs.get("experiment") != config.name:
            raise Elsewhere(
                f"{self.path} holds a run of {theirs.get('experiment')!r}, not {config.name!r}: choose another --out"
            )
        other = theirs["config"]
        for name in dict.fromkeys([*settings, *other]):
            if other.get(name) != settings.get(name):
                raise Elsewhere(
                    f"{self.path} holds a run with {name}={other.get(name)!r}, not {settings.get(name)!r}: "
                    "choose another --out, or move it away"
                )
        now = versions()
        resumed = theirs.get("resumed", [])
        if (resumed[-1] if resumed else theirs.get("versions")) != now and self.status().get("status") == "running":
            # What went on under another version says so.
            write_json(self.path / CONFIG, {**theirs, "resumed": [*resumed, now]})

    # --- status -------------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """What status.json says; empty before the first."""
        file = self.path / STATUS
        return read_json(file) if file.exists() else {}

    def set_status(self, status: str, task: int, seconds: float) -> None:
        """``running``, ``done`` or ``diverged``; ``task`` is the number of tasks behind the run, and so, counted from
        0, the number of the one in which it diverged.
        """
        self._sync()
        write_json(self.path / STATUS, {"status": status, "task": task, "seconds": round(seconds, 1)})

    # --- metrics and checkpoint ---------------------------------------------------------------------------------------

    def append(self, line: Mapping[str, Any]) -> None:
        """Add one line to metrics.jsonl: all of it or nothing."""
        text = json.dumps({key: _finite(value) for key, value in line.items()}) + "\n"
        file = self.path / METRICS
        before = file.stat().st_size if file.exists() else 0
        try:
            with file.open("ab") as out:
                out.write(text.encode())
        except BaseException as error:
            if file.exists():
                os.truncate(file, before)
            if isinstance(error, OSError):
                raise _named(error, file) from error
            raise

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint. It remembers how long metrics.jsonl is now."""
        length = self._sync()
        buffer = io.BytesIO()
        torch.save({**state, "metrics_length": length}, buffer)
        write_bytes(self.path / CHECKPOINT, buffer.getvalue())

    def _sync(self) -> int:
        """Bring the lines to the disk, lest a checkpoint or a status survive a power cut that they do not."""
        file = self.path / METRICS
        if not file.exists():
            return 0
        with file.open("rb+") as lines:
            os.fsync(lines.fileno())
            return lines.seek(0, os.SEEK_END)

    def load(self, device: torch.device) -> dict[str, Any] | None:
        """The last checkpoint, with metrics.jsonl cut back to it; None, and no metrics, if there is none."""
        file, metrics = self.path / CHECKPOINT, self.path / METRICS
        state: dict[str, Any] | None = None
        if file.exists():
            try:
                state = torch.load(file, map_location=device, weights_only=True)
                length = int(state["metrics_length"])
            except OSError:
                raise
            except Exception as error:  # torch.load raises many kinds; all of them mean the same to the user
                raise Elsewhere(f"{file} is damaged: delete {self.path}, and the run starts anew") from error
            if length > (metrics.stat().st_size if metrics.exists() else 0):
                raise Elsewhere(f"{metrics} has lost lines: delete {self.path}, and the run starts anew")
        else:
            length = 0
        if metrics.exists() and metrics.stat().st_size > length:
            os.truncate(metrics, length)
        return state

    def lines(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return read_metrics(self.path)

    def close(self) -> None:
        """Let other processes at the directory."""
        if self._lock is not None:
            os.close(self._lock)  # this also unlocks; the file stays, for removing it would race with the next process
            self._lock = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


# --- reading, for everybody -------------------------------------------------------------------------------------------


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's metrics.jsonl; of a run that goes on, a line being written is left out."""
    file = path / METRICS
    if not file.exists():
        return []
    whole = file.read_bytes().rpartition(b"\n")[0]
    try:
        return objects(whole, dict)
    except ValueError as error:
        raise Elsewhere(f"{file} is damaged ({error}): delete {path}, and run it again") from error


def read_config(path: Path) -> Experiment:
    """The config of the run in a directory."""
    record = _record(path)
    return experiment(str(record.get("experiment"))).from_dict(methods.from_disk(record["config"]))


def _record(path: Path) -> dict[str, Any]:
    """What config.json says."""
    record = read_json(path / CONFIG)
    if not isinstance(record.get("config"), dict) or not isinstance(record.get("resumed", []), list):
        raise Elsewhere(f"{path / CONFIG} is damaged: delete {path}, and run it again")
    return record


def objects(text: bytes, read: Callable[[dict[str, Any]], T]) -> list[T]:
    """What ``read`` makes of the JSON objects of a text that has one in every line. Raises :class:`ValueError` with the
    number of the line if one is none, or cannot be read.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            value = json.loads(line)
            if not isinstance(value, dict):
                raise ValueError("no JSON object")
            found.append(read(value))
        except json.JSONDecodeError as error:  # which calls it line 1 itself
            raise ValueError(f"line {number}: no JSON, {error.msg}") from error
        except KeyError as error:
            raise ValueError(f"line {number}: it has no {error}") from error
        except (ValueError, TypeError) as error:
            raise ValueError(f"line {number}: {error}") from error
    return found


def read_json(file: Path, remedy: str = "delete its directory, and run it again") -> dict[str, Any]:
    """A JSON object. Raises :class:`Elsewhere`, with what to do, if the file is none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise Elsewhere(f"{file} does not exist") from error
    except ValueError as error:
        raise Elsewhere(f"{file} is not JSON ({error}): {remedy}") from error
    if not isinstance(value, dict):
        raise Elsewhere(f"{file} holds no JSON object: {remedy}")
    return value


# --- writing ----------------------------------------------------------------------------------------------------------


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Replace a file by a JSON object, all at once."""
    write_bytes(file, (json.dumps(value, indent=2) + "\n").encode())


def write_bytes(file: Path, data: bytes) -> None:
    """Replace a file, all at once: who reads it meanwhile sees the old or the new, and a failure leaves the old."""
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, file)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _named(error, file) from error
        raise


def _named(error: OSError, file: Path) -> OSError:
    """The same error, with the file it is about: writing to an open file does not say, and moving one names another."""
    return OSError(error.errno, error.strerror, str(file))


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """For changing a file by what it says: of processes that come to such a block of one directory, all but one wait.

    It must not hold the directory already: it would wait for itself.
    """
    handle = _locked(directory / LOCK, wait=True)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _locked(file: Path, wait: bool = False) -> int | None:
    """Hold the lock file; if another process does, wait for it, or say so.

    The system lets go of it when the process ends, however it ends.
    """
    try:
        import fcntl
    except ImportError:  # not on Windows; there nothing guards against two processes
        return None
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError as error:
        os.close(handle)
        raise Elsewhere(f"another process is at {file.parent}: wait for it, or choose another --out") from error
    except OSError:  # a file system without locks
        os.close(handle)
        return None
    return handle


# --- where and with what ----------------------------------------------------------------------------------------------


@cache
def versions() -> dict[str, str | None]:
    """Of gxd, torch and Python, and the commit if gxd runs from a git checkout."""
    return {
        "gxd": gxd.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
    }


def _commit() -> str | None:
    home = Path(__file__).resolve().parent
    try:
        said = subprocess.run(
            ["git", "-C", str(home), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        # A package installed into some other project's checkout is not of that commit.
        inside = subprocess.run(
            ["git", "-C", str(home), "ls-files", "--error-unmatch", Path(__file__).name],
            capture_output=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip() or None if inside.returncode == 0 else None


def _machine(config: Experiment) -> dict[str, Any]:
    threads = config.threads if config.threads is not None else torch.get_num_threads()
    return {"device": config.device, "threads": threads, "system": sys.platform, "processor": platform.machine()}
