"""Many runs on one machine: processes that each train one run after another, with one torch thread each.

A worker is spawned, not forked, because torch's threads do not survive a fork. It stays for several runs, because
importing torch takes seconds. If the system kills it (out of memory), its run goes back into the queue and resumes
from its last checkpoint in a new worker; the other runs do not notice. (An executor of ``concurrent.futures`` would
give up all of them.)
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from gxd.lab.errors import Elsewhere, UserError
from gxd.lab.experiments import Experiment
from gxd.lab.progress import Board, Progress
from gxd.lab.store import STATUS, read_json

RETRIES = 2
"""How often a run whose worker was killed is taken up again."""
SETTLED = ("done", "diverged")
ONE_THREAD = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # compile in the worker itself: the other cores are taken
}
ALL = "all runs"
EVERYBODY_S = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # troubles of the disk, not of one run


@dataclass(frozen=True)
class Job:
    """One run to do, and the name it goes by on the screen."""

    name: str
    config: Experiment


@dataclass(frozen=True)
class Failure:
    """Why a run could not be done: one line, the trace if it may be a bug, the number of a system's error.

    ``elsewhere``: it says nothing about the run, see :class:`gxd.lab.errors.Elsewhere`.
    """

    reason: str
    trace: str = ""
    errno: int | None = None
    elsewhere: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a run ended: ``done``, ``diverged`` or ``failed``."""

    job: Job
    status: str
    failure: Failure | None = None


def status_of(config: Experiment, root: Path) -> dict[str, Any]:
    """What status.json of a run says; empty if it was never started."""
    file = config.run_directory(root) / STATUS
    return read_json(file) if file.exists() else {}


def settled(config: Experiment, root: Path) -> bool:
    """Whether a run has come to its end, be it a divergence."""
    return status_of(config, root).get("status") in SETTLED


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_all(
    jobs: Sequence[Job],
    root: Path,
    board: Board,
    *,
    processes: int | None = None,
    retries: int = RETRIES,
    files: Sequence[Path] = (),
) -> list[Outcome]:
    """Train all of them, in this order, as many at a time as there are cores. Returns how each ended.

    Args:
        files: of the user's, that register methods; see :func:`gxd.lab.methods.load`.
    """
    prepare(root)
    return _Crew(jobs, root, board, processes or cores(), retries, files).work()


# --- in this process --------------------------------------------------------------------------------------------------


class _Worker:
    """A process, our end of the pipe to it, and what it is at."""

    def __init__(self, root: Path, files: Sequence[Path]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        # A daemon: should we end without saying goodbye, Python ends it.
        self.process = context.Process(target=_serve, args=(theirs, root, files), daemon=True)
        with _environment(ONE_THREAD), without_interrupts():
            self.process.start()
        theirs.close()  # so that the end of the worker is the end of the pipe
        self.job: int | None = None


class _Crew:
    """The workers and the queue."""

    def __init__(
        self, jobs: Sequence[Job], root: Path, board: Board, size: int, retries: int, files: Sequence[Path] = ()
    ) -> None:
        self.jobs, self.root, self.board, self.files = jobs, root, board, files
        self.size, self.retries = max(1, min(size, len(jobs))), retries
        self.waiting = deque(range(len(jobs)))
        self.killed: Counter[int] = Counter()
        self.outcomes: dict[int, Outcome] = {}
        self.total = Total(jobs, root, board)
        self.workers: list[_Worker] = []

    def work(self) -> list[Outcome]:
        try:
            while len(self.outcomes) < len(self.jobs):
                self._hand_out()
                for pipe in wait([w.pipe for w in self.workers]):
                    self._hear(next(w for w in self.workers if w.pipe is pipe))
        except BaseException:
            self._dismiss(at_once=True)
            raise
        self._dismiss(at_once=False)
        return [self.outcomes[i] for i in range(len(self.jobs))]

    def _hand_out(self) -> None:
        while self.waiting:
            worker = next((w for w in self.workers if w.job is None), None)
            if worker is None:
                if len(self.workers) == self.size:
                    return
                worker = _Worker(self.root, self.files)
                self.workers.append(worker)
            worker.job = self.waiting.popleft()
            try:
                worker.pipe.send(self.jobs[worker.job].config)
            except OSError:  # it died while it had nothing to do; `wait` will tell
                return

    def _hear(self, worker: _Worker) -> None:
        try:
            said = worker.pipe.recv()
        except (EOFError, OSError):
            self._bury(worker)
            return
        if worker.job is None:
            return
        index, job = worker.job, self.jobs[worker.job]
        if isinstance(said, Progress):
            self.board.update(job.name, said)
            self.total.update(index, said.task)
            return
        worker.job = None
        if said is None:
            self._close(index, outcome_of(job, self.root))
        else:
            self._close(index, failed(job, said))

    def _bury(self, worker: _Worker) -> None:
        """A worker is dead: give its run to another, unless this has happened too often."""
        worker.process.join()
        worker.pipe.close()
        self.workers.remove(worker)
        index = worker.job
        if index is None:
            return
        job, cause = self.jobs[index], _cause(worker.process.exitcode)
        self.killed[index] += 1
        if self.killed[index] <= self.retries:
            self.board.say(f"{job.name}: its process was {cause}; it is taken up again from its last checkpoint")
            self.waiting.appendleft(index)
        else:
            self._close(index, failed(job, Failure(f"its process was {cause}, {self.killed[index]} times")))

    def _close(self, index: int, outcome: Outcome) -> None:
        self.outcomes[index] = outcome
        self.total.finish(index)
        close(self.board, outcome)

    def _dismiss(self, *, at_once: bool) -> None:
        for worker in self.workers:
            if at_once:
                worker.process.terminate()
            worker.pipe.close()  # the worker takes this for goodbye
        for worker in self.workers:
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self.workers.clear()


def outcome_of(job: Job, root: Path) -> Outcome:
    """How a run ended that returned, from its status.json."""
    status = status_of(job.config, root).get("status")
    return Outcome(job, status) if status in SETTLED else failed(job, Failure(f"it left the status {status!r} behind"))


def failed(job: Job, failure: Failure) -> Outcome:
    """The outcome of a run that could not be done. What all others would fail of too is raised instead."""
    if failure.errno in EVERYBODY_S:
        raise OSError(failure.errno, failure.reason, str(job.name))
    return Outcome(job, "failed", failure)


def prepare(root: Path) -> None:
    """Make the directory of the runs, and see that files can be written there."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=root).close()
    except OSError as error:
        raise UserError(f"cannot write to {root} ({error.strerror}): choose another place with --out") from error


class Total:
    """One more line on the board: the tasks of all runs together, and with them the time that is left."""

    def __init__(self, jobs: Sequence[Job], root: Path, board: Board) -> None:
        self.board = board
        self.planned = [job.config.tasks for job in jobs]
        self.done = [min(int(status_of(job.config, root).get("task", 0)), job.config.tasks) for job in jobs]
        self.show()

    def update(self, index: int, task: int) -> None:
        """A run has so many tasks behind it."""
        self.done[index] = task
        self.show()

    def finish(self, index: int) -> None:
        """A run has come to its end. The tasks after a divergence will not be trained."""
        self.update(index, self.planned[index])

    def show(self) -> None:
        """Put it on the board."""
        if len(self.planned) > 1:
            self.board.update(ALL, Progress(sum(self.done), sum(self.planned)))


def close(board: Board, outcome: Outcome) -> None:
    """Take a run off the board."""
    note = "" if outcome.status == "done" else outcome.status
    board.finish(outcome.job.name, f"failed: {outcome.failure.reason}" if outcome.failure is not None else note)


def _cause(code: int | None) -> str:
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Variables that a process started in this block finds set: torch reads them when it is imported."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def without_interrupts() -> Iterator[None]:
    """A process started in this block never sees Ctrl-C, which a terminal sends to all: to act on it is for us."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # it is started with the first worker otherwise, and lifts the block meanwhile
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- in a worker ------------------------------------------------------------------------------------------------------


def train_one(config: Experiment, root: Path, report: Any = None, files: Sequence[Path] = ()) -> Failure | None:
    """Train one run with one thread. Returns what went wrong, if anything did."""
    from gxd.lab import methods, run

    try:
        for file in files:
            methods.load(file)
        run.train(replace(config, threads=1), root, report=report)
    except UserError as error:
        return Failure(str(error), elsewhere=isinstance(error, Elsewhere))
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return Failure(f"{error.strerror or error}{where}", errno=error.errno)
    except (Exception, SystemExit) as error:  # a method that calls sys.exit would do so each time it is tried again
        first = str(error).partition("\n")[0]
        return Failure(f"{type(error).__name__}: {first}", traceback.format_exc())
    finally:
        if "torch._dynamo" in sys.modules:
            # Dynamo gives up compiling a function after a handful of models; the next run is a new model.
            import torch

            torch.compiler.reset()
    return None


class _NobodyListens(BaseException):
    """The parent has gone. A run that is under way ends with it: to a run all else that is raised is its failure."""


def _serve(pipe: Connection, root: Path, files: Sequence[Path]) -> None:
    """Train what comes through the pipe until it is closed."""
    follow_parent()

    def say(said: Any) -> None:
        try:
            pipe.send(said)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise _NobodyListens from error

    while True:
        try:
            say(train_one(pipe.recv(), root, say, files))
        except (EOFError, ConnectionResetError, _NobodyListens):
            return


def follow_parent() -> None:
    """What a worker does first: leave Ctrl-C to its parent, and end when that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Even a parent that was killed leaves no orphan behind, and what it started anew finds the run directory free."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
