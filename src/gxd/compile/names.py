"""What code reaches by name: the values that a traced step has taken in, and where they are found.

The name tables of functions tell which names these are. That is more than what is read, which costs a comparison, and
needs no guess at what the code does. Not followed is what has no name: entries of lists, computed keys and attributes
(``getattr(self, name)``), instances that are made in the step, and what iterators and NumPy arrays hold.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

PLAIN = (bool, int, float, str, type(None))
# What is called without being named, where a class is: to make one of them, or when autograd comes to it.
OF_CLASSES = frozenset({"__init__", "__call__", "forward", "backward", "setup_context"})
_LIBRARIES = sys.stdlib_module_names | {"numpy", "torch", "transformers"}  # whose variables nobody changes


class Place(NamedTuple):
    """Where a value is held: as an attribute, as an entry of a mapping, or in a closure."""

    name: str
    holder: Any
    key: Any
    entry: bool = False

    def reader(self) -> Callable[[], Any]:
        if self.entry:
            return partial(self.holder.get, self.key)
        if isinstance(self.holder, CellType):
            return partial(_content, self.holder)
        return partial(getattr, self.holder, self.key, None)

    def write(self, value: Any) -> None:
        if self.entry:
            self.holder[self.key] = value
        else:
            setattr(self.holder, self.key, value)


class Names:
    """Starts from functions and modules, and goes where the names in their code lead.

    Attributes:
        modules: all modules on the way, by name. All their attributes count, not only those that are named.
        places: of all other values.
    """

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.places: dict[Any, Place] = {}
        self._known: set[Any] = set()

    def follow(self, name: str, value: Any, names: frozenset[str] = frozenset()) -> None:
        """Find what these names may stand for in a value: its attributes, or keys of a dict."""
        if isinstance(value, nn.Module):
            for path, part in value.named_modules(prefix=name):
                self._module(path, part)
        elif isinstance(value, FunctionType):
            self._function(name, value, name, None)
            self.follow(name, {} if _of_a_library(value) else vars(value), names)
        elif isinstance(value, MethodType):
            self._function(name, value.__func__, f"{name}.__self__", value.__self__)
        elif isinstance(value, partial):
            self.follow(name, value.func, names)
            self.follow(f"{name}.args", value.args, names)
            self.follow(f"{name}.keywords", value.keywords, names.union(value.keywords))
        elif isinstance(value, tuple):
            for number, one in enumerate(value):
                self.follow(f"{name}[{number}]", one, names)
        elif not isinstance(value, (*PLAIN, Tensor)) and not _of_a_library(value):
            for key in _entries(value, names) if isinstance(value, Mapping) else ():
                self._enter(Place(f"{name}[{key!r}]", value, key, entry=True), names)
            self._object(name, value, names | (OF_CLASSES if isinstance(value, type) else {"__call__"}))

    def _module(self, path: str, module: nn.Module) -> None:
        if id(module) not in self._known:
            self._known.add(id(module))
            self.modules[path] = module
            for attribute, value in vars(module).items():
                if isinstance(value, Tensor):  # not registered; one number in it may equal another's
                    self._enter(Place(f"{path}.{attribute}", module, attribute), frozenset())
            self._object(path, module, frozenset({"forward"}))

    def _object(self, name: str, value: Any, names: frozenset[str]) -> None:
        """Only what is named: a trainer may count its steps next to the weight of its loss.

        Of functions also what they override, which ``super()`` may lead to.
        """
        kind = value if isinstance(value, type) else type(value)
        own = {} if kind is value else getattr(value, "__dict__", {})
        for attribute in sorted(names):
            held, path = inspect.getattr_static(value, attribute, None), f"{name}.{attribute}"
            if isinstance(value, nn.Module) and attribute in own:
                self.follow(path, held, names)
            elif attribute not in own and isinstance(_inside(held), FunctionType):
                for base in kind.__mro__:
                    self._function(path, _inside(vars(base).get(attribute)), name, value)
            elif attribute in own or isinstance(held, MemberDescriptorType) or not hasattr(type(held), "__get__"):
                self._enter(Place(path, value, attribute), names)

    def _function(self, name: str, function: Any, owner_name: str, owner: Any) -> None:
        if not isinstance(function, FunctionType) or _of_a_library(function) or (function, id(owner)) in self._known:
            return
        self._known.add((function, id(owner)))
        names = _names(function.__code__)
        keywords = names.union(function.__kwdefaults__ or ())
        self._enter(Place(f"{name}.__defaults__", function, "__defaults__"), names)
        self._enter(Place(f"{name}.__kwdefaults__", function, "__kwdefaults__"), keywords)
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._enter(Place(f"{name}: {variable}", cell, "cell_contents"), names)
        for variable in sorted(names & function.__globals__.keys()):
            self._enter(Place(f"{name}: {variable}", function.__globals__, variable, entry=True), names)
        if owner is not None:
            self._object(owner_name, owner, names)

    def _enter(self, place: Place, names: frozenset[str]) -> None:
        where, value = (id(place.holder), place.key, place.entry), place.reader()()
        if (where, names) not in self._known:
            self._known.add((where, names))
            if not isinstance(value, (type, ModuleType)):
                self.places.setdefault(where, place)
            self.follow(place.name, value, names)


def _entries(mapping: Mapping[Any, Any], names: frozenset[str]) -> list[str]:
    """The keys of a mapping that are named. One that makes its values as they are asked for holds none."""
    found = [name for name in sorted(names) if name in mapping]
    return [name for name in found if isinstance(mapping[name], PLAIN) or mapping[name] is mapping[name]]


def _inside(held: Any) -> Any:
    """The function of a property, or of a class method."""
    return getattr(held, "fget", None) or getattr(held, "__func__", held)


def _names(code: CodeType) -> frozenset[str]:
    """The names in the tables of a function and of those inside it. Strings count: they may be keys."""
    inside = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    strings = [constant for constant in code.co_consts if isinstance(constant, str)]
    return frozenset((*code.co_names, *strings)).union(*inside)


def _of_a_library(value: Any) -> bool:
    if not isinstance(value, (FunctionType, type, ModuleType)):
        return False
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return (name or "").partition(".")[0] in _LIBRARIES


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return None
