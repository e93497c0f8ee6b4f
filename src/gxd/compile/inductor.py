"""The compiler, and how much of it is believed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from gxd.compile.check import Check, Function

log = logging.getLogger(__name__)


def compile_graph(graph: GraphModule, example: list[Tensor]) -> Function:
    """Compile a flat graph for arguments like these: in the fastest way that gives the graph's own numbers."""
    check = Check(graph, example)
    why: Exception
    for way in ways(graph, example):
        try:
            function = way()
            if check.agrees(function):
                return function
            raise ArithmeticError("the compiler's code computes something else than the model; it was not used")
        except Exception as error:  # of another version of the compiler, too, or of code that cannot be run
            log.info("compiled code was not used", exc_info=error)
            why = error
    raise why


def ways(graph: GraphModule, example: list[Tensor]) -> Iterator[Callable[[], Function]]:
    """With rewrites of our own, where they are made for the machine; without."""
    import torch._inductor  # takes a while

    from gxd.compile.fuse import Rewrites, quietly

    # Inductor keeps what it has compiled, for the next process too, but only of graphs with a shape environment.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake: list[Any] = [mode.from_tensor(tensor, static_shapes=True) for tensor in example]
    # Random numbers as in eager mode, so that dropout is the same in both. And no result in the place of an operand:
    # there the compiler takes a part of a `cat` for a buffer of its own, and gives its memory away twice.
    options: dict[str, Any] = {"fallback_random": True, "inplace_buffers": False}

    def compiled(**more: Any) -> Function:
        with quietly():
            return torch._inductor.compile(graph, fake, options={**options, **more})

    if any(node.kwargs.get("generator") is not None for node in graph.graph.nodes):
        options["fx_graph_cache"] = False  # it would bring back the generator that the graph was first compiled with
    elif all(tensor.device.type == "cpu" for tensor in example):
        options["cpp_wrapper"] = True  # the kernels are called from C++ too: a quarter of a small network's time
        yield partial(compiled, post_grad_custom_post_pass=Rewrites())
    yield compiled
