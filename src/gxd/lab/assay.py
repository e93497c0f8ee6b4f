"""The reset-cost assay: train, stop at checkpoints, clamp every unit, compare with the utilities. ``gxd assay``."""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

import gxd
from gxd.lab import streams
from gxd.lab.assay_config import AssayConfig, factory_of
from gxd.lab.errors import UserError, first_line
from gxd.lab.metrics import as_found
from gxd.lab.progress import Board, Progress
from gxd.lab.run import find_device, out_of_memory_in_words
from gxd.lab.store import STATUS, RunDirectory, objects, read_json, write_bytes
from gxd.lab.streams import Stream, Task
from gxd.lab.workers import cores, follow_parent, without_interrupts

LINES = "assay.jsonl"
FRACTION = 0.05
SAVE_EVERY = 20.0  # seconds; what a kill costs. The numbers do not depend on it

Report = Callable[[Progress], None]


# --- one assay --------------------------------------------------------------------------------------------------------


def assay(config: AssayConfig, root: str | Path, *, report: Report | None = None) -> Path:
    """Train and assay one model to the end, or go on where it stopped. Returns the assay directory.

    The lines are the same whether or not it was interrupted: tasks are functions of (seed, number), and an assay
    leaves the model as it was.
    """
    config, report = config.resolved(), report or (lambda progress: None)
    path = config.directory(root)
    if _over(path):
        report(_progress(config, int(read_json(path / STATUS).get("task", 0)), read_lines(path)))
        return path
    with out_of_memory_in_words(), _threads(config.threads):
        work = _Assay(config, report)  # before the directory: this finds mistakes
        with RunDirectory(path, cast(Any, config)) as directory:
            if not _over(path):  # meanwhile
                work.run(directory)
    return path


def _over(path: Path) -> bool:
    return (path / STATUS).exists() and read_json(path / STATUS).get("status") in ("done", "diverged")


def _progress(config: AssayConfig, done: int, lines: Sequence[Mapping[str, Any]]) -> Progress:
    """How far an assay is: rounds of training and checkpoints count as a step each."""
    assert config.checkpoints is not None
    steps = max(config.checkpoints) + len(config.checkpoints)
    return Progress(done + len(lines), steps, lines[-1].get("test_accuracy") if lines else None, unit="stage")


def _note(config: AssayConfig, root: Path) -> str:
    """How an assay that is over ended, if it did not go well."""
    status = read_json(config.directory(root) / STATUS)
    unit = "epoch" if config.resolved().tasks == 1 else "task"
    return f"diverged in {unit} {status['task']}" if status["status"] == "diverged" else ""


class _Assay:
    """One model on its way through the checkpoints."""

    def __init__(self, config: AssayConfig, report: Report) -> None:
        assert config.checkpoints is not None and config.lr is not None
        assert config.momentum is not None and config.weight_decay is not None
        assert config.calibration is not None and config.probe is not None
        self.config, self.report, self.checkpoints = config, report, config.checkpoints
        self.sizes = config.calibration, config.probe
        self.device = find_device(config.device)
        self.stream: Stream = config.stream()
        self.model = config.build(self.stream).to(self.device)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), config.lr, momentum=config.momentum, weight_decay=config.weight_decay
        )
        (x, _), _ = self.task(0).draw(*self.sizes)
        _try_out(self.model, x[:2], self.stream.classes, config.model)
        try:
            self.plan = gxd.find_units(self.model, x[:2], residual=config.residual)
        except gxd.TraceError as error:
            raise UserError(f"--model {config.model}: {first_line(error)}") from error
        if not self.plan.groups:
            raise UserError(f"--model {config.model} has no units to clamp: print(gxd.find_units(model, x)) says why")
        self.done = 0  # rounds

    def run(self, directory: RunDirectory) -> None:
        """Go on from what is in the directory."""
        self.directory = directory
        self.began = time.monotonic() - float(directory.status().get("seconds", 0.0))
        self.saved = time.monotonic()
        state = directory.load(self.device)
        if state is not None:
            self.done = int(state["done"])
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        rounds, lines = max(self.checkpoints), read_lines(directory.path)
        known = {line["checkpoint"] for line in lines}
        self._tell(lines)
        while True:
            if self.done in self.checkpoints and self.done not in known:
                self.save()
                lines.append(self.measure())
                write_lines(directory.path, lines)
                known.add(self.done)
                self._tell(lines)
            if self.done >= rounds:
                break
            if not self.learn():
                directory.set_status("diverged", self.done, time.monotonic() - self.began)
                return
            self.done += 1
            self._tell(lines)
            if time.monotonic() - self.saved > SAVE_EVERY:
                self.save()
        directory.set_status("done", self.done, time.monotonic() - self.began)

    def save(self) -> None:
        self.directory.save(
            {"done": self.done, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        )
        self.directory.set_status("running", self.done, time.monotonic() - self.began)
        self.saved = time.monotonic()

    def _tell(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self.report(_progress(self.config, self.done, lines))

    # --- training -----------------------------------------------------------------------------------------------------

    def task(self, number: int) -> Task:
        task = self.stream.task(number)
        size = self.config.train_size
        if size is None:
            return task
        if size > len(task.train_labels):
            raise UserError(f"train_size={size} is more than the {len(task.train_labels)} images there are")
        rows = torch.randperm(len(task.train_labels), generator=streams.generator(self.config.seed, "subset"))[:size]
        rows = rows.to(task.train_labels.device)
        return replace(
            task,
            train_images=task.train_images[rows],
            train_labels=task.train_labels[rows],
            test_images=task.test_images[:size],
            test_labels=task.test_labels[:size],
        )

    def learn(self) -> bool:
        """Train for one round. Returns False if the model has diverged."""
        config, several = self.config, self.config.tasks != 1
        assert config.lr is not None and config.lr_drops is not None and config.epochs is not None
        for group in self.optimizer.param_groups:
            group["lr"] = config.lr * 0.2 ** sum(self.done >= drop for drop in config.lr_drops)
        task = self.task(self.done if several else 0)
        loss = torch.zeros(())
        self.model.train()
        for epoch in range(config.epochs) if several else [self.done]:
            for x, y in task.batches(epoch):
                loss = F.cross_entropy(self.model(x), y)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
        return all(bool(value.isfinite().all()) for value in (loss.detach(), *self.model.parameters()))

    # --- assaying -----------------------------------------------------------------------------------------------------

    def measure(self) -> dict[str, Any]:
        """The line of this checkpoint, on data of the task that was trained last."""
        config = self.config
        assert config.utilities is not None
        task = self.task(max(0, self.done - 1) if config.tasks != 1 else 0)
        hits = accuracy(self.model, task)
        calibration, probe = task.draw(*self.sizes)
        cost = gxd.reset_cost(
            self.model,
            calibration,
            probe,
            utilities=config.utilities,
            plan=self.plan,
            units_per_group=config.units_per_group,
            all_logit_examples=config.all_logit_examples,
            positions=config.positions,
            seed=streams.generator(config.seed, self.done, "assay").initial_seed(),
        )
        return {"checkpoint": self.done, "test_accuracy": hits, **line(cost)}


def _try_out(model: nn.Module, x: Tensor, classes: int, name: str) -> None:
    """Raise unless the model turns examples into logits. Tracing it would find out too, but say so at length."""
    shape = tuple(x.shape)
    try:
        with as_found(model, x), torch.no_grad():
            logits = model(x)
    except Exception as error:  # the user's code may raise anything
        raise UserError(
            f"--model {name} does not work on an input of shape {shape} ({type(error).__name__}: {first_line(error)})"
        ) from error
    if not isinstance(logits, Tensor) or logits.shape != (len(x), classes):
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UserError(f"--model {name} makes {found} of an input of shape {shape}, not {(len(x), classes)}: logits")


def line(cost: gxd.ResetCost) -> dict[str, Any]:
    """What ``assay.jsonl`` says about one checkpoint: every group by itself; null where something is undefined."""
    metrics = list(cost.shocks)
    rho = {metric: cost.spearman_by_group(metric) for metric in metrics}
    shock = {metric: cost.shock_by_group(FRACTION, metric) for metric in metrics}
    return {
        "groups": {name: len(units) for name, units in cost.units.items()},
        "utilities": {
            name: {
                "spearman": {metric: _finite(rho[metric][name]) for metric in metrics},
                "shock": {metric: _finite(shock[metric][name]) for metric in metrics},
            }
            for name in cost.scores
        },
        "oracle": {metric: _finite(cost.oracle_by_group(FRACTION, metric)) for metric in metrics},
        "fraction": FRACTION,
        "calibration": cost.calibration,
        "probe": cost.probe,
    }


@torch.no_grad()
def accuracy(model: nn.Module, task: Task) -> float:
    """The share of the task's test images that the model, in evaluation mode, classifies rightly."""
    model.eval()
    hits = sum(int((model(x).argmax(1) == y).sum()) for x, y in task.test())
    return hits / len(task.test_labels)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The checkpoints of an assay directory that are complete."""
    file = path / LINES
    if not file.exists():
        return []
    try:
        return objects(file.read_bytes(), dict)
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}): delete {path}, and the assay starts anew") from error


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Replace ``assay.jsonl``, all at once."""
    write_bytes(path / LINES, "".join(json.dumps(one) + "\n" for one in lines).encode())


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


@contextmanager
def _threads(wanted: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        torch.set_flush_denormal(True)  # dying units are full of denormals, with which a CPU is many times slower
        if wanted is not None:
            torch.set_num_threads(wanted)
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)


# --- several, each in a process of its own ----------------------------------------------------------------------------


def assay_all(configs: Sequence[AssayConfig], root: Path, board: Board, jobs: int) -> dict[int, str]:
    """Do all assays, so many at a time. Returns the number of each that failed, with the reason."""
    failed: dict[int, str] = {}
    waiting = list(enumerate(configs))
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    busy: dict[Connection, tuple[int, Any]] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < jobs:
                number, config = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(config, root, theirs), daemon=True)
                with without_interrupts():
                    process.start()
                theirs.close()
                busy[ours] = (number, process)
            for pipe in cast("list[Connection]", wait(list(busy))):
                number, process = busy[pipe]
                name = configs[number].label()
                try:
                    said = pipe.recv()
                except EOFError:  # it is over, one way or the other
                    process.join()
                    del busy[pipe]
                    if process.exitcode and number not in failed:
                        failed[number] = f"its process ended with exit code {process.exitcode}; start it again"
                    note = f"failed: {failed[number]}" if number in failed else _note(configs[number], root)
                    board.finish(name, note)
                else:
                    if isinstance(said, Progress):
                        board.update(name, said)
                    else:
                        failed[number] = said
    finally:
        for _, process in busy.values():
            process.terminate()
            process.join()
    return failed


def _work(config: AssayConfig, root: Path, pipe: Connection) -> None:
    follow_parent()
    try:
        assay(config, root, report=pipe.send)
    except BrokenPipeError:  # the parent is gone
        return
    except (UserError, OSError) as error:
        pipe.send(str(error))


# --- the command ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What ``gxd assay`` takes."""

    config: tyro.conf.OmitArgPrefixes[AssayConfig] = field(default_factory=AssayConfig)
    activation: tuple[str, ...] = ("relu",)
    """One assay for each: relu, silu, leaky_relu, tanh.
    Paper: all four for the MLP, relu for ResNet-18."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One assay for each. A seed gives the tasks and the weights.
    Paper: 3 seeds."""
    out: Path = Path("runs")
    """Where results go. Assays that are there already are taken up where they stopped."""
    jobs: int | None = None
    """Assays at a time, each in a process of its own. None: as many as there are cores."""


def command(argv: list[str]) -> int:
    """``gxd assay ...``."""
    from gxd.lab.arguments import parse

    options = parse(Options, argv, "gxd assay", description=AssayConfig.__doc__)
    if not options.activation or not options.seeds:
        raise UserError("--activation and --seeds need at least one value each")
    if options.jobs is not None and options.jobs < 1:
        raise UserError(f"jobs={options.jobs} must be 1 or more")
    configs = [
        replace(options.config, activation=activation, seed=seed)
        for activation in dict.fromkeys(options.activation)
        for seed in dict.fromkeys(options.seeds)
    ]
    for config in configs:
        config.resolved()  # a mistake shows before anything is started
    if ":" in options.config.model:
        factory_of(options.config.model)
    find_device(options.config.device)
    failed: dict[int, str] = {}
    jobs = options.jobs or cores()
    with Board(len(configs)) as board:
        if jobs == 1 or len(configs) == 1:
            for config in configs:
                assay(config, options.out, report=board.follow(config.label()))
                board.finish(config.label(), _note(config, options.out))
        else:
            failed = assay_all(configs, options.out, board, jobs)
    paths = [config.directory(options.out) for config in configs]
    if len(failed) < len(configs):
        print("\n\n".join(summaries(paths)))
        print("\n" + "\n".join(dict.fromkeys(str(path.parent) for path in paths)))
    if failed:
        reasons = {why: [configs[n].label() for n in failed if failed[n] == why] for why in failed.values()}
        said = "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())
        raise UserError(f"{len(failed)} of {len(configs)} assays failed. {said}")
    return 0


def summaries(paths: Sequence[Path]) -> list[str]:
    """One table per setting: mean and standard error over seeds x checkpoints of the means over layers."""
    by_setting: dict[Path, list[Path]] = {}
    for path in paths:
        by_setting.setdefault(path.parent, []).append(path)
    tables = []
    for setting, members in by_setting.items():
        points = [point for path in members for point in read_lines(path)]
        endings = [read_json(path / "status.json") for path in members if (path / "status.json").exists()]
        diverged = sum(ending.get("status") == "diverged" for ending in endings)
        note = f", {diverged} diverged" if diverged else ""
        tables.append(f"{setting.name}: {len(members)} seeds, {len(points)} checkpoints{note}\n{table(points)}")
    return tables


def table(points: Sequence[Mapping[str, Any]]) -> str:
    """Spearman and Shock@5% of every utility, as in the paper's Table 1 and Figure 2."""
    names = list(dict.fromkeys(name for point in points for name in point["utilities"]))
    width = max(map(len, ["utility", *names]))
    columns = [(what, metric) for what in ("spearman", "shock") for metric in ("l1", "kl")]
    titles = {"spearman": "Spearman", "shock": "Shock@5%"}
    rows = [
        f"{'utility':{width}}" + "".join(f"  {titles[what] + ' ' + metric.upper():>17}" for what, metric in columns)
    ]
    for name in names:
        cells = [
            _cell([point["utilities"][name][what][metric] for point in points if name in point["utilities"]])
            for what, metric in columns
        ]
        rows.append(f"{name:{width}}" + "".join(f"  {cell:>17}" for cell in cells))
    oracle = [_cell([point["oracle"][metric] for point in points]) for metric in ("l1", "kl")]
    rows.append(f"{'oracle':{width}}" + "".join(f"  {cell:>17}" for cell in ["", "", *oracle]))
    return "\n".join(rows)


def _cell(by_group: Sequence[Mapping[str, float | None]]) -> str:
    values = []
    for groups in by_group:
        defined = [value for value in groups.values() if value is not None]
        if defined:
            values.append(sum(defined) / len(defined))
    if not values:
        return "-"
    mean = sum(values) / len(values)
    if len(values) < 2:
        return f"{mean:.3g}"
    se = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
    return f"{mean:.3f} ± {se:.3f}" if mean >= 0.01 or mean <= 0 else f"{mean:.2e} ± {se:.0e}"
