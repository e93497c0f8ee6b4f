"""Whether compiled code does what its graph says.

A compiler that errs does so in silence, and a step that is a little wrong trains nearly as well. So what was compiled
is run once beside the graph, operation by operation, before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

Function = Callable[..., Sequence[Tensor]]
ROUNDING = 10  # so many times what a nudge of one rounding does to a result may be rounding itself


class Check:
    """What a graph makes of some arguments, and how far rounding can lead away from it."""

    def __init__(self, graph: GraphModule, example: Sequence[Tensor]) -> None:
        self.example = example
        held = [getattr(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr"]
        self.generators = [value for value in held if isinstance(value, torch.Generator)]
        # What still draws random numbers by itself (see noise.py) may draw them in another order, or layout.
        self.random = any(map(draws, graph.graph.nodes))
        if self.random:
            return
        eps = max((torch.finfo(kind).eps for kind in _kinds(graph, example)), default=0.0)
        self.expected = self._run(graph, example)
        nudged = self._run(graph, [_nudged(tensor, eps) for tensor in example])
        self.allowed = []
        for expected, other in zip(self.expected, nudged, strict=True):
            size, rounding = _largest(expected), ROUNDING * _largest(expected, other)
            # A gradient that is zero but for rounding (of a bias before a norm) becomes a whole step with Adam: nothing
            # can be said of a number that another rounding changes wholly.
            self.allowed.append(math.inf if 0 < size <= rounding else rounding + eps**0.5 * size)

    def agrees(self, function: Function) -> bool:
        """Whether a function gives the same results, and moves its arguments as far, but for rounding."""
        given = self._run(function, self.example)
        return self.random or all(
            _largest(expected, one) <= allowed
            for expected, one, allowed in zip(self.expected, given, self.allowed, strict=True)
        )

    def _run(self, function: Function, example: Sequence[Tensor]) -> list[Tensor]:
        """The results, and how far the arguments are moved, in copies. Generators are left as they were."""
        held = [tensor.clone() for tensor in example]
        states = [generator.get_state() for generator in self.generators]
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng())
            for device in filter(torch.amp.is_autocast_available, {tensor.device.type for tensor in example}):
                stack.enter_context(torch.autocast(device, enabled=False))  # its casts are in the graph already
            for generator, state in zip(self.generators, states, strict=True):
                stack.callback(generator.set_state, state)
            results = function(*held)
        moved = [now - before for now, before in zip(held, example, strict=True) if now.is_floating_point()]
        return [*results, *moved]


def draws(node: Node) -> bool:
    """Whether an operation of a graph draws random numbers. Attention does only with dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return "dropout_p" not in names or bool(given.get("dropout_p"))


def _largest(tensor: Tensor, other: Tensor | None = None) -> float:
    """The largest difference, or number: where the first is finite, and there the other has to be."""
    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    gap = tensor if other is None else tensor - other
    return float(gap.abs().where(tensor.isfinite(), 0.0).nan_to_num(torch.inf, torch.inf).max())


def _nudged(tensor: Tensor, eps: float) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    signs = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return tensor * (1 + eps * signs.to(tensor))


def _kinds(graph: GraphModule, example: Sequence[Tensor]) -> Iterator[torch.dtype]:
    """The precisions that are computed with."""
    for value in [*example, *(node.meta.get("val") for node in graph.graph.nodes)]:
        if isinstance(value, Tensor) and value.is_floating_point():
            yield value.dtype
