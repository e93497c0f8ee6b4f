"""What the passes of one step have shown so far, and the blocks that groups are scored in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from gxd.score.state import Average


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
        gram: for each group ``(n, n)``, sum of ``e_i e_j`` over the examples, if the state has it.
    """

    mean: Tensor | None = None
    score: Tensor | None = None
    mean_count: tuple[int, ...] = ()
    score_count: tuple[int, ...] = ()
    whole: int = 0
    ahead: Average | None = None
    gram: tuple[Tensor, ...] = ()

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
