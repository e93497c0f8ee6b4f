"""The reset operator R_S, and the optimizer's memory of what is reset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gxd import arguments
from gxd.errors import PlanError
from gxd.plan.layouts import Layout, NamedTensors, unwrap
from gxd.plan.units import Consumer, Group, Producer, UnitPlan, tensor_names
from gxd.reset import births
from gxd.reset.operator import STEP_POLICIES, Reset
from gxd.reset.optimizers import check_state, follow, trained_by
from gxd.reset.writes import AlongAxis, Entries, InBlocks, Whole, Write, carry_out, read
from gxd.sharded import reshard, sharded_modules, whole

Selection = list[tuple[Group, Tensor]]
WHOLE = Reset()


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
    so neighbouring layers can be reset together. If anything fails meanwhile, all is as it was.

    Args:
        model: the model the plan was made from.
        plan: from :func:`gxd.find_units`.
        units: group name -> indices of the units to reset.
        optimizer: if given, its state follows: what it remembers of gradients of exactly the slices that are drawn
            again or zeroed begins anew, and copies of the weights (as of Lookahead) are written as the weights are.
            State that is not known is refused with :class:`gxd.PlanError`, before anything is written.
        references: group name -> ``(size,)`` or ``(views, size)`` the mean of each unit's value, for the
            compensation. A unit without a reference is taken to be zero on average.
        compensate: whether to move the mean contribution of each unit into its consumers' biases.
        generator: CPU generator of the fresh weights. Default: torch's global one. Processes that share out the
            parameters (FSDP2) all call this, with the same units and equal generators.
        step_policy: what becomes of scalar counters in the optimizer state (Adam's ``step``): ``keep`` or ``reset``.

    Example::

        plan = gxd.find_units(sae, groups=[gxd.manual_group("encoder", consumers=["decoder"])])
        gxd.reset_units(sae, plan, {"encoder": dead}, optimizer=optimizer)
    """
    if step_policy not in STEP_POLICIES:
        raise ValueError(f"step_policy={step_policy!r} is not one of {STEP_POLICIES}")
    arguments.module(model)
    arguments.plan(plan)
    arguments.switch("compensate", compensate)
    arguments.generator(generator)
    for name, value in (("units", units), ("references", references)):
        if not isinstance(value, Mapping) and (value is not None or name == "units"):
            raise TypeError(f"{name} must be a dict, group name -> tensor, got {type(value).__name__}")
    model = unwrap(model)
    reshard(sharded_modules(model))
    tensors = NamedTensors(model)
    plan.validate(tensors)
    selection = [(plan[name], _indices(plan[name], index)) for name, index in units.items()]
    selection = [(group, index) for group, index in selection if len(index)]
    for name in references or {}:
        plan[name]
    means = {group.name: _reference(group, index, references) for group, index in selection}
    if optimizer is not None:
        arguments.optimizer(optimizer)
        trained = {id(p) for p in trained_by([optimizer])}
        written = tensor_names([group for group, _ in selection])
        if written and not any(id(tensors[name]) in trained for name in written):
            raise PlanError(
                f"the optimizer trains none of {', '.join(written[:3])} ...: give the optimizer of this model"
            )
        if written:
            check_state([optimizer], tensors)
    operate(
        tensors,
        selection,
        means if compensate else {},
        generator,
        Reset(step_policy=step_policy),
        optimizers=[] if optimizer is None else [optimizer],
    )


def reset_optimizer_state(
    optimizer: Optimizer, parameter: Tensor, index: Tensor | list[int], dim: int = 0, *, step_policy: str = "keep"
) -> None:
    """Forget what an optimizer remembers of slices of a parameter, as if they were new: momentum and moments begin
    anew, copies of the weights become what the weights are now.

    Args:
        optimizer: an optimizer whose state is known (docs/optimizers.md; else :class:`gxd.PlanError`).
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
    arguments.optimizer(optimizer)
    if not any(p is parameter for p in trained_by([optimizer])):
        raise ValueError(
            "reset_optimizer_state: the parameter is not one of the optimizer's; pass the tensor it was built with"
        )
    if not isinstance(dim, int) or isinstance(dim, bool) or not -parameter.dim() <= dim < parameter.dim():
        raise ValueError(
            f"reset_optimizer_state: dim={dim!r} is not an axis of a parameter of shape {tuple(parameter.shape)}"
        )
    index = _checked(index, parameter.shape[dim], "reset_optimizer_state: index")
    if len(index):
        check_state([optimizer], {})
        where = AlongAxis(dim % parameter.dim(), index)
        with torch.no_grad():
            unchanged = Write(parameter, where, read(where, parameter))
            carry_out(follow([unchanged], [optimizer], step_policy, {}))


# --- the operator
# -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def operate(
    tensors: Mapping[str, Tensor],
    selection: Selection,
    references: Mapping[str, Tensor],
    generator: torch.Generator | None,
    reset: Reset = WHOLE,
    *,
    amounts: Mapping[str, Tensor] | None = None,
    initial: Mapping[str, Tensor] | None = None,
    optimizers: Sequence[Any] = (),
) -> None:
    """R_S on named tensors, and on what optimizers keep of them. If anything fails, all is as it was, the generator
    too.

    Args:
        tensors: the parameters and buffers, by name; written in place.
        selection: the groups and the indices of their units.
        references: group name -> ``(views, size)``; a group without an entry is not compensated.
        generator: of the fresh weights.
        reset: what is written.
        amounts: group name -> how far each of the chosen units goes, in [0, 1]; a group without an entry goes all the
            way.
        initial: the incoming weights as they began, by name, if the reset asks for them.
        optimizers: their state follows what is written to their parameters.
    """
    generator = generator or torch.default_generator
    before = generator.get_state()
    try:
        writes = reset_writes(tensors, selection, references, generator, reset, amounts or {}, initial or {})
        carry_out([*writes, *follow(writes, optimizers, reset.step_policy, tensors, reset.memories)])
    except BaseException:
        generator.set_state(before)
        raise


def reset_writes(
    tensors: Mapping[str, Tensor],
    selection: Selection,
    references: Mapping[str, Tensor],
    generator: torch.Generator,
    reset: Reset = WHOLE,
    amounts: Mapping[str, Tensor] = MappingProxyType({}),
    initial: Mapping[str, Tensor] = MappingProxyType({}),
) -> list[Write]:
    """What R_S writes, in the order that keeps neighbours apart; arguments as for :func:`operate`.

    Everything is read here: old weights, old references, fresh weights, initialisers of the user.
    """
    shifts: list[Write] = []
    writes: list[Write] = []
    zeros: list[Write] = []  # last, so that a fresh row does not bring a zeroed column back
    for group, index in selection:
        amount = _far(amounts.get(group.name), reset.blend, len(index))
        for producer in group.producers:
            writes.append(incoming(tensors, producer, index, generator, reset, initial, amount))
        if reset.offset == "zero":
            writes += offsets(tensors, group, index, amount)
        if not reset.lost:
            continue
        amount, means = _scaled(amount, reset.lost), references.get(group.name)
        for number, view in enumerate(group.views):
            columns, k = view.columns_of(index), view.columns.shape[1]
            mean = None
            if means is not None:
                mean = means[number].index_select(0, index.to(means.device))
                mean = mean if amount is None else mean * amount.to(mean)
                mean = mean if k == 1 else mean.repeat_interleave(k)
            each = _repeated(amount, k)
            for consumer in view.consumers:
                where, weight = _slices(consumer.layout, "columns", columns), tensors[consumer.weight]
                flow = None
                if mean is not None:
                    flow = read(where, weight)
                    shifts += compensation(tensors, consumer, where, flow, mean)
                zeros.append(Write(weight, where, 0.0, amount=each, before=flow))
    return [*shifts, *writes, *zeros]


def _far(amount: Tensor | None, blend: float, units: int) -> Tensor | None:
    """``(units,)`` how far each unit goes; None: all the way."""
    if amount is None:
        return None if blend == 1 else torch.full((units,), blend)
    return amount * blend


def _scaled(amount: Tensor | None, share: float) -> Tensor | None:
    """The amount of what takes away only a share; None: all of it."""
    if share == 1:
        return amount
    return torch.tensor(share) if amount is None else amount * share


def _repeated(amount: Tensor | None, times: int) -> Tensor | None:
    """The amount of units for each of their columns, or entries."""
    return amount if amount is None or not amount.dim() or times == 1 else amount.repeat_interleave(times)


def compensation(
    tensors: Mapping[str, Tensor], consumer: Consumer, where: AlongAxis | InBlocks, flow: Tensor, mean: Tensor
) -> list[Write]:
    """``b_k <- b_k + w_ik r_i`` with the old weights, the kernel summed; or the same said to the following
    BatchNorm.

    Args:
        where: the columns i.
        flow: the weights there.
        mean: of each column.
    """
    target = consumer.bias or consumer.running_mean
    if target is None:
        return []
    layout = consumer.layout
    mean, axis = mean.to(flow.device), layout.axis("columns")
    flow = (flow.flatten(2).sum(2) if flow.dim() > 2 else flow).to(mean.dtype)
    if axis is not None:
        shift = flow @ mean if axis else mean @ flow
    else:  # (columns, out / groups)
        groups, rows, width = layout.canonical_shape(tensors[consumer.weight].shape)[:3]
        blocks = torch.zeros(groups, rows, dtype=mean.dtype, device=flow.device)
        shift = blocks.index_add_(0, where.index.to(flow.device) // width, flow * mean.unsqueeze(1)).flatten()
    sign = 1.0 if consumer.bias is not None else -1.0
    return [Write(tensors[target], Whole(), shift, times=sign * consumer.kernel_share)]


def incoming(
    tensors: Mapping[str, Tensor],
    producer: Producer,
    index: Tensor,
    generator: torch.Generator,
    reset: Reset,
    initial: Mapping[str, Tensor],
    amount: Tensor | None,
) -> Write:
    """The incoming weights: as they began, if that is known, else as :attr:`gxd.Reset.incoming` says."""
    full, layout = tensors[producer.weight], producer.layout
    rows, _ = producer.rows_of(index)
    where = _slices(layout, "rows", rows)
    if producer.weight in initial:
        return Write(full, where, read(where, initial[producer.weight]), amount=amount)
    if producer.init.function is not None:
        scratch = torch.empty(full.shape)
        producer.init.function(scratch, generator=generator)
        source, place = layout.row(scratch, rows)
        fresh = source[place]
    else:
        shape = torch.Size((index.shape[0], *layout.canonical_shape(full.shape)[2:]))
        fresh = producer.init.draw(shape, generator)
        if reset.incoming != "fresh" and producer.has_fan_in:
            living = _living(full, layout, rows) if births.needs_living(reset.incoming) else None
            fresh = births.born(reset.incoming, fresh.flatten(1), living, generator).view(shape)
    fresh = fresh.to(full.device, full.dtype)
    return Write(full, where, fresh.transpose(0, 1) if layout.axis("rows") == 1 else fresh, amount=amount)


def _living(full: Tensor, layout: Layout, rows: Tensor) -> Tensor:
    """``(m, fan_in)`` the rows of a weight that are not reset."""
    weight = layout.canonical(whole(full.detach())).flatten(0, 1).flatten(1)
    others = torch.ones(len(weight), dtype=torch.bool)
    others[rows.cpu()] = False
    return weight[others.to(weight.device)].float().cpu()


def offsets(tensors: Mapping[str, Tensor], group: Group, index: Tensor, amount: Tensor | None) -> list[Write]:
    """Zero incoming biases, and the units' entries in norms as in a new one."""
    writes = []
    for producer in group.producers:
        if producer.bias is not None:
            where = AlongAxis(0, producer.rows_of(index)[1])
            writes.append(Write(tensors[producer.bias], where, 0.0, amount=amount))
    for norm in (norm for norm in group.norms if norm.entries.shape[1]):
        entries = Entries(norm.entries[index].flatten())
        each = _repeated(amount, norm.entries.shape[1])
        for name, value in ((norm.weight, 1.0), (norm.bias, 0.0), (norm.running_mean, 0.0), (norm.running_var, 1.0)):
            if name is not None:
                writes.append(Write(tensors[name], entries, value, amount=each))
    return writes


def _slices(layout: Layout, kind: str, index: Tensor) -> AlongAxis | InBlocks:
    """Rows or columns of a weight, or of a tensor of its shape."""
    axis = layout.axis(kind)
    return InBlocks(layout, kind, index) if axis is None else AlongAxis(axis, index)


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
