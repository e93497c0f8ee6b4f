"""Embeddings: a table of tokens is a linear layer on one-hot inputs, and writes a residual stream like one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from gxd.plan.find.engine import Engine, LayerCall, base_name, foreign, rule
from gxd.plan.find.labels import CONST, FOREIGN, Value, compact, filled
from gxd.plan.find.rules.layers import name_used_by, refusal
from gxd.plan.layouts import LINEAR_TRANSPOSED, Layout

ALONE = "embedding: its output has no incoming weights to draw again"
# What a summand of a stream may go through before it is added.
_ON_THE_WAY = {"add", "sub", "mul", "div", "dropout", "layer_norm", "rms_norm", "to", "_to_copy", "type_as", "clone"}
_ON_THE_WAY |= {"contiguous", "view", "reshape", "flatten", "unsqueeze", "squeeze", "expand", "slice"}


@rule("embedding", carries=0)
def embedding(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Its features are units only as coordinates of a stream that layers write, too; then they are reset together."""
    weight, index = args[0], args[1]
    shape = node.meta["val"].shape
    example = index.example.unsqueeze(-1).expand(shape)
    constant = bool((compact(index.unit)[0] == CONST).all())  # as of positions: the same for every input
    value = filled(shape, CONST if constant else FOREIGN, example)
    if weight.parameter not in engine.parameters:
        return value
    caller = engine.caller(node)
    parameter = name_used_by(engine, caller, weight.parameter)
    rows, none = torch.arange(shape[-1]), torch.zeros(0, dtype=torch.int64)
    call = LayerCall(
        module=engine.owner(parameter),
        weight=parameter,
        bias=None,
        layout=Layout(LINEAR_TRANSPOSED),
        site=caller,
        ports=("input",),
        node=node,
        columns=none,
        axis=-1,
        batch_axis=0,
        fold="none",
        source=node.args[1],  # type: ignore[arg-type]
        rows=rows,
        bias_rows=rows,
        without_grad=engine.without_grad(caller),
        trace=engine.number,
    )
    reason = _why_not(engine, call)
    if reason is not None:
        engine.refused.setdefault(call.module, reason)
        return value
    engine.noted.add((node, weight.parameter))
    call.units = engine.units.new(len(rows))
    engine.layers.append(call)
    return Value(call.units.expand(shape), example)


def _why_not(engine: Engine, call: LayerCall) -> str | None:
    module = engine.modules[call.module]
    if not engine.group_residuals or not _is_added(call.node):
        return ALONE
    if not isinstance(module, nn.Embedding) or call.site != call.module:
        return f"embedding: its table is used functionally by '{call.site}', not by calling the layer"
    if module.padding_idx is not None:
        return "embedding: a reset would write the row of its padding token (padding_idx), which is fixed"
    if module.max_norm is not None:
        return "embedding: it rescales its rows at every call (max_norm)"
    if module.sparse:
        return "embedding: its gradients are sparse, and say nothing about most tokens"
    return refusal(engine, call)


def _is_added(node: fx.Node) -> bool:
    """Whether the output is a summand of something."""
    pending, seen = [node], {node}
    while pending:
        for user in pending.pop().users:
            name = base_name(user)
            if name in ("add", "sub") and sum(isinstance(a, fx.Node) for a in user.args) > 1:
                return True
            if name in _ON_THE_WAY and user not in seen and isinstance(user.meta.get("val"), Tensor):
                seen.add(user)
                pending.append(user)
    return False


@rule("_embedding_bag", "embedding_bag", carries=0)
def embedding_bag(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if args[0].parameter in engine.parameters:
        engine.refused.setdefault(engine.owner(name_used_by(engine, engine.caller(node), args[0].parameter)), ALONE)
    return foreign(node, [args[1]])


@rule("embedding_renorm", carries=0)
def embedding_renorm(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Rows of the table itself, rescaled in place."""
    return args[0]
