"""``gxd demo``: plain backprop loses its plasticity, networks with resets keep it; about two minutes on two cores."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from gxd.lab import workers
from gxd.lab.arguments import parse
from gxd.lab.config import Experiment, PermutedDigits
from gxd.lab.errors import UserError
from gxd.lab.progress import Board, clock
from gxd.lab.selection import table
from gxd.lab.store import read_metrics
from gxd.lab.workers import Job, settled, status_of

METHODS = ("backprop", "contribution", "mc_adaptable_contribution", "gxd", "gxd_sketch")


@dataclass(frozen=True)
class Options:
    """Watch plain backprop lose plasticity, and networks with resets keep it. Needs no data and no network.

    Five methods learn the same sequence of tasks: scikit-learn's digits, with the pixels permuted anew for each task. A
    second `gxd demo` shows what the first one left, or goes on where it was stopped.
    """

    out: Path = Path("gxd-demo")
    """Where the runs, the picture and the page go."""
    fresh: bool = False
    """Forget the runs of an earlier demo, and train again."""
    quick: bool = False
    """A few small tasks only: to see that everything works, not to see an effect."""
    jobs: int | None = None
    """Runs at a time. Default: as many as there are cores."""


def configs(quick: bool = False) -> list[Experiment]:
    """The runs of the demo, one seed of every method after the other."""
    size = {"tasks": 4, "epochs": 1, "width": 16, "depth": 2} if quick else {"tasks": TASKS}
    seeds = SEEDS[:1] if quick else SEEDS
    return [
        PermutedDigits(method=method, activation=ACTIVATION, lr=LR, rate=RATE, seed=seed, **size)
        for seed in seeds
        for method in METHODS
    ]
