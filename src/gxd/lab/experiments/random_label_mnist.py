"""Random-label MNIST of Kumar, Marklund, Van Roy: Maintaining Plasticity in Continual Learning via Regenerative
Regularization, CoLLAs 2025: memorise labels that mean nothing, again and again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from gxd.lab import data, streams
from gxd.lab.data import Dataset
from gxd.lab.experiments.base import register
from gxd.lab.experiments.feedforward import Perceptron
from gxd.lab.streams import Stream, Task, generator

IMAGES = 1200


@register
@dataclass(frozen=True)
class RandomLabelMNIST(Perceptron):
    """Memorise random labels of 1,200 images of MNIST, new ones in each task. The defaults are Kumar et al.'s; their
    code shuffles the true labels, here every label is drawn.
    """

    name: ClassVar[str] = "random-label-mnist"
    train_size: ClassVar[int] = IMAGES

    tasks: int = 50
    """How many tasks follow one another.
    Paper: 50."""
    epochs: int = 400
    """Passes over the 1200 images of each task.
    Paper: 400, which is 30000 steps."""
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

    def stream(self) -> Stream:
        dataset = streams.some(data.mnist(self.data_dir), IMAGES, self.seed)
        return RandomLabels(dataset, self.seed, self.batch_size, self.device)

    def default_lr(self) -> float:
        return 1e-3 if self.optimizer == "adam" else 1e-2


class RandomLabels(Stream):
    """The same images in every task, each with a label that is drawn at random, uniformly and independently.

    There is nothing to generalise to: the test set is the training set.
    """

    def __init__(self, dataset: Dataset, seed: int, batch_size: int, device: torch.device | str = "cpu") -> None:
        dataset = dataset.to(device)
        images, labels = dataset.train_images.flatten(1), dataset.train_labels
        self.classes, self.input_shape = dataset.classes, tuple(images.shape[1:])
        self._first = Task(seed, 0, batch_size, images, labels, images, labels, dataset.full)

    def task(self, number: int) -> Task:
        self.check(number)
        first = self._first
        chance = generator(first.seed, number, "labels")
        labels = torch.randint(self.classes, first.train_labels.shape, generator=chance).to(first.train_labels.device)
        return replace(first, number=number, train_labels=labels, test_labels=labels)
