"""Small data sets in place of MNIST and CIFAR-100, and runs of every experiment that take a moment."""

import torch

from gxd.lab.data import Dataset
from gxd.lab.experiments import experiment, slow_regression


def tiny(examples=40, tests=10, shape=(12,), classes=4):
    """A data set whose pixels tell which image and which pixel they are."""
    pixels = torch.arange((examples + tests) * torch.Size(shape).numel()) % 251
    images = pixels.to(torch.uint8).reshape(-1, *shape)
    labels = torch.arange(examples + tests) % classes
    return Dataset(images[:examples], labels[:examples], images[examples:], labels[examples:], classes, 255)


def whole(batches):
    xs, ys = zip(*batches)
    return torch.cat(xs), torch.cat(ys)


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def clusters(examples, tests, shape, classes):
    """A data set that can be learned: every class is a random image with some noise."""
    chance = torch.Generator().manual_seed(0)
    middle = torch.randint(40, 216, (classes, *shape), generator=chance)
    labels = torch.arange(examples + tests) % classes
    noise = torch.randint(-40, 40, (examples + tests, *shape), generator=chance)
    images = (middle[labels] + noise).to(torch.uint8)
    return Dataset(images[:examples], labels[:examples], images[examples:], labels[examples:], classes, 255)


def small_data(monkeypatch) -> None:
    """No file is read: MNIST has 96 images, CIFAR-100 has 4 of each class, and a bin of the regression 60 examples."""
    monkeypatch.setattr("gxd.lab.data.mnist", lambda data_dir=None: clusters(96, 32, (784,), 10))
    monkeypatch.setattr("gxd.lab.data.cifar100", lambda data_dir=None: clusters(400, 200, (3, 32, 32), 100))
    monkeypatch.setattr(experiment("cifar-5+1"), "train_size", 20)
    monkeypatch.setattr(slow_regression, "PERIOD", 30)
    monkeypatch.setattr(slow_regression, "BIN", 60)


SMALL = {"tasks": 3, "batch_size": 16, "epochs": 1, "compile": "no", "threads": 1}
NETWORK = {"width": 8, "depth": 2}
CHANGES = {
    "permuted-digits": NETWORK | {"batch_size": 160},
    "permuted-mnist": NETWORK,
    "permuted-mnist-small": NETWORK,
    "random-label-mnist": NETWORK,
    "slow-regression": {"batch_size": 2},
    "cifar-5+1": {"batch_size": 2},
    "cifar100": {"batch_size": 2},
}


def small_run(name, **values):
    """A run of an experiment that takes a moment; with :func:`small_data`."""
    resets = {"rate": 0.2, "maturity": 2}
    return experiment(name).from_dict({**SMALL, **CHANGES.get(name, {}), **resets, **values})
