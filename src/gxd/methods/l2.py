"""L2: weight decay, in the gradient or decoupled."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gxd.methods.base import Host, Method
from gxd.methods.penalty import Penalty, penalised
from gxd.methods.registry import register_method
from gxd.methods.scope import Exclude


class L2(Penalty):
    """``strength / 2 * |theta|^2``."""

    def gradient(self, host: Host, state: dict[str, Any], name: str, parameter: Tensor) -> Tensor:
        return parameter

    def descend(self, host: Host, state: dict[str, Any], name: str, parameter: Tensor, rate: float) -> None:
        parameter.mul_(1.0 - min(1.0, rate))


@register_method(
    "l2",
    description="pull every parameter, but those of norms, towards zero",
    reference="Loshchilov, Hutter: Decoupled Weight Decay Regularization, ICLR 2019; as a baseline in Kumar, Marklund, "
    "Van Roy: Maintaining Plasticity in Continual Learning via Regenerative Regularization, CoLLAs 2025",
    inert={"strength": 0.0},
    changes="all parameters but those of norms",
)
def l2(strength: float = 1e-3, decoupled: bool = True, exclude: Exclude = ()) -> Method:
    """``theta <- theta - lr * strength * theta`` after every step, with each parameter's ``lr``; the penalty is
    ``strength / 2 * |theta|^2``.

    Kumar's code was read: every parameter but those of norms, in the loss. An optimizer's ``weight_decay`` is the same
    on all parameters: Adam's is in the gradient, AdamW's is decoupled.

    Args:
        strength: Kumar's grid is {1e-2 ... 1e-5}.
        decoupled: False: ``strength * theta`` is added to the gradient instead, as by a penalty in the loss, which
            Adam then rescales.
        exclude: names of parameters or modules that are left out, with wildcards; ``"head"`` is the last layer.
    """
    return penalised(L2(strength, exclude), decoupled)
