"""DASH: shrink the weights that point away from where the new task wants them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gxd import arguments
from gxd.errors import PlanError
from gxd.methods.base import Host
from gxd.methods.event import Event, begin_anew
from gxd.methods.layers import Layer, layers
from gxd.methods.registry import register_method
from gxd.plan.layouts import Layout
from gxd.reset.operator import STEP_POLICIES
from gxd.reset.writes import Whole, Write


class Piece(NamedTuple):
    """A parameter that is shrunk."""

    name: str
    parameter: Tensor
    layout: Layout | None  # of a weight; a bias has none


class Dash(Event):
    """Shrinks by the cosine of weights and negative gradients, when a task begins. It remembers nothing.

    Attributes:
        alpha: the share of each batch in the average gradient.
        minimum: the smallest factor.
    """

    needs_data = True

    def __init__(self, alpha: float, minimum: float, optimizer: str) -> None:
        super().__init__(every=0)
        self.alpha = arguments.number("alpha", alpha, 0.0, 1.0)
        self.minimum = arguments.number("minimum", minimum, 0.0, 1.0)
        self.optimizer = arguments.choice("optimizer", optimizer, STEP_POLICIES)

    def begin(self, host: Host) -> tuple[()]:
        if not _pieces(host):
            raise PlanError("dash: the optimizer trains no linear layer and no convolution of this model")
        return ()

    def act(self, host: Host, own: tuple[()]) -> tuple[()]:
        pieces = _pieces(host)
        exact = {name: torch.promote_types(parameter.dtype, torch.float32) for name, parameter, _ in pieces}
        averages = {name: torch.zeros_like(parameter, dtype=exact[name]) for name, parameter, _ in pieces}
        for gradients in host.gradients():
            for name, average in averages.items():
                average.lerp_(gradients[name].to(average).neg_(), self.alpha)
        unfit = [name for name, average in averages.items() if not average.isfinite().all()]
        if unfit:
            raise ValueError(f"dash: the gradient of {unfit[0]!r} on the new data is not finite. Nothing was shrunk")
        writes = []
        for name, parameter, layout in pieces:
            value = shrunk(parameter.detach().to(averages[name]), averages[name], layout, self.minimum)
            writes.append(Write(parameter, Whole(), value))
        if self.optimizer == "reset":
            begin_anew(host, writes)
        else:
            host.write(writes)
        return own


def shrunk(weight: Tensor, direction: Tensor, layout: Layout | None, minimum: float) -> Tensor:
    """A weight with each row of a linear layer, each kernel of a convolution, or all of a bias (which has no layout)
    times its cosine with the direction, from ``minimum`` to 1.
    """
    if layout is None:
        return weight * _cosine(weight, direction).clamp(minimum, 1.0)
    found = weight.clone()
    view, toward = layout.canonical(found), layout.canonical(direction)  # (blocks, out, in, *kernel)
    axis = 3 if view.dim() > 3 else 2
    factor = _cosine(view.flatten(axis), toward.flatten(axis)).clamp(minimum, 1.0)
    view *= factor.reshape(*factor.shape, *[1] * (view.dim() - axis))
    return found


def _cosine(one: Tensor, other: Tensor) -> Tensor:
    """Along the last axis; 0 where one of them is 0. Gradients are small, and torch's own takes small ones for 0."""
    least = torch.finfo(one.dtype).tiny
    return (F.normalize(one, dim=-1, eps=least) * F.normalize(other, dim=-1, eps=least)).sum(-1)


def _pieces(host: Host) -> list[Piece]:
    names = {id(one.parameter): one.name for one in host.trained()}

    def pieces(layer: Layer) -> list[Piece]:
        bias = layer.bias if layer.bias is not None and id(layer.bias) in names else None
        found = [Piece(names[id(layer.weight)], layer.weight, layer.layout)]
        return found if bias is None else [*found, Piece(names[id(bias)], bias, None)]

    return [piece for layer in layers(host, tied=False) for piece in pieces(layer)]


@register_method(
    "dash",
    description="when a task begins, shrink the weights that do not point where its data pulls them",
    reference="Shin, Oh, Cho, Yun: DASH: Warm-Starting Neural Network Training Without Loss of Plasticity under "
    "Stationarity, NeurIPS 2024",
    inert={"minimum": 1.0, "optimizer": "keep"},
    changes="weights and biases of layers, all optimizer state, when a task begins",
)
def dash(alpha: float = 0.3, minimum: float = 0.3, optimizer: str = "reset") -> Dash:
    """``w <- w * clip(cos(w, G), minimum, 1)`` with ``G <- (1 - alpha) G - alpha g`` over the batches of the new task,
    for each row of a linear layer, each kernel of a convolution (one per pair of channels) and each bias.

    It needs data: ``attached.boundary(batches, F.cross_entropy)``. ``g`` is taken at the weights as they are, in the
    modes as they are (call ``model.train()`` first if it is to be as in training), and leaves no trace.

    Read in FIRE's port, not in the authors' own code. A kernel of one element keeps its
    value or is shrunk to ``minimum`` of it, as follows from the rule. Norms, embeddings (also those that a head shares)
    and other parameters that are no layer's stay as they are. A row without a gradient (a dead unit's) has cosine 0,
    and is shrunk most.

    Args:
        alpha: the share of a batch in the average; {0.1, 0.3} in FIRE's comparison.
        minimum: the smallest factor, the paper's lambda; {0.05, 0.1, 0.3} there.
        optimizer: ``reset``: all that the optimizer remembers begins anew, as in that protocol; ``keep``.
    """
    return Dash(alpha, minimum, optimizer)
