"""The distribution that fresh incoming weights are drawn from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_SAMPLE = 10_000  # elements looked at: enough to tell a uniform from a normal, and cheap for any layer
_CRITICAL = 1.95  # Kolmogorov-Smirnov critical value at the 0.1% level, times sqrt(n)


@dataclass(frozen=True)
class Init:
    """A distribution for weights: ``uniform`` on [-scale, scale], ``normal`` with standard deviation ``scale``, or
    the ``constant`` ``scale``.

    ``function``, if given, is used instead: it is called as ``function(tensor, generator=generator)`` on a tensor of
    the *whole* weight's shape (fans computed from a slice would be wrong), as the functions of :mod:`torch.nn.init`
    are.
    """

    kind: str
    scale: float
    function: Callable[..., object] | None = None

    def __str__(self) -> str:
        if self.function is not None:
            return getattr(self.function, "__name__", "custom")
        return f"{self.kind}({self.scale:.3g})"

    @property
    def mean(self) -> float:
        """Of the distribution, if it is one of the three."""
        return self.scale if self.kind == "constant" else 0.0

    @property
    def deviation(self) -> float:
        """Its standard deviation."""
        return {"constant": 0.0, "uniform": self.scale / math.sqrt(3), "normal": self.scale}[self.kind]

    def draw(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Draw float32 values of the given shape on the CPU, so that a seed gives the same weights on every device."""
        fresh = torch.empty(shape)
        if self.kind == "uniform":
            return fresh.uniform_(-self.scale, self.scale, generator=generator)
        if self.kind == "constant":
            return fresh.fill_(self.scale)
        return fresh.normal_(0.0, self.scale, generator=generator)


def fit(weight: Tensor, default_bound: float | None) -> Init:
    """Which distribution the weights were drawn from.

    The layer's default (uniform on +-``default_bound``) if it fits, else a uniform or a normal of the observed scale
    if one fits, else the default: weights that fit nothing have been trained, or are zero. Without a default, these are
    drawn from a normal of the observed scale.
    """
    default = Init("uniform", default_bound) if default_bound is not None else Init("normal", 1.0)
    if weight.is_meta:  # not made yet
        return default
    values = weight.detach().flatten()
    values = values[:: max(1, values.numel() // _SAMPLE)].double().cpu()
    if values.numel() < 2 or not values.isfinite().all() or values.std() == 0:
        return default
    critical = _CRITICAL / math.sqrt(values.numel())
    largest = weight.detach().abs().max().item()
    if default_bound is not None and largest <= default_bound * 1.001 and _distance(values, default) < critical:
        return default
    n = weight.numel()
    uniform = Init("uniform", largest * (n + 1) / n)
    normal = Init("normal", values.square().mean().sqrt().item())
    distance, best = min(((_distance(values, c), c) for c in (uniform, normal)), key=lambda pair: pair[0])
    return best if distance < critical else default if default_bound is not None else normal


def _distance(values: Tensor, init: Init) -> float:
    """Kolmogorov-Smirnov distance between the sample and a distribution."""
    values = values.sort().values
    if init.kind == "uniform":
        cdf = ((values / init.scale + 1) / 2).clamp(0, 1)
    else:
        cdf = torch.special.ndtr(values / init.scale)
    n = values.numel()
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return max((steps[1:] - cdf).max().item(), (cdf - steps[:-1]).max().item())
