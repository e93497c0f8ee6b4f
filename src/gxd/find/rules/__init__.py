"""One file per family of ops, one small function per op: how labels pass through it."""

from gxd.find.rules import layers, movement, norms, pointwise, products, reductions, refusals, writes

__all__ = ["layers", "movement", "norms", "pointwise", "products", "reductions", "refusals", "writes"]
