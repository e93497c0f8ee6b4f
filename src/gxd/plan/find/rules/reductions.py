"""Ops that reduce or mix along some axes keep the labels that are constant along them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from gxd.plan.find.engine import Engine, op_name, rule
from gxd.plan.find.labels import Value, regroup
from gxd.plan.find.rules.written_norms import STATISTICS, with_statistics


@rule(
    """
    sum mean amax amin prod logsumexp nansum nanmean var std norm linalg_vector_norm median max min any
    all argmax argmin count_nonzero nanmedian mode aminmax var_mean std_mean
    """,
    carries=1,
    statistics=True,
)
def reduction(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Reduce along axes; results of several tensors (``max`` with indices) carry the same labels."""
    value = args[0]
    dims = _argument(node, args, kwargs, "dim")
    rank = value.unit.dim()
    dims = list(range(rank)) if dims is None or dims == [] else dims if isinstance(dims, list) else [dims]
    dims = sorted({dim % rank for dim in dims}) if rank else []
    reason = f"read by {op_name(node)} over several units, which is not a layer"
    if op_name(node) in STATISTICS and dims:
        value = with_statistics(engine, node, value, dims, reason)
    kept = engine.reduce(value, dims, reason)

    def spread(fake: Tensor) -> Value:
        return Value(regroup(kept.unit, fake.shape), regroup(kept.example, fake.shape))

    fakes = node.meta["val"]
    return spread(fakes) if isinstance(fakes, Tensor) else [spread(fake) for fake in fakes]


@rule("softmax log_softmax _softmax _log_softmax cumsum cumprod logcumsumexp sort topk cummax cummin", carries=1)
def along(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Mix along one axis and keep it."""
    value = args[0]
    dim = _argument(node, args, kwargs, "dim")
    kept = engine.reduce(
        value,
        [dim if isinstance(dim, int) else -1],
        f"read by {op_name(node)} over several units, which is not a layer",
    )

    def spread(fake: Tensor) -> Value:
        return Value(kept.unit.expand(fake.shape), kept.example.expand(fake.shape))

    fakes = node.meta["val"]
    return spread(fakes) if isinstance(fakes, Tensor) else [spread(fake) for fake in fakes]


def _pool(name: str) -> list[str]:
    return [f"{name}{rank}d" for rank in (1, 2, 3)]


@rule(
    *_pool("max_pool"),
    *_pool("avg_pool"),
    *_pool("adaptive_avg_pool"),
    *_pool("adaptive_max_pool"),
    *[f"max_pool{rank}d_with_indices" for rank in (1, 2, 3)],
    *[f"_adaptive_avg_pool{rank}d" for rank in (2, 3)],
    """
    fractional_max_pool2d fractional_max_pool3d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    _upsample_bilinear2d_aa grid_sampler grid_sampler_2d _upsample_bicubic2d_aa
    """,
    carries=1,
)
def positions(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Pool or resize the positions of each channel: all axes from the third on, or the last of an unbatched tensor."""
    value = args[0]
    fakes = node.meta["val"]
    first = fakes if isinstance(fakes, Tensor) else fakes[0]
    spatial = _spatial_rank(op_name(node))
    dims = list(range(first.dim() - spatial, first.dim()))
    kept = engine.reduce(value, dims, f"read by {op_name(node)} over several units, which is not a layer")

    def spread(fake: Tensor) -> Value:
        return Value(kept.unit.expand(fake.shape), kept.example.expand(fake.shape))

    return spread(fakes) if isinstance(fakes, Tensor) else [spread(fake) for fake in fakes]


def _spatial_rank(name: str) -> int:
    return next((int(c) for c in name if c in "123"), 2)


def _argument(node: fx.Node, args: list[Any], kwargs: dict[str, Any], name: str) -> Any:
    if name in kwargs:
        return kwargs[name]
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            return args[position] if position < len(args) else argument.default_value
    return None
