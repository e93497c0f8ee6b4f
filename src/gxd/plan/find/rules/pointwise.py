"""Pointwise ops: labels merge element by element."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from gxd.plan.find.engine import Engine, base_name, rule
from gxd.plan.find.labels import CONST, FOREIGN, STATISTIC, Value, agree, filled, spread
from gxd.plan.find.rules import written_norms

# What becomes of two operands. Where a unit meets data that is no unit's, a product modulates the unit (where the unit
# is 0, nothing of the data is left), any other op makes a mixture, in which the unit cannot be reset. Where two units
# meet, a sum makes a residual coordinate, any other op (a product, a maximum) one unit with two producers.
PRODUCT, SUM, OTHER = "product", "sum", "other"
_KINDS = {
    **dict.fromkeys(("mul", "div", "true_divide", "floor_divide", "glu"), PRODUCT),
    **dict.fromkeys(("pow", "float_power", "ldexp", "xlogy", "special_xlog1py", "copysign"), PRODUCT),
    **dict.fromkeys(("logical_and", "bitwise_and"), PRODUCT),
    **dict.fromkeys(("add", "sub", "rsub", "logaddexp", "logaddexp2"), SUM),
}


@rule(
    "<pointwise>",
    "max.other min.other complex polar floor_divide hardshrink_backward softshrink_backward binomial",
    statistics=True,
)
def pointwise(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Any op with the ATen tag ``pointwise``, and some that lack it; the tests go over all of ATen."""
    operands = [a for a in [*args, *kwargs.values()] if isinstance(a, Value)]
    merged = combine(engine, node, _KINDS.get(base_name(node), OTHER), operands)
    fakes = node.meta["val"]
    return merged if isinstance(fakes, Tensor) else [merged for _ in fakes]


@rule("where", statistics=True)
def where(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Two branches: added, if the choice is made by others, one expression of all three, if units choose."""
    condition, *branches = [a for a in args if isinstance(a, Value)]
    if condition.has_units():
        return combine(engine, node, OTHER, [*branches, condition])
    return combine(engine, node, SUM, branches)


@rule("addcmul", "addcdiv", statistics=True)
def add_product(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return combine(engine, node, SUM, [args[0], combine(engine, node, PRODUCT, args[1:3])])


@rule("lerp", statistics=True)
def lerp(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """``start + weight * (end - start)``."""
    start, end, weight = args[:3]
    way = combine(engine, node, SUM, [end, start])
    way = combine(engine, node, PRODUCT, [way, weight]) if isinstance(weight, Value) else way
    return combine(engine, node, SUM, [start, way])


@rule("glu")
def glu(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Half of the units times the sigmoid of the other half."""
    dim = args[1] if len(args) > 1 else -1
    units, examples = args[0].unit.chunk(2, dim), args[0].example.chunk(2, dim)
    return combine(engine, node, PRODUCT, [Value(u, e) for u, e in zip(units, examples, strict=True)])


def combine(engine: Engine, node: fx.Node, kind: str, operands: Sequence[Value]) -> Value:
    """The operands of a pointwise op, one after the other, in the shape of its result."""
    fakes = node.meta["val"]
    shape = fakes.shape if isinstance(fakes, Tensor) else fakes[0].shape
    if not operands:
        return filled(shape, CONST)
    merged, *rest = [
        replace(o, unit=o.unit.expand(shape), example=o.example.expand(shape), concrete=None) for o in operands
    ]
    for operand in rest:
        merged = _merge(engine, node, kind, merged, operand)
    return Value(merged.unit, merged.example, norm=written_norms.affine(engine, node, kind, operands, merged))


def _merge(engine: Engine, node: fx.Node, kind: str, left: Value, right: Value) -> Value:
    left, right, norm = written_norms.meet(engine, node, kind, left, right)

    def labels(a: Tensor, b: Tensor) -> Tensor:
        return _merge_labels(engine, node, kind, a, b)

    unit = spread(labels, *map(engine.units.resolve, (left.unit, right.unit)))
    return Value(unit, agree(left.example, right.example), norm=norm)


def _merge_labels(engine: Engine, node: fx.Node, kind: str, a: Tensor, b: Tensor) -> Tensor:
    name = base_name(node)
    a, b = _without_broadcast(engine, name, a, b)
    if kind != PRODUCT:
        _meet_foreign(engine, name, kind, a, b)
    both = (a >= 0) & (b >= 0) & (a != b)
    if kind == SUM:  # two gated expressions of one merged unit (a highway) are two writers all the same
        both |= (a == b) & engine.units.merged(a)
    blocked = torch.zeros_like(both)
    if bool(both.any()):
        low, _ = engine.units.partners(a[both], b[both])
        first = a[both].unique()
        pairs = torch.stack([first, low[first]], 1)  # every unit meets one other here
        if kind == SUM and not engine.group_residuals:
            for some, reason in _why_added(engine, name, pairs):
                engine.units.block(some, reason)
            blocked = both
        else:
            engine.units.merge(pairs[:, 0], pairs[:, 1], residual=kind == SUM)
            a = engine.units.resolve(a)
    foreign = (a == FOREIGN) | (b == FOREIGN)
    rest = torch.where(foreign, FOREIGN, torch.where(a <= STATISTIC, a, b))  # else both are constant
    unit = torch.where(a >= 0, a, torch.where(b >= 0, b, rest))
    if kind != PRODUCT:
        unit = unit.masked_fill(foreign, FOREIGN)
    return unit.masked_fill(blocked, FOREIGN)


def _meet_foreign(engine: Engine, name: str, kind: str, a: Tensor, b: Tensor) -> None:
    mixture = torch.cat([a[(a >= 0) & (b == FOREIGN)], b[(b >= 0) & (a == FOREIGN)]])
    verb = "added to" if name in _KINDS else f"combined by {name} with"
    what = "values that are no unit's (such as the model's input, an embedding, a layer that is not reset)"
    engine.units.block(mixture, f"residual coordinate: {verb} {what}" if kind == SUM else f"{verb} {what}")


def _without_broadcast(engine: Engine, name: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A unit that meets several units (a scalar gate) is not one with any of them: it is read by something that is no
    layer.
    """
    both = (a >= 0) & (b >= 0) & (a != b)
    if not bool(both.any()):
        return a, b
    results = []
    for label, other in ((a, b), (b, a)):
        low, high = engine.units.partners(label[both], other[both])
        shared = low < high
        engine.units.block(shared.nonzero(), f"read by {name}, which is not a layer: it meets several units")
        results.append(label.masked_fill((label >= 0) & shared[label.clamp(min=0)], FOREIGN))
    return results[0], results[1]


def _why_added(engine: Engine, name: str, pairs: Tensor) -> Iterator[tuple[Tensor, str]]:
    """The reason for each pair, with the names of the layers that wrote the two sides."""
    verb = "added" if name in _KINDS else f"combined by {name}"
    calls = [call for call in engine.layers if len(call.units)]
    starts = torch.tensor([int(call.units[0]) for call in calls])
    writers = torch.bucketize(pairs, starts, right=True) - 1
    for first, second in writers.unique(dim=0).tolist():
        some = pairs[(writers == torch.tensor([first, second])).all(1)]
        one, other = calls[first].module, calls[second].module
        if first != second:
            yield some, f"residual coordinate: '{one}' and '{other}' are {verb}"
        else:
            same = some[:, 0] == some[:, 1]
            yield some[same], f"residual coordinate: expressions of '{one}' and what it is multiplied by are {verb}"
            yield some[~same], f"units of '{one}' are {verb} to one another"
