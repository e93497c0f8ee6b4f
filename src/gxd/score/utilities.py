"""The utilities. Each is one function, and reads as its row in the paper's table.

A utility sees an :class:`Observation`: for every view of the units ``h``, the reference ``r``, the gradient ``g`` and
the outgoing weights, all with the units on the last axis. It returns one score per unit, the mean over the examples;
or the signed *effect* of every unit on every example, of which the score is the mean size: from effects the cost of a
whole set of units follows. Units must not be mixed: the library may hand over several layers side by side.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from gxd.errors import ObservationError


class UnitView:
    """The units as one set of consumers sees them.

    Attributes:
        h: ``(examples, positions, units)`` the values.
        r: ``(units,)`` the references.
        g: ``(examples, positions, units)`` the gradient the utility asked for, or None.
        c: of the same shape, for utilities with ``curvature=True``: the sum over positions and views is a random
            estimate of ``d'Hd`` with d = h - r, see :mod:`gxd.score.curvature`.
    """

    def __init__(
        self, h: Tensor, r: Tensor, g: Tensor | None, w_out: Callable[[], Tensor], c: Tensor | None = None
    ) -> None:
        self.h, self.r, self._g, self._w_out, self._c = h, r, g, w_out, c

    @property
    def g(self) -> Tensor:
        if self._g is None:
            raise ObservationError(
                "this utility reads a gradient: register it with gradient='target', 'sketch', 'all', 'kl' or 'loss'"
            )
        return self._g

    @property
    def c(self) -> Tensor:
        if self._c is None:
            raise ObservationError("this utility reads second derivatives: register it with curvature=True")
        return self._c

    @cached_property
    def w_out(self) -> Tensor:
        """``(units,)`` sum of the absolute outgoing weights."""
        return self._w_out()


class Observation:
    """What one batch says about some units.

    Attributes:
        views: the views of the units; most have one.
    """

    def __init__(
        self,
        views: Sequence[UnitView],
        w_in: Callable[[], Tensor],
        generator: torch.Generator,
        w_grad: Tensor | None = None,
    ) -> None:
        self.views, self._w_in, self.generator, self._w_grad = views, w_in, generator, w_grad

    @cached_property
    def w_in(self) -> Tensor:
        """``(units,)`` sum of the absolute incoming weights."""
        return self._w_in()

    @property
    def w_grad(self) -> Tensor:
        """``(units,)`` mean of the absolute gradients of the incoming weights, for utilities of ``weights``."""
        if self._w_grad is None:
            raise ObservationError("this utility reads gradients of weights: register it with gradient='weights'")
        return self._w_grad


@dataclass(frozen=True)
class Utility:
    """A registered utility.

    Attributes:
        function: from an observation to ``(units,)`` scores.
        gradient, curvature: that it needs, see :func:`register_utility`.
        relative: whether scores are shares of their group, see :func:`register_utility`.
        effects: from an observation to ``(examples, units)`` signed effects, if the utility is made of them; then
            ``reduced`` makes scores of these.
    """

    name: str
    function: Callable[[Observation], Tensor]
    gradient: str | None
    effects: Callable[[Observation], Tensor] | None = None
    reduced: Callable[[Tensor], Tensor] | None = None
    curvature: bool = False
    relative: bool = False

    @property
    def needs_observe(self) -> bool:
        return self.gradient in ("target", "all", "sketch", "kl")

    def __reduce__(self) -> tuple[Any, ...]:
        """By name: in another process it is what is registered there."""
        return get_utility, (self.name,)

    def __deepcopy__(self, memo: Any) -> Utility:
        return self


GRADIENTS = (None, "target", "all", "sketch", "kl", "loss", "weights")
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {  # of effects, which are used up
    "abs": lambda effects: effects.abs_().mean(0),
    "square": lambda effects: effects.square_().mean(0),
}
_REGISTRY: dict[str, Utility] = {}
_Function = Callable[[Observation], Tensor]


def register_utility(
    name: str,
    *,
    gradient: str | None = None,
    effects: str | None = None,
    curvature: bool = False,
    relative: bool = False,
) -> Callable[[_Function], _Function]:
    """Add a utility under a name, usable as ``ContinualBackprop(..., utility=name)``.

    Args:
        name: the name; registering it again replaces the function.
        gradient: the gradient by the views that ``view.g`` shall hold. None: no gradient, a local utility.
            ``"target"``: of the target logit. ``"sketch"``: of the logits times a fresh random sign vector per
            example. ``"all"``: of each logit in turn, the score being averaged over them. ``"kl"``: of log p_y, with a
            label y drawn from the model's own prediction p, for every example (and position). ``"loss"``: of the loss,
            taken from the user's own backward pass. ``"weights"``: no gradient by the views, but ``o.w_grad``, that of
            the incoming weights, which the optimizer has just used; there are no views then, and the score is of the
            whole step.
        effects: None: the function returns ``(units,)`` scores. ``"abs"``, ``"square"``: it returns a new tensor
            ``(examples, units)``, the signed effect of a reset of each unit, and the score is the mean of its absolute
            value or its square. Selectors of sets (:class:`gxd.LowestSet`) need effects.
        curvature: whether ``view.c`` shall hold second derivatives, of the same output as the gradient: not of "loss".
        relative: whether the scores of a step are divided by their mean over the group before they enter the running
            average. Then a common factor says nothing: the reduction of the loss, a scaler, a loss that falls. In a
            step in which all scores of a group are 0, the group is not scored.

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
    if curvature and gradient in (None, "loss"):
        raise ValueError(f"curvature=True needs the gradient of an output, not gradient={gradient!r}")
    if effects is not None and effects not in REDUCTIONS:
        raise ValueError(f"effects={effects!r} is not one of None, {', '.join(map(repr, REDUCTIONS))}")

    def add(function: _Function) -> _Function:
        if not callable(function):
            raise TypeError(f"utility {name!r} must be a function of an Observation, got {type(function).__name__}")
        if effects is None:
            _REGISTRY[name] = Utility(name, function, gradient, curvature=curvature, relative=relative)
        else:
            reduced = REDUCTIONS[effects]
            checked = partial(_checked_effects, name, function)
            scored = lambda o: reduced(checked(o))  # noqa: E731
            _REGISTRY[name] = Utility(name, scored, gradient, checked, reduced, curvature, relative)
        return function

    return add


def _checked_effects(name: str, function: _Function, o: Observation) -> Tensor:
    effects = function(o)
    examples, _, units = o.views[0].h.shape
    if not isinstance(effects, Tensor) or effects.shape != (examples, units):
        shape = tuple(effects.shape) if isinstance(effects, Tensor) else type(effects).__name__
        raise ValueError(
            f"utility {name!r} must return an effect of each unit on each example, {(examples, units)}, got {shape}"
        )
    return effects


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


@register_utility("output_gradient", gradient="target")
def output_gradient(o: Observation) -> Tensor:
    """E|sum over positions of dz_y/dh|: how much the output would follow the unit, however little it says now."""
    return _total([_over_positions(v.g) for v in o.views]).abs().mean(0)


@register_utility("gxi", gradient="target", effects="abs")
def gxi(o: Observation) -> Tensor:
    """Gradient times input, sum over positions of h dz_y/dh: the effect of a reset to zero."""
    return _total([_over_positions(v.h * v.g) for v in o.views])


# E|sum over positions of h dL/dh|: the criterion that pruning uses (Molchanov et al. 2017).
register_utility("taylor", gradient="loss", effects="abs")(gxi)


def _gxd(o: Observation) -> Tensor:
    """Sum over positions of (h - r) dz/dh: the first-order effect of a reset, in the direction of logits of ``g``."""
    return _total([_over_positions((v.h - v.r) * v.g) for v in o.views])


register_utility("gxd", gradient="target", effects="abs")(_gxd)
register_utility("gxd_all_logit", gradient="all", effects="abs")(_gxd)
register_utility("gxd_sketch", gradient="sketch", effects="abs")(_gxd)
# E[e^2] over labels y ~ p is dz' (diag p - p p') dz, dz the change of the logits: twice the KL divergence of the
# predictions, to second order. One backward pass, and no target. Of observe(score=...) it is the squared effect.
register_utility("gxd_kl", gradient="kl", effects="square")(_gxd)
# The direction in which the training loss looks at the output, from the user's own backward pass.
register_utility("gxd_loss", gradient="loss", effects="abs", relative=True)(_gxd)


@register_utility("gxd_second_order", gradient="target", effects="abs", curvature=True)
def gxd_second_order(o: Observation) -> Tensor:
    """Sum over positions of (h - r) dz_y/dh - d'Hd / 2: the effect of a reset to second order, by a second backward
    pass, through the first. It ranks units hardly better than ``gxd``: see docs/beyond-first-order.md.
    """
    return _total([_over_positions((v.h - v.r) * v.g - 0.5 * v.c) for v in o.views])


@register_utility("weight_gradient", gradient="weights")
def weight_gradient(o: Observation) -> Tensor:
    """Mean over the incoming weights of |dL/dw|: a unit that hardly learns (ReGraMa, CPR)."""
    return o.w_grad


@register_utility("silence")
def silence(o: Observation) -> Tensor:
    """The share of the examples on which a unit fires, anywhere: 0 if it was silent on all of them.

    A unit fires where it is not 0, and where it is not just at its reference either (within 0.1 %): a tanh that is
    saturated is as silent as a ReLU that is dead. Fewer than 8 values may be alike by chance: there only 0 is silent.
    """
    fires = []
    for v in o.views:
        active = v.h != 0
        if v.h.shape[0] * v.h.shape[1] >= 8:
            active &= (v.h - v.r).abs_() > 1e-3 * v.r.abs()
        fires.append(active.any(1))
    return torch.stack(fires).any(0).to(o.views[0].h.dtype).mean(0)


@register_utility("random")
def random(o: Observation) -> Tensor:
    """A control: any unit may go."""
    h = o.views[0].h
    return torch.rand(h.shape[-1], generator=o.generator).to(h)
