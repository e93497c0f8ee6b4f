"""Norms that couple units, held at what they returned before, except for the units themselves.

A norm over several units (LayerNorm, GroupNorm, RMSNorm) carries a change of one unit to all others. Holding the others
where they were shows whether the unit has another way out. Which elements of its output are the unit's own is not
guessed from the kind of norm: its forward is run again with the unit's entries of its weight and bias disturbed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gxd.plan.units import Norm
from gxd.sandbox.substitute import Call, substituted

OneCall = list[tuple[Tensor, Tensor]]  # for each tensor it returned: the values, and which elements are the units' own
Calls = list[OneCall]


@contextmanager
def recorded(
    model: nn.Module, norms: Sequence[Norm], index: Tensor, found: Mapping[str, list[OneCall | None]]
) -> Iterator[None]:
    """Within this context, what the norms return is added to ``found``, by module; None where the elements of the
    units cannot be told apart.
    """
    asking = False

    def keep(module: nn.Module, call: Call, output: Any, norm: Norm) -> None:
        nonlocal asking
        if not asking:  # else a norm inside the forward that is run again
            asking = True
            try:
                found[norm.module].append(_own_elements(module, call, output, norm, index))
            finally:
                asking = False

    handles = []
    try:
        for norm in norms:

            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any, norm: Norm = norm) -> None:
                keep(module, (args, kwargs), output, norm)

            handles.append(model.get_submodule(norm.module).register_forward_hook(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def frozen(model: nn.Module, norms: Mapping[str, Calls]) -> Iterator[None]:
    """Within this context, norms return what they returned before, except for the units' own elements."""
    handles = []
    try:
        for name, calls in norms.items():
            rest = iter(calls)

            def freeze(module: nn.Module, args: Any, output: Any, rest: Iterator[OneCall] = rest) -> Any:
                leaves, spec = pytree.tree_flatten(output)
                kept = iter(next(rest, ()))
                for place, leaf in enumerate(leaves):
                    if _is_value(leaf):
                        before, own = next(kept, (leaf, leaf != leaf))
                        leaves[place] = torch.where(own, leaf, before) if own.any() else leaf
                return pytree.tree_unflatten(leaves, spec)

            handles.append(model.get_submodule(name).register_forward_hook(freeze))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _own_elements(module: nn.Module, call: Call, output: Any, norm: Norm, index: Tensor) -> OneCall | None:
    entries = norm.entries[index].flatten()
    named = [name.rpartition(".")[2] for name in (norm.weight, norm.bias) if name is not None]
    # The parameters of a frozen norm are not named in the plan.
    own = {n: t for n, t in module._parameters.items() if t is not None and (n in named or not named)}
    own = {name: tensor for name, tensor in own.items() if tensor.numel() > int(norm.entries.max())}
    again, moved = _forward(module, {}, call), _forward(module, {n: _moved(t, entries) for n, t in own.items()}, call)
    returned = _values(output)
    if not [t.shape for t in returned] == [t.shape for t in again] == [t.shape for t in moved]:
        return None
    masks = [one != other for one, other in zip(again, moved, strict=True)]
    count, size = sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks if mask.any())
    if not count or (count == size and any(tensor.numel() > len(entries) for tensor in own.values())):
        return None  # not a norm that scales its elements one by one, but a module with more in it
    return [(values.detach().clone(), mask) for values, mask in zip(returned, masks, strict=True)]


def _forward(module: nn.Module, tensors: Mapping[str, Tensor], call: Call) -> list[Tensor]:
    """What its forward returns, with other tensors and the same random numbers, and without its hooks."""
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, call)  # it may write to them
    devices = sorted({t.device.index or 0 for t in module.parameters() if t.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), substituted(module, tensors):
        return _values(module.forward(*args, **kwargs))


def _moved(tensor: Tensor, entries: Tensor) -> Tensor:
    moved = tensor.detach().clone()
    moved.view(-1)[entries.to(tensor.device)] += 1.0
    return moved


def _values(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if _is_value(leaf)]


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()
