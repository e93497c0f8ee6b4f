"""The units of lowest utility, at a rate: eligibility, fractional budgets, the lowest k."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from gxd import arguments
from gxd.plan.units import UnitPlan
from gxd.score.state import UnitState
from gxd.select.base import YOUNG, Selection, Selector
from gxd.select.settings import PerGroup


@dataclass(frozen=True)
class Cohorts:
    """How many units of each group are eligible, counted on the host so that the device need not be asked on steps
    without a reset. It follows from the births of the units, and is not saved.

    Attributes:
        eligible: how many units are older than the maturity, by group.
        young: the others as ``(birth, how many)``, oldest first, by group.
        maturities: that this was counted with.
    """

    eligible: tuple[int, ...]
    young: tuple[tuple[tuple[int, int], ...], ...]
    maturities: tuple[int, ...]

    @cached_property
    def matures(self) -> float:
        """The last step at which none of the young is eligible."""
        first = [young[0][0] + m for young, m in zip(self.young, self.maturities, strict=True) if young]
        return min(first, default=math.inf)


class Budgets(NamedTuple):
    """The state of :class:`LowestRate`.

    Attributes:
        budget: by group, how many units may go; a fraction is carried over.
    """

    budget: tuple[float, ...]
    cohorts: Cohorts | None = None


class LowestRate(Selector):
    """Continual Backpropagation's rule: ``c <- c + rate * eligible``, ``k = floor(c)``, ``c <- c - k``, and the k
    eligible units of lowest utility go.

    Args:
        rate: the share of the eligible units of each group that is reset per step.
        maturity: a unit is eligible when more than this many steps old.
        score_every: score only every so many steps.
    """

    def __init__(self, rate: float = 1e-4, maturity: int = 100, score_every: int = 1) -> None:
        self.rates = PerGroup("replacement_rate", rate, arguments.rate, attrgetter("rate"))
        self.maturities = PerGroup("maturity", maturity, arguments.maturity)
        self.score_every = arguments.every("score_every", score_every)

    def init(self, plan: UnitPlan, units: UnitState) -> Budgets:
        return Budgets((0.0,) * len(plan.groups))

    def observes(self, step: int) -> bool:
        return (step - 1) % self.score_every == 0

    def advance(self, plan: UnitPlan, units: UnitState, state: Budgets) -> tuple[Budgets, bool]:
        step, cohorts = units.step, state.cohorts
        rates, maturities = self.rates.values(plan), self.maturities.values(plan)
        if cohorts is None or cohorts.maturities != maturities:
            cohorts = _counted(plan, units, maturities)
        elif step > cohorts.matures:
            cohorts = _matured(cohorts, step)
        budget = tuple([b + r * n for b, r, n in zip(state.budget, rates, cohorts.eligible, strict=True)])
        due = max(budget) >= 1 and any(min(int(b), n) for b, n in zip(budget, cohorts.eligible, strict=True))
        return Budgets(budget, cohorts), due

    def select(
        self, plan: UnitPlan, units: UnitState, state: Budgets, allowed: Callable[[int], bool]
    ) -> tuple[Selection, Budgets]:
        assert state.cohorts is not None
        budget, eligible, young = list(state.budget), list(state.cohorts.eligible), list(state.cohorts.young)
        maturities = state.cohorts.maturities
        chosen: Selection = {}
        # Of all groups at once: a small network has as many operations as groups, and no work for any of them.
        if len(set(maturities)) == 1:
            mature = units.birth < units.step - maturities[0]
        else:
            parts = zip(plan.unit_slices, maturities, strict=True)
            mature = torch.cat([units.birth[where] < units.step - maturity for where, maturity in parts])
        order = ordered(units.utility / units.utility_weight, mature)  # NaN where nothing was observed
        for number, where in enumerate(plan.unit_slices):
            count = min(math.floor(budget[number]), eligible[number])
            budget[number] -= count
            if count and allowed(number):
                chosen[number] = self.choose(units, number, where, order, mature, count)
                eligible[number] -= count
                young[number] = (*young[number], (units.step, count))
        cohorts = Cohorts(tuple(eligible), tuple(young), maturities)
        return chosen, Budgets(tuple(budget), cohorts)

    def choose(self, units: UnitState, group: int, where: slice, order: Tensor, mature: Tensor, count: int) -> Tensor:
        """Indices of the ``count`` units of a group that go, ascending.

        Args:
            where: the units of the group, in the flat tensors of all units.
            order: utilities, see :func:`ordered`.
        """
        return first(order[where], count)

    def recounted(self, state: Budgets) -> Budgets:
        return state._replace(cohorts=None)

    def idle(self, plan: UnitPlan) -> bool:
        return not any(self.rates.values(plan))

    def earliest(self, plan: UnitPlan) -> tuple[int, ...]:
        """The maturity. But where resets are so rare that the first one after it finds a newborn more than half as old
        again (a group of n units has one every ``1 / (rate n)`` steps), the age of a newborn at that reset.
        """
        found = []
        for group, rate, maturity in zip(
            plan.groups, self.rates.values(plan), self.maturities.values(plan), strict=True
        ):
            interval = 1 / (rate * group.size) if rate else 0.0
            first = math.ceil(interval * math.ceil((maturity + 1) / interval)) if interval else maturity
            found.append(first if first > YOUNG * maturity else maturity)
        return tuple(found)


def lowest(utility: Tensor, eligible: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` eligible units of lowest utility, ascending; ties go to the lower index.

    Args:
        utility: ``(n,)`` bias-corrected utilities; NaN where nothing was observed, which comes last.
        eligible: ``(n,)`` whether each unit may be reset.
        count: how many; at most as many as are eligible.
    """
    return first(ordered(utility, eligible), count)


def ordered(utility: Tensor, eligible: Tensor) -> Tensor:
    """Utilities such that the units to be reset come first, and those that may not be reset last."""
    # The last of the eligible units must still come before the ones that may not be reset.
    largest = torch.finfo(utility.dtype).max
    return utility.nan_to_num(largest, largest).where(eligible, math.inf)


def first(order: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` units that come first, ascending; ties go to the lower index."""
    if count == 1:
        return order.argmin(0, keepdim=True)
    return order.argsort(stable=True)[:count].sort().values


def _counted(plan: UnitPlan, units: UnitState, maturities: tuple[int, ...]) -> Cohorts:
    eligible, young = [], []
    birth = units.birth.cpu()
    for where, maturity in zip(plan.unit_slices, maturities, strict=True):
        births, counts = birth[where].unique(return_counts=True)
        cohorts = list(zip(births.tolist(), counts.tolist(), strict=True))
        young.append(tuple((b, n) for b, n in cohorts if units.step - b <= maturity))
        eligible.append(sum(n for b, n in cohorts if units.step - b > maturity))
    return Cohorts(tuple(eligible), tuple(young), maturities)


def _matured(cohorts: Cohorts, step: int) -> Cohorts:
    eligible, young = list(cohorts.eligible), list(cohorts.young)
    for number, maturity in enumerate(cohorts.maturities):
        while young[number] and step - young[number][0][0] > maturity:
            eligible[number] += young[number][0][1]
            young[number] = young[number][1:]
    return Cohorts(tuple(eligible), tuple(young), cohorts.maturities)
