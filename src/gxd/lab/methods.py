"""What ``--method`` names, and the options of a method: checked against those that the method itself has.

A method is ``backprop``, one of :func:`gxd.methods`, a utility, or several of these joined by ``+``. A utility is short
for ``continual_backprop`` with that utility. The utility ``gxd`` is the exception, because ``gxd`` is a method: the
paper's rule, ``continual_backprop`` with the utility ``gxd``, is called ``gxd_paper``.

Runs on disk know the paper's rule as ``gxd``, as they did before there was the method. :func:`on_disk` and
:func:`from_disk` are the one place where names in the program and names on disk meet.
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

PAPER = "gxd_paper"
"""The paper's rule: continual_backprop with the utility gxd."""
FIELDS = {
    "replacement_rate": "rate",
    **{name: name for name in ("maturity", "decay", "compensate", "score_every", "positions")},
}
"""Options of gxd and of continual_backprop that are fields of an experiment -> the field."""
OF_FIELDS = ("gxd", "continual_backprop")

ON_DISK = {PAPER: "gxd", "gxd": "gxd_loss_per_step"}
"""Name in the program -> name on disk, where they differ. No run of before the method gxd has the second name."""
RANKED = {"continual_backprop": "ranking", "unit_reset": "normalise"}
PER_STEP = "per_step"  # on disk: age, which is u / age today
EXPECTED = "expected_age"  # in the program: what age meant in runs of before, u / E[u | age] ** exponent
CHANGED = {"parseval": ("decoupled",), "spectral": ("decoupled",)}
"""Method -> options whose default was another one once. They are always written, so a key names the run it named."""


def names() -> list[str]:
    """All single methods that ``--method`` takes."""
    utilities = [name for name in gxd.utilities() if name not in gxd.methods()]
    return list(dict.fromkeys(["backprop", PAPER, *utilities, *gxd.methods()]))


def parts(method: str) -> tuple[str, ...]:
    """The methods that are joined in a name; none for backprop."""
    if method == "backprop":
        return ()
    return (method,) if method in names() else tuple(method.split("+"))


def check(method: str) -> None:
    """Raise :class:`UserError` unless this is a method, or several different ones joined by ``+``."""
    given = parts(method) if isinstance(method, str) else (method,)
    for part in given:
        check_name(part, names(), "method")
    if len(given) > 1 and "backprop" in given:
        raise UserError(f"method {method!r} joins backprop with others: leave it out, because the others include it")
    if len(set(given)) < len(given):
        raise UserError(f"method {method!r} has a method twice: leave one out")


def utility_of(method: str) -> str | None:
    """By which utility continual_backprop resets units, if that is what a single method stands for."""
    if method in (PAPER, "continual_backprop"):
        return "gxd"
    return method if method in gxd.utilities() and method not in gxd.methods() else None


def registered(method: str) -> str:
    """The name of a single method for :func:`gxd.method`."""
    return "continual_backprop" if utility_of(method) is not None else method


def has_fields(method: str) -> bool:
    """Whether ``--rate``, ``--maturity`` and the other fields of resets are settings of this method.

    Of several methods at once, each has its options, and the fields are not used.
    """
    return registered(method) in OF_FIELDS


def canonical_name(method: str) -> str:
    """One name for one rule: continual_backprop by itself is gxd_paper."""
    return PAPER if method == "continual_backprop" else method


def make(method: str, options: Mapping[str, Any]) -> tuple[gxd.Method, ...]:
    """The methods, for :func:`gxd.attach`; ``options`` have the names of :func:`canonical`."""
    given = parts(method)
    if len(given) == 1:
        return (_made(method, options),)
    own = {part: {n.partition(".")[2]: v for n, v in options.items() if n.startswith(f"{part}.")} for part in given}
    return tuple(_made(part, own[part]) for part in given)


def _made(part: str, options: Mapping[str, Any]) -> gxd.Method:
    utility = utility_of(part)
    return gxd.method(registered(part), **options, **({} if utility is None else {"utility": utility}))


# --- names on disk ----------------------------------------------------------------------------------------------------


def on_disk(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the names that it has on disk, and in its key."""
    method, options = str(config.get("method")), config.get("options")
    if isinstance(options, Mapping):
        options = _replaced(method, options, {"age": PER_STEP})
    return _with(config, ON_DISK.get(method, method), options)


def from_disk(config: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`on_disk`. ``age`` in a run of before is ``expected_age``, which no method takes."""
    method, options = shown(str(config.get("method"))), config.get("options")
    if isinstance(options, Mapping):
        options = _replaced(method, options, {PER_STEP: "age", "age": EXPECTED})
    return _with(config, method, options)


def shown(method: str) -> str:
    """The name in the program of a method on disk."""
    return {on_disk: name for name, on_disk in ON_DISK.items()}.get(method, method)


def _replaced(method: str, options: Mapping[str, Any], words: Mapping[str, str]) -> dict[str, Any]:
    ranked = RANKED.get(registered(method))
    return {n: words.get(v, v) if n == ranked and isinstance(v, str) else v for n, v in options.items()}


def _with(config: Mapping[str, Any], method: str, options: Any) -> dict[str, Any]:
    changes = {"method": method, "options": options}
    return {name: changes.get(name, value) for name, value in config.items()}


# --- files of the user's ----------------------------------------------------------------------------------------------


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


# --- options ----------------------------------------------------------------------------------------------------------


def canonical(method: str, given: Any) -> tuple[str, ...]:
    """The options of a method as sorted texts ``NAME=VALUE``, without those that have their default, except where that
    default was :data:`changed <CHANGED>`.

    Args:
        given: texts ``NAME=VALUE``, or a table of names and values. For several methods at once the name of an option
            is ``METHOD.NAME``, or ``NAME`` alone if only one of them has it.

    Raises :class:`UserError` for an option that the method does not have, or that does not fit.
    """
    check(method)
    values = _table(given)
    if method == "backprop" and values:
        raise UserError(f"option {next(iter(values))!r}: backprop has no options; choose another method")
    given_parts = parts(method)
    if not values and not any(part in CHANGED for part in given_parts):
        return ()
    if len(given_parts) == 1:
        kept = _checked(method, values, fields=has_fields(method))
    else:
        owned = _owned(method, values)
        kept = {f"{part}.{n}": v for part in given_parts for n, v in _checked(part, owned[part], fields=False).items()}
    return tuple(f"{name}={_text(kept[name])}" for name in sorted(kept))


def _owned(method: str, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Part -> its options, of several methods at once."""
    owned: dict[str, dict[str, Any]] = {part: {} for part in parts(method)}
    for name, value in values.items():
        part, dot, option = name.partition(".")
        if not dot or part not in owned:
            having = [one for one in owned if name in _own(one, fields=False)]
            if len(having) > 1:
                written = " or ".join(f"{one}.{name}" for one in having)
                raise UserError(f"option {name!r} is one of {' and of '.join(having)}: write {written}")
            if not having:
                known = [f"{one}.{option}" for one in owned for option in _own(one, fields=False)]
                raise UserError(f"{method} has no option {name!r}.{near(name, known)} It has {', '.join(known)}")
            part, option = having[0], name
        if option in owned[part]:
            raise UserError(f"option {part}.{option} is given twice: leave one out")
        owned[part][option] = value
    return owned


def _checked(method: str, values: Mapping[str, Any], fields: bool) -> dict[str, Any]:
    """The options of a single method, without those that have their default.

    Args:
        fields: whether what is a field of an experiment is refused.
    """
    info = gxd.methods()[registered(method)]
    known = _own(method, fields)
    if values.get(RANKED.get(info.name, "")) == EXPECTED:
        raise UserError(
            f"{method} is ranked by {EXPECTED}, u / E[u | age], which gxd no longer has: such a run can be reported, "
            "but not continued. For a new run choose age, which is u / age"
        )
    changed = CHANGED.get(method, ())
    values = {**{name: info.options[name] for name in changed}, **values}
    for name in values:
        if name in info.options and name not in known:
            if name == "utility":
                raise UserError(f"option 'utility' of {method} is a setting of its own: use --method UTILITY")
            option = FIELDS[name].replace("_", "-")
            raise UserError(f"option {name!r} of {method} is a setting of its own: use --{option}")
        if name not in known:
            has = f"It has {', '.join(known)}" if known else "It has none"
            raise UserError(f"{method} has no option {name!r}.{near(name, known)} {has}")
    hints = get_type_hints(info.make)
    values = {name: _typed(method, name, value, hints.get(name)) for name, value in values.items()}
    try:
        _made(method, values)
    except (TypeError, ValueError) as error:  # out of its range; only the method knows
        raise UserError(f"an option of {method}: {' '.join(str(error).split())}") from error
    return {name: value for name, value in values.items() if name in changed or value != info.options[name]}


def values_of(options: tuple[str, ...]) -> dict[str, Any]:
    """What :func:`canonical` returned, as names and values."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in _table(options).items()}


def defaults(method: str) -> dict[str, Any]:
    """All options of a method with their defaults, by the names of :func:`canonical`; none of what is not known."""
    known = [part for part in parts(method) if registered(part) in gxd.methods()]
    several = len(parts(method)) > 1
    return {
        f"{part}.{name}" if several else name: value
        for part in known
        for name, value in gxd.methods()[registered(part)].options.items()
    }


def overview() -> list[str]:
    """A line for every method, with its options and their defaults."""
    lines = ["  backprop: nothing but the optimizer"]
    for name, info in gxd.methods().items():
        options = [f"{key}={_text(info.options[key])}" for key in _own(name, fields=True)]
        lines.append(f"  {name}: {info.description}" + (f" ({' '.join(options)})" if options else ""))
    lines.append(f"  {PAPER}: continual_backprop with the utility gxd, the rule of the paper")
    utilities = [name for name in gxd.utilities() if utility_of(name) is not None]
    return [
        *lines,
        f"  {', '.join(utilities)}: continual_backprop with that utility",
        "  several at once: as in parseval+gxd, with --options parseval.strength=1e-3 gxd.replacement_rate=1e-4",
    ]


def _own(method: str, fields: bool) -> list[str]:
    """The options of a single method: without its utility if it stands for one, and without what is a field of an
    experiment, if these are fields.
    """
    name = registered(method)
    left_out = {"utility"} if name == "continual_backprop" else set()
    left_out |= {*FIELDS} if fields and name in OF_FIELDS else set()
    return [option for option in gxd.methods()[name].options if option not in left_out]


def _table(given: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if isinstance(given, Mapping):
        for name, value in given.items():
            # TOML makes a table of gxd.maturity = 5.
            inner = value.items() if isinstance(value, Mapping) else ()
            values |= {f"{name}.{key}": each for key, each in inner} or {str(name): value}
        return values
    if not isinstance(given, (list, tuple)) or not all(isinstance(text, str) for text in given):
        raise UserError(f"options={given!r} must be NAME=VALUE, as in --options threshold=0.05, or a table")
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
