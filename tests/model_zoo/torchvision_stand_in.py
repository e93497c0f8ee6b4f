"""What timm imports of torchvision in order to build models, and nothing else.

No model of the suite uses torchvision, but installing it would replace torch by another build. The stand-in is in
``sys.modules`` only while timm is imported, so that nothing else takes it for the real one.
"""

import enum
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from torch import nn

DATASETS = ("CIFAR10", "CIFAR100", "MNIST", "KMNIST", "FashionMNIST", "ImageFolder")


class FrozenBatchNorm2d(nn.Module):
    """timm asks whether a norm is one of these; none is."""


class InterpolationMode(enum.Enum):
    """How images are resized: names that timm's tables of image transforms mention."""

    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def import_timm() -> ModuleType:
    """timm, whether torchvision is installed or not."""
    try:
        return importlib.import_module("timm")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("torchvision"):
            raise
    for name in [name for name in sys.modules if name.split(".")[0] == "timm"]:
        del sys.modules[name]  # the half that was imported before torchvision was missed
    with _in_place():
        return importlib.import_module("timm")


@contextmanager
def _in_place() -> Iterator[None]:
    modules = {
        "torchvision": {},
        "torchvision.ops": {},
        "torchvision.ops.misc": {"FrozenBatchNorm2d": FrozenBatchNorm2d},
        "torchvision.transforms": {"ToTensor": object, "PILToTensor": object},
        "torchvision.transforms.functional": {"InterpolationMode": InterpolationMode},
        "torchvision.datasets": dict.fromkeys(DATASETS, object),
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
