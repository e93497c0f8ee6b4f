"""Whom do resets reach, and which rule mends it? Permuted digits, one line for every utility and rule.

``python studies/age/digits.py --utilities gxd contribution --activations tanh`` trains for about a minute a run, with
checkpoints in ``runs/age``: the same command again goes on where it stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import expected_age  # noqa: F401  # registers the method
import tyro

from gxd.lab.experiments.permuted_digits import PermutedDigits
from gxd.lab.run import train
from gxd.lab.store import read_metrics

LAST = 25  # tasks that the accuracy is averaged over
RULES: dict[str, dict[str, Any]] = {
    "the paper's": {"exponent": 0.0},
    "expected age, exponent 1/2": {"exponent": 0.5},
    "expected age, exponent 1": {"exponent": 1.0},
    "maturity 1000": {"exponent": 0.0, "maturity": 1000},
}


@dataclass(frozen=True)
class Options:
    """The defaults are the part of the study that decides: tanh, rate 1e-3, the first seed."""

    utilities: tuple[str, ...] = ("gxd", "contribution", "random")
    activations: tuple[str, ...] = ("tanh",)
    rate: float = 1e-3
    layer_norm: bool = False
    tasks: int = 200
    seeds: tuple[int, ...] = (0,)
    out: Path = Path("runs/age")


def main(options: Options) -> None:
    """Print accuracy and reach, the mean over the seeds."""
    print(f"{'activation':12} {'utility':28} {'rule':28} {'accuracy, %':>12} {'reach, %':>9}")
    for activation, utility, (name, rule) in product(options.activations, options.utilities, RULES.items()):
        values = {
            "method": "expected_age",
            "options": {"utility": utility, "replacement_rate": options.rate, **rule},
            "activation": activation,
            "layer_norm": options.layer_norm,
            "tasks": options.tasks,
        }
        runs = [PermutedDigits.from_dict({**values, "seed": seed}) for seed in options.seeds]
        ends = [read_metrics(train(run, options.out))[-LAST:] for run in runs]
        accuracy = fmean(fmean(line["test_accuracy"] for line in end) for end in ends)
        reach = fmean(end[-1]["reach"] for end in ends)
        print(f"{activation:12} {utility:28} {name:28} {100 * accuracy:12.1f} {100 * reach:9.0f}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options))
