"""The protocol of the leaderboard, as data: written down before the runs, and kept beside their results.

Whoever changes a number here makes another protocol: raise ``version``, and begin a new directory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gxd.lab.experiments import Experiment, experiment


@dataclass(frozen=True, eq=False)
class Track:
    """A stream of the board, at its scale.

    Attributes:
        name: in the column ``stream`` of board.csv.
        stream: the name of the experiment.
        fixed: fields of the experiment, the same in all runs.
        rates: learning rates, the most promising first: as many of them are tried as the trials allow.
        clock: on a stream without boundaries, what acts between tasks acts every so many steps instead.
        step: milliseconds that a step took on one core, the mean over all entries. Only the estimate uses it.
    """

    name: str
    stream: str
    fixed: Mapping[str, Any]
    rates: tuple[float, ...]
    clock: int = 0
    step: float = 1.0

    @property
    def kind(self) -> type[Experiment]:
        """The experiment."""
        return experiment(self.stream)

    @property
    def metric(self) -> str:
        """What is averaged over the stream: the online accuracy, or of a regression the loss."""
        return "online_accuracy" if self.kind.classifies else "loss"

    def config(self, values: Mapping[str, Any], seed: int) -> Experiment:
        """A run."""
        return self.kind.from_dict({**self.fixed, **values, "seed": seed})


@dataclass(frozen=True)
class Protocol:
    """What all entries of the board have in common.

    Attributes:
        tracks: the streams, the cheapest first.
        trials: settings that are tried of every entry on every stream.
        tuning_seeds: on which they are tried; not reported.
        seeds: on which the best one is run and reported.
    """

    version: int
    tracks: tuple[Track, ...]
    trials: int
    tuning_seeds: tuple[int, ...]
    seeds: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, without what only the estimate needs."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        for track in values["tracks"]:
            del track["step"]
        return values

    def fingerprint(self) -> str:
        """Ten hex digits that tell protocols apart."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:10]


ADAM = (1e-3, 3e-4, 3e-3, 1e-4, 1e-2, 3e-5)
DIGITS = (0.1, 0.03, 0.3, 0.01, 0.06, 0.2)

PROTOCOL = Protocol(
    version=1,
    tracks=(
        Track("permuted-digits", "permuted-digits", {"tasks": 100}, DIGITS, step=0.4),
        Track("permuted-digits, tanh", "permuted-digits", {"tasks": 100, "activation": "tanh"}, DIGITS, step=0.4),
        Track("random-label-mnist", "random-label-mnist", {"tasks": 12, "epochs": 15}, ADAM, step=0.4),
        Track("permuted-mnist-small", "permuted-mnist-small", {"tasks": 30}, ADAM, step=0.5),
        Track("cifar-5+1", "cifar-5+1", {"tasks": 10, "epochs": 2}, ADAM, step=9.0),
        Track(
            "slow-regression",
            "slow-regression",
            {"tasks": 4},
            (0.01, 0.003, 0.03, 0.001, 0.006, 0.02),
            clock=10_000,
            step=0.2,
        ),
    ),
    trials=6,
    tuning_seeds=(100,),
    seeds=(0, 1, 2, 3, 4),
)
"""The protocol of the committed board."""
