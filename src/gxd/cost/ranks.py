"""Ranks and what is read off them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def ranks(values: Tensor) -> Tensor:
    """``(n,)`` ranks from 1, in float64; equal values share the mean of their ranks."""
    _, place, count = torch.unique(values, return_inverse=True, return_counts=True)
    last = count.cumsum(0).double()
    return (last - (count - 1) / 2)[place]


def spearman(left: Tensor, right: Tensor) -> float:
    """The rank correlation of two vectors; NaN if either is constant, shorter than two or not finite."""
    if len(left) < 2 or not bool(left.isfinite().all() & right.isfinite().all()):
        return math.nan
    a, b = ranks(left), ranks(right)
    a, b = a - a.mean(), b - b.mean()
    scale = float(a.norm() * b.norm())
    return float(a @ b) / scale if scale > 0 else math.nan


def mean_of_lowest(scores: Tensor, values: Tensor, fraction: float) -> float:
    """The mean value of the ``ceil(fraction * n)`` units with the lowest scores.

    Of units whose scores tie at the border, any may be taken: their mean value stands in. NaN if a score is.
    """
    scores, values = scores.double(), values.double()
    if bool(scores.isnan().any()):
        return math.nan
    # Without the small number, 0.05 * 20 would be a little more than 1.
    k = min(len(scores), max(1, math.ceil(fraction * len(scores) - 1e-9)))
    border = scores.kthvalue(k).values
    below, tied = values[scores < border], values[scores == border]
    return float((below.sum() + tied.mean() * (k - len(below))) / k)


def mean_over_groups(by_group: Mapping[str, float]) -> float:
    """The mean over the groups where it is defined; NaN if there is none."""
    defined = [value for value in by_group.values() if not math.isnan(value)]
    return sum(defined) / len(defined) if defined else math.nan
