"""Leave a model as it was found: everything that hangs on it, in depth, not only its parameters.

A forward pass may do anything: fill a cache, count calls, register a buffer or a hook, draw random numbers. When the
library runs one for its own purposes (to trace a model, to check a plan) the user must not notice. A deep copy would
not do: many models cannot be copied, copies of large ones do not fit, and what a hook's closure holds is not copied.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gxd.sandbox.randomness import random_states, set_random_states

_LARGEST = 10_000  # elements of a container that is looked into; larger ones are data, not a cache
_MOST = 200_000  # objects that are looked at; the nearest to the model come first
# Objects of these packages belong to the process, not to the model: they work in other threads, or hold the data.
_STRANGERS = {"asyncio", "concurrent", "ctypes", "importlib", "io", "lightning", "logging", "multiprocessing"}
_STRANGERS |= {"pytorch_lightning", "queue", "threading", "warnings", "weakref"}
_STRANGE_PARTS = ("torch._dynamo", "torch._inductor", "torch.distributed", "torch.utils.data")
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, types.BuiltinFunctionType)
_LIBRARIES = {*sys.stdlib_module_names, "numpy", "torch"}  # their functions and classes keep nothing of a model
_GLOBALS = (type(None), bool, int, float, dict, list, set, deque, Tensor)  # what a function may keep by a global name
_KEEPERS = (*_GLOBALS, types.FunctionType)
_ABSENT = object()


@contextmanager
def as_found(model: nn.Module, values: bool = False) -> Iterator[None]:
    """Within this context the model may be run in any way; afterwards everything it reaches is as it was.

    Attributes of modules and of objects that hang on them, dicts, lists, sets, hooks and what their closures hold,
    class attributes, the state of generators, and the global random state are given back in place.

    Args:
        values: whether tensors that are neither parameters nor buffers keep their values, too. They are copied, which
            a trace, which computes nothing, can do without.
    """
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    states, snapshot = random_states(), _Snapshot(model, values)
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        snapshot.restore()
        set_random_states(states)


class _Snapshot:
    """What each mutable object that can be reached from a model held."""

    def __init__(self, model: nn.Module, values: bool) -> None:
        self.values = values
        self.undo: list[Callable[[], None]] = []
        self.seen: dict[int, Any] = {}  # holds what was seen, so that no id is used twice
        self.registered = {id(t) for t in (*model.parameters(), *model.buffers())}
        pending: deque[Any] = deque([model])
        while pending and len(self.seen) < _MOST:
            one = pending.popleft()
            if isinstance(one, _ATOMS) or id(one) in self.seen:
                continue
            self.seen[id(one)] = one
            pending.extend(self._look(one))

    def restore(self) -> None:
        for undo in reversed(self.undo):
            undo()

    def _look(self, one: Any) -> Iterable[Any]:
        """Note what an object holds, and say what it leads to."""
        kind = type(one)
        if isinstance(one, dict):
            return self._dict(one)
        if isinstance(one, (list, deque)):
            return self._sequence(one)
        if isinstance(one, set):
            return self._set(one)
        if isinstance(one, (tuple, frozenset)):
            return one if len(one) <= _LARGEST else ()
        if isinstance(one, Tensor):
            return self._tensor(one)
        if isinstance(one, torch.Generator):
            return self._generator(one)
        if isinstance(one, types.FunctionType):
            return self._function(one)
        if isinstance(one, types.MethodType):
            return one.__self__, one.__func__
        if isinstance(one, types.CellType):
            return self._cell(one)
        if isinstance(one, functools.partial):
            return one.func, one.args, one.keywords
        if hasattr(one, "__wrapped__") and hasattr(one, "cache_clear"):  # its values are seen to by gxd.plan.find.fakes
            return (one.__wrapped__,)
        if isinstance(one, weakref.ReferenceType) or _is_strange(kind):
            return ()
        return self._object(one)

    def _dict(self, one: dict[Any, Any]) -> Iterable[Any]:
        if len(one) > _LARGEST:
            return ()
        base: Any = OrderedDict if isinstance(one, OrderedDict) else dict  # a subclass may compute what it gives out
        before = list(base.items(one))

        def undo() -> None:
            if len(one) != len(before) or not all(map(_same, base.items(one), before)):
                base.clear(one)
                for key, value in before:
                    base.__setitem__(one, key, value)

        self.undo.append(undo)
        return [value for _, value in before]

    def _sequence(self, one: list[Any] | deque[Any]) -> Iterable[Any]:
        if len(one) > _LARGEST:
            return ()
        before = list(one)

        def undo() -> None:
            if len(one) != len(before) or not all(a is b for a, b in zip(one, before, strict=True)):
                one.clear()
                one.extend(before)

        self.undo.append(undo)
        return before

    def _set(self, one: set[Any]) -> Iterable[Any]:
        if len(one) > _LARGEST:
            return ()
        before = set(one)

        def undo() -> None:
            if one != before:
                one.clear()
                one.update(before)

        self.undo.append(undo)
        return before

    def _tensor(self, one: Tensor) -> Iterable[Any]:
        if self.values and id(one) not in self.registered and type(one) is Tensor and not one.is_meta:
            version, before = one._version, one.detach().clone()

            def undo() -> None:
                if one._version != version:
                    with torch.no_grad():
                        one.copy_(before)

            self.undo.append(undo)
        return (vars(one),) if getattr(one, "__dict__", None) else ()

    def _generator(self, one: torch.Generator) -> Iterable[Any]:
        before = one.get_state()

        def undo() -> None:
            one.set_state(before)

        self.undo.append(undo)
        return ()

    def _function(self, one: types.FunctionType) -> Iterable[Any]:
        """What a function can change: its closure, its defaults, its attributes, and what it knows by a global name, as
        a hook in a notebook does; and what the functions that it calls can change.
        """
        if _is_at_home_in(one.__module__, _LIBRARIES):
            return one.__closure__ or ()
        names, known = _names(one.__code__), one.__globals__
        before = {name: known.get(name, _ABSENT) for name in names}
        kept = {name: value for name, value in before.items() if value is _ABSENT or isinstance(value, _GLOBALS)}

        def undo() -> None:
            for name, value in kept.items():
                if known.get(name, _ABSENT) is not value:
                    _ = known.pop(name) if value is _ABSENT else known.update({name: value})

        self.undo.append(undo)
        return (
            *(one.__closure__ or ()),
            *(one.__defaults__ or ()),
            *(one.__kwdefaults__ or {}).values(),
            vars(one),
            *(value for value in before.values() if isinstance(value, _KEEPERS) or _is_foreign(value)),
        )

    def _cell(self, one: types.CellType) -> Iterable[Any]:
        try:
            before = one.cell_contents
        except ValueError:  # not bound yet
            return ()

        def undo() -> None:
            one.cell_contents = before

        self.undo.append(undo)
        return (before,)

    def _object(self, one: Any) -> Iterable[Any]:
        found: list[Any] = []
        if isinstance(getattr(one, "__dict__", None), dict):
            found.append(vars(one))
        for kind in type(one).__mro__:
            if kind is nn.Module or _is_strange(kind) or kind.__module__ in ("builtins", "typing", "abc"):
                continue
            found += self._class(kind)
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if isinstance(vars(kind).get(name), types.MemberDescriptorType) and hasattr(one, name):
                    found += self._attribute(one, name)
        return found

    def _class(self, kind: type) -> Iterable[Any]:
        if id(kind) in self.seen or _is_at_home_in(kind.__module__, _LIBRARIES):
            return ()
        self.seen[id(kind)] = kind
        before = dict(vars(kind))

        def undo() -> None:
            for name in [n for n in vars(kind) if n not in before]:
                delattr(kind, name)
            for name, value in before.items():
                if vars(kind).get(name) is not value:
                    setattr(kind, name, value)

        self.undo.append(undo)
        functions = [value for value in before.values() if isinstance(value, types.FunctionType)]
        return [*functions, *(v for v in before.values() if isinstance(v, (dict, list, set, deque, Tensor)))]

    def _attribute(self, one: Any, name: str) -> Iterable[Any]:
        before = getattr(one, name)

        def undo() -> None:
            if getattr(one, name, None) is not before:
                setattr(one, name, before)

        self.undo.append(undo)
        return (before,)


def _same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    return one[0] is other[0] and one[1] is other[1]


def _is_foreign(value: Any) -> bool:
    """Whether this is an object of a class of the user's, or of a package that is neither torch nor Python's own."""
    return value is not _ABSENT and not _is_at_home_in(type(value).__module__, _LIBRARIES)


def _is_strange(kind: type) -> bool:
    return _is_at_home_in(kind.__module__, _STRANGERS) or str(kind.__module__).startswith(_STRANGE_PARTS)


def _is_at_home_in(module: Any, packages: set[str]) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in packages


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The global names a function and the functions inside it mention."""
    inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in _names(const)]
    return (*code.co_names, *inner)
