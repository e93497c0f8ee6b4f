"""One file per family of ops, one small function per op: how labels pass through it."""

from gxd.plan.find.rules import (
    embeddings,
    layers,
    movement,
    norms,
    pointwise,
    products,
    recurrent,
    reductions,
    writes,
    written_norms,
)

__all__ = [
    "embeddings",
    "layers",
    "movement",
    "norms",
    "pointwise",
    "products",
    "recurrent",
    "reductions",
    "writes",
    "written_norms",
]
