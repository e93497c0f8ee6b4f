"""Layers that are never reset, each with the reason a person understands, and tensors that carry nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from gxd.find.engine import Engine, flatten, foreign, rule
from gxd.find.labels import CONST, FOREIGN, UNKNOWN, Value, filled
from gxd.find.rules.layers import name_used_by


@rule("embedding", "_embedding_bag", "embedding_bag", "embedding_renorm", carries=0)
def embedding(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Rows of a table: an element is shared by all features of a token, there is no incoming weight to draw again."""
    weight, index = args[0], args[1]
    if weight.parameter in engine.parameters:
        name = engine.owner(name_used_by(engine, engine.caller(node), weight.parameter))
        engine.refused.setdefault(name, "embedding: its output has no incoming weights to draw again")
    fake = node.meta["val"]
    if isinstance(fake, (list, tuple)) or index.unit.dim() >= fake.dim():
        return foreign(node, [index])
    return filled(fake.shape, FOREIGN, index.example.unsqueeze(-1).expand(fake.shape))


@rule("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def recurrent(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The hidden state feeds back into the layer itself."""
    values = list(flatten((args, kwargs)))
    name = engine.caller(node)
    engine.refused.setdefault(name, "recurrent layer: its units feed back into themselves")
    for value in values:
        engine.block(value, f"read by the recurrent layer '{name}'")
    return foreign(node, values)


@rule(
    """
    zeros_like ones_like full_like empty_like rand_like randn_like randint_like new_zeros new_ones
    new_full new_empty zeros ones full empty rand randn randint arange linspace eye scalar_tensor
    randperm
    """,
)
def made_from_a_shape(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A new tensor that takes only its shape from its operand: no unit's, and no data; noise is like dropout."""
    fake = node.meta["val"]
    value = filled(fake.shape, CONST)
    like = args[0] if args and isinstance(args[0], Value) else None
    if like is not None and like.shape == fake.shape:
        return Value(value.unit, like.example)
    return Value(value.unit, torch.tensor(UNKNOWN).expand(fake.shape))


@rule("copy")
def copy(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Written over: what was there before is gone."""
    shape = node.meta["val"].shape
    return Value(args[1].unit.expand(shape), args[1].example.expand(shape))
