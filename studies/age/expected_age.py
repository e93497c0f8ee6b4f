"""Ranking by ``u / E[u | age] ** exponent``: what ``ranking="age"`` was when the age study was made.

A unit is compared with units of its own group and age, so a newborn unit is not chosen just because it is new. Today
gxd ranks by ``u / age``, which is simpler and better. Importing this file registers the method ``expected_age``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import gxd
from gxd.plan.units import UnitPlan
from gxd.score.state import UnitState, averaged, corrected

BUCKETS = 64  # half octaves: ages up to 2 ** 32
EVERY = 10  # steps between two looks at what units of each age are worth
DECAY = 0.99  # per look


class AgeMeans(NamedTuple):
    """``(groups * buckets,)`` the running mean of the utilities of units of an age, and its weight."""

    mean: Tensor
    weight: Tensor


class ExpectedAge(gxd.Normalise):
    """``u / E[u | age] ** exponent``: the expectation is a running mean over the units of a group, per half octave of
    age.

    Args:
        exponent: 0 is the utility itself.
    """

    def __init__(self, exponent: float = 0.5) -> None:
        self.exponent = exponent

    def init(self, plan: UnitPlan, units: UnitState) -> AgeMeans:
        zeros = units.utility.new_zeros(len(plan.groups) * BUCKETS)
        return AgeMeans(zeros, zeros)

    def advance(self, plan: UnitPlan, units: UnitState, state: AgeMeans, due: bool) -> AgeMeans:
        if not due and units.step % EVERY:
            return state
        observed = units.utility_weight > 0  # units that were never scored say nothing
        bucket, utility = buckets(plan, units)[observed], units.utilities()[observed]
        total = torch.zeros_like(state.mean).index_add_(0, bucket, utility)
        count = torch.zeros_like(state.mean).index_add_(0, bucket, torch.ones_like(utility))
        return AgeMeans(*averaged(state, total / count.clamp(min=1), count > 0, DECAY))

    def __call__(self, plan: UnitPlan, units: UnitState, state: AgeMeans) -> UnitState:
        utility = units.utility / units.utility_weight  # NaN where nothing was observed
        worth = corrected(state)[buckets(plan, units)].pow(self.exponent)
        judged = torch.where(worth > 0, utility / worth, utility)
        return units._replace(utility=judged, utility_weight=torch.ones_like(judged))


def buckets(plan: UnitPlan, units: UnitState) -> Tensor:
    """``(units,)`` the index of each unit's group and age in :class:`AgeMeans`."""
    bucket = (2 * units.ages().clamp(min=1).double().log2()).floor().long().clamp(max=BUCKETS - 1)
    sizes = torch.tensor([group.size for group in plan.groups])
    group = torch.arange(len(sizes)).repeat_interleave(sizes)
    return group.to(bucket.device) * BUCKETS + bucket


@gxd.register_method(
    "expected_age",
    description="continual backprop, ranked by u / E[u | age] ** exponent",
    inert={"replacement_rate": 0.0},
    changes="units: new incoming weights, no outgoing ones, their mean into biases, optimizer state of these",
)
def expected_age(
    utility: str = "gxd", replacement_rate: float = 1e-3, maturity: int = 100, exponent: float = 0.5
) -> gxd.Method:
    """The rule of the study. With ``exponent=0`` it is ``continual_backprop``."""
    return gxd.UnitReset(
        utility, gxd.LowestRate(replacement_rate, maturity), normalise=ExpectedAge(exponent), decay=0.99
    )
