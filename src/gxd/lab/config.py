"""What one run is: a frozen dataclass per experiment, with the paper's value as every field's default.

The text under each field is what ``--help`` shows.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
import tyro

import gxd
from gxd.lab.errors import UserError

Activation = Literal["relu", "silu", "leaky_relu", "tanh"]
E = TypeVar("E", bound="Experiment")

MACHINE = ("device", "threads", "data_dir")
"""Fields that say where a run happens. Up to rounding they do not change its numbers."""
RESETS = ("rate", "maturity", "decay", "compensate", "score_every", "positions", "residual")
"""Fields that plain backprop does not use."""
# Compilation takes 5 to 20 seconds and saves 0.5 to 1.3 milliseconds per step of an MLP.
COMPILE_FROM = 20_000

# What torch can hold: parameters are float32, and sizes and thread counts that it keeps in 32 bits must fit.
_LARGEST = torch.finfo(torch.float32).max
_COUNT: tuple[Callable[[Any], bool], str] = (lambda v: 1 <= v < 2**31, "a whole number, 1 or more and below 2**31")
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("width", "depth", "tasks", "epochs", "batch_size", "score_every", "threads"), _COUNT),
    # Of the assay.
    **dict.fromkeys(("train_size", "calibration", "probe", "units_per_group", "all_logit_examples"), _COUNT),
    "lr": (lambda v: 0 < v <= _LARGEST, "a number above 0 and below 3.4e38; the paper uses 0.01 to 0.3"),
    "momentum": (lambda v: 0 <= v < 1, "a number in [0, 1)"),
    "weight_decay": (lambda v: 0 <= v <= _LARGEST, "a number, 0 or more and below 3.4e38"),
    "rate": (lambda v: 0 <= v <= 1, "a number in [0, 1]; the paper uses 1e-5 to 1e-3"),
    "maturity": (lambda v: 0 <= v < 2**31, "a whole number of steps, 0 or more and below 2**31"),
    "decay": (lambda v: 0 <= v < 1, "a number in [0, 1); the paper uses 0.99"),
    "seed": (lambda v: 0 <= v < 2**31, "a whole number from 0 to 2**31 - 1"),
}


@dataclass(frozen=True)
class Experiment:
    """What all experiments have in common."""

    name: ClassVar[str]
    train_size: ClassVar[int]  # examples per task and epoch

    method: str = "gxd"
    """Plain backprop, or the utility that picks the units to reset: backprop, activation, contribution,
    mc_contribution, mc_adaptable_contribution, loss_gradient, gxi, gxd, gxd_all_logit, gxd_sketch or random.
    Paper: backprop, contribution, mc_adaptable_contribution, loss_gradient and gxd."""
    activation: Activation = "relu"
    """The non-linearity.
    Paper: all four."""
    tasks: int = 800
    """How many tasks follow one another.
    Paper: 800."""
    epochs: int = 1
    """Passes over the data of each task.
    Paper: 1."""
    batch_size: int = 16
    """Examples per step.
    Paper: 16."""
    lr: float | None = None
    """Learning rate of SGD. None: the paper's choice for the method.
    Paper: 0.1 for backprop and 0.3 with resets, the best of {0.1, 0.3}."""
    momentum: float = 0.0
    """Momentum of SGD.
    Paper: 0."""
    weight_decay: float = 0.0
    """Weight decay of SGD.
    Paper: 0."""
    rate: float | None = None
    """Replacement rate: the share of the mature units reset per step. None: the paper's choice. Backprop: 0.
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
    auto: if the run is long enough to win back the time it takes to compile."""
    device: str = "cpu"
    """Where to train: cpu, cuda, cuda:1, mps."""
    threads: int | None = 1
    """CPU threads of torch; small networks train fastest with 1. None: as many as torch likes."""

    def __post_init__(self) -> None:
        for name, hint in _hints(type(self)).items():
            value = getattr(self, name)
            if isinstance(value, int) and not isinstance(value, bool) and float in _alternatives(hint):
                value = float(value)  # 1 and 1.0 are one setting
                object.__setattr__(self, name, value)
            if isinstance(value, Path) and str in _alternatives(hint):
                value = str(value)
                object.__setattr__(self, name, value)
            if not _fits(value, hint):
                raise UserError(f"{name}={value!r} must be {_RANGES[name][1] if name in _RANGES else _words(hint)}")
            check_range(name, value)
        methods = ["backprop", *gxd.utilities()]
        if self.method not in methods:
            raise UserError(f"unknown method {self.method!r}.{_near(self.method, methods)} There are {_list(methods)}")

    # --- the paper's choices ------------------------------------------------------------------------------------------

    def default_lr(self) -> float:
        """The learning rate that ``lr=None`` stands for."""
        raise NotImplementedError

    def default_rate(self) -> float:
        """The replacement rate that ``rate=None`` stands for, when there are resets."""
        raise NotImplementedError

    def resolved(self: E) -> E:
        """The same run with every value spelled out. Backprop gets rate 0 and the defaults of all that it does not
        use, so that the cells of a grid that are one run are equal.
        """
        changes: dict[str, Any] = {}
        if self.method == "backprop":
            own = {f.name: f.default for f in fields(self)}
            changes.update({name: own[name] for name in RESETS if name in own}, rate=0.0)
        elif self.rate is None:
            changes["rate"] = self.default_rate()
        if self.lr is None:
            changes["lr"] = self.default_lr()
        if self.compile == "auto":
            # By the length of the run alone, so that every machine and every resume takes the same path.
            changes["compile"] = "yes" if self.steps >= COMPILE_FROM else "no"
        return replace(self, **changes)

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.tasks * self.epochs * math.ceil(self.train_size / self.batch_size)

    # --- as data ------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON has them."""
        return asdict(self)

    def settings(self) -> dict[str, Any]:
        """The resolved fields that make the numbers what they are: all but where the run happens."""
        return {name: value for name, value in self.resolved().to_dict().items() if name not in MACHINE}

    @classmethod
    def from_dict(cls: type[E], values: Mapping[str, Any]) -> E:
        """The config with these fields. Raises :class:`UserError` for a field that does not exist or does not fit."""
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                raise UserError(f"unknown setting {key!r} of {cls.name}.{_near(key, known)} There are {_list(known)}")
        return cls(**values)

    def key(self) -> str:
        """Ten hex digits that tell settings apart. The seeds of one setting share it."""
        values = {name: value for name, value in self.settings().items() if name != "seed"}
        text = json.dumps({"experiment": self.name, **values}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    def label(self) -> str:
        """A short name for people: method, activation and seed."""
        norm = " layernorm" if getattr(self, "layer_norm", False) else ""
        return f"{self.method} {self.activation}{norm} seed {self.seed}"

    def run_directory(self, root: str | Path) -> Path:
        """Where the results of this run go."""
        full = self.resolved()
        norm = "_layernorm" if getattr(self, "layer_norm", False) else ""
        setting = f"{full.method}_{full.activation}{norm}_lr{full.lr:g}_rate{full.rate:g}_{self.key()}"
        return Path(root) / self.name / setting / f"seed{self.seed}"


@dataclass(frozen=True)
class PermutedDigits(Experiment):
    """Permuted MNIST in small: scikit-learn's digits, so no download, and minutes per run. The defaults are ours."""

    name: ClassVar[str] = "permuted-digits"
    train_size: ClassVar[int] = 1440

    layer_norm: bool = False
    """LayerNorm before each activation.
    Paper: tested with relu."""
    width: int = 64
    """Units per hidden layer.
    Paper: 256."""
    depth: int = 4
    """Hidden layers.
    Paper: 4."""
    epochs: int = 2
    """Passes over the 1440 images of each task.
    Paper: 1 over 60000."""
    lr: float | None = None
    """Learning rate of SGD. None: 0.1.
    Paper: 0.1 for backprop and 0.3 with resets, the best of {0.1, 0.3}."""
    rate: float | None = None
    """Replacement rate: the share of the mature units reset per step. None: 1e-3. Backprop: 0.
    Paper: 1e-4 for relu and tanh, 1e-3 for silu and leaky_relu, the best of {1e-5, 1e-4, 1e-3}."""

    def default_lr(self) -> float:
        """0.1 for all: the largest at which no method diverged early."""
        return 0.1

    def default_rate(self) -> float:
        """1e-3: tasks are 180 steps long, and 1e-4 would reset one unit in two tasks."""
        return 1e-3


@dataclass(frozen=True)
class PermutedMNIST(Experiment):
    """Online Permuted MNIST, the paper's test of plasticity. The defaults are the paper's."""

    name: ClassVar[str] = "permuted-mnist"
    train_size: ClassVar[int] = 60_000

    layer_norm: bool = False
    """LayerNorm before each activation.
    Paper: tested with relu."""
    width: int = 256
    """Units per hidden layer.
    Paper: 256."""
    depth: int = 4
    """Hidden layers.
    Paper: 4."""
    data_dir: str | None = None
    """Where MNIST is. None: the environment variable GXD_DATA, else where `gxd data fetch mnist` puts it."""

    def default_lr(self) -> float:
        """The paper's selection: 0.1 for backprop, 0.3 with resets."""
        return 0.1 if self.method == "backprop" else 0.3

    def default_rate(self) -> float:
        """The paper's selection, by activation."""
        return 1e-4 if self.activation in ("relu", "tanh") else 1e-3


@dataclass(frozen=True)
class Cifar100(Experiment):
    """Continuous CIFAR-100, the paper's test of stability: pairs of classes, a small ResNet. Its defaults."""

    name: ClassVar[str] = "cifar100"
    train_size: ClassVar[int] = 1000

    activation: Literal["relu"] = "relu"
    """The non-linearity.
    Paper: relu."""
    tasks: int = 500
    """How many pairs of classes follow one another; the first 50 use each class once.
    Paper: 500."""
    epochs: int = 200
    """Passes over the 1000 images of each task.
    Paper: 200."""
    batch_size: int = 100
    """Examples per step.
    Paper: 100."""
    lr: float | None = None
    """Learning rate of SGD. None: 0.1.
    Paper: 0.1."""
    momentum: float = 0.9
    """Momentum of SGD.
    Paper: 0.9."""
    rate: float | None = None
    """Replacement rate: the share of the mature units reset per step. None: 1e-4. Backprop: 0.
    Paper: 1e-4."""
    maturity: int = 1000
    """Steps before a new unit may be reset.
    Paper: 1000."""
    residual: Literal["group", "skip"] = "group"
    """Channels of the residual stream. group: those who write and read one are reset together. skip: left alone.
    Paper: every convolution is reset."""
    threads: int | None = None
    """CPU threads of torch. None: as many as torch likes."""
    data_dir: str | None = None
    """Where CIFAR-100 is. None: the environment variable GXD_DATA, else where `gxd data fetch cifar100` puts it."""

    def default_lr(self) -> float:
        """The paper's fixed setting."""
        return 0.1

    def default_rate(self) -> float:
        """The paper's fixed setting."""
        return 1e-4


EXPERIMENTS: dict[str, type[Experiment]] = {c.name: c for c in (PermutedDigits, PermutedMNIST, Cifar100)}


def experiment(name: str) -> type[Experiment]:
    """The config class of an experiment; the error of an unknown one names the nearest."""
    if name not in EXPERIMENTS:
        raise UserError(f"unknown experiment {name!r}.{_near(name, EXPERIMENTS)} There are {_list(EXPERIMENTS)}")
    return EXPERIMENTS[name]


# --- what a field may hold --------------------------------------------------------------------------------------------


def check_range(name: str, value: Any) -> None:
    """Raise :class:`UserError` if the value of a field is out of its range. None, the paper's choice, never is."""
    if value is not None and name in _RANGES and not _RANGES[name][0](value):
        raise UserError(f"{name}={value!r} must be {_RANGES[name][1]}")


def _hints(cls: type[Experiment]) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    for one in _alternatives(hint):
        if get_origin(one) is Literal:
            if any(value == allowed and type(value) is type(allowed) for allowed in get_args(one)):
                return True
        elif type(value) is one:  # not isinstance: True is no number of tasks
            return True
    return False


def _words(hint: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "none"}
    parts = []
    for one in _alternatives(hint):
        parts += [str(v) for v in get_args(one)] if get_origin(one) is Literal else [names[one]]
    return " or ".join(parts)


def _near(word: Any, known: Any) -> str:
    letters = sorted(str(word))
    near = [one for one in known if sorted(one) == letters]  # gdx is gxd, not gxi
    near = near or difflib.get_close_matches(str(word).replace("-", "_"), list(known), n=1)
    near = near or difflib.get_close_matches(str(word), list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _list(names: Any) -> str:
    return ", ".join(names)
