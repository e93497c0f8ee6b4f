"""Sequences of tasks: what streams are made of, and those that several experiments share.

A task is a pure function of (seed, number), so that a resume needs no random state, and all methods see the same tasks.
The images stay on the device as bytes. They are scaled and permuted a chunk of batches at a time, never as a whole.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from gxd.lab import data
from gxd.lab.data import Dataset
from gxd.lab.errors import UserError

Batch = tuple[Tensor, Tensor]  # inputs (n, ...) float32, labels (n,) int64 or targets (n, 1) float32

# Examples that are scaled and permuted at once. On a CPU they should stay in the cache (an epoch of MNIST: 72 ms at
# 512, 190 ms at 8192, 330 ms batch by batch); on a GPU fewer launches count more.
CHUNK = {"cpu": 512}
LARGE_CHUNK = 8192

# Mean and standard deviation of each channel over CIFAR-100's training images, pixels in [0, 1].
CIFAR_MEAN = (0.5071, 0.4865, 0.4409)
CIFAR_STD = (0.2673, 0.2564, 0.2762)
HELD_OUT = 50  # images of each class that are kept for validation
PAD, LARGEST_ANGLE = 4, 15  # of the augmentation: pixels, degrees


def generator(*key: int | str) -> torch.Generator:
    """A generator on the CPU whose seed is a hash of the key, e.g. of (seed, task, epoch, purpose)."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


@dataclass(frozen=True)
class Task:
    """One task of a stream.

    Attributes:
        seed, number: of the stream, and of the task in it, from 0.
        batch_size: of the training batches; the last one holds what is left, or is left out (``whole_batches``).
        train_images, test_images: ``(n, ...)``, not permuted: float32 as they are, or uint8, which are divided by
            ``full`` or, if they are colour images ``(n, 3, 32, 32)``, standardised.
        permutation: ``(pixels,)`` input ``i`` of the task is pixel ``permutation[i]`` of the image; or None.
        augmented: whether training batches are flipped, cropped and rotated, see :func:`augment`.
        shuffled: whether every epoch has an order of its own; else all have that of the images.
    """

    seed: int
    number: int
    batch_size: int
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    full: int = 255
    permutation: Tensor | None = None
    augmented: bool = False
    shuffled: bool = True
    whole_batches: bool = False

    @property
    def steps(self) -> int:
        """Batches per epoch."""
        examples = len(self.train_labels)
        return examples // self.batch_size if self.whole_batches else -(-examples // self.batch_size)

    def batches(self, epoch: int = 0) -> Iterator[Batch]:
        """The training set once."""
        examples = len(self.train_labels)
        if self.shuffled:
            order = torch.randperm(examples, generator=generator(self.seed, self.number, epoch, "order"))
        else:
            order = torch.arange(examples)
        order = order[: self.steps * self.batch_size].to(self.train_labels.device)
        chance = generator(self.seed, self.number, epoch, "augment")
        chunk = CHUNK.get(self.train_images.device.type, LARGE_CHUNK)
        for rows in order.split(max(1, chunk // self.batch_size) * self.batch_size):
            images, labels = self._inputs(self.train_images, rows), self.train_labels.index_select(0, rows)
            if self.augmented:
                images = augment(images, chance)
            yield from zip(images.split(self.batch_size), labels.split(self.batch_size), strict=True)

    def test(self, chunk: int = 2000) -> Iterator[Batch]:
        """The test set of the task once, in a fixed order."""
        rows = torch.arange(len(self.test_labels), device=self.test_labels.device)
        for part in rows.split(chunk):
            yield self._inputs(self.test_images, part), self.test_labels.index_select(0, part)

    def probe(self, examples: int) -> Batch:
        """The first so many examples of the test set (all of it if it has fewer)."""
        return next(self.test(examples))

    def draw(self, *sizes: int, test: bool = False) -> tuple[Batch, ...]:
        """Disjoint random samples of the training (or test) set, of the given sizes, not augmented; the same ones at
        every call.
        """
        images, labels = (self.test_images, self.test_labels) if test else (self.train_images, self.train_labels)
        if sum(sizes) > len(labels):
            raise UserError(
                f"cannot draw {sum(sizes)} different examples from {len(labels)}: ask for fewer, "
                "with --calibration and --probe"
            )
        order = torch.randperm(len(labels), generator=generator(self.seed, self.number, "draw"))
        parts = order[: sum(sizes)].to(labels.device).split(sizes)
        return tuple((self._inputs(images, rows), labels.index_select(0, rows)) for rows in parts)

    def _inputs(self, images: Tensor, rows: Tensor) -> Tensor:
        chosen = images.index_select(0, rows)
        if chosen.dtype == torch.uint8:
            chosen = standardise(chosen) if chosen.dim() == 4 else chosen.float().div_(self.full)
        # Permuting floats is four times as fast as permuting bytes, on a CPU.
        return chosen if self.permutation is None else chosen.index_select(1, self.permutation)


class Stream:
    """A sequence of tasks.

    Attributes:
        classes: the number of outputs a model needs; 1 for the prediction of a number.
        input_shape: of one example.
        tasks: how many tasks there are, or None: as many as one likes.
    """

    classes: int
    input_shape: tuple[int, ...]
    tasks: int | None = None

    def task(self, number: int) -> Task:
        """The task of a number, from 0."""
        raise NotImplementedError

    def check(self, number: int) -> None:
        """Raise unless there is a task of this number."""
        if number < 0 or (self.tasks is not None and number >= self.tasks):
            last = "" if self.tasks is None else f" to {self.tasks - 1}"
            raise UserError(f"there is no task {number}: this stream has tasks from 0{last}")


class Permuted(Stream):
    """The same images in every task, with the pixels in another random order. Task 0 is permuted as well."""

    def __init__(self, dataset: Dataset, seed: int, batch_size: int, device: torch.device | str = "cpu") -> None:
        dataset = dataset.to(device)
        images, tests = dataset.train_images.flatten(1), dataset.test_images.flatten(1)
        self.classes, self.input_shape = dataset.classes, tuple(images.shape[1:])
        labels = dataset.train_labels, dataset.test_labels
        self._first = Task(seed, 0, batch_size, images, labels[0], tests, labels[1], dataset.full)

    def task(self, number: int) -> Task:
        self.check(number)
        first = self._first
        permutation = torch.randperm(self.input_shape[0], generator=generator(first.seed, number, "permutation"))
        return replace(first, number=number, permutation=permutation.to(first.train_images.device))


class AllClasses(Stream):
    """A single task: all classes of CIFAR-100 at once, augmented; for the reset-cost assay of ResNet-18.

    Of each class the last ``HELD_OUT`` training images in the file's order are left out of training.

    Args:
        validation: test on the images that were left out, not on the test set.
    """

    tasks = 1

    def __init__(
        self,
        dataset: Dataset,
        seed: int,
        batch_size: int,
        device: torch.device | str = "cpu",
        validation: bool = False,
    ) -> None:
        dataset = dataset.to(device)
        self.classes, self.input_shape = dataset.classes, tuple(dataset.train_images.shape[1:])
        images, labels = dataset.train_images, dataset.train_labels
        held_out = torch.zeros(len(labels), dtype=torch.bool, device=labels.device)
        for label in range(dataset.classes):
            held_out[(labels == label).nonzero().flatten()[-HELD_OUT:]] = True
        test = (images[held_out], labels[held_out]) if validation else (dataset.test_images, dataset.test_labels)
        self._task = Task(seed, 0, batch_size, images[~held_out], labels[~held_out], *test, augmented=True)

    def task(self, number: int = 0) -> Task:
        self.check(number)
        return self._task


def augment(images: Tensor, chance: torch.Generator) -> Tensor:
    """Random flips, crops and rotations of images ``(n, channels, height, width)``.

    Each image is mirrored with probability 1/2, shifted by up to 4 pixels on both axes (a crop after padding by 4),
    and turned by 0 to 15 degrees anticlockwise, all in one bilinear resampling. What comes from outside is 0: the mean
    colour of standardised images.
    """
    n, _, height, width = images.shape
    mirror = 1.0 - 2.0 * torch.randint(2, (n,), generator=chance)
    down, right = torch.randint(-PAD, PAD + 1, (2, n), generator=chance).float()
    angle = torch.rand(n, generator=chance) * math.radians(LARGEST_ANGLE)
    cos, sin = angle.cos(), angle.sin()
    # Where in the image each output pixel looks, in coordinates from -1 to 1.
    x = torch.stack([mirror * cos, -mirror * sin, mirror * right * 2 / width], dim=1)
    y = torch.stack([sin, cos, down * 2 / height], dim=1)
    look = torch.stack([x, y], dim=1).to(images.device, images.dtype)
    grid = F.affine_grid(look, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="zeros", align_corners=False)


def standardise(images: Tensor) -> Tensor:
    """CIFAR images ``(n, 3, 32, 32)`` uint8 as float32 with mean 0 and standard deviation 1 per channel."""
    mean, std = (torch.tensor(v, device=images.device).view(3, 1, 1) for v in (CIFAR_MEAN, CIFAR_STD))
    return images.float().div_(255).sub_(mean).div_(std)


def of_classes(classes: Sequence[int], images: Tensor, labels: Tensor) -> Batch:
    """The images of these classes, in the file's order, with their labels. They are standardised here, once: such a
    task has few images and many epochs.
    """
    rows = torch.isin(labels, torch.tensor(classes, device=labels.device)).nonzero().flatten()
    return standardise(images.index_select(0, rows)), labels.index_select(0, rows)


def some(dataset: Dataset, examples: int, seed: int) -> Dataset:
    """The data set with so many of its training examples, drawn with the seed."""
    rows = torch.randperm(len(dataset.train_labels), generator=generator(seed, "some"))[:examples]
    return replace(dataset, train_images=dataset.train_images[rows], train_labels=dataset.train_labels[rows])


def permuted_digits(seed: int, batch_size: int = 16, device: str = "cpu", data_dir: str | Path | None = None) -> Stream:
    """Permuted digits: 64 inputs, pixels / 16."""
    return Permuted(data.digits(), seed, batch_size, device)


def permuted_mnist(seed: int, batch_size: int = 16, device: str = "cpu", data_dir: str | Path | None = None) -> Stream:
    """Permuted MNIST: 784 inputs, pixels / 255."""
    return Permuted(data.mnist(data_dir), seed, batch_size, device)


def all_cifar100(
    seed: int,
    batch_size: int = 90,
    device: str = "cpu",
    data_dir: str | Path | None = None,
    *,
    validation: bool = False,
) -> Stream:
    """All of CIFAR-100 as one augmented task."""
    return AllClasses(data.cifar100(data_dir), seed, batch_size, device, validation)
