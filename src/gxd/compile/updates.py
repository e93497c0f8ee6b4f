"""The update rules of optimizers that a compiled step can take in: the arithmetic of ``torch.optim``, in place.

An optimizer that is not listed steps by itself, after the compiled part. Exact types only: a subclass may do more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_SCHEDULES = vars(torch.optim.lr_scheduler)
State = Mapping[str, Tensor]
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Update:
    """How an optimizer changes one parameter.

    Attributes:
        settings: the options that are compiled in; a change of one compiles again. The learning rate is not among
            them: schedules change it at every step.
        state: the names of the tensors it keeps per parameter, given its options.
        counter: the name of the one that counts steps. It is written when ``apply`` is done with all parameters.
        apply: ``(parameter, gradient, state, lr, options)``; writes the parameter and the state. All are :func:`real`.
    """

    settings: tuple[str, ...]
    state: Callable[[Options], Sequence[str]]
    apply: Callable[[Tensor, Tensor, State, Tensor, Options], None]
    counter: str | None = None


def update_of(optimizer: Optimizer) -> Update | None:
    """The update rule of an optimizer, or None if it must step by itself."""
    special = any(group.get("differentiable") for group in optimizer.param_groups)
    if special or step_of(optimizer) is not getattr(type(optimizer), "step", None):
        return None
    return _UPDATES.get(type(optimizer))


def step_of(optimizer: Optimizer) -> Any:
    """The function that an optimizer steps with. What schedules put around it only counts the calls, and is left out;
    what users put around it may do anything, such as clip gradients.
    """
    step: Any = optimizer.step
    while getattr(step, "__globals__", None) is _SCHEDULES:
        step = step.__wrapped__
    return getattr(step, "__func__", step)


def real(tensor: Tensor) -> Tensor:
    """A tensor of complex numbers as one of pairs, which is what optimizers write to and square."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _sgd(p: Tensor, g: Tensor, state: State, lr: Tensor, options: Options) -> None:
    g = _decayed(p, -g if options["maximize"] else g, options["weight_decay"])
    if options["momentum"]:
        buffer = state["momentum_buffer"].mul_(options["momentum"]).add_(g, alpha=1 - options["dampening"])
        g = g + options["momentum"] * buffer if options["nesterov"] else buffer
    p.sub_(lr * g)


def _adam(p: Tensor, g: Tensor, state: State, lr: Tensor, options: Options) -> None:
    beta1, beta2 = options["betas"]
    step = (state["step"] + 1).double()  # in single precision 1 - 0.999 is off in the fifth digit
    g = -g if options["maximize"] else g
    if options["decoupled_weight_decay"]:
        p.mul_(1 - lr * options["weight_decay"])
    else:
        g = _decayed(p, g, options["weight_decay"])
    mean = state["exp_avg"].lerp_(g, 1 - beta1)
    square = state["exp_avg_sq"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
    if options["amsgrad"]:
        square = torch.maximum(state["max_exp_avg_sq"], square)
        state["max_exp_avg_sq"].copy_(square)
    # Put side by side, so that they are in memory: the compiler would take the powers anew for every few elements.
    rate, scale = torch.stack([lr / (1 - beta1**step), (1 - beta2**step).rsqrt()]).to(p.device).unbind()
    p.sub_(rate * mean / (square.sqrt() * scale + options["eps"]))


def _decayed(p: Tensor, g: Tensor, decay: float) -> Tensor:
    return g + decay * p if decay else g


_ADAM = Update(
    ("betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"),
    lambda options: ("step", "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if options["amsgrad"] else [])),
    _adam,
    "step",
)
_UPDATES: dict[type[Optimizer], Update] = {
    torch.optim.SGD: Update(
        ("momentum", "dampening", "weight_decay", "nesterov", "maximize"),
        lambda options: ("momentum_buffer",) if options["momentum"] else (),
        _sgd,
    ),
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
}
