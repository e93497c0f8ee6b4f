"""Whether a plan, a model, its optimizers and methods go together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gxd.errors import PlanError
from gxd.methods.base import Method
from gxd.plan.layouts import NamedTensors
from gxd.plan.units import UnitPlan, tensor_names
from gxd.reset.optimizers import check_state, trained_by
from gxd.sharded import is_sharded, reshard, sharded_modules


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
    check_state(optimizers, parameters)


def check_shards(model: nn.Module, methods: Sequence[Method]) -> None:
    """Raise PlanError if parameters are shared out among processes in a way, or for a method, that is not supported."""
    modules = sharded_modules(model)
    reshard(modules)
    shards: dict[str, Any] = {name: tensor for name, tensor in model.named_parameters() if is_sharded(tensor)}
    for name, tensor in shards.items():
        axes = sum(placement.is_shard() for placement in tensor.placements)
        if not modules or axes > 1:
            raise PlanError(
                f"{name!r} is sharded (DTensor), and not by torch.distributed.fsdp.fully_shard alone: parameters that "
                "are sharded for tensor parallelism are not supported"
            )
    unready = [method.name for method in methods if not method.sharded]
    if shards and unready:
        raise PlanError(
            f"the parameters are sharded (fully_shard), which {', '.join(unready)} is not made for: leave it out, or "
            "train with DistributedDataParallel. A method of yours that can work with DTensors says so: sharded = True"
        )
