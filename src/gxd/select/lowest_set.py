"""The set of units whose joint reset changes the output least, at a rate."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gxd.score.state import UnitState
from gxd.select.lowest import LowestRate


class LowestSet(LowestRate):
    """:class:`gxd.LowestRate`, but the k units go that are cheapest *together*.

    Units that are reset at once have a joint effect: two that say the same cost four times as much as one in squares,
    two that say the opposite cost nothing. To first order, with the signed effects e_i of a utility, the cost of a set
    S is ``E[(sum of e_i over S)^2] = 1' G 1`` with ``G_ij = E[e_i e_j]`` over S; where the network behind the units is
    linear it is exact. G is a running mean, and S grows greedily, always by the unit that adds least: ``G_ii + 2 sum of
    G_ij over S``. With k = 1, as at low rates, that is the unit of smallest squared effect.

    It needs a utility that is made of effects: ``gxi``, ``gxd``, ``gxd_all_logit``, ``gxd_sketch``, ``gxd_kl``. The
    running mean takes n^2 numbers for a group of n units, and the observation as many multiplications per example.

    Args:
        rate, maturity, score_every: as for :class:`gxd.LowestRate`.

    Example::

        method = gxd.UnitReset("gxd_sketch", gxd.LowestSet(rate=1e-3))
    """

    pairs = True

    def __init__(self, rate: float = 1e-4, maturity: int = 100, score_every: int = 1) -> None:
        super().__init__(rate, maturity, score_every)

    def choose(self, units: UnitState, group: int, where: slice, order: Tensor, mature: Tensor, count: int) -> Tensor:
        return lowest_set(units.joint(group, where), mature[where], count)


def lowest_set(gram: Tensor, eligible: Tensor, count: int) -> Tensor:
    """Indices of ``count`` eligible units whose joint cost ``1' G 1`` is low, chosen greedily; ascending.

    Args:
        gram: ``(n, n)``; NaN in the rows and columns of units that were never observed, which come last.
        eligible: ``(n,)`` whether each unit may be reset.
        count: how many; at most as many as are eligible.
    """
    largest = torch.finfo(gram.dtype).max / 4  # so that what is added to it leaves it below infinity
    added = torch.where(eligible, gram.diagonal().nan_to_num(largest).clamp(max=largest), math.inf)
    twice, chosen = 2 * gram.nan_to_num(0.0), []
    for _ in range(count):
        unit = added.argmin(0, keepdim=True)
        chosen.append(unit)
        added = (added + twice.index_select(0, unit).squeeze(0)).index_fill_(0, unit, math.inf)
    return torch.cat(chosen).sort().values
