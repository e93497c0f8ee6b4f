"""What the compiler does not do by itself for small batches: rewrites of a step's graph, after its mutations were moved
to the end and before it is compiled. Each gives the same numbers but for the order of sums.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node

from gxd.compile.check import draws

aten = torch.ops.aten
FEW_ROWS = 64  # where a product takes its time to begin with
MOST_USES = 4  # of a weight: a recurrent layer has hundreds, one after the other


class Rewrites(CustomGraphPass):
    """All of them, for the options of the compiler."""

    def __call__(self, graph: Graph) -> None:
        add_biases_last(graph)
        multiply_at_once(graph)
        descend_in_place(graph)

    def uuid(self) -> str:
        """What is compiled is kept on disk, under this among other things."""
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


@contextmanager
def quietly() -> Iterator[None]:
    """The compiler logs that it calls ``addmm_`` through the dispatcher, which is as well."""
    log = logging.getLogger("torch._inductor.ir")

    def other(record: logging.LogRecord) -> bool:
        return "addmm_" not in record.getMessage()

    log.addFilter(other)
    try:
        yield
    finally:
        log.removeFilter(other)


def add_biases_last(graph: Graph) -> None:
    """``addmm`` begins by writing the bias to all rows; the function that comes next adds it in passing."""
    for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
        bias, left, right = node.args
        if not node.kwargs and bias.meta["val"].dim() == 1:
            with graph.inserting_before(node):
                product = _call(graph, aten.mm.default, left, right)
                node.replace_all_uses_with(_call(graph, aten.add.Tensor, product, bias))
            graph.erase_node(node)


def multiply_at_once(graph: Graph) -> None:
    """Products with the same matrix become one: the gradients of the loss and of the output, in each layer."""
    if any(map(draws, graph.nodes)):
        return  # another order would give other random numbers
    products: dict[Any, list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.mm.default):
        products.setdefault(_matrix(node.args[1]), []).append(node)
    for nodes in products.values():
        rows = [node.meta["val"].shape[0] for node in nodes]
        if not 2 <= len(nodes) <= MOST_USES or min(rows) > FEW_ROWS or not _independent(nodes):
            continue
        with graph.inserting_before(nodes[0]):
            stacked = _call(graph, aten.cat.default, [node.args[0] for node in nodes])
            product = _call(graph, aten.mm.default, stacked, nodes[0].args[1])
            for node, (start, end) in zip(nodes, pairwise(accumulate(rows, initial=0)), strict=True):
                node.replace_all_uses_with(_call(graph, aten.slice.Tensor, product, 0, start, end))
        for node in nodes:
            graph.erase_node(node)
        stable_topological_sort(graph)
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        graph.output_node().prepend(node)  # mutations stay where they were, at the end


def descend_in_place(graph: Graph) -> None:
    """``p - lr * a @ b``, as SGD has it, is written by the product itself: the gradient need not be kept and read."""
    copies = graph.find_nodes(op="call_function", target=aten.copy_.default)
    changed = {node.args[0] for node in copies}
    for node in copies:
        difference = _args(node.args[1], aten.sub.Tensor)
        scaled = _args(difference[1], aten.mul.Tensor) if difference and difference[0] is node.args[0] else ()
        product = _args(scaled[1], aten.mm.default) if scaled else ()
        if (
            not product
            or scaled[0].meta["val"].dim()
            or product[0].meta["val"].dtype not in (torch.float, torch.double)
            or any(_owner(one) in changed for one in product)  # it would be read too late
        ):
            continue
        with graph.inserting_before(node):
            left = _call(graph, aten.mul.Tensor, _call(graph, aten.neg.default, scaled[0]), product[0])
            written = graph.call_function(aten.addmm_.default, (node.args[0], left, product[1]))
            written.meta["val"] = node.args[0].meta["val"]
        node.replace_all_uses_with(written)
        for one in (node, node.args[1], difference[1], scaled[1]):
            graph.erase_node(one)


def _args(node: Any, target: Any) -> tuple[Any, ...]:
    """The operands of a node that is this function, and whose result nothing else uses."""
    fits = isinstance(node, Node) and node.target == target and len(node.users) == 1 and not node.kwargs
    return node.args if fits else ()


def _owner(node: Any) -> Any:
    """What a view is a view of."""
    while node.op == "call_function" and node.target._schema.arguments[0].alias_info is not None:
        node = node.args[0]
    return node


def _call(graph: Graph, target: Any, *args: Any) -> Node:
    node = graph.call_function(target, args)
    values = torch.fx.node.map_arg(args, lambda arg: arg.meta["val"])
    node.meta["val"] = target(*values)
    return node


def _matrix(node: Any) -> tuple[Node, bool]:
    """The matrix behind transpositions, and whether they leave it transposed."""
    transposed = False
    while node.target == aten.t.default or (node.target == aten.permute.default and list(node.args[1]) == [1, 0]):
        node, transposed = node.args[0], not transposed
    return node, transposed


def _independent(nodes: list[Node]) -> bool:
    """Whether none of them needs another's result."""
    for node in nodes:
        behind = {node}
        queue = [node]
        for one in queue:
            queue += [other for other in one.all_input_nodes if other not in behind]
            behind.update(one.all_input_nodes)
        if len(behind.intersection(nodes)) > 1:
            return False
    return True
