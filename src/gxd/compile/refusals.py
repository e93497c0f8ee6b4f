"""What a compiled step would get wrong, and refuses: the step is then made eagerly, and the reason is said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gxd.compile.recipe import Recipe

aten = torch.ops.aten


def refuse_own_tensors(recipe: Recipe, outside: Sequence[Tensor]) -> None:
    """A parameter that the step reads other than through the model would have no gradient there."""
    memory = {t.untyped_storage().data_ptr(): n for n, t in enumerate(recipe.tensors()) if t.numel()}
    for tensor in outside:
        number = memory.get(tensor.untyped_storage().data_ptr())
        if number is not None:
            raise _elsewhere(recipe.name(number))


def refuse_other_leaves(recipe: Recipe, loss: Tensor, given: Sequence[Tensor]) -> None:
    """What the loss has a gradient for, and is not the model's, would not get it: a temperature that has another
    optimizer, or a batch. What is made within the step is fake, and nobody sees its gradient: the input of a penalty.
    """
    known = set(map(id, given))  # what comes from outside; the leaves made of the parameters are not among it
    for tensor in _leaves_of(loss):
        if id(tensor) in known or not isinstance(tensor, FakeTensor):
            name = recipe.name_of(tensor)
            if name is not None:
                raise _elsewhere(name)
            raise ValueError(
                f"the loss depends on a tensor of shape {tuple(tensor.shape)} that requires a gradient and is not the "
                "model's, and a compiled step would give it none; make it a part of the model, or detach it"
            )


def refuse_other_buffers(
    recipe: Recipe, before: Sequence[Tensor], now: Mapping[str, Any], batch: Sequence[Tensor]
) -> None:
    """What ``forward`` puts in the place of a buffer is copied there: it has to be like it, and its own.

    If it was another's as well (the batch, another buffer), a later change of one would be a change of both.
    """
    new = {number: now[name] for name, number in recipe.names.items() if now[name] is not before[number]}
    owners = [*batch, *(tensor for number, tensor in enumerate(before) if number not in new)]
    taken = {tensor.untyped_storage()._cdata for tensor in owners}
    for number, tensor in new.items():
        names = [name for name, known in recipe.names.items() if known == number]
        old = before[number]
        alike = (
            isinstance(tensor, Tensor)
            and (tensor.shape, tensor.dtype, tensor.device) == (old.shape, old.dtype, old.device)
            and not tensor.requires_grad
            and not old.requires_grad
        )
        if not alike or tensor.untyped_storage()._cdata in taken or any(now[name] is not tensor for name in names):
            raise ValueError(
                f"the forward pass puts another tensor in the place of {names[0]!r}, one of another shape or kind, or "
                "that is held elsewhere, too; write to it in place (copy_) instead"
            )
        taken.add(tensor.untyped_storage()._cdata)


def _elsewhere(name: str) -> ValueError:
    return ValueError(
        f"{name!r} is read other than through the model; let the loss or the forward pass take it from the module that "
        "has it"
    )


def _leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """The tensors that a backward pass would accumulate gradients in."""
    known: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in known:
            known.add(node)
            if node.name() == "torch::autograd::AccumulateGrad":
                yield node.variable
            waiting += [before for before, _ in node.next_functions]


@contextmanager
def no_recomputation() -> Iterator[None]:
    """Refuse activation checkpointing: in a trace, what is computed again would draw other random numbers."""
    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    enter = hooks.__enter__

    def refuse(_: Any) -> None:
        raise ValueError(
            "the forward pass uses activation checkpointing (or other hooks on saved tensors), which cannot be "
            "compiled; leave it out, or make the step without compiled_step"
        )

    hooks.__enter__ = refuse
    try:
        yield
    finally:
        hooks.__enter__ = enter


class NoReading(TorchDispatchMode):
    """Refuse to read numbers from tensors that are no part of the trace: they would be constants of it.

    Torch reads them by itself where a tensor is given for a number (``x[:, n]``, ``F.leaky_relu(x, slope)``).
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _READS and not isinstance(args[0], FakeTensor):
            raise _reading(str(function))
        return function(*args, **(kwargs or {}))


class NoConverting(TorchFunctionMode):
    """The same of whole arrays, which are read without an operation of torch's."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _CONVERSIONS and not isinstance(args[0], FakeTensor):
            raise _reading(function.__name__)
        return function(*args, **(kwargs or {}))


def _reading(how: str) -> ValueError:
    return ValueError(
        f"the step reads a number from a tensor ({how}), which a compiled step would do only once; compute with the "
        "tensor itself, or keep the number in a variable or an attribute"
    )


_READS = {aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default}
_CONVERSIONS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
