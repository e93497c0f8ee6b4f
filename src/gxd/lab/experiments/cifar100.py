"""Continuous CIFAR-100, as in the paper of GXD: pairs of classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gxd
from gxd.lab import data, models
from gxd.lab.data import Dataset
from gxd.lab.experiments.base import Experiment, register
from gxd.lab.streams import Batch, Stream, Task, generator, of_classes


@register
@dataclass(frozen=True)
class Cifar100(Experiment):
    """Continuous CIFAR-100, the paper's test of stability: pairs of classes, a small ResNet. Its defaults."""

    name: ClassVar[str] = "cifar100"
    train_size: ClassVar[int] = 1000
    learned_nothing: ClassVar[float] = 0.5

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
    """Learning rate. None: 0.1, and 1e-3 for Adam.
    Paper: 0.1."""
    momentum: float = 0.9
    """Momentum of SGD.
    Paper: 0.9."""
    rate: float | None = None
    """Replacement rate: the share of the mature units reset per step. None: 1e-3 for gxd, 1e-4 for utilities.
    This and the next five are of gxd and of utilities; other methods have --options.
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

    def stream(self) -> Stream:
        return ClassPairs(data.cifar100(self.data_dir), self.seed, self.batch_size, self.device)

    def build(self, stream: Stream) -> nn.Module:
        return models.small_resnet(stream.classes, seed=self.seed)

    def units(self, model: nn.Module, example: Tensor) -> gxd.UnitPlan:
        return gxd.find_units(model, example, residual=self.residual)

    def new_task(self, model: nn.Module, optimizer: Optimizer) -> None:
        """The head is zeroed, and the optimizer begins anew."""
        models.zero_head(model)
        for values in optimizer.state.values():
            for value in values.values():
                if isinstance(value, Tensor):
                    value.zero_()  # in place, for a compiled step holds on to it; to SGD it is as if it were new

    def default_lr(self) -> float:
        """The paper's fixed setting."""
        return 0.1 if self.optimizer == "sgd" else 1e-3

    def _unused(self) -> dict[str, Any]:
        without = not any(made.needs_units for made in self.plasticity())
        return super()._unused() | ({"residual": self._default("residual")} if without else {})


class ClassPairs(Stream):
    """Continuous CIFAR-100: tell two classes apart.

    The first tasks go through all classes once; after that pairs are drawn at random, none of which repeats an
    earlier one. Images are standardised per channel with ``CIFAR_MEAN`` and ``CIFAR_STD``; no augmentation.
    """

    classes = 2

    def __init__(self, dataset: Dataset, seed: int, batch_size: int, device: torch.device | str = "cpu") -> None:
        self.input_shape = tuple(dataset.train_images.shape[1:])
        self.pairs = pairs(dataset.classes, seed)
        self.tasks = len(self.pairs)
        self._dataset, self._seed, self._batch_size = dataset.to(device), seed, batch_size

    def task(self, number: int) -> Task:
        self.check(number)
        pair, whole = self.pairs[number], self._dataset
        train = _of_two(pair, whole.train_images, whole.train_labels)
        test = _of_two(pair, whole.test_images, whole.test_labels)
        return Task(self._seed, number, self._batch_size, *train, *test)


def pairs(classes: int, seed: int) -> list[tuple[int, int]]:
    """All pairs of classes in the order of the tasks, each once: first a partition of the classes, then the rest."""
    shuffled = torch.randperm(classes, generator=generator(seed, "partition")).tolist()
    first = list(zip(shuffled[::2], shuffled[1::2], strict=False))
    known = {frozenset(pair) for pair in first}
    rest = [(a, b) for a in range(classes) for b in range(a + 1, classes) if frozenset((a, b)) not in known]
    shuffle = generator(seed, "pairs")
    order = torch.randperm(len(rest), generator=shuffle).tolist()
    # Which of the two is labelled 1 is drawn as well: else the class of the higher number would nearly always be.
    turned = torch.randint(2, (len(rest),), generator=shuffle).tolist()
    return first + [rest[i][::-1] if turn else rest[i] for i, turn in zip(order, turned, strict=True)]


def _of_two(pair: tuple[int, int], images: Tensor, labels: Tensor) -> Batch:
    """The images of two classes; label 1 for the second of the pair."""
    found, classes = of_classes(pair, images, labels)
    return found, (classes == pair[1]).long()
