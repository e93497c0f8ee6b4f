"""Pointwise ops: labels merge element by element."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from gxd.find.engine import Engine, op_name, rule
from gxd.find.labels import CONST, FOREIGN, Value, agree, spread

# Where a unit meets data that is no unit's: a product modulates the unit, any other op makes a mixture.
_PRODUCTS = {
    "mul",
    "multiply",
    "div",
    "divide",
    "true_divide",
    "floor_divide",
    "pow",
    "masked_fill",
    "logical_and",
    "bitwise_and",
}
# Where two units meet: a sum makes a residual coordinate, any other op (product, maximum) makes one unit with two
# producers.
_SUMS = {"add", "sub", "subtract", "rsub", "lerp", "addcmul", "addcdiv", "logaddexp"}


@rule("<pointwise>", "masked_fill", "where")
def pointwise(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Any op with the ATen tag ``pointwise``."""
    operands = [a for a in [*args, *kwargs.values()] if isinstance(a, Value)]
    if op_name(node) == "where" and operands and not operands[0].has_units():
        operands = operands[1:]  # which branch is taken is no unit's business
    shape = node.meta["val"].shape
    merged: Value | None = None
    for operand in operands:
        spread = Value(operand.unit.expand(shape), operand.example.expand(shape))
        merged = spread if merged is None else merge(engine, node, merged, spread)
    if merged is None:
        return Value(torch.tensor(CONST).expand(shape), torch.tensor(FOREIGN).expand(shape))
    return merged


@rule("glu")
def glu(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Half of the units times the sigmoid of the other half."""
    dim = args[1] if len(args) > 1 else -1
    units, examples = args[0].unit.chunk(2, dim), args[0].example.chunk(2, dim)
    return merge(engine, node, Value(units[0], examples[0]), Value(units[1], examples[1]))


def merge(engine: Engine, node: fx.Node, left: Value, right: Value) -> Value:
    """Two operands of a pointwise op, already of the same shape."""
    unit = spread(lambda a, b: _merge(engine, node, a, b), *map(engine.units.resolve, (left.unit, right.unit)))
    return Value(unit, agree(left.example, right.example))


def _merge(engine: Engine, node: fx.Node, a: Tensor, b: Tensor) -> Tensor:
    name = op_name(node).removesuffix("_")
    a, b = _without_broadcast(engine, name, a, b)
    modulates = name in _PRODUCTS
    if not modulates:
        _meet_foreign(engine, node, a, b)
    both = (a >= 0) & (b >= 0) & (a != b)
    if name in _SUMS:  # two gated expressions of one merged unit (a highway) are two writers all the same
        both |= (a == b) & engine.units.merged(a)
    blocked = torch.zeros_like(both)
    if bool(both.any()):
        low, _ = engine.units.partners(a[both], b[both])
        first = a[both].unique()
        pairs = torch.stack([first, low[first]], 1)  # every unit meets one other here
        if name in _SUMS and not engine.group_residuals:
            engine.units.block(pairs, _why_added(engine, pairs))
            blocked = both
        else:
            engine.units.merge(pairs[:, 0], pairs[:, 1], residual=name in _SUMS)
            a = engine.units.resolve(a)
    foreign = (a == FOREIGN) | (b == FOREIGN)
    unit = torch.where(a >= 0, a, torch.where(b >= 0, b, torch.where(foreign, FOREIGN, CONST)))
    if not modulates:
        unit = unit.masked_fill(foreign, FOREIGN)
    return unit.masked_fill(blocked, FOREIGN)


def _meet_foreign(engine: Engine, node: fx.Node, a: Tensor, b: Tensor) -> None:
    name = op_name(node).removesuffix("_")
    mixture = torch.cat([a[(a >= 0) & (b == FOREIGN)], b[(b >= 0) & (a == FOREIGN)]])
    verb = "added to" if name in _SUMS else f"combined by {name} with"
    kind = "residual coordinate: " if name in _SUMS else ""
    engine.units.block(
        mixture, f"{kind}{verb} values that are no unit's (the model's input, an embedding, a layer that is not reset)"
    )


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


def _why_added(engine: Engine, pairs: Tensor) -> str:
    """The reason, with the names of the layers that wrote the two sides."""
    first, second = (_writer(engine, int(unit)) for unit in pairs[0])
    if pairs[0, 0] == pairs[0, 1]:
        return "residual coordinate: layers tied by products are added; residual='group' resets them together"
    if first == second:
        return "its units are added to one another, as by a rotary embedding"
    return f"residual coordinate: '{first}' and '{second}' are added; residual='group' resets them together"


def _writer(engine: Engine, unit: int) -> str:
    return next((c.module for c in engine.layers if len(c.units) and c.units[0] <= unit <= c.units[-1]), "?")
