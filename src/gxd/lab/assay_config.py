"""What one reset-cost assay is: which model, trained how, probed when and on what. The paper's values by default."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import tyro
from torch import nn

import gxd
from gxd.lab import models, streams
from gxd.lab.config import MACHINE, check_range
from gxd.lab.errors import UserError, first_line
from gxd.score.utilities import get_utility

DATA: dict[str, Callable[..., streams.Stream]] = {
    "permuted-mnist": streams.permuted_mnist,
    "permuted-digits": streams.permuted_digits,
    "cifar100": streams.all_cifar100,
}
PAPER: dict[str, dict[str, Any]] = {
    "mlp": {"data": "permuted-mnist", "tasks": 30, "epochs": 1, "batch_size": 64, "lr": 0.01},
    "resnet18": {"data": "cifar100", "tasks": 1, "epochs": 200, "batch_size": 90, "lr": 0.1}
    | {"momentum": 0.9, "weight_decay": 5e-4, "decay_at": (0.3, 0.6, 0.8)},
}
PAPER["small_resnet"] = PAPER["resnet18"]
IMAGES = {"permuted-mnist": 60_000, "permuted-digits": 1440, "cifar100": 45_000}
"""How many there are to train on."""
DRAWN = 2048
"""Examples to score on, and examples to clamp on, where the data have so many."""
# The paper's checkpoints as shares of the training: 0, 5, 10, 20, 30 tasks; 60, 120, 160, 200 epochs.
CHECKPOINTS = {"mlp": (0.0, 1 / 6, 1 / 3, 2 / 3, 1.0), "resnet18": (0.3, 0.6, 0.8, 1.0)}


@dataclass(frozen=True)
class AssayConfig:
    """Train a model, stop at checkpoints, score its units by every utility, clamp them one by one, compare."""

    name: ClassVar[str] = "assay"

    model: str = "mlp"
    """mlp, resnet18, small_resnet, or module:factory: a function of yours that returns a model. It is given those of
    the arguments inputs, input_shape, classes, activation and seed that it has.
    Paper: mlp and resnet18."""
    activation: Annotated[str, tyro.conf.Suppress] = "relu"
    seed: Annotated[int, tyro.conf.Suppress] = 0
    data: str | None = None
    """permuted-mnist, permuted-digits (needs no download), or cifar100 (all classes at once). None: the paper's.
    Paper: permuted-mnist for the MLP, cifar100 for ResNet-18."""
    width: int = 256
    """Units per hidden layer of the MLP.
    Paper: 256."""
    depth: int = 4
    """Hidden layers of the MLP.
    Paper: 4."""
    tasks: int | None = None
    """How many tasks follow one another. None: the paper's.
    Paper: 30 for the MLP, 1 for ResNet-18."""
    epochs: int | None = None
    """Passes over each task. None: the paper's.
    Paper: 1 for the MLP, 200 for ResNet-18."""
    train_size: int | None = None
    """Train on a random subset of so many images, and measure the accuracy on no more. None: on all.
    Paper: all; for CIFAR-100 450 images of each class."""
    batch_size: int | None = None
    """Examples per step. None: the paper's.
    Paper: 64 for the MLP, 90 for ResNet-18."""
    lr: float | None = None
    """Learning rate of SGD. None: the paper's.
    Paper: 0.01 for the MLP, 0.1 for ResNet-18."""
    momentum: float | None = None
    """Momentum of SGD. None: the paper's.
    Paper: 0 for the MLP, 0.9 for ResNet-18."""
    weight_decay: float | None = None
    """Weight decay of SGD. None: the paper's.
    Paper: 0 for the MLP, 5e-4 for ResNet-18."""
    lr_drops: tuple[int, ...] | None = None
    """After so many tasks, or epochs if there is one task, the learning rate is multiplied by 0.2. None: at 30, 60
    and 80 % of the training for the ResNets, never for others.
    Paper: 60, 120 and 160 for ResNet-18, never for the MLP."""
    checkpoints: tuple[int, ...] | None = None
    """When to assay: after so many tasks, or epochs if there is one task. None: the paper's, scaled to the training.
    Paper: 0, 5, 10, 20, 30 tasks for the MLP; 60, 120, 160, 200 epochs for ResNet-18."""
    calibration: int | None = None
    """Examples the utilities are scored on, drawn from the training data of the task that was trained last. None: the
    paper's, or half of the data if there are fewer.
    Paper: 2048."""
    probe: int | None = None
    """Other examples of the same task, on which every unit is clamped. None: as for --calibration.
    Paper: 2048."""
    utilities: tuple[str, ...] | None = None
    """Which utilities to compare. None: all that are registered, but for those that need second derivatives."""
    units_per_group: int | None = None
    """Clamp only so many units of each layer, drawn at random. None: all.
    Paper: all."""
    all_logit_examples: int | None = None
    """Score gxd_all_logit, which takes a backward pass per class, on only so many calibration examples. None: all.
    Paper: all."""
    positions: Literal["signed", "abs"] = "signed"
    """How the effect of a channel is summed over an image; the same thing for an MLP.
    signed: with its signs. abs: without them, as the paper seems to have done."""
    residual: Literal["group", "skip"] = "group"
    """Channels of a residual stream. group: the views of all readers are clamped together. skip: left out."""
    device: str = "cpu"
    """Where to train and to clamp: cpu, cuda, cuda:1, mps."""
    threads: int | None = 1
    """CPU threads of torch in each process. None: as many as torch likes."""
    data_dir: str | None = None
    """Where the data are. None: the environment variable GXD_DATA, else where `gxd data fetch` puts them."""

    def __post_init__(self) -> None:
        if self.model not in models.MODELS and ":" not in self.model:
            near = difflib.get_close_matches(self.model, models.MODELS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UserError(f"unknown model {self.model!r}.{hint} Give {', '.join(models.MODELS)} or module:factory")
        if self.data is not None and self.data not in DATA:
            raise UserError(f"unknown data {self.data!r}: there are {', '.join(DATA)}")
        if self.activation not in models.ACTIVATIONS:
            known = ", ".join(models.ACTIVATIONS)
            raise UserError(f"unknown activation {self.activation!r}: the activations are {known}")
        if "resnet" in self.model and self.model in models.MODELS and self.activation != "relu":
            raise UserError(f"{self.model} has ReLUs only: leave out --activation {self.activation}")
        for each in fields(self):
            check_range(each.name, getattr(self, each.name))
        if any(drop < 0 for drop in self.lr_drops or ()):
            raise UserError(f"lr_drops={self.lr_drops!r} must be whole numbers, 0 or more")
        for name in self.utilities or ():
            if name not in gxd.utilities():
                near = difflib.get_close_matches(name, gxd.utilities(), n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise UserError(f"unknown utility {name!r}.{hint} There are {', '.join(gxd.utilities())}")

    # --- the paper's choices ------------------------------------------------------------------------------------------

    def resolved(self) -> AssayConfig:
        """The same assay with every value spelled out."""
        paper = PAPER.get(self.model, PAPER["mlp"])
        values: dict[str, Any] = {"momentum": 0.0, "weight_decay": 0.0, **paper}
        drops = values.pop("decay_at", ())
        chosen = {name: value for name, value in values.items() if getattr(self, name) is None}
        if self.data == "cifar100" and "tasks" in chosen:
            chosen["tasks"] = 1  # there is only one
        full = replace(self, **chosen)
        full = replace(full, **full._drawn())
        if full.data == "cifar100" and full.tasks != 1:
            raise UserError(f"tasks={full.tasks!r}: all of cifar100 is one task; say how long with --epochs")
        rounds = full.rounds
        if full.lr_drops is None:
            full = replace(full, lr_drops=tuple(round(rounds * share) for share in drops))
        if full.checkpoints is None:
            shares = CHECKPOINTS["resnet18" if full.tasks == 1 else "mlp"]
            full = replace(full, checkpoints=tuple(dict.fromkeys(round(rounds * share) for share in shares)))
        assert full.checkpoints is not None
        wrong = [c for c in full.checkpoints if not 0 <= c <= rounds]
        if wrong or not full.checkpoints:
            unit = "epochs" if full.tasks == 1 else "tasks"
            raise UserError(f"checkpoints={full.checkpoints!r} must lie between 0 and the {rounds} {unit} of training")
        ordered = tuple(sorted(set(full.checkpoints)))
        every = tuple(name for name in gxd.utilities() if not get_utility(name).curvature)
        return replace(full, checkpoints=ordered, utilities=full.utilities or every)

    def _drawn(self) -> dict[str, Any]:
        """How many examples to draw where nothing was said. What is scored and what is clamped are different ones."""
        assert self.data is not None
        images = min(self.train_size or IMAGES[self.data], IMAGES[self.data])
        wanted = {"calibration": self.calibration, "probe": self.probe}
        missing = [name for name, size in wanted.items() if size is None]
        left = images - sum(size for size in wanted.values() if size is not None)
        return {name: max(1, min(DRAWN, left // len(missing))) for name in missing}

    @property
    def rounds(self) -> int:
        """What checkpoints count: tasks, or epochs if there is one task. Of a resolved config."""
        assert self.tasks is not None and self.epochs is not None
        return self.tasks if self.tasks > 1 else self.epochs

    # --- as data ------------------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """The resolved fields that make the numbers what they are, as JSON has them."""
        values = asdict(self.resolved())
        kept = {name: value for name, value in values.items() if name not in MACHINE}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in kept.items()}

    def key(self) -> str:
        """Ten hex digits that tell settings apart. The seeds of one setting share it."""
        values = {name: value for name, value in self.settings().items() if name != "seed"}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]

    def label(self) -> str:
        """A short name for people."""
        return f"{self.model} {self.activation} seed {self.seed}"

    def directory(self, root: str | Path) -> Path:
        """Where the results go."""
        model = re.sub(r"[^\w.-]+", "-", self.model)
        return Path(root) / "assay" / f"{model}_{self.activation}_{self.key()}" / f"seed{self.seed}"

    # --- as objects ---------------------------------------------------------------------------------------------------

    def stream(self) -> streams.Stream:
        """The tasks."""
        full = self.resolved()
        assert full.data is not None and full.batch_size is not None
        return DATA[full.data](full.seed, full.batch_size, full.device, full.data_dir)

    def build(self, stream: streams.Stream) -> nn.Module:
        """The model, with the weights of its seed."""
        inputs = math.prod(stream.input_shape)
        if self.model == "mlp":
            return models.mlp(
                inputs,
                stream.classes,
                width=self.width,
                depth=self.depth,
                activation=self.activation,
                init="default",
                seed=self.seed,
            )
        offered: dict[str, Any] = {"classes": stream.classes, "seed": self.seed}
        if self.model in models.MODELS:
            return models.MODELS[self.model](**offered)
        offered |= {"inputs": inputs, "input_shape": stream.input_shape, "activation": self.activation}
        factory = factory_of(self.model)
        try:
            wanted = inspect.signature(factory).parameters
            given = {name: value for name, value in offered.items() if name in wanted}
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                model = factory(**given)
        except Exception as error:  # the user's code may raise anything
            raise UserError(
                f"--model {self.model} failed with {type(error).__name__} ({first_line(error)}); it may take any of "
                f"{', '.join(offered)}, and is given no other argument"
            ) from error
        if not isinstance(model, nn.Module):
            raise UserError(f"--model {self.model} returned a {type(model).__name__}, not a torch.nn.Module")
        return model


def factory_of(spec: str) -> Callable[..., Any]:
    """The function that ``--model module:factory`` names. Raises :class:`UserError` if there is none."""
    module, _, name = spec.partition(":")
    if os.getcwd() not in sys.path:  # the user's own file, where the command is started
        sys.path.insert(0, os.getcwd())
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # the user's code may raise anything
        raise UserError(
            f"--model {spec}: cannot import {module!r} ({type(error).__name__}: {first_line(error)})"
        ) from error
    if not hasattr(imported, name):
        raise UserError(f"--model {spec}: {module!r} has no {name!r}")
    found = getattr(imported, name)
    if not callable(found):
        raise UserError(f"--model {spec}: {name!r} is a {type(found).__name__}, not a function that returns a model")
    factory: Callable[..., Any] = found
    return factory
