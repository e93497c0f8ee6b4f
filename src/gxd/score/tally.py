"""Between observing and averaging: what the forward passes of one step say about all units, in flat tensors.

Units do not interact in a score, so the layers that have one value per example stand side by side in one tensor and
are scored at once; layers with positions (convolutions, tokens) are scored one by one, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gxd.observe.captures import Gradients, Pass, Reader, sum_of
from gxd.plan.layouts import AbsoluteSums
from gxd.plan.units import UnitPlan
from gxd.score.statistics import Statistics
from gxd.score.utilities import Observation, UnitView, Utility


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


class Tally:
    """Sums of values and scores over the passes since the last optimizer step.

    Args:
        reduce: sums a tensor over the processes that train together.
    """

    def __init__(
        self,
        plan: UnitPlan,
        tensors: Mapping[str, Tensor],
        utility: Utility,
        statistics: Statistics,
        positions: str,
        generator: torch.Generator,
        reduce: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self.plan, self.tensors, self.utility, self.statistics = plan, tensors, utility, statistics
        self.generator, self.reduce = generator, reduce
        self.views = [view for group in plan.groups for view in group.views]
        self.readers = [Reader(view, positions) for view in self.views]
        self.views_of = view_numbers(plan)
        self.outgoing = [
            [(c.weight, AbsoluteSums(c.layout, "columns", view.columns)) for c in view.consumers] for view in self.views
        ]
        self.incoming = [
            [(p.weight, AbsoluteSums(p.layout, "rows", p.rows.unsqueeze(1))) for p in group.producers]
            for group in plan.groups
        ]
        # Whether all units have one view, and one value per example in a tensor of their own: most MLPs.
        self.flat = [len(numbers) for numbers in self.views_of] == [1] * len(plan.groups) and all(
            reader.plain for reader in self.readers
        )
        self.all_groups, self.all_views = list(range(len(plan.groups))), list(range(len(self.views)))
        self.group_of = [group for group, numbers in enumerate(self.views_of) for _ in numbers]
        self.widths = [reader.n for reader in self.readers]
        self.clear()

    def clear(self) -> None:
        self.whole: tuple[Tensor, Tensor, int] | None = None  # mean of h, mean score, examples: of one complete pass
        self.mean: Tensor | None = None  # (views,) sum of h
        self.score: Tensor | None = None  # (units,) sum of the per-example scores
        self.mean_count = [0] * len(self.views)  # how many values, by view
        self.score_count = [0] * len(self.plan.groups)  # how many examples, by group

    @property
    def empty(self) -> bool:
        return self.whole is None and self.score is None

    @torch.no_grad()
    def add(
        self, passes: Sequence[Pass], directions: Iterable[Gradients], examples: int | None, stacked: bool = False
    ) -> None:
        """Take in some passes, with the gradients by their views in one or more directions of the output; ``stacked``
        if the gradients have a first axis of directions.
        """
        if len(passes) == 1 and self.empty and self.reduce is None and not stacked:
            h = self._abreast(passes[0])
            if h is not None:
                self._add_whole(h, directions)
                return
        self._settle()
        blocks = [
            block for number, one in enumerate(passes) for block in self._blocks(number, one, one.examples or examples)
        ]
        if not blocks:
            return
        before, ahead = (self.mean, list(self.mean_count)), self.statistics.ahead
        try:
            self._add(blocks, directions, stacked)
        except BaseException:  # a utility that fails leaves nothing behind
            (self.mean, self.mean_count), self.statistics.ahead = before, ahead
            raise

    def _add_whole(self, h: Tensor, directions: Iterable[Gradients]) -> None:
        """One pass that shows all units side by side, as in most training loops: no sums, no counts."""
        ahead = self.statistics.ahead
        block = Block(0, self.all_groups, [self.all_views], [h.unsqueeze(1)], None, len(h), len(h))
        reached: set[int] = set()
        found = []
        try:
            mean = h.mean(0)
            references = self.statistics.references_with(mean, None)
            for gradients in directions:
                reached.update(gradients.get(0, ()))
                found.append(self._score(block, gradients.get(0, {}), references))
        except BaseException:  # as above
            self.statistics.ahead = ahead
            raise
        score = found[0] if len(found) == 1 else sum_of(found) / len(found)
        if self.utility.gradient is None or len(reached) == len(self.all_views):
            self.whole = (mean, score, len(h))
        else:
            self.mean, self.mean_count = mean * len(h), [len(h)] * len(self.views)
            self._add_score(self.all_groups, score * len(h), len(h), reached)  # each group has one view

    def _settle(self) -> None:
        """Another pass follows, or somebody asks: the complete one becomes sums and counts."""
        if self.whole is not None:
            mean, score, count = self.whole
            self.whole = None
            self.mean, self.mean_count = mean * count, [count] * len(self.views)
            self.score, self.score_count = score * count, [count] * len(self.plan.groups)

    def _add(self, blocks: Sequence[Block], directions: Iterable[Gradients], stacked: bool) -> None:
        for block in blocks:
            for slot, h in zip(block.slots, block.h, strict=True):
                self._add_mean(slot, h.sum((0, 1)), h.shape[0] * h.shape[1])
        references = self.statistics.references_with(*self.means())
        scores: list[list[Tensor]] = [[] for _ in blocks]
        reached: dict[int, set[int]] = {block.number: set() for block in blocks}  # pass -> groups
        for gradients in directions:
            for number, groups in reached.items():
                groups.update([self.group_of[view] for view in gradients.get(number, ())])
            for block, found in zip(blocks, scores, strict=True):
                seen = gradients.get(block.number, {})
                if stacked:
                    score = torch.vmap(lambda g, b=block: self._score(b, g, references))
                    found.append(score(dict(seen)).mean(0))
                else:
                    found.append(self._score(block, seen, references))
        for block, found in zip(blocks, scores, strict=True):
            shown = block.groups if self.utility.gradient is None else reached[block.number]
            self._add_score(block.groups, sum_of(found) * (block.weight / len(found)), block.count, shown)

    def means(self) -> tuple[Tensor, Tensor | None]:
        """``(views,)`` the means of h over all passes and processes, and which were seen (None: all)."""
        if self.whole is not None:
            return self.whole[0], None
        assert self.mean is not None
        return self._quotient(self.mean, self.mean_count, self.statistics.view_slices)

    def scores(self) -> tuple[Tensor, Tensor | None]:
        """``(units,)`` the mean scores over all examples, and which units were seen (None: all)."""
        if self.whole is not None:
            return self.whole[1], None
        assert self.score is not None
        return self._quotient(self.score, self.score_count, self.statistics.unit_slices)

    def unreached(self) -> list[int]:
        """The groups that ran, but that no gradient has reached in any pass (of this process)."""
        if self.whole is not None or min(self.score_count) > 0:
            return []
        ran = [any(self.mean_count[n] for n in numbers) for numbers in self.views_of]
        return [g for g, count in enumerate(self.score_count) if not count and ran[g]]

    def to(self, device: torch.device) -> None:
        self._settle()
        self.mean = None if self.mean is None else self.mean.to(device)
        self.score = None if self.score is None else self.score.to(device)

    def state_dict(self) -> dict[str, Any]:
        self._settle()
        return {
            "mean": None if self.mean is None else self.mean.clone(),
            "score": None if self.score is None else self.score.clone(),
            "mean_count": list(self.mean_count),
            "score_count": list(self.score_count),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        like = self.statistics.mean
        self.whole = None
        self.mean = None if state["mean"] is None else state["mean"].to(like, copy=True)
        self.score = None if state["score"] is None else state["score"].to(like, copy=True)
        self.mean_count, self.score_count = list(state["mean_count"]), list(state["score_count"])

    # --- values and scores --------------------------------------------------------------------------------------------

    def _abreast(self, one: Pass) -> Tensor | None:
        """``(examples, units)``, if a pass shows all units with one value per example; else None."""
        if not self.flat or len(one) != len(self.all_views):
            return None
        sources = [one[n].checked() for n in self.all_views]
        examples = sources[0].shape[0]
        for source, width in zip(sources, self.widths, strict=True):
            if source.shape != (examples, width):
                return None
        return side_by_side(sources).detach().to(self.statistics.dtype) if examples else None

    def _blocks(self, number: int, one: Pass, examples: int | None) -> list[Block]:
        blocks: list[Block] = []
        abreast: dict[tuple[int, torch.device], list[tuple[int, int, Tensor]]] = {}
        for group, numbers in enumerate(self.views_of):
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
                h_each = [h[n].to(self.statistics.dtype) for n in views]
                blocks.append(Block(number, [group], slots, h_each, examples, sizes[0], count))
        for (rows, _), members in abreast.items():
            groups, slot = [g for g, _, _ in members], [n for _, n, _ in members]
            h_all = side_by_side([values for _, _, values in members]).to(self.statistics.dtype).unsqueeze(1)
            blocks.append(Block(number, groups, [slot], [h_all], examples, rows, rows))
        return blocks

    def _read(self, n: int, tensor: Tensor, examples: int | None) -> Tensor:
        """``(examples, units)``, or ``(examples, positions, units)`` if there are several positions."""
        reader = self.readers[n]
        if reader.plain and tensor.dim() == 2 and tensor.shape[1] == reader.n:
            return tensor
        values = reader(tensor, examples)
        return values.squeeze(1) if values.shape[1] == 1 else values

    def _score(self, block: Block, gradients: Mapping[int, Tensor], references: Tensor) -> Tensor:
        views = []
        for slot, h in zip(block.slots, block.h, strict=True):
            g = None if self.utility.gradient is None else self._gradient(slot, h, gradients, block.examples)
            r = self._pick(references, slot, self.statistics.view_slices).to(h.device)
            views.append(UnitView(h, r, g, lambda slot=slot, h=h: self._w_out(slot).to(h)))  # type: ignore[misc]
        observation = Observation(views, lambda: self._w_in(block.groups).to(block.h[0]), self.generator)
        score = self.utility.function(observation)
        units = block.h[0].shape[-1]
        if not isinstance(score, Tensor) or score.shape != (units,):
            shape = tuple(score.shape) if isinstance(score, Tensor) else type(score).__name__
            raise ValueError(f"utility {self.utility.name!r} must return one score per unit, ({units},), got {shape}")
        if score.is_complex():
            raise TypeError(f"utility {self.utility.name!r} must return real scores, got {score.dtype}")
        return score.to(self.statistics.utility)

    def _gradient(self, slot: list[int], h: Tensor, gradients: Mapping[int, Tensor], examples: int | None) -> Tensor:
        if slot is self.all_views and self.flat and len(gradients) == len(slot):
            parts = [gradients[n] for n in slot]
        else:
            # What no gradient reaches is read by a branch that the output does not depend on.
            absent = [n for n in slot if n not in gradients]
            zeros = {n: h.new_zeros(*h.shape[:2], self.readers[n].n).squeeze(1) for n in absent}
            parts = [zeros[n] if n in zeros else self._read(n, gradients[n], examples) for n in slot]
        g = side_by_side(parts).to(h.dtype)
        return g.unsqueeze(1) if g.dim() == 2 else g

    def _w_out(self, slot: list[int]) -> Tensor:
        return side_by_side([self._sums(self.outgoing[n]) for n in slot])

    def _w_in(self, groups: list[int]) -> Tensor:
        return side_by_side([self._sums(self.incoming[g]) for g in groups])

    def _sums(self, parts: Sequence[tuple[str, AbsoluteSums]]) -> Tensor:
        return sum_of([sums(self.tensors[name]) for name, sums in parts])

    # --- flat sums ----------------------------------------------------------------------------------------------------

    def _add_mean(self, slot: list[int], total: Tensor, count: int) -> None:
        flat = self._spread(slot, total, self.statistics.view_slices, self.statistics.mean)
        self.mean = flat if self.mean is None else self.mean + flat
        for n in slot:
            self.mean_count[n] += count

    def _add_score(self, groups: list[int], total: Tensor, count: int, shown: Container[int]) -> None:
        """What a pass says of some groups. A group that no gradient reaches in it is not shown by it: the output does
        not depend on the group, which says nothing about its units.
        """
        slices = self.statistics.unit_slices
        if not all(g in shown for g in groups):
            parts = total.split([slices[g].stop - slices[g].start for g in groups])
            total = side_by_side([part for g, part in zip(groups, parts, strict=True) if g in shown] or [total[:0]])
            groups = [g for g in groups if g in shown]
        flat = self._spread(groups, total, slices, self.statistics.utility)
        self.score = flat if self.score is None else self.score + flat
        for g in groups:
            self.score_count[g] += count

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

    def _quotient(self, total: Tensor, count: list[int], slices: Sequence[slice]) -> tuple[Tensor, Tensor | None]:
        if self.reduce is None and min(count) == max(count) > 0:
            return total / count[0], None
        each = [torch.full((s.stop - s.start,), n, dtype=total.dtype) for n, s in zip(count, slices, strict=True)]
        counts = torch.cat(each).to(total.device)
        if self.reduce is not None:
            total, counts = self.reduce(torch.stack([total, counts])).unbind(0)
        return total / counts.clamp(min=1), counts > 0


def view_numbers(plan: UnitPlan) -> list[list[int]]:
    """The numbers of the views of each group, counted through the plan."""
    numbers, start = [], 0
    for group in plan.groups:
        numbers.append(list(range(start, start + len(group.views))))
        start += len(group.views)
    return numbers


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Along the last axis; one part is itself."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), -1)
