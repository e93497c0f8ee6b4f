"""``gxd watch DIR...``: a live board of running sweeps, in the terminal.

It reads what run directories hold anyway, from any process and any machine that sees them, and writes nothing.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import tyro

from gxd.lab.arguments import parse
from gxd.lab.errors import UserError
from gxd.lab.progress import Progress, clock
from gxd.lab.seen import FAILED, LIVE, Scanner, Seen
from gxd.lab.sweep import stages_of
from gxd.lab.workers import SETTLED

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

WIDTH = 110  # where there is no terminal to ask
NAMED = 30  # runs that a snapshot names


@dataclass(frozen=True)
class Options:
    """Watch runs while they are made: how many are done, what runs now, how far it is, and when all will be over.

    Only reads. Ctrl-C ends it, and leaves the runs alone.
    """

    directories: tyro.conf.Positional[tuple[Path, ...]]
    """Where the runs are: what --out of gxd sweep, gxd run or gxd leaderboard says, or a directory below."""
    sweep: str | None = None
    """The sweep, a file or a name: then runs that were not begun are counted, too. The directory is its --out."""
    once: bool = False
    """Print the board once, as where there is no terminal."""
    every: float = 5.0
    """Seconds between two looks."""


def command(argv: list[str]) -> int:
    """``gxd watch DIR...``."""
    options = parse(Options, argv, "gxd watch")
    if not options.directories:
        raise UserError("name a directory with runs, as --out of gxd sweep does")
    if not options.every >= 0.5:
        raise UserError(f"--every {options.every:g} must be 0.5 or more")
    if options.sweep is not None and len(options.directories) > 1:
        raise UserError("--sweep goes with one directory: the --out of that sweep")
    scanner = Scanner(options.directories)
    planned = _planned(options)
    if not scanner.look() and not planned:
        raise UserError(_nothing(options.directories))
    from rich.console import Console

    alone = options.once or not sys.stdout.isatty()
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    if alone:
        console.print(board(scanner, planned, NAMED))
        return 0
    return _live(scanner, planned, options.every, console)


def _live(scanner: Scanner, planned: Mapping[Path, int], every: float, console: Console) -> int:
    from rich.live import Live

    try:
        with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                live.update(board(scanner, planned, max(3, console.height - 12)), refresh=True)
                time.sleep(every)
    except KeyboardInterrupt:  # the only way out, and no mistake
        return 0


def _planned(options: Options) -> dict[Path, int]:
    """The directories of all runs that are to come -> their tasks, as far as that is known: of the sweep, or of a
    leaderboard's trials on the streams that it has begun.
    """
    if options.sweep is not None:
        from gxd.lab.grid import find, load

        plan = stages_of(load(find(options.sweep)), options.directories[0])
        return {run.run_directory(stage.root).resolve(): run.tasks for stage in plan for run in stage.runs}
    found: dict[Path, int] = {}
    for directory in options.directories:
        if (directory / "protocol.json").is_file():
            found |= _trials(directory)
    return found


def _trials(board: Path) -> dict[Path, int]:
    from gxd.lab.leaderboard import work
    from gxd.lab.leaderboard.entries import entries
    from gxd.lab.leaderboard.protocol import PROTOCOL

    try:
        work.check_protocol(board, PROTOCOL)
    except UserError:  # of another version: its runs can be watched, but what is to come is not known
        return {}
    accepted = work.read_objections(board)
    able = [
        place
        for place in work.places(PROTOCOL, entries().values())
        if accepted.get(place.track.name, {}).get(place.entry.name) == ""
    ]
    runs = [run for place in able for run in place.trials()]
    return {run.config.run_directory(board / run.stage).resolve(): run.config.tasks for run in runs}


def _nothing(directories: Sequence[Path]) -> str:
    where = ", ".join(map(str, directories))
    if any((directory / "digest.jsonl").is_file() for directory in directories):
        return f"{where} holds a digest and no runs, so there is nothing to watch: gxd report shows it"
    return f"{where} holds no run of gxd: start some with gxd run or gxd sweep, and name their --out"


# --- the board --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """A study in one row. ``missing`` are runs that were not begun: of the sweep, or else of its settings and seeds."""

    name: str
    counts: Mapping[str, int]
    missing: int
    behind: int  # tasks that are done; a run that diverged has no more to do
    tasks: int
    eta: float | None

    @staticmethod
    def of(name: str, runs: Sequence[Seen], planned: Mapping[Path, int]) -> Summary:
        """The runs of one study; ``planned`` are those of it."""
        counts = Counter(run.status for run in runs)
        if planned:
            begun = {run.path for run in runs}
            left = [tasks for path, tasks in planned.items() if path not in begun]
        else:
            settings, seeds = {run.setting for run in runs}, {run.seed for run in runs}
            left = [max(run.tasks for run in runs)] * (len(settings) * len(seeds) - len(runs))
        open_ = [run for run in runs if run.status in LIVE]
        pace = [run.pace for run in runs if run.pace is not None]
        by_method: dict[str, list[float]] = defaultdict(list)
        for run in runs:
            if run.pace is not None:
                by_method[run.method].append(run.pace)
        eta = None
        if pace and counts["running"]:
            seconds = sum((run.tasks - run.task) * fmean(by_method.get(run.method) or pace) for run in open_)
            eta = (seconds + sum(left) * fmean(pace)) / counts["running"]
        behind = sum(run.tasks if run.status in SETTLED else run.task for run in runs)
        return Summary(name, counts, len(left), behind, sum(run.tasks for run in runs) + sum(left), eta)


def board(scanner: Scanner, planned: Mapping[Path, int], rows: int) -> RenderableType:
    """Everything as of now: a row per study, and a row for each of the ``rows`` runs that moved last."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    runs = scanner.look()
    by_study: dict[str, list[Seen]] = defaultdict(list)
    for run in runs:
        by_study[run.study].append(run)
    for path in planned:
        by_study.setdefault(scanner.study(path), [])
    studies = Table(box=None, pad_edge=False, header_style="bold")
    studies.add_column("study", overflow="fold")
    for head in ("done", "running", "silent", "diverged", "failed", "missing", "", "", "ETA"):
        studies.add_column(head, justify="right", no_wrap=True)
    for name, members in by_study.items():
        mine = {path: tasks for path, tasks in planned.items() if scanner.study(path) == name}
        one = Summary.of(name, members, mine)
        bar = ProgressBar(total=max(one.tasks, 1), completed=one.behind, width=16)
        words = [str(one.counts[status] or "·") for status in ("done", "running", "silent", "diverged", FAILED)]
        over = one.tasks > 0 and one.behind == one.tasks
        eta = "over" if over else clock(one.eta) if one.eta is not None else "–"
        share = f"{100 * one.behind / max(one.tasks, 1):.0f}%"
        studies.add_row(Text(name), *words, str(one.missing or "·"), bar, share, eta)
    parts: list[RenderableType] = [studies]
    live = sorted((run for run in runs if run.status in LIVE), key=lambda run: run.idle)
    if live:
        parts += [Text(), _runs(live[:rows])]
    notes = [f"{len(live) - rows} more are under way"] if len(live) > rows else []
    if any(run.status == "silent" for run in live):
        notes.append("silent: no line for long, so it was stopped, or its tasks are long")
    if live and {run.study for run in live} - {scanner.study(path) for path in planned}:
        notes.append("missing: of the settings and seeds that were begun; --sweep FILE counts all that are to come")
    notes += [f"cannot be read: {path} ({why})" for path, why in sorted(scanner.unreadable.items())[:3]]
    notes.append(time.strftime("%H:%M:%S"))
    return Group(*parts, Text("\n" + "\n".join(notes), style="dim"))


def _runs(runs: Sequence[Seen]) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="ellipsis", no_wrap=True)
    for head in ("", "task", "now", "s/task", "ETA", "last line"):
        table.add_column(head, justify="right", no_wrap=True)
    for run in runs:
        value = Progress(run.task, run.tasks, run.value, run.metric).words if run.value is not None else "–"
        pace = f"{run.pace:.3g}" if run.pace is not None else "–"
        eta = clock(run.pace * (run.tasks - run.task)) if run.pace is not None else "–"
        idle = Text(f"{clock(run.idle)} ago", style="yellow" if run.status == "silent" else "")
        bar = ProgressBar(total=max(run.tasks, 1), completed=run.task, width=16)
        table.add_row(Text(run.name), bar, f"{run.task}/{run.tasks}", value, pace, eta, idle)
    return table
