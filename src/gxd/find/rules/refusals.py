"""Layers that are never reset, each with the reason a person understands."""

from __future__ import annotations

from typing import Any

from torch import fx

from gxd.find.engine import Engine, flatten, foreign, rule
from gxd.find.labels import FOREIGN, filled
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
