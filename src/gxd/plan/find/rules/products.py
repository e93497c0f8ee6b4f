"""Products of two activations: attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from gxd.plan.find.engine import Engine, rule, unknown
from gxd.plan.find.labels import (
    CONST,
    FOREIGN,
    UNKNOWN,
    Value,
    agree,
    collapse,
    compact,
    filled,
    regroup,
    spread,
    where_clear,
)
from gxd.plan.find.rules.layers import functional, product_with_weight, weight_of

_SCORES = "read by a product of activations, as attention scores are, which is not a layer"
_MATRIX = "read by a product with a constant matrix, which is not a layer"


@rule("scaled_dot_product_attention")
def attention(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The output is a weighted mean of the values over positions: it carries their units. Query and key only make
    scores.
    """
    query, key, value = args[0], args[1], args[2]
    for operand in (query, key, *[a for a in args[3:4] if isinstance(a, Value)]):
        engine.block(operand, _SCORES)
    shape = node.meta["val"].shape
    kept = engine.reduce(value, [-2], _SCORES)
    unit, example = kept.unit, kept.example
    if kwargs.get("enable_gqa") and unit.dim() > 2:
        repeats = shape[-3] // unit.shape[-3]
        unit, example = _repeat_heads(unit, repeats), _repeat_heads(example, repeats)
    asked = where_clear(*collapse(query.example, [query.example.dim() - 1], ignore=None), UNKNOWN)
    example = agree(asked.expand(shape), example.expand(shape))
    return Value(unit.expand(shape), example)


def _repeat_heads(label: Tensor, repeats: int) -> Tensor:
    *outer, heads, length, width = label.shape
    label = label.unsqueeze(-3).expand(*outer, heads, repeats, length, width)
    return regroup(label, (*outer, heads * repeats, length, width))


@rule("matmul", "bmm", "mm", "linalg_matmul", "__matmul__")
def matmul(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A product sums over one axis: the labels of an operand survive if they are constant along it."""
    left, right = args[0], args[1]
    if right.parameter in engine.parameters:
        return product_with_weight(engine, node, args)
    if any(weight_of(engine, value) is not None for value in (left, right)):
        return functional(engine, node, args)
    if left.unit.dim() < 2 or right.unit.dim() < 2:
        return unknown(engine, node, args, kwargs)
    shape = node.meta["val"].shape
    return _product(engine, node, (left, [-1]), (right, [-2]), lambda label: label.expand(shape))


def _product(engine: Engine, node: fx.Node, left: Any, right: Any, place: Any) -> Value:
    reason = _reason(left[0], right[0])
    sides = [engine.reduce(value, dims, reason) for value, dims in (left, right)]
    units = [place(side.unit) for side in sides]
    examples = [place(side.example) for side in sides]
    if sides[0].has_units() and sides[1].has_units():  # units against units: an outer product
        for side in sides:
            engine.block(side, _SCORES)
        return filled(units[0].shape, FOREIGN, agree(*examples))
    unit = spread(lambda a, b: torch.where(a >= 0, a, torch.where(b >= 0, b, FOREIGN)), *units)
    return Value(unit, agree(*examples))


def _reason(*operands: Value) -> str:
    constant = any(bool((compact(value.unit)[0] == CONST).all()) for value in operands)
    return _MATRIX if constant else _SCORES


@rule("einsum")
def einsum(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Two operands and plain letters; anything else is unknown."""
    equation, operands = args[0].replace(" ", ""), args[1]
    if any(weight_of(engine, operand) is not None for operand in operands):
        return functional(engine, node, operands)
    if len(operands) != 2 or "->" not in equation or "." in equation:
        return unknown(engine, node, args, kwargs)
    inputs, output = equation.split("->")
    terms = inputs.split(",")
    if any(len(set(term)) != len(term) for term in terms):
        return unknown(engine, node, args, kwargs)
    shape = node.meta["val"].shape
    sides = []
    for term, operand in zip(terms, operands, strict=True):
        kept = engine.reduce(operand, [i for i, letter in enumerate(term) if letter not in output], _reason(*operands))
        sides.append(Value(_arrange(kept.unit, term, output, shape), _arrange(kept.example, term, output, shape)))
    return _product(engine, node, (sides[0], []), (sides[1], []), lambda label: label)


def _arrange(label: Tensor, term: str, output: str, shape: torch.Size) -> Tensor:
    label = label.squeeze([i for i, letter in enumerate(term) if letter not in output])
    letters = [letter for letter in term if letter in output]
    label = label.permute([letters.index(letter) for letter in output if letter in letters])
    return regroup(label, [shape[i] if letter in letters else 1 for i, letter in enumerate(output)]).expand(shape)


@rule("baddbmm")
def baddbmm(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if args[0].has_units() or bool((compact(args[0].unit)[0] == FOREIGN).any()):
        return unknown(engine, node, args, kwargs)
    return matmul(engine, node, args[1:], kwargs)
