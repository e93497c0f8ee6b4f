"""Whether a method can be on a stream, and whether it keeps to what methods may change: seen before the runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from gxd.lab.conduct import EXAMPLES, MAY_NOT, torch_as_it_was
from gxd.lab.errors import UserError, first_line
from gxd.lab.leaderboard.plan import Place
from gxd.lab.steps import make_step
from gxd.lab.streams import Stream
from gxd.lab.training import Training

STEPS = 8  # on each side of a boundary


def objection(place: Place, stream: Stream) -> str:
    """Why an entry cannot be on a stream; empty if nothing speaks against it.

    Each of its own settings trains for a few steps, and through a boundary. What a method may not change, see
    :class:`gxd.lab.conduct.Conduct`, is looked at after every step: what comes of it would not say who did it.
    """
    if place.refusal:
        return place.refusal
    for values in place.settings:
        if values["lr"] != place.track.rates[0]:
            continue
        try:
            with torch_as_it_was():
                torch.seed()  # a state that no method could have left behind
                _try(replace(place.track.config(values, place.protocol.tuning_seeds[0]), compile="no"), stream)
        except UserError as error:
            return str(error)
        except (Exception, SystemExit) as error:  # whatever a method raises is a row of the board
            return f"it raises {type(error).__name__}: {first_line(error)}"
    return ""


def _try(config: Any, stream: Stream) -> None:
    training = Training(config, stream, torch.device("cpu"))
    if training.attached is None:
        return
    training.model.train()
    step = make_step(training.config, training.model, training.optimizer, training.attached)
    for number in range(2):
        task = stream.task(number)
        training.new_task(task)
        for x, y in islice(config.batches(task), STEPS):
            kept = x.clone(), y.clone()
            step(x, y)
            if not torch.equal(x, kept[0]) or not torch.equal(y, kept[1]):
                raise UserError(MAY_NOT.format(EXAMPLES))
            wrong = training.conduct.broken()
            if wrong:
                raise UserError(wrong)
