"""States as plain data: what a method remembers, on its way to a file, from one, and between devices.

A state is made of tensors, numbers, strings and None, in tuples, named tuples and dicts, and is built alike before and
after a step. Anything else in it follows from the rest, is left out of a checkpoint, and is made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from gxd.errors import PlanError
from gxd.sharded import is_sharded, shared_out, whole

STATE_VERSION = 5
_NUMBERS = (int, float)
_UNFIT = "the saved state is damaged, or of another model, another plan, or a method with other options"
_OBSERVED = ("mean", "score", "mean_count", "score_count", "gram")


class Some(dict[str, Tensor]):
    """Tensors of any shape by any name: a part of a state that differs from step to step."""


def mapped(state: Any, function: Callable[[Tensor], Tensor], plain: Callable[[Any], Any] = lambda value: value) -> Any:
    """A state with a function applied to all its tensors, and another one to all else that it holds."""
    if isinstance(state, Tensor):
        return function(state)
    if isinstance(state, dict):
        return type(state)((key, mapped(value, function, plain)) for key, value in state.items())
    if isinstance(state, (tuple, list)):
        values = [mapped(value, function, plain) for value in state]
        return type(state)(*values) if hasattr(state, "_fields") else type(state)(values)
    return plain(state)


def saved(state: Any) -> Any:
    """A state as dicts, lists, copied tensors and plain values: safe to load with ``weights_only=True``. What processes
    share out is made whole, so that all of them save the same.
    """
    if isinstance(state, Tensor):
        return whole(state) if is_sharded(state) else state.detach().clone()
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
        return Some(
            {
                str(key): loaded(value, like[key], f"{path}.{key}") if is_sharded(like.get(key)) else value.clone()
                for key, value in given.items()
            }
        )
    if isinstance(like, dict):
        _expect(isinstance(given, Mapping), given, path)
        differing = [key for key in {**like, **given} if key not in given or key not in like]
        if differing:
            where = "missing" if differing[0] in like else "not known here"
            raise PlanError(f"{_UNFIT}: {path}.{differing[0]} is {where}")
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
        if given.is_floating_point() != like.is_floating_point():  # those of another precision are converted
            raise PlanError(f"the saved state is damaged: {path} is of {given.dtype}, expected {like.dtype}")
        return shared_out(given, like) if is_sharded(like) else given.to(like, copy=True)
    if like is None:
        _expect(isinstance(given, Tensor), given, path)
        return given.clone()
    if isinstance(like, _NUMBERS):
        _expect(isinstance(given, _NUMBERS), given, path)
        if isinstance(like, int) and not float(given).is_integer():
            raise PlanError(f"the saved state is damaged: {path} is {given}")
        return type(like)(given)
    _expect(isinstance(given, type(like)), given, path)
    return given


def _expect(fits: bool, given: Any, path: str) -> None:
    if not fits:
        what = f"has shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"is a {type(given).__name__}"
        raise PlanError(f"{_UNFIT}: {path} {what}")


def check_state(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise PlanError unless a saved state is whole, and of this plan and these methods."""
    if not isinstance(state, Mapping):
        kind = type(state).__name__
        raise PlanError(
            f"this is no state of a ContinualBackprop (nor of gxd.attach) but a {kind}: give what state_dict() returned"
        )
    if state.get("version", STATE_VERSION) != STATE_VERSION:
        raise PlanError(f"the saved state has version {state['version']}, this gxd reads version {STATE_VERSION}")
    missing = [key for key in own if key not in state]
    if missing:
        raise PlanError(f"this is no state of a ContinualBackprop (nor of gxd.attach): it lacks {', '.join(missing)}")
    for key in ("methods", "groups"):
        if not isinstance(state[key], Mapping):
            raise PlanError(f"the saved state is damaged: {key} is a {type(state[key]).__name__}")
    if list(state["methods"]) != list(own["methods"]):
        there, here = ", ".join(map(str, state["methods"])) or "none", ", ".join(own["methods"]) or "none"
        raise PlanError(f"the saved state is of other methods: {there} there, {here} here")
    for key, part in own["methods"].items():
        given = state["methods"][key]
        absent = [name for name in part if not isinstance(given, Mapping) or name not in given]
        if absent:
            raise PlanError(f"the saved state is damaged: methods.{key} lacks {', '.join(absent)}")
        if given["utility"] != part["utility"]:
            raise PlanError(
                f"the saved statistics are of utility {given['utility']!r}, this one uses {part['utility']!r}"
            )
    if state["groups"] != own["groups"]:
        theirs, ours = dict(state["groups"]), dict(own["groups"])
        differing = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
        raise PlanError(
            f"the saved state is of another model or plan: group {differing[0]!r} has "
            f"{theirs.get(differing[0], 'no')} units there and {ours.get(differing[0], 'none')} here"
        )
    if state["fingerprint"] != own["fingerprint"]:
        raise PlanError("the saved state is of another plan: same group names, but other rows or columns")
    loaded(state["inits"], own["inits"], "inits")


def check_observed(
    given: Any, mean: Tensor, score: Tensor, gram: tuple[Tensor, ...], views: int, groups: int, path: str
) -> None:
    """Raise PlanError unless this is what the passes of half a step have shown, or nothing."""
    if not isinstance(given, Mapping) or any(n not in given for n in _OBSERVED):
        raise PlanError(f"the saved state is damaged: {path} is not whole")
    loaded(given["mean"], mean, f"{path}.mean", optional=True)
    loaded(given["score"], score, f"{path}.score", optional=given["mean"] is None)
    for name, like in (("mean_count", views), ("score_count", groups)):
        if not isinstance(given[name], (list, tuple)) or len(given[name]) != (0 if given["mean"] is None else like):
            raise PlanError(f"the saved state is damaged: {path}.{name} has not {like} entries")
        loaded(given[name], (0,) * len(given[name]), f"{path}.{name}")
    loaded(given["gram"], () if given["mean"] is None else gram, f"{path}.gram")
