"""What a long command shows while it works: a bar per run on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from types import TracebackType

EVERY = 15.0  # seconds between two lines of one run, where there is no terminal


@dataclass(frozen=True)
class Progress:
    """How far a run is: tasks behind it, tasks in all, and of the last one that counts (None before it) the metric."""

    task: int
    tasks: int
    value: float | None = None
    metric: str = "test_accuracy"
    unit: str = "task"

    @property
    def short(self) -> str:
        """The value alone."""
        if self.value is None:
            return "-"
        return f"{100 * self.value:.1f}%" if self.metric.endswith("accuracy") else f"{self.value:.3g}"

    @property
    def words(self) -> str:
        """The value with what it is: accuracy or loss."""
        return f"{self.metric.rpartition('_')[2]} {self.short}"


@dataclass
class _Run:
    name: str
    first: Progress  # where this process took it up: a resumed run did not do the tasks before
    began: float
    last: Progress
    shown: float
    bar: Any = None

    def eta(self, now: float) -> str:
        done = self.last.task - self.first.task
        if not done:
            return "--:--"
        return clock((now - self.began) / done * (self.last.tasks - self.last.task))


class Board:
    """The runs under way. Use it as a context manager, from one thread.

    Args:
        runs: how many runs there will be. With many, a finished run leaves a line instead of its bar, and one more bar
            counts the runs.
        out: where to write; default stderr, so that stdout holds results only.
        live: bars or lines; default: bars if ``out`` is a terminal.

    Example::

        with Board() as board:
            run.train(config, "runs", report=board.follow(config.label()))
    """

    def __init__(
        self,
        runs: int | None = None,
        *,
        out: TextIO | None = None,
        live: bool | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = sys.stderr if out is None else out
        self._live = self._out.isatty() if live is None else live
        self._now, self._total, self._finished = now, runs, 0
        self._many = runs is not None and runs > 12
        self._runs: dict[str, _Run] = {}
        self._bars: Any = None
        self._overall: Any = None

    def __enter__(self) -> Board:
        if self._live:
            self._bars = _bars(self._out)
            self._bars.start()
            if self._many:
                self._overall = self._bars.add_task("runs", total=self._total, value="", eta="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    def follow(self, name: str) -> Callable[[Progress], None]:
        """A ``report`` for :func:`gxd.lab.run.train`."""
        return lambda progress: self.update(name, progress)

    def update(self, name: str, progress: Progress) -> None:
        """A run began or went on. Several runs may be under way; the name tells them apart."""
        now = self._now()
        run = self._runs.get(name)
        if run is None:
            run = self._runs[name] = _Run(name, progress, now, progress, now)
            if self._bars is not None:
                run.bar = self._bars.add_task(name, total=progress.tasks, value="", eta="")
            elif progress.task < progress.tasks:  # else it was done before, and `finish` says so
                whence = f", {progress.task} of them done before" if progress.task else ""
                self._say(f"{name}: {progress.tasks} {progress.unit}s{whence}")
        run.last = progress
        if self._bars is not None:
            eta = f"ETA {run.eta(now)}"
            self._bars.update(run.bar, completed=progress.task, total=progress.tasks, value=progress.short, eta=eta)
        elif now - run.shown >= EVERY and progress.task < progress.tasks:
            run.shown = now
            self._say(f"{name}: {progress.unit} {progress.task}/{progress.tasks}, {progress.words}, ETA {run.eta(now)}")

    def finish(self, name: str, note: str = "") -> None:
        """A run came to its end; the note says how if it did not go well."""
        self._finished += 1
        run = self._runs.pop(name, None)
        reached = (run.last if run is not None else Progress(0, 0)).words
        took = clock(self._now() - run.began) if run is not None else "0:00"
        count = f"[{self._finished}/{self._total}] " if self._many else ""
        line = f"{count}{name}: {note or f'done, {reached}'} ({took})"
        if self._bars is None:
            self._say(line)
            return
        if run is not None and not self._many:
            self._bars.update(run.bar, eta=note or f"took {took}")
            self._bars.stop_task(run.bar)
        else:
            if run is not None:
                self._bars.remove_task(run.bar)
            self._bars.console.print(line, markup=False, highlight=False)
        if self._overall is not None:
            self._bars.update(self._overall, completed=self._finished)

    def say(self, text: str) -> None:
        """A line of its own, above the bars."""
        if self._bars is not None:
            self._bars.console.print(text, markup=False, highlight=False)
        else:
            self._say(text)

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)


def clock(seconds: float) -> str:
    """``1:05`` or ``2:01:05``."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def _bars(out: TextIO) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bars

    return Bars(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[value]:>6}", markup=False),
        TextColumn("{task.fields[eta]}", markup=False),
        console=Console(file=out),
        expand=True,
        refresh_per_second=4,
    )
