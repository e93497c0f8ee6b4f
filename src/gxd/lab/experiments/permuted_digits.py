"""Permuted digits: Permuted MNIST in small."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from gxd.lab import streams
from gxd.lab.experiments.base import register
from gxd.lab.experiments.feedforward import Perceptron


@register
@dataclass(frozen=True)
class PermutedDigits(Perceptron):
    """Permuted MNIST in small: 8x8 digits, which come with gxd, and minutes per run. The defaults are ours."""

    name: ClassVar[str] = "permuted-digits"
    train_size: ClassVar[int] = 1440

    init: Literal["default", "glorot"] = "glorot"
    """First weights. default: torch's own, uniform in +-1/sqrt(inputs), biases too. glorot: Glorot's uniform, zero
    biases.
    Paper: glorot."""
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
    """Learning rate. None: 0.1, and 1e-3 for Adam.
    Paper: 0.1 for backprop and 0.3 with resets, the best of {0.1, 0.3}."""
    rate: float | None = None
    """Replacement rate: the share of the mature units reset per step. None: 1e-3. Backprop: 0.
    This and the next five are of gxd and of utilities; other methods have --options.
    Paper: 1e-4 for relu and tanh, 1e-3 for silu and leaky_relu, the best of {1e-5, 1e-4, 1e-3}."""

    def stream(self) -> streams.Stream:
        return streams.permuted_digits(self.seed, self.batch_size, self.device)

    def default_lr(self) -> float:
        """0.1 for all: the largest at which no method diverged early."""
        return 0.1 if self.optimizer == "sgd" else 1e-3

    def default_rate(self) -> float:
        """1e-3: tasks are 180 steps long, and 1e-4 would reset one unit in two tasks."""
        return 1e-3
