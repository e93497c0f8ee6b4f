"""One run: train, measure, checkpoint, resume; and the command ``gxd run``."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import torch
import tyro

import gxd
from gxd.lab import methods
from gxd.lab.conduct import torch_as_it_was
from gxd.lab.errors import Elsewhere, UserError, first_line
from gxd.lab.experiments import EXPERIMENTS, Experiment, experiment
from gxd.lab.progress import Board, Progress
from gxd.lab.store import METRICS, STATUS, RunDirectory, read_json, read_metrics
from gxd.lab.streams import Stream
from gxd.lab.training import Training, test

CHECKPOINT_EVERY = 10.0  # seconds, at least; what a kill costs. The numbers do not depend on it

Report = Callable[[Progress], None]
Log = Callable[[dict[str, Any]], None]
E = TypeVar("E", bound=Experiment)


@dataclass(frozen=True)
class Options(Generic[E]):
    """What ``gxd run`` takes."""

    experiment: tyro.conf.OmitArgPrefixes[E]
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(aliases=["--seed"])] = (0,)
    """One run for each, one after the other. A seed gives the tasks and the weights; methods share the tasks.
    Paper: 15 for Permuted MNIST, 10 for CIFAR-100."""
    out: Path = Path("runs")
    """Where results go. Runs that are there already are taken up where they stopped."""
    tensorboard: bool = False
    """Write TensorBoard events beside the metrics."""


def make_stream(config: Experiment) -> Stream:
    """The tasks of an experiment."""
    stream = config.stream()
    if stream.tasks is not None and config.tasks > stream.tasks:
        raise UserError(f"tasks={config.tasks} must be at most {stream.tasks}: {config.name} has no more")
    return stream


def train(
    config: Experiment,
    root: str | Path,
    *,
    report: Report | None = None,
    tensorboard: bool = False,
    checkpoint_every: float = CHECKPOINT_EVERY,
) -> Path:
    """Train to the end, or go on where an earlier process stopped. A complete run returns at once.

    Args:
        root: where run directories go.
        report: called at the start and after every task.
        tensorboard: whether to write TensorBoard events beside the metrics.
        checkpoint_every: seconds between checkpoints, at least; 0: after every task.

    Returns:
        The run directory.
    """
    config, report = config.resolved(), report or _nothing
    device = find_device(config.device)
    path = config.run_directory(root)
    with ExitStack() as stack:
        stack.enter_context(out_of_memory_in_words())
        # Before anything is written: what is wrong with the data, or with the method, shall leave no directory behind.
        stream = None if _is_over(path) else make_stream(config)
        stack.enter_context(_surroundings(config))
        training = None if stream is None else Training(config, stream, device)
        directory = stack.enter_context(RunDirectory(path, config))
        log = stack.enter_context(_events(path)) if tensorboard else _nothing
        if stream is None or training is None or _is_over(path):
            _catch_up(directory, config, report, log)
        else:
            _go_on(training, stream, directory, report, log, checkpoint_every)
    return path


def _go_on(
    training: Training, stream: Stream, directory: RunDirectory, report: Report, log: Log, checkpoint_every: float
) -> None:
    """Train from the last checkpoint to the end."""
    config, tasks = training.config, training.config.tasks
    saved = directory.load(next(training.model.parameters()).device)
    first, before = 0, 0.0
    if saved is not None:
        try:
            training.load_state_dict(saved["training"])
            first, before = int(saved["task"]), float(saved["seconds"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise Elsewhere(
                f"the checkpoint in {directory.path} is of another version of gxd: delete that directory, and the run "
                "starts anew"
            ) from error
    value = _catch_up(directory, config, report, log)
    began = saved_at = time.monotonic()
    directory.set_status("running", first, before)
    for number in range(first, tasks):
        task, resets = stream.task(number), training.resets
        training.new_task(task)
        learned = training.learn(task)
        if learned is None:
            directory.set_status("diverged", number, before + time.monotonic() - began)
            return
        with training.evaluating():
            tested, measured = test(training.model, task, config), training.measure(task)
        resets = training.resets - resets
        line = {"task": number, **tested, **learned, "resets": resets, **training.reset_ages(resets), **measured}
        directory.append(line)
        log(line)
        seconds = before + time.monotonic() - began
        if time.monotonic() - saved_at >= checkpoint_every or number + 1 == tasks:
            directory.save({"training": training.state_dict(), "task": number + 1, "seconds": seconds})
            directory.set_status("running", number + 1, seconds)
            saved_at = time.monotonic()
        if config.counts(number):
            value = line[config.metric]
        report(Progress(number + 1, tasks, value, config.metric))
    directory.set_status("done", tasks, before + time.monotonic() - began)


def _catch_up(directory: RunDirectory, config: Experiment, report: Report, log: Log) -> float | None:
    """Report what is on disk already. Returns the last value of the metric that counts."""
    lines = directory.lines()
    for line in lines:
        log(line)
    counted = [line.get(config.metric) for line in lines if config.counts(line["task"])]
    value = counted[-1] if counted else None
    report(Progress(len(lines), config.tasks, value, config.metric))
    return value


def find_device(name: str) -> torch.device:
    """The device of a name, if this machine has it."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # a meta tensor has no number in it
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f'device {name!r} cannot be used here ({first_line(error)}): use --device cpu, or device = "cpu" in a '
            "sweep file"
        ) from error
    return device


@contextmanager
def out_of_memory_in_words() -> Iterator[None]:
    """An allocation that fails in this block is the user's to put right."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # On a CPU torch raises a plain RuntimeError, also for sizes that no memory has.
        known = ("DefaultCPUAllocator", "out of memory", "Storage size calculation overflowed")
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in known):
            raise
        raise Elsewhere(
            f"there is not enough memory ({first_line(error)}): choose a smaller network or a smaller batch_size, or "
            "run fewer at a time"
        ) from error


def _is_over(path: Path) -> bool:
    return (path / STATUS).exists() and read_json(path / STATUS).get("status") in ("done", "diverged")


def _nothing(_: Any) -> None:
    pass


@contextmanager
def _surroundings(config: Experiment) -> Iterator[None]:
    """Threads, denormals, determinism and warnings for the time of a run."""
    cudnn = torch.backends.cudnn
    deterministic, benchmark = cudnn.deterministic, cudnn.benchmark
    with torch_as_it_was(), warnings.catch_warnings():
        warnings.simplefilter("ignore", gxd.NonFiniteWarning)  # counted in the metrics, line by line
        warnings.filterwarnings("ignore", ".* acts at the end of a task", gxd.ObservationWarning)  # a task may be long
        try:
            # Dying networks are full of denormal numbers, which a CPU computes with many times slower. They are of the
            # size of 1e-38, and taken for 0. Threads inherit this from the one that starts them, so it comes first.
            torch.set_flush_denormal(True)
            if config.threads is not None:
                torch.set_num_threads(config.threads)
            cudnn.deterministic, cudnn.benchmark = True, False
            yield
        finally:
            torch.set_flush_denormal(False)
            cudnn.deterministic, cudnn.benchmark = deterministic, benchmark


@contextmanager
def _events(path: Path) -> Iterator[Log]:
    """Write TensorBoard events to ``path/tensorboard``, anew: what was there is of a run that was cut back."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError("--tensorboard needs TensorBoard: pip install 'gxd[tensorboard]'") from error
    folder = path / "tensorboard"
    for old in folder.glob("events.*"):
        old.unlink()
    writer = SummaryWriter(str(folder))

    def log(line: dict[str, Any]) -> None:
        for name, value in line.items():
            if name != "task":
                writer.add_scalar(name, math.nan if value is None else value, line["task"])

    try:
        yield log
    finally:
        writer.close()


# --- the command ------------------------------------------------------------------------------------------------------

USAGE = """usage: gxd run EXPERIMENT [OPTIONS]

{experiments}

gxd run EXPERIMENT --help lists the options of each, with the paper's values. --method NAME is one of

{methods}

in parentheses what --options takes, as in gxd run permuted-digits --method redo --options threshold=0.05 every=500"""


def command(argv: list[str]) -> int:
    """``gxd run EXPERIMENT ...``."""
    from gxd.lab.arguments import parse

    if not argv or argv[0] in ("-h", "--help"):
        lines = [f"  {name:20s} {_first_sentence(cls)}" for name, cls in EXPERIMENTS.items()]
        print(USAGE.format(experiments="\n".join(lines), methods="\n".join(methods.overview())))
        return 0
    cls = experiment(argv[0])
    about = f"{' '.join((cls.__doc__ or '').split())} Started again, it goes on where it stopped. "
    about += "Paper: the value of the paper that the experiment comes from; of methods and resets, of the one of GXD."
    options: Options[Any] = parse(Options[cls], argv[1:], f"gxd run {cls.name}", description=about)  # type: ignore[valid-type]
    if not options.seeds:
        raise UserError("--seeds needs a number, for instance --seeds 0 1 2")
    options.experiment.check_used()
    configs = [replace(options.experiment, seed=seed) for seed in dict.fromkeys(options.seeds)]
    with Board(len(configs)) as board:
        for config in configs:
            name = config.label()
            path = train(config, options.out, report=board.follow(name), tensorboard=options.tensorboard)
            board.finish(name, _ending(config, path) if read_json(path / STATUS)["status"] == "diverged" else "")
    paths = [config.run_directory(options.out) for config in configs]
    for path in paths:
        print(path)
    endings = [f"seed {c.seed} {_ending(c, p)}" for c, p in zip(configs, paths, strict=True)]
    print(f"final {cls.metric.replace('_', ' ')}: {', '.join(endings)}")
    return 0


def _first_sentence(cls: type[Experiment]) -> str:
    return " ".join((cls.__doc__ or "").split()).partition(". ")[0].rstrip(".")


def _ending(config: Experiment, path: Path) -> str:
    """How a run that is over ended: the last value of its metric, or where it diverged."""
    status = read_json(path / STATUS)
    if status["status"] == "diverged":
        return f"diverged in task {status['task']}"
    lines = read_metrics(path)
    if len(lines) != status["task"]:
        raise UserError(f"{path / METRICS} has lost lines: delete {path}, and run it again")
    return f"{[line[config.metric] for line in lines if config.counts(line['task'])][-1]:.4f}"
