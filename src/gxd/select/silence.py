"""Units that have been silent for longer than their own history lets expect."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gxd import arguments
from gxd.plan.units import UnitPlan
from gxd.score.state import UnitState
from gxd.select.base import Selection, Selector

# The lengths at which the bins of a histogram begin: half octaves, one by one while they are short.
EDGES = tuple(sorted({math.ceil(2 ** (k / 2)) for k in range(41)}))


class Silences(NamedTuple):
    """The state of :class:`SilenceTest`.

    Attributes:
        silent: ``(units,)`` for how many observed steps in a row each unit has not fired.
        limit: ``(units,)`` the length of silence at which it goes.
        counts: ``(units, bins)`` how many of its silences were of which length, since the last calibration.
    """

    silent: Tensor
    limit: Tensor
    counts: Tensor


class SilenceTest(Selector):
    """SNR's rule: a unit goes when it has been silent for longer than nearly all of its own silences so far.

    A unit is silent in a step if its utility in that step is 0, so utilities are not averaged (``decay=0``). Every
    ``calibrate`` steps the limit of each unit becomes the ``1 - rejection`` quantile of the silences that have ended
    since (those that a reset has ended, too), or twice what it was if that is not shorter; a unit without any keeps its
    limit.

    Args:
        rejection: the share of its silences that a unit may be reset for by mistake.
        most: the limit of all units at first, and the largest, in steps.
        calibrate: steps between two calibrations.
        every: steps between two tests; 0: never. A test waits for the device.
    """

    decay = 0.0

    def __init__(self, rejection: float = 0.02, most: int = 1000, calibrate: int = 1000, every: int = 1) -> None:
        self.rejection = arguments.number("rejection", rejection, 0.0, 1.0)
        self.most = arguments.every("most", most)
        self.calibrate = arguments.every("calibrate", calibrate)
        self.every = arguments.every("every", every, least=0)

    def init(self, plan: UnitPlan, units: UnitState) -> Silences:
        none = torch.zeros_like(units.birth)
        return Silences(none, torch.full_like(none, self.most), none.new_zeros(len(none), len(EDGES)))

    def observes(self, step: int) -> bool:
        return self.every > 0

    def advance(self, plan: UnitPlan, units: UnitState, state: Silences) -> tuple[Silences, bool]:
        if not self.every:
            return state, False
        if units.scored == units.step:
            fires, seen = units.utility > 0, units.seen
            ended = fires & (state.silent > 0)
            silent = torch.where(fires, 0, state.silent + 1)
            if seen is not None:
                ended, silent = ended & seen, torch.where(seen, silent, state.silent)
            state = Silences(silent, state.limit, _counted(state, ended))
        if units.step % self.calibrate == 0:
            state = self._calibrated(state)
        return state, units.step % self.every == 0

    def select(
        self, plan: UnitPlan, units: UnitState, state: Silences, allowed: Callable[[int], bool]
    ) -> tuple[Selection, Silences]:
        over = (state.silent >= state.limit).cpu()
        found = {number: over[where].nonzero().flatten() for number, where in enumerate(plan.unit_slices)}
        return {number: index for number, index in found.items() if len(index) and allowed(number)}, state

    def forgotten(self, state: Silences, units: Tensor) -> Silences:
        reset = torch.zeros_like(state.silent, dtype=torch.bool).index_fill(0, units.to(state.silent.device), True)
        counts = _counted(state, reset & (state.silent > 0))
        return Silences(torch.where(reset, 0, state.silent), state.limit, counts)

    def idle(self, plan: UnitPlan) -> bool:
        return self.every == 0

    def _calibrated(self, state: Silences) -> Silences:
        """New limits, by the largest length of the bin in which the quantile lies."""
        total = state.counts.sum(1)
        reached = state.counts.cumsum(1) >= ((1 - self.rejection) * total).unsqueeze(1)
        last = torch.tensor([edge - 1 for edge in EDGES[1:]] + [EDGES[-1]], device=total.device)
        quantile = last[reached.int().argmax(1)]
        limit = torch.where(quantile < state.limit, quantile, 2 * state.limit).clamp(1, self.most)
        return Silences(state.silent, torch.where(total > 0, limit, state.limit), torch.zeros_like(state.counts))


def _counted(state: Silences, ended: Tensor) -> Tensor:
    """The histograms with the silences of these units taken in."""
    edges = torch.tensor(EDGES, device=state.silent.device)
    bins = torch.bucketize(state.silent.clamp(min=1), edges, right=True) - 1
    return state.counts.scatter_add(1, bins.unsqueeze(1), ended.long().unsqueeze(1))
