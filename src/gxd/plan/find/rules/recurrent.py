"""Recurrent layers: their own units feed back, but the units of their input are read as by a linear layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx, nn

from gxd.plan.find.engine import Engine, LayerCall, flatten, foreign, rule
from gxd.plan.find.labels import Value
from gxd.plan.find.rules.layers import batch_axis, columns_of, consume, name_used_by, trained
from gxd.plan.layouts import LINEAR, Layout

_KINDS = (nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell)
_INPUT_WEIGHTS = ("weight_ih", "weight_ih_l0", "weight_ih_l0_reverse")


@rule("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def recurrent(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The weights of the first layer's input are a linear layer of their own, biases and all."""
    values, name = list(flatten((args, kwargs))), engine.caller(node)
    engine.refused.setdefault(name, "recurrent layer: its units feed back into themselves")
    parameters = {name_used_by(engine, name, p): v for v in values if (p := v.parameter) in engine.parameters}
    reason = _why_not(engine, node, name, parameters)
    if reason is None:
        for weight in parameters:
            if weight.rpartition(".")[2] in _INPUT_WEIGHTS:
                _read(engine, node, name, args[0], weight, parameters)
    else:
        engine.block(args[0], f"read by the recurrent layer '{name}'{reason}")
    for value in values[1:]:
        engine.block(value, f"read by the recurrent layer '{name}' as its state")
    return foreign(node, values)


def _why_not(engine: Engine, node: fx.Node, name: str, parameters: Collection[str]) -> str | None:
    module = engine.modules[name]
    if node.target._overloadname == "data":  # type: ignore[union-attr]
        return " as a packed sequence, in which examples cannot be told apart"
    if "forward" in vars(module) or not any(type(module).forward is kind.forward for kind in _KINDS):
        return ", which is no layer of torch, or has a forward of its own"
    if not any(f"{name}.{key}".removeprefix(".") in parameters for key in _INPUT_WEIGHTS):
        return ", whose weights are computed"
    return None


def _read(engine: Engine, node: fx.Node, name: str, value: Value, weight: str, parameters: Mapping[str, Value]) -> None:
    bias = parameters.get(weight.replace("weight_ih", "bias_ih"))
    axis, fold = batch_axis(value.example, -1, engine.batch_dim)
    call = LayerCall(
        module=name,
        weight=weight,
        bias=trained(engine, bias),
        layout=Layout(LINEAR),
        site=name,
        ports=("input",),
        node=node,
        columns=columns_of(engine, value, -1, name),
        axis=-1,
        batch_axis=axis,
        fold=fold,
        source=node.args[0],  # type: ignore[arg-type]
        rows=torch.arange(engine.parameters[weight].shape[0]),
        without_grad=engine.without_grad(name),
        trace=engine.number,
    )
    if call.bias is None:
        call.approximate = "no bias to take the mean" if bias is None else "its bias is frozen"
    engine.noted |= {(node, v.parameter) for v in (parameters[weight], bias) if v is not None and v.parameter}
    consume(engine, call)
    engine.layers.append(call)
