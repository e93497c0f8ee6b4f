"""Whether what a compiled step takes for granted of Python still holds, in microseconds: attributes of modules, hooks,
the kinds of tensors, and the values that code reaches by name (``gxd.compile.names``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter, is_
from typing import Any

from torch import Tensor
from torch.nn.modules import module as every_module
from torch.optim import optimizer as every_optimizer

from gxd.compile.names import PLAIN, Names
from gxd.compile.recipe import Recipe
from gxd.compile.updates import step_of
from gxd.observe.hooks import NOTHING, Hook

CONTAINERS = (dict, list, set, deque)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Recurrent layers keep their weights in a list, and bring it up to date at each call.
_MENDED = ("_flat_weights", "_flat_weight_refs")
_kind = attrgetter("requires_grad", "dtype", "device", "shape")
_gradient_hooks = (attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks"))


class Watch:
    """A look at a model, at the functions it is trained with, and at its optimizer."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.optimizer = recipe, recipe.optimizer
        names = Names()
        for name, value in (("model", recipe.model), ("loss", recipe.loss), ("score", recipe.score)):
            names.follow(name, value)
        self._modules, self._places = names.modules, list(names.places.values())
        self._reads = [place.reader() for place in self._places]
        modules = self._modules.values()
        self._dicts: list[Mapping[Any, Any]] = [vars(module) for module in modules]
        self._dicts += [getattr(m, name) for m in modules for name in ("_parameters", "_buffers", "_modules", *HOOKS)]
        self._dicts += [*_hooks_of_all_modules(), *self._optimizer_hooks()]
        self._copies = [dict(held) for held in self._dicts]
        self._kinds, self._objects = self._tensors()
        self._values = {
            f"{p}.{name}": value for p, module in self._modules.items() for name, value in vars(module).items()
        }
        self._values.update((place.name, read()) for place, read in zip(self._places, self._reads, strict=True))

    def unchanged(self) -> bool:
        """Whether everything is what it was when this was made, and no tensor has a hook on its gradient."""
        try:
            # Two lists of dicts are compared without a line of Python, and values that are the same object at once.
            if self._dicts != self._copies:
                return False
        except Exception:  # tensors, or arrays, of which one has taken the place of the other
            return False
        kinds, objects = self._tensors()
        if kinds != self._kinds or len(objects) != len(self._objects):
            return False
        tensors = objects[: len(kinds) // 2]
        if any(map(_gradient_hooks[0], tensors)) or any(map(_gradient_hooks[1], tensors)):
            return False
        return all(map(is_, objects, self._objects)) or all(map(_same, objects, self._objects))

    def differences(self, other: Watch) -> list[str]:
        """What was not the same when another one was made."""
        names = {**self._values, **other._values}
        found = [name for name in names if not _same(self._values.get(name), other._values.get(name))]
        return found or ["requires_grad, or the shape, of the parameters"]

    @contextmanager
    def undone(self) -> Iterator[list[str]]:
        """Undo what becomes of attributes and variables inside. The list then names those that were changed."""
        changed: list[str] = []
        values = [read() for read in self._reads]
        held = [*((path, vars(module)) for path, module in self._modules.items()), *self._values.items()]
        copies = [(name, value, value.copy()) for name, value in _containers(held)]
        try:
            yield changed
        finally:
            for place, read, value in zip(self._places, self._reads, values, strict=True):
                if not _same(read(), value):
                    place.write(value)
                    changed.append(place.name)
            for name, value, copy in copies:
                changed += [f"{name}.{key}" if key else name for key in _put_back(value, copy)]

    def foreign_hook(self, mine: tuple[Any, ...]) -> str | None:
        """Which hook is neither among these nor of an observer among these, if there is one."""
        for path, module in self._modules.items():
            for name in HOOKS:
                for hook in getattr(module, name).values():
                    ours = isinstance(hook, Hook) and (hook.observer is None or hook.observer in mine)
                    if not ours and hook is not NOTHING:
                        return f"{path!r} has a {name[1:-1].replace('_', ' ')} of its own"
        if any(_hooks_of_all_modules()):
            return "all modules have a hook (torch.nn.modules.module.register_module_...)"
        if any(hook not in mine for held in self._optimizer_hooks() for hook in held.values()):
            return "the optimizer has step hooks of its own"
        for number, tensor in enumerate(self.recipe.tensors()):
            if any(hooks(tensor) for hooks in _gradient_hooks):  # one that was removed leaves an empty dict
                return f"the parameter {self.recipe.name(number)!r} has a hook on its gradient"
        return None

    def _tensors(self) -> tuple[list[Any], list[Any]]:
        """What the tensors are like, and the objects themselves: they are compared by identity."""
        tensors = self.recipe.tensors()
        trained = [p for group in self.optimizer.param_groups for p in (*group["params"], None)]
        kinds = [*map(_kind, tensors), *map(Tensor.stride, tensors)]
        return kinds, [*tensors, *trained, step_of(self.optimizer), *[read() for read in self._reads]]

    def _optimizer_hooks(self) -> list[Mapping[int, Any]]:
        return [
            getattr(self.optimizer, "_optimizer_step_pre_hooks", {}),  # a wrapper may have none, and steps by itself
            getattr(self.optimizer, "_optimizer_step_post_hooks", {}),
            every_optimizer._global_optimizer_pre_hooks,
            every_optimizer._global_optimizer_post_hooks,
        ]


def _hooks_of_all_modules() -> list[Mapping[int, Any]]:
    return [vars(every_module)[f"_global{name}"] for name in HOOKS]


def _same(one: Any, two: Any) -> bool:
    """Plain values are compared, all else must be the same object."""
    if one is two or type(one) is not type(two):
        return one is two
    if isinstance(one, tuple):
        return len(one) == len(two) and all(map(_same, one, two))
    return isinstance(one, PLAIN) and bool(one == two)


def _containers(named: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The containers among some values and within these, each by the name of the value."""
    found: dict[int, tuple[str, Any]] = {}
    waiting = list(named)
    for name, value in waiting:
        if isinstance(value, CONTAINERS) and id(value) not in found:
            found[id(value)] = name, value
            inside = value.values() if isinstance(value, dict) else value
            waiting += [(name, one) for one in inside if isinstance(one, CONTAINERS)]
    return list(found.values())


def _put_back(held: Any, copy: Any) -> list[str]:
    """Make a container what it was. Returns the keys of a dict that were not; of another, the empty one."""
    if isinstance(held, set):
        if held == copy:
            return []
        held.clear()
        held.update(copy)
        return [""]
    if not isinstance(held, dict):
        if len(held) == len(copy) and all(map(_same, held, copy)):
            return []
        held.clear()
        held.extend(copy)
        return [""]
    missing = object()
    keys = [key for key in {**held, **copy} if not _same(held.get(key, missing), copy.get(key, missing))]
    if keys:
        held.clear()
        held.update(copy)
    return [str(key) for key in keys if key not in _MENDED]
