"""Penalties on parameters, in two forms: decoupled, after the step, and as a part of the gradient, before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gxd import arguments
from gxd.errors import PlanError
from gxd.methods.base import Host, Method
from gxd.methods.scope import BUT_NORMS, Exclude, patterns, treated
from gxd.reset.fresh import fixed_rows, holding


class Penalty(Method):
    """Goes down the gradient of ``strength * penalty`` after each step, with each parameter's learning rate:
    ``theta <- theta - lr * strength * gradient``.

    Its state says what it remembers of each parameter that it treats, by name.

    Attributes:
        strength: of the penalty; 0: nothing is done.
        exclude: what is left out, see :func:`gxd.methods.scope.patterns`.
        kinds: which kinds of parameters it is on, see :func:`gxd.methods.scope.kinds`.
        decoupled: False: it is a part of the gradient, and needs no learning rate.
    """

    kinds: tuple[str, ...] = BUT_NORMS
    decoupled: bool = True

    def __init__(self, strength: float, exclude: Exclude = ()) -> None:
        self.strength = arguments.number("strength", strength, 0.0)
        self.exclude = patterns(exclude)

    def init(self, host: Host) -> dict[str, Any]:
        names = treated(host.model, self.exclude, self.kinds)
        if self.strength and self.decoupled:
            host.need_rates(self.name, names, "use decoupled=False")
        return names

    def prepared(self, host: Host, state: dict[str, Any]) -> dict[str, Any]:
        """What has to be known of all parameters before the gradient."""
        return state

    def gradient(self, host: Host, state: dict[str, Any], name: str, parameter: Tensor) -> Tensor:
        """Of the penalty, without its strength."""
        raise NotImplementedError

    def descend(self, host: Host, state: dict[str, Any], name: str, parameter: Tensor, rate: float) -> None:
        """Go down the gradient."""
        parameter.sub_(self.gradient(host, state, name, parameter), alpha=rate)

    def after_step(self, host: Host, state: dict[str, Any]) -> dict[str, Any]:
        if not self.strength:
            return state
        state, fixed = self.prepared(host, state), fixed_rows(host.model)
        for one in host.trained():
            if one.name in state:
                with holding(one.parameter, fixed.get(id(one.parameter), ())):
                    self.descend(host, state, one.name, one.parameter, one.rate * self.strength)
        return state


class InGradient(Method):
    """A penalty as a part of the gradient, before each step: as by a term of the loss, which Adam then rescales."""

    def __init__(self, penalty: Penalty) -> None:
        self.penalty, self.sharded = penalty, penalty.sharded
        penalty.decoupled = False

    def init(self, host: Host) -> dict[str, Any]:
        return self.penalty.init(host)

    def before_step(self, host: Host, state: dict[str, Any]) -> dict[str, Any]:
        penalty = self.penalty
        if not penalty.strength:
            return state
        for name, parameter, *_ in host.trained():
            if name in state and parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise PlanError(
                    f"the gradient of {name!r} is sparse, and {self.name} adds to all of it: make it dense "
                    f"(sparse=False of the embedding), or use decoupled=True, or exclude={name!r}"
                )
        state, fixed = penalty.prepared(host, state), fixed_rows(host.model)
        for name, parameter, _, maximize in host.trained():
            if name in state and parameter.grad is not None:
                strength = -penalty.strength if maximize else penalty.strength
                gradient = penalty.gradient(host, state, name, parameter)
                with holding(parameter.grad, fixed.get(id(parameter), ())):
                    parameter.grad.add_(gradient, alpha=strength * host.grad_scale)
        return state


def penalised(penalty: Penalty, decoupled: bool) -> Method:
    """The method that applies a penalty in one of its two forms."""
    arguments.switch("decoupled", decoupled)
    return penalty if decoupled else InGradient(penalty)
