"""The utilities. Each is one function, and reads as its row in the paper's table.

A utility sees an :class:`Observation`: for every view of the units ``h``, the reference ``r``, the gradient ``g`` and
the outgoing weights, all with the units on the last axis. It returns one score per unit, the mean over the examples.
Units must not be mixed: the library may hand over several layers side by side.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gxd.errors import ObservationError


class UnitView:
    """The units as one set of consumers sees them.

    Attributes:
        h: ``(examples, positions, units)`` the values.
        r: ``(units,)`` the references.
        g: ``(examples, positions, units)`` the gradient the utility asked for, or None.
    """

    def __init__(self, h: Tensor, r: Tensor, g: Tensor | None, w_out: Callable[[], Tensor]) -> None:
        self.h, self.r, self._g, self._w_out = h, r, g, w_out

    @property
    def g(self) -> Tensor:
        if self._g is None:
            raise ObservationError(
                "this utility reads a gradient: register it with gradient='target', 'sketch', 'all' or 'loss'"
            )
        return self._g

    @cached_property
    def w_out(self) -> Tensor:
        """``(units,)`` sum of the absolute outgoing weights."""
        return self._w_out()


class Observation:
    """What one batch says about some units.

    Attributes:
        views: the views of the units; most have one.
    """

    def __init__(self, views: Sequence[UnitView], w_in: Callable[[], Tensor], generator: torch.Generator) -> None:
        self.views, self._w_in, self.generator = views, w_in, generator

    @cached_property
    def w_in(self) -> Tensor:
        """``(units,)`` sum of the absolute incoming weights."""
        return self._w_in()


@dataclass(frozen=True)
class Utility:
    """A registered utility: its name, its function, and the gradient it needs (see :func:`register_utility`)."""

    name: str
    function: Callable[[Observation], Tensor]
    gradient: str | None

    @property
    def needs_observe(self) -> bool:
        return self.gradient in ("target", "all", "sketch")


GRADIENTS = (None, "target", "all", "sketch", "loss")
_REGISTRY: dict[str, Utility] = {}


def register_utility(
    name: str, *, gradient: str | None = None
) -> Callable[[Callable[[Observation], Tensor]], Callable[[Observation], Tensor]]:
    """Add a utility under a name, usable as ``ContinualBackprop(..., utility=name)``.

    Args:
        name: the name; registering it again replaces the function.
        gradient: the gradient by the views that ``view.g`` shall hold. None: no gradient, a local utility.
            ``"target"``: of the target logit. ``"sketch"``: of the logits times a fresh random sign vector per
            example. ``"all"``: of each logit in turn, the score being averaged over them. ``"loss"``: of the loss,
            taken from the user's own backward pass.

    Example::

        @gxd.register_utility("variance")
        def variance(o):
            return sum((v.h - v.r).square().mean((0, 1)) for v in o.views)
    """
    if not isinstance(name, str):
        raise TypeError(
            f"register_utility needs a name, a string, got a {type(name).__name__}: write "
            "@gxd.register_utility('my_utility')"
        )
    if gradient not in GRADIENTS:
        raise ValueError(f"gradient={gradient!r} is not one of {', '.join(map(repr, GRADIENTS))}")

    def add(function: Callable[[Observation], Tensor]) -> Callable[[Observation], Tensor]:
        if not callable(function):
            raise TypeError(f"utility {name!r} must be a function of an Observation, got {type(function).__name__}")
        _REGISTRY[name] = Utility(name, function, gradient)
        return function

    return add


def utilities() -> list[str]:
    """The names of all registered utilities."""
    return list(_REGISTRY)


def get_utility(name: str) -> Utility:
    """The utility of that name; the error of an unknown one names the nearest."""
    if not isinstance(name, str) or name not in _REGISTRY:
        near = difflib.get_close_matches(name.lower(), _REGISTRY, n=2, cutoff=0.6) if isinstance(name, str) else []
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ValueError(f"unknown utility {name!r}.{hint} The registered ones are {', '.join(_REGISTRY)}")
    return _REGISTRY[name]


# --- the table
# ----------------------------------------------------------------------------------------------------------------


def _over_positions(effect: Tensor) -> Tensor:
    """Sum the signed effect over positions: that is the effect of clamping the unit everywhere at once."""
    return effect.squeeze(1) if effect.shape[1] == 1 else effect.sum(1)


def _total(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum(0) if len(parts) > 1 else parts[0]


@register_utility("activation")
def activation(o: Observation) -> Tensor:
    """E|h|."""
    return _total([v.h.abs().mean((0, 1)) for v in o.views])


@register_utility("contribution")
def contribution(o: Observation) -> Tensor:
    """E|h| times the sum of |w_out|."""
    return _total([v.h.abs().mean((0, 1)) * v.w_out for v in o.views])


@register_utility("mc_contribution")
def mc_contribution(o: Observation) -> Tensor:
    """Mean-corrected: E|h - r| times the sum of |w_out|."""
    return _total([(v.h - v.r).abs_().mean((0, 1)) * v.w_out for v in o.views])


@register_utility("mc_adaptable_contribution")
def mc_adaptable_contribution(o: Observation) -> Tensor:
    """Mean-corrected contribution divided by the sum of |w_in|: units with large incoming weights are slow to adapt."""
    return mc_contribution(o) / o.w_in.clamp_min(torch.finfo(o.w_in.dtype).tiny)


@register_utility("loss_gradient", gradient="loss")
def loss_gradient(o: Observation) -> Tensor:
    """E|dL/dh|."""
    return _total([v.g.abs().mean((0, 1)) for v in o.views])


@register_utility("gxi", gradient="target")
def gxi(o: Observation) -> Tensor:
    """Gradient times input: E|sum over positions of h dz_y/dh|, the cost of a reset to zero."""
    return _total([_over_positions(v.h * v.g) for v in o.views]).abs_().mean(0)


def _gxd(o: Observation) -> Tensor:
    """E|sum over positions of (h - r) dz/dh|: the first-order cost of a reset, for the direction of logits in ``g``."""
    return _total([_over_positions((v.h - v.r) * v.g) for v in o.views]).abs_().mean(0)


register_utility("gxd", gradient="target")(_gxd)
register_utility("gxd_all_logit", gradient="all")(_gxd)
register_utility("gxd_sketch", gradient="sketch")(_gxd)


@register_utility("random")
def random(o: Observation) -> Tensor:
    """A control: any unit may go."""
    h = o.views[0].h
    return torch.rand(h.shape[-1], generator=o.generator).to(h)
