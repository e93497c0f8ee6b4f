"""Clamp many units, one at a time, in one forward pass.

``torch.vmap`` runs over copies of the model in which one unit each is clamped. What lies before the clamp is the same
in every copy, so it is computed once for all of them; what lies behind runs on one large batch. A clamp at the input
of a Linear is a rank-one change of its output, so that its matrix product too is done once for all copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functionalize
from torch.overrides import TorchFunctionMode

from gxd.observe.consumers import replace_input
from gxd.plan.layouts import LINEAR, LINEAR_TRANSPOSED, is_plain_call
from gxd.plan.units import Consumer, Group, View
from gxd.sandbox.snapshot import as_found
from gxd.sandbox.substitute import Call, substituted


def can_clamp_many(group: Group) -> bool:
    """Whether all views of the units can be clamped without a graph: the heads of ``nn.MultiheadAttention`` cannot."""
    return not any("heads" in consumer.ports for consumer in group.consumers)


def outputs_clamped(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    group: Group,
    units: Tensor,
    references: Tensor,
    call: Call,
    output: Callable[[Any], Tensor],
) -> Tensor:
    """The outputs with nothing clamped, then with each of the units clamped, stacked: ``(1 + len(units), ...)``.

    The undisturbed copy goes through the same operations as the others, so that a unit that stays at its reference
    changes the output by nothing but the rounding of matrix products.

    Args:
        model: in evaluation mode.
        tensors: parameters and buffers by name, to be used instead of the model's own.
        group: the group of the units.
        units: ``(k,)`` which ones.
        references: ``(views, size)`` what they are clamped to.
        call: the arguments of the model, which may be written to.
        output: takes the tensor of interest from what the model returns.
    """
    slots = torch.cat([units[:1], units])  # the first slot is the undisturbed one; its unit does not matter
    on = torch.arange(len(slots)) > 0
    copies = [_slots(view, slots, on, level, tensors) for view, level in zip(group.views, references, strict=True)]

    def one(clamps: Sequence[dict[str, Any]], tensors: Mapping[str, Tensor], call: Call) -> Tensor:
        with substituted(model, tensors), _hooked(model, group, clamps):
            return output(model(*call[0], **call[1]))

    # In-place operations between copies and what they share are only possible in functional form.
    run = torch.vmap(functionalize(one), in_dims=(0, None, None), randomness="same")
    with as_found(model, values=True), torch.no_grad(), _PlainBatchNorm():
        return run(copies, {name: tensor.detach() for name, tensor in tensors.items()}, call)


def _slots(view: View, units: Tensor, on: Tensor, level: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """For each copy of the model: which columns of the view are clamped, to what, and their outgoing weights."""
    columns = view.columns[units]
    weights = {}
    for consumer in view.consumers:
        if consumer.layout.family in (LINEAR, LINEAR_TRANSPOSED):
            weight = tensors[consumer.weight]
            canonical, index = consumer.layout.column(weight, columns.flatten())
            outgoing = canonical[index].unflatten(0, columns.shape)  # (copies, columns, out)
            weights[consumer.weight] = outgoing * on.to(weight).view(-1, 1, 1)
    device = tensors[view.consumers[0].weight].device
    return {"on": on.to(device), "columns": columns.to(device), "level": level[units].to(device), "weights": weights}


@contextmanager
def _hooked(model: nn.Module, group: Group, clamps: Sequence[dict[str, Any]]) -> Iterator[None]:
    handles = []
    try:
        for view, clamp in zip(group.views, clamps, strict=True):
            for consumer in view.consumers:
                module = model.get_submodule(consumer.site)
                if consumer.weight in clamp["weights"] and consumer.ports == ("input",) and is_plain_call(module):
                    hook = _add_change(consumer, clamp)
                    handles.append(module.register_forward_hook(hook, with_kwargs=True))
                else:
                    hook = _clamp_input(view, consumer, clamp)
                    handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _add_change(consumer: Consumer, clamp: dict[str, Any]) -> Callable[..., Any]:
    """The layer is linear: let it read what it reads, and add what the clamp changes."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        sources: list[Tensor] = []

        def note(source: Tensor) -> Tensor:
            sources.append(source)
            return source

        replace_input(consumer.ports, args, kwargs, note)
        change = clamp["level"].to(output.dtype) - sources[0].index_select(-1, clamp["columns"])
        weight = clamp["weights"][consumer.weight]
        if weight.shape[0] == 1:
            return torch.addcmul(output, change, weight[0])
        return output + change @ weight

    return hook


def _clamp_input(view: View, consumer: Consumer, clamp: dict[str, Any]) -> Callable[..., Any]:
    def hold(source: Tensor) -> Tensor:
        size = source.shape[view.axis]
        own = (torch.arange(size, device=source.device).unsqueeze(1) == clamp["columns"]).any(1) & clamp["on"]
        shape = [size if d == view.axis % source.dim() else 1 for d in range(source.dim())]
        return torch.where(own.view(shape), clamp["level"].to(source.dtype), source)

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return replace_input(consumer.ports, args, kwargs, hold)

    return hook


class _PlainBatchNorm(TorchFunctionMode):
    """In evaluation BatchNorm is a scale and a shift; vmap would first move the copies into the channels.

    While such a mode is active, torch's transformer layers do not take their fused path, which would not call the
    layers inside, so that nothing could be clamped.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm and not kwargs.get("training", args[5] if len(args) > 5 else False):
            return _scale_and_shift(*args, **kwargs)
        return func(*args, **kwargs)


def _scale_and_shift(
    input: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    scale = (running_var + eps).rsqrt() * (1.0 if weight is None else weight)
    shift = (0.0 if bias is None else bias) - running_mean * scale
    shape = [1, -1] + [1] * (input.dim() - 2)
    return torch.addcmul(shift.view(shape), input, scale.view(shape))
