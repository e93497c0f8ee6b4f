"""Permuted MNIST in the size of Kumar, Marklund, Van Roy: Maintaining Plasticity in Continual Learning via Regenerative
Regularization, CoLLAs 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from gxd.lab import data, streams
from gxd.lab.experiments.base import register
from gxd.lab.experiments.feedforward import Perceptron

IMAGES = 10_000


@register
@dataclass(frozen=True)
class PermutedMNISTSmall(Perceptron):
    """Permuted MNIST of Kumar et al.: 10,000 images, two layers of 100 units, Adam. Its defaults are that paper's."""

    name: ClassVar[str] = "permuted-mnist-small"
    train_size: ClassVar[int] = IMAGES
    metric: ClassVar[str] = "online_accuracy"

    tasks: int = 500
    """How many tasks follow one another.
    Paper: 500, each of 625 steps."""
    optimizer: Literal["sgd", "adam"] = "adam"
    """SGD, or Adam with its usual betas (0.9, 0.999).
    Paper: adam, and sgd."""
    lr: float | None = None
    """Learning rate. None: 1e-3 for Adam, 1e-2 for SGD.
    Paper: the best of {1e-3, 1e-4} for Adam and of {1e-2, 1e-3} for SGD."""
    rate: float | None = None
    """Replacement rate: the share of the mature units reset per step. None: 1e-3 for gxd, 1e-4 for utilities.
    This and the next five are of gxd and of utilities; other methods have --options.
    Paper: chosen from a grid."""
    data_dir: str | None = None
    """Where MNIST is. None: the environment variable GXD_DATA, else where `gxd data fetch mnist` puts it."""

    def stream(self) -> streams.Stream:
        dataset = streams.some(data.mnist(self.data_dir), IMAGES, self.seed)
        return streams.Permuted(dataset, self.seed, self.batch_size, self.device)

    def default_lr(self) -> float:
        return 1e-3 if self.optimizer == "adam" else 1e-2
