"""5+1 CIFAR of Kumar, Marklund, Van Roy: Maintaining Plasticity in Continual Learning via Regenerative Regularization,
CoLLAs 2025: tasks of five classes and of one take turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from gxd.lab import data, models
from gxd.lab.data import Dataset
from gxd.lab.errors import UserError
from gxd.lab.experiments.base import register
from gxd.lab.experiments.feedforward import FeedForward
from gxd.lab.streams import Batch, Stream, Task, generator, of_classes

HARD, EASY = 5, 1  # classes


@register
@dataclass(frozen=True)
class Cifar5Plus1(FeedForward):
    """5+1 CIFAR: five new classes of CIFAR-100, then one, and so on, with a conv net. The defaults are Kumar et al.'s.
    The accuracy that counts is that of the tasks of five, among 100 outputs.
    """

    name: ClassVar[str] = "cifar-5+1"
    train_size: ClassVar[int] = 500 * HARD
    metric: ClassVar[str] = "online_accuracy"
    learned_nothing: ClassVar[float] = 0.01  # one of 100 outputs

    network: Literal["conv", "linear"] = "conv"
    """Two 5x5 convolutions of 16 channels with pooling and a layer of 100; or the linear model, a control."""
    tasks: int = 30
    """How many tasks follow one another; no class comes twice, so there are 32.
    Paper: 30."""
    epochs: int = 10
    """Passes over the 2500 images of a task of five classes. A task of one has as many steps.
    Paper: 780 steps, which is 10."""
    batch_size: int = 32
    """Examples per step; what is left of an epoch is dropped.
    Paper: 32."""
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
    """Where CIFAR-100 is. None: the environment variable GXD_DATA, else where `gxd data fetch cifar100` puts it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size > 500 * EASY:
            raise UserError(f"batch_size={self.batch_size} must be at most {500 * EASY}, the images of one class")

    @property
    def is_linear(self) -> bool:
        return self.network == "linear"

    def stream(self) -> Stream:
        return FivePlusOne(data.cifar100(self.data_dir), self.seed, self.batch_size, self.device)

    def network_of(self, stream: Stream, **settings: Any) -> nn.Module:
        return models.conv_net(stream.classes, **settings)

    @property
    def steps_per_task(self) -> int:
        return self.epochs * (self.train_size // self.batch_size)

    def batches(self, task: Task) -> Iterator[Batch]:
        return islice(chain.from_iterable(task.batches(epoch) for epoch in count()), self.steps_per_task)

    def counts(self, task: int) -> bool:
        return task % 2 == 0

    def default_lr(self) -> float:
        return 1e-3 if self.optimizer == "adam" else 1e-2


class FivePlusOne(Stream):
    """Task 0 has five classes, task 1 has one, task 2 has five, and so on; no class comes twice.

    Labels are those of all 100 classes. Images are standardised per channel, not augmented.
    """

    def __init__(self, dataset: Dataset, seed: int, batch_size: int, device: torch.device | str = "cpu") -> None:
        self.classes, self.input_shape = dataset.classes, tuple(dataset.train_images.shape[1:])
        order = torch.randperm(dataset.classes, generator=generator(seed, "classes")).tolist()
        rounds, rest = divmod(dataset.classes, HARD + EASY)
        self.tasks = 2 * rounds + (rest >= HARD)
        starts = [(HARD + EASY) * (number // 2) + HARD * (number % 2) for number in range(self.tasks)]
        self.chosen = [order[start : start + (EASY if n % 2 else HARD)] for n, start in enumerate(starts)]
        self._dataset, self._seed, self._batch_size = dataset.to(device), seed, batch_size

    def task(self, number: int) -> Task:
        self.check(number)
        chosen, whole = self.chosen[number], self._dataset
        train = of_classes(chosen, whole.train_images, whole.train_labels)
        test = of_classes(chosen, whole.test_images, whole.test_labels)
        return Task(self._seed, number, self._batch_size, *train, *test, whole_batches=True)
