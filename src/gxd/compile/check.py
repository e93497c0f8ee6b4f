"""Whether compiled code does what its graph says.

A compiler that errs does so in silence, and a step that is a little wrong trains nearly as well. So what was compiled
is run once beside the graph, operation by operation, before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves

from gxd.compile.updates import real

Function = Callable[..., Sequence[Tensor]]
# In the names of sums of many terms.
SUMS = ("mm", "conv", "sum", "mean", "norm", "var", "attention", "scatter_add", "embedding_dense_backward", "fft")
ROUNDING = 10  # so many times what a nudge of one rounding does to a result may be rounding itself


class Check:
    """What a graph makes of some arguments, and how far rounding can lead away from it."""

    def __init__(self, graph: GraphModule, example: Sequence[Tensor]) -> None:
        self.graph, self.example = graph, example
        held = [getattr(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr"]
        self.generators = [value for value in held if isinstance(value, torch.Generator)]
        # What still draws random numbers by itself (see noise.py) may draw them in another order, or layout.
        self.random = any(map(draws, graph.graph.nodes))
        self.eps = max((torch.finfo(kind).eps for kind in _kinds(graph, example)), default=0.0)
        self.expected = [] if self.random else self._run(graph, example)

    def agrees(self, function: Function) -> bool:
        """Whether a function gives the same results, and moves its arguments as far, but for rounding."""
        gaps = self._gaps(function)
        least = [self.eps**0.5 * _largest(expected.tensor) + expected.rounding for expected in self.expected]
        if all(gap <= allowed for gap, allowed in zip(gaps, least, strict=True)):
            return True
        return all(gap <= allowed for gap, allowed in zip(gaps, self.allowed, strict=True))

    def _gaps(self, function: Function) -> list[float]:
        """How far its results are from those of the graph; none are compared if the graph draws random numbers."""
        given = self._run(function, self.example)
        pairs = zip(self.expected, [] if self.random else given, strict=True)
        return [_largest(expected.tensor, one.tensor) for expected, one in pairs]

    @cached_property
    def allowed(self) -> list[float]:
        """How far rounding may lead, seen where all arguments and sums are a rounding off: asked for only in doubt."""
        nudged = self._run(_Nudged(self.graph).run, [_copy(tensor, self.eps) for tensor in self.example])
        found = []
        for expected, other in zip(self.expected, nudged, strict=True):
            size, rounding = _largest(expected.tensor), ROUNDING * _largest(expected.tensor, other.tensor)
            # A gradient that is zero but for rounding (of a bias before a norm) becomes a whole step with Adam: nothing
            # can be said of a number that another rounding changes wholly.
            found.append(math.inf if 0 < size <= rounding else rounding + self.eps**0.5 * size + expected.rounding)
        return found

    def _run(self, function: Function, example: Sequence[Tensor]) -> list[Outcome]:
        """The results, and how far the arguments are moved, in copies. Generators are left as they were."""
        held = [_copy(tensor) for tensor in example]
        states = [generator.get_state() for generator in self.generators]
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng())
            for device in filter(torch.amp.is_autocast_available, {tensor.device.type for tensor in example}):
                stack.enter_context(torch.autocast(device, enabled=False))  # its casts are in the graph already
            for generator, state in zip(self.generators, states, strict=True):
                stack.callback(generator.set_state, state)
            outcomes = [Outcome(result, 0.0) for result in function(*held)]
        for before in example:
            now = held.pop(0)  # one by one, for all of them together are as large as the training
            if now.dtype != torch.bool:
                outcomes.append(Outcome(now - before, _last_digits(before)))
        return outcomes


class _Nudged(Interpreter):
    """Runs a graph with all sums of many terms off by the last digit of the largest in the tensor.

    Terms that nearly cancel leave a sum that is as uncertain as they are, and Adam makes a whole step of it: in a
    large network there are always some.
    """

    def run_node(self, node: Node) -> Any:
        result = super().run_node(node)
        schema = getattr(node.target, "_schema", None)
        if schema is not None and any(word in schema.name for word in SUMS) and not draws(node):
            for tensor in map(real, [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]):
                if tensor.is_floating_point() and tensor.numel():
                    tensor += torch.finfo(tensor.dtype).eps * _largest(tensor) * _signs(tensor)
        return result


class Outcome(NamedTuple):
    """A result, or the move of an argument, which is at least as uncertain as the last digits of the argument."""

    tensor: Tensor
    rounding: float


def draws(node: Node) -> bool:
    """Whether an operation of a graph draws random numbers. Attention does only with dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return "dropout_p" not in names or bool(given.get("dropout_p"))


def _largest(tensor: Tensor, other: Tensor | None = None) -> float:
    """The largest difference, or number: where the first is finite, and there the other has to be."""
    if not tensor.numel():
        return 0.0
    tensor = real(tensor)
    gap = tensor if tensor.is_floating_point() else tensor.double()
    gap = gap if other is None else gap - real(other).to(gap.dtype)
    return float(gap.abs().where(tensor.isfinite(), 0.0).nan_to_num(torch.inf, torch.inf).max())


def _last_digits(tensor: Tensor) -> float:
    return 2 * torch.finfo(tensor.dtype).eps * _largest(tensor) if real(tensor).is_floating_point() else 0.0


def _copy(tensor: Tensor, eps: float = 0.0) -> Tensor:
    """With its strides, for code is compiled for them, also where they leave gaps or overlap. ``eps``: nudged by it."""
    if tensor.layout != torch.strided or not tensor.numel():
        return tensor.clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.as_strided((span,), (1,)).clone()
    numbers = real(memory)
    if eps and numbers.is_floating_point():
        numbers *= 1 + eps * _signs(numbers)
    return memory.as_strided(tensor.shape, tensor.stride())


def _signs(tensor: Tensor) -> Tensor:
    return (torch.rand(tensor.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1).to(tensor)


def _kinds(graph: GraphModule, example: Sequence[Tensor]) -> Iterator[torch.dtype]:
    """The precisions that are computed with."""
    for value in [*example, *(node.meta.get("val") for node in graph.graph.nodes)]:
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            yield value.dtype
