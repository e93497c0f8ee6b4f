"""What an argument must be. Each check names the argument, what it may be and what it is."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Iterable
from numbers import Integral, Real
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


def method(value: Any, kind: type) -> None:
    """Raise TypeError unless it is of the kind of all methods."""
    if not isinstance(value, kind):
        hint = f"; write gxd.method({value!r})" if isinstance(value, str) else ""
        raise TypeError(f"a method must be a gxd.Method, as gxd.method(name) makes it, got {_kind(value)}{hint}")


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


def rate(value: Any) -> float:
    """A replacement rate, checked."""
    if not _is_number(value) or not 0 <= float(value) <= 1:
        raise ValueError(f"replacement_rate={value!r} must be a number in [0, 1]; the paper uses 1e-5 to 1e-3")
    return float(value)


def maturity(value: Any) -> int:
    """A number of steps, checked."""
    return every("maturity", value, least=0)


def decay(value: Any) -> float:
    """The decay of a running average, checked."""
    if not _is_number(value) or not 0 <= float(value) < 1:
        raise ValueError(f"decay={value!r} must be a number in [0, 1); the paper uses 0.99")
    return float(value)


def seed(value: Any) -> int:
    """A seed, checked."""
    if not _is_whole(value) or not 0 <= int(value) < 2**63:
        raise ValueError(f"seed={value!r} must be a whole number from 0 to 2**63 - 1")
    return int(value)


def every(name: str, value: Any, least: int = 1) -> int:
    """A number of steps, checked."""
    if not _is_whole(value) or int(value) < least:
        raise ValueError(f"{name}={value!r} must be a whole number of steps, {least} or more")
    return int(value)


def number(name: str, value: Any, least: float, most: float = sys.float_info.max) -> float:
    """A number in a range, checked; a finite one, unless infinity is named as the limit."""
    if not _is_number(value) or not least <= float(value) <= most:
        limits = f"{least:g} or more" if most >= sys.float_info.max else f"from {least:g} to {most:g}"
        raise ValueError(f"{name}={value!r} must be a number, {limits}")
    return float(value)


def choice(name: str, value: Any, choices: Collection[str]) -> str:
    """One of some words, checked."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}{near(value, choices)}")
    return str(value)


def near(value: Any, names: Iterable[str]) -> str:
    """A hint at the names nearest to a wrong one, or nothing."""
    found = difflib.get_close_matches(value.lower(), list(names), n=2, cutoff=0.6) if isinstance(value, str) else []
    return f". Did you mean {' or '.join(map(repr, found))}?" if found else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    return f"the class {value.__name__} (type); make an instance" if isinstance(value, type) else type(value).__name__
