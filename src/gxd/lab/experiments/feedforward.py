"""Experiments whose network can be chosen: how it begins, what it is normalised by, and the linear control."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from gxd.lab import models
from gxd.lab.errors import UserError
from gxd.lab.experiments.base import Experiment
from gxd.lab.streams import Stream


@dataclass(frozen=True)
class FeedForward(Experiment):
    """A network of layers one after the other, or the linear model in its place."""

    layer_norm: bool = False
    """LayerNorm before each activation.
    Paper: tested with relu."""
    init: Literal["default", "glorot"] = "default"
    """First weights. default: torch's own, uniform in +-1/sqrt(inputs), biases too. glorot: Glorot's uniform, zero
    biases."""
    input_norm: Literal["none", "ema"] = "none"
    """Input normalisation. ema: (x - mean) / sqrt(variance), of running averages with decay 0.99. A control: on some
    streams it is worth more than every method."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_linear and self.layer_norm:
            raise UserError("layer_norm has no meaning with network linear, which has no hidden layer: leave one out")

    @property
    def is_linear(self) -> bool:
        """Whether this is the linear control."""
        return False

    def build(self, stream: Stream) -> nn.Module:
        begin: dict[str, Any] = {"init": self.init, "input_norm": self.input_norm == "ema", "seed": self.seed}
        if self.is_linear:
            return models.linear(stream.input_shape, stream.classes, **begin)
        return self.network_of(stream, activation=self.activation, layer_norm=self.layer_norm, **begin)

    def network_of(self, stream: Stream, **settings: Any) -> nn.Module:
        """The network with these arguments of the functions in :mod:`gxd.lab.models`."""
        raise NotImplementedError

    def variant(self) -> list[str]:
        chosen = {"layernorm": self.layer_norm, "linear": self.is_linear, "inputnorm": self.input_norm == "ema"}
        return [word for word, present in chosen.items() if present]

    def _unused(self) -> dict[str, Any]:
        return super()._unused() | ({"activation": self._default("activation")} if self.is_linear else {})


@dataclass(frozen=True)
class Perceptron(FeedForward):
    """A multilayer perceptron."""

    network: Literal["mlp", "linear"] = "mlp"
    """The network, or the linear model: the control without hidden layers, which has no plasticity to lose."""
    width: int = 100
    """Units per hidden layer.
    Paper: 100."""
    depth: int = 2
    """Hidden layers.
    Paper: 2."""

    @property
    def is_linear(self) -> bool:
        return self.network == "linear"

    def network_of(self, stream: Stream, **settings: Any) -> nn.Module:
        return models.mlp(stream.input_shape[0], stream.classes, width=self.width, depth=self.depth, **settings)

    def _unused(self) -> dict[str, Any]:
        unused = ("width", "depth") if self.is_linear else ()
        return super()._unused() | {name: self._default(name) for name in unused}
