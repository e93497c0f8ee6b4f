"""Notes in the graph of a trace, made while it is written: what each module was given, what outlives the forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import proxy_tensor

# Keys of a node's meta, which survive the passes of torch.export:
ARGUMENT = "gxd_argument_of"  # (id of a module, place among its tensors) for each call that was given the tensor
KEPT = "gxd_kept"  # something comes of the tensor that the graph does not show: it outlives the forward


@contextmanager
def marked(model: nn.Module) -> Iterator[dict[int, bool]]:
    """Note which modules were called, and in the graph with which tensors, and what outlives the forward.

    The graph itself does not tell an argument of a module from a tensor that it takes from elsewhere, nor a tensor that
    is looked at (by an assertion) from one that is kept (an auxiliary loss in an attribute).
    """
    called: dict[int, bool] = {}
    handles: list[Any] = [
        module.register_forward_pre_hook(_mark(called), with_kwargs=True) for module in model.modules()
    ]
    handles.append(model.register_forward_hook(_mark_what_is_left))
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


def _mark(called: dict[int, bool]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        called[id(module)] = called.get(id(module), True) and torch.is_grad_enabled()
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        for place, node in enumerate(map(node_of, tensors)):
            if node is not None:
                node.meta.setdefault(ARGUMENT, []).append((id(module), place))

    return hook


def _mark_what_is_left(module: nn.Module, args: Any, output: Any) -> None:
    tracer = _tracer()
    nodes = [slot.proxy.node for slot in list(tracer.tensor_tracker.values())] if tracer is not None else []
    mark_kept(node for node in nodes if not node.users)  # autograd keeps others, to compute gradients with


def mark_kept(nodes: Iterable[torch.fx.Node | None]) -> None:
    """Note that something comes of these nodes that the graph does not show."""
    for node in filter(None, nodes):
        node.meta[KEPT] = True


def node_of(tensor: Tensor) -> torch.fx.Node | None:
    """The node of the graph that is being written which stands for a tensor."""
    tracer = _tracer()
    slot = None if tracer is None else proxy_tensor.get_proxy_slot(tensor, tracer, None)
    return None if slot is None else slot.proxy.node


def _tracer() -> Any:
    mode = torch._ops._get_dispatch_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY)
    return None if mode is None else mode.tracer
