"""The experiments: a stream of tasks, the network that learns it, and the settings of the paper it comes from.

An experiment is one file of this package: a frozen dataclass with the decorator ``@register``, a subclass of
``Experiment`` (``base.py``). The files are found by themselves; nothing else names them.
"""

from __future__ import annotations

import importlib
import pkgutil

from gxd.lab.config import check_name
from gxd.lab.experiments.base import EXPERIMENTS, Experiment


def discover() -> None:
    """Import every file of this package, which registers the experiments."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


discover()


def experiment(name: str) -> type[Experiment]:
    """The config class of an experiment; the error of an unknown one names the nearest."""
    check_name(name, EXPERIMENTS, "experiment")
    return EXPERIMENTS[name]


__all__ = ["EXPERIMENTS", "Experiment", "discover", "experiment"]
