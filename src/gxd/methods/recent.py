"""The ages at which units were reset: whether resets hit the same young units again and again."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gxd.select.base import YOUNG

RECENT = 1000
"""How many resets are remembered."""


class Recent(NamedTuple):
    """The last resets, the newest at the end.

    Attributes:
        group: ``(RECENT,)`` the number of the unit's group; -1: there were not so many yet.
        age: ``(RECENT,)`` the steps since the unit was reset before, or since the beginning.
    """

    group: Tensor
    age: Tensor

    @classmethod
    def none(cls, device: torch.device) -> Recent:
        """Before the first reset."""
        empty = torch.full((RECENT,), -1, dtype=torch.int64, device=device)
        return cls(empty, empty)

    def then(self, group: Tensor, age: Tensor) -> Recent:
        """With units of these groups and ages, which begin anew. Waits for no device."""
        groups = torch.cat([self.group, group.to(self.group.device)])
        return Recent(groups[-RECENT:], torch.cat([self.age, age])[-RECENT:])

    def last(self, count: int) -> Recent:
        """The last so many of them, or as many as there are."""
        known = self.group >= 0
        start = max(0, int(known.sum()) - count)
        return Recent(self.group[known][start:], self.age[known][start:])

    def young(self, earliest: tuple[int, ...] | None) -> Tensor:
        """Which of them were young; NaN where the age at which a unit may first be reset is not known."""
        if earliest is None:
            return torch.full_like(self.age, torch.nan, dtype=torch.float64)
        first = torch.tensor([*earliest, 0], device=self.age.device)  # the last for those of no group
        return (self.age < YOUNG * first[self.group]).double()
