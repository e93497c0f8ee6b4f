"""Room three: which units go. Eligibility, fractional budgets, the lowest k."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch
from torch import Tensor


class Schedule:
    """When a group is due, and for how many units: ``c <- c + rate * eligible``, ``k = floor(c)``, ``c <- c - k``.

    How many units are eligible (older than ``maturity``) follows from how many were reset when. It is counted here,
    on the host, so that the device need not be asked on steps without a reset.
    """

    def __init__(self, size: int, rate: float, maturity: int) -> None:
        self.rate, self.maturity = rate, maturity
        self.eligible = 0
        self.young: deque[tuple[int, int]] = deque([(0, size)])  # (birth, how many)
        self.budget = 0.0
        self._last: tuple[int, int, float, list[tuple[int, int]], bool] | None = None

    def advance(self, step: int) -> int:
        """One optimizer step has been taken, the ``step``-th. Returns how many units are to be reset now."""
        before = (step, self.eligible, self.budget)
        matured = []
        while self.young and step - self.young[0][0] > self.maturity:
            matured.append(self.young.popleft())
            self.eligible += matured[-1][1]
        self.budget += self.rate * self.eligible
        due = min(math.floor(self.budget), self.eligible)
        if due:
            self.budget -= due
            self.eligible -= due
            self.young.append((step, due))
        self._last = (*before, matured, due > 0)
        return due

    def cancel(self, due: int) -> None:
        """Take back the last answer: no unit was reset."""
        self.eligible += due
        self.young.pop()
        if self._last is not None:
            self._last = (*self._last[:4], False)

    def undo(self, step: int) -> None:
        """As if the step had not been taken, whatever the answer was."""
        if self._last is not None and self._last[0] == step:
            _, self.eligible, self.budget, matured, answered = self._last
            if answered:
                self.young.pop()
            self.young.extendleft(reversed(matured))
            self._last = None

    def state_dict(self) -> dict[str, Any]:
        return {"eligible": self.eligible, "young": [list(cohort) for cohort in self.young], "budget": self.budget}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.eligible, self.budget = int(state["eligible"]), float(state["budget"])
        self.young = deque((int(birth), int(count)) for birth, count in state["young"])


def lowest(utility: Tensor, eligible: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` eligible units of lowest utility, ascending; ties go to the lower index.

    Args:
        utility: ``(n,)`` bias-corrected utilities; NaN where nothing was observed, which comes last.
        eligible: ``(n,)`` whether each unit may be reset.
        count: how many; at most as many as are eligible.
    """
    # The last of the eligible units must still come before the ones that may not be reset.
    largest = torch.finfo(utility.dtype).max
    utility = torch.where(eligible, utility.nan_to_num(largest, largest), math.inf)
    if count == 1:
        return utility.argmin(0, keepdim=True)
    return utility.argsort(stable=True)[:count].sort().values
