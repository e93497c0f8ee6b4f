"""Whether compiled code does what its graph says.

A compiler that errs does so in silence, and a step that is a little wrong trains nearly as well. So what was compiled
is run once beside the graph, operation by operation, before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule

Function = Callable[..., Sequence[Tensor]]
ROUNDING = 30  # so many times what a nudge of one rounding does to a result may be rounding itself


class Check:
    """What a graph makes of some arguments, and how far rounding can lead away from it."""

    def __init__(self, graph: GraphModule, example: Sequence[Tensor]) -> None:
        self.example = example
        held = [getattr(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr"]
        self.generators = [value for value in held if isinstance(value, torch.Generator)]
        eps = max((torch.finfo(kind).eps for kind in _kinds(graph, example)), default=0.0)
        self.expected = self._run(graph, example)
        # A gradient that is zero but for rounding (of a bias before a norm) becomes a whole step with Adam: nothing can
        # be said of such a number. A second run on arguments that are a little off tells which they are.
        nudged = self._run(graph, [_nudged(tensor, eps) for tensor in example])
        # What is written to is judged by how far it was moved, all else by its size.
        before = [*[None] * (len(self.expected) - len(example)), *example]
        self.allowed = [
            ROUNDING * _largest(expected, other) + eps**0.5 * _largest(expected, start)
            for expected, other, start in zip(self.expected, nudged, before, strict=True)
        ]

    def agrees(self, function: Function) -> bool:
        """Whether a function gives the same results, and leaves the same in its arguments, but for rounding."""
        given = self._run(function, self.example)
        return len(given) == len(self.expected) and all(
            _largest(expected, one) <= allowed
            for expected, one, allowed in zip(self.expected, given, self.allowed, strict=True)
        )

    def _run(self, function: Function, example: Sequence[Tensor]) -> list[Tensor]:
        """The results, and what becomes of the arguments, which are copies. Random numbers are the same each time."""
        held = [tensor.clone() for tensor in example]
        states = [generator.get_state() for generator in self.generators]
        try:
            with torch.random.fork_rng():
                return [*function(*held), *held]
        finally:
            for generator, state in zip(self.generators, states, strict=True):
                generator.set_state(state)


def _largest(tensor: Tensor, other: Tensor | None = None) -> float:
    """The largest difference, or number: where the first is finite, and there the other has to be."""
    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    gap = tensor.float() if tensor.itemsize < 4 else tensor
    gap = gap if other is None else gap - other.to(gap.dtype)
    return float(gap.abs().where(tensor.isfinite(), 0.0).nan_to_num(torch.inf, torch.inf).max())


def _nudged(tensor: Tensor, eps: float) -> Tensor:
    if not tensor.is_floating_point() or tensor.itemsize < 2:
        return tensor
    generator = torch.Generator(tensor.device).manual_seed(0)
    return tensor * (1 + torch.empty_like(tensor).uniform_(-eps, eps, generator=generator))


def _kinds(graph: GraphModule, example: Sequence[Tensor]) -> Iterator[torch.dtype]:
    """The precisions that are computed with."""
    for value in [*example, *(node.meta.get("val") for node in graph.graph.nodes)]:
        if isinstance(value, Tensor) and value.is_floating_point():
            yield value.dtype
