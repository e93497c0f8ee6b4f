"""L2-Init: regularise towards the initial parameters, not towards zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gxd import arguments
from gxd.methods.base import Host, Method
from gxd.methods.penalty import Penalty, penalised
from gxd.methods.registry import register_method
from gxd.methods.scope import Exclude
from gxd.reset.fresh import distributions, fresh

NORMS = ("l2", "l1", "huber", "wasserstein")
ANCHORS = ("initial", "redrawn")


class L2Init(Penalty):
    """Pulls every parameter back to where it began, or to a new draw of it. Its state is where that was (sorted for
    Wasserstein), or the distribution.
    """

    def __init__(self, strength: float, norm: str = "l2", anchor: str = "initial", exclude: Exclude = ()) -> None:
        super().__init__(strength, exclude)
        self.norm = arguments.choice("norm", norm, NORMS)
        self.anchor = arguments.choice("anchor", anchor, ANCHORS)
        self.sharded = norm != "wasserstein"  # which sorts whole tensors

    def init(self, host: Host) -> dict[str, Any]:
        names = super().init(host)
        if self.anchor == "redrawn":
            return {name: kind for name, kind in distributions(host.model).items() if name in names}
        start = {name: p.detach().clone() for name, p in host.model.named_parameters() if name in names}
        return {name: _sorted(p) for name, p in start.items()} if self.norm == "wasserstein" else start

    def target(self, host: Host, state: dict[str, Any], name: str, parameter: Tensor) -> Tensor:
        """Where a parameter is pulled to."""
        if self.anchor == "initial":
            target = state[name].to(parameter.dtype)
        else:
            target = fresh(name, parameter, state, host.generator)
            target = _sorted(target) if self.norm == "wasserstein" else target
        if self.norm != "wasserstein":
            return target
        # What moves least: the smallest weight goes to the smallest value, the next to the next.
        order = parameter.flatten().argsort(stable=True)
        return torch.empty_like(target).scatter_(0, order, target).view_as(parameter)

    def gradient(self, host: Host, state: dict[str, Any], name: str, parameter: Tensor) -> Tensor:
        difference = parameter - self.target(host, state, name, parameter)
        if self.norm == "l1":
            return difference.sign()
        return difference.clamp(-1.0, 1.0) if self.norm == "huber" else difference

    def descend(self, host: Host, state: dict[str, Any], name: str, parameter: Tensor, rate: float) -> None:
        """Nothing is pulled beyond the target."""
        target = self.target(host, state, name, parameter)
        if self.norm in ("l2", "wasserstein"):
            parameter.lerp_(target, min(1.0, rate))
            return
        distance = (parameter - target).abs()
        least = torch.finfo(distance.dtype).tiny if self.norm == "l1" else 1.0  # 0 / 0 is what a rate of 0 would make
        share = rate / distance.clamp(min=least)
        parameter.lerp_(target, share.clamp(max=1.0))


def _sorted(tensor: Tensor) -> Tensor:
    return tensor.flatten().sort().values


@register_method(
    "l2_init",
    description="pull every parameter, but those of norms, towards its initial value",
    reference="Kumar, Marklund, Van Roy: Maintaining Plasticity in Continual Learning via Regenerative Regularization, "
    "CoLLAs 2025; wasserstein: Lewandowski et al.: Learning Continually by Spectral Regularization, arXiv 2406.06811v1",
    inert={"strength": 0.0},
    changes="all parameters but those of norms",
)
def l2_init(
    strength: float = 1e-2,
    decoupled: bool = True,
    norm: str = "l2",
    anchor: str = "initial",
    exclude: Exclude = (),
) -> Method:
    """``theta <- theta - lr * strength * (theta - theta_0)`` after every step, with each parameter's ``lr``.

    Kumar's code was read. Public re-implementations differ: the unsquared norm of all parameters at once (a pull of
    constant length), of the last tensor alone, or divided by the number of weights.

    Args:
        strength: the paper's best is 1e-2 nearly everywhere, from {1e-2 ... 1e-5}. The paper's penalty has no factor
            1/2, so its lambda is half of this; the authors' code has the factor.
        decoupled: False: ``strength * (theta - theta_0)`` is added to the gradient instead, as by a penalty in the
            loss, which Adam then rescales. With plain SGD both are the same but for the order.
        norm: of the difference d. ``l2``: ``|d|^2 / 2``; ``l1``: ``sum |d|``; ``huber``: ``d^2 / 2`` where ``|d| <=
            1``, else ``|d| - 1/2``; ``wasserstein``: ``|d|^2 / 2`` between the sorted weights of each tensor and their
            sorted initial values, so that only their distribution is pulled back; it sorts all weights at every step.
        anchor: ``initial``, or ``redrawn``: at every step a new draw from the distribution that the parameter began
            with; the authors' code makes a new model.
        exclude: names of parameters or modules that are left out, with wildcards; ``"head"`` is the last layer.
    """
    return penalised(L2Init(strength, norm, anchor, exclude), decoupled)
