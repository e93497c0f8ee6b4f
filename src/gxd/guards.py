"""Checks at the door: arguments, plans and saved states, each refused with the value and the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gxd.errors import PlanError
from gxd.plan.init import Init
from gxd.plan.layouts import NamedTensors
from gxd.plan.units import UnitPlan, tensor_names
from gxd.reset.optimizers import check_state as check_optimizers
from gxd.reset.optimizers import trained_by
from gxd.reset.units import STEP_POLICIES
from gxd.score.utilities import Utility

STATE_VERSION = 2
POSITIONS = ("signed", "abs")
OBSERVED = "observe() was already called for this forward pass: call it once per forward pass"
NO_PASS = (
    "observe() saw no training forward pass: run the model in training mode (model.train()) and with "
    "gradients enabled, after this "
    "ContinualBackprop was made; and once per forward pass: this one may have been observed already. "
    "A compiled model that ran before must be recompiled (torch.compiler.reset())"
)

NO_COPY = (
    "a ContinualBackprop is hooked to its model and its optimizer, so it cannot be pickled, nor copied by copy.copy(): "
    "save its state_dict() and load that into a new one, or copy.deepcopy((model, optimizer, cbp)) all three at once"
)


def check_arguments(
    rate: float, maturity: int, decay: float, score_every: int, seed: int, positions: str, step_policy: str
) -> None:
    """Raise ValueError for the first hyper-parameter out of range."""
    if not isinstance(rate, Real) or isinstance(rate, bool) or not 0 <= rate <= 1:
        raise ValueError(f"replacement_rate={rate!r} must be a number in [0, 1]; the paper uses 1e-5 to 1e-3")
    if not isinstance(maturity, Integral) or isinstance(maturity, bool) or maturity < 0:
        raise ValueError(f"maturity={maturity!r} must be a whole number of steps, 0 or more")
    if not isinstance(decay, Real) or isinstance(decay, bool) or not 0 <= decay < 1:
        raise ValueError(f"decay={decay!r} must be a number in [0, 1); the paper uses 0.99")
    if not isinstance(score_every, Integral) or isinstance(score_every, bool) or score_every < 1:
        raise ValueError(f"score_every={score_every!r} must be a whole number of steps, 1 or more")
    if not isinstance(seed, Integral) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed!r} must be a whole number from 0 to 2**63 - 1")
    if positions not in POSITIONS:
        raise ValueError(f"positions={positions!r} is not one of {POSITIONS}")
    if step_policy not in STEP_POLICIES:
        raise ValueError(f"step_policy={step_policy!r} is not one of {STEP_POLICIES}")


def check_plan(plan: UnitPlan, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise PlanError unless the plan has units, and the model and the optimizer have all it names."""
    tensors = NamedTensors(model)
    plan.validate(tensors)
    if not plan.groups:
        reasons = "\n".join(f"  {entry.name}: {entry.reason}" for entry in plan.skipped)
        raise PlanError(f"the plan has no unit to reset. Not reset:\n{reasons or '  (no layer was found)'}")
    trained = {id(p): p for p in trained_by(optimizers)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing = [name for name in plan.shapes if name in parameters and id(parameters[name]) not in trained]
    if missing:
        groups = [g.name for g in plan.groups if not set(missing).isdisjoint(tensor_names([g]))]
        copies = {plan.shapes[name] for name in missing} <= {tuple(p.shape) for p in trained.values()}
        raise PlanError(
            f"not in the optimizer: {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}. Add them "
            "to the optimizer, or "
            f"leave the groups that use them out of the plan (exclude={groups})"
            + ("; it trains other tensors of the same shapes: copies (master weights), or another model's" * copies)
        )
    frozen = [name for name in plan.shapes if name in parameters and not parameters[name].requires_grad]
    if frozen:
        raise PlanError(
            f"frozen after the plan was made (requires_grad=False): {', '.join(frozen[:5])}"
            f"{' ...' if len(frozen) > 5 else ''}, and a reset would write it: make a new plan"
        )
    for name in plan.shapes:
        if hasattr(tensors[name], "device_mesh"):
            raise PlanError(f"{name!r} is sharded (DTensor): resets of sharded parameters are not supported")
    check_optimizers(optimizers, parameters)


def check_state(state: Mapping[str, Any], plan: UnitPlan, utility: Utility, own: Mapping[str, Any]) -> None:
    """Raise PlanError unless a saved state is whole, and of this plan and utility."""
    if not isinstance(state, Mapping):
        raise PlanError(
            f"this is no state of a ContinualBackprop but a {type(state).__name__}: give what state_dict() returned"
        )
    missing = [key for key in own if key not in state]
    if missing:
        raise PlanError(f"this is no state of a ContinualBackprop: it lacks {', '.join(missing)}")
    if state["version"] != STATE_VERSION:
        raise PlanError(f"the saved state has version {state['version']}, this gxd reads version {STATE_VERSION}")
    if state["utility"] != utility.name:
        raise PlanError(f"the saved statistics are of utility {state['utility']!r}, this one uses {utility.name!r}")
    if not isinstance(state["groups"], Mapping):
        raise PlanError(f"the saved state is damaged: groups is a {type(state['groups']).__name__}")
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
    _check_like(state, own, "state")
    for part, like in (("mean", "mean"), ("score", "utility")):
        if state["tally"][part] is not None:
            _check_like(state["tally"][part], own["statistics"][like], f"tally.{part}")


def _check_like(saved: Any, own: Any, path: str) -> None:
    """Raise PlanError unless a part of a saved state is built like our own: keys, lengths, kinds and shapes."""
    name = path.rpartition(".")[2]
    if own is None or (saved is None and path in ("state.tally.mean", "state.tally.score")):
        return  # nothing was observed between two steps
    if isinstance(own, (int, float)):
        fits = isinstance(saved, (int, float))
    elif isinstance(own, Tensor):
        fits = isinstance(saved, Tensor) and saved.shape == own.shape
    else:
        fits = isinstance(
            saved, Mapping if isinstance(own, Mapping) else (list, tuple) if isinstance(own, list) else type(own)
        )
    if not fits:
        what = f"has shape {tuple(saved.shape)}" if isinstance(saved, Tensor) else f"is a {type(saved).__name__}"
        raise PlanError(f"the saved state is damaged, or of another plan: {path} {what}")
    if name == "last_resets":
        if not all(isinstance(index, Tensor) for index in saved.values()):
            raise PlanError(f"the saved state is damaged: {path} holds something else than tensors")
    elif name == "young":
        if not all(len(cohort) == 2 for cohort in saved):
            raise PlanError(f"the saved state is damaged: {path}")
    elif isinstance(own, Mapping):
        for key, value in own.items():
            if key not in saved:
                raise PlanError(f"the saved state is damaged: {path}.{key} is missing")
            _check_like(saved[key], value, f"{path}.{key}")
    elif isinstance(own, list):
        if len(saved) != len(own):
            raise PlanError(f"the saved state is damaged: {path} has {len(saved)} entries, expected {len(own)}")
        for index, value in enumerate(own):
            _check_like(saved[index], value, f"{path}[{index}]")


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


def nothing_seen(utility: Utility, seen: bool, waiting: bool) -> str:
    """Why a step cannot be scored."""
    if utility.needs_observe:
        return (
            f"optimizer.step() without observe(): the utility {utility.name!r} needs "
            "cbp.observe(logits, target) between the "
            "forward pass and loss.backward(). The parameters were updated, no unit was scored or reset"
        )
    if waiting:
        return (
            "optimizer.step() without loss.backward(): the utility reads the gradients of the backward pass. "
            "The parameters were updated, no unit was scored or reset"
        )
    if seen:
        return (
            "optimizer.step() after a forward pass of an empty batch: no example, no score. Skip such steps. The "
            "parameters were updated, no unit was scored or reset"
        )
    return (
        "optimizer.step() without a training forward pass since the last step: call model.train(), "
        "and call the model this "
        "ContinualBackprop was made for. The parameters were updated, no unit was scored or reset"
    )
