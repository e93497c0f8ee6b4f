"""``gxd sweep FILE`` or ``NAME``: a grid of runs, and the best setting of each method on fresh seeds.

The file is described in :mod:`gxd.lab.grid`, what "best" means in :mod:`gxd.lab.selection`. Only what is missing is
run.
"""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import tyro

from gxd.lab import cluster, workers
from gxd.lab.arguments import parse
from gxd.lab.errors import UserError
from gxd.lab.experiments import Experiment
from gxd.lab.grid import Sweep, find, load, short, sweeps
from gxd.lab.progress import Board, clock
from gxd.lab.selection import final_runs, select, selection_table, write_selection
from gxd.lab.workers import Outcome, settled, status_of

FEW = 5  # runs that --dry-run names


@dataclass(frozen=True)
class Options:
    """Run a grid of runs from a TOML file, choose the best settings, and run these on fresh seeds.

    Only what is missing is run: the same command again goes on where it stopped.
    """

    sweep: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE|NAME")]
    """A sweep file, or the name of one that comes with gxd."""
    out: Path = Path("runs")
    """Where run directories go. With --ray, on a file system that all nodes share."""
    jobs: int | None = None
    """Runs at a time on this machine, one thread each. Default: as many as there are cores."""
    dry_run: bool = False
    """Say what there is to do, and do nothing."""
    list: bool = False
    """Print one command line for each missing run, for the job array of a cluster, and do nothing."""
    ray: str | None = None
    """Use Ray: auto joins the cluster that runs on this machine, local starts one, else the address of one."""
    gpus: float = 0.0
    """With --ray: GPUs per run; 0.25 puts four runs on one. The device itself is a setting: device = "cuda"."""
    retries: int = workers.RETRIES
    """How often a run whose process was killed is taken up again."""


def command(argv: list[str]) -> int:
    """``gxd sweep FILE|NAME ...``."""
    about = f"{inspect.getdoc(Options)}\n\nSweeps that come with gxd: {', '.join(sweeps())}."
    options = parse(Options, argv, "gxd sweep", description=about)
    if options.jobs is not None and options.jobs < 1:
        raise UserError(f"--jobs {options.jobs} must be 1 or more")
    if options.retries < 0:
        raise UserError(f"--retries {options.retries} must be 0 or more")
    if options.gpus < 0 or (options.gpus and options.ray is None):
        raise UserError(f"--gpus {options.gpus:g} must be 0 or more, and goes with --ray")
    sweep = load(find(options.sweep))
    if options.dry_run:
        print(_plan(sweep, options))
        return 0
    if options.list:
        return _list(sweep, options)
    grid, *final = stages_of(sweep, options.out)
    outcomes = _run(sweep, grid, options)
    for _ in final:
        choices = select(sweep, options.out)
        file = write_selection(sweep, choices, options.out)
        metric = sweep.kind.metric.replace("_", " ")
        print(f"{selection_table(sweep, choices)}\n\nchosen by final {metric}; all candidates are in {file}\n")
        outcomes += _run(sweep, stages_of(sweep, options.out)[1], options)
        for choice in choices:
            if choice.best is None:
                print(f"gxd: no final runs for {_words(choice.per)}: runs of its grid are missing", file=sys.stderr)
    return _conclude(outcomes, sweep.root(options.out))


@dataclass(frozen=True)
class Stage:
    """Runs that go to one directory: the grid, or what was chosen from it."""

    name: str
    runs: list[Experiment]
    root: Path

    def missing(self) -> list[Experiment]:
        """Those that have not come to their end."""
        return [run for run in self.runs if not settled(run, self.root)]


def _run(sweep: Sweep, stage: Stage, options: Options) -> list[Outcome]:
    """Run what is missing of one stage."""
    jobs = [sweep.job(run) for run in stage.missing()]
    print(f"{stage.name}: {len(stage.runs)} runs, {len(stage.runs) - len(jobs)} of them done before", flush=True)
    if not jobs:
        return []
    with Board(len(jobs)) as board:
        if options.ray is None:
            return workers.run_all(jobs, stage.root, board, processes=options.jobs, retries=options.retries)
        return cluster.run_all(
            jobs,
            stage.root,
            board,
            address=options.ray,
            processes=options.jobs,
            gpus=options.gpus,
            retries=options.retries,
        )


def _conclude(outcomes: Sequence[Outcome], root: Path) -> int:
    """Say what went wrong, one line each, and return the exit code."""
    failures = [(o.job.name, o.failure) for o in outcomes if o.failure is not None]
    diverged = sum(o.status == "diverged" for o in outcomes)
    done = len(outcomes) - len(failures)
    report = shlex.join(["gxd", "report", str(root)])
    print(f"{done} run{'s' * (done != 1)} done, {diverged} of them diverged. `{report}` shows them")
    # One trace will do: what is a bug in one run is mostly the same bug in the next.
    for trace in [failure.trace for _, failure in failures if failure.trace][:1]:
        print(trace, file=sys.stderr)
    for name, failure in failures:
        print(f"gxd: {name} failed: {failure.reason}", file=sys.stderr)
    if failures:
        print(f"gxd: {len(failures)} of {len(outcomes)} failed; the same command tries them again", file=sys.stderr)
    return 1 if failures else 0


def stages_of(sweep: Sweep, out: Path) -> list[Stage]:
    """The grid, and the final runs as far as they are known."""
    stages = [Stage("grid" if sweep.final else "runs", sweep.runs(), sweep.grid_root(out))]
    if sweep.final is not None:
        stages.append(Stage("final", final_runs(sweep, select(sweep, out)), sweep.root(out)))
    return stages


def _plan(sweep: Sweep, options: Options) -> str:
    """What there is to do, for --dry-run."""
    lines = []
    stages = stages_of(sweep, options.out)
    for stage in stages:
        missing = stage.missing()
        done = len(stage.runs) - len(missing)
        if stage.runs:
            lines.append(f"{stage.name}: {len(stage.runs)} runs, {done} done, {len(missing)} missing, in {stage.root}")
        lines += [f"  {sweep.job(run).name}" for run in missing[:FEW]]
        if len(missing) > FEW:
            lines.append(f"  ... and {len(missing) - FEW} more")
    if sweep.final is not None:
        open_choices = sum(choice.best is None for choice in select(sweep, options.out))
        if open_choices:
            count = open_choices * len(sweep.final.seeds)
            lines.append(f"final: {count} runs, of settings that the grid will choose, in {sweep.root(options.out)}")
    lines.append(_estimate(stages, options.jobs or workers.cores()))
    return "\n".join(lines)


def _estimate(stages: Sequence[Stage], processes: int) -> str:
    """How long the missing runs take, from the pace of those on disk: of the same method, else of all."""
    pace: dict[str, list[float]] = {}
    left: dict[str, int] = {}
    for stage in stages:
        for run in stage.runs:
            status = status_of(run, stage.root)
            task = int(status.get("task", 0))
            if task and status.get("seconds"):
                pace.setdefault(run.method, []).append(status["seconds"] / task)
            if status.get("status") not in workers.SETTLED:
                left[run.method] = left.get(run.method, 0) + run.tasks - task
    if not left:
        return "nothing is missing"
    if not pace:
        return "no run has begun, so there is no estimate of the time"
    every = [value for values in pace.values() for value in values]
    seconds = sum(n * fmean(pace.get(method, every)) for method, n in left.items()) / processes
    return f"about {clock(seconds)} with {processes} at a time, from the pace of {len(every)} runs on disk"


def _list(sweep: Sweep, options: Options) -> int:
    """One command line per missing run of the stage that is next."""
    for stage in stages_of(sweep, options.out):
        missing = stage.missing()
        for run in missing:
            print(command_line(run, stage.root))
        if missing:
            if stage.name == "grid":
                print("gxd: this is the grid; once it is done, --list has the final runs", file=sys.stderr)
            return 0
    print("gxd: nothing is missing", file=sys.stderr)
    return 0


def command_line(config: Experiment, out: Path) -> str:
    """The ``gxd run`` that makes this run, ready for a shell."""
    words = ["gxd", "run", config.name]
    config, standard = config.used(), type(config)()
    for each in fields(config):
        value = getattr(config, each.name)
        option = each.name.replace("_", "-")
        if value == getattr(standard, each.name):
            continue
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", *(value if isinstance(value, tuple) else [str(value)])]
    return shlex.join([*words, "--out", str(out)])


def _words(per: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {short(value)}" for name, value in per.items())
