"""Checks at the door: arguments, plans and saved states, each refused with the value and the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gxd.errors import PlanError
from gxd.init import Init
from gxd.layers import NamedTensors
from gxd.operate import STEP_POLICIES
from gxd.plan import UnitPlan
from gxd.score import Utility

STATE_VERSION = 1
POSITIONS = ("signed", "abs")


def check_arguments(
    rate: float, maturity: int, decay: float, score_every: int, seed: int, positions: str, step_policy: str
) -> None:
    """Raise ValueError for the first hyper-parameter out of range."""
    if not isinstance(rate, (int, float)) or isinstance(rate, bool) or not 0 <= rate <= 1:
        raise ValueError(f"replacement_rate={rate!r} must be a number in [0, 1]; the paper uses 1e-5 to 1e-3")
    if not isinstance(maturity, int) or isinstance(maturity, bool) or maturity < 0:
        raise ValueError(f"maturity={maturity!r} must be a whole number of steps, 0 or more")
    if not isinstance(decay, (int, float)) or not 0 <= decay < 1:
        raise ValueError(f"decay={decay!r} must be a number in [0, 1); the paper uses 0.99")
    if not isinstance(score_every, int) or isinstance(score_every, bool) or score_every < 1:
        raise ValueError(f"score_every={score_every!r} must be a whole number of steps, 1 or more")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"seed={seed!r} must be a whole number, 0 or more")
    if positions not in POSITIONS:
        raise ValueError(f"positions={positions!r} is not one of {POSITIONS}")
    if step_policy not in STEP_POLICIES:
        raise ValueError(f"step_policy={step_policy!r} is not one of {STEP_POLICIES}")


def check_plan(plan: UnitPlan, model: nn.Module, optimizer: Optimizer) -> None:
    """Raise PlanError unless the plan has units, and the model and the optimizer have all it names."""
    tensors = NamedTensors(model)
    plan.validate(tensors)
    if not plan.groups:
        reasons = "\n".join(f"  {entry.name}: {entry.reason}" for entry in plan.skipped)
        raise PlanError(f"the plan has no unit to reset. Not reset:\n{reasons or '  (no layer was found)'}")
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing = [name for name in plan.shapes if name in parameters and id(parameters[name]) not in trained]
    if missing:
        groups = [
            g.name for g in plan.groups if any(name.startswith(p.module + ".") for p in g.producers for name in missing)
        ]
        raise PlanError(
            f"not in the optimizer: {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}. Add them "
            "to the optimizer, or "
            f"leave the groups out of the plan (exclude={groups[:3] or [g.name for g in plan.groups][:3]})"
        )
    for name in plan.shapes:
        if hasattr(tensors[name], "device_mesh"):
            raise PlanError(f"{name!r} is sharded (DTensor): resets of sharded parameters are not supported")


def check_state(state: Mapping[str, Any], plan: UnitPlan, utility: Utility, own: Mapping[str, Any]) -> None:
    """Raise PlanError unless a saved state is whole, and of this plan and utility."""
    missing = [key for key in own if key not in state]
    if missing:
        raise PlanError(f"this is no state of a ContinualBackprop: it lacks {', '.join(missing)}")
    if state["version"] != STATE_VERSION:
        raise PlanError(f"the saved state has version {state['version']}, this gxd reads version {STATE_VERSION}")
    if state["utility"] != utility.name:
        raise PlanError(f"the saved statistics are of utility {state['utility']!r}, this one uses {utility.name!r}")
    if state["groups"] != own["groups"]:
        theirs, ours = dict(state["groups"]), dict(own["groups"])
        differing = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
        raise PlanError(
            f"the saved state is of another model or plan: group {differing[0]!r} has "
            f"{theirs.get(differing[0], 'no')} units there and "
            f"{ours.get(differing[0], 'no')} here"
        )
    if state["fingerprint"] != own["fingerprint"]:
        raise PlanError("the saved state is of another plan: same group names, but other rows or columns")
    for key, value in own["statistics"].items():
        if isinstance(value, Tensor) and state["statistics"][key].shape != value.shape:
            raise PlanError(
                f"the saved state is of another plan: {key} has shape {tuple(state['statistics'][key].shape)}"
            )


def with_inits(plan: UnitPlan, inits: Sequence[Sequence[Sequence[Any]]]) -> UnitPlan:
    """The plan with the distributions that were found when the model was new."""
    groups = []
    for group, saved in zip(plan.groups, inits, strict=True):
        producers = tuple(
            p if p.init.function is not None else replace(p, init=Init(str(kind), float(scale)))
            for p, (kind, scale) in zip(group.producers, saved, strict=True)
        )
        groups.append(replace(group, producers=producers))
    return replace(plan, groups=tuple(groups))
