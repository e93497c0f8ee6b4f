"""L2-Init: regularise towards the initial parameters, not towards zero."""

from __future__ import annotations

from torch import Tensor

from gxd import arguments
from gxd.methods.base import Host, Method
from gxd.methods.registry import register_method


class L2Init(Method):
    """Pulls every parameter back to where it began, after each step. Its state is where that was.

    Attributes:
        strength: of the pull.
    """

    def __init__(self, strength: float) -> None:
        self.strength = strength

    def init(self, host: Host) -> dict[str, Tensor]:
        norms = {name for name, module in host.model.named_modules() if "Norm" in type(module).__name__}
        named = host.model.named_parameters()  # also what is frozen now: it may be trained later
        return {name: p.detach().clone() for name, p in named if name.rpartition(".")[0] not in norms}

    def after_step(self, host: Host, state: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, parameter, lr, _ in host.trained() if self.strength else ():
            if name in state:
                parameter.lerp_(state[name].to(parameter.dtype), min(1.0, lr * self.strength))
        return state


class L2InitPenalty(L2Init):
    """The same as a part of the gradient, before each step."""

    def before_step(self, host: Host, state: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, parameter, _, maximize in host.trained() if self.strength else ():
            if name in state and parameter.grad is not None:
                pull = -self.strength if maximize else self.strength
                parameter.grad.add_(parameter - state[name].to(parameter.dtype), alpha=pull * host.grad_scale)
        return state

    def after_step(self, host: Host, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return state


@register_method(
    "l2_init",
    description="pull every parameter, but those of norms, towards its initial value",
    reference="Kumar, Marklund, Van Roy: Maintaining Plasticity in Continual Learning via Regenerative Regularization, "
    "CoLLAs 2025",
    inert={"strength": 0.0},
)
def l2_init(strength: float = 1e-2, decoupled: bool = True) -> L2Init:
    """``theta <- theta - lr * strength * (theta - theta_0)`` after every step, with each parameter's ``lr``.

    Args:
        strength: the paper's best is 1e-2 nearly everywhere, from {1e-2 ... 1e-5}. The paper's penalty has no factor
            1/2, so its lambda is half of this.
        decoupled: False: ``strength * (theta - theta_0)`` is added to the gradient instead, as by a penalty in the
            loss, which Adam then rescales. With plain SGD both are the same but for the order.
    """
    arguments.switch("decoupled", decoupled)
    return (L2Init if decoupled else L2InitPenalty)(arguments.number("strength", strength, 0.0))
