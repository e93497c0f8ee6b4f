"""What a setting may be: its range, its type, and the nearest of the names there are."""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from gxd.lab.errors import UserError

MACHINE = ("device", "threads", "data_dir")
"""Fields that say where a run happens. Up to rounding they do not change its numbers."""

# What torch can hold: parameters are float32, and sizes and thread counts that it keeps in 32 bits must fit.
_LARGEST = torch.finfo(torch.float32).max
_COUNT: tuple[Callable[[Any], bool], str] = (lambda v: 1 <= v < 2**31, "a whole number, 1 or more and below 2**31")
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("width", "depth", "tasks", "epochs", "batch_size", "score_every", "threads"), _COUNT),
    # Of the assay.
    **dict.fromkeys(("train_size", "calibration", "probe", "units_per_group", "all_logit_examples"), _COUNT),
    "lr": (lambda v: 0 < v <= _LARGEST, "a number above 0 and below 3.4e38; the papers use 0.001 to 0.3"),
    "momentum": (lambda v: 0 <= v < 1, "a number in [0, 1)"),
    "weight_decay": (lambda v: 0 <= v <= _LARGEST, "a number, 0 or more and below 3.4e38"),
    "rate": (lambda v: 0 <= v <= 1, "a number in [0, 1]; the paper uses 1e-5 to 1e-3"),
    "maturity": (lambda v: 0 <= v < 2**31, "a whole number of steps, 0 or more and below 2**31"),
    "decay": (lambda v: 0 <= v < 1, "a number in [0, 1); the paper uses 0.99"),
    "seed": (lambda v: 0 <= v < 2**31, "a whole number from 0 to 2**31 - 1"),
}


def check_fields(config: Any) -> None:
    """Raise :class:`UserError` unless every field of a frozen dataclass has a value of its type and range. A whole
    number where a number is meant becomes one, a path where a text is meant becomes one: 1 and 1.0 are one setting.
    """
    hints = _hints(config.__class__)
    for name in (each.name for each in fields(config)):
        value, hint = getattr(config, name), hints[name]
        if isinstance(value, int) and not isinstance(value, bool) and float in alternatives(hint):
            value = float(value)
            object.__setattr__(config, name, value)
        if isinstance(value, Path) and str in alternatives(hint):
            value = str(value)
            object.__setattr__(config, name, value)
        if not fits(value, hint):
            raise UserError(f"{name}={value!r} must be {_RANGES[name][1] if name in _RANGES else words(hint)}")
        check_range(name, value)


@cache
def _hints(kind: type) -> dict[str, Any]:
    """The types of the fields; to find them takes a millisecond, and a board has thousands of configs."""
    return get_type_hints(kind)


def check_range(name: str, value: Any) -> None:
    """Raise :class:`UserError` if the value of a field is out of its range. None, the paper's choice, never is."""
    if value is not None and name in _RANGES and not _RANGES[name][0](value):
        raise UserError(f"{name}={value!r} must be {_RANGES[name][1]}")


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The types of a union; of another type that one."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type: a union, a Literal, a tuple of texts, or a class."""
    for one in alternatives(hint):
        if get_origin(one) is Literal:
            if any(value == allowed and type(value) is type(allowed) for allowed in get_args(one)):
                return True
        elif type(value) is (get_origin(one) or one):  # not isinstance: True is no number of tasks
            return True
    return False


def words(hint: Any) -> str:
    """What a type allows, for people."""
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "none"}
    parts = []
    for one in alternatives(hint):
        parts += [str(v) for v in get_args(one)] if get_origin(one) is Literal else [names.get(one, str(one))]
    return " or ".join(parts)


def near(word: Any, known: Iterable[str]) -> str:
    """A hint at the nearest of the known names, or nothing."""
    known, letters = list(known), sorted(str(word))
    found = [one for one in known if sorted(one) == letters]  # gdx is gxd, not gxi
    found = found or difflib.get_close_matches(str(word).replace("-", "_"), known, n=1)
    found = found or difflib.get_close_matches(str(word), known, n=1)
    return f" Did you mean {found[0]!r}?" if found else ""


def check_name(word: Any, known: Iterable[str], what: str) -> None:
    """Raise :class:`UserError`, with the nearest and with all of them, unless a name is one of the known."""
    known = list(known)
    if word not in known:
        listed = ", ".join(repr(one) if "," in one else one for one in known)
        raise UserError(f"unknown {what} {word!r}.{near(word, known)} There are {listed}")
