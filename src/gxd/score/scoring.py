"""From forward passes to one score for every unit, and to its running averages: pure functions of plain data.

Units do not interact in a score, so the layers that have one value per example stand side by side in one tensor and
are scored at once; layers with positions (convolutions, tokens) are scored one by one, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gxd.observe.captures import Gradients, Pass
from gxd.observe.reading import Reader, sum_of
from gxd.plan.layouts import AbsoluteSums
from gxd.plan.units import UnitPlan
from gxd.processes import Processes
from gxd.score.state import Average, UnitState, averaged, corrected, updated
from gxd.score.utilities import Observation, UnitView, Utility


class Sums(NamedTuple):
    """What the passes since the last optimizer step have shown.

    Attributes:
        mean: ``(views,)`` sum of h.
        score: ``(units,)`` sum of the per-example scores.
        mean_count: how many values, by view.
        score_count: how many examples, by group.
        whole: if not 0, this is one pass of so many examples that shows all units: mean and score are means then,
            and there are no counts.
        ahead: the running mean of h with this one taken in, if it was needed already.
    """

    mean: Tensor | None = None
    score: Tensor | None = None
    mean_count: tuple[int, ...] = ()
    score_count: tuple[int, ...] = ()
    whole: int = 0
    ahead: Average | None = None

    @property
    def empty(self) -> bool:
        """Whether there was no pass."""
        return self.mean is None


NOTHING = Sums()


@dataclass(frozen=True)
class Block:
    """Some groups, scored together.

    Attributes:
        number: of the pass.
        groups: the numbers of the groups, side by side.
        slots: for each view the groups have, its number in each group.
        h: for each slot, ``(examples, positions, units of all groups)``.
        examples: how many examples the pass has, if that is known.
        weight: how often the mean score of the block counts.
        count: how many examples it adds to the groups: none if another block of the pass has counted them.
    """

    number: int
    groups: list[int]
    slots: list[list[int]]
    h: list[Tensor]
    examples: int | None
    weight: int
    count: int


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
        self.several = processes if processes is not None and processes.several else None
        self.readers = [Reader(view, positions) for view in plan.views]
        self.outgoing = [
            [(c.weight, AbsoluteSums(c.layout, "columns", view.columns)) for c in view.consumers] for view in plan.views
        ]
        self.incoming = [
            [(p.weight, AbsoluteSums(p.layout, "rows", p.rows.unsqueeze(1))) for p in group.producers]
            for group in plan.groups
        ]
        # Whether all units have one view, and one value per example in a tensor of their own: most MLPs.
        self.flat = all(len(numbers) == 1 for numbers in plan.views_of) and all(r.plain for r in self.readers)
        self.all_groups, self.all_views = list(range(len(plan.groups))), list(range(len(plan.views)))
        self.group_of = [group for group, numbers in enumerate(plan.views_of) for _ in numbers]
        self.widths = [reader.n for reader in self.readers]
        self.one: Tensor | None = None  # kept for the next step

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
    ) -> Sums:
        """The sums with some passes added.

        Args:
            tensors: the parameters, by name.
            directions: the gradients by the views of the passes, in one or more directions of the output; ``stacked``
                if they have a first axis of directions.
            examples: of the output.
        """
        if len(passes) == 1 and sums.empty and self.several is None and not stacked:
            h = self._abreast(passes[0], state.mean.dtype)
            if h is not None:
                return self._whole(state, tensors, h, directions)
        blocks = [
            block
            for number, one in enumerate(passes)
            for block in self._blocks(number, one, one.examples or examples, state.mean.dtype)
        ]
        return self._add(state, self.counted(sums), tensors, blocks, directions, stacked) if blocks else sums

    def close(self, state: UnitState, sums: Sums, wait: bool) -> UnitState:
        """The optimizer has stepped: the state with the sums taken in. ``wait``: as for
        :func:`gxd.score.state.updated`.
        """
        mean = self._ahead(state, sums)
        assert sums.score is not None
        score, seen = sums.score, None
        if not sums.whole:
            score, seen = self._quotient(score, sums.score_count, self.plan.unit_slices)
        if seen is None and state.utility_weight is state.mean_weight and sums.whole:  # one view each, always seen
            utility = torch.lerp(state.utility, score, 1 - self.decay), mean[1]
        else:
            utility = averaged((state.utility, state.utility_weight), score, seen, self.decay)
        return updated(state, mean, utility, seen, wait)

    def mean_scores(self, sums: Sums) -> tuple[Tensor, Tensor | None]:
        """``(units,)`` the mean scores over all examples, and which units were seen (None: all)."""
        assert sums.score is not None
        return (sums.score, None) if sums.whole else self._quotient(sums.score, sums.score_count, self.plan.unit_slices)

    def unreached(self, sums: Sums) -> list[int]:
        """The groups that ran, but that no gradient has reached in any pass (of this process)."""
        if sums.whole or min(sums.score_count) > 0:
            return []
        ran = [any(sums.mean_count[n] for n in numbers) for numbers in self.plan.views_of]
        return [g for g, count in enumerate(sums.score_count) if not count and ran[g]]

    # --- sums ---------------------------------------------------------------------------------------------------------

    def _whole(
        self, state: UnitState, tensors: Mapping[str, Tensor], h: Tensor, directions: Iterable[Gradients]
    ) -> Sums:
        """One pass that shows all units side by side, as in most training loops: no sums, no counts."""
        count, mean = len(h), h.mean(0)
        ahead = averaged((state.mean, state.mean_weight), mean, None, self.decay, self.one)
        references = ahead[0] / ahead[1]
        h = h.unsqueeze(1)
        reached: set[int] = set()
        found = []
        for gradients in directions:
            pulled = gradients.get(0, {})
            reached.update(pulled)
            g = None if self.utility.gradient is None else self._gradient(self.all_views, h, pulled, None)
            view = UnitView(h, references, g, lambda: self._w_out(self.all_views, tensors).to(h))
            found.append(self._scores([view], lambda: self._w_in(self.all_groups, tensors).to(h), references))
        score = found[0] if len(found) == 1 else sum_of(found) / len(found)
        if self.utility.gradient is None or len(reached) == len(self.all_views):
            return Sums(mean, score, (), (), count, ahead)
        counts = (count,) * len(self.all_views)
        sums = Sums(mean * count, None, counts, (0,) * len(self.all_groups))
        return self._with_score(state, sums, self.all_groups, score * count, count, reached)  # each group has one view

    def counted(self, sums: Sums) -> Sums:
        """One whole pass, or none, as sums and counts: others follow."""
        views, groups = len(self.all_views), len(self.all_groups)
        if not sums.whole:
            return sums if sums.mean_count else Sums(None, None, (0,) * views, (0,) * groups)
        assert sums.mean is not None and sums.score is not None
        n = sums.whole
        return Sums(sums.mean * n, sums.score * n, (n,) * views, (n,) * groups)

    def _add(
        self,
        state: UnitState,
        sums: Sums,
        tensors: Mapping[str, Tensor],
        blocks: Sequence[Block],
        directions: Iterable[Gradients],
        stacked: bool,
    ) -> Sums:
        for block in blocks:
            for slot, h in zip(block.slots, block.h, strict=True):
                sums = self._with_mean(state, sums, slot, h.sum((0, 1)), h.shape[0] * h.shape[1])
        references = corrected(self._ahead(state, sums))
        scores: list[list[Tensor]] = [[] for _ in blocks]
        reached: dict[int, set[int]] = {block.number: set() for block in blocks}  # pass -> groups
        for gradients in directions:
            for number, groups in reached.items():
                groups.update([self.group_of[view] for view in gradients.get(number, ())])
            for block, found in zip(blocks, scores, strict=True):
                seen = gradients.get(block.number, {})
                if stacked:
                    score = torch.vmap(lambda g, b=block: self._score(b, g, references, tensors))
                    found.append(score(dict(seen)).mean(0))
                else:
                    found.append(self._score(block, seen, references, tensors))
        for block, found in zip(blocks, scores, strict=True):
            shown = block.groups if self.utility.gradient is None else reached[block.number]
            total = sum_of(found) * (block.weight / len(found))
            sums = self._with_score(state, sums, block.groups, total, block.count, shown)
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

    # --- values and scores --------------------------------------------------------------------------------------------

    def _abreast(self, one: Pass, dtype: torch.dtype) -> Tensor | None:
        """``(examples, units)``, if a pass shows all units with one value per example; else None."""
        if not self.flat or len(one) != len(self.all_views):
            return None
        sources = [one[n].checked() for n in self.all_views]
        examples = len(sources[0])
        for source, width in zip(sources, self.widths, strict=True):
            if source.shape != (examples, width):
                return None
        h = side_by_side(sources).detach()
        return (h if h.dtype == dtype else h.to(dtype)) if examples else None

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
        self, block: Block, gradients: Mapping[int, Tensor], references: Tensor, tensors: Mapping[str, Tensor]
    ) -> Tensor:
        views = []
        for slot, h in zip(block.slots, block.h, strict=True):
            g = None if self.utility.gradient is None else self._gradient(slot, h, gradients, block.examples)
            r = self._pick(references, slot, self.plan.view_slices).to(h.device)
            views.append(UnitView(h, r, g, lambda slot=slot, h=h: self._w_out(slot, tensors).to(h)))  # type: ignore[misc]
        return self._scores(views, lambda: self._w_in(block.groups, tensors).to(block.h[0]), references)

    def _scores(self, views: list[UnitView], w_in: Callable[[], Tensor], like: Tensor) -> Tensor:
        """What the utility says of some units, checked."""
        score = self.utility.function(Observation(views, w_in, self.generator))
        units = views[0].h.shape[-1]
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

    def _w_out(self, slot: list[int], tensors: Mapping[str, Tensor]) -> Tensor:
        return side_by_side([_sums(self.outgoing[n], tensors) for n in slot])

    def _w_in(self, groups: list[int], tensors: Mapping[str, Tensor]) -> Tensor:
        return side_by_side([_sums(self.incoming[g], tensors) for g in groups])

    # --- flat tensors -------------------------------------------------------------------------------------------------

    def _with_mean(self, state: UnitState, sums: Sums, slot: list[int], total: Tensor, count: int) -> Sums:
        flat = self._spread(slot, total, self.plan.view_slices, state.mean)
        mean = flat if sums.mean is None else sums.mean + flat
        return sums._replace(mean=mean, mean_count=_counted(sums.mean_count, slot, count))

    def _with_score(
        self, state: UnitState, sums: Sums, groups: list[int], total: Tensor, count: int, shown: Container[int]
    ) -> Sums:
        """What a pass says of some groups. A group that no gradient reaches in it is not shown by it: the output does
        not depend on the group, which says nothing about its units.
        """
        if not all(g in shown for g in groups):
            parts = total.split([self.plan.groups[g].size for g in groups])
            total = side_by_side([part for g, part in zip(groups, parts, strict=True) if g in shown] or [total[:0]])
            groups = [g for g in groups if g in shown]
        flat = self._spread(groups, total, self.plan.unit_slices, state.utility)
        score = flat if sums.score is None else sums.score + flat
        return sums._replace(score=score, score_count=_counted(sums.score_count, groups, count))

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


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Along the last axis; one part is itself."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), -1)


def _sums(parts: Sequence[tuple[str, AbsoluteSums]], tensors: Mapping[str, Tensor]) -> Tensor:
    return sum_of([sums(tensors[name]) for name, sums in parts])
