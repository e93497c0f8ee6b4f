"""States as plain data: what a method remembers, on its way to a file, from one, and between devices.

A state is made of tensors, numbers, strings and None, in tuples, named tuples and dicts, and is built alike before and
after a step. Anything else in it follows from the rest, is left out of a checkpoint, and is made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from gxd.errors import PlanError

_NUMBERS = (int, float)


class Some(dict[str, Tensor]):
    """Tensors of any shape by any name: a part of a state that differs from step to step."""


def mapped(state: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A state with a function applied to all its tensors."""
    if isinstance(state, Tensor):
        return function(state)
    if isinstance(state, dict):
        return type(state)((key, mapped(value, function)) for key, value in state.items())
    if isinstance(state, (tuple, list)):
        values = [mapped(value, function) for value in state]
        return type(state)(*values) if hasattr(state, "_fields") else type(state)(values)
    return state


def saved(state: Any) -> Any:
    """A state as dicts, lists, copied tensors and plain values: safe to load with ``weights_only=True``."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if hasattr(state, "_asdict"):
        return {key: saved(value) for key, value in state._asdict().items()}
    if isinstance(state, dict):
        return {key: saved(value) for key, value in state.items()}
    if isinstance(state, (tuple, list)):
        return [saved(value) for value in state]
    return state if isinstance(state, (*_NUMBERS, str)) else None


def loaded(given: Any, like: Any, path: str, optional: bool = False) -> Any:
    """A state from what :func:`saved` has made of one that is built like ``like``. Raises PlanError if it is not."""
    plain = isinstance(like, (Tensor, dict, tuple, list, *_NUMBERS, str))
    if given is None and (optional or not plain):
        return None
    if hasattr(like, "_asdict"):
        _expect(isinstance(given, Mapping), given, path)
        for name in like._fields:
            if name not in given:
                raise PlanError(f"the saved state is damaged: {path}.{name} is missing")
        kinds = type(like).__annotations__
        parts = [
            loaded(given[name], value, f"{path}.{name}", "None" in str(kinds[name]))
            for name, value in like._asdict().items()
        ]
        return type(like)(*parts)
    if isinstance(like, Some):
        _expect(isinstance(given, Mapping) and all(isinstance(v, Tensor) for v in given.values()), given, path)
        return Some({str(key): value.clone() for key, value in given.items()})
    if isinstance(like, dict):
        _expect(isinstance(given, Mapping), given, path)
        differing = [key for key in {**like, **given} if key not in given or key not in like]
        if differing:
            where = "missing" if differing[0] in like else "not known here"
            raise PlanError(f"the saved state is damaged, or of another model: {path}.{differing[0]} is {where}")
        return {key: loaded(given[key], value, f"{path}.{key}") for key, value in like.items()}
    if isinstance(like, (tuple, list)):
        _expect(isinstance(given, (tuple, list)), given, path)
        if len(given) != len(like):
            raise PlanError(f"the saved state is damaged: {path} has {len(given)} entries, expected {len(like)}")
        return type(like)(
            [loaded(one, value, f"{path}[{n}]") for n, (one, value) in enumerate(zip(given, like, strict=True))]
        )
    if isinstance(like, Tensor):
        _expect(isinstance(given, Tensor) and given.shape == like.shape, given, path)
        return given.to(like, copy=True)
    if like is None:
        _expect(isinstance(given, Tensor), given, path)
        return given.clone()
    if isinstance(like, _NUMBERS):
        _expect(isinstance(given, _NUMBERS), given, path)
        return type(like)(given)
    _expect(isinstance(given, type(like)), given, path)
    return given


def _expect(fits: bool, given: Any, path: str) -> None:
    if not fits:
        what = f"has shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"is a {type(given).__name__}"
        raise PlanError(f"the saved state is damaged, or of another plan: {path} {what}")
