"""Weight clipping: weights stay within a multiple of the range that they are drawn from."""

from __future__ import annotations

import math

from torch import Tensor, nn

from gxd import arguments
from gxd.methods.base import Host, Method
from gxd.methods.registry import register_method
from gxd.methods.scope import BIAS, WEIGHT, Exclude, patterns, treated
from gxd.plan.layouts import is_transposed


class WeightClipping(Method):
    """Clamps weights and biases after each step. Its state is the fan-in of each."""

    def __init__(self, zeta: float, exclude: Exclude) -> None:
        self.zeta = arguments.number("zeta", zeta, 0.0, math.inf)
        if self.zeta == 0:
            raise ValueError("zeta=0 would set every weight to zero; the paper uses 1 to 5, and inf clips nothing")
        self.exclude = patterns(exclude)

    def init(self, host: Host) -> dict[str, int]:
        found = {}
        for name in treated(host.model, self.exclude, (WEIGHT, BIAS)):
            path, _, key = name.rpartition(".")
            module = host.model.get_submodule(path)
            weight = _weight_of(module, key)
            if weight is not None:
                found[name] = int(weight.shape[0]) if is_transposed(module) else weight[0].numel()
        return found

    def after_step(self, host: Host, state: dict[str, int]) -> dict[str, int]:
        for name, parameter, *_ in host.trained() if self.zeta < math.inf else ():
            if name in state:
                bound = self.zeta / math.sqrt(state[name])
                parameter.clamp_(-bound, bound)
        return state


def _weight_of(module: nn.Module, key: str) -> Tensor | None:
    """The weight that belongs to a weight or a bias of a layer; None if there is none."""
    own = getattr(module, key.replace("bias", "weight"), None)
    if isinstance(own, Tensor) and own.dim() > 1:
        return own
    return next((p for p in module.parameters(recurse=False) if p.dim() > 1), None)


@register_method(
    "weight_clipping",
    description="after every step, clip weights and biases to a multiple of the range that they are drawn from",
    reference="Elsayed, Lan, Lyle, Mahmood: Weight Clipping for Deep Continual and Reinforcement Learning, RLC 2024",
    inert={"zeta": math.inf},
    changes="weights and biases of layers",
)
def weight_clipping(zeta: float = 1.0, exclude: Exclude = ()) -> WeightClipping:
    """``theta <- clip(theta, -zeta / sqrt(fan_in), zeta / sqrt(fan_in))`` after every step; a bias has the ``fan_in``
    of its layer.

    ``1 / sqrt(fan_in)`` is the range of PyTorch's own initial weights; others, as orthogonal ones, may be clipped by
    the first step already. The authors' code was read. It finds the bias of a layer by the order of the parameters,
    and takes the last two of each parameter group for the head; here the modules say so. Norms and embeddings, which
    it cannot treat, are left alone.

    Args:
        zeta: the paper tries 1 to 5; inf: nothing is clipped.
        exclude: names of parameters or modules that are left out, with wildcards; ``"head"`` is the last layer, which
            the paper clips or not.
    """
    return WeightClipping(zeta, exclude)
