"""Student's t distribution, with Python alone: the interval of a mean over few seeds."""

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
