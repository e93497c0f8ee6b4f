"""Prove a plan on the user's own model, with numbers.

For a few units of every group, the model is run twice on the example inputs: once with the unit's views clamped to a
value, and once on parameters that went through the reset operator with that value as the reference. Fresh incoming
weights change everything the unit still reaches, so equal outputs show three things at once: the views are all the
ways out of the unit, the claimed columns are the unit's and no other's, and the compensation is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gxd.find import find_units
from gxd.layers import NamedTensors, unwrap
from gxd.observe import attention_output, replace_arguments
from gxd.operate import operate
from gxd.plan import Consumer, Group, UnitPlan, View

PASSED, APPROXIMATE, WRONG = "passed", "approximate", "wrong"
_CLAMP = 0.37  # any value will do; not 0, which would hide a missing compensation


@dataclass(frozen=True)
class GroupCheck:
    """The verdict on one group.

    Attributes:
        name: of the group.
        status: ``passed``, ``approximate`` or ``wrong``.
        error: largest difference of the outputs between the clamped and the reset model, relative to the effect of
            the clamp.
        detail: what was seen, in words.
    """

    name: str
    status: str
    error: float
    detail: str


@dataclass(frozen=True)
class CheckReport:
    """The verdict on a plan. ``print`` it; ``report.ok`` is False if any group is wrong."""

    plan: UnitPlan
    groups: tuple[GroupCheck, ...]

    @property
    def ok(self) -> bool:
        return all(group.status != WRONG for group in self.groups)

    def __getitem__(self, name: str) -> GroupCheck:
        return next(group for group in self.groups if group.name == name)

    def __str__(self) -> str:
        if not self.groups:
            return "the plan has no group to check"
        width = max(len(group.name) for group in self.groups)
        lines = [f"{g.name.ljust(width)}  {g.status.ljust(11)}  error {g.error:.1e}  {g.detail}" for g in self.groups]
        count = {status: sum(g.status == status for g in self.groups) for status in (PASSED, APPROXIMATE, WRONG)}
        return "\n".join([*lines, ", ".join(f"{n} {status}" for status, n in count.items())])


def check(
    model: nn.Module,
    example_inputs: Tensor | tuple[Any, ...] | Mapping[str, Any],
    *,
    plan: UnitPlan | None = None,
    units_per_group: int = 3,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> CheckReport:
    """Verify a plan numerically on a model. The model is left as it is: the resets happen on copies of its tensors.

    Args:
        model: the model.
        example_inputs: as for :func:`gxd.find_units`; here their values matter, so give real data.
        plan: default: ``find_units(model, example_inputs)``.
        units_per_group: how many units of each group to try.
        tolerance: largest relative error of a group that passes.
        seed: of the choice of units and of the fresh weights.

    Returns:
        For each group ``passed``; ``approximate``, where the plan says so (zero padding at the borders, a norm that
        couples units, no bias to compensate in) and only the approximate part differs; or ``wrong``: the plan does
        not describe this model.
    """
    model = unwrap(model)
    plan = plan if plan is not None else find_units(model, example_inputs)
    tensors = NamedTensors(model)
    plan.validate(tensors)
    generator = torch.Generator().manual_seed(seed)
    run = _runner(model, example_inputs)
    with _evaluation(model), torch.random.fork_rng(devices=_cuda_devices(tensors)):
        return CheckReport(
            plan,
            tuple(_check_group(g, model, run, tensors, units_per_group, tolerance, generator) for g in plan.groups),
        )


def _check_group(
    group: Group,
    model: nn.Module,
    run: Callable[[Mapping[str, Tensor]], list[Tensor]],
    tensors: NamedTensors,
    count: int,
    tolerance: float,
    generator: torch.Generator,
) -> GroupCheck:
    own = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    index = torch.randperm(group.size, generator=generator)[:count].sort().values
    reference = torch.full((len(group.views), group.size), _CLAMP, dtype=torch.float64)
    before = run(own)
    after = {name: tensor.clone() for name, tensor in own.items()}
    operate(after, [(group, index)], {group.name: reference}, generator)
    with clamped(model, group, index, _CLAMP):
        clamp = run(own)
    reset = run(after)
    # A reset that keeps the incoming weights and the norm entries differs from the clamp only where compensation does.
    kept = {name: tensor.clone() for name, tensor in own.items()}
    operate(kept, [(_without_producers(group), index)], {group.name: reference}, generator)
    effect = max(_distance(before, clamp), _scale(before) * 1e-6, 1e-12)
    outgoing, error = _distance(run(kept), clamp) / effect, _distance(reset, clamp) / effect
    leak = _distance(reset, run(kept)) / effect
    if error <= tolerance:
        return GroupCheck(group.name, PASSED, error, f"a reset equals the clamp on {len(index)} units")
    couples = any(norm.couples for norm in group.norms)
    inexact = [c.approximate for c in group.consumers if c.approximate]
    if leak > tolerance and not couples:
        return GroupCheck(
            group.name, WRONG, error, "the unit reaches the output past the claimed consumers, or takes others along"
        )
    if outgoing > tolerance and not inexact:
        return GroupCheck(
            group.name, WRONG, error, "the compensated reset differs from the clamp: wrong columns or wrong bias"
        )
    return GroupCheck(group.name, APPROXIMATE, error, "; ".join(group.approximate))


@contextmanager
def clamped(model: nn.Module, group: Group, index: Tensor, value: float | Tensor) -> Iterator[None]:
    """Within this context, all views of the given units are held at ``value`` (a number, or ``(views, size)``)."""
    values = torch.as_tensor(value, dtype=torch.float64).expand(len(group.views), group.size)
    handles = []
    try:
        for view, level in zip(group.views, values, strict=True):
            columns, levels = view.columns[index].flatten(), level[index].repeat_interleave(view.columns.shape[1])
            for consumer in view.consumers:
                module = model.get_submodule(consumer.site)
                if "heads" in consumer.ports:
                    handles.append(module.register_forward_hook(_clamp_attention(model, consumer, columns, levels)))
                else:
                    handles.append(
                        module.register_forward_pre_hook(
                            _clamp_input(view, consumer, columns, levels), with_kwargs=True
                        )
                    )
        yield
    finally:
        for handle in handles:
            handle.remove()


def _clamp_input(view: View, consumer: Consumer, columns: Tensor, levels: Tensor) -> Callable[..., Any]:
    def clamp(source: Tensor) -> Tensor:
        shape = [-1 if d == view.axis % source.dim() else 1 for d in range(source.dim())]
        part = (
            levels.to(source)
            .view(shape)
            .expand(*[len(columns) if s == -1 else n for s, n in zip(shape, source.shape, strict=True)])
        )
        return source.index_copy(view.axis, columns.to(source.device), part)

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return replace_arguments(consumer.ports, args, kwargs, clamp)

    return hook


def _clamp_attention(model: nn.Module, consumer: Consumer, columns: Tensor, levels: Tensor) -> Callable[..., Any]:
    weights = NamedTensors(model, [consumer.weight])

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        features = attention_output(module, output[0])[:, columns.to(output[0].device)]  # (tokens, columns), time-major
        weight = weights[consumer.weight][:, columns.to(output[0].device)]
        change = (levels.to(features) - features) @ weight.t()
        if output[0].dim() == 3:
            batch_first = module.batch_first
            length, batch = output[0].shape[1 if batch_first else 0], output[0].shape[0 if batch_first else 1]
            change = change.view(length, batch, -1)
            change = change.transpose(0, 1) if batch_first else change
        return (output[0] + change, *output[1:])

    return hook


def _without_producers(group: Group) -> Group:
    return Group(group.name, group.size, (), group.views)


def _runner(model: nn.Module, example_inputs: Any) -> Callable[[Mapping[str, Tensor]], list[Tensor]]:
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(example_inputs, Mapping):
        kwargs = dict(example_inputs)
    else:
        args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)

    def run(tensors: Mapping[str, Tensor]) -> list[Tensor]:
        # Gradients are on: attention modules take a fused path without them.
        leaves = {name: t.requires_grad_() if t.is_floating_point() else t for name, t in tensors.items()}
        buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        leaves = {name: t.detach() if name in buffers else t for name, t in leaves.items()}
        output = functional_call(model, leaves, args, kwargs, tie_weights=False)
        return [t.detach().double() for t in _tensors_in(output)]

    return run


def _tensors_in(output: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _distance(left: list[Tensor], right: list[Tensor]) -> float:
    return max((float((a - b).abs().max()) for a, b in zip(left, right, strict=True) if a.numel()), default=0.0)


def _scale(outputs: list[Tensor]) -> float:
    return max((float(t.abs().max()) for t in outputs if t.numel()), default=0.0)


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, so that dropout and batch statistics do not blur the comparison; the modes are given back."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _cuda_devices(tensors: Mapping[str, Tensor]) -> list[int]:
    return sorted({t.device.index or 0 for t in tensors.values() if t.device.type == "cuda"})
