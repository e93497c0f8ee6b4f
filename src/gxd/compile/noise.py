"""Random numbers are drawn before the compiled code runs, and given to it.

The compiler lays tensors out as it likes, so that a mask of dropout that it fills itself strikes other elements than in
the eager loop. And a graph that draws nothing can be compared with what was compiled of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from gxd.compile.check import draws

aten = torch.ops.aten
Draw = Callable[[], Tensor]
FILLS = (aten.bernoulli_.float, aten.uniform_.default, aten.normal_.default, aten.exponential_.default)
LIKE = (aten.rand_like.default, aten.randn_like.default)  # of a tensor they read the shape alone
FRESH = (aten.empty_like.default, aten.empty.memory_format, aten.new_empty.default)


def noise_as_inputs(graph: GraphModule) -> list[Draw]:
    """Make inputs of the random numbers that a graph draws from the default generator; returns how to draw them.

    None of them where some depend on values: drawn in two places, they would come in another order.
    """
    found: list[Draw] = []
    last = graph.graph.find_nodes(op="placeholder")[-1]
    drawing = [node for node in graph.graph.nodes if draws(node) and node.kwargs.get("generator") is None]
    if not all(map(_apart, drawing)):
        return found
    for node in drawing:
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(f"noise{len(found)}")
        last.meta["val"] = node.meta["val"]
        with graph.graph.inserting_before(node):
            copy = graph.graph.call_function(aten.clone.default, (last,))  # it may be written to
        copy.meta["val"] = node.meta["val"]
        found.append(_drawer(node))
        like = next(iter(node.all_input_nodes), None)
        node.replace_all_uses_with(copy)
        graph.graph.erase_node(node)
        if like is not None and like.target in FRESH and not like.users:
            graph.graph.erase_node(like)
    graph.recompile()
    return found


def _apart(node: Node) -> bool:
    """Whether random numbers can be drawn before anything else is known."""
    if node.target not in FILLS:
        return node.target in LIKE or not node.all_input_nodes
    like: Any = node.args[0]
    return like.target in FRESH and len(like.users) == 1  # it was made to be filled


def _drawer(node: Node) -> Draw:
    target: Any = node.target
    like: Any = node.args[0]
    if not isinstance(like, Node):  # `torch.randn(4, 3)`
        return partial(target, *node.args, **node.kwargs)
    value = like.meta["val"]
    empty = partial(torch.empty_strided, value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return partial(_draw, target, empty, node.args[1:], dict(node.kwargs))


def _draw(target: Any, empty: Callable[[], Tensor], args: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    drawn: Tensor = target(empty(), *args, **options)
    return drawn
