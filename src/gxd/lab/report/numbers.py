"""The few statistics of the report: means with their errors, rates with their intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import NormalDist
from typing import NamedTuple

from gxd.diagnose.student import quantile

Z = NormalDist().inv_cdf(0.975)


class Mean(NamedTuple):
    """A mean, its standard error (NaN for a single value) and the number of values."""

    value: float
    se: float
    n: int


class Interval(NamedTuple):
    """An estimate between two bounds."""

    value: float
    low: float
    high: float


def mean(values: Iterable[float | None]) -> Mean:
    """Mean and standard error of what is there and finite."""
    kept = [value for value in values if value is not None and math.isfinite(value)]
    n = len(kept)
    if n == 0:
        return Mean(math.nan, math.nan, 0)
    centre = math.fsum(kept) / n
    if n == 1:
        return Mean(centre, math.nan, 1)
    spread = math.sqrt(math.fsum((value - centre) ** 2 for value in kept) / (n - 1))
    return Mean(centre, spread / math.sqrt(n), n)


def margin(value: Mean) -> float:
    """Half of the 95 % t interval of a mean (NaN for a single value, which compares with nothing)."""
    return quantile(0.95, value.n - 1) * value.se if value.n > 1 else math.nan


def weighted(values: Iterable[float | None], weights: Iterable[float | None]) -> float:
    """The mean of what is there and finite, by weight; NaN of nothing, or without any weight."""
    pairs = [(a, w) for a, w in zip(values, weights, strict=True) if w and a is not None and math.isfinite(a)]
    total = math.fsum(weight for _, weight in pairs)
    return math.fsum(value * weight for value, weight in pairs) / total if total else math.nan


def wilson(count: float, n: int) -> Interval:
    """Wilson's 95 % interval of a rate. It stays inside [0, 1] and is honest at 0 of n."""
    if n == 0:
        return Interval(math.nan, 0.0, 1.0)
    rate, z2 = count / n, Z * Z
    centre = (rate + z2 / (2 * n)) / (1 + z2 / n)
    half = Z / (1 + z2 / n) * math.sqrt(rate * (1 - rate) / n + z2 / (4 * n * n))
    return Interval(rate, max(0.0, centre - half), min(1.0, centre + half))


def rate_difference(count: float, n: int, count0: float, n0: int) -> Interval:
    """Newcombe's 95 % interval of the difference of two rates, built from the two Wilson intervals."""
    a, b = wilson(count, n), wilson(count0, n0)
    difference = a.value - b.value
    return Interval(
        difference,
        difference - math.hypot(a.value - a.low, b.high - b.value),
        difference + math.hypot(a.high - a.value, b.value - b.low),
    )


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """The mean difference of pairs with its 95 % t interval (unbounded for a single pair)."""
    result = mean(a - b for a, b in zip(ours, theirs, strict=True))
    if result.n < 2:
        return Interval(result.value, -math.inf, math.inf)
    half = margin(result)
    return Interval(result.value, result.value - half, result.value + half)
