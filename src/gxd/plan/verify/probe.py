"""Runs of a model on copies of its tensors, with units clamped: what :func:`gxd.verify_plan` compares."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gxd.observe.clamp import blurred, clamped
from gxd.observe.reading import Reader
from gxd.plan.find import call_arguments
from gxd.plan.layouts import NamedTensors
from gxd.plan.units import Group
from gxd.plan.verify.disturb import disturb, measured, with_fresh_statistics
from gxd.reset.units import operate
from gxd.sandbox.freeze import Calls, OneCall, frozen, recorded
from gxd.sandbox.substitute import Call, copied_arguments, copies, run

CLAMP = 0.37  # any value will do; not 0, which would hide a missing compensation
_FLOOR = 1e-13  # of the outputs' scale: smaller differences prove nothing, in whatever precision
_LARGE = 1e-6  # of the outputs' scale: beside a larger effect no rounding in float64 counts
MARGIN = 4.0  # differences up to so many times what rounding was seen to do are put down to rounding
_BLURS = 2  # how often rounding is looked at

Inputs = dict[tuple[int, str], Tensor]  # (view, consumer) -> what it would have read


@dataclass(frozen=True)
class Clamp:
    """What was seen with some units clamped.

    Attributes:
        index: the units.
        outputs: of the model.
        seen: what the consumers would have read.
        chosen: the numbers of the outputs that count.
        effect: how far the clamp has moved them.
        floor: how far they may move because of rounding.
        drift: how far they may move from run to run, if nothing is changed that matters.
        drifts: the same for what the consumers read.
    """

    index: Tensor
    outputs: list[Tensor]
    seen: Inputs
    chosen: list[int]
    effect: float
    floor: float
    drift: float
    drifts: dict[tuple[int, str], float]

    @property
    def shows(self) -> bool:
        """Whether the clamp has an effect that is clear of all rounding, and that can be measured."""
        return MARGIN * self.floor < self.effect < math.inf

    def distance(self, outputs: Sequence[Tensor]) -> float:
        """Between these outputs and the clamp's."""
        return distance(outputs, self.outputs, self.chosen)


class Probe:
    """A model on disturbed copies of its tensors, in a given precision, or in the model's own.

    Attributes:
        precision: the lowest one that was met on the way to the outputs; a model may insist on one of its own.
        finite: whether its outputs are.
    """

    def __init__(self, model: nn.Module, example_inputs: Any, seed: int, dtype: torch.dtype | None) -> None:
        self.model, self.seed, self.dtype = model, seed, dtype
        self.generator = torch.Generator().manual_seed(seed)
        self.call = call_arguments(example_inputs)
        self.by_layer, self.sizes = False, list[float]()
        plain = copies(NamedTensors(model), dtype)
        self.precision = _lowest(t.dtype for t in plain.values())
        self.own = copies(plain)
        disturb(self.own, self.generator)
        try:
            fresh = with_fresh_statistics(model)
            if fresh:
                self.run(None, None, measured(fresh), tensors=self.own)
            self.finite = self._look()
        except Exception:  # a model may check its parameters: as they are, then
            self.finite = False
        if not self.finite:
            self.own = plain
            self.finite = self._look()

    def run(
        self,
        group: Group | None = None,
        index: Tensor | None = None,
        *hooks: AbstractContextManager[None],
        tensors: Mapping[str, Tensor] | None = None,
        call: Call | None = None,
    ) -> tuple[list[Tensor], Inputs]:
        """The outputs, each in units of its size, and what the consumers of ``group`` would have read, with its units
        clamped. Other ``tensors`` than the model's disturbed ones may be written to.
        """
        seen: Inputs = {}
        layers: list[Tensor] = []

        def see(number: int, consumer: str, source: Tensor) -> None:
            if source.numel():  # an expert may be given nothing
                seen[number, consumer] = source.clone()

        if group is not None and index is not None:
            hooks = (clamped(self.model, group, index, CLAMP, see), *hooks)
        if self.by_layer:
            hooks = (*hooks, _watched_layers(self.model, layers))
        tensors = copies(self.own) if tensors is None else tensors
        returned = run(self.model, tensors, copied_arguments(call or self.call, self.dtype), self.seed, hooks)
        outputs = layers if self.by_layer else values_in(returned)
        self.rounded = _lowest(t.dtype for t in outputs)
        sizes = self.sizes if len(self.sizes) == len(outputs) else [1.0] * len(outputs)
        return [_as_real(t.detach()) / size for t, size in zip(outputs, sizes, strict=True)], seen

    def clamp(self, group: Group, index: Tensor) -> Clamp:
        """Clamp units, and see what that does and what rounding does."""
        outputs, seen = self.run(group, index)
        chosen = list(range(len(outputs)))
        if self.by_layer:  # what lies behind the consumers; the rest does not speak of outputs
            chosen = [i for i, (a, b) in enumerate(zip(self.before, outputs, strict=False)) if not _equal(a, b)]
        scale, eps = _scale(self.before, outputs), torch.finfo(self.precision).eps
        rounding = max(_FLOOR, MARGIN * eps, torch.finfo(self.rounded).eps) * scale
        drift = max(_FLOOR * scale, MARGIN * self.drift)
        drifts = {key: 1e-7 * float(source.abs().max() + _FLOOR) for key, source in seen.items()}
        effect = distance(self.before, outputs, chosen)
        for _ in range(_BLURS if self.precision != torch.float64 or effect < _LARGE * scale else 0):
            blur = blurred(self.model, group, eps, self.generator)
            others, seen_others = self.run(group, index, blur)
            rounding = max(rounding, MARGIN * distance(others, outputs, chosen))
            for key, source in seen.items():
                drifts[key] = max(drifts[key], MARGIN * float((seen_others[key] - source).abs().max()))
        if any("heads" in consumer.ports for consumer in group.consumers):
            drift = max(drift, rounding)  # a clamp behind the layer is not exact
        return Clamp(index, outputs, seen, chosen, effect, max(drift, rounding), drift, drifts)

    def draw_anew(self, group: Group, clamp: Clamp, frozen_norms: Mapping[str, Calls]) -> tuple[list[Tensor], Inputs]:
        """The same with the units' incoming weights drawn anew, and the norms that couple them frozen."""
        moved = self.operated(replace(group, views=()), clamp.index, scale=3.0)
        return self.run(group, clamp.index, frozen(self.model, frozen_norms), tensors=moved)

    def operated(self, group: Group, index: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        """Copies that went through the reset operator, with the clamp's value as the reference."""
        tensors = copies(self.own)
        reference = torch.full((len(group.views), group.size), CLAMP, dtype=torch.float64)
        operate(tensors, [(group, index)], {group.name: reference}, self.generator)
        if scale != 1.0:  # far from where the units were, so that they move
            with torch.no_grad():
                for producer in group.producers:
                    weight, where = producer.layout.row(tensors[producer.weight], producer.rows[index])
                    weight[where] *= scale
        return tensors

    def frozen_norms(self, group: Group, clamp: Clamp) -> dict[str, Calls] | None:
        """What the norms that couple the units return; None if it cannot be told which of it is the units' own."""
        coupling = [norm for norm in group.norms if norm.couples]
        if not all(norm.module and norm.entries.numel() for norm in coupling):
            return None
        found: dict[str, list[OneCall | None]] = {norm.module: [] for norm in coupling}
        if coupling:
            self.run(group, clamp.index, recorded(self.model, coupling, clamp.index, found))
        told = {name: [call for call in calls if call is not None] for name, calls in found.items()}
        return told if all(calls and len(calls) == len(found[name]) for name, calls in told.items()) else None

    def other_examples_move(self, group: Group, clamp: Clamp, batch_dim: int) -> bool:
        """Whether changing the first example changes what a view says about another, though the outputs do not."""
        sizes = [t.shape[batch_dim] for t in pytree.tree_leaves(self.call) if _has(t, batch_dim)]
        examples = sizes[0] if sizes else 0
        if examples < 2:
            return False

        def swap(tensor: Tensor) -> Tensor:
            if not _has(tensor, batch_dim) or tensor.shape[batch_dim] != examples:
                return tensor
            order = [1, 1, *range(2, examples)]
            return tensor.index_select(batch_dim, torch.tensor(order, device=tensor.device))

        swapped: Call = pytree.tree_map_only(Tensor, swap, self.call)
        outputs_swapped, seen_swapped = self.run(group, clamp.index, call=swapped)
        outputs = [clamp.outputs[i][1:] for i in clamp.chosen if clamp.outputs[i].dim()]
        others = [outputs_swapped[i][1:] for i in clamp.chosen if outputs_swapped[i].dim()]
        # Where an example lies in the batch decides about its rounding, too.
        share = min(0.1, max(1e-6, 512 * torch.finfo(self.precision).eps))
        by_example = len(outputs) == len(clamp.chosen) and all(o.shape[0] == examples - 1 for o in outputs)
        if not by_example or distance(outputs, others) > share * max(1.0, _largest(outputs)):
            return False  # the outputs say nothing about examples, or the model mixes them
        for (number, consumer), source in clamp.seen.items():
            reader = Reader(group.views[number], "signed")
            one, two = reader(source, examples), reader(seen_swapped[number, consumer], examples)
            if one.shape[0] == examples and float((one[1:] - two[1:]).abs().max()) > share * float(
                one.abs().max() + _FLOOR
            ):
                return True
        return False

    def _look(self) -> bool:
        """See what kind of outputs these are, how large, in which precision, and whether two runs agree. Returns
        whether they are finite; infinities that mask something may be among them.
        """
        self.by_layer, self.sizes = False, []
        self.before, _ = self.run()
        if not self.before:  # actions, indices: the layers have to tell
            self.by_layer = True
            self.before, _ = self.run()
        sizes = [_typical(output) for output in self.before]
        # An output that is zero but for rounding (the mean of what a norm returns) must not be taken for a small one.
        least = 64 * torch.finfo(self.rounded).eps * max(sizes, default=0.0)
        self.sizes = [size if size > least else max(sizes) for size in sizes]
        self.before = [output / size for output, size in zip(self.before, self.sizes, strict=True)]

        def note(tensor: Tensor) -> Tensor:  # all that is kept for a backward pass: whatever counts on the way
            if tensor.is_floating_point():
                self.precision = _lowest([self.precision, tensor.dtype])
            return tensor.detach()  # an output kept as it is would keep its own graph alive, for ever

        try:
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                again, _ = self.run()
        except Exception:  # not within transforms of torch.func
            again, _ = self.run()
        self.drift = distance(self.before, again)
        return all(not one.isnan().any() and one.isfinite().any() for one in self.before if one.numel())


def values_in(returned: Any) -> list[Tensor]:
    """The floating-point tensors in what a model returns, wherever they are."""
    leaves = pytree.tree_leaves(returned)
    found = [leaf for leaf in leaves if _is_number(leaf)]
    known: set[int] = set()
    pending = [] if found else leaves[::-1]
    while pending:  # a distribution, an object of the user's own
        one = pending.pop()
        if _is_number(one):
            found.append(one)
        elif id(one) not in known and not isinstance(one, (type, nn.Module, Tensor)):
            known.add(id(one))
            parts = [getattr(one, f.name) for f in fields(one)] if is_dataclass(one) else getattr(one, "__dict__", {})
            pending += pytree.tree_leaves(list(parts.values()) if isinstance(parts, dict) else parts)[::-1]
    return found


def distance(left: Sequence[Tensor], right: Sequence[Tensor], chosen: Sequence[int] | None = None) -> float:
    """The largest difference between two lists of outputs; infinite if they are not of the same shapes."""
    if [t.shape for t in left] != [t.shape for t in right]:
        return math.inf
    pairs = [(left[i], right[i]) for i in (range(len(left)) if chosen is None else chosen) if left[i].numel()]
    # Equal infinities (a mask) are equal.
    changes = [(a - b).abs().masked_fill(a == b, 0.0).nan_to_num(nan=math.inf, posinf=math.inf) for a, b in pairs]
    return max((float(change.max()) for change in changes), default=0.0)


def _typical(output: Tensor) -> float:
    """The size of an output, so that none hides behind a larger one."""
    values = output[output.isfinite() & (output != 0)].abs()
    return float(values.median()) if values.numel() else 1.0


def _scale(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """How large the outputs are that move: others may be fillings, such as -1e9."""
    if [t.shape for t in before] != [t.shape for t in after]:
        return 0.0
    return _largest([a[a != b] for a, b in zip(before, after, strict=True)])


def _largest(outputs: Sequence[Tensor]) -> float:
    finite = [output[output.isfinite()].abs() for output in outputs]
    return max((float(values.max()) for values in finite if values.numel()), default=0.0)


@contextmanager
def _watched_layers(model: nn.Module, found: list[Tensor]) -> Iterator[None]:
    """Within this context, what the innermost modules return is kept."""

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        found.extend(value.detach().clone() for value in values_in(output))

    handles = [m.register_forward_hook(keep) for m in model.modules() if not any(m.children())]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _lowest(dtypes: Any) -> torch.dtype:
    """The type of the least precision."""
    kinds = [torch.float64, *(dtype for dtype in dtypes if dtype.is_floating_point)]
    return max(kinds, key=lambda dtype: torch.finfo(dtype).eps)


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _as_real(tensor: Tensor) -> Tensor:
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return torch.view_as_real(tensor.resolve_conj()).double() if tensor.is_complex() else tensor.double()


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _has(tensor: Any, dim: int) -> bool:
    return isinstance(tensor, Tensor) and tensor.dim() > dim
