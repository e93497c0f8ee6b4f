"""Room zero: find the units of a model. Reads the model, never writes it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from gxd import expect
from gxd.errors import TraceError
from gxd.find import rules  # noqa: F401  (registers the rules)
from gxd.find.assemble import assemble
from gxd.find.engine import Engine
from gxd.find.finish import finish
from gxd.find.manual import HandGroup, merge_by_hand
from gxd.layers import unwrap
from gxd.observe import batch_size
from gxd.plan import UnitPlan

if TYPE_CHECKING:
    from collections.abc import Iterator


def find_units(
    model: nn.Module,
    example_inputs: Tensor | tuple[Any, ...] | Mapping[str, Any] | None = None,
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    rates: Mapping[str, float] | None = None,
    init: Mapping[str, Callable[..., object]] | None = None,
    residual: str = "skip",
    groups: Sequence[HandGroup] = (),
    batch_dim: int = 0,
) -> UnitPlan:
    """Find every hidden unit of a model that can be reset, and say why the others cannot.

    The model is traced once with ``torch.export``; it is left exactly as it was found. No value of the inputs
    matters, only their shapes. A batch of one, whose axis could not be told from others, is traced as a batch of two.

    Args:
        model: any module; one wrapped by ``torch.compile`` or ``DistributedDataParallel`` is unwrapped.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments of
            ``model.forward``. None: the model is not traced, and only the hand-written ``groups`` are used.
        include: shell-style pattern(s) of group names to keep. Default: all.
        exclude: shell-style pattern(s) of group names to leave out.
        rates: replacement rate by group-name pattern, for groups that differ from the common one.
        init: initialiser of fresh incoming weights by group-name pattern, such as ``torch.nn.init.kaiming_normal_``,
            called as ``f(tensor, generator=...)`` on the whole weight. Default: the distribution the weights have now.
        residual: what to do with coordinates of a residual stream, written by several layers: ``"skip"`` or
            ``"group"`` (reset the rows of all writers and the columns of all readers together).
        groups: hand-written groups (:func:`gxd.hand_group`); they replace traced groups of the same producers.
        batch_dim: the axis of the inputs that counts examples.

    Example::

        plan = gxd.find_units(model, x[:2])
        print(plan)
    """
    if residual not in ("skip", "group"):
        raise ValueError(f"residual={residual!r} is not 'skip' or 'group'")
    expect.module(model)
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, HandGroup) for group in groups):
        kind = type(
            next((g for g in groups if not isinstance(g, HandGroup)), groups)
            if isinstance(groups, (list, tuple))
            else groups
        )
        raise TypeError(f"groups must be a list of gxd.hand_group(...), got {kind.__name__}")
    model = unwrap(model)
    if example_inputs is None:
        if not groups:
            raise ValueError("give example_inputs to trace the model, or hand-written groups")
        plan = UnitPlan((), batch_dim=batch_dim)
    else:
        _check_batch(example_inputs, batch_dim)
        engine = Engine(model, _program(model, example_inputs, batch_dim), residual, batch_dim)
        engine.run()
        finish(engine)
        plan = assemble(engine)
    plan = merge_by_hand(model, plan, groups)
    return plan.select(include, exclude, rates, init)


def _check_batch(example_inputs: Any, batch_dim: int) -> None:
    if not isinstance(batch_dim, int) or isinstance(batch_dim, bool) or batch_dim < 0:
        raise ValueError(f"batch_dim={batch_dim!r} must be an axis of the inputs, 0 or more")
    tensors = [leaf for leaf in tree_leaves(example_inputs) if isinstance(leaf, Tensor)]
    if tensors and all(tensor.dim() <= batch_dim for tensor in tensors) and batch_dim:
        raise ValueError(
            f"batch_dim={batch_dim!r} is no axis of any input: {[tuple(tensor.shape) for tensor in tensors]}"
        )
    if any(not tensor.numel() for tensor in tensors):
        raise ValueError("example_inputs are empty: give a batch of two or more")


def call_arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the call that ``example_inputs`` stand for."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return (example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)), {}


def _program(model: nn.Module, example_inputs: Any, batch_dim: int) -> Any:
    def twice(tensor: Tensor) -> Tensor:
        single = tensor.dim() > batch_dim and tensor.shape[batch_dim] == 1
        return torch.cat([tensor, tensor], batch_dim) if single else tensor

    if batch_size(*call_arguments(example_inputs), batch_dim) == 1:
        with suppress(TraceError):  # an axis of one that is no batch; then as it was given
            return _export(model, tree_map_only(Tensor, twice, example_inputs))
    return _export(model, example_inputs)


def _export(model: nn.Module, example_inputs: Any) -> Any:
    args, kwargs = call_arguments(example_inputs)
    try:
        try:  # in training mode, as evaluation takes fused paths
            return _traced(model, args, kwargs, training=True)
        except Exception:  # layers dropped at random cannot be traced; they are not dropped in evaluation
            return _traced(model, args, kwargs, training=False)
    except Exception as error:  # torch.export raises many kinds; all of them mean the same to the user
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        raise TraceError(
            f"{type(model).__name__} could not be traced by torch.export: {type(error).__name__}: {first[:300]}\n"
            "If the message is about the inputs, fix example_inputs (a tensor, a tuple, or a dict of "
            "keyword arguments; a batch of "
            "two). If the forward pass depends on the values of its inputs, trace a part of the model "
            "(gxd.find_units(model.backbone, ...)), or describe the units by hand: gxd.find_units(model, "
            "groups=[gxd.hand_group('fc1', consumers=['fc2'])])."
        ) from error


def _traced(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Any:
    with _as_found(model, training), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch.export has to say is not for the user of a plan
        return torch.export.export(model, args, kwargs, strict=False)


@contextmanager
def _as_found(model: nn.Module, training: bool) -> Iterator[None]:
    """Everything in one mode for the trace; then modes, attributes and random state as they were."""
    modes = [(module, module.training) for module in model.modules()]
    attributes = [(module, dict(vars(module))) for module, _ in modes]  # a forward may keep what it has computed
    # What the trace must not meet: a cumulative BatchNorm reads its counter, and a cache is no tensor.
    changed: list[tuple[Any, str, Any]] = []
    for module, _ in modes:
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.momentum is None:
            changed.append((module, "momentum", None))
        if getattr(getattr(module, "config", None), "use_cache", False) is True:
            changed.append((module.config, "use_cache", True))
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            for module, _ in modes:
                module.training = training
            for owner, name, _ in changed:
                setattr(owner, name, 0.1 if name == "momentum" else False)
            yield
    finally:
        for module, before in attributes:
            vars(module).clear()
            vars(module).update(before)
        for owner, name, value in changed:
            setattr(owner, name, value)


__all__ = ["HandGroup", "find_units"]
