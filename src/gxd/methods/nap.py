"""Normalize-and-Project: weights that are followed by norms keep the length that they began with."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gxd import arguments
from gxd.errors import PlanError
from gxd.methods.base import Host, Method
from gxd.methods.registry import register_method
from gxd.methods.scope import GAIN, SHIFT, WEIGHT, Exclude, patterns, treated, wide
from gxd.reset.fresh import is_norm

AFFINE = ("decay", "project", "keep")
STRENGTH = 1e-2


class Lengths(NamedTuple):
    """The state of :class:`NaP`.

    Attributes:
        step: how many steps were taken.
        of: the length that each weight began with, by name; of a gain or a shift of a norm the kind.
    """

    step: int
    of: dict[str, Any]


class NaP(Method):
    """Projects every weight to its initial length, and holds back gains and shifts of norms."""

    def __init__(self, every: int, affine: str, strength: float, exclude: Exclude) -> None:
        self.every = arguments.every("every", every, least=0)
        self.affine = arguments.choice("affine", affine, AFFINE)
        self.strength = arguments.number("strength", strength, 0.0)
        self.exclude = patterns(exclude)

    @property
    def _decays(self) -> bool:
        """Whether gains and shifts are held back at the pace of the learning rate."""
        return bool(self.every and self.strength) and self.affine == "decay"

    def init(self, host: Host) -> Lengths:
        if not any(map(is_norm, host.model.modules())):
            raise PlanError(
                f"nap: {type(host.model).__name__} has no normalisation (no module whose class is named ...Norm), so "
                "the length of a weight is a part of what the network computes, and to hold it would change that. Put "
                "a LayerNorm before every nonlinearity, or use weight_clipping or l2_init"
            )
        known, named = treated(host.model, self.exclude, (WEIGHT, GAIN, SHIFT)), dict(host.model.named_parameters())
        if self._decays:
            norms = [name for name, kind in known.items() if kind != WEIGHT]
            host.need_rates(self.name, norms, "use affine='project' or affine='keep'")
        lengths = {name: _length(named[name]) if kind == WEIGHT else kind for name, kind in known.items()}
        return Lengths(0, lengths)

    def after_step(self, host: Host, state: Lengths) -> Lengths:
        step = state.step + 1
        if self.every and step % self.every == 0:
            affine: dict[str, list[tuple[str, Tensor]]] = {}  # by norm
            for one in host.trained():
                name, parameter = one.name, one.parameter
                known = state.of.get(name)
                if isinstance(known, Tensor):
                    _scale([parameter], known)
                elif known is not None and self._decays:
                    rate = min(1.0, one.rate * self.strength)
                    parameter.lerp_(torch.full_like(parameter, float(known == GAIN)), rate)
                elif known is not None:
                    affine.setdefault(name.rpartition(".")[0], []).append((known, parameter))
            for members in affine.values() if self.affine == "project" else ():
                size = sum(p.numel() for kind, p in members if kind == GAIN)
                if size:  # a norm with a shift alone has no length to keep
                    _scale([p for _, p in members], math.sqrt(size))
        return Lengths(step, state.of)


def _length(parameter: Tensor) -> Tensor:
    return torch.linalg.vector_norm(wide(parameter.detach()))


def _scale(parameters: list[Tensor], length: Tensor | float) -> None:
    """Give them this length, together. What has none, zeros or infinite values, is left as it is."""
    now = torch.stack([_length(p) for p in parameters]).norm()
    factor = torch.where((now > 0) & now.isfinite(), length / now, 1.0)
    for parameter in parameters:
        parameter.mul_(factor)


@register_method(
    "nap",
    description="after every step, scale each weight back to its initial length, in a model with norms",
    reference="Lyle et al.: Normalization and Effective Learning Rates in Reinforcement Learning, NeurIPS 2024",
    inert={"every": 0},
    changes="lengths of weights, gains and shifts of norms",
    needs="norms",
)
def nap(every: int = 1, affine: str = "decay", strength: float = STRENGTH, exclude: Exclude = ()) -> NaP:
    """``W <- W * |W_0|_F / |W|_F`` after the step, for every weight of a layer: where a norm follows, the function is
    the same, and the effective learning rate no longer falls as weights grow.

    The method needs a norm before every nonlinearity, which is not looked for; a model without any is refused. Biases
    before a norm, which the paper drops, and embeddings are left alone. Read in another project's notes on the paper;
    a port without norms, whose affine branch looks for parameters that are not there and for a length of ``sqrt(2)``,
    was not followed.

    Args:
        every: steps from one projection to the next; 0: never.
        affine: of the norms' gains and shifts. ``decay``: towards 1 and 0, ``gamma <- gamma - lr * strength * (gamma -
            1)``; ``project``: both together to the length ``sqrt(n)`` of n gains of 1, which changes nothing if the
            nonlinearity that follows is homogeneous, as ReLU is; ``keep``: they are left alone.
        strength: of that decay; no published value was found, 1e-2 is ours.
        exclude: names of parameters or modules that are left out, with wildcards. ``"head"`` is the last layer: no
            norm follows it, and to hold its length bounds the logits, as the paper's "every weight" does.
    """
    if affine != "decay" and strength != STRENGTH:
        raise ValueError(f"strength={strength!r} is that of affine='decay', and has no effect with affine={affine!r}")
    return NaP(every, affine, strength, exclude)
