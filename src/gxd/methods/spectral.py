"""Spectral regularisation: the largest singular value of every layer is held near one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gxd import arguments
from gxd.methods.base import Host, Method
from gxd.methods.penalty import Penalty, penalised
from gxd.methods.registry import register_method
from gxd.methods.scope import BIAS, GAIN, SHIFT, WEIGHT, Exclude, wide

WARM_UP = 15  # power iterations before the first step, as of torch's own spectral_norm


class Top(NamedTuple):
    """What power iteration knows of a matrix: its largest singular value, and the vectors that belong to it."""

    left: Tensor
    right: Tensor
    value: Tensor


class Spectral(Penalty):
    """Its state is :class:`Top` for weights, and the kind of all else."""

    kinds = (WEIGHT, BIAS, GAIN, SHIFT)

    def __init__(self, strength: float, power: float, exclude: Exclude) -> None:
        super().__init__(strength, exclude)
        self.power = arguments.number("power", power, 1.0)

    def init(self, host: Host) -> dict[str, Top | str]:
        known, named = super().init(host), dict(host.model.named_parameters())
        for name, kind in known.items():
            if kind == WEIGHT:
                known[name] = _begin(_matrix(named[name]), host.generator)
        return known

    def prepared(self, host: Host, state: dict[str, Top | str]) -> dict[str, Top | str]:
        new = dict(state)
        for name, parameter, *_ in host.trained():
            top = state.get(name)
            if isinstance(top, Top):
                new[name] = _iterated(_matrix(parameter), top)
        return new

    def gradient(self, host: Host, state: dict[str, Any], name: str, parameter: Tensor) -> Tensor:
        known, k = state[name], self.power
        if known == GAIN:
            return 2.0 * (parameter - 1.0)
        if isinstance(known, str):
            values = wide(parameter)
            return 2.0 * k * values.square().sum() ** (k - 1.0) * values
        slope = 2.0 * k * (known.value**k - 1.0) * known.value ** (k - 1.0)
        # The singular value of a matrix that is not finite is not a number, and its vectors are those of before.
        return torch.outer(slope * known.left, known.right).view_as(parameter).nan_to_num_(0.0, 0.0, 0.0)


def _matrix(parameter: Tensor) -> Tensor:
    """``(out, rest)``, as most layers lay out a weight."""
    return wide(parameter.detach()).flatten(1)


def _begin(matrix: Tensor, generator: torch.Generator) -> Top:
    """Draws on the CPU, so that a seed gives the same on every device."""
    left, right = (torch.randn(size, generator=generator).to(matrix) for size in matrix.shape)
    top = Top(left / left.norm(), right / right.norm(), torch.zeros_like(left[0]))
    for _ in range(WARM_UP):
        top = _iterated(matrix, top)
    return top


def _iterated(matrix: Tensor, top: Top) -> Top:
    """One power iteration. A matrix of zeros leaves the vectors as they are."""
    before = top.left.to(matrix), top.right.to(matrix)  # the model may have changed its type since
    right, _ = _direction(matrix.mT @ before[0], before[1])
    left, value = _direction(matrix @ right, before[0])
    return Top(left, right, value)


def _direction(vector: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    length = vector.norm()
    return torch.where(length > 0, vector / length, before), length


@register_method(
    "spectral",
    description="hold the largest singular value of every layer near one, biases near zero and gains near one",
    reference="Lewandowski et al.: Learning Continually by Spectral Regularization, ICLR 2025",
    inert={"strength": 0.0},
    changes="weights, biases, gains of norms",
)
def spectral(strength: float = 1e-3, power: float = 2.0, decoupled: bool = False, exclude: Exclude = ()) -> Method:
    """Goes down the gradient of ``strength * [sum (sigma_max(W)^k - 1)^2 + sum |b|^(2k) + sum |gamma - 1|^2]``, where k
    is the ``power``, over all weights, biases (those of norms too) and gains of norms; it is added to that of the loss.

    ``sigma_max`` and its singular vectors u, v are those of one power iteration per step, which goes on from the last;
    its gradient is ``u v'``. A weight is a matrix ``(out, rest)``; embeddings and other parameters are left alone.
    The equation was read in another project's notes on the paper, for which no code was found.

    Args:
        strength: no grid was found; 1e-3 is ours.
        power: k, 1 or more; the paper's is 2.
        decoupled: False: the gradient of the penalty is added to that of the loss, which Adam then rescales, as in the
            paper and in our evidence. True: it is gone down after the step, with each parameter's learning rate.
        exclude: names of parameters or modules that are left out, with wildcards; ``"head"`` is the last layer.
    """
    return penalised(Spectral(strength, power, exclude), decoupled)
