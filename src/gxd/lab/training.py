"""What changes while a run trains: the model, its optimizer and the method attached to them, task after task."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import gxd
from gxd.lab import methods, metrics
from gxd.lab.conduct import EXAMPLES, MAY_NOT, Conduct
from gxd.lab.errors import UserError, first_line
from gxd.lab.experiments import Experiment
from gxd.lab.steps import Step, make_step
from gxd.lab.streams import Batch, Stream, Task, generator

CLOCKS = ("every", "at")  # options that let a method go by the clock where there are no boundaries
PROBE = 1000  # test examples that the metrics of the network are measured on


class Training:
    """All that changes while a run trains: the model, its optimizer and the method attached to them."""

    def __init__(self, config: Experiment, stream: Stream, device: torch.device) -> None:
        self.config = config = config.resolved()
        made = config.plasticity()
        waiting = [method.name for method in made if waits_for_boundaries(method)]
        if waiting and not config.boundaries:
            clock = clock_of(config.method, waiting[0])
            other = f", or --options {clock}=1000" if clock else ""
            raise UserError(
                f"{waiting[0]} acts between tasks, and {config.name} has none: choose another method{other}"
            )
        assert config.lr is not None
        try:
            model = config.build(stream)
            if "plasticity_injection" in methods.parts(config.method):
                model = gxd.injectable(model, "head")
            self.model = model.to(device)
            self.optimizer = _optimizer(config, self.model)
            self.plan = config.units(self.model, torch.zeros(2, *stream.input_shape, device=device))
            self.conduct = Conduct(self.model, self.optimizer, made)
            self.attached: gxd.Attachment | None = None
            if made:
                self.attached = gxd.attach(
                    self.model,
                    self.optimizer,
                    *made,
                    plan=self.plan if any(method.needs_units for method in made) else None,
                    # Not the model's seed: fresh weights would repeat the first ones.
                    seed=generator(config.seed, "resets").initial_seed(),
                )
        except (ValueError, TypeError) as error:  # gxd.PlanError is a ValueError
            raise UserError(
                f"{config.method} cannot treat the network of {config.name}: {' '.join(str(error).split())}"
            ) from error
        self.step: Step | None = None

    @property
    def resets(self) -> int:
        """Units reset so far."""
        return self.attached.total_resets if self.attached is not None else 0

    def reset_ages(self, count: int) -> dict[str, float]:
        """Churn, and the median age of the units, of the last so many resets; and the reach of all of them."""
        churn, age = self.attached.reset_ages(count) if self.attached is not None else (math.nan, math.nan)
        reach = self.attached.metrics()["gxd/reach"] if self.attached is not None else math.nan
        return {"churn": churn, "median_age_at_reset": age, "reach": reach}

    def state_dict(self) -> dict[str, Any]:
        """As tensors and plain values."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "attached": self.attached.state_dict() if self.attached is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.attached is not None:
            self.attached.load_state_dict(state["attached"])
            # The settings of an optimizer may have other names where another version of torch began the run.
            self.conduct = Conduct(self.model, self.optimizer, self.config.plasticity())

    def new_task(self, task: Task) -> None:
        """What happens before a task: the protocol's part, and the method's if another task has come before."""
        self.config.new_task(self.model, self.optimizer)
        if self.attached is not None and self.config.boundaries and task.number:
            self.attached.boundary(data=_Epoch(task), loss=self.config.loss)

    def learn(self, task: Task) -> dict[str, float] | None:
        """Train on one task. Returns the metrics of its steps, or None if the run has diverged.

        Raises :class:`UserError` if the method has changed what it may not.
        """
        if self.step is None:
            self.step = make_step(self.config, self.model, self.optimizer, self.attached)
        online = _Online(task.train_labels.device, self.config.classifies)
        self.model.train()
        examples_changed = False
        try:
            for x, y in self.config.batches(task):
                versions = x._version, y._version
                online.add(*self.step(x, y), y)
                examples_changed |= versions != (x._version, y._version)
        except Exception as error:
            wrong = self._broken(task, examples_changed)
            if wrong:  # which may be why
                raise RuntimeError(f"{wrong}; then {type(error).__name__}: {first_line(error)}") from error
            raise
        wrong = self._broken(task, examples_changed)
        if wrong:
            raise UserError(wrong)
        total, hits = online.sums()
        with torch.no_grad():
            finite = torch.stack([p.isfinite().all() for p in self.model.parameters()]).all() & total.isfinite()
        if not bool(finite):
            return None
        accuracy = {"online_accuracy": hits.item() / online.examples} if self.config.classifies else {}
        return {**accuracy, "loss": total.item() / online.steps}

    def _broken(self, task: Task, examples_changed: bool) -> str:
        wrong = MAY_NOT.format(EXAMPLES) if examples_changed else self.conduct.broken()
        return f"{wrong}: seen in task {task.number}" if wrong else ""

    def evaluating(self) -> AbstractContextManager[None]:
        """Within this, the model has the weights that the method wants evaluated."""
        return nullcontext() if self.attached is None else self.attached.evaluating()

    def measure(self, task: Task) -> dict[str, float]:
        """The metrics that are read off the model after a task."""
        return metrics.measure(self.model, *task.probe(PROBE), self.plan, self.attached, self.config.loss)


def _optimizer(config: Experiment, model: nn.Module) -> torch.optim.Optimizer:
    assert config.lr is not None
    if config.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), config.lr, weight_decay=config.weight_decay)
    return torch.optim.SGD(model.parameters(), config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


def waits_for_boundaries(method: gxd.Method) -> bool:
    """Whether it acts when a task ends; an event may go by the clock instead, ``every`` so many steps."""
    return type(method).at_boundary is not gxd.Method.at_boundary and getattr(method, "every", 0) == 0


def clock_of(method: str, part: str) -> str | None:
    """The option by which a part of a method goes by the clock; None if it cannot."""
    several = len(methods.parts(method)) > 1
    names = [f"{part}.{clock}" if several else clock for clock in CLOCKS]
    return next((name for name in names if name in methods.defaults(method)), None)


@dataclass(frozen=True)
class _Epoch:
    """The first epoch of a task, which a method may go through as often as it needs."""

    task: Task

    def __iter__(self) -> Iterator[Batch]:
        return self.task.batches(0)


class _Online:
    """Sums the losses and the hits of the steps on the device: asking for a number at every step would hold a GPU up,
    and on a CPU the additions themselves would take a tenth of a small step. So they are made many steps at a time.
    """

    def __init__(self, device: torch.device, classifies: bool) -> None:
        self._classifies = classifies
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
            if self._classifies:
                self._hits += (torch.cat(logits).argmax(1) == torch.cat(labels)).sum()
            self._waiting.clear()
        return self._total, self._hits


@torch.no_grad()
def test(model: nn.Module, task: Task, config: Experiment) -> dict[str, float]:
    """On the test set of a task: the share that is classified correctly, or the mean loss."""
    model.eval()
    examples = len(task.test_labels)
    if config.classifies:
        hits = torch.stack([(model(x).argmax(1) == y).sum() for x, y in task.test()]).sum()
        return {"test_accuracy": int(hits) / examples}
    losses = torch.stack([config.loss(model(x), y) * len(y) for x, y in task.test()]).sum()
    return {"test_loss": losses.item() / examples}
