"""The measurements behind :func:`gxd.reset_cost`: references, scores and clamps on given data, in evaluation mode."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gxd.cost.clamp_many import can_clamp_many, outputs_clamped
from gxd.errors import ObservationWarning
from gxd.observe.captures import Gradients, Pass
from gxd.observe.clamp import clamped, watched
from gxd.observe.direction import Direction, direction_of, noise
from gxd.observe.reading import Reader, sum_of
from gxd.plan.find import call_arguments
from gxd.plan.layouts import NamedTensors, state_dtype
from gxd.plan.units import Group, UnitPlan
from gxd.sandbox.substitute import Call, copied_arguments, copies, run, seed_all
from gxd.score.curvature import needing_second_derivatives
from gxd.score.scoring import Scoring
from gxd.score.state import UnitState
from gxd.score.sums import NOTHING, Sums
from gxd.score.utilities import Utility

_MOST_UNITS = 256  # clamped in one forward pass
_ELEMENTS_CPU, _ELEMENTS = 2**22, 2**26  # of the largest activation behind the clamp, over all copies; elsewhere

Loss = Callable[[Tensor, Tensor], Tensor]


class Data:
    """Inputs of a model, and maybe targets, that can be taken in parts.

    Attributes:
        size: the number of examples.
    """

    def __init__(self, inputs: Any, target: Tensor | None, batch_dim: int, name: str) -> None:
        self.call, self.target, self.batch_dim = call_arguments(inputs), target, batch_dim
        tensors = [t for t in pytree.tree_leaves(self.call) if isinstance(t, Tensor) and t.dim() > batch_dim]
        if not tensors:
            raise TypeError(f"{name} holds no tensor: give the inputs of the model as a tensor, a tuple or a dict")
        self.size = tensors[0].shape[batch_dim]
        if self.size < 1:
            raise ValueError(f"{name} is empty: its inputs have shape {tuple(tensors[0].shape)}")
        if target is not None and self.size not in target.shape[: batch_dim + 1]:
            raise ValueError(f"{name} has {self.size} inputs, but targets of shape {tuple(target.shape)}")

    def part(self, start: int, stop: int) -> tuple[Call, Tensor | None, int]:
        """The arguments, the targets and the number of some consecutive examples."""
        stop = min(stop, self.size)

        def cut(tensor: Tensor, dim: int) -> Tensor:
            whole = tensor.dim() > dim and tensor.shape[dim] == self.size
            return tensor.narrow(dim, start, stop - start) if whole else tensor

        call: Call = pytree.tree_map_only(Tensor, lambda t: cut(t, self.batch_dim), self.call)
        target = None
        if self.target is not None:
            target = cut(self.target, 0 if self.target.shape[0] == self.size else self.batch_dim)
        return call, target, stop - start

    def parts(self, length: int, limit: int | None = None) -> Iterator[tuple[Call, Tensor | None, int]]:
        """All examples, or the first ``limit``, in parts."""
        end = self.size if limit is None else min(limit, self.size)
        for start in range(0, end, length):
            yield self.part(start, min(start + length, end))


class Lesion:
    """References, scores and shocks of the units of a plan. The model must be in evaluation mode."""

    def __init__(
        self, model: nn.Module, plan: UnitPlan, output: Callable[[Any], Tensor], positions: str, seed: int
    ) -> None:
        self.model, self.plan, self.output, self.positions, self.seed = model, plan, output, positions, seed
        self.generator = torch.Generator().manual_seed(seed)
        self.elements: dict[int, int] = {}  # view -> its size per example, in the order in which views are read
        self.copies: dict[str, Tensor] = {}  # that the last forward pass was made with

    # --- forward passes -----------------------------------------------------------------------------------------------

    def forward(self, call: Call, *hooks: AbstractContextManager[None]) -> Tensor:
        """The logits, on copies of everything, with gradients."""
        self.copies = copies(NamedTensors(self.model))
        logits: Tensor = run(self.model, self.copies, copied_arguments(call), self.seed, hooks, self.output)
        return logits

    def watch(self, call: Call) -> tuple[Tensor, Pass]:
        """The logits and all views, with the graph between them."""
        one = Pass(whole=True)
        logits = self.forward(call, watched(self.model, self.plan, one))
        return logits, one

    # --- references and scores ----------------------------------------------------------------------------------------

    def references(self, data: Data, length: int) -> list[Tensor]:
        """For each group ``(views, size)``: the mean of h over examples and positions; 0 where a view is not read."""
        readers = [Reader(view, "signed") for view in self.plan.views]
        sums = [torch.zeros(view.columns.shape[0], dtype=torch.float64) for view in self.plan.views]
        counts = [0] * len(self.plan.views)
        for call, _, examples in data.parts(length):
            _, one = self.watch(call)
            for number, capture in one.items():
                self.elements.setdefault(number, capture.source.numel() // examples)
                h = readers[number](capture.values(), examples)
                sums[number] += h.sum((0, 1), dtype=torch.float64).cpu()
                counts[number] += h.shape[0] * h.shape[1]
        means = [total / max(1, count) for total, count in zip(sums, counts, strict=True)]
        return [torch.stack([means[n] for n in numbers]) for numbers in self.plan.views_of]

    def scores(
        self,
        data: Data,
        utilities: Sequence[Utility],
        references: Sequence[Tensor],
        loss: Loss | None,
        class_dim: int,
        length: int,
        all_logit_examples: int | None,
        pairs: bool = False,
    ) -> tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]:
        """Utility -> for each group ``(size,)`` the mean score over the examples; NaN where a unit is never read. And,
        with ``pairs``, for utilities that are made of effects ``(size, size)`` the mean product of two effects.
        """
        tensors = NamedTensors(self.model, self.plan.shapes)
        known = self._known(references, tensors, pairs)
        units = {u.name: known if u.effects is not None else known._replace(gram=()) for u in utilities}
        # With a decay of 1 the references stay what they are.
        scorings = {u.name: Scoring(self.plan, u, self.positions, 1.0, self.generator) for u in utilities}
        sums = dict.fromkeys(scorings, NOTHING)
        weights: dict[str, Tensor | None] = {p.weight: None for group in self.plan.groups for p in group.producers}
        cheap = [u for u in utilities if u.gradient != "all"]
        costly = [u for u in utilities if u.gradient == "all"]
        for some, limit in ((cheap, None), (costly, all_logit_examples)):
            for call, target, examples in data.parts(length, limit) if some else ():
                logits, one = self.watch(call)
                for kind, twice in dict.fromkeys((u.gradient, u.curvature) for u in some):
                    if kind == "weights":
                        mean = examples / data.size * self._loss(logits, target, loss, class_dim)
                        weights = _with_gradients(weights, mean, self.copies)
                    direction = self._direction(kind, logits, target, loss, class_dim, examples / data.size)
                    for gradients in [{}] if direction is None else _pulled_back(direction, one, twice):
                        for name in [u.name for u in some if (u.gradient, u.curvature) == (kind, twice)]:
                            again = partial(_pulled_back_again, name, one)
                            sums[name] = scorings[name].add(
                                units[name], sums[name], tensors, [one], [gradients], examples, again=again
                            )
        for name in [u.name for u in utilities if u.gradient == "weights"]:
            sums[name] = scorings[name].by_weights(sums[name], tensors, weights)
        grams = {
            name: [mean.double().cpu() for mean, _ in scoring.mean_gram(sums[name])]
            for name, scoring in scorings.items()
            if units[name].gram
        }
        return {name: self._by_group(scoring, sums[name]) for name, scoring in scorings.items()}, grams

    def _known(self, references: Sequence[Tensor], tensors: NamedTensors, pairs: bool) -> UnitState:
        """Units whose references are known."""
        device = tensors[self.plan.groups[0].producers[0].weight].device
        units = UnitState.new(self.plan, device, state_dtype(tensors), pairs)
        known = torch.cat([values.flatten() for values in references]).to(units.mean)
        return units._replace(mean=known, mean_weight=torch.ones_like(known))

    def _direction(
        self,
        kind: str | None,
        logits: Tensor,
        target: Tensor | None,
        loss: Loss | None,
        class_dim: int,
        share: float,
    ) -> Direction | None:
        """Which change of the output counts; None: no gradient by the views is needed."""
        if kind in (None, "weights"):
            return None
        if kind == "loss":
            return _whole(self._loss(logits, target, loss, class_dim) * share)
        return direction_of(kind, logits, target, None, noise(kind, self.generator), class_dim)

    def _loss(self, logits: Tensor, target: Tensor | None, loss: Loss | None, class_dim: int) -> Tensor:
        assert target is not None
        return loss(logits, target) if loss is not None else cross_entropy(logits, target, class_dim)

    def _by_group(self, scoring: Scoring, sums: Sums) -> list[Tensor]:
        scores, seen = scoring.mean_scores(sums)
        if seen is not None:
            scores = scores.where(seen, math.nan)
        return [scores[where].double().cpu() for where in self.plan.unit_slices]

    # --- clamps -------------------------------------------------------------------------------------------------------

    def shocks(
        self,
        data: Data,
        units: Sequence[Tensor],
        references: Sequence[Tensor],
        class_dim: int,
        length: int,
        report: Callable[[int, int], None] | None,
    ) -> dict[str, list[Tensor]]:
        """For each metric and group, the mean change of the output over the examples by the clamp of each unit.

        Args:
            length: examples per forward pass where units are clamped one by one.
        """
        done, total = 0, sum(map(len, units))
        found: dict[str, list[Tensor]] = {"l1": [], "kl": []}
        for number, (group, index, levels) in enumerate(zip(self.plan.groups, units, references, strict=True)):
            parts = []
            together = can_clamp_many(group)
            for some in index.split(_MOST_UNITS):
                change = None
                if together:
                    change = self._clamp_many(number, some, levels, data, class_dim)
                    together = change is not None
                if change is None:
                    change = self._clamp_one_by_one(group, some.unsqueeze(1), levels, data, class_dim, length)
                parts.append(change)
                done += len(some)
                if report is not None:
                    report(done, total)
            for metric, values in zip(found, torch.cat(parts, 1) / data.size, strict=True):
                found[metric].append(values)
        return found

    def _clamp_many(self, number: int, units: Tensor, levels: Tensor, data: Data, class_dim: int) -> Tensor | None:
        """``(2, units)`` L1 and KL, summed over the examples; None, with a warning, if it has to be done one by one."""
        group = self.plan.groups[number]
        named = NamedTensors(self.model)
        elements = _ELEMENTS_CPU if named[group.producers[0].weight].device.type == "cpu" else _ELEMENTS
        length = max(1, elements // (self._elements_behind(number) * len(units)))
        changes = []
        for call, _, _ in data.parts(length):
            tensors, arguments = copies(named), copied_arguments(call)
            seed_all(self.seed)
            try:
                outputs = outputs_clamped(self.model, tensors, group, units, levels, arguments, self.output)
            except Exception as error:  # vmap refuses in many ways; all of them mean that the slow way is needed
                first = next((line for line in str(error).splitlines() if line.strip()), "")
                self._warn(group, f"{type(error).__name__}: {first[:200]}")
                return None
            changes.append(difference(outputs[0], outputs[1:], class_dim))
            if len(changes) == 1 and not self._confirmed(group, units, levels, call, outputs, changes[0][0]):
                self._warn(group, "the outputs differ from those of a plain clamp")
                return None
        return torch.stack(changes).sum(0)

    def _confirmed(
        self, group: Group, units: Tensor, levels: Tensor, call: Call, outputs: Tensor, effects: Tensor
    ) -> bool:
        """Whether a plain clamp gives the same outputs, for the unit that changes them most and for one other."""
        before = self.forward(call).detach()
        for unit in {int(effects.argmax()), len(units) // 2}:
            clamp = clamped(self.model, group, units[unit : unit + 1], levels)
            change = self.forward(call, clamp).detach() - before
            tolerance = 0.01 * float(change.abs().max()) + _rounding(before)
            if not float((outputs[unit + 1] - outputs[0] - change).abs().max()) <= tolerance:
                return False
        return True

    def shocks_of_sets(
        self, data: Data, group: int, sets: Tensor, levels: Tensor, class_dim: int, length: int
    ) -> Tensor:
        """``(2, sets)``: the mean change of the output over the examples, L1 and KL, by the clamp of each set of units,
        ``(sets, k)``.
        """
        return self._clamp_one_by_one(self.plan.groups[group], sets, levels, data, class_dim, length) / data.size

    def _clamp_one_by_one(
        self, group: Group, sets: Tensor, levels: Tensor, data: Data, class_dim: int, length: int
    ) -> Tensor:
        """``(2, sets)`` L1 and KL, summed over the examples, by the clamp of one set ``(k,)`` after the other."""
        sums = torch.zeros(2, len(sets), dtype=torch.float64)
        for call, _, _ in data.parts(length):
            before = self.forward(call).detach()
            for place, units in enumerate(sets):
                after = self.forward(call, clamped(self.model, group, units, levels)).detach()
                sums[:, place] += difference(before, after.unsqueeze(0), class_dim)[:, 0]
        return sums

    def _elements_behind(self, group: int) -> int:
        """The size per example of the largest view that is read when the group's first one is, or later."""
        order = list(self.elements)
        first = min((order.index(n) for n in self.plan.views_of[group] if n in self.elements), default=0)
        return max([self.elements[n] for n in order[first:]], default=1)

    def _warn(self, group: Group, why: str) -> None:
        message = f"the units of {group.name!r} are clamped one by one, which is slow ({why})"
        warnings.warn(message, ObservationWarning, stacklevel=5)


def difference(before: Tensor, after: Tensor, class_dim: int) -> Tensor:
    """``(2, n)``: how far each of n outputs is from one, summed over examples: in L1, and as KL(before || after).

    In float64: where a clamp hardly shows, KL is around 1e-9, and in float32 it would be ranked by its rounding.
    """
    before, after = before.double(), after.double()
    l1 = (after - before).abs().flatten(1).sum(1)
    p = _two_or_more(before, class_dim).movedim(class_dim, -1).log_softmax(-1)
    q = _two_or_more(after, class_dim + 1).movedim(class_dim + 1, -1).log_softmax(-1)
    kl = (p.exp() * (p - q)).flatten(1).sum(1)
    return torch.stack([l1, kl]).cpu()


def cross_entropy(logits: Tensor, target: Tensor, class_dim: int) -> Tensor:
    """The mean cross entropy, with the classes on the given axis; the binary one if there is a single logit."""
    if logits.shape[class_dim] == 1:
        target = target.squeeze(class_dim) if target.shape == logits.shape else target
        target = torch.stack([1 - target, target], class_dim) if target.is_floating_point() else target.long()
        logits = _two_or_more(logits, class_dim)
    if target.shape == logits.shape:  # probabilities
        return F.cross_entropy(logits.movedim(class_dim, 1), target.to(logits.dtype).movedim(class_dim, 1))
    return F.cross_entropy(logits.movedim(class_dim, 1), target)


def _two_or_more(logits: Tensor, class_dim: int) -> Tensor:
    """The logits of all classes: a single logit z, of a binary problem, is the two logits 0 and z."""
    return torch.cat([torch.zeros_like(logits), logits], class_dim) if logits.shape[class_dim] == 1 else logits


def _whole(number: Tensor) -> Direction:
    """The direction of a single number."""
    return Direction(number, lambda: iter([torch.ones_like(number)]), 1)


def _pulled_back(direction: Direction, one: Pass, graph: bool = False) -> Iterator[Gradients]:
    """The gradients by the views, for one cotangent after the other."""
    aliases = [alias for capture in one.values() for alias in capture.aliases]
    for cotangent in direction.cotangents():
        pulled = torch.autograd.grad(
            direction.output, aliases, cotangent, retain_graph=True, create_graph=graph, allow_unused=True
        )
        parts = iter(pulled)
        found: dict[int, Tensor] = {}
        for number, capture in one.items():
            gradients = [g for g in (next(parts) for _ in capture.aliases) if g is not None]
            if gradients:
                found[number] = sum_of(gradients)
        yield {0: found}


def _pulled_back_again(utility: str, one: Pass, number: Tensor) -> Gradients:
    """The gradients of a number that was made of gradients."""
    with needing_second_derivatives(utility):
        return next(_pulled_back(_whole(number), one))


def _rounding(outputs: Tensor) -> float:
    return 1000 * torch.finfo(outputs.dtype).eps * float(outputs.abs().max())


def _with_gradients(
    found: Mapping[str, Tensor | None], mean: Tensor, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor | None]:
    """The gradients of weights, by name, with those of one more part of the loss."""
    names = [name for name in found if tensors[name].requires_grad]
    more = torch.autograd.grad(mean, [tensors[name] for name in names], retain_graph=True, allow_unused=True)
    total = dict(found)
    for name, gradient in zip(names, more, strict=True):
        if gradient is not None:
            before = total[name]
            total[name] = gradient if before is None else before + gradient
    return total
