"""Running averages of all units, flat: one tensor for all groups, whatever their number."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gxd.plan.units import UnitPlan
from gxd.reset.writes import SetEntry


class Statistics:
    """Age, reference and utility of every unit.

    An average ``f`` and its weight ``w`` (the same average of ones) are read as ``f / w``. This equals ``f / (1 -
    eta**age)`` when every step was observed, and is right when some were not.

    Attributes:
        step: optimizer steps so far.
        birth: ``(units,)`` the step at which each unit was last reset.
        mean, mean_weight: ``(views,)`` running mean of h, one entry per view and unit.
        utility, utility_weight: ``(units,)`` running score.
        seen: ``(units,)`` which units the last update has seen; None: all of them.
        waits: whether the host looks at each update. Cheapest on the CPU; elsewhere it would wait for the device.
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
        self.seen: Tensor | None = torch.zeros(sum(units), dtype=torch.bool, device=device)
        self.one = torch.ones((), dtype=dtype, device=device)
        self.ahead: tuple[Tensor, Tensor] | None = None
        self.waits = device.type == "cpu"
        self.alarm = False  # a non-finite observation was seen by the host, and not spoken of yet

    @property
    def device(self) -> torch.device:
        return self.mean.device

    @property
    def dtype(self) -> torch.dtype:
        return self.mean.dtype

    def to(self, device: torch.device) -> None:
        """Follow the model to another device."""
        self.ahead = None if self.ahead is None else (self.ahead[0].to(device), self.ahead[1].to(device))
        self.seen = None if self.seen is None else self.seen.to(device)
        self.waits = device.type == "cpu"
        for name in (*self.TENSORS, "one"):
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

    def candidates(self, maturity: int) -> tuple[Tensor, Tensor]:
        """``(units,)`` the utilities, NaN where nothing was observed, and which units are old enough to go."""
        return self.utility / self.utility_weight, self.birth < self.step - maturity

    def shown(self, group: int) -> bool:
        """Whether the last update has seen a group."""
        return self.seen is None or bool(self.seen[self.unit_slices[group]].any())

    def references_with(self, mean: Tensor, seen: Tensor | None) -> Tensor:
        """The references as they will be once this step's means of the views that were ``seen`` (None: all) are taken
        in.

        What is worked out here is kept for :meth:`update`.
        """
        gain = (1 - self.decay) if seen is None else (1 - self.decay) * seen.to(mean.dtype)
        self.ahead = self._averaged(self.mean, self.mean_weight, mean, gain)
        return self.ahead[0] / self.ahead[1] if seen is None else _corrected(*self.ahead)

    def update(self, score: Tensor, seen: Tensor | None) -> None:
        """``f <- eta f + (1 - eta) mean`` with the means given last, ``u <- eta u + (1 - eta) score``.

        An observation with a non-finite entry is counted and changes nothing.
        """
        assert self.ahead is not None
        gain = (1 - self.decay) if seen is None else (1 - self.decay) * seen.to(score.dtype)
        new: tuple[Tensor, ...] = (*self.ahead, *self._averaged(self.utility, self.utility_weight, score, gain))
        old = (self.mean, self.mean_weight, self.utility, self.utility_weight)
        # A sum is finite if and only if all of its terms are, but for an overflow.
        if not self.waits:
            finite = torch.isfinite(new[0].sum() + new[2].sum())
            self.nonfinite = self.nonfinite + ~finite
            new = tuple(torch.where(finite, n, o) for n, o in zip(new, old, strict=True))
        elif not math.isfinite(new[0].sum().item() + new[2].sum().item()):
            self.nonfinite = self.nonfinite + 1
            self.alarm = True
            new = old
        self.mean, self.mean_weight, self.utility, self.utility_weight = new
        self.seen, self.ahead = seen, None

    def _averaged(self, average: Tensor, weight: Tensor, value: Tensor, gain: float | Tensor) -> tuple[Tensor, Tensor]:
        """One step of an average and of its weight."""
        one = self.one.expand_as(weight) if isinstance(gain, Tensor) else self.one
        return torch.lerp(average, value, gain), torch.lerp(weight, one, gain)

    def forgetting(self, units: Tensor, views: Tensor) -> list[SetEntry]:
        """The writes by which age, reference and utility of the units of these flat numbers start again at zero."""
        units, views = units.to(self.device), views.to(self.device)
        anew = {
            "birth": self.birth.index_fill(0, units, self.step),
            "utility": self.utility.index_fill(0, units, 0.0),
            "utility_weight": self.utility_weight.index_fill(0, units, 0.0),
            "mean": self.mean.index_fill(0, views, 0.0),
            "mean_weight": self.mean_weight.index_fill(0, views, 0.0),
        }
        return [SetEntry(vars(self), name, tensor) for name, tensor in anew.items()]

    def now(self) -> dict[str, Any]:
        """All there is, as it is now: tensors are replaced, and never written to, so this need not copy any."""
        return dict(vars(self))

    def take_back(self, then: dict[str, Any]) -> None:
        """Be again as :meth:`now` has said."""
        vars(self).update(then)

    def state_dict(self) -> dict[str, Any]:
        seen = torch.ones_like(self.utility, dtype=torch.bool) if self.seen is None else self.seen.clone()
        return {"step": self.step, "seen": seen, **{name: getattr(self, name).clone() for name in self.TENSORS}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])
        self.seen = state["seen"].to(self.device, copy=True)
        for name in self.TENSORS:
            setattr(self, name, state[name].to(getattr(self, name), copy=True))


def _corrected(average: Tensor, weight: Tensor) -> Tensor:
    return (average / weight).nan_to_num_(0.0)  # 0 / 0 where nothing was observed


def _slices(sizes: list[int]) -> list[slice]:
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return [slice(a, b) for a, b in pairwise(ends)]
