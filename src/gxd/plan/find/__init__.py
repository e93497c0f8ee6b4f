"""Find the units of a model. Reads the model, never writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gxd import arguments
from gxd.errors import ObservationWarning, TraceError, warn
from gxd.plan.find import rules  # noqa: F401  (registers the rules)
from gxd.plan.find.assemble import assemble, covered
from gxd.plan.find.engine import Engine
from gxd.plan.find.finish import finish
from gxd.plan.find.manual import HandGroup, merge_by_hand
from gxd.plan.find.trace import Call, Trace, call_arguments, calls, trace_call
from gxd.plan.layouts import unwrap
from gxd.plan.units import UnitPlan
from gxd.sandbox.called import called_by
from gxd.sandbox.fakes import traced_in_place
from gxd.sharded import refuse_shards


def find_units(
    model: nn.Module,
    example_inputs: Tensor | tuple[Any, ...] | Mapping[str, Any] | list[Any] | None = None,
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    rates: Mapping[str, float] | None = None,
    init: Mapping[str, Callable[..., object]] | None = None,
    residual: str = "skip",
    groups: Sequence[HandGroup] = (),
    batch_dim: int = 0,
    call: Callable[..., Any] | None = None,
) -> UnitPlan:
    """Find every hidden unit of a model that can be reset, and say why the others cannot.

    The model is traced with ``torch.export``; it is left exactly as it was found. No value of the inputs matters, only
    their shapes, and two examples suffice.

    Args:
        model: any module; one wrapped by ``torch.compile`` or ``DistributedDataParallel`` is unwrapped.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments of
            ``model.forward``. A list: several such calls, for a model that does not run all its layers in one (a head
            for each task, an auxiliary head); the plan holds for all of them. None: the model is not traced, and only
            the hand-written ``groups`` are used.
        include: shell-style pattern(s) of group names to keep. Default: all.
        exclude: shell-style pattern(s) of group names to leave out.
        rates: replacement rate by group-name pattern, for groups that differ from the common one.
        init: initialiser of fresh incoming weights by group-name pattern, such as ``torch.nn.init.kaiming_normal_``,
            called as ``f(tensor, generator=...)`` on the whole weight. Default: the distribution the weights have now.
        residual: what to do with coordinates of a residual stream, written by several layers: ``"skip"`` or
            ``"group"`` (reset the rows of all writers and the columns of all readers together).
        groups: hand-written groups (:func:`gxd.manual_group`); they replace traced groups of the same producers.
        batch_dim: the axis of the inputs that counts examples.
        call: how training runs the model, if not as ``model(inputs)``: ``lambda agent, x: (agent.actor(x),
            agent.critic(x))``. All that training runs must be in it, and what it returns counts as the output.

    Example::

        plan = gxd.find_units(model, x[:2])
        print(plan)
    """
    if residual not in ("skip", "group"):
        raise ValueError(f"residual={residual!r} is not 'skip' or 'group'")
    arguments.module(model)
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, HandGroup) for group in groups):
        kind = type(
            next((g for g in groups if not isinstance(g, HandGroup)), groups)
            if isinstance(groups, (list, tuple))
            else groups
        )
        raise TypeError(f"groups must be a list of gxd.manual_group(...), got {kind.__name__}")
    model = unwrap(model)
    refuse_shards(model, "find_units")
    if example_inputs is None:
        if not groups:
            raise ValueError("give example_inputs to trace the model, or hand-written groups")
        plan = UnitPlan((), batch_dim=batch_dim)
    else:
        _check_batch(example_inputs, batch_dim)
        _check_model(model)
        with traced_in_place(model), called_by(model, call):
            plan = _traced(model, calls(example_inputs), residual, batch_dim)
    plan = merge_by_hand(model, plan, groups)
    return plan.select(include, exclude, rates, init)


def _traced(model: nn.Module, several: Sequence[Call], residual: str, batch_dim: int) -> UnitPlan:
    traces = [trace_call(model, call, batch_dim) for call in several]
    engine = _walked(model, traces, residual, batch_dim)
    if wrong := engine.time_first():
        warn(
            f"{wrong[0] or type(model).__name__!r} has batch_first=False, so it counts "
            f"examples on axis 1, but they are on axis {batch_dim} of the inputs: scores would mix examples with time "
            "steps. If the inputs are (time, batch), make the plan by plan=gxd.find_units(model, example_inputs, "
            "batch_dim=1). If they are (batch, time), the layer needs batch_first=True",
            ObservationWarning,
        )
    grouped = _walked(model, traces, "group", batch_dim) if residual == "skip" and engine.met_sums() else None
    return assemble(engine, covered(grouped) if grouped is not None else None)


def _walked(model: nn.Module, traces: Sequence[Trace], residual: str, batch_dim: int) -> Engine:
    engine = Engine(model, traces, residual, batch_dim)
    engine.run()
    finish(engine)
    return engine


def _check_batch(example_inputs: Any, batch_dim: int) -> None:
    if not isinstance(batch_dim, int) or isinstance(batch_dim, bool) or batch_dim < 0:
        raise ValueError(f"batch_dim={batch_dim!r} must be an axis of the inputs, 0 or more")
    if isinstance(example_inputs, list) and not example_inputs:
        raise ValueError("example_inputs is an empty list: give one call of the model, or several")
    for call in calls(example_inputs):
        tensors = [leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor)]
        if tensors and all(tensor.dim() <= batch_dim for tensor in tensors) and batch_dim:
            raise ValueError(
                f"batch_dim={batch_dim!r} is no axis of any input: {[tuple(tensor.shape) for tensor in tensors]}"
            )
        if any(not tensor.numel() for tensor in tensors):
            raise ValueError("example_inputs are empty: give a batch of two or more")


def _check_model(model: nn.Module) -> None:
    """Raise TraceError for what torch.export would refuse in words that do not say what to do."""
    for name, module in model.named_modules():
        kind = type(module)
        if kind.__name__ == "FullyShardedDataParallel":
            raise TraceError(
                f"{name or 'the model'!r} is wrapped by FullyShardedDataParallel, which flattens its parameters: make "
                "the plan before you wrap the model, or shard it with torch.distributed.fsdp.fully_shard"
            )
        if ".quantized" in kind.__module__ and kind.__module__.startswith("torch."):
            raise TraceError(
                f"{name!r} is quantised ({kind.__module__}.{kind.__name__}): it has no weights to train or reset. Make "
                "the plan from the floating-point model, and quantise after training"
            )


__all__ = ["HandGroup", "call_arguments", "find_units"]
