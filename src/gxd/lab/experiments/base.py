"""What all experiments have in common: the fields of a run, what they stand for, and what tells two runs apart.

The text under each field is what ``--help`` shows.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.optim import Optimizer

import gxd
from gxd.lab import methods
from gxd.lab.config import MACHINE, check_fields, check_name
from gxd.lab.errors import UserError
from gxd.lab.streams import Batch, Stream, Task

Activation = Literal["relu", "silu", "leaky_relu", "tanh", "crelu"]
E = TypeVar("E", bound="Experiment")

RESETS = ("rate", "maturity", "decay", "compensate", "score_every", "positions")
"""Fields that only gxd and continual_backprop use, the latter with whichever utility."""
# What these were before they were fields. An experiment that has the same defaults leaves them out of its settings, so
# that runs of before keep their keys; such a default must never change.
BEFORE = {"optimizer": "sgd", "options": {}, "network": "mlp", "init": "glorot", "input_norm": "none", "paper": False}
# Compilation takes 5 to 20 seconds and saves 0.5 to 1.3 milliseconds per step of an MLP.
COMPILE_FROM = 10_000

EXPERIMENTS: dict[str, type[Experiment]] = {}
"""Name -> config class."""


def register(cls: type[E]) -> type[E]:
    """Make an experiment known by its ``name``."""
    EXPERIMENTS[cls.name] = cls
    return cls


@dataclass(frozen=True)
class Experiment:
    """One run of a method on a stream. Subclasses say what the stream, the network and the paper's values are.

    Attributes:
        name: on the command line.
        train_size: training examples per task and epoch.
        classifies: whether the targets are classes, learned with cross-entropy; else numbers, with the squared error.
        metric: of the metrics of a task, the one that counts; whether ``higher_is_better``; and what it is for a
            network that has learned nothing, as which a diverged run counts.
        boundaries: whether the learner may know when one task ends and the next begins.
    """

    name: ClassVar[str]
    train_size: ClassVar[int]
    classifies: ClassVar[bool] = True
    metric: ClassVar[str] = "test_accuracy"
    higher_is_better: ClassVar[bool] = True
    learned_nothing: ClassVar[float] = 0.1
    boundaries: ClassVar[bool] = True

    method: str = "gxd"
    """gxd; plain backprop; a utility that picks the units to reset (activation, contribution, ..., random), which is
    short for continual_backprop with it; any other method, which `gxd run` lists; or several, as in parseval+gxd.
    Paper: backprop, contribution, mc_adaptable_contribution, loss_gradient and gxd_paper."""
    options: tuple[str, ...] = ()
    """Options of the method, NAME=VALUE, as in --options threshold=0.05 every=500; `gxd run` lists them. Of several
    methods METHOD.NAME=VALUE, as in --options parseval.strength=1e-3 gxd.replacement_rate=1e-4."""
    activation: Activation = "relu"
    """The non-linearity. crelu is [relu(x), relu(-x)], in a network narrowed to as many parameters as without.
    Paper: relu, silu, leaky_relu and tanh."""
    tasks: int = 800
    """How many tasks follow one another.
    Paper: 800."""
    epochs: int = 1
    """Passes over the data of each task.
    Paper: 1."""
    batch_size: int = 16
    """Examples per step.
    Paper: 16."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """SGD, or Adam with its usual betas (0.9, 0.999).
    Paper: sgd."""
    lr: float | None = None
    """Learning rate. None: the paper's choice for the method.
    Paper: 0.1 for backprop and 0.3 with resets, the best of {0.1, 0.3}."""
    momentum: float = 0.0
    """Momentum of SGD; Adam has none.
    Paper: 0."""
    weight_decay: float = 0.0
    """Weight decay, added to the gradient.
    Paper: 0."""
    rate: float | None = None
    """Replacement rate: the share of the mature units reset per step. None: 1e-3 for gxd, the paper's choice for the
    others. Backprop: 0. This and the next five are of gxd and of utilities; other methods have --options.
    Paper: 1e-4 for relu and tanh, 1e-3 for silu and leaky_relu, the best of {1e-5, 1e-4, 1e-3}."""
    maturity: int = 100
    """Steps before a new unit may be reset.
    Paper: 100, as in earlier work."""
    decay: float = 0.99
    """Decay of the running averages of utilities and references, per step.
    Paper: 0.99."""
    compensate: bool = True
    """Whether a reset moves the unit's mean contribution into the biases behind it.
    Paper: yes."""
    score_every: int = 1
    """Score the units only every so many steps, which is cheaper.
    Paper: 1."""
    positions: Literal["signed", "abs"] = "signed"
    """How the effect of a channel is summed over an image; the same thing for an MLP.
    signed: with its signs, the cost of the reset. abs: without them, as the paper seems to have done."""
    seed: Annotated[int, tyro.conf.Suppress] = 0
    """Seed of the tasks, the first weights and the fresh weights. Methods with the same seed see the same tasks."""
    compile: Literal["auto", "yes", "no"] = "auto"
    """Whether to fuse the training step with torch.compile.
    auto: if the run is long enough to win back the time it takes to compile, and the method allows it."""
    device: str = "cpu"
    """Where to train: cpu, cuda, cuda:1, mps."""
    threads: int | None = 1
    """CPU threads of torch; small networks train fastest with 1. None: as many as torch likes."""

    def __post_init__(self) -> None:
        methods.check(self.method)
        object.__setattr__(self, "options", methods.canonical(self.method, self.options))
        check_fields(self)
        if self.optimizer == "adam" and self.momentum not in (0.0, self._default("momentum")):
            raise UserError(f"momentum={self.momentum:g} goes with optimizer sgd: Adam has betas instead; leave it out")

    # --- what a subclass says -----------------------------------------------------------------------------------------

    def stream(self) -> Stream:
        """The tasks."""
        raise NotImplementedError

    def build(self, stream: Stream) -> nn.Module:
        """The network with its first weights. Its last layer is ``head``."""
        raise NotImplementedError

    def units(self, model: nn.Module, example: Tensor) -> gxd.UnitPlan:
        """The units of the network: what may be reset, and what the metrics look at."""
        return gxd.find_units(model, example)

    def batches(self, task: Task) -> Iterator[Batch]:
        """All training batches of a task, one epoch after the other."""
        for epoch in range(self.epochs):
            yield from task.batches(epoch)

    def new_task(self, model: nn.Module, optimizer: Optimizer) -> None:
        """What the protocol does before every task, whatever the method."""

    def counts(self, task: int) -> bool:
        """Whether the metric of this task counts."""
        return True

    def default_lr(self) -> float:
        """The learning rate that ``lr=None`` stands for."""
        raise NotImplementedError

    def default_rate(self) -> float:
        """The replacement rate that ``rate=None`` stands for, when continual_backprop resets units."""
        return 1e-4

    @property
    def steps_per_task(self) -> int:
        """Optimizer steps of one task."""
        return self.epochs * math.ceil(self.train_size / self.batch_size)

    def variant(self) -> list[str]:
        """What is special about the network, in words."""
        return []

    # --- what follows from it -----------------------------------------------------------------------------------------

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        """``loss(output, target)``."""
        return F.cross_entropy if self.classifies else F.mse_loss

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.tasks * self.steps_per_task

    def resolved(self: E) -> E:
        """The same run with every value spelled out, and the defaults of all that is not used, so that the cells of a
        grid that are one run are equal.
        """
        changes = {**self._unused(), "method": methods.canonical_name(self.method), "rate": self._rate()}
        if self.lr is None:
            changes["lr"] = self.default_lr()
        if self.compile == "auto":
            # By the config alone, so that every machine and every resume takes the same path.
            rewrites = any(type(made).before_step is not gxd.Method.before_step for made in self.plasticity())
            changes["compile"] = "yes" if self.steps >= COMPILE_FROM and not rewrites else "no"
        return replace(self, **changes)

    def _rate(self) -> float:
        """The replacement rate; 0 for a method to which the field means nothing."""
        if not methods.has_fields(self.method):
            return 0.0
        if self.rate is not None:
            return self.rate
        if self.method == "gxd":  # of which the paper says nothing
            return float(methods.defaults("gxd")["replacement_rate"])
        return self.default_rate()

    def _unused(self) -> dict[str, Any]:
        """The fields that this run does not use -> their defaults."""
        unused = () if methods.has_fields(self.method) else RESETS
        return {name: self._default(name) for name in (*unused, *(["momentum"] if self.optimizer == "adam" else []))}

    def used(self: E) -> E:
        """The same run, with the defaults of all that it does not use."""
        return replace(self, **self._unused())

    def check_used(self) -> None:
        """Raise :class:`UserError` for a setting of resets that the method does not have; a grid leaves it out."""
        for name, default in self._unused().items():
            if name in RESETS and getattr(self, name) not in (default, 0.0 if name == "rate" else default):
                option = f"--{name.replace('_', '-')}"
                raise UserError(f"{option} is a setting of gxd and continual_backprop alone: {self._instead(name)}")

    def _instead(self, name: str) -> str:
        """What to write instead of a field of resets, or why it means nothing here."""
        option = next(option for option, field in methods.FIELDS.items() if field == name)
        here = [one for one in methods.defaults(self.method) if one.rpartition(".")[2] == option]
        if here:
            return f"with {self.method} write --options {here[0]}=VALUE"
        has = "has no resets" if self.method == "backprop" else "has --options instead, which `gxd run` lists"
        return f"{self.method} {has}"

    def plasticity(self) -> tuple[gxd.Method, ...]:
        """The methods, for :func:`gxd.attach`; none for plain backprop."""
        if self.method == "backprop":
            return ()
        values = methods.values_of(self.options)
        if methods.has_fields(self.method):
            values |= {option: getattr(self, field) for option, field in methods.FIELDS.items()}
            values["replacement_rate"] = self._rate()
        return methods.make(self.method, values)

    def _default(self, name: str) -> Any:
        return next(each.default for each in fields(self) if each.name == name)

    # --- as data ------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON has them; the options as a table."""
        return {**asdict(self), "options": methods.values_of(self.options)}

    def settings(self) -> dict[str, Any]:
        """The resolved fields that make the numbers what they are: all but where the run happens. Methods have their
        names on disk.
        """
        values = methods.on_disk({n: value for n, value in self.resolved().to_dict().items() if n not in MACHINE})
        standard = {each.name: each.default for each in fields(self)} | {"options": {}}
        old = {name for name, value in BEFORE.items() if name in values and values[name] == value == standard[name]}
        return {name: value for name, value in values.items() if name not in old}

    @classmethod
    def from_dict(cls: type[E], values: Mapping[str, Any]) -> E:
        """The config with these fields, see :meth:`to_dict`. Raises :class:`UserError` for a field that does not exist
        or does not fit.
        """
        for key in values:
            check_name(key, [each.name for each in fields(cls)], f"setting of {cls.name}:")
        return cls(**values)

    def key(self) -> str:
        """Ten hex digits that tell settings apart. The seeds of one setting share it."""
        values = {name: value for name, value in self.settings().items() if name != "seed"}
        text = json.dumps({"experiment": self.name, **values}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    def label(self) -> str:
        """A short name for people: method, activation and seed."""
        return " ".join([self.method, self.activation, *self.variant(), f"seed {self.seed}"])

    def run_directory(self, root: str | Path) -> Path:
        """Where the results of this run go."""
        full = self.resolved()
        rate = f"rate{full.rate:g}" if full.method == "backprop" or methods.has_fields(full.method) else ""
        words = [self.settings()["method"], full.activation, *full.variant(), f"lr{full.lr:g}", rate, self.key()]
        return Path(root) / self.name / "_".join(filter(None, words)) / f"seed{self.seed}"
