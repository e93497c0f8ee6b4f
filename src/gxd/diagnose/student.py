"""Student's t distribution, with Python alone: intervals of a mean, and of one network among fresh ones."""

from __future__ import annotations

import math

from torch import Tensor


def within(t: float, degrees: int) -> float:
    """P(|T| <= t) of Student's t with a whole number of degrees of freedom, by its finite series in the angle
    ``atan(t / sqrt(degrees))`` (Abramowitz and Stegun 26.7.3-4).
    """
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1 + odd, degrees, 2):  # 1, 3, ... or 2, 4, ...
        total += term
        term *= cosine * cosine * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def quantile(confidence: float, degrees: int) -> float:
    """The t with P(|T| <= t) = confidence."""
    low, high = 0.0, 1.0
    while within(high, degrees) < confidence:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, degrees) < confidence else (low, middle)
    return high


def interval(values: Tensor, confidence: float) -> tuple[float, float]:
    """Of the mean of ``(n,)`` values, n at least 2."""
    mean, half = float(values.mean()), float(values.std()) / math.sqrt(len(values))
    half *= quantile(confidence, len(values) - 1)
    return mean - half, mean + half


def shares(confidence: float, looks: int) -> list[float]:
    """The confidence of each look at data that grow until the result is clear.

    The chance of an error, 1 - confidence, is split over the looks, so all intervals hold together at ``confidence``
    wherever one stops (Bonferroni). The last look has half of it, the earlier ones share the rest.
    """
    error = 1 - confidence
    return [1 - error / 2 / (looks - 1)] * (looks - 1) + [1 - error / 2] if looks > 1 else [confidence]


def ratio(one: Tensor, others: Tensor, confidence: float) -> tuple[float, float]:
    """Interval of what one network learns, as a multiple of what a single network of another kind learns.

    The network is a draw, too: under the hypothesis that it is ``r`` times a further network of the other kind,
    ``mean(others) - mean(one) / r`` varies around 0 by two things:

    - the luck of a further network and that of the mean of the others, ``sd(others) * sqrt(1 + 1/n)``, as in a
      prediction interval: the 1 is the luck of the one network, which no number of others averages out;
    - the runs of the network, ``sd(one) / sqrt(m) / r``, as in the interval of a mean.

    Each is taken times its quantile of Student's t, with ``n - 1`` and ``m - 1`` degrees of freedom, and their squares
    are added (MOVER; Zou and Donner 2008, in the form of Fieller 1954). The interval holds every r for which the
    difference is within that. For fresh networks it errs to the safe side, because the luck of the order of the data
    is part of both.

    Args:
        one: ``(m,)`` not negative, of several runs of the one network.
        others: ``(n,)`` with a mean above 0, one run of each.

    Returns:
        The ends. The upper one is ``math.inf`` if the others vary so much that a further one may learn nothing.
    """
    x, y = one.double(), others.double()
    if not bool(x.any()):
        return 0.0, 0.0
    m, n = len(x), len(y)
    runs = quantile(confidence, m - 1) ** 2 * float(x.var()) / m
    luck = quantile(confidence, n - 1) ** 2 * float(y.var()) * (1 + 1 / n)
    # (mean(y) - mean(x) / r)^2 = luck + runs / r^2 at the ends: a - 2 b r + c r^2 = 0.
    a, b, c = float(x.mean()) ** 2 - runs, float(x.mean() * y.mean()), float(y.mean()) ** 2 - luck
    top = b + math.sqrt(max(0.0, b * b - a * c))
    return (a / top if a > 0 else 0.0), (top / c if c > 0 else math.inf)
