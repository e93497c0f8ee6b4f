"""A method in two settings, one that acts and one that changes nothing: what a law is a law of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gxd.methods.base import Method
from gxd.methods.registry import method, methods

# What makes something happen within six steps, wherever a method has an option of that name.
LIVELY: dict[str, Any] = {
    "replacement_rate": 0.2,
    "rate": 0.2,
    "maturity": 1,
    "every": 3,
    "threshold": 0.7,
    "strength": 0.5,
    "fraction": 0.3,
    "blend": 0.3,
    "sharpness": 2.0,
    "most": 2,
    "calibrate": 2,
    "zeta": 0.5,
    "at": 4,
    "factor": 0.5,
}


@dataclass(frozen=True)
class Case:
    """A method in two settings.

    Attributes:
        label: how it is named in messages.
        make: the method, with options that make it act within six steps.
        inert: the same, with options under which it changes nothing.
    """

    label: str
    make: Callable[[], Method]
    inert: Callable[[], Method]

    def __str__(self) -> str:
        return self.label


def case_of(name: str, label: str | None = None, /, **options: Any) -> Case:
    """The case of a registered method.

    Args:
        options: that make it act within six steps. Those that are named as in other methods of the library (``every``,
            ``rate``, ``strength``, ...) are set by themselves.
    """
    known = methods()
    if name not in known:
        method(name)  # which says what there is
    info = known[name]
    acting = {**lively(info.options), **options}
    return Case(label or name, lambda: method(name, **acting), lambda: method(name, **{**acting, **info.inert}))


def lively(known: Mapping[str, Any]) -> dict[str, Any]:
    """Values of these options, which are given with their defaults, that make something happen soon."""
    found = {name: value for name, value in LIVELY.items() if known.get(name) is not None}
    counts = {name for name, value in found.items() if isinstance(value, int) and isinstance(known[name], float)}
    return {**found, **dict.fromkeys(counts, 1.0)}  # where it is a share, all of it
