"""The one way to hook what the consumers of units read: to observe it, to clamp it, to measure it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gxd.errors import ObservationError
from gxd.plan.units import View

# What a hook does with the tensor that a consumer is about to read: returns it, or another one to be read instead.
Replace = Callable[[Tensor], Tensor]
_POSITION = {"query": 0, "key": 1, "value": 2}


class Site(NamedTuple):
    """A place where consumers read.

    Attributes:
        module: the name of the module that is called.
        ports: which of its arguments; ``heads``: what ``nn.MultiheadAttention`` reads in its output projection.
        views: the numbers of the views that are read there.
    """

    module: str
    ports: tuple[str, ...]
    views: tuple[int, ...]

    @property
    def inside_attention(self) -> bool:
        return "heads" in self.ports


def sites_of(views: Sequence[View]) -> list[Site]:
    """All places where some views are read. Their numbers are their places in the sequence."""
    found: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for number, view in enumerate(views):
        for consumer in view.consumers:
            numbers = found.setdefault((consumer.site, consumer.ports), [])
            if number not in numbers:
                numbers.append(number)
    return [Site(module, ports, tuple(numbers)) for (module, ports), numbers in found.items()]


def register(model: nn.Module, site: Site, hook: Callable[..., Any]) -> RemovableHandle:
    """Put a hook where it can call :func:`replace_input`, or, inside attention, :func:`replace_heads`."""
    module = model.get_submodule(site.module)
    if site.inside_attention:
        return module.register_forward_hook(hook)
    return module.register_forward_pre_hook(hook, with_kwargs=True)


@contextmanager
def hooked(model: nn.Module, views: Sequence[View], function: Callable[[Site, Tensor], Tensor]) -> Iterator[None]:
    """Within this context, consumers read what the function makes of their input, in whatever mode the model is."""
    handles = [register(model, site, _hook(site, function)) for site in sites_of(views)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(site: Site, function: Callable[[Site, Tensor], Tensor]) -> Callable[..., Any]:
    def replace(source: Tensor) -> Tensor:
        return function(site, source)

    def on_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return replace_input(site.ports, args, kwargs, replace)

    def on_heads(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return replace_heads(module, output, replace)

    return on_heads if site.inside_attention else on_input


def replace_input(
    ports: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], function: Replace
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a module call with the given ones replaced; a tensor passed twice stays one tensor."""
    done: dict[int, Tensor] = {}
    arguments: dict[int | str, Any] = dict(enumerate(args))
    arguments.update(kwargs)
    for port in ports:
        if port == "input":  # the first tensor, whatever it is called
            place: int | str = next(key for key, value in arguments.items() if isinstance(value, Tensor))
        else:
            place = _POSITION[port] if _POSITION[port] < len(args) else port
        source = arguments[place]
        if id(source) not in done:
            done[id(source)] = function(source)
        arguments[place] = done[id(source)]
    return tuple(arguments[n] for n in range(len(args))), {key: arguments[key] for key in kwargs}


def replace_heads(module: nn.Module, output: Any, function: Replace) -> Any:
    """The output of ``nn.MultiheadAttention`` as if its output projection, which it does not call, had read another
    tensor: that is linear, so what the replacement changes is added. None if nothing is replaced.
    """
    source = _heads(output[0])
    replaced = function(source)
    if replaced is source:
        return None
    change = (replaced - source) @ module.out_proj.weight.t()  # type: ignore[union-attr, operator]
    if output[0].dim() == 3:  # what the projection reads is (tokens, features), time-major
        length, batch = output[0].shape[1::-1] if module.batch_first else output[0].shape[:2]
        change = change.view(length, batch, -1)
        change = change.transpose(0, 1) if module.batch_first else change
    return (output[0] + change, *output[1:])


def _heads(output: Tensor) -> Tensor:
    """The input of ``out_proj``, ``(tokens, features)``, read off the graph of an attention module's output."""
    node = output.grad_fn
    while node is not None and not node.name().startswith(("AddmmBackward", "MmBackward")):
        node = node.next_functions[0][0] if node.next_functions else None
    if node is None:
        raise ObservationError(
            "the heads of nn.MultiheadAttention cannot be seen inside a compiled or checkpointed region, nor without "
            "gradients: leave them out with exclude='...', or use a module that calls "
            "torch.nn.functional.scaled_dot_product_attention and then a Linear"
        )
    return node._saved_mat1 if node.name().startswith("Addmm") else node._saved_self  # type: ignore[attr-defined]
