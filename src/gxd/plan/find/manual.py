"""Groups written by hand, for models that cannot be traced."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gxd.errors import PlanError
from gxd.plan.init import fit
from gxd.plan.layouts import CONV, CONV_TRANSPOSE, Layout, NamedTensors, aliases, default_bound, layout_of
from gxd.plan.units import Consumer, Group, Norm, Producer, UnitPlan, View, tensor_names

_NORMS = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)
_COUPLING = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True)
class HandGroup:
    """Names of the layers of a hand-written group. See :func:`gxd.manual_group`."""

    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    norms: tuple[str, ...]
    columns: Tensor | None
    batch_axis: int


def manual_group(
    producers: str | Sequence[str],
    consumers: str | Sequence[str],
    norms: str | Sequence[str] = (),
    *,
    columns: Tensor | Sequence[Sequence[int]] | None = None,
    batch_axis: int = 0,
) -> HandGroup:
    """Describe a group by hand: who writes the units, who reads them, and which norms stand in between.

    Args:
        producers: qualified module name(s); all of them have one row per unit.
        consumers: qualified module name(s). With k times as many input columns as there are units, the columns of a
            unit are consecutive, as after ``flatten`` of ``(B, C, H, W)``.
        norms: norm modules between producer and consumers, with one entry per unit.
        columns: ``(n, k)`` the input columns of each unit, where they are laid out otherwise.
        batch_axis: the axis of the examples in the consumers' input.

    Example::

        plan = gxd.find_units(model, groups=[gxd.manual_group("conv1", consumers=["conv2"], norms=["bn1"])])
    """
    if not isinstance(batch_axis, int) or isinstance(batch_axis, bool) or batch_axis < 0:
        raise ValueError(f"manual_group: batch_axis={batch_axis!r} must be an axis of the consumers' input, 0 or more")
    return HandGroup(
        _names(producers, "producers"),
        _names(consumers, "consumers"),
        _names(norms, "norms"),
        _index(columns),
        batch_axis,
    )


def merge_by_hand(model: nn.Module, plan: UnitPlan, groups: Sequence[HandGroup]) -> UnitPlan:
    """The plan with hand-written groups added; they replace traced groups that share a producer."""
    if not groups:
        return plan
    written = [_build(model, group) for group in groups]
    names = [producer.module for group in written for producer in group.producers]
    for name in names:
        if names.count(name) > 1:
            raise PlanError(f"hand-written groups: {name!r} is a producer twice; give one group with all its consumers")
    taken = {producer.module for group in written for producer in group.producers}
    kept = [g for g in plan.groups if not taken & {p.module for p in g.producers}]
    skipped = tuple(s for s in plan.skipped if s.name.partition("[")[0] not in taken)
    everything = (*kept, *written)
    tensors = NamedTensors(model)
    shapes = {name: tuple(tensors[name].shape) for name in tensor_names(everything)}
    return replace(plan, groups=everything, skipped=skipped, shapes=shapes)


def _build(model: nn.Module, hand: HandGroup) -> Group:
    if not hand.producers or not hand.consumers:
        raise PlanError(
            "hand-written group: it needs at least one producer and one consumer, got "
            f"producers={list(hand.producers)}, consumers={list(hand.consumers)}"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in (*hand.producers, *hand.consumers, *hand.norms):
        if name not in modules:
            near = difflib.get_close_matches(name, modules, n=3)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "; see model.named_modules()"
            raise PlanError(f"hand-written group: the model has no module {name!r}{hint}")
    layouts = {name: _layout(name, modules[name]) for name in (*hand.producers, *hand.consumers)}
    names = aliases(dict(model.named_parameters(remove_duplicate=False)))
    for name in layouts:
        tied = names[id(modules[name].weight)]
        if len({id(modules[one.rpartition(".")[0]]) for one in tied}) > 1:
            raise PlanError(
                f"hand-written group: tied weights: {' and '.join(map(repr, tied))} are one parameter, and a reset of "
                f"{name!r} would write both"
            )
    sizes = {name: _rows(layouts[name], modules[name]) for name in hand.producers}
    size = next(iter(sizes.values()))
    if len(set(sizes.values())) > 1:
        raise PlanError(f"hand-written group: the producers have different numbers of rows: {sizes}")
    rows = torch.arange(size)
    producers = []
    for name in hand.producers:
        module = modules[name]
        weight = _weight(module)
        init = fit(weight, default_bound(module, weight))
        producers.append(Producer(name, f"{name}.weight", _bias(name, module), layouts[name], rows, rows, init))
    views = tuple(_view(name, modules[name], layouts[name], size, hand) for name in hand.consumers)
    norms = tuple(_norm(name, modules[name], size) for name in hand.norms)
    return Group(hand.producers[0], size, tuple(producers), views, norms)


def _view(name: str, module: nn.Module, layout: Layout, size: int, hand: HandGroup) -> View:
    columns = _columns(layout, module)
    if hand.columns is not None:
        count = hand.columns.numel()
        if not count or count % size:
            raise PlanError(f"hand-written group: columns has {count} entries, no multiple of the {size} units")
        index = hand.columns.view(size, -1)
        outside = index[(index < 0) | (index >= columns)]
        if len(outside):
            raise PlanError(
                f"hand-written group: columns has {int(outside[0])}, but those of {name!r} are 0 to {columns - 1}"
            )
        values, counts = index.unique(return_counts=True)
        if len(values) < count:
            raise PlanError(
                f"hand-written group: columns has {int(values[counts > 1][0])} twice; a column belongs to one unit"
            )
    elif columns % size:
        raise PlanError(
            f"hand-written group: {name!r} has {columns} columns, no multiple of the {size} units; give columns="
        )
    else:
        index = torch.arange(columns).view(size, -1)
    bias = _bias(name, module)
    frozen = bias is None and getattr(module, "bias", None) is not None
    approximate = None if bias else "its bias is frozen" if frozen else "no bias to take the mean"
    kernel_share = 1.0
    if layout.family == CONV and any(_pads(module)):
        approximate = approximate or "padding"
    elif layout.family == CONV_TRANSPOSE:
        approximate = approximate or "transposed kernel"
        kernel_share = 1.0 / float(torch.tensor(module.stride).prod())
    consumer = Consumer(name, f"{name}.weight", bias, None, layout, name, ("input",), kernel_share, approximate)
    axis = -1 if layout.family not in (CONV, CONV_TRANSPOSE) else -(_weight(module).dim() - 1)
    return View((consumer,), index, axis, hand.batch_axis)


def _norm(name: str, module: nn.Module, size: int) -> Norm:
    if not isinstance(module, _NORMS):
        raise PlanError(f"hand-written group: {name!r} is a {type(module).__name__}, not a norm")
    tensors = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    written = {key for key, t in tensors.items() if t.requires_grad or not isinstance(t, nn.Parameter)}
    names = {
        key: f"{name}.{key}" if key in written else None for key in ("weight", "bias", "running_mean", "running_var")
    }
    count = next((t.numel() for key, t in tensors.items() if names.get(key)), 0)
    if count % size:
        raise PlanError(f"hand-written group: norm {name!r} has {count} entries, no multiple of the {size} units")
    entries = torch.arange(count).view(size, -1)
    return Norm(name, **names, entries=entries, couples=isinstance(module, _COUPLING))


def _layout(name: str, module: nn.Module) -> Layout:
    layout = layout_of(module)
    if layout is None or isinstance(module, nn.MultiheadAttention):
        raise PlanError(f"hand-written group: {name!r} is a {type(module).__name__}, not a Linear or a convolution")
    own = module._parameters.get("weight")
    if own is None:
        raise PlanError(f"hand-written group: the weight of {name!r} is computed (a parametrization), not a parameter")
    if not own.requires_grad:
        raise PlanError(
            f"hand-written group: '{name}.weight' is frozen (requires_grad=False), and a reset would write it"
        )
    return layout


def _weight(module: nn.Module) -> Tensor:
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight


def _rows(layout: Layout, module: nn.Module) -> int:
    view = layout.canonical(_weight(module))
    return view.shape[0] * view.shape[1]


def _columns(layout: Layout, module: nn.Module) -> int:
    view = layout.canonical(_weight(module))
    return view.shape[0] * view.shape[2]


def _pads(module: nn.Module) -> list[bool]:
    padding = module.padding
    if isinstance(padding, str):
        return [padding == "same"]
    zeros = module.padding_mode == "zeros"
    return [zeros and bool(width) for width in padding]  # type: ignore[union-attr]


def _bias(name: str, module: nn.Module) -> str | None:
    """The name of the bias, if there is one that is trained."""
    bias = module._parameters.get("bias")
    return f"{name}.bias" if bias is not None and bias.requires_grad else None


def _names(names: str | Sequence[str], argument: str) -> tuple[str, ...]:
    several = (names,) if isinstance(names, str) else names
    if not isinstance(several, (list, tuple)) or not all(isinstance(name, str) for name in several):
        raise TypeError(
            f"manual_group: {argument} must be the name of a module, or a list of names, got {type(names).__name__}"
        )
    repeated = [name for name in several if several.count(name) > 1]
    if repeated:
        raise PlanError(f"manual_group: {argument} names {repeated[0]!r} twice")
    return tuple(several)


def _index(columns: Tensor | Sequence[Sequence[int]] | None) -> Tensor | None:
    if columns is None:
        return None
    try:
        index = torch.as_tensor(columns)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"manual_group: columns must be integers, (n, k), got {type(columns).__name__}") from error
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise TypeError(f"manual_group: columns must be integers, (n, k), got {index.dtype}")
    return index.long()
