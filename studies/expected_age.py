"""What units of each age are worth: E[u | age] of every group, in half-octave buckets of age."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gxd.plan.units import UnitPlan
from gxd.score.state import UnitState, averaged, corrected

BUCKETS = 64  # half octaves: ages up to 2 ** 32
_DECAY = 0.99  # per look


class AgeMeans(NamedTuple):
    """``(groups * buckets,)`` the running mean of the utilities of units of an age, and its weight."""

    mean: Tensor
    weight: Tensor

    @classmethod
    def new(cls, plan: UnitPlan, units: UnitState) -> AgeMeans:
        """Before anything was seen."""
        zeros = units.utility.new_zeros(len(plan.groups) * BUCKETS)
        return cls(zeros, zeros)


def with_units(ages: AgeMeans, plan: UnitPlan, units: UnitState) -> AgeMeans:
    """The means with the utilities of now taken in. Units that were never scored say nothing."""
    observed = units.utility_weight > 0
    bucket, utility = _buckets(plan, units)[observed], units.utilities()[observed]
    total = torch.zeros_like(ages.mean).index_add_(0, bucket, utility)
    count = torch.zeros_like(ages.mean).index_add_(0, bucket, torch.ones_like(utility))
    return AgeMeans(*averaged(ages, total / count.clamp(min=1), count > 0, _DECAY))


def expected(ages: AgeMeans, plan: UnitPlan, units: UnitState) -> Tensor:
    """``(units,)`` E[u | age] of each unit; 0 where units of that age were never seen."""
    return corrected(ages)[_buckets(plan, units)]


def _buckets(plan: UnitPlan, units: UnitState) -> Tensor:
    bucket = (2 * units.ages().clamp(min=1).double().log2()).floor().long().clamp(max=BUCKETS - 1)
    sizes = torch.tensor([group.size for group in plan.groups])
    group = torch.arange(len(sizes)).repeat_interleave(sizes)
    return group.to(bucket.device) * BUCKETS + bucket
