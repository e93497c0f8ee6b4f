"""Whether a method can be on a stream, and whether it keeps to what methods may change: seen before the runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from gxd.lab.errors import UserError, first_line
from gxd.lab.leaderboard.plan import Place
from gxd.lab.steps import make_step
from gxd.lab.streams import Stream
from gxd.lab.training import Training

STEPS = 8  # on each side of a boundary


def objection(place: Place, stream: Stream) -> str:
    """Why an entry cannot be on a stream; empty if nothing speaks against it.

    Each of its own settings trains for a few steps, and through a boundary. A method may write to the parameters that
    are trained, to what the optimizer remembers of them, and to what its ``also_changes`` names.
    """
    if place.refusal:
        return place.refusal
    for values in place.settings:
        if values["lr"] != place.track.rates[0]:
            continue
        try:
            with torch.random.fork_rng(devices=[]):
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
    before = _fixed(training)
    step = make_step(training.config, training.model, training.optimizer, training.attached)
    for number in range(2):
        task = stream.task(number)
        training.new_task(task)
        for x, y in islice(config.batches(task), STEPS):
            kept = x.clone(), y.clone()
            step(x, y)
            if not torch.equal(x, kept[0]) or not torch.equal(y, kept[1]):
                raise UserError("it changes the examples that are learned, which a method may not")
    after = _fixed(training)
    for what, value in before.items():
        if value != after[what]:
            raise UserError(f"it changes {what}, which a method may not")


def _fixed(training: Training) -> dict[str, Any]:
    """All that must stay as it is, in words -> what can be compared."""
    model = training.model
    groups = training.optimizer.param_groups
    fixed: dict[str, Any] = {
        "which tensors are the parameters": [(n, id(p), p.shape, p.dtype) for n, p in model.named_parameters()],
        "which parameters are trained": [[id(p) for p in group["params"]] for group in groups],
        "the learning rate or another setting of the optimizer": [
            {name: value for name, value in group.items() if name != "params"} for group in groups
        ],
        "the training mode of the model": [module.training for module in model.modules()],
        "torch's global random state": torch.get_rng_state().tolist(),
    }
    assert training.attached is not None
    if not any("requires_grad" in method.also_changes for method in training.attached.methods):
        fixed["requires_grad of parameters"] = [p.requires_grad for p in model.parameters()]
    return fixed
