"""What an op without a rule is made of: torch knows most of its ops as compositions of simpler ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten


def is_pointwise(op: Any) -> bool:
    """Whether ATen says so of an op, or of the one that it does in place."""
    if not isinstance(op, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in op.tags or (is_in_place(op) and torch.Tag.pointwise in _out_of_place(op).tags)


def is_in_place(op: torch._ops.OpOverload) -> bool:
    """Whether it is the variant of an op that writes to its first operand (``relu_``)."""
    return op._opname.endswith("_") and not op._opname.endswith("__") and _out_of_place(op) is not op


def _out_of_place(op: torch._ops.OpOverload) -> torch._ops.OpOverload:
    packet = getattr(getattr(torch.ops, op.namespace), op._opname.removesuffix("_"), None)
    return getattr(packet, op._overloadname, op)


def parts_of(node: fx.Node) -> tuple[fx.Graph, list[fx.Node]] | None:
    """The graph of simpler ops that a node stands for, by torch's own word, and the nodes that its inputs are; None if
    there is none.
    """
    function = _composition(node.target)
    if function is None:
        return None
    leaves, spec = tree_flatten((node.args, node.kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
    fakes = [leaf.meta.get("val") for leaf in given]
    mode = detect_fake_mode(fakes)
    if mode is None or not all(isinstance(fake, Tensor) for fake in fakes):
        return None

    def run(*tensors: Tensor) -> Any:
        rest = iter(tensors)
        args, kwargs = tree_unflatten([next(rest) if isinstance(leaf, fx.Node) else leaf for leaf in leaves], spec)
        result = function(*args, **kwargs)
        return tuple(result) if isinstance(result, tuple) else result  # of no type of its own

    try:
        with mode, torch.no_grad():
            graph = make_fx(run)(*fakes).graph
    except Exception:  # whatever a composition does not support: then it is a single op to us
        return None
    if any(part.target is node.target for part in graph.nodes):
        return None
    return graph, given


def _composition(op: Any) -> Callable[..., Any] | None:
    if not isinstance(op, torch._ops.OpOverload):
        return None
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
        return op
    return decomposition_table.get(op)
