"""Parseval regularisation: the rows of every hidden weight are held orthogonal, and of one length."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gxd import arguments
from gxd.methods.base import Host, Method
from gxd.methods.penalty import Penalty, penalised
from gxd.methods.registry import register_method
from gxd.methods.scope import WEIGHT, Exclude, wide


class Parseval(Penalty):
    """On weights alone."""

    kinds = (WEIGHT,)

    def __init__(self, strength: float, scale: float, exclude: Exclude) -> None:
        super().__init__(strength, exclude)
        self.scale = arguments.number("scale", scale, 0.0)

    def gradient(self, host: Host, state: dict[str, Any], name: str, parameter: Tensor) -> Tensor:
        matrix = wide(parameter.detach()).flatten(1)
        tall = matrix.shape[0] > matrix.shape[1]
        matrix = matrix.mT if tall else matrix
        excess = matrix @ matrix.mT
        excess.diagonal().sub_(self.scale)
        gradient = 4.0 * (excess @ matrix)
        # One element that is not finite would be in all of the product.
        return (gradient.mT if tall else gradient).reshape(parameter.shape).nan_to_num_(0.0, 0.0, 0.0)


@register_method(
    "parseval",
    description="hold the rows of every weight, but the head's, orthogonal and of one length",
    reference="Chung, Cherif, Precup, Meger: Parseval Regularization for Continual Reinforcement Learning, "
    "NeurIPS 2024",
    inert={"strength": 0.0},
    changes="weights, but the head's",
)
def parseval(strength: float = 1e-3, scale: float = 2.0, decoupled: bool = False, exclude: Exclude = "head") -> Method:
    """Goes down the gradient of ``strength * sum |W W' - scale * I|_F^2``, which is added to that of the loss. It is
    zero where all singular values are ``sqrt(scale)``. Where a weight ``(out, in)`` has more rows than columns, it is
    ``|W' W - scale * I|_F^2``: the other cannot be zero, but differs from it by a constant. So the gradient is the
    same, ``4 (W W' W - scale * W)``, and this one is cheaper.

    The authors' code was read: MLPs, the penalty in the loss, the head left out. A convolution is
    the matrix ``(out, rest)`` here. The authors' rows of unit length, blocks of rows, and learnt diagonal after each
    layer are not offered. A product of two matrices per layer and step: the cost grows with the cube of the width.

    Args:
        strength: the authors' is ``1e-3 * (64 / width)^2``, with 1e-4 in place of 1e-3 for some tasks.
        scale: the squared gain of the initial orthogonal weights; 2 is that for ReLU.
        decoupled: False: the gradient of the penalty is added to that of the loss, which Adam then rescales, as in the
            paper and in our evidence. True: it is gone down after the step, with each parameter's learning rate.
        exclude: names of parameters or modules that are left out, with wildcards; ``"head"``, the default, is the
            module of that name, or else the last layer in the order of the modules. ``()`` leaves nothing out.
    """
    return penalised(Parseval(strength, scale, exclude), decoupled)
