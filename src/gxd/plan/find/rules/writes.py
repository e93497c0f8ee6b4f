"""Ops that write: constants and noise over what was there, or values into some places of a tensor."""

from __future__ import annotations

from typing import Any

from torch import fx

from gxd.plan.find.engine import Engine, flatten, op_name, rule, unknown
from gxd.plan.find.labels import CONST, Value, compact, filled
from gxd.plan.find.rules.movement import is_mask, move
from gxd.plan.find.rules.pointwise import OTHER, PRODUCT, SUM, combine


@rule(
    """
    zeros_like ones_like full_like empty_like rand_like randn_like randint_like new_zeros new_ones new_full new_empty
    new_empty_strided zero fill.Scalar normal_ normal_functional uniform exponential geometric cauchy log_normal random
    bernoulli.float bernoulli.p
    """,
    statistics=True,
)
def made_from_a_shape(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Takes only its shape from its operand, or overwrites it: no unit's, and no data; noise is like dropout."""
    fake, like = node.meta["val"], args[0]
    return filled(fake.shape, CONST, like.example if like.shape == fake.shape else None)


@rule("normal", "poisson", "bernoulli", "_standard_gamma")
def drawn(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Random numbers with given parameters: a mean plus noise of some width."""
    return combine(engine, node, SUM, [a for a in args if isinstance(a, Value)])


@rule("copy", "fill.Tensor", "bernoulli.Tensor", statistics=True)
def copy(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Written over: what was there before is gone."""
    shape = node.meta["val"].shape
    return Value(args[1].unit.expand(shape), args[1].example.expand(shape))


@rule("masked_fill", statistics=True)
def masked_fill(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A mask is a factor; what is written where it is set, if it is no constant, is another branch."""
    value, mask, content = args
    masked = combine(engine, node, PRODUCT, [value, mask])
    return combine(engine, node, OTHER, [masked, content]) if isinstance(content, Value) else masked


@rule("index_put", "_unsafe_index_put", "_index_put_impl")
def index_put(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """``x[index] = values``: constants leave the units where they are, as a mask does; other values are moved, if it
    is known where to.
    """
    value, indices, content = args[:3]
    if _is_constant(content):
        masks = is_mask(node)
        for index, mask in zip(indices, masks, strict=True):
            if index is not None and mask and index.shape == value.shape:
                value = combine(engine, node, PRODUCT, [value, index])
            elif index is not None:
                engine.block(index, f"read by {op_name(node)} as an index, which is not a layer")
        return Value(value.unit, value.example)
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if not accumulate and all(i is None or i.concrete is not None for i in indices):
        return move(engine, node, args, kwargs)
    return unknown(engine, node, args, kwargs)


@rule("index_fill", "scatter", "scatter_add", "scatter_reduce", "index_add", "masked_scatter")
def write_constants(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Constants written to some places, or added there, leave the units where they are; others are not followed."""
    value, *rest = [a for a in args if isinstance(a, Value)]
    index, contents = rest[0], rest[1:]
    if not all(map(_is_constant, contents)):
        return unknown(engine, node, args, kwargs)
    if op_name(node).startswith("masked"):
        return combine(engine, node, PRODUCT, [value, index])
    engine.block(index, f"read by {op_name(node)} as an index, which is not a layer")
    return Value(value.unit, value.example)


def _is_constant(value: Any) -> bool:
    return all(bool((compact(v.unit)[0] == CONST).all()) for v in flatten(value))
