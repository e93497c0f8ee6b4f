"""What a step of each entry costs relative to backprop, measured in turns: not taken from the clocks of the runs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from gxd.lab.bench.measure import Step, compare, measure
from gxd.lab.conduct import torch_as_it_was
from gxd.lab.leaderboard.plan import Place
from gxd.lab.leaderboard.records import ByStream, read_by_stream
from gxd.lab.steps import eager_step, prediction
from gxd.lab.streams import Stream
from gxd.lab.training import Training

TIMES = "times.json"
BATCHES = 8
Times = ByStream[float]
"""Stream -> method -> the time of a step relative to backprop."""


def time_ratios(
    places: Sequence[Place], stream: Stream, *, steps: int = 10, rounds: int = 40
) -> dict[str, float | str]:
    """Entry -> the time of its step relative to that of the first of them, which is backprop; or why there is none.

    The network and the batches are those of the stream, and the steps are eager for all, for not every method can be
    compiled. Events at boundaries are not in it.
    """
    variants = {place.entry.name: partial(_make, place, stream) for place in places}
    with torch_as_it_was():
        torch.set_num_threads(1)
        rows = compare("leaderboard", "", measure(variants, steps=steps, rounds=rounds, warmup=5))
    failed = {row.variant: row.note.removeprefix("failed: ") for row in rows}
    return {row.variant: failed[row.variant] if row.ratio is None else round(row.ratio, 3) for row in rows}


def _make(place: Place, stream: Stream) -> Step:
    config = replace(place.track.config(place.settings[0], place.protocol.tuning_seeds[0]), compile="no")
    training = Training(config, stream, torch.device("cpu"))
    training.model.train()
    score = None if config.classifies else prediction
    step = eager_step(training.model, training.optimizer, config.loss, training.attached, score=score)
    turn = itertools.cycle(list(islice(config.batches(stream.task(0)), BATCHES)))
    return lambda: step(*next(turn))


def read_times(out: Path) -> Times:
    """What was measured."""
    return read_by_stream(out / TIMES, float)
