"""Norms written out in operations: ``x * rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)``, then a weight, then a bias.

A reduction over several units gives a *statistic* of them. Ops with constants pass it on. Where it scales or shifts the
very units it was made of, it couples them as a norm does; whatever else reads it reads a mixture of units, which blocks
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from gxd.plan.find.engine import Engine, NormCall, base_name
from gxd.plan.find.labels import CONST, FOREIGN, Statistic, Value, collapse, compact, where_clear

# Reductions that norms are made of. What others give (argmax, any, median) is no scale and no shift.
STATISTICS = {"sum", "mean", "norm", "linalg_vector_norm", "var", "std", "var_mean", "std_mean", "amax", "amin", "max"}
_COPIES = {"to", "_to_copy", "type_as", "float", "clone", "contiguous", "detach", "alias", "convert_element_type"}
_ROLES = {"product": ("weight", {"mul", "addcmul"}), "sum": ("bias", {"add", "addcmul"})}
_NOWHERE = torch.iinfo(torch.int64).max


def with_statistics(engine: Engine, node: fx.Node, value: Value, dims: list[int], reason: str) -> Value:
    """The operand of a reduction, where it reduces several units to one number labelled as their statistic."""
    last = list(range(-len(dims), 0))
    rows = compact(engine.units.resolve(value.unit))[0].movedim(dims, last)
    shape, rows = rows.shape[-len(dims) :], rows.flatten(-len(dims))
    lowest, highest = rows.masked_fill(rows < 0, _NOWHERE).amin(-1), rows.amax(-1)
    several = (lowest < highest) & ((rows >= 0) | (rows == CONST)).all(-1)
    mixed = compact(collapse(value.example, dims, ignore=None)[1])[0]  # no norm is over units and examples at once
    if not bool(several.any()) or bool(mixed.any()):
        return value
    distinct, which = rows[several].unique(dim=0, return_inverse=True)
    total = _original(node.args[0]) if base_name(node) == "sum" else None
    made = [engine.units.new_statistic(Statistic(engine.units.among(row), reason, total)) for row in distinct]
    rows = rows.clone()
    rows[several] = torch.tensor(made)[which].unsqueeze(-1)
    return replace(value, unit=rows.unflatten(-1, shape).movedim(last, dims).expand(value.shape))


def meet(engine: Engine, node: fx.Node, kind: str, left: Value, right: Value) -> tuple[Value, Value, int | None]:
    """Two operands with their statistics settled: a constant beside the units they are of, else foreign to all.

    Returns:
        The operands, and the norm that they make together, if they do.
    """
    labels = [engine.units.resolve(value.unit) for value in (left, right)]
    found = {k for label in labels for k in engine.units.statistics_among(label)}
    if not found:
        return left, right, None
    a, b = (label.clone() for label in compact(*labels))
    members = []
    for k in found:
        own = engine.units.resolve(engine.units.statistic(k).members)
        alike = [j for j in found if _same_members(engine, j, k)]
        fits = True
        for first, second, swapped in ((a, b, False), (b, a, True)):
            beside = second[first == k]
            units = torch.isin(beside, own)
            fits &= bool((units | (beside == CONST) | torch.isin(beside, torch.tensor(alike))).all())
            fits &= not bool(units.any()) or _scales_or_shifts(engine, node, kind, k, swapped)
        for first, second in ((a, b), (b, a)):
            here = first == k
            if not fits:
                engine.units.block(torch.tensor([k]), "")
                first[here] = FOREIGN
            elif bool((here & (second >= 0)).any()):
                first[here & (second >= 0)] = CONST
                members.append(own)
    norm = _note(engine, node, (left, right), torch.cat(members)) if members else None
    return *(replace(v, unit=c.expand(v.shape)) for v, c in ((left, a), (right, b))), norm  # type: ignore[return-value]


def _same_members(engine: Engine, one: int, other: int) -> bool:
    a, b = (engine.units.resolve(engine.units.statistic(k).members).unique() for k in (one, other))
    return torch.equal(a, b)


def _scales_or_shifts(engine: Engine, node: fx.Node, kind: str, label: int, swapped: bool) -> bool:
    """Whether this is what a norm does with its statistic; ``swapped``: the units come first, the statistic second."""
    if kind == "product":
        total = engine.units.statistic(label).total
        shares = total is not None and any(_original(operand) is total for operand in node.all_input_nodes)
        return not shares and (base_name(node) == "mul" or (base_name(node) == "div" and swapped))
    return kind == "sum" and base_name(node) in ("add", "sub", "rsub")


def _note(engine: Engine, node: fx.Node, operands: Sequence[Value], members: Tensor) -> int:
    """The number of the norm; one that shifts its units before it scales them is one."""
    for value in operands:
        call = engine.norms[value.norm] if value.norm is not None else None
        if value.norm is not None and call is not None and call.weight is None:
            call.members = torch.cat([call.members, members]).unique()
            return value.norm
    entries = torch.zeros(0, dtype=torch.int64)
    members = members.unique()
    engine.norms.append(
        NormCall(engine.caller(node), None, None, None, None, entries, members, couples=True, trace=engine.number)
    )
    return len(engine.norms) - 1


def affine(engine: Engine, node: fx.Node, kind: str, operands: Sequence[Value], result: Value) -> int | None:
    """The norm whose values the result still is: scaled by a number, or by its weight, or shifted by its bias."""
    name = base_name(node)
    if len(operands) == 1:
        return operands[0].norm if name in ("mul", "div") else None
    role, ops = _ROLES.get(kind, ("", set()))
    for value, other in (operands, operands[::-1]) if len(operands) == 2 and name in ops else ():
        if value.norm is None or result.norm is not None:
            continue
        if other.parameter in engine.parameters:
            return _with_parameter(engine, node, value.norm, other, result, role)
        if role == "weight" and bool((compact(other.unit)[0] == CONST).all()):
            return value.norm
    return result.norm


def _with_parameter(
    engine: Engine, node: fx.Node, number: int, parameter: Value, result: Value, role: str
) -> int | None:
    """Note that a parameter is the norm's: its entries are the units'."""
    name = parameter.parameter
    assert name is not None
    call, entries = engine.norms[number], _entries(engine, parameter, result.unit)
    if not bool((entries >= 0).any()):
        return None
    if call.entries.numel() and (getattr(call, role) is not None or not torch.equal(call.entries, entries)):
        call = replace(call, weight=None, bias=None)  # the same values under another weight: a norm of its own
        engine.norms.append(call)
        number = len(engine.norms) - 1
    engine.noted.add((node, name))
    call.entries, call.module = entries, engine.owner(name)
    if engine.parameters[name].requires_grad:  # frozen ones stay as they are
        setattr(call, role, name)
    return number


def _entries(engine: Engine, parameter: Value, unit: Tensor) -> Tensor:
    """The unit that every entry of a parameter meets; foreign where there are several."""
    assert parameter.parameter is not None
    whole = engine.parameters[parameter.parameter]
    lead = unit.dim() - parameter.unit.dim()
    repeated = [d for d in range(unit.dim()) if d < lead or parameter.shape[d - lead] == 1]
    common = where_clear(*collapse(engine.units.resolve(unit), repeated)).reshape(parameter.shape).flatten()
    entries = torch.full((whole.numel(),), FOREIGN)
    if parameter.shape == whole.shape:
        return common.clone()
    if parameter.rows is not None and len(entries) == whole.shape[0] == len(common):
        entries[parameter.rows.flatten()] = common
    return entries


def _original(node: Any) -> Any:
    """What a tensor is a copy of, in whatever precision."""
    while isinstance(node, fx.Node) and node.op == "call_function" and base_name(node) in _COPIES:
        node = node.args[0]
    return node
