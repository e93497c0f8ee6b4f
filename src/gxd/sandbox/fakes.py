"""Trace a model and leave nothing behind: neither changes nor fake tensors.

A trace runs the user's forward on fake tensors, which have shapes and no values. One that stays in a cache would be
returned by a later, real forward pass.
"""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from gxd.errors import TraceError
from gxd.sandbox.snapshot import as_found

_Cache = type(functools.lru_cache(lambda: None))


@contextmanager
def traced_in_place(model: nn.Module) -> Iterator[None]:
    """Within this context the model may be run on fake tensors; nothing but what the caller returns may hold one.

    Everything that can be reached from the model is given back. Fake tensors elsewhere (a cached function, a cache in
    a module of the user's) are taken out. Raises :class:`gxd.TraceError` if one is left all the same.
    """
    was_enabled = gc.isenabled()
    gc.collect(0)
    gc.disable()  # so that all that is made from now on is young, and can be told from the rest
    stuck: list[Any] = []
    try:
        with as_found(model):
            yield
    finally:
        young = [weakref.ref(one) for one in gc.get_objects(generation=0) if type(one) is FakeTensor]
        _forget_the_last_graph()
        gc.collect(0)
        left = [one for one in (ref() for ref in young) if one is not None]
        if left:
            stuck = _take_out(left)
        if was_enabled:
            gc.enable()
    if stuck:
        raise TraceError(
            "the forward pass keeps tensors of the trace where they cannot be taken out: in "
            f"{', '.join(sorted({_describe(one) for one in stuck}))}. They have no values, and a later pass would use "
            "them: clear that cache, or describe the units by hand: gxd.find_units(model, "
            "groups=[gxd.manual_group('fc1', consumers=['fc2'])])"
        )


def _forget_the_last_graph() -> None:
    """torch.export keeps the nodes of its last graph, with their fake tensors, for a message it may have to give."""
    kept = getattr(torch.fx.experimental.proxy_tensor, "_FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT", None)
    if isinstance(kept, dict):
        kept.clear()


def _take_out(left: list[FakeTensor]) -> list[Any]:
    """Take fake tensors out of whatever holds them: cached functions forget all, containers lose the tensors. Returns
    the holders that cannot do without.
    """
    mine = {id(one) for one in left}
    holders = [(one, 0) for one in _holders(left)]
    known = {id(holder) for holder, _ in holders}
    stuck: list[Any] = []
    while holders:
        holder, depth = holders.pop()
        if isinstance(holder, _Cache):
            holder.cache_clear()
        elif isinstance(holder, dict) and not _is_namespace(holder):
            for key in [k for k, v in holder.items() if id(v) in mine or id(k) in mine]:
                del holder[key]
        elif isinstance(holder, (list, deque)):
            kept = [one for one in holder if id(one) not in mine]
            holder.clear()
            holder.extend(kept)
        elif isinstance(holder, (tuple, frozenset)) and depth < 4:  # what holds it must lose it whole
            mine.add(id(holder))
            further = [one for one in _holders([holder]) if id(one) not in known]
            known |= {id(one) for one in further}
            holders += [(one, depth + 1) for one in further]
        else:
            stuck.append(holder)
    return stuck


def _holders(objects: list[Any]) -> list[Any]:
    """Who holds these objects, besides torch itself, frames and other fake tensors."""
    found = gc.get_referrers(*objects)
    return [one for one in found if one is not objects and not _is_torchs(one)]


def _is_torchs(holder: Any) -> bool:
    if isinstance(holder, (types.FrameType, FakeTensor, weakref.ReferenceType)):
        return True
    if isinstance(holder, dict) and ("tensor_meta" in holder or "fake_mode" in holder):  # of a node, of a fake tensor
        return True
    return type(holder).__module__.partition(".")[0] == "torch"


def _is_namespace(holder: dict[Any, Any]) -> bool:
    """Whether a dict holds the attributes of an object or the globals of a module, which would miss what is taken."""
    owners = gc.get_referrers(holder)
    return "__name__" in holder or any(getattr(one, "__dict__", None) is holder for one in owners)


def _describe(holder: Any) -> str:
    if isinstance(holder, dict) and "__name__" in holder:
        return f"a global of the module {holder['__name__']}"
    if isinstance(holder, dict):
        owner = next((one for one in gc.get_referrers(holder) if getattr(one, "__dict__", None) is holder), None)
        return f"an attribute of a {type(owner).__name__}"
    return f"a {type(holder).__name__}"
