"""Hold units at a value: what a compensated reset amounts to, done to the activations instead of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gxd.observe.captures import Capture, Pass, attention_output, replace_arguments
from gxd.plan.layouts import NamedTensors
from gxd.plan.units import Consumer, Group, UnitPlan, View

See = Callable[[int, str, Tensor], None]  # view number within the group, consumer, what the consumer would have read


@contextmanager
def clamped(
    model: nn.Module, group: Group, index: Tensor, value: float | Tensor, see: See | None = None
) -> Iterator[None]:
    """Within this context, all views of the given units are held at a value.

    Args:
        model: the model the plan was made from.
        group: one of the plan's groups.
        index: the units.
        value: a number, or ``(views, size)``.
        see: called with what each consumer would have read otherwise.
    """
    values = torch.as_tensor(value, dtype=torch.float64).expand(len(group.views), group.size)
    handles = []
    try:
        for number, (view, level) in enumerate(zip(group.views, values, strict=True)):
            columns, levels = view.columns[index].flatten(), level[index].repeat_interleave(view.columns.shape[1])
            for consumer in view.shown:
                module = model.get_submodule(consumer.site)
                if "heads" in consumer.ports:
                    hook = _clamp_heads(model, consumer, columns, levels, number, see)
                    handles.append(module.register_forward_hook(hook))
                else:
                    hook = _clamp_input(view, consumer, columns, levels, number, see)
                    handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def blurred(model: nn.Module, group: Group, eps: float, generator: torch.Generator) -> Iterator[None]:
    """Within this context, all that the consumers of a group read is off by a relative ``eps``, up or down: what a sum
    that is rounded in another order does to the outputs.
    """

    def blur(tensor: Tensor) -> Tensor:
        signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor) * 2 - 1
        return tensor * (1 + eps * signs)

    def hook_input(module: nn.Module, args: Any, kwargs: Any, ports: tuple[str, ...]) -> Any:
        return replace_arguments(ports, args, kwargs, blur)

    def hook_heads(module: nn.Module, args: Any, output: Any) -> Any:
        return (blur(output[0]), *output[1:])

    handles = []
    try:
        for consumer in group.consumers:
            module = model.get_submodule(consumer.site)
            if "heads" in consumer.ports:
                handles.append(module.register_forward_hook(hook_heads))
            else:
                hook = partial(hook_input, ports=consumer.ports)
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _clamp_input(
    view: View, consumer: Consumer, columns: Tensor, levels: Tensor, number: int, see: See | None
) -> Callable[..., Any]:
    def clamp(source: Tensor) -> Tensor:
        if see is not None:
            see(number, consumer.module, source.detach())
        shape = [-1 if d == view.axis % source.dim() else 1 for d in range(source.dim())]
        sizes = [len(columns) if s == -1 else n for s, n in zip(shape, source.shape, strict=True)]
        return source.index_copy(view.axis, columns.to(source.device), levels.to(source).view(shape).expand(sizes))

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return replace_arguments(consumer.ports, args, kwargs, clamp)

    return hook


def _clamp_heads(
    model: nn.Module, consumer: Consumer, columns: Tensor, levels: Tensor, number: int, see: See | None
) -> Callable[..., Any]:
    """The output projection is linear: add what the clamp changes."""
    weights = NamedTensors(model, [consumer.weight])

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        heads = attention_output(output[0])  # (tokens, features), time-major
        if see is not None:
            see(number, consumer.module, heads.detach())
        where = columns.to(heads.device)
        change = (levels.to(heads) - heads[:, where]) @ weights[consumer.weight][:, where].t()
        if output[0].dim() == 3:
            length, batch = output[0].shape[:2] if not module.batch_first else output[0].shape[1::-1]
            change = change.view(length, batch, -1)
            change = change.transpose(0, 1) if module.batch_first else change
        return (output[0] + change, *output[1:])

    return hook


@contextmanager
def watched(model: nn.Module, plan: UnitPlan, one: Pass) -> Iterator[None]:
    """Within this context, a forward pass is captured in ``one``: all views of the plan, in whatever mode the model is.

    :class:`gxd.observe.captures.Observer` sees only training passes, on purpose; this is for looking on request.
    """
    handles = []
    views = [view for group in plan.groups for view in group.views]
    try:
        for number, view in enumerate(views):
            for consumer in view.shown:
                module = model.get_submodule(consumer.site)
                if "heads" in consumer.ports:
                    handles.append(module.register_forward_hook(_watch_heads(one, number)))
                else:
                    hook = _watch_input(one, number, consumer)
                    handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _watch_input(one: Pass, number: int, consumer: Consumer) -> Callable[..., Any]:
    def alias(source: Tensor) -> Tensor:
        alias = source.view_as(source) if source.requires_grad else source.detach().requires_grad_()
        one.setdefault(number, Capture(source)).aliases.append(alias)
        return alias

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return replace_arguments(consumer.ports, args, kwargs, alias)

    return hook


def _watch_heads(one: Pass, number: int) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        source = attention_output(output[0])
        one.setdefault(number, Capture(source)).aliases.append(source)

    return hook
