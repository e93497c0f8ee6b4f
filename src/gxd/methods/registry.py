"""The registry of methods: names, what is known of each, and how to make one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from gxd import arguments
from gxd.arguments import near
from gxd.methods.base import Method


@dataclass(frozen=True)
class MethodInfo:
    """What is known of a registered method.

    Attributes:
        name: for :func:`gxd.method`.
        description: what it does, in a line.
        reference: where it comes from.
        inert: the options under which it changes nothing.
        changes: what it changes, in a few words; empty: what follows from its functions.
        needs: what it needs beyond what follows from its functions, in a few words.
        make: its function; its arguments are the options.
    """

    name: str
    description: str
    reference: str
    inert: Mapping[str, Any]
    make: Callable[..., Method]
    changes: str = ""
    needs: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """All options with their defaults."""
        return {name: p.default for name, p in inspect.signature(self.make).parameters.items()}


_REGISTRY: dict[str, MethodInfo] = {}


def register_method(
    name: str,
    *,
    description: str,
    reference: str = "",
    inert: Mapping[str, Any],
    changes: str = "",
    needs: str = "",
) -> Callable[[Callable[..., Method]], Callable[..., Method]]:
    """Add a method under a name, usable as ``gxd.method(name, **options)``.

    Args:
        name: the name; registering it again replaces the function.
        description, reference, inert, changes, needs: see :class:`MethodInfo`.

    Example::

        @gxd.register_method("clip", description="keep weights small", inert={"most": math.inf})
        def clip(most: float = 1.0) -> gxd.Method:
            return Clip(most)
    """
    if not isinstance(name, str):
        raise TypeError(f"register_method needs a name, a string, got a {type(name).__name__}")

    def add(make: Callable[..., Method]) -> Callable[..., Method]:
        unknown = [option for option in inert if option not in inspect.signature(make).parameters]
        if unknown:
            raise ValueError(f"method {name!r}: inert names {unknown[0]!r}, which is not one of its options")
        _REGISTRY[name] = MethodInfo(name, description, reference, MappingProxyType(dict(inert)), make, changes, needs)
        return make

    return add


def methods() -> Mapping[str, MethodInfo]:
    """All registered methods, by name."""
    return MappingProxyType(dict(_REGISTRY))


def method(name: str, **options: Any) -> Method:
    """Make a method, for :func:`gxd.attach`. An error names the nearest match of a wrong name or option.

    Example::

        gxd.attach(model, optimizer, gxd.method("l2_init", strength=1e-2))
    """
    if not isinstance(name, str) or name not in _REGISTRY:
        raise ValueError(
            f"unknown method {name!r}. The registered ones are {', '.join(_REGISTRY)}{near(name, _REGISTRY)}"
        )
    known = _REGISTRY[name].options
    for option in options:
        if option not in known:
            hint = near(option, known)
            raise TypeError(f"{name} has no option {option!r}{hint or '.'} It has {', '.join(known)}")
    made = _REGISTRY[name].make(**options)
    arguments.method(made, Method)
    made.name = name
    return made
