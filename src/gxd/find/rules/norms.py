"""Normalisations: labels pass, and the norm notes which of its entries belong to which unit."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from gxd.find.engine import Engine, NormCall, rule
from gxd.find.labels import FOREIGN, Value, collapse


@rule("batch_norm", "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm")
def batch_norm(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    value, weight, bias, mean, var = args[:5]
    _note(engine, value, [1], weight, bias, mean, var, couples=False)
    return value


@rule("instance_norm")
def instance_norm(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    value, weight, bias, mean, var = args[:5]
    _note(engine, value, [1], weight, bias, mean, var, couples=False)
    return value


@rule("layer_norm", "native_layer_norm")
def layer_norm(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    value, shape = args[0], args[1]
    weight, bias = [*args[2:4], None, None][:2]
    _normalised(engine, value, len(shape), weight, bias)
    return value


@rule("rms_norm", "_fused_rms_norm")
def rms_norm(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    value, shape = args[0], args[1]
    _normalised(engine, value, len(shape), args[2] if len(args) > 2 else None, None)
    return value


@rule("group_norm")
def group_norm(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    value, groups = args[0], args[1]
    weight, bias = [*args[2:4], None, None][:2]
    blocks = engine.units.resolve(value.unit).flatten(2).unflatten(1, (groups, -1))
    _note(engine, value, [1], weight, bias, None, None, couples=_mixes(blocks, [2, 3]))
    return value


@rule("local_response_norm")
def local_response_norm(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    _note(engine, args[0], [1], None, None, None, None, couples=True)
    return args[0]


def _normalised(engine: Engine, value: Value, trailing: int, weight: Value | None, bias: Value | None) -> None:
    dims = list(range(value.unit.dim() - trailing, value.unit.dim()))
    couples = _mixes(engine.units.resolve(value.unit), dims)
    _note(engine, value, dims, weight, bias, None, None, couples)


def _mixes(label: Tensor, dims: list[int]) -> bool:
    """Whether the statistics taken along ``dims`` are those of several units."""
    return bool(collapse(label, dims)[1].any())


def _note(
    engine: Engine,
    value: Value,
    dims: list[int],
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    var: Value | None,
    couples: bool,
) -> None:
    """Record the unit of every entry of the norm; an entry that serves several units is nobody's."""
    names = [v.parameter if isinstance(v, Value) else None for v in (weight, bias, mean, var)]
    module = next((engine.owner(name) for name in names if name is not None), None)
    if not value.has_units():
        return
    others = [d for d in range(value.unit.dim()) if d not in dims]
    entries, mixed = collapse(engine.units.resolve(value.unit), others)
    entries = entries.masked_fill(mixed, FOREIGN).reshape(prod(value.shape[d] for d in dims))
    if module is None:
        entries, module = torch.full_like(entries, FOREIGN), "norm"
    members = value.unit[value.unit >= 0].unique()
    # Frozen affine parameters stay as they are.
    weight_name, bias_name = [n if n is None or engine.parameters[n].requires_grad else None for n in names[:2]]
    engine.norms.append(NormCall(module, weight_name, bias_name, names[2], names[3], entries, members, couples))
