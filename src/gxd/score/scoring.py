"""From forward passes to one score for every unit, and to its running averages: pure functions of plain data.

Units do not interact in a score, so the layers that have one value per example stand side by side in one tensor and
are scored at once; layers with positions (convolutions, tokens) are scored one by one, in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from gxd.observe.captures import Gradients, Pass
from gxd.observe.reading import Reader, sum_of
from gxd.plan.units import UnitPlan
from gxd.processes import Processes
from gxd.score.curvature import PullBack, curvatures
from gxd.score.state import Average, UnitState, averaged, corrected, updated
from gxd.score.sums import Block, Sums
from gxd.score.utilities import Observation, UnitView, Utility
from gxd.score.weights import Weights, WeightSums, incoming_of, outgoing_of, side_by_side


class Scoring:
    """How the units of a plan are scored by one utility. It holds no state.

    Args:
        processes: sums go over all that train together.
        decay: of the running averages, per observation.
    """

    def __init__(
        self,
        plan: UnitPlan,
        utility: Utility,
        positions: str,
        decay: float,
        generator: torch.Generator,
        processes: Processes | None = None,
    ) -> None:
        self.plan, self.utility, self.decay, self.generator = plan, utility, decay, generator
        self.by_views = utility.gradient not in (None, "weights")  # whether it reads gradients by what consumers read
        self.several = processes if processes is not None and processes.several else None
        self.readers = [Reader(view, positions) for view in plan.views]
        self.outgoing, self.incoming = outgoing_of(plan), incoming_of(plan)
        # Whether all units have one view, and one value per example in a tensor of their own: most MLPs.
        self.flat = all(len(numbers) == 1 for numbers in plan.views_of) and all(r.plain for r in self.readers)
        self.all_groups, self.all_views = list(range(len(plan.groups))), list(range(len(plan.views)))
        self.group_of = [group for group, numbers in enumerate(plan.views_of) for _ in numbers]
        self.widths = [reader.n for reader in self.readers]
        self.sizes = [group.size for group in plan.groups]
        self.group_of_unit = torch.arange(len(self.sizes)).repeat_interleave(torch.tensor(self.sizes))
        self.group_of_view = torch.tensor(self.group_of).repeat_interleave(torch.tensor(self.widths))
        self.one: Tensor | None = None  # kept for the next step

    def follow(self, like: Tensor) -> None:
        """Keep what is needed at every step where the statistics are."""
        self.one, self.group_of_unit = like.new_ones(()), self.group_of_unit.to(like.device)
        self.group_of_view = self.group_of_view.to(like.device)

    @torch.no_grad()
    def add(
        self,
        state: UnitState,
        sums: Sums,
        tensors: Mapping[str, Tensor],
        passes: Sequence[Pass],
        directions: Iterable[Gradients],
        examples: int | None,
        stacked: bool = False,
        again: PullBack | None = None,
    ) -> Sums:
        """The sums with some passes added.

        Args:
            tensors: the parameters, by name.
            directions: the gradients by the views of the passes, in one or more directions of the output; ``stacked``
                if they have a first axis of directions.
            examples: of the output.
            again: pulls a number back through the graph of the gradients, for utilities of second order.
        """
        weights = self._weights(tensors)
        if len(passes) == 1 and sums.empty and self.several is None and not stacked and not self.utility.curvature:
            h = self._abreast(passes[0], state.mean.dtype)
            if h is not None:
                return self._whole(state, weights, h, directions)
        blocks = [
            block
            for number, one in enumerate(passes)
            for block in self._blocks(number, one, one.examples or examples, state.mean.dtype)
        ]
        return self._add(state, self.counted(sums), weights, blocks, directions, stacked, again) if blocks else sums

    def _weights(self, tensors: Mapping[str, Tensor]) -> Weights:
        several = self.several is not None
        return Weights(WeightSums(self.outgoing, tensors, several), WeightSums(self.incoming, tensors, several))

    def by_weights(self, sums: Sums, tensors: Mapping[str, Tensor], gradients: Mapping[str, Tensor | None]) -> Sums:
        """The sums with the scores of a utility of ``weights``, which are of the step as a whole.

        Args:
            gradients: of the incoming weights, by name. A group without is not shown by the step.
        """
        sums, weights = self.counted(sums), self._weights(tensors)
        assert sums.score is not None
        score, counts = torch.zeros_like(sums.score), list(sums.score_count)
        for number, (where, parts) in enumerate(zip(self.plan.unit_slices, self.incoming, strict=True)):
            found = [(gradient, total) for name, total in parts if (gradient := gradients[name]) is not None]
            if len(found) < len(parts):
                counts[number] = 0
                continue
            fan = sum([math.prod(total.layout.canonical_shape(gradient.shape)[2:]) for gradient, total in found])
            w_grad = sum_of([total(gradient) for gradient, total in found]) / fan
            o = Observation([], partial(weights.incoming, [number]), self.generator, w_grad.to(score))
            score[where] = self._checked(self.utility.function(o), len(w_grad), score) * counts[number]
        return sums._replace(score=score, score_count=tuple(counts))

    def close(self, state: UnitState, sums: Sums, wait: bool) -> UnitState:
        """The optimizer has stepped: the state with the sums taken in. ``wait``: as for
        :func:`gxd.score.state.updated`.
        """
        mean = self._ahead(state, sums)
        assert sums.score is not None
        score, seen = sums.score, None
        if not sums.whole:
            score, seen = self._quotient(score, sums.score_count, self.plan.unit_slices)
        if self.utility.relative:
            score, seen = self._shares(score, seen, mean[0], wait)
        if seen is None and state.utility_weight is state.mean_weight and sums.whole:  # one view each, always seen
            utility = torch.lerp(state.utility, score, 1 - self.decay), mean[1]
        else:
            utility = averaged((state.utility, state.utility_weight), score, seen, self.decay)
        return updated(state, mean, utility, self._gram_ahead(state, sums) if state.gram else (), seen, wait)

    def _shares(self, score: Tensor, seen: Tensor | None, mean: Tensor, wait: bool) -> tuple[Tensor, Tensor | None]:
        """Scores over the mean of their group, and which units were seen: not those of a group without any score, as no
        gradient has reached it. A layer that has never said anything else than 0 has none either, whatever the
        gradient: its units are worth nothing, and have to be reset.
        """
        if len(set(self.sizes)) == 1:
            means = score.reshape(len(self.sizes), -1).mean(1)
        else:
            means = torch.stack([part.mean() for part in score.split(self.sizes)])
        if wait and all(means.tolist()):
            return score / self._each(means), seen
        shown = means != 0
        score = score.where(self._each(shown), 0.0) / self._each(means.where(shown, 1.0))
        said = means.new_zeros(len(means)).index_add(0, self.group_of_view, mean.abs().to(means))
        each = self._each(shown | (said == 0))
        return score, each if seen is None else each & seen

    def _each(self, of_groups: Tensor) -> Tensor:
        """``(units,)`` what holds for the group of each unit."""
        return of_groups.index_select(0, self.group_of_unit)

    def mean_scores(self, sums: Sums) -> tuple[Tensor, Tensor | None]:
        """``(units,)`` the mean scores over all examples, and which units were seen (None: all)."""
        assert sums.score is not None
        return (sums.score, None) if sums.whole else self._quotient(sums.score, sums.score_count, self.plan.unit_slices)

    def mean_gram(self, sums: Sums) -> list[tuple[Tensor, Tensor | None]]:
        """For each group ``(n, n)`` the mean of ``e_i e_j`` over all examples, and whether it was seen (None: yes)."""
        if sums.whole:
            return [(pairs, None) for pairs in sums.gram]
        found = []
        for pairs, count in zip(sums.gram, sums.score_count, strict=False):
            mean, seen = self._quotient(pairs.flatten(), [count], [slice(0, pairs.numel())])
            found.append((mean.view_as(pairs), None if seen is None else seen.view_as(pairs)))
        return found

    def unreached(self, sums: Sums) -> list[int]:
        """The groups that ran, but that no gradient has reached in any pass (of this process)."""
        if sums.whole or min(sums.score_count) > 0:
            return []
        ran = [any(sums.mean_count[n] for n in numbers) for numbers in self.plan.views_of]
        return [g for g, count in enumerate(sums.score_count) if not count and ran[g]]

    # --- sums ---------------------------------------------------------------------------------------------------------

    def _whole(self, state: UnitState, weights: Weights, h: Tensor, directions: Iterable[Gradients]) -> Sums:
        """One pass that shows all units side by side, as in most training loops: no sums, no counts."""
        count, mean = h.shape[0], h.mean(0)
        ahead = averaged((state.mean, state.mean_weight), mean, None, self.decay, self.one)
        references = ahead[0] / ahead[1]
        h = h.unsqueeze(1)
        reached: set[int] = set()
        found = []
        for gradients in directions:
            pulled = gradients.get(0, {})
            reached.update(pulled)
            g = self._gradient(self.all_views, h, pulled, None) if self.by_views else None
            view = UnitView(h, references, g, lambda: weights.outgoing(self.all_views).to(h))
            w_in = lambda: weights.incoming(self.all_groups).to(h)  # noqa: E731
            found.append(self._scores([view], w_in, references, self.all_groups if state.gram else []))
        score, *gram = (
            found[0] if len(found) == 1 else [sum_of(parts) / len(found) for parts in zip(*found, strict=True)]
        )
        if not self.by_views or len(reached) == len(self.all_views):
            return Sums(mean, score, (), (), count, ahead, tuple(gram))
        counts = (count,) * len(self.all_views)
        sums = Sums(mean * count, None, counts, (0,) * len(self.all_groups))
        totals = [part * count for part in (score, *gram)]
        return self._with_score(state, sums, self.all_groups, totals, count, reached)  # each group has one view

    def counted(self, sums: Sums) -> Sums:
        """One whole pass, or none, as sums and counts: others follow."""
        views, groups = len(self.all_views), len(self.all_groups)
        if not sums.whole:
            return sums if sums.mean_count else Sums(None, None, (0,) * views, (0,) * groups)
        assert sums.mean is not None and sums.score is not None
        n = sums.whole
        gram = tuple(pairs * n for pairs in sums.gram)
        return Sums(sums.mean * n, sums.score * n, (n,) * views, (n,) * groups, gram=gram)

    def _add(
        self,
        state: UnitState,
        sums: Sums,
        weights: Weights,
        blocks: Sequence[Block],
        directions: Iterable[Gradients],
        stacked: bool,
        again: PullBack | None,
    ) -> Sums:
        for block in blocks:
            for slot, h in zip(block.slots, block.h, strict=True):
                sums = self._with_mean(state, sums, slot, h.sum((0, 1)), h.shape[0] * h.shape[1])
        references = corrected(self._ahead(state, sums))
        scores: list[list[tuple[Tensor, ...]]] = [[] for _ in blocks]
        reached: dict[int, set[int]] = {block.number: set() for block in blocks}  # pass -> groups
        for gradients in directions:
            for number, groups in reached.items():
                groups.update([self.group_of[view] for view in gradients.get(number, ())])
            curved: Sequence[Sequence[Tensor | None]] = [[None] * len(block.slots) for block in blocks]
            if self.utility.curvature:
                assert again is not None
                pick = lambda slot: self._pick(references, slot, self.plan.view_slices)  # noqa: E731
                curved = curvatures(blocks, gradients, again, pick, self._gradient, self.generator)
            for block, found, c in zip(blocks, scores, curved, strict=True):
                seen = gradients.get(block.number, {})
                score = lambda g, b=block, c=c: self._score(b, g, c, references, weights, bool(state.gram))  # noqa: E731
                if stacked:
                    found.append(tuple(part.mean(0) for part in torch.vmap(score)(dict(seen))))
                else:
                    found.append(score(seen))
        for block, found in zip(blocks, scores, strict=True):
            shown = reached[block.number] if self.by_views else block.groups
            totals = [sum_of(parts) * (block.weight / len(found)) for parts in zip(*found, strict=True)]
            sums = self._with_score(state, sums, block.groups, totals, block.count, shown)
        return sums

    def _ahead(self, state: UnitState, sums: Sums) -> Average:
        """The running means of h as they will be once the sums are taken in."""
        if sums.ahead is not None:
            return sums.ahead
        assert sums.mean is not None
        mean, seen = (
            (sums.mean, None) if sums.whole else self._quotient(sums.mean, sums.mean_count, self.plan.view_slices)
        )
        return averaged((state.mean, state.mean_weight), mean, seen, self.decay)

    def _gram_ahead(self, state: UnitState, sums: Sums) -> tuple[Tensor, ...]:
        """The running means of ``e_i e_j`` as they will be; their weights follow from those of the units."""
        return tuple(
            torch.lerp(old, new, 1 - self.decay if seen is None else (1 - self.decay) * seen.to(new.dtype))
            for old, (new, seen) in zip(state.gram, self.mean_gram(sums), strict=True)
        )

    # --- values and scores --------------------------------------------------------------------------------------------

    def _abreast(self, one: Pass, dtype: torch.dtype) -> Tensor | None:
        """``(examples, units)``, if a pass shows all units with one value per example; else None."""
        if not self.flat or len(one) != len(self.all_views):
            return None
        sources = [one[n].checked() for n in self.all_views]
        examples = sources[0].shape[0]
        if not examples or [source.shape for source in sources] != [(examples, width) for width in self.widths]:
            return None
        h = side_by_side(sources).detach()
        return h if h.dtype == dtype else h.to(dtype)

    def _blocks(self, number: int, one: Pass, examples: int | None, dtype: torch.dtype) -> list[Block]:
        blocks: list[Block] = []
        abreast: dict[tuple[int, torch.device], list[tuple[int, int, Tensor]]] = {}
        for group, numbers in enumerate(self.plan.views_of):
            h = {n: self._read(n, one[n].values(), examples) for n in numbers if n in one and one[n].source.numel()}
            if len(h) == 1:
                ((n, values),) = h.items()
                if values.dim() == 2:
                    abreast.setdefault((values.shape[0], values.device), []).append((group, n, values))
                    continue
            # Effects add over views, with their signs where they are of the same examples. Views that cannot be told
            # apart by examples alike (positions="abs", folded loose calls) are scored apart, and their means add.
            h = {n: values.unsqueeze(1) if values.dim() == 2 else values for n, values in h.items()}
            sizes = list(dict.fromkeys(values.shape[0] for values in h.values()))
            for size in sizes:
                views = [n for n, values in h.items() if values.shape[0] == size]
                slots, count = [[n] for n in views], size if size == sizes[0] else 0
                h_each = [h[n].to(dtype) for n in views]
                blocks.append(Block(number, [group], slots, h_each, examples, sizes[0], count))
        for (rows, _), members in abreast.items():
            groups, slot = [g for g, _, _ in members], [n for _, n, _ in members]
            h_all = side_by_side([values for _, _, values in members]).to(dtype).unsqueeze(1)
            blocks.append(Block(number, groups, [slot], [h_all], examples, rows, rows))
        return blocks

    def _read(self, n: int, tensor: Tensor, examples: int | None) -> Tensor:
        """``(examples, units)``, or ``(examples, positions, units)`` if there are several positions."""
        reader = self.readers[n]
        if reader.plain and tensor.dim() == 2 and tensor.shape[1] == reader.n:
            return tensor
        values = reader(tensor, examples)
        return values.squeeze(1) if values.shape[1] == 1 else values

    def _score(
        self,
        block: Block,
        gradients: Mapping[int, Tensor],
        curved: Sequence[Tensor | None],
        references: Tensor,
        weights: Weights,
        pairs: bool,
    ) -> tuple[Tensor, ...]:
        views = []
        for slot, h, c in zip(block.slots, block.h, curved, strict=True):
            g = self._gradient(slot, h, gradients, block.examples) if self.by_views else None
            r = self._pick(references, slot, self.plan.view_slices).to(h.device)
            views.append(UnitView(h, r, g, lambda slot=slot, h=h: weights.outgoing(slot).to(h), c))  # type: ignore[misc]
        w_in = lambda: weights.incoming(block.groups).to(block.h[0])  # noqa: E731
        return self._scores(views, w_in, references, block.groups if pairs else [])

    def _scores(
        self, views: list[UnitView], w_in: Callable[[], Tensor], like: Tensor, pairs: list[int]
    ) -> tuple[Tensor, ...]:
        """What the utility says of some units, checked; and of the pairs of units of these groups."""
        units, gram = views[0].h.shape[-1], []
        if self.utility.gradient == "weights":  # scored when the step is over
            return (like.new_zeros(units),)
        observation = Observation(views, w_in, self.generator)
        if pairs:
            assert self.utility.effects is not None and self.utility.reduced is not None
            effects = self.utility.effects(observation)
            gram = [e.mT @ e / len(e) for e in effects.split([self.plan.groups[g].size for g in pairs], -1)]
            score = self.utility.reduced(effects)
        else:
            score = self.utility.function(observation)
        return (self._checked(score, units, like), *(part.to(like) for part in gram))

    def _checked(self, score: Tensor, units: int, like: Tensor) -> Tensor:
        if not isinstance(score, Tensor) or score.shape != (units,):
            shape = tuple(score.shape) if isinstance(score, Tensor) else type(score).__name__
            raise ValueError(f"utility {self.utility.name!r} must return one score per unit, ({units},), got {shape}")
        if score.is_complex():
            raise TypeError(f"utility {self.utility.name!r} must return real scores, got {score.dtype}")
        return score if score.dtype == like.dtype and score.device == like.device else score.to(like)

    def _gradient(self, slot: list[int], h: Tensor, gradients: Mapping[int, Tensor], examples: int | None) -> Tensor:
        if slot is self.all_views and self.flat and len(gradients) == len(slot):
            parts = [gradients[n] for n in slot]
        else:
            # What no gradient reaches is read by a branch that the output does not depend on.
            absent = [n for n in slot if n not in gradients]
            zeros = {n: h.new_zeros(*h.shape[:2], self.readers[n].n).squeeze(1) for n in absent}
            parts = [zeros[n] if n in zeros else self._read(n, gradients[n], examples) for n in slot]
        g = side_by_side(parts)
        g = g if g.dtype == h.dtype else g.to(h.dtype)
        return g.unsqueeze(1) if g.dim() == 2 else g

    # --- flat tensors -------------------------------------------------------------------------------------------------

    def _with_mean(self, state: UnitState, sums: Sums, slot: list[int], total: Tensor, count: int) -> Sums:
        flat = self._spread(slot, total, self.plan.view_slices, state.mean)
        mean = flat if sums.mean is None else sums.mean + flat
        return sums._replace(mean=mean, mean_count=_counted(sums.mean_count, slot, count))

    def _with_score(
        self,
        state: UnitState,
        sums: Sums,
        groups: list[int],
        totals: Sequence[Tensor],
        count: int,
        shown: Container[int],
    ) -> Sums:
        """What a pass says of some groups: scores, and maybe pairs. A group that no gradient reaches in it is not shown
        by it: the output does not depend on the group, which says nothing about its units.
        """
        total, *pairs = totals
        gram = list(sums.gram or map(torch.zeros_like, state.gram))
        for g, part in zip(groups, pairs, strict=False):
            gram[g] = gram[g] + part.to(gram[g].device) if g in shown else gram[g]
        if not all(g in shown for g in groups):
            parts = total.split([self.plan.groups[g].size for g in groups])
            total = side_by_side([part for g, part in zip(groups, parts, strict=True) if g in shown] or [total[:0]])
            groups = [g for g in groups if g in shown]
        flat = self._spread(groups, total, self.plan.unit_slices, state.utility)
        score = flat if sums.score is None else sums.score + flat
        counts = _counted(sums.score_count, groups, count)
        return sums._replace(score=score, score_count=counts, gram=tuple(gram))

    def _spread(self, numbers: list[int], values: Tensor, slices: Sequence[slice], like: Tensor) -> Tensor:
        """Values of some groups (or views), side by side, in a flat tensor of all."""
        values = values.to(like.device)
        if len(numbers) == len(slices):  # all of them, and they are in order
            return values
        flat, start = torch.zeros_like(like), 0
        for n in numbers:
            size = slices[n].stop - slices[n].start
            flat[slices[n]] = values[start : start + size]
            start += size
        return flat

    def _pick(self, flat: Tensor, numbers: list[int], slices: Sequence[slice]) -> Tensor:
        """The inverse of :meth:`_spread`."""
        return flat if len(numbers) == len(slices) else side_by_side([flat[slices[n]] for n in numbers])

    def _quotient(self, total: Tensor, count: Sequence[int], slices: Sequence[slice]) -> tuple[Tensor, Tensor | None]:
        """Means over all passes and processes, and which were seen (None: all)."""
        if self.several is None and min(count) == max(count) > 0:
            return total / count[0], None
        each = [torch.full((s.stop - s.start,), n, dtype=total.dtype) for n, s in zip(count, slices, strict=True)]
        counts = torch.cat(each).to(total.device)
        if self.several is not None:
            total, counts = self.several.sum(torch.stack([total, counts])).unbind(0)
        return total / counts.clamp(min=1), counts > 0


def _counted(counts: tuple[int, ...], numbers: Sequence[int], count: int) -> tuple[int, ...]:
    more = set(numbers)
    return tuple([n + count if number in more else n for number, n in enumerate(counts)])
