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
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

import gxd
from gxd.lab import metrics, models, streams
from gxd.lab.config import EXPERIMENTS, Cifar100, Experiment, PermutedDigits, PermutedMNIST, experiment
from gxd.lab.errors import UserError, first_line
from gxd.lab.progress import Board, Progress
from gxd.lab.steps import Step, make_step
from gxd.lab.store import METRICS, STATUS, RunDirectory, read_json, read_metrics
from gxd.lab.streams import Stream, Task

CHECKPOINT_EVERY = 10.0  # seconds, at least; what a kill costs. The numbers do not depend on it
PROBE = 1000  # test examples that the metrics of the network are measured on

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


class Training:
    """All that changes while a run trains: the model, its optimizer and its ContinualBackprop."""

    def __init__(self, config: Experiment, stream: Stream, device: torch.device) -> None:
        self.config = config = config.resolved()
        self.model = build_model(config, stream).to(device)
        assert config.lr is not None and config.rate is not None
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), config.lr, momentum=config.momentum, weight_decay=config.weight_decay
        )
        example = torch.zeros(2, *stream.input_shape, device=device)
        self.plan = gxd.find_units(self.model, example, residual=getattr(config, "residual", "skip"))
        self.cbp: gxd.ContinualBackprop | None = None
        if config.method != "backprop":
            self.cbp = gxd.ContinualBackprop(
                self.model,
                self.optimizer,
                plan=self.plan,
                utility=config.method,
                replacement_rate=config.rate,
                maturity=config.maturity,
                decay=config.decay,
                compensate=config.compensate,
                score_every=config.score_every,
                positions=config.positions,
                # Not the model's seed: fresh weights would repeat the first ones.
                seed=streams.generator(config.seed, "resets").initial_seed(),
            )
        self.step: Step | None = None

    @property
    def resets(self) -> int:
        """Units reset so far."""
        return self.cbp.total_resets if self.cbp is not None else 0

    def state_dict(self) -> dict[str, Any]:
        """As tensors and plain values."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "cbp": self.cbp.state_dict() if self.cbp is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.cbp is not None:
            self.cbp.load_state_dict(state["cbp"])

    def new_task(self) -> None:
        """What the protocol does between tasks."""
        if isinstance(self.config, Cifar100):
            models.zero_head(self.model)
            for values in self.optimizer.state.values():
                for value in values.values():
                    if isinstance(value, Tensor):
                        value.zero_()  # in place, for a compiled step holds on to it; to SGD it is as if it were new

    def learn(self, task: Task) -> tuple[float, float] | None:
        """Train on one task. Returns the mean loss and the online accuracy, or None if the run has diverged."""
        if self.step is None:
            self.step = make_step(self.config, self.model, self.optimizer, F.cross_entropy, self.cbp)
        online = _Online(task.train_labels.device)
        self.model.train()
        for epoch in range(self.config.epochs):
            for x, y in task.batches(epoch):
                online.add(*self.step(x, y), y)
        total, hits = online.sums()
        with torch.no_grad():
            finite = torch.stack([p.isfinite().all() for p in self.model.parameters()]).all() & total.isfinite()
        if not bool(finite):
            return None
        return total.item() / online.steps, hits.item() / online.examples

    def measure(self, task: Task) -> dict[str, float]:
        """The metrics that are read off the model after a task."""
        return metrics.measure(self.model, *task.probe(PROBE), self.plan, self.cbp)


class _Online:
    """Sums the losses and the hits of the steps on the device: asking for a number at every step would hold a GPU up,
    and on a CPU the additions themselves would take a tenth of a small step. So they are made many steps at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._total, self._hits = torch.zeros((), device=device), torch.zeros((), dtype=torch.int64, device=device)
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        self.steps = self.examples = 0

    def add(self, loss: Tensor, logits: Tensor, y: Tensor) -> None:
        self.steps += 1
        self.examples += len(y)
        self._waiting.append((loss, logits, y))
        if len(self._waiting) == 64:
            self.sums()

    def sums(self) -> tuple[Tensor, Tensor]:
        """The sum of the losses, and how many examples were classified correctly."""
        if self._waiting:
            losses, logits, labels = zip(*self._waiting, strict=True)
            self._total += torch.stack(losses).sum()
            self._hits += (torch.cat(logits).argmax(1) == torch.cat(labels)).sum()
            self._waiting.clear()
        return self._total, self._hits


def build_model(config: Experiment, stream: Stream) -> nn.Module:
    """The network of an experiment, with its first weights."""
    if isinstance(config, PermutedDigits | PermutedMNIST):
        return models.mlp(
            stream.input_shape[0],
            stream.classes,
            width=config.width,
            depth=config.depth,
            activation=config.activation,
            layer_norm=config.layer_norm,
            seed=config.seed,
        )
    return models.small_resnet(stream.classes, seed=config.seed)


def make_stream(config: Experiment) -> Stream:
    """The tasks of an experiment."""
    factory = streams.STREAMS[config.name]
    stream = factory(config.seed, config.batch_size, config.device, getattr(config, "data_dir", None))
    if stream.tasks is not None and config.tasks > stream.tasks:
        raise UserError(f"tasks={config.tasks} must be at most {stream.tasks}: {config.name} has no more")
    return stream


@torch.no_grad()
def accuracy(model: nn.Module, task: Task) -> float:
    """Share of the test set that is classified correctly."""
    model.eval()
    hits = torch.stack([(model(x).argmax(1) == y).sum() for x, y in task.test()]).sum()
    return int(hits) / len(task.test_labels)


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
        # Before anything is written: what is wrong with the data shall leave no directory behind.
        stream = None if _is_over(path) else make_stream(config)
        directory = stack.enter_context(RunDirectory(path, config))
        log = stack.enter_context(_events(path)) if tensorboard else _nothing
        if stream is None or _is_over(path):
            _catch_up(directory, config.tasks, report, log)
        else:
            stack.enter_context(_surroundings(config))
            training = Training(config, stream, device)
            _go_on(training, stream, directory, report, log, checkpoint_every)
    return path


def _go_on(
    training: Training, stream: Stream, directory: RunDirectory, report: Report, log: Log, checkpoint_every: float
) -> None:
    """Train from the last checkpoint to the end."""
    tasks = training.config.tasks
    saved = directory.load(next(training.model.parameters()).device)
    first, before = 0, 0.0
    if saved is not None:
        try:
            training.load_state_dict(saved["training"])
            first, before = int(saved["task"]), float(saved["seconds"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"the checkpoint in {directory.path} is of another version of gxd: delete that directory, and the run "
                "starts anew"
            ) from error
    _catch_up(directory, tasks, report, log)
    began = saved_at = time.monotonic()
    directory.set_status("running", first, before)
    for number in range(first, tasks):
        task, resets = stream.task(number), training.resets
        training.new_task()
        learned = training.learn(task)
        if learned is None:
            directory.set_status("diverged", number, before + time.monotonic() - began)
            return
        line = {
            "task": number,
            "test_accuracy": accuracy(training.model, task),
            "online_accuracy": learned[1],
            "loss": learned[0],
            "resets": training.resets - resets,
            **training.measure(task),
        }
        directory.append(line)
        log(line)
        seconds = before + time.monotonic() - began
        if time.monotonic() - saved_at >= checkpoint_every or number + 1 == tasks:
            directory.save({"training": training.state_dict(), "task": number + 1, "seconds": seconds})
            directory.set_status("running", number + 1, seconds)
            saved_at = time.monotonic()
        report(Progress(number + 1, tasks, line["test_accuracy"]))
    directory.set_status("done", tasks, before + time.monotonic() - began)


def _catch_up(directory: RunDirectory, tasks: int, report: Report, log: Log) -> None:
    """Report what is on disk already."""
    lines = directory.lines()
    for line in lines:
        log(line)
    report(Progress(len(lines), tasks, lines[-1].get("test_accuracy") if lines else None))


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
        raise UserError(
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
    threads, cudnn = torch.get_num_threads(), torch.backends.cudnn
    deterministic, benchmark = cudnn.deterministic, cudnn.benchmark
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gxd.NonFiniteWarning)  # counted in the metrics, line by line
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
            torch.set_num_threads(threads)
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

gxd run EXPERIMENT --help lists the options of each, with the paper's values."""


def command(argv: list[str]) -> int:
    """``gxd run EXPERIMENT ...``."""
    from gxd.lab.arguments import parse

    if not argv or argv[0] in ("-h", "--help"):
        lines = [f"  {name:16s} {(cls.__doc__ or '').splitlines()[0]}" for name, cls in EXPERIMENTS.items()]
        print(USAGE.format(experiments="\n".join(lines)))
        return 0
    cls = experiment(argv[0])
    about = f"{(cls.__doc__ or '').strip()} Started again, it goes on where it stopped."
    options: Options[Any] = parse(Options[cls], argv[1:], f"gxd run {cls.name}", description=about)  # type: ignore[valid-type]
    if not options.seeds:
        raise UserError("--seeds needs a number, for instance --seeds 0 1 2")
    configs = [replace(options.experiment, seed=seed) for seed in dict.fromkeys(options.seeds)]
    with Board(len(configs)) as board:
        for config in configs:
            name = config.label()
            path = train(config, options.out, report=board.follow(name), tensorboard=options.tensorboard)
            board.finish(name, _ending(path) if read_json(path / STATUS)["status"] == "diverged" else "")
    paths = [config.run_directory(options.out) for config in configs]
    for path in paths:
        print(path)
    print(
        "final test accuracy: " + ", ".join(f"seed {c.seed} {_ending(p)}" for c, p in zip(configs, paths, strict=True))
    )
    return 0


def _ending(path: Path) -> str:
    """How a run that is over ended: its last test accuracy, or where it diverged."""
    status = read_json(path / STATUS)
    if status["status"] == "diverged":
        return f"diverged in task {status['task']}"
    lines = read_metrics(path)
    if len(lines) != status["task"]:
        raise UserError(f"{path / METRICS} has lost lines: delete {path}, and run it again")
    return f"{lines[-1]['test_accuracy']:.4f}"
