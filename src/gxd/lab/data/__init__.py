"""The data sets: 1,797 small digits, MNIST, CIFAR-100. Reading, fetching and verifying their files.

Files lie as their archives unpack: ``MNIST/raw/*-ubyte`` (or ``.gz``; where torchvision puts them) and
``cifar-100-binary/{train,test}.bin``, all in one directory: ``--data-dir``, else ``GXD_DATA``, else
``~/.cache/gxd/data``, which is the same from wherever a command is started.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy
import torch
from torch import Tensor

from gxd.lab.data import cifar, idx
from gxd.lab.errors import Elsewhere

DEFAULT_DIRECTORY = "~/.cache/gxd/data"


@dataclass(frozen=True)
class Dataset:
    """Images and labels, as stored.

    Attributes:
        train_images, test_images: ``(n, ...)`` uint8.
        train_labels, test_labels: ``(n,)`` int64.
        classes: the number of classes.
        full: the value of a fully bright pixel; pixels divided by it lie in [0, 1].
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int
    full: int

    def to(self, device: torch.device | str) -> Dataset:
        """The same on a device."""
        return Dataset(
            self.train_images.to(device),
            self.train_labels.to(device),
            self.test_images.to(device),
            self.test_labels.to(device),
            self.classes,
            self.full,
        )


def directory(data_dir: str | Path | None = None) -> Path:
    """Where the data lie: the argument, else ``GXD_DATA``, else ``~/.cache/gxd/data``."""
    return Path(data_dir or os.environ.get("GXD_DATA") or DEFAULT_DIRECTORY).expanduser()


def digits() -> Dataset:
    """8x8 digits, 1440 for training and 357 for testing; they come with gxd, so they are never fetched.

    The test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI Machine Learning
    Repository, 1998, https://doi.org/10.24432/C50P49, CC BY 4.0), which scikit-learn has as ``load_digits``.
    Image ``i`` is a test image if ``i * 1111 mod 1797`` is 1440 or more: spread evenly over the writers, who follow
    each other in the file, and the same for every seed and version.
    """
    with (files(__name__) / "digits.npz").open("rb") as file, numpy.load(file, allow_pickle=False) as arrays:
        images, classes = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"]).long()
    test = torch.arange(1797) * 1111 % 1797 >= 1440
    return Dataset(images[~test], classes[~test], images[test], classes[test], classes=10, full=16)


def mnist(data_dir: str | Path | None = None) -> Dataset:
    """MNIST, images flat: ``(60000, 784)`` and ``(10000, 784)``."""
    root, remedy = directory(data_dir), _remedy("mnist")
    arrays = {}
    for part, examples in (("train", 60_000), ("t10k", 10_000)):
        for kind, axes in (("images-idx3", (28, 28)), ("labels-idx1", ())):
            plain = root / "MNIST" / "raw" / f"{part}-{kind}-ubyte"
            path = _first([plain, plain.with_name(plain.name + ".gz")], "MNIST", root, remedy)
            array = idx.read(path, remedy)
            if array.shape != (examples, *axes):
                raise Elsewhere(f"{path} has shape {tuple(array.shape)}, not {(examples, *axes)}{remedy}")
            if not axes and int(array.max()) > 9:
                raise Elsewhere(
                    f"{path} has a label {int(array.max())}, but the classes are 0 to 9: it is damaged{remedy}"
                )
            arrays[part, kind[:6]] = array.flatten(1) if axes else array.long()
    return Dataset(
        arrays["train", "images"],
        arrays["train", "labels"],
        arrays["t10k", "images"],
        arrays["t10k", "labels"],
        classes=10,
        full=255,
    )


def cifar100(data_dir: str | Path | None = None) -> Dataset:
    """CIFAR-100 with its fine labels: ``(50000, 3, 32, 32)`` and ``(10000, 3, 32, 32)``."""
    root, remedy = directory(data_dir), _remedy("cifar100")
    parts: list[tuple[Tensor, Tensor]] = []
    for part, examples in (("train", 50_000), ("test", 10_000)):
        path = root / "cifar-100-binary" / f"{part}.bin"
        if not path.is_file() and (root / "cifar-100-python").is_dir():
            raise Elsewhere(f"{root} has cifar-100-python, a pickle, which is not read, but no {path.name}{remedy}")
        images, labels = cifar.read(_first([path], "CIFAR-100", root, remedy), remedy)
        if len(images) != examples:
            raise Elsewhere(f"{path} has {len(images)} images, not {examples}{remedy}")
        parts.append((images, labels))
    return Dataset(*parts[0], *parts[1], classes=100, full=255)


def command(argv: list[str]) -> int:
    """``gxd data fetch|verify mnist|cifar100``."""
    from gxd.lab.data.fetch import command as fetch_or_verify

    return fetch_or_verify(argv)


def _first(candidates: list[Path], name: str, root: Path, remedy: str) -> Path:
    for path in candidates:
        if path.is_file():
            return path
    raise Elsewhere(f"{name} is not in {root} (no file {candidates[0].relative_to(root)}){remedy}")


def _remedy(name: str) -> str:
    return f"; `gxd data fetch {name}` fetches it, --data-dir or GXD_DATA points elsewhere"
