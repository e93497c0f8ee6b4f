"""Normalisations: labels pass, and the norm notes which of its entries belong to which unit."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor, fx

from gxd.plan.find.engine import Engine, NormCall, rule
from gxd.plan.find.labels import Value, collapse, compact, where_clear


@rule("batch_norm", carries=1)
def batch_norm(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Statistics over everything but the channels."""
    value = args[0]
    others = [d for d in range(value.unit.dim()) if d != 1]
    _note(engine, node, value, [1], args[1:5], couples=_mixes(engine.units.resolve(value.unit), others))
    return value


@rule("instance_norm", carries=1)
def instance_norm(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Statistics over the positions of each channel of each example."""
    value = args[0]
    positions = list(range(2, value.unit.dim()))
    _note(engine, node, value, [1], args[1:5], couples=_mixes(engine.units.resolve(value.unit), positions))
    return value


@rule("layer_norm", carries=1)
def layer_norm(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    value, shape = args[0], args[1]
    weight, bias = [*args[2:4], None, None][:2]
    _normalised(engine, node, value, len(shape), weight, bias)
    return value


@rule("rms_norm", carries=1)
def rms_norm(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    value, shape = args[0], args[1]
    _normalised(engine, node, value, len(shape), args[2] if len(args) > 2 else None, None)
    return value


@rule("group_norm", carries=1)
def group_norm(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    value, groups = args[0], args[1]
    weight, bias = [*args[2:4], None, None][:2]
    blocks = engine.units.resolve(value.unit).unflatten(1, (groups, -1))
    _note(engine, node, value, [1], (weight, bias, None, None), couples=_mixes(blocks, list(range(2, blocks.dim()))))
    return value


def _normalised(
    engine: Engine, node: fx.Node, value: Value, trailing: int, weight: Value | None, bias: Value | None
) -> None:
    dims = list(range(value.unit.dim() - trailing, value.unit.dim()))
    couples = _mixes(engine.units.resolve(value.unit), dims)
    _note(engine, node, value, dims, (weight, bias, None, None), couples)


def _mixes(label: Tensor, dims: list[int]) -> bool:
    """Whether the statistics taken along ``dims`` carry a unit into values that are not its own: other units, or
    constants.
    """
    (label,) = compact(label)
    last = label.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims)) if dims else label.unsqueeze(-1)
    return bool(((last >= 0).any(-1) & (last != last[..., :1]).any(-1)).any())


def _note(
    engine: Engine, node: fx.Node, value: Value, dims: list[int], tensors: Sequence[Value | None], couples: bool
) -> None:
    """Record the unit of every entry of the norm; an entry that serves several units is nobody's."""
    names = [v.parameter if isinstance(v, Value) else None for v in tensors]
    engine.noted |= {(node, name) for name in names if name is not None}
    module = next((engine.owner(name) for name in names if name is not None), "")
    others = [d for d in range(value.unit.dim()) if d not in dims]
    entries = where_clear(*collapse(engine.units.resolve(value.unit), others))
    entries = entries.reshape(prod(value.shape[d] for d in dims))
    if not module:
        entries, module = entries[:0], engine.caller(node)
    members = engine.units.among(value.unit)
    # Frozen affine parameters stay as they are.
    weight, bias = (n if n is None or engine.parameters[n].requires_grad else None for n in names[:2])
    engine.norms.append(NormCall(module, weight, bias, names[2], names[3], entries, members, couples, engine.number))
