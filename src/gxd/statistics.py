"""Running averages of all units, flat: one tensor for all groups, whatever their number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gxd.plan import UnitPlan


class Statistics:
    """Age, reference and utility of every unit.

    An average ``f`` and its weight ``w`` (the same average of ones) are read as ``f / w``. This equals ``f / (1 - eta**age)`` when every
    step was observed, and is right when some were not.

    Attributes:
        step: optimizer steps so far.
        birth: ``(units,)`` the step at which each unit was last reset.
        mean, mean_weight: ``(views,)`` running mean of h, one entry per view and unit.
        utility, utility_weight: ``(units,)`` running score.
    """

    TENSORS = ("birth", "mean", "mean_weight", "utility", "utility_weight", "nonfinite")

    def __init__(self, plan: UnitPlan, decay: float, device: torch.device, dtype: torch.dtype) -> None:
        self.decay = decay
        self.step = 0
        units = [g.size for g in plan.groups]
        views = [g.size for g in plan.groups for _ in g.views]
        self.unit_slices = _slices(units)
        self.view_slices = _slices(views)
        self.birth = torch.zeros(sum(units), dtype=torch.int64, device=device)
        self.mean = torch.zeros(sum(views), dtype=dtype, device=device)
        self.mean_weight = torch.zeros_like(self.mean)
        self.utility = torch.zeros(sum(units), dtype=dtype, device=device)
        self.utility_weight = torch.zeros_like(self.utility)
        self.nonfinite = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def device(self) -> torch.device:
        return self.mean.device

    @property
    def dtype(self) -> torch.dtype:
        return self.mean.dtype

    def to(self, device: torch.device) -> None:
        """Follow the model to another device."""
        for name in self.TENSORS:
            setattr(self, name, getattr(self, name).to(device))

    def ages(self) -> Tensor:
        """``(units,)`` optimizer steps since each unit was reset."""
        return self.step - self.birth

    def references(self) -> Tensor:
        """``(views,)`` bias-corrected running mean of h; 0 before the first observation."""
        return _corrected(self.mean, self.mean_weight)

    def utilities(self) -> Tensor:
        """``(units,)`` bias-corrected running score; 0 before the first observation."""
        return _corrected(self.utility, self.utility_weight)

    def references_with(self, mean: Tensor, seen: Tensor) -> Tensor:
        """The references as they will be once the batch means ``mean`` of the views that were ``seen`` are taken in."""
        gain = (1 - self.decay) * seen
        return _corrected(self.mean + gain * (mean - self.mean), self.mean_weight + gain * (1 - self.mean_weight))

    def update(self, mean: Tensor, mean_seen: Tensor, score: Tensor, score_seen: Tensor) -> None:
        """Take one observation in: ``f <- eta f + (1 - eta) mean``, ``u <- eta u + (1 - eta) score`` where seen.

        An observation with a non-finite entry is counted and changes nothing; no host synchronisation is needed to know.
        """
        finite = torch.isfinite(mean).all() & torch.isfinite(score).all()
        self.nonfinite += ~finite
        gain = (1 - self.decay) * finite * mean_seen
        self.mean = self.mean + gain * torch.where(finite, mean - self.mean, 0.0)
        self.mean_weight = self.mean_weight + gain * (1 - self.mean_weight)
        gain = (1 - self.decay) * finite * score_seen
        self.utility = self.utility + gain * torch.where(finite, score - self.utility, 0.0)
        self.utility_weight = self.utility_weight + gain * (1 - self.utility_weight)

    def forget(self, group: int, views: range, units: Tensor) -> None:
        """Age, reference and utility of the given units of a group start again at zero."""
        units = units.to(self.device)
        start = self.unit_slices[group].start
        self.birth[start + units] = self.step
        self.utility[start + units] = 0.0
        self.utility_weight[start + units] = 0.0
        for view in views:
            start = self.view_slices[view].start
            self.mean[start + units] = 0.0
            self.mean_weight[start + units] = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, **{name: getattr(self, name).clone() for name in self.TENSORS}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])
        for name in self.TENSORS:
            setattr(self, name, state[name].to(getattr(self, name), copy=True))


def _corrected(average: Tensor, weight: Tensor) -> Tensor:
    return torch.where(weight > 0, average / weight, 0.0)


def _slices(sizes: list[int]) -> list[slice]:
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return [slice(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]


class Pending:
    """Sums over the forward passes since the last optimizer step, of all units, flat.

    Attributes:
        mean, mean_count: ``(views,)`` sum of h and the number of values in it.
        score, score_count: ``(units,)`` sum of the per-example scores and the number of examples.
    """

    TENSORS = ("mean", "mean_count", "score", "score_count")

    def __init__(self, statistics: Statistics) -> None:
        self.statistics = statistics
        self.clear()

    def clear(self) -> None:
        zeros = torch.zeros_like
        views, units = self.statistics.mean, self.statistics.utility
        self.mean, self.mean_count, self.score, self.score_count = zeros(views), zeros(views), zeros(units), zeros(units)
        self.empty = True

    def add_mean(self, view: int, total: Tensor, count: int) -> None:
        where = self.statistics.view_slices[view]
        self.mean[where] += total
        self.mean_count[where] += count

    def add_score(self, group: int, total: Tensor, count: int) -> None:
        where = self.statistics.unit_slices[group]
        self.score[where] += total
        self.score_count[where] += count
        self.empty = False

    def means(self, reduce: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """``(views,)`` the means over all passes (and processes, by ``reduce``), and which views were seen."""
        return _quotient(reduce(torch.stack([self.mean, self.mean_count])))

    def scores(self, reduce: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """``(units,)`` the mean scores, and which units were seen."""
        return _quotient(reduce(torch.stack([self.score, self.score_count])))

    def state_dict(self) -> dict[str, Any]:
        return {"empty": self.empty, **{name: getattr(self, name).clone() for name in self.TENSORS}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.empty = bool(state["empty"])
        for name in self.TENSORS:
            setattr(self, name, state[name].to(getattr(self, name), copy=True))

    def to(self, device: torch.device) -> None:
        for name in self.TENSORS:
            setattr(self, name, getattr(self, name).to(device))


def _quotient(sums: Tensor) -> tuple[Tensor, Tensor]:
    total, count = sums.unbind(0)
    return total / count.clamp(min=1), count > 0
