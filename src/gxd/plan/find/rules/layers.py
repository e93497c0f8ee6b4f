"""Layers: columns that read units, rows that make new ones."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from gxd.plan.find.engine import Engine, LayerCall, foreign, op_name, rule
from gxd.plan.find.labels import FOREIGN, Value, collapse, compact, where_clear
from gxd.plan.find.marks import ARGUMENT
from gxd.plan.layouts import CONV, CONV_TRANSPOSE, LINEAR, LINEAR_TRANSPOSED, Layout, is_plain_call, layout_of


@rule("linear")
def linear(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if args[1].selected is not None:
        return functional(engine, node, args)
    return _layer(engine, node, args, (0, 1, 2), Layout(LINEAR), axis=-1)


@rule("conv1d", "conv2d", "conv3d")
def conv(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    padding = args[4] if len(args) > 4 else 0
    padded = padding != "valid" and any(_as_list(padding)) if padding != "same" else True
    layout = Layout(CONV, args[6] if len(args) > 6 else 1)
    return _layer(engine, node, args, (0, 1, 2), layout, axis=-(args[1].unit.dim() - 1), padded=padded)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def conv_transpose(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Each output sees one in ``stride`` taps of the kernel along each axis: a constant can match them only on
    average.
    """
    stride = _as_list(args[3] if len(args) > 3 else 1)
    rank = args[1].unit.dim() - 2
    kernel_share = 1.0 / prod(stride * rank if len(stride) == 1 else stride)
    layout = Layout(CONV_TRANSPOSE, args[6] if len(args) > 6 else 1)
    return _layer(engine, node, args, (0, 1, 2), layout, axis=-(rank + 1), padded=True, kernel_share=kernel_share)


@rule("addmm")
def transposed_linear(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """``b + x W``, as in the ``Conv1D`` of the GPT family: a linear layer whose weight is ``(in, out)``."""
    if kwargs:  # a factor
        return functional(engine, node, args)
    return _layer(engine, node, args, (1, 2, 0), Layout(LINEAR_TRANSPOSED), axis=-1)


def product_with_weight(engine: Engine, node: fx.Node, args: list[Any]) -> Any:
    """``x W`` or ``x W'``: the bias, if there is one, is added to it."""
    if args[1].unit.dim() != 2:
        return functional(engine, node, args)
    layout = Layout(LINEAR if op_name(node.args[1]) in _TURNS else LINEAR_TRANSPOSED)  # type: ignore[arg-type]
    return _layer(engine, node, args, (0, 1, None), layout, axis=-1)


@rule("addmv", "bilinear", "addbmm", "_grouped_mm", "grouped_mm_fallback")
def unowned_product(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return functional(engine, node, args)


def functional(engine: Engine, node: fx.Node, args: list[Any]) -> Any:
    """A weight used outside its layer: there is no module call to observe."""
    values = [a for a in args if isinstance(a, Value)]
    for value in values:
        parameter = weight_of(engine, value)
        if parameter is not None:
            engine.refused.setdefault(engine.owner(parameter) or parameter, _why_functional(engine, node, parameter))
    for value in values:
        engine.block(value, f"read by {op_name(node)} with a weight used functionally, which is not a layer call")
    return foreign(node, values)


def weight_of(engine: Engine, value: Value) -> str | None:
    """The parameter that a tensor is, or a part of."""
    return value.parameter if value.parameter in engine.parameters else value.selected


def _why_functional(engine: Engine, node: fx.Node, parameter: str) -> str:
    shape, name = engine.parameters[parameter].shape, parameter.rpartition(".")[2]
    if layout_of(engine.modules[engine.owner(parameter)]) is not None:
        return f"its weight is used functionally ({op_name(node)}), not by calling the layer"
    kind = "a stack of weights, as of experts," if len(shape) > 2 else "a weight"
    sizes = " x ".join(map(str, shape))
    return f"its parameter '{name}' ({sizes}) is {kind} read by {op_name(node)}, not by a layer that can be observed"


def _layer(
    engine: Engine,
    node: fx.Node,
    args: list[Any],
    places: tuple[int, int, int | None],
    layout: Layout,
    axis: int,
    padded: bool = False,
    kernel_share: float = 1.0,
) -> Any:
    """A product with a weight. ``places`` are those of the input, the weight and the bias among the arguments."""
    value, weight = args[places[0]], args[places[1]]
    bias: Value | None = None if places[2] is None or places[2] >= len(args) else args[places[2]]
    added = None
    if places[2] is None:
        added, bias = _added_bias(engine, node, weight)
    if weight.parameter is None or weight.parameter not in engine.parameters:
        return _computed(engine, node, value, weight, bias)
    if not isinstance(value, Value) or value.parameter in engine.parameters:
        return functional(engine, node, args)
    caller = engine.caller(node)
    parameter = name_used_by(engine, caller, weight.parameter)
    name = engine.owner(parameter)
    module = engine.modules[caller]
    attention = isinstance(module, nn.MultiheadAttention)
    source: Any = node.args[places[0]]
    columns = columns_of(engine, value, axis, name)
    if not attention and not (caller == name and is_plain_call(module)):
        # Any other class: what it is called with must be what it multiplies, for that is what can be observed.
        found = _argument(engine, node, source, axis, columns)
        if found is None or not _is_whole(node.args[places[1]], layout):
            return functional(engine, node, args)
        source, padded = found[0], padded or found[1]
        value = engine.values[source]
    call = LayerCall(
        module=name,
        weight=parameter,
        bias=trained(engine, bias),
        layout=layout,
        site=caller,
        ports=_ports(weight, bias) if attention else ("input",),
        node=node,
        columns=columns,
        axis=axis,
        batch_axis=0,
        fold="none",
        source=source,
        trace=engine.number,
    )
    uses = ((node, weight), (added or node, bias))
    engine.noted |= {(user, v.parameter) for user, v in uses if v is not None and v.parameter is not None}
    call.kernel_share = kernel_share
    call.without_grad = engine.without_grad(caller)
    if not call.ports:
        reason = f"read by a part of the packed projection of '{name}', which cannot be written alone"
        engine.units.block(call.columns, reason)
        call.columns = torch.full_like(call.columns, FOREIGN)
    call.batch_axis, call.fold = batch_axis(value.example, axis, engine.batch_dim)
    if (
        "query" in call.ports and value.unit.dim() == 3
    ):  # the module turns its arguments around, if need be, before it uses them
        call.batch_axis = 0 if module.batch_first else 1
    call.running_mean = _following_running_mean(engine, node, axis) if bias is None else None
    call.approximate = _approximation(engine, call, bias, padded)
    consume(engine, call)
    _produce(engine, call, weight, bias, node)
    engine.layers.append(call)
    return _output(call, args[places[0]], node, axis)


_CASTS = ("to", "_to_copy", "type_as", "contiguous", "clone", "alias", "detach", "lift_fresh_copy")
_TURNS = ("t", "numpy_T", "mT", "transpose", "permute", "swapaxes", "swapdims")  # of a matrix: rows and columns
_MOVES = (*_CASTS, "pad", "constant_pad_nd", "view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze")
_LAYERS = ("linear", "conv1d", "conv2d", "conv3d", "addmm", "matmul", "mm")


def _argument(
    engine: Engine, node: fx.Node, source: fx.Node, axis: int, columns: Tensor
) -> tuple[fx.Node, bool] | None:
    """The first argument of the module that a layer's input is, up to its type, its layout and padding, and whether it
    was padded. None if the input is computed inside the module, or something else in there reads the argument too.
    """
    caller, padded = engine.caller(node), False
    while True:
        inside = [u for u in source.users if (engine.caller(u) + ".").startswith(caller + ".")]
        if not all(user is node or op_name(user) in _LAYERS or op_name(user).startswith("_assert") for user in inside):
            return None
        if (id(engine.modules[caller]), 0) in source.meta.get(ARGUMENT, ()):
            break
        if engine.caller(source) != caller or op_name(source) not in _MOVES:
            return None
        padded |= "pad" in op_name(source)
        node, source = source, source.args[0]  # type: ignore[assignment]
    value = engine.values.get(source)
    if not isinstance(value, Value) or value.unit.dim() < -axis:
        return None
    others = [d for d in range(value.unit.dim()) if d != axis % value.unit.dim()]
    read, mixed = collapse(engine.units.resolve(value.unit), others)
    same = not bool(mixed.any()) and torch.equal(read.flatten(), engine.units.resolve(columns))
    return (source, padded) if same else None


def _is_whole(weight: Any, layout: Layout) -> bool:
    """Whether a weight is used as it is stored, not a part of it."""
    turned = False
    while weight.op == "call_function" and op_name(weight) in (*_CASTS, *_TURNS):
        turned ^= op_name(weight) in _TURNS
        weight = weight.args[0]
    return bool(weight.op == "placeholder") and (layout.family == LINEAR or not turned)


def _added_bias(engine: Engine, node: fx.Node, weight: Value) -> tuple[fx.Node | None, Value | None]:
    """The sum of a product and a bias of the same module, if nothing else reads the product."""
    readers = list(node.users)
    if len(readers) != 1 or op_name(readers[0]) not in ("add", "add_") or readers[0].kwargs:
        return None, None
    other = next((a for a in readers[0].args if a is not node), None)
    bias = engine.fetch(other)
    if not isinstance(bias, Value) or bias.parameter is None or not _is_whole(other, Layout(LINEAR)):
        return None, None
    mine = engine.owner(bias.parameter) == engine.owner(weight.parameter or "")
    return (readers[0], bias) if mine and bias.shape == node.meta["val"].shape[-1:] else (None, None)


def name_used_by(engine: Engine, caller: str, parameter: str) -> str:
    """A tied parameter has several names; the graph knows only one of them, the caller another."""
    names = engine.aliases[id(engine.parameters[parameter])]
    return next((name for name in names if engine.owner(name) == caller), parameter)


def _ports(weight: Value, bias: Value | None) -> tuple[str, ...]:
    """Where a projection inside ``nn.MultiheadAttention`` can be seen; nowhere if it is one part of a packed weight."""
    assert weight.parameter is not None and weight.rows is not None
    if weight.parameter.endswith("out_proj.weight"):
        return ("heads",)
    packed = weight.parameter.endswith("in_proj_weight") and weight.shape[0] == 3 * weight.shape[1]
    return ("query", "key", "value") if packed else ()


def _computed(engine: Engine, node: fx.Node, value: Value, weight: Value, bias: Value | None) -> Any:
    caller = engine.caller(node)
    reason = (
        "its weight is computed (a parametrization or a function of other tensors), there is no weight to draw again"
    )
    engine.refused.setdefault(caller.partition(".parametrizations")[0] or "(the model itself)", reason)
    for operand in (value, weight, bias):
        if isinstance(operand, Value):
            engine.block(operand, f"read by '{caller}', whose weight is computed")
    return foreign(node, [value])


def columns_of(engine: Engine, value: Value, axis: int, name: str) -> Tensor:
    """The label of each input column; a column that holds several units at several positions blocks them."""
    others = [d for d in range(value.unit.dim()) if d != axis % value.unit.dim()]
    kept = engine.reduce(value, others, f"read by '{name}' with several units in one column")
    return kept.unit.flatten()


def batch_axis(example: Tensor, axis: int, default: int) -> tuple[int, str]:
    """Which axis of the input (without the column axis) holds the examples, and how."""
    label, unclear = collapse(example, [axis % example.dim()], ignore=None)
    label = label.squeeze(axis)
    fallback = min(default, max(0, label.dim() - 1)), "none"
    (known,) = compact(label)
    if bool(compact(unclear)[0].any()) or known.numel() == 0 or bool((known < 0).any()):
        return fallback
    size = int(known.max()) + 1
    if size < 2:
        return fallback
    for dim in range(label.dim()):
        along, mixed = collapse(label, [d for d in range(label.dim()) if d != dim], ignore=None)
        along = along.flatten()
        if bool(mixed.any()) or len(along) % size:
            continue
        repeats = len(along) // size
        if torch.equal(along, torch.arange(size)):
            return dim, "none"
        if torch.equal(along, torch.arange(size).repeat_interleave(repeats)):
            return dim, "major"
        if torch.equal(along, torch.arange(size).repeat(repeats)):
            return dim, "minor"
    return fallback


def trained(engine: Engine, bias: Value | None) -> str | None:
    if bias is None or bias.parameter not in engine.parameters:
        return None
    return bias.parameter if engine.parameters[bias.parameter].requires_grad else None


def _following_running_mean(engine: Engine, node: fx.Node, axis: int) -> str | None:
    """The running mean of the BatchNorm that alone reads the layer's output, if there is one, and its channels are the
    layer's outputs: they are the second axis, which of a Linear on tokens is that of the tokens.
    """
    readers = list(node.users)
    if node.meta["val"].dim() + axis != 1:
        return None
    if len(readers) != 1 or op_name(readers[0]) != "batch_norm" or readers[0].args[0] is not node:
        return None
    mean = engine.fetch(readers[0].args[3])
    return mean.parameter if isinstance(mean, Value) else None


def _approximation(engine: Engine, call: LayerCall, bias: Value | None, padded: bool) -> str | None:
    if call.bias is None and call.running_mean is None:
        if bias is None:
            return "no bias to take the mean"
        return "its bias is frozen" if bias.parameter in engine.parameters else "its bias is computed"
    if call.layout.family == CONV_TRANSPOSE:
        return "transposed kernel"
    return "padding" if padded else None


def refusal(engine: Engine, call: LayerCall) -> str | None:
    """Why the weight of this call cannot be written, or None."""
    parameter = engine.parameters[call.weight]
    names = engine.aliases[id(parameter)]
    if len({id(engine.modules[engine.owner(n)]) for n in names}) > 1:
        return f"tied weights: {' and '.join(repr(n) for n in names)} are one parameter"
    if not parameter.requires_grad:
        return "frozen: its weight does not require gradients"
    if call.without_grad:
        return "called under torch.no_grad() (so does use_reentrant=True of checkpointing): nothing can be observed"
    return None


def consume(engine: Engine, call: LayerCall) -> None:
    reason = refusal(engine, call)
    if reason is not None:
        engine.units.block(call.columns, f"read by '{call.module}', which cannot be written ({reason})")
        call.columns = torch.full_like(call.columns, FOREIGN)


def _produce(engine: Engine, call: LayerCall, weight: Value, bias: Value | None, node: fx.Node) -> None:
    assert weight.rows is not None
    if call.ports == ("input",):  # the weight as it is stored
        call.rows = torch.arange(node.meta["val"].shape[call.axis])
    else:  # a part of a packed projection
        call.rows = weight.rows.select(-1, 0)
    call.bias_rows = call.rows if bias is None or bias.rows is None else bias.rows
    reason = refusal(engine, call)
    if reason is None and bias is not None and bias.parameter not in engine.parameters and bias.concrete is None:
        reason = "its bias is computed, there is none to set to zero"
    if reason is not None:
        engine.refused.setdefault(call.module, reason)
    else:
        call.units = engine.units.new(len(call.rows))


def _output(call: LayerCall, value: Value, node: fx.Node, axis: int) -> Value:
    shape = node.meta["val"].shape
    place = axis % len(shape)
    labels = call.units if len(call.units) else torch.full((shape[place],), FOREIGN)
    unit = labels.view([-1 if d == place else 1 for d in range(len(shape))]).expand(shape)
    mixed_dims = [place] if axis == -1 else list(range(place, len(shape)))
    return Value(unit, where_clear(*collapse(value.example, mixed_dims, ignore=None)).expand(shape))


def _as_list(padding: Any) -> list[int]:
    return list(padding) if isinstance(padding, (list, tuple)) else [padding]
