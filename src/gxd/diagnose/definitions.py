"""The metrics of a network: one definition each, as a function of tensors. None of them raises on a dead network."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

DORMANT = 0.025
"""A unit is dormant if its mean |h| is at most this share of its layer's."""
FLAT, LINEAR = 0.1, 0.9
"""An activation is flat up to the first share of its steepest slope, and linear from the second on."""
QUANTILES = (0.05, 0.5, 0.95)
"""Of the utilities."""

DEFINITIONS: dict[str, str] = {
    "units": "hidden units that the plan covers",
    "dormant": "share of the units whose mean |h| over examples and positions is at most a threshold (0.025) times the "
    "mean of their group (Sokar et al. 2023); a unit that several tensors carry must be dormant in all. Small outputs "
    "only: a saturated tanh unit is not dormant",
    "saturation": "share of the values (units x examples x positions) at which the activation is flat: its slope is at "
    "most 0.1 of its steepest (1 for ReLU, tanh and SiLU). ReLU: not active; tanh: |h| above 0.95; SiLU: far below "
    "zero. NaN where units have no activation of their own",
    "never_active": "share of the units whose activation is flat at every example and position: a dead ReLU, a tanh "
    "that is stuck at either end",
    "always_active": "share of the units whose activation is linear (slope at least 0.9 of the steepest) at every "
    "example and position: a ReLU that is always on",
    "effective_rank": "exp of the entropy of the normalised singular values of the features (Roy and Vetterli 2007), "
    "not centred; rows: examples and positions, columns: units. Overall: the features are what the last layer of "
    "weights reads. 0 if all features are 0",
    "stable_rank": "squared Frobenius norm over squared spectral norm of the same features; 0 if they are 0",
    "weight_norm": "L2 norm of the incoming weights of the units; overall: of all parameters with two or more axes",
    "bias_norm": "L2 norm of the incoming biases of the units; overall: of all parameters named bias",
    "gradient_norm": "L2 norm of the gradient of the loss by the incoming weights and biases of the units; overall: by "
    "all trained parameters. In evaluation mode. NaN without a target",
    "utility_05": "5 % quantile over the units of their utility, scored on these inputs with exact references",
    "utility_50": "the median of the same",
    "utility_95": "the 95 % quantile of the same",
}
"""Metric of :func:`gxd.diagnose` -> its definition."""


def dormant(magnitude: Tensor, threshold: float = DORMANT) -> Tensor:
    """``(units,)`` which units of a layer are dormant, by their mean |h|. In a layer that is all 0, all are."""
    return magnitude <= threshold * magnitude.mean()


def saturation(slopes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Share of flat values, of units that are never and of units that are always active.

    Args:
        slopes: ``(values, units)`` the slope of the activation at each value, as a share of its steepest.
    """
    flat, linear = slopes.abs() <= FLAT, slopes.abs() >= LINEAR
    broken = 0 * slopes.sum()  # infinity and NaN times 0 are NaN
    shares = (flat, flat.all(0), linear.all(0))
    never, some, every = (share.double().mean() + broken for share in shares)
    return never, some, every


def ranks(features: Tensor) -> tuple[Tensor, Tensor]:
    """Effective and stable rank of a matrix ``(examples, features)``; 0 if it is zero, NaN if it is not finite."""
    matrix = features.double()
    gram = matrix.mT @ matrix if matrix.shape[0] >= matrix.shape[1] else matrix @ matrix.mT
    if not bool(gram.isfinite().all()):
        return gram.new_tensor(math.nan), gram.new_tensor(math.nan)
    # The squares of the singular values. What the squaring loses is below 1e-8 of the largest.
    squares = torch.linalg.eigvalsh(gram).clamp_min(0)
    largest = squares[-1]
    if not bool(largest > 0):
        return gram.new_zeros(()), gram.new_zeros(())
    share = squares.sqrt() / squares.sqrt().sum()
    return torch.special.entr(share).sum().exp(), squares.sum() / largest


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """The L2 norm of all elements of some tensors; 0 if there are none."""
    if not tensors:
        return torch.zeros(())
    return torch.stack(torch._foreach_norm([t.detach() for t in tensors])).norm()


def quantiles(utilities: Tensor) -> Tensor:
    """``(len(QUANTILES),)`` of the utilities that are finite; NaN if there are none."""
    finite = utilities[utilities.isfinite()].double()
    if not len(finite):
        return torch.full((len(QUANTILES),), math.nan, dtype=torch.float64)
    at = torch.tensor(QUANTILES, dtype=torch.float64, device=finite.device) * (len(finite) - 1)
    values = finite.sort().values  # torch.quantile takes no more than 16 million
    return torch.lerp(values[at.floor().long()], values[at.ceil().long()], at.frac())


def readiness(loss: float, gradient: float, batches: Sequence[float]) -> float:
    """Optimization readiness, ``|g|^4 / (L E|g_B|^2)`` (arXiv 2605.09044): how much of the loss one step of the best
    size can remove, up to the curvature: the strength of the gradient, times its reliability ``|g|^2 / E|g_B|^2``.

    Args:
        loss: L, the mean loss. NaN unless it is above 0.
        gradient: the squared norm of its gradient g.
        batches: the squared norms of the gradients of single batches.
    """
    spread = sum(batches) / len(batches)
    if not loss > 0 or not math.isfinite(spread):
        return math.nan
    return gradient * gradient / (loss * spread) if spread > 0 else 0.0
