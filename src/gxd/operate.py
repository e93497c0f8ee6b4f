"""Room four: the reset operator R_S, and the optimizer's memory of what is reset."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gxd import expect
from gxd.errors import PlanError, ResetWarning
from gxd.layers import Layout, NamedTensors, unwrap
from gxd.plan import Consumer, Group, Producer, UnitPlan, tensor_names

Selection = list[tuple[Group, Tensor]]
STEP_POLICIES = ("keep", "reset")


def reset_units(
    model: nn.Module,
    plan: UnitPlan,
    units: Mapping[str, Tensor | list[int]],
    *,
    optimizer: Optimizer | None = None,
    references: Mapping[str, Tensor] | None = None,
    compensate: bool = True,
    generator: torch.Generator | None = None,
    step_policy: str = "keep",
) -> None:
    """Reset units: fresh incoming weights, zero outgoing weights, their mean moved into the consumers' biases.

    All arguments are checked before anything is written. Everything of all groups is read before anything is written,
    so neighbouring layers can be reset together.

    Args:
        model: the model the plan was made from.
        plan: from :func:`gxd.find_units`.
        units: group name -> indices of the units to reset.
        optimizer: if given, its state of exactly the slices that are drawn again or zeroed is cleared.
        references: group name -> ``(size,)`` or ``(views, size)`` the mean of each unit's value, for the
            compensation. A unit without a reference is taken to be zero on average.
        compensate: whether to move the mean contribution of each unit into its consumers' biases.
        generator: CPU generator of the fresh weights. Default: torch's global one.
        step_policy: what becomes of scalar counters in the optimizer state (Adam's ``step``): ``keep`` or ``reset``.

    Example::

        plan = gxd.find_units(sae, x[:2])
        gxd.reset_units(sae, plan, {"encoder": dead}, optimizer=optimizer)
    """
    if step_policy not in STEP_POLICIES:
        raise ValueError(f"step_policy={step_policy!r} is not one of {STEP_POLICIES}")
    expect.module(model)
    expect.plan(plan)
    expect.switch("compensate", compensate)
    expect.generator(generator)
    for name, value in (("units", units), ("references", references)):
        if not isinstance(value, Mapping) and (value is not None or name == "units"):
            raise TypeError(f"{name} must be a dict, group name -> tensor, got {type(value).__name__}")
    model = unwrap(model)
    tensors = NamedTensors(model)
    plan.validate(tensors)
    selection = [(plan[name], _indices(plan[name], index)) for name, index in units.items()]
    selection = [(group, index) for group, index in selection if len(index)]
    for name in references or {}:
        plan[name]
    means = {group.name: _reference(group, index, references) for group, index in selection}
    if optimizer is not None:
        expect.optimizer(optimizer)
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        written = tensor_names([group for group, _ in selection])
        if written and not any(id(tensors[name]) in trained for name in written):
            raise PlanError(
                f"the optimizer trains none of {', '.join(written[:3])} ...: give the optimizer of this model"
            )
    operate(tensors, selection, means if compensate else {}, generator)
    if optimizer is not None:
        clear_optimizer_state(optimizer, tensors, selection, step_policy)


def reset_optimizer_state(
    optimizer: Optimizer, parameter: Tensor, index: Tensor | list[int], dim: int = 0, *, step_policy: str = "keep"
) -> None:
    """Forget what an optimizer remembers of slices of a parameter: momentum, moments, anything slice-shaped.

    Args:
        optimizer: any optimizer with per-parameter state.
        parameter: one of its parameters.
        index: the slices, along ``dim``.
        dim: the axis.
        step_policy: what becomes of scalar counters (Adam's ``step``), which are shared by all slices: ``keep``
            leaves them, ``reset`` sets them to 0 and so repeats the bias correction for the whole parameter.

    Example::

        gxd.reset_optimizer_state(optimizer, sae.encoder.weight, dead, dim=0)
    """
    if step_policy not in STEP_POLICIES:
        raise ValueError(f"step_policy={step_policy!r} is not one of {STEP_POLICIES}")
    expect.optimizer(optimizer)
    if not any(p is parameter for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "reset_optimizer_state: the parameter is not one of the optimizer's; pass the tensor it was built with"
        )
    if not isinstance(dim, int) or isinstance(dim, bool) or not -parameter.dim() <= dim < parameter.dim():
        raise ValueError(
            f"reset_optimizer_state: dim={dim!r} is not an axis of a parameter of shape {tuple(parameter.shape)}"
        )
    index = _checked(index, parameter.shape[dim], "reset_optimizer_state: index")
    if len(index):
        _clear(optimizer, parameter, dim % parameter.dim(), index, step_policy)


# --- the operator
# -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def operate(
    tensors: Mapping[str, Tensor],
    selection: Selection,
    references: Mapping[str, Tensor],
    generator: torch.Generator | None,
) -> None:
    """R_S on named tensors, in the order that keeps neighbours apart: all reading before all writing.

    Args:
        tensors: the parameters and buffers, by name; written in place.
        selection: the groups and the indices of their units.
        references: group name -> ``(views, size)``; a group without an entry is not compensated.
        generator: of the fresh weights.
    """
    for group, index in selection:
        if group.name in references:
            for view, reference in zip(group.views, references[group.name], strict=True):
                mean, k = reference.index_select(0, index.to(reference.device)), view.columns.shape[1]
                mean = mean if k == 1 else mean.repeat_interleave(k)
                for consumer in view.consumers:
                    compensate_consumer(tensors, consumer, view.columns_of(index), mean)
    for group, index in selection:
        for producer in group.producers:
            draw_incoming(tensors, producer, index, generator or torch.default_generator)
        for norm in group.norms:
            entries = norm.entries[index].flatten()
            for name, value in (
                (norm.weight, 1.0),
                (norm.bias, 0.0),
                (norm.running_mean, 0.0),
                (norm.running_var, 1.0),
            ):
                if name is not None:
                    tensors[name].view(-1)[entries.to(tensors[name].device)] = value
    for group, index in selection:  # last, so that a fresh row does not bring a zeroed column back
        for view in group.views:
            for consumer in view.consumers:
                _fill(consumer.layout, "columns", tensors[consumer.weight], view.columns_of(index))


def compensate_consumer(tensors: Mapping[str, Tensor], consumer: Consumer, columns: Tensor, mean: Tensor) -> None:
    """``b_k <- b_k + w_ik r_i`` with the old weights, the kernel summed; or the same said to the following
    BatchNorm.
    """
    target = consumer.bias or consumer.running_mean
    if target is None:
        return
    full, axis = tensors[consumer.weight], consumer.layout.axis("columns")
    mean = mean.to(full.device)
    if axis is not None:
        flow = full.index_select(axis, columns.to(full.device))
        flow = flow.flatten(2).sum(2) if flow.dim() > 2 else flow
        flow = flow.to(mean.dtype)
        shift = flow @ mean if axis else mean @ flow
    else:
        weight, where = consumer.layout.column(full, columns)
        flow = weight[where].flatten(2).sum(2) if weight.dim() > 3 else weight[where]  # (columns, out / groups)
        flow = flow.to(mean.dtype) * mean.unsqueeze(1)
        blocks = torch.zeros(weight.shape[:2], dtype=mean.dtype, device=flow.device)
        shift = blocks.index_add_(0, where[0], flow).flatten()  # type: ignore[arg-type]
    sign = 1.0 if consumer.bias is not None else -1.0
    tensors[target].add_(shift.to(tensors[target].dtype), alpha=sign * consumer.taps)


def draw_incoming(tensors: Mapping[str, Tensor], producer: Producer, index: Tensor, generator: torch.Generator) -> None:
    """Fresh incoming weights from the layer's initial distribution, zero incoming bias."""
    full, axis = tensors[producer.weight], producer.layout.axis("rows")
    rows, bias_rows = producer.rows_of(index)
    if producer.init.function is not None:
        scratch = torch.empty(full.shape)
        producer.init.function(scratch, generator=generator)
        source, where = producer.layout.row(scratch, rows)
        fresh = source[where]
    else:
        shape = full.shape[1:] if axis == 0 else producer.layout.canonical(full).shape[2:]
        fresh = producer.init.draw(torch.Size((index.shape[0], *shape)), generator)
    if axis is not None:
        fresh = fresh.to(full)
        full.index_copy_(axis, rows.to(full.device), fresh.transpose(0, axis) if axis else fresh)
    else:
        weight, where = producer.layout.row(full, rows)
        weight[where] = fresh.to(weight)
    if producer.bias is not None:
        tensors[producer.bias].index_fill_(0, bias_rows.to(full.device), 0.0)


def _fill(layout: Layout, kind: str, tensor: Tensor, index: Tensor, value: float = 0.0) -> None:
    """Set rows or columns of a weight, or of a tensor of its shape, to a value."""
    axis = layout.axis(kind)
    if axis is not None:
        tensor.index_fill_(axis, index.to(tensor.device), value)
    else:
        view, where = layout.row(tensor, index) if kind == "rows" else layout.column(tensor, index)
        view[where] = value


# --- optimizer state
# ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def clear_optimizer_state(
    optimizer: Optimizer, tensors: Mapping[str, Tensor], selection: Selection, step_policy: str = "keep"
) -> None:
    """Begin the optimizer's state of every slice that a reset drew again or zeroed anew."""
    if not any(optimizer.state.values()):  # as with SGD without momentum
        return
    for group, index in selection:
        for producer in group.producers:
            rows, bias_rows = producer.rows_of(index)
            _clear_weight(optimizer, tensors[producer.weight], producer.layout, "rows", rows, step_policy)
            if producer.bias is not None:
                _clear(optimizer, tensors[producer.bias], 0, bias_rows, step_policy)
        for view in group.views:
            for consumer in view.consumers:
                columns = view.columns_of(index)
                _clear_weight(optimizer, tensors[consumer.weight], consumer.layout, "columns", columns, step_policy)
        for norm in group.norms:
            for name in filter(None, (norm.weight, norm.bias)):
                for state, first in _slice_shaped(optimizer, tensors[name], step_policy):
                    if state.shape == tensors[name].shape:
                        state.view(-1)[norm.entries[index].flatten().to(state.device)] = first


def _clear_weight(
    optimizer: Optimizer, weight: Tensor, layout: Layout, kind: str, index: Tensor, step_policy: str
) -> None:
    axis = layout.axis(kind)
    if axis is not None:
        _clear(optimizer, weight, axis, index, step_policy)
        return
    for state, first in _slice_shaped(optimizer, weight, step_policy):
        if state.shape[:2] == weight.shape[:2]:
            _fill(layout, kind, state, index, first)


@torch.no_grad()
def _clear(optimizer: Optimizer, parameter: Tensor, dim: int, index: Tensor, step_policy: str) -> None:
    for state, first in _slice_shaped(optimizer, parameter, step_policy):
        if state.shape[dim] == parameter.shape[dim]:  # a factored moment may have size 1 there: not the slice's own
            state.index_fill_(dim, index.to(state.device), first)


COUNTERS = {"step": 0.0, "mu_product": 1.0}  # scalars, and what they begin with
AVERAGES = ("ax",)  # ASGD's average of the weights: no memory of gradients


def _slice_shaped(optimizer: Optimizer, parameter: Tensor, step_policy: str) -> list[tuple[Tensor, float]]:
    """The state tensors that have a slice per slice of the parameter, and what they begin with; counters are dealt with
    by the policy.
    """
    state: dict[str, Any] = optimizer.state.get(parameter, {})
    found = []
    for key, value in state.items():
        if not isinstance(value, Tensor):
            if step_policy == "reset" and key == "step":
                state[key] = 0
        elif (
            key not in AVERAGES
            and value.dim() == parameter.dim()
            and all(a in (1, b) for a, b in zip(value.shape, parameter.shape, strict=True))
        ):
            found.append((value, _rate(optimizer, parameter) if key == "step_size" else 0.0))  # Rprop's begins with lr
        elif value.numel() == 1:
            if step_policy == "reset" and key in COUNTERS:
                value.fill_(COUNTERS[key])
        else:
            why = "is an average of weights" if key in AVERAGES else "has no slices like its parameter's"
            warnings.warn(
                f"optimizer state {key!r} of shape {tuple(value.shape)} {why} {tuple(parameter.shape)}; "
                f"it is left as it is by resets ({type(optimizer).__name__})",
                ResetWarning,
                stacklevel=2,
            )
    return found


def _rate(optimizer: Optimizer, parameter: Tensor) -> float:
    return next(float(group["lr"]) for group in optimizer.param_groups if any(p is parameter for p in group["params"]))


# --- checks
# -------------------------------------------------------------------------------------------------------------------


def _indices(group: Group, index: Tensor | list[int]) -> Tensor:
    return _checked(index, group.size, f"reset_units: group {group.name!r}")


def _checked(index: Tensor | list[int], size: int, what: str) -> Tensor:
    try:
        given = torch.as_tensor(index)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{what}: indices must be integers or a bool mask, got {type(index).__name__}: {error}"
        ) from error
    if given.dtype == torch.bool:
        if given.shape != (size,):
            raise ValueError(f"{what}: a mask must have shape ({size},), got {tuple(given.shape)}")
        return given.nonzero().flatten().cpu()
    if given.numel() and (given.dtype.is_floating_point or given.dtype.is_complex):
        raise TypeError(f"{what}: indices must be integers or a bool mask, got {given.dtype}")
    given = given.flatten().long().cpu()
    if given.numel() and (int(given.min()) < 0 or int(given.max()) >= size):
        bad = int(given[(given < 0) | (given >= size)][0])
        raise IndexError(f"{what}: index {bad} is out of range, the size is {size}")
    return given.unique()


def _reference(group: Group, index: Tensor, references: Mapping[str, Tensor] | None) -> Tensor:
    if references is None or group.name not in references:
        return torch.zeros(len(group.views), group.size)
    given = references[group.name]
    try:
        reference = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"references[{group.name!r}] must be a tensor, got {type(given).__name__}") from error
    if not reference.is_floating_point():
        reference = reference.float()
    if reference.shape == (group.size,):
        reference = reference.expand(len(group.views), -1)
    if reference.shape != (len(group.views), group.size):
        raise PlanError(
            f"references[{group.name!r}] has shape {tuple(reference.shape)}; it must be ({group.size},) or "
            f"({len(group.views)}, {group.size}), one row per view"
        )
    if not reference[:, index.to(reference.device)].isfinite().all():
        raise PlanError(
            f"references[{group.name!r}] must be finite for the units that are reset: it holds a NaN or inf"
        )
    return reference
