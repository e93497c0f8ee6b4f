"""Run a model on other tensors than its own, and leave it as it was: parameters and buffers, object by object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gxd.plan.layouts import NamedTensors
from gxd.sandbox.snapshot import as_found

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of the model


@contextmanager
def substituted(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Within this context the model has other parameters and buffers. Afterwards it has its own again, in their order,
    and no others, whatever a forward pass has registered, replaced or deleted, and also after an exception.

    Args:
        model: the model.
        tensors: qualified name -> substitute. It stands in wherever the model has the same tensor: in a module that has
            two names, and in two modules whose parameters are tied.
    """
    modules = list(model.modules())
    places: list[dict[str, Any]] = [place for m in modules for place in (m._parameters, m._buffers)]
    held = [(place, dict(place)) for place in places]
    marks = [(module._non_persistent_buffers_set, set(module._non_persistent_buffers_set)) for module in modules]
    named = NamedTensors(model)
    instead = {id(named[name]): substitute for name, substitute in tensors.items()}
    # Recurrent layers keep their weights in a list, too.
    lists = [(one, list(one)) for m in modules for one in vars(m).values() if type(one) is list]
    try:
        for one, before_it in lists:
            one[:] = [instead.get(id(entry), entry) for entry in before_it]
        for place, before in held:
            for key, tensor in before.items():
                if id(tensor) in instead:
                    place[key] = instead[id(tensor)]
        yield
    finally:
        for one, before_it in lists:
            one[:] = before_it
        for place, before in held:
            if list(place.keys()) == list(before):  # scripted modules have less than a dict
                for key, tensor in before.items():
                    if place[key] is not tensor:
                        place[key] = tensor
            else:
                place.clear()
                place.update(before)
        for names, found in marks:
            if names != found:
                names.clear()
                names.update(found)


def copies(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Copies by the same names, floating-point ones in another type if one is given. All parameters are differentiable,
    also frozen ones: without gradients, attention takes a fused path that hides its layers.

    What was one tensor still is, and what lay in the same memory still does: tied weights stay tied.
    """
    unique = {id(tensor): tensor for tensor in tensors.values()}
    storages = Counter(_storage(tensor) for tensor in unique.values())
    shared: dict[tuple[int, torch.dtype], Tensor] = {}
    made: dict[int, Tensor] = {}
    for key, tensor in unique.items():
        copy, storage = tensor.detach(), _storage(tensor)
        if storage and storages[storage] > 1:
            if (storage, tensor.dtype) not in shared:
                length = tensor.untyped_storage().nbytes() // tensor.element_size()
                shared[storage, tensor.dtype] = _fresh(copy.as_strided((length,), (1,), 0), dtype)
            memory = shared[storage, tensor.dtype]
            copy = memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        else:
            copy = _fresh(copy, dtype)
        if isinstance(tensor, nn.Parameter):
            copy = nn.Parameter(copy, requires_grad=copy.is_floating_point() or copy.is_complex())
        made[key] = copy
    return {name: made[id(tensor)] for name, tensor in tensors.items()}


def copied_arguments(call: Call, dtype: torch.dtype | None = None) -> Call:
    """The arguments of a call with copies of the tensors, as a forward pass may write to its input."""

    def copy(tensor: Tensor) -> Tensor:
        return _fresh(tensor.detach(), dtype).requires_grad_(tensor.requires_grad)

    found: Call = pytree.tree_map_only(Tensor, copy, call)
    return found


def run(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    call: Call,
    seed: int,
    hooks: Sequence[AbstractContextManager[Any]] = (),
    output: Callable[[Any], Any] | None = None,
) -> Any:
    """What a model returns with other tensors than its own.

    Args:
        model: the model; it is left as it was.
        tensors: qualified name -> substitute. They may be written to, as may the arguments.
        call: the arguments.
        seed: of the random numbers that the model draws.
        hooks: contexts to enter before the model is called, after all that puts the model back has been noted.
        output: takes the result from what the model returns; it may call parts of the model.
    """
    # A cache that one run fills must not serve the next, whose tensors are others.
    with as_found(model, values=True), torch.enable_grad(), substituted(model, tensors), ExitStack() as stack:
        seed_all(seed)
        for hook in hooks:
            stack.enter_context(hook)
        returned = model(*call[0], **call[1])
        return returned if output is None else output(returned)


def seed_all(seed: int) -> None:
    """A model that draws random numbers draws the same ones every time."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # else torch.manual_seed would only write down, slowly, where it was called
        torch.cuda.manual_seed_all(seed)


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, so that dropout and batch statistics do not blur a comparison; then everything as it was.

    The modes are set as they are: a ``train()`` of the model's own may merge or fold its weights.
    """
    with as_found(model, values=True):
        for module in model.modules():
            module.training = False
        yield


def _fresh(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype, copy=True) if dtype is not None and tensor.is_floating_point() else tensor.clone()


def _storage(tensor: Tensor) -> int:
    """Which memory a tensor lies in; 0 if it has none of its own (sparse, quantised or sharded ones)."""
    plain = tensor.layout == torch.strided and type(tensor) in (Tensor, nn.Parameter) and not tensor.is_quantized
    return tensor.untyped_storage()._cdata if plain and tensor.numel() else 0
