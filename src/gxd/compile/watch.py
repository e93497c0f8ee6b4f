"""What a compiled step takes for granted of Python: attributes, hooks, and the values that the loss reads by name.

A traced step holds the values that Python had while it was traced. :class:`Watch` tells, in microseconds, whether any
of them has been replaced since; then the step is looked at anew.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import attrgetter, is_
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as every_module
from torch.optim import optimizer as every_optimizer

from gxd.compile.program import Recipe
from gxd.observe.hooks import Hook

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
PLAIN = (bool, int, float, str, type(None))
_BOOKKEEPING = frozenset(vars(nn.Module())) - {"training"}  # what every module has
_LIBRARIES = sys.stdlib_module_names | {"numpy", "torch", "transformers"}  # whose variables nobody changes
# Recurrent layers keep their weights in a list, and bring it up to date at each call.
_MENDED = ("_flat_weights", "_flat_weight_refs")

_KINDS: tuple[Callable[[Tensor], Any], ...] = (
    *map(attrgetter, ("requires_grad", "dtype", "device", "shape")),
    Tensor.stride,
)
_GRADIENT_HOOKS = (attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks"))

Holder = dict[str, Any] | CellType | FunctionType


class Watch:
    """Looks at a model, at the functions it is trained with, and at its optimizer.

    Attributes:
        modules: those of the model, and those that the functions use, by name.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.optimizer = recipe, recipe.optimizer
        self.modules: dict[str, nn.Module] = {}
        self._places: dict[str, tuple[Holder, str]] = {}  # single values: variables, and attributes of other objects
        self._known: set[int] = set()
        for name, value in (("model", recipe.model), ("loss", recipe.loss), ("score", recipe.score)):
            self._enter(name, value, frozenset())
        self._reads = [_reader(*place) for place in self._places.values()]
        modules = self.modules.values()
        self._dicts: list[Mapping[Any, Any]] = [vars(module) for module in modules]
        self._dicts += [getattr(m, name) for m in modules for name in ("_parameters", "_buffers", "_modules", *HOOKS)]
        self._dicts += [*_hooks_of_all_modules(), *self._optimizer_hooks()]
        self._copies = [dict(held) for held in self._dicts]
        self._kinds, self._objects = self._tensors()

    def unchanged(self) -> bool:
        """Whether everything is what it was when this was made, and no tensor has a hook on its gradient."""
        try:
            # Two lists of dicts are compared without a line of Python, and values that are the same object at once.
            if self._dicts != self._copies:
                return False
        except Exception:  # tensors, or arrays, of which one has taken the place of the other
            return False
        kinds, objects = self._tensors()
        if kinds != self._kinds or len(objects) != len(self._objects) or self._has_gradient_hooks():
            return False
        return all(map(is_, objects, self._objects)) or all(map(_same, objects, self._objects))

    def attributes(self) -> dict[str, Any]:
        """What a trace depends on: plain values as they are, all else by identity."""
        found = {f"{path}.{name}": _mark(value) for path, name, value in self._attributes()}
        found.update((name, _mark(read())) for name, read in zip(self._places, self._reads, strict=True))
        found["the kinds of the parameters"] = tuple(map(tuple, self._kinds))
        return found

    @contextmanager
    def undone(self) -> Iterator[list[str]]:
        """Undo what becomes of attributes and variables inside. The list then names those that were changed."""
        changed: list[str] = []
        values = [(path, vars(module)) for path, module in self.modules.items()]
        values += [(f"{path}.{name}", value) for path, name, value in self._attributes(_BOOKKEEPING)]
        single = [(name, place, read()) for (name, place), read in zip(self._places.items(), self._reads, strict=True)]
        values += [(name, value) for name, _, value in single]
        copies = [(name, value, value.copy()) for name, value in values if isinstance(value, (dict, list))]
        try:
            yield changed
        finally:
            for name, place, value in single:
                if not _same(_reader(*place)(), value):
                    _write(*place, value)
                    changed.append(name)
            for name, held, copy in copies:
                changed += [f"{name}.{key}" if key else name for key in _put_back(held, copy)]

    def foreign_hook(self, mine: tuple[Any, ...]) -> str | None:
        """Which hook is neither among these nor of an observer among these, if there is one."""
        for path, module in self.modules.items():
            for name in HOOKS:
                for hook in getattr(module, name).values():
                    if not isinstance(hook, Hook) or (hook.observer is not None and hook.observer not in mine):
                        return f"{path!r} has a {name[1:-1].replace('_', ' ')} of its own"
        if any(_hooks_of_all_modules()):
            return "all modules have a hook (torch.nn.modules.module.register_module_...)"
        if any(hook not in mine for held in self._optimizer_hooks() for hook in held.values()):
            return "the optimizer has step hooks of its own"
        if self._has_gradient_hooks():
            numbers = [n for n, t in enumerate(self.recipe.tensors()) if any(hooks(t) for hooks in _GRADIENT_HOOKS)]
            return f"the parameter {self.recipe.name(numbers[0])!r} has a hook on its gradient"
        return None

    # --- reading ------------------------------------------------------------------------------------------------------

    def _tensors(self) -> tuple[list[list[Any]], list[Any]]:
        """What the tensors are like, and the objects themselves: they are compared by identity."""
        tensors = self.recipe.tensors()
        trained = [p for group in self.optimizer.param_groups for p in (*group["params"], None)]
        return [list(map(kind, tensors)) for kind in _KINDS], [*tensors, *trained, *[read() for read in self._reads]]

    def _has_gradient_hooks(self) -> bool:
        tensors = self.recipe.tensors()
        return any(map(_GRADIENT_HOOKS[0], tensors)) or any(map(_GRADIENT_HOOKS[1], tensors))

    def _attributes(self, more: frozenset[str] = frozenset()) -> Iterator[tuple[str, str, Any]]:
        for path, module in self.modules.items():
            for name, value in vars(module).items():
                if name not in _BOOKKEEPING or name in more:
                    yield path, name, value

    def _optimizer_hooks(self) -> list[Mapping[int, Any]]:
        return [
            getattr(self.optimizer, "_optimizer_step_pre_hooks", {}),  # a wrapper may have none, and steps by itself
            getattr(self.optimizer, "_optimizer_step_post_hooks", {}),
            every_optimizer._global_optimizer_pre_hooks,
            every_optimizer._global_optimizer_post_hooks,
        ]

    # --- finding what to watch ----------------------------------------------------------------------------------------

    def _enter(self, name: str, value: Any, used: frozenset[str]) -> None:
        """Watch what a value holds. ``used``: the names of attributes that the code around it reads."""
        if isinstance(value, (*PLAIN, Tensor, type, ModuleType)) or id(value) in self._known:
            return
        if isinstance(value, nn.Module):
            self._enter_module(name, value)
        elif isinstance(value, FunctionType):
            self._known.add(id(value))
            self._enter_function(name, value)
        elif isinstance(value, MethodType):
            function: Any = value.__func__
            self._enter(name, function, used)
            if isinstance(function, FunctionType):
                self._enter(f"{name}.__self__", value.__self__, _names(function)[1])
        elif isinstance(value, partial):
            self._enter(name, value.func, used)
            for number, argument in enumerate(value.args):
                self._enter(f"{name}.args[{number}]", argument, used)
            for key in value.keywords:
                self._watch(f"{name}.keywords[{key!r}]", value.keywords, key, used)
        elif hasattr(value, "__dict__"):
            self._enter_object(name, value, used)

    def _enter_module(self, name: str, module: nn.Module) -> None:
        for path, part in module.named_modules(prefix=name):
            if id(part) not in self._known:
                self._known.add(id(part))
                self.modules[path] = part
                for attribute, value in vars(part).items():
                    if isinstance(value, Tensor):  # not registered; one number in it may equal another's
                        self._places[f"{path}.{attribute}"] = (vars(part), attribute)
                self._enter(f"{path}.forward", vars(part).get("forward", type(part).forward), frozenset())

    def _enter_object(self, name: str, value: Any, used: frozenset[str]) -> None:
        """Only the attributes that are used: a trainer may count its steps next to the weight of its loss."""
        queue = ["__call__", *sorted(used)]
        for attribute in queue:  # what a method uses comes after it
            method: Any = getattr(type(value), attribute, None)
            if isinstance(method, FunctionType) and not _of_a_library(method):
                self._enter(f"{name}.{attribute}", method, frozenset())
                queue += sorted(_names(method)[1].difference(queue))
        for attribute in queue:
            if attribute in vars(value):
                self._watch(f"{name}.{attribute}", vars(value), attribute, frozenset())

    def _enter_function(self, name: str, function: FunctionType) -> None:
        if _of_a_library(function):
            return
        variables, attributes = _names(function)
        for option in ("__defaults__", "__kwdefaults__"):
            self._watch(f"{name}.{option}", function, option, attributes)
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._watch(f"{name}: {variable}", cell, "cell_contents", attributes)
        for variable in sorted(variables & function.__globals__.keys()):
            value = function.__globals__[variable]
            # Helpers of the same file are looked into; what is imported is not.
            if not isinstance(value, FunctionType) or value.__globals__ is function.__globals__:
                self._watch(f"{name}: {variable}", function.__globals__, variable, attributes)

    def _watch(self, name: str, holder: Holder, key: str, used: frozenset[str]) -> None:
        value = _reader(holder, key)()
        if not isinstance(value, (type, ModuleType)):
            self._places[name] = (holder, key)
            self._enter(name, value, used)


def _hooks_of_all_modules() -> list[Mapping[int, Any]]:
    return [vars(every_module)[f"_global{name}"] for name in HOOKS]


class Same:
    """Any object, equal to itself alone. It is kept, for another one might be given its id."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _mark(value: Any) -> Any:
    if isinstance(value, PLAIN):
        return (type(value), value)
    return tuple(map(_mark, value)) if type(value) is tuple else Same(value)


def _same(one: Any, two: Any) -> bool:
    return one is two or (type(one) is type(two) and isinstance(one, PLAIN) and bool(one == two))


def _of_a_library(function: FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] in _LIBRARIES


def _names(function: FunctionType) -> tuple[frozenset[str], frozenset[str]]:
    """The global variables that a function names, and the attributes."""
    codes: list[CodeType] = [function.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    steps = [step for code in codes for step in dis.get_instructions(code)]
    variables = {str(step.argval) for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    attributes = {str(step.argval) for step in steps if step.opname in ("LOAD_ATTR", "LOAD_METHOD")}
    return frozenset(variables), frozenset(attributes)


def _reader(holder: Holder, key: str) -> Callable[[], Any]:
    if isinstance(holder, dict):
        return partial(holder.get, key)
    return partial(_content, holder) if isinstance(holder, CellType) else partial(getattr, holder, key)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return None


def _write(holder: Holder, key: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[key] = value
    else:
        setattr(holder, key, value)


def _put_back(held: Any, copy: Any) -> list[str]:
    """Make a dict or list what it was. Returns the keys that were not; of a list, the empty one."""
    if isinstance(held, list):
        if len(held) == len(copy) and all(map(_same, held, copy)):
            return []
        held[:] = copy
        return [""]
    missing = object()
    keys = [key for key in {**held, **copy} if not _same(held.get(key, missing), copy.get(key, missing))]
    if keys:
        held.clear()
        held.update(copy)
    return [str(key) for key in keys if key not in _MENDED]
