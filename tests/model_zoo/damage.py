"""Has a model been changed? Everything that hangs on its modules is written down, at any depth, and compared."""

import functools
import gc
import re
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

Record = dict[str, Any]
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, torch.Generator)
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, slice, range)


def record(model: nn.Module) -> Record:
    """Path -> what is there, for everything reachable from the model."""
    return dict(_walk(model, "model", {}))


def changes(before: Record, after: Record) -> list[str]:
    """What is different, a line each."""
    found = [f"{path} is new: {_short(after[path])}" for path in after if path not in before]
    for path, value in before.items():
        if path not in after:
            found.append(f"{path} is gone")
        elif not _same(value, after[path]):
            found.append(f"{path} was {_short(value)}, is {_short(after[path])}")
    return [re.sub(r"\._modules\['(\w+)'\]", r".\1", line) for line in found]


def fake_tensors(model: nn.Module) -> list[str]:
    """Where a fake tensor of the trace was left: on the model, or in a cached function."""
    found = [path for path, value in record(model).items() if isinstance(value, tuple) and FakeTensor.__name__ in value]
    for thing in gc.get_objects():
        if type(thing) is functools._lru_cache_wrapper and not thing.__module__.startswith("torch."):
            kept = [thing]
            for _ in range(4):  # cache, dict, entry, tuple
                kept = [inner for outer in kept for inner in gc.get_referents(outer) if not isinstance(inner, _OPAQUE)]
                found += [f"cache of {thing.__qualname__}" for inner in kept if isinstance(inner, FakeTensor)]
    return found


def _walk(thing: Any, path: str, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, _PLAIN):
        yield path, thing
        return
    if id(thing) in seen:
        yield path, ("again", id(thing))
        return
    seen[id(thing)] = thing
    if isinstance(thing, Tensor):
        fake = isinstance(thing, FakeTensor) or thing.device.type == "meta"
        value = None if fake else thing.detach().clone()
        yield path, (id(thing), type(thing).__name__, str(thing.dtype), thing.requires_grad, value)
        for key, inner in list(vars(thing).items()):
            yield from _walk(inner, f"{path}.{key}", seen)
    elif isinstance(thing, functools.partial):
        yield path, ("partial", id(thing.func))
        yield from _walk((thing.args, thing.keywords), path, seen)
    elif isinstance(thing, _OPAQUE):
        yield path, id(thing)
    elif isinstance(thing, dict):
        yield path, (id(thing), list(map(str, thing)))
        for key, value in list(thing.items()):
            yield from _walk(value, f"{path}[{key!r}]", seen)
    elif isinstance(thing, (list, tuple, set, frozenset)):
        # Hook dicts and configurations make tuples anew when asked; only the contents of these count.
        yield path, (type(thing).__name__, len(thing))
        for number, value in enumerate(thing):
            yield from _walk(value, f"{path}[{number}]", seen)
    else:
        yield path, (id(thing), type(thing).__name__)
        if hasattr(thing, "__dict__"):
            for key, value in list(vars(thing).items()):
                yield from _walk(value, f"{path}.{key}", seen)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and bool(torch.equal(*map(_bits, (one, other))))
    return type(one) is type(other) and (one == other or one != one)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else tensor


def _short(value: Any) -> str:
    return repr(value).replace("\n", " ")[:80]
