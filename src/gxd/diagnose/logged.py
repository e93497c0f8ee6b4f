"""What an attachment logs: numbers that are at hand without a forward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from gxd.diagnose.definitions import norm, quantiles
from gxd.methods.recent import RECENT, Recent
from gxd.methods.unit_reset import UnitReset, UnitResets
from gxd.plan.units import UnitPlan
from gxd.score.state import UnitState

Resets = Mapping[str, tuple[UnitReset, UnitResets]]  # the methods that reset units, by name, and their states


def logged(model: nn.Module, plan: UnitPlan, resets: Resets) -> dict[str, float]:
    """The metrics of :meth:`gxd.Attachment.metrics`. The device is waited for once."""
    with torch.no_grad():
        churn, age = ages_at_reset(plan, resets.values(), RECENT)
        found: dict[str, Tensor | float] = {
            "gxd/resets": sum(state.total for _, state in resets.values()),
            "gxd/churn": churn,
            "gxd/median_age_at_reset": age,
            "gxd/reach": reach([state.units for _, state in resets.values()]),
            "gxd/nonfinite_observations": sum(state.units.nonfinite for _, state in resets.values()),
        }
        for name, (_, state) in resets.items():
            units = state.units
            seen = units.utilities()[units.utility_weight > 0]
            low, median, high = quantiles(seen)
            found |= {
                f"gxd/{name}/resets": state.total,
                f"gxd/{name}/utility_05": low,
                f"gxd/{name}/utility_median": median,
                f"gxd/{name}/utility_95": high,
                f"gxd/{name}/age_median": units.ages().double().quantile(0.5) if len(units.birth) else math.nan,
                f"gxd/{name}/reference_max": units.references().abs().max() if len(units.mean) else math.nan,
            }
        gradients = [p.grad for p in model.parameters() if p.grad is not None and not p.grad.is_sparse]
        found |= {
            "gxd/weight_norm": norm([p for p in model.parameters() if p.dim() > 1]),
            "gxd/bias_norm": norm([p for n, p in model.named_parameters() if n.rpartition(".")[2] == "bias"]),
            "gxd/gradient_norm": norm(gradients) if gradients else math.nan,
        }
        tensors = {name: value.double() for name, value in found.items() if isinstance(value, Tensor)}
        device = next((value.device for value in tensors.values() if value.device.type != "cpu"), "cpu")
        values = torch.stack([value.to(device) for value in tensors.values()]).tolist()
    numbers = {name: float(value) for name, value in found.items() if not isinstance(value, Tensor)}
    numbers |= dict(zip(tensors, values, strict=True))
    return {name: numbers[name] for name in found}


def reach(states: Sequence[UnitState]) -> Tensor | float:
    """Share of all units that were reset in the second half of the steps so far; NaN before the first.

    Churn says how young a unit is that is reset, this how many units are: churn is near 1 both where the same few are
    reset over and over, and where the youngest is always reset but is not always the same.
    """
    if not states or not states[0].step or not len(states[0].birth):
        return math.nan
    late = [units.birth * 2 > units.step for units in states]  # what one method resets is new to the others, too
    return torch.stack(late).any(0).double().mean()


def ages_at_reset(plan: UnitPlan, resets: Iterable[tuple[UnitReset, UnitResets]], count: int) -> tuple[float, float]:
    """Churn and median age of the units of the last resets of each method, at most ``count``; NaN if there are none.

    Churn is the share of them that hit a unit younger than 1.5 times the age at which it may first be reset again: of
    units that would have needed more time, or that are useless whatever their weights are. Methods of which that age is
    not known (``snr``) have no part in it.
    """
    young, ages = [], []
    for method, state in resets:
        recent: Recent = state.recent.last(count)
        young.append(recent.young(method.selector.earliest(plan)).cpu())
        ages.append(recent.age.double().cpu())
    if not any(map(len, ages)):
        return math.nan, math.nan
    return torch.cat(young).nanmean().item(), torch.cat(ages).quantile(0.5).item()
