"""What ``--method`` names, and the options of a method: checked against those that the method itself has.

A method is ``backprop``, one of :func:`gxd.methods`, or one of :func:`gxd.utilities`, which is short for
``continual_backprop`` with that utility.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_origin, get_type_hints

import gxd
from gxd.lab.conduct import torch_as_it_was
from gxd.lab.config import alternatives, check_name, fits, near, words
from gxd.lab.errors import UserError, first_line

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FIELDS = {
    "utility": "method",
    "replacement_rate": "rate",
    **{name: name for name in ("maturity", "decay", "compensate", "score_every", "positions")},
}
"""Options of continual_backprop that are fields of an experiment -> the field."""
CHANGED = {"parseval": ("decoupled",), "spectral": ("decoupled",)}
"""Method -> options whose default was another one once. They are always written, so a key names the run it named."""


def names() -> list[str]:
    """All that ``--method`` takes."""
    return list(dict.fromkeys(["backprop", *gxd.utilities(), *gxd.methods()]))


def utility_of(method: str) -> str | None:
    """By which utility continual_backprop resets units, if that is what the method stands for."""
    if method == "continual_backprop":
        return str(gxd.methods()[method].options["utility"])
    return method if method in gxd.utilities() else None


def registered(method: str) -> str:
    """The name of a method for :func:`gxd.method`."""
    return "continual_backprop" if utility_of(method) is not None else method


def module_name(file: Path) -> str:
    """What the module of a user's file is called: two files may have the same name."""
    where = hashlib.sha256(str(file.absolute()).encode()).hexdigest()[:10]
    return f"gxd_user_{file.stem}_{where}"


def load(file: Path) -> ModuleType:
    """Import a file of the user's, which registers methods with :func:`gxd.register_method`; once in a process."""
    name = module_name(file)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise UserError(f"{file} is not a Python file: give one that registers a method with gxd.register_method")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with torch_as_it_was():
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's own code raises
        del sys.modules[name]
        raise UserError(f"{file} cannot be imported: {type(error).__name__}: {first_line(error)}") from error
    return module


def canonical(method: str, given: Any) -> tuple[str, ...]:
    """The options of a method as sorted texts ``NAME=VALUE``, without those that have their default, except where that
    default was :data:`changed <CHANGED>`.

    Args:
        given: texts ``NAME=VALUE``, or a table of names and values.

    Raises :class:`UserError` for an option that the method does not have, or that does not fit.
    """
    check_name(method, names(), "method")
    values = _table(given)
    if method == "backprop" and values:
        raise UserError(f"option {next(iter(values))!r}: backprop has no options; choose another method")
    changed = CHANGED.get(method, ())
    if not values and not changed:
        return ()
    info = gxd.methods()[registered(method)]
    values = {**{name: info.options[name] for name in changed}, **values}
    known = _own(info.name)
    for name in values:
        if name in info.options and name not in known:
            option = FIELDS[name].replace("_", "-")
            raise UserError(f"option {name!r} of {method} is a setting of its own: use --{option}")
        if name not in known:
            has = f"It has {', '.join(known)}" if known else "It has none"
            raise UserError(f"{method} has no option {name!r}.{near(name, known)} {has}")
    hints = get_type_hints(info.make)
    values = {name: _typed(method, name, value, hints.get(name)) for name, value in values.items()}
    try:
        gxd.method(info.name, **values)
    except (TypeError, ValueError) as error:  # out of its range; only the method knows
        raise UserError(f"an option of {method}: {' '.join(str(error).split())}") from error
    written = [name for name in sorted(values) if name in changed or values[name] != info.options[name]]
    return tuple(f"{name}={_text(values[name])}" for name in written)


def values_of(options: tuple[str, ...]) -> dict[str, Any]:
    """What :func:`canonical` returned, as names and values."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in _table(options).items()}


def overview() -> list[str]:
    """A line for every method, with its options and their defaults."""
    lines = ["  backprop: nothing but the optimizer"]
    for name, info in gxd.methods().items():
        options = [f"{key}={_text(info.options[key])}" for key in _own(name)]
        lines.append(f"  {name}: {info.description}" + (f" ({' '.join(options)})" if options else ""))
    return [*lines, f"  {', '.join(gxd.utilities())}: continual_backprop with that utility"]


def _own(name: str) -> list[str]:
    """The options of a registered method that are not fields."""
    return [option for option in gxd.methods()[name].options if name != "continual_backprop" or option not in FIELDS]


def _table(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return {str(name): value for name, value in given.items()}
    if not isinstance(given, (list, tuple)) or not all(isinstance(text, str) for text in given):
        raise UserError(f"options={given!r} must be NAME=VALUE, as in --options threshold=0.05, or a table")
    values: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UserError(f"option {text!r} must be NAME=VALUE, as in --options threshold=0.05")
        if name in values:
            raise UserError(f"option {name!r} is given twice: leave one out")
        values[name] = _value(value)
    return values


def _value(text: str) -> Any:
    """A value as TOML has it; none; and what is neither is a text."""
    if text.lower() in ("none", "true", "false"):
        return {"none": None, "true": True, "false": False}[text.lower()]
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _text(value: Any) -> str:
    """The shortest text that :func:`_value` reads as this value."""
    if value is None:
        return "none"
    if isinstance(value, str) and _value(value) == value:
        return value
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return str(value)
    return json.dumps(value)


def _typed(method: str, name: str, value: Any, hint: Any) -> Any:
    """The value in the type that the option has. Types that are not plain are left to the method."""
    kinds = alternatives(hint)
    if type(value) is int and float in kinds and int not in kinds:
        value = float(value)
    value = tuple(value) if isinstance(value, list) else value
    plain = all(kind in (bool, int, float, str, type(None)) or get_origin(kind) in (Literal, tuple) for kind in kinds)
    if hint is not None and plain and not fits(value, hint):
        raise UserError(f"option {name}={value!r} of {method} must be {words(hint)}")
    return value
