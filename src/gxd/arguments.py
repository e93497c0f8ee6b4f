"""What an argument must be. Each check names the argument, what it may be and what it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gxd.plan.units import UnitPlan
from gxd.reset.optimizers import all_inside, is_optimizer


def module(value: Any) -> None:
    """Raise TypeError unless it is a module."""
    if not isinstance(value, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {_kind(value)}")


def optimizer(value: Any) -> None:
    """Raise TypeError unless it steps as optimizers do, and it, or something inside it, has parameters and state."""
    steps = hasattr(value, "step") and hasattr(value, "zero_grad")  # a learning rate scheduler has no zero_grad
    if isinstance(value, type) or not steps or not any(map(is_optimizer, all_inside([value]))):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {_kind(value)}")


def plan(value: Any) -> None:
    """Raise TypeError unless it is a plan."""
    if not isinstance(value, UnitPlan):
        raise TypeError(f"plan must be a UnitPlan, as gxd.find_units returns it, got {_kind(value)}")


def switch(name: str, value: Any) -> None:
    """Raise TypeError unless it is True or False: ``compensate="no"`` would be taken for yes."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False")


def generator(value: Any) -> None:
    """Raise TypeError unless it is None or a generator on the CPU."""
    if value is not None and not (isinstance(value, torch.Generator) and value.device.type == "cpu"):
        kind = f"one on {value.device}" if isinstance(value, torch.Generator) else _kind(value)
        raise TypeError(
            f"generator must be a CPU torch.Generator, got {kind}; for a seed give torch.Generator().manual_seed(seed)"
        )


def _kind(value: Any) -> str:
    return f"the class {value.__name__} (type); make an instance" if isinstance(value, type) else type(value).__name__
