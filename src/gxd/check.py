"""Prove a plan on the user's own model, with numbers.

For a few units of every group, the model is run with the units' views clamped to a value, and again with the units'
incoming weights drawn anew. If the plan is right, the second run gives the same outputs (there is no other way out of
the units), only the claimed columns of the consumers have moved, and parameters that went through the reset operator
give the same outputs without any clamp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from gxd import expect
from gxd.clamp import clamped
from gxd.find import call_arguments, find_units
from gxd.layers import NamedTensors, unwrap
from gxd.observe import Reader
from gxd.operate import operate
from gxd.plan import Group, UnitPlan

PASSED, APPROXIMATE, INCONCLUSIVE, WRONG = "passed", "approximate", "inconclusive", "wrong"
_CLAMP = 0.37  # any value will do; not 0, which would hide a missing compensation
_ATTEMPTS = 5  # a unit drawn anew may be silent on these inputs
_FLOOR = 1e-9  # of the outputs' scale: smaller effects are rounding
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

Inputs = dict[tuple[int, str], Tensor]  # (view, consumer) -> what it would have read


@dataclass(frozen=True)
class GroupCheck:
    """The verdict on one group.

    Attributes:
        name: of the group.
        status: ``passed``, ``approximate``, ``inconclusive`` or ``wrong``.
        error: largest difference of the outputs between the clamped and the reset model, over the clamp's effect.
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
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(f"no group {name!r} in the report; it has {', '.join(g.name for g in self.groups) or 'none'}")

    def __str__(self) -> str:
        if not self.groups:
            return "the plan has no group to check"
        width = max(len(group.name) for group in self.groups)
        lines = [f"{g.name.ljust(width)}  {g.status.ljust(12)}  error {g.error:.0e}  {g.detail}" for g in self.groups]
        counts = {s: sum(g.status == s for g in self.groups) for s in (PASSED, APPROXIMATE, INCONCLUSIVE, WRONG)}
        return "\n".join([*lines, ", ".join(f"{n} {status}" for status, n in counts.items() if n)])


def check(
    model: nn.Module,
    example_inputs: Tensor | tuple[Any, ...] | Mapping[str, Any],
    *,
    plan: UnitPlan | None = None,
    units_per_group: int = 3,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> CheckReport:
    """Verify a plan numerically on a model. The model is left as it is: everything happens on copies of its tensors.

    The copies are in float64, and their norms are disturbed, so that small errors show.

    Args:
        model: the model.
        example_inputs: as for :func:`gxd.find_units`; here their values matter, so give real data.
        plan: default: ``find_units(model, example_inputs)``.
        units_per_group: how many units of each group to try.
        tolerance: largest relative error of a group that passes.
        seed: of the choice of units and of the fresh weights.

    Returns:
        For each group ``passed``; ``approximate``, where the plan says so (zero padding at the borders, a norm that
        couples units, no bias to compensate in) and only that part differs; ``inconclusive``, where the units have no
        effect on the outputs; or ``wrong``: the plan does not describe this model.
    """
    expect.module(model)
    if not isinstance(units_per_group, int) or isinstance(units_per_group, bool) or units_per_group < 1:
        raise ValueError(f"units_per_group={units_per_group!r} must be a whole number, 1 or more")
    if not isinstance(tolerance, (int, float)) or not tolerance >= 0:
        raise ValueError(f"tolerance={tolerance!r} must be a number, 0 or more")
    model = unwrap(model)
    plan = plan if plan is not None else find_units(model, example_inputs)
    expect.plan(plan)
    tensors = NamedTensors(model)
    plan.validate(tensors)
    cuda = sorted({t.device.index or 0 for t in tensors.values() if t.device.type == "cuda"})
    with _evaluation(model), torch.random.fork_rng(devices=cuda):
        probe = _Probe(model, example_inputs, seed)
        checks = [_check_group(probe, group, plan.batch_dim, units_per_group, tolerance) for group in plan.groups]
    return CheckReport(plan, tuple(checks))


def _check_group(probe: _Probe, group: Group, batch_dim: int, units: int, tolerance: float) -> GroupCheck:
    index = torch.randperm(group.size, generator=probe.generator)[:units].sort().values
    before, _ = probe.run(probe.own)
    if not all(output.isfinite().all() for output in before):
        return GroupCheck(group.name, INCONCLUSIVE, 0.0, "the outputs are not finite (NaN or inf): give real data")
    clamp, seen = probe.run(probe.own, group, index)
    floor = _FLOOR * max((float(t.abs().max()) for t in before if t.numel()), default=0.0)
    effect = _distance(before, clamp)
    if not effect > floor:
        return GroupCheck(group.name, INCONCLUSIVE, 0.0, "clamping these units does not change the outputs")
    other, stray, still = _draw_anew(probe, group, index, seen)
    reset, _ = probe.run(probe.operated(group, index))
    outgoing, _ = probe.run(probe.operated(replace(group, producers=(), norms=()), index))
    error = _distance(reset, clamp) / effect

    def verdict(status: str, detail: str) -> GroupCheck:
        return GroupCheck(group.name, status, error, detail)

    if _distance(other, clamp) > tolerance * effect and not _is_opaque(group):
        return verdict(WRONG, "the units reach the outputs past the claimed consumers")
    if stray:
        return verdict(WRONG, f"drawn anew, the units move columns of {stray!r} that the plan does not claim")
    if still:
        return verdict(INCONCLUSIVE, f"drawn anew, the units do not move their columns of {still!r}")
    if probe.other_examples_move(group, index, batch_dim):
        return verdict(WRONG, "the examples lie on another axis of the views than the plan says")
    if error <= tolerance:
        return verdict(PASSED, f"a reset equals the clamp on {len(index)} units")
    if _distance(outgoing, clamp) > tolerance * effect and not any(c.approximate for c in group.consumers):
        return verdict(WRONG, "the compensated reset differs from the clamp")
    if not group.approximate:
        return verdict(WRONG, "the reset differs from the clamp")
    return verdict(APPROXIMATE, "; ".join(group.approximate))


def _draw_anew(probe: _Probe, group: Group, index: Tensor, seen: Inputs) -> tuple[list[Tensor], str | None, str | None]:
    """The outputs with the units clamped but their producers drawn anew, and what moved: :func:`_columns_moved`."""
    outputs, entries = probe.norm_outputs(group, index)
    for attempts in count(1):
        moved = probe.operated(replace(group, views=()), index, scale=3.0)
        with _frozen_norms(probe.model, outputs, entries):
            other, seen_other = probe.run(moved, group, index)
        stray, still = _columns_moved(group, index, seen, seen_other)
        if still is None or attempts == _ATTEMPTS:
            return other, stray, still
    raise AssertionError


class _Probe:
    """Runs a model on copies of its tensors, and records what the consumers of a group read."""

    def __init__(self, model: nn.Module, example_inputs: Any, seed: int) -> None:
        self.model, self.seed = model, seed
        self.generator = torch.Generator().manual_seed(seed)
        self.args, self.kwargs = call_arguments(example_inputs)
        copies: dict[int, Tensor] = {}
        self.own = {
            name: copies.setdefault(id(tensor), tensor.detach().clone()) for name, tensor in NamedTensors(model).items()
        }
        self._disturb_norms()
        self.dtype: torch.dtype | None = torch.float64
        try:
            self.own = self._in_float64(self.own)
            self.run(self.own)
        except (RuntimeError, TypeError):  # a model that insists on a type of its own
            self.dtype = None

    def run(
        self, tensors: Mapping[str, Tensor], group: Group | None = None, index: Tensor | None = None, inputs: Any = None
    ) -> tuple[list[Tensor], Inputs]:
        """The outputs, and what the consumers of ``group`` would have read, with its units clamped."""
        seen: Inputs = {}

        def see(number: int, consumer: str, source: Tensor) -> None:
            seen[number, consumer] = source.clone()

        context: Any = nullcontext()
        if group is not None and index is not None:
            context = clamped(self.model, group, index, _CLAMP, see)
        args, kwargs = inputs if inputs is not None else (self.args, self.kwargs)
        if self.dtype is not None:
            args, kwargs = pytree.tree_map_only(Tensor, self._cast, (args, kwargs))
        # Gradients are on, as attention takes a fused path without them; the same noise in every run.
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        leaves = {n: t.detach().requires_grad_() if n in parameters else t.clone() for n, t in tensors.items()}
        torch.manual_seed(self.seed)
        with torch.enable_grad(), context:
            output = functional_call(self.model, leaves, args, kwargs, tie_weights=False)
        found = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
        return [t.detach().double() for t in found], seen

    def operated(self, group: Group, index: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        """Copies that went through the reset operator, with the clamp's value as the reference."""
        copies: dict[int, Tensor] = {}
        tensors = {name: copies.setdefault(id(tensor), tensor.clone()) for name, tensor in self.own.items()}
        reference = torch.full((len(group.views), group.size), _CLAMP, dtype=torch.float64)
        operate(tensors, [(group, index)], {group.name: reference}, self.generator)
        if scale != 1.0:  # far from where the units were, so that they move
            for producer in group.producers:
                weight, where = producer.layout.row(tensors[producer.weight], producer.rows[index])
                weight[where] *= scale
        return tensors

    def norm_outputs(self, group: Group, index: Tensor) -> tuple[dict[str, list[Tensor]], dict[str, Tensor]]:
        """What the norms that couple the units return, call by call, and where the units stand in it."""
        outputs: dict[str, list[Tensor]] = {}
        handles = []
        for norm in group.norms:
            if norm.couples and norm.module and norm.entries.numel():

                def keep(module: nn.Module, args: Any, output: Tensor, name: str = norm.module) -> None:
                    outputs.setdefault(name, []).append(output.detach().clone())

                handles.append(self.model.get_submodule(norm.module).register_forward_hook(keep))
        try:
            if handles:
                self.run(self.own, group, index)
        finally:
            for handle in handles:
                handle.remove()
        return outputs, {norm.module: norm.entries[index].flatten() for norm in group.norms}

    def other_examples_move(self, group: Group, index: Tensor, batch_dim: int) -> bool:
        """Whether changing the first example changes what a view says about another, though the outputs do not."""
        sizes = [t.shape[batch_dim] for t in pytree.tree_leaves((self.args, self.kwargs)) if _has(t, batch_dim)]
        examples = sizes[0] if sizes else 0
        if examples < 2:
            return False

        def swap(tensor: Tensor) -> Tensor:
            if not _has(tensor, batch_dim) or tensor.shape[batch_dim] != examples:
                return tensor
            order = [1, 1, *range(2, examples)]
            return tensor.index_select(batch_dim, torch.tensor(order, device=tensor.device))

        swapped = pytree.tree_map_only(Tensor, swap, (self.args, self.kwargs))
        outputs, seen = self.run(self.own, group, index)
        outputs_swapped, seen_swapped = self.run(self.own, group, index, swapped)
        if not all(o.dim() and o.shape[0] == examples for o in outputs) or _distance(
            [o[1:] for o in outputs], [o[1:] for o in outputs_swapped]
        ) > 1e-6 * max(1.0, *(float(o.abs().max()) for o in outputs)):
            return False  # the outputs say nothing about examples, or the model mixes them
        for (number, consumer), source in seen.items():
            reader = Reader(group.views[number], "signed")
            one, two = reader(source, examples), reader(seen_swapped[number, consumer], examples)
            if one.shape[0] == examples and float((one[1:] - two[1:]).abs().max()) > 1e-6 * float(
                one.abs().max() + 1e-9
            ):
                return True
        return False

    def _in_float64(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        copies: dict[int, Tensor] = {}
        return {name: copies.setdefault(id(tensor), self._cast(tensor)) for name, tensor in tensors.items()}

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def _disturb_norms(self) -> None:
        """Entries away from 0 and 1, so that one that is wrongly reset, or not reset, shows."""
        for name, module in self.model.named_modules():
            if isinstance(module, _NORMS):
                for key in ("weight", "running_var", "bias", "running_mean"):
                    tensor = self.own.get(f"{name}.{key}" if name else key)
                    if tensor is not None:
                        noise = torch.rand(tensor.shape, generator=self.generator).to(tensor)
                        _ = tensor.mul_(0.5 + noise) if key in ("weight", "running_var") else tensor.add_(noise - 0.5)


@contextmanager
def _frozen_norms(
    model: nn.Module, outputs: Mapping[str, Sequence[Tensor]], entries: Mapping[str, Tensor]
) -> Iterator[None]:
    """Norms that couple units return what they returned before, except for the units themselves."""
    handles = []
    for name, recorded in outputs.items():
        module, returned = model.get_submodule(name), iter(recorded)

        def freeze(
            module: nn.Module, args: Any, output: Tensor, calls: Any = returned, where: Tensor = entries[name]
        ) -> Tensor:
            before = next(calls)
            shape = list(getattr(module, "normalized_shape", [])) or [before.shape[1]] + [1] * (before.dim() - 2)
            own = torch.zeros(int(torch.tensor(shape).prod()), dtype=torch.bool)
            own[where] = True
            return torch.where(own.view(shape).to(output.device), output, before)

        handles.append(module.register_forward_hook(freeze))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _columns_moved(group: Group, index: Tensor, before: Inputs, after: Inputs) -> tuple[str | None, str | None]:
    """A consumer of which unclaimed columns moved, and one of which no column of a unit did."""
    coupled = _is_opaque(group)
    stray = still = None
    for (number, consumer), source in before.items():
        view = group.views[number]
        change = (after[number, consumer] - source).abs().movedim(view.axis, -1).flatten(0, -2).amax(0)
        scale = 1e-7 * float(source.abs().max() + 1e-9)
        claimed = torch.zeros(change.shape, dtype=torch.bool, device=change.device)
        claimed[view.columns[index].flatten().to(change.device)] = True
        if bool((change[~claimed] > scale).any()) and not coupled:
            stray = consumer
        per_unit = change[view.columns[index].to(change.device)].amax(1)
        if not bool((per_unit > scale).any()):
            still = consumer
    return stray, still


def _is_opaque(group: Group) -> bool:
    """Whether a norm couples the units that cannot be frozen: a functional one, or one without entries."""
    return any(norm.couples and not (norm.module and norm.entries.numel()) for norm in group.norms)


def _has(tensor: Any, dim: int) -> bool:
    return isinstance(tensor, Tensor) and tensor.dim() > dim


def _distance(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    return max((float((a - b).abs().max()) for a, b in zip(left, right, strict=True) if a.numel()), default=0.0)


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
