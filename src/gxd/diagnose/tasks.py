"""The batches of a probe: taken, checked and kept; and tasks that are new to any network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

TASKS = ("given", "permuted_inputs", "random_labels")
REPEATS = 50
"""How often each batch comes when random labels are to be memorised."""

Batch = tuple[Any, Any]
_PAIRS = "data must be an iterable of batches (x, y)"


def most_batches(task: str, steps: int) -> int:
    """How many batches are used at most."""
    return steps if task != "random_labels" else max(1, steps // REPEATS)


def batches_of(data: Iterable[Any], most: int, device: torch.device) -> list[Batch]:
    """The first batches, checked, on the device of the model."""
    if not isinstance(data, Iterable):
        raise TypeError(f"{_PAIRS}, got {type(data).__name__}")
    with _generators_as_found(data):
        found = list(islice(data, most))
    if not found:
        raise ValueError("data is empty: it has no batch (an iterator that was used up?)")
    batches = []
    for number, batch in enumerate(found):
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            hint = "wrap it: [(x, y)]" if isinstance(batch, Tensor) else "write ((batch, batch['y']) for batch in data)"
            size = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
            raise TypeError(f"{_PAIRS}, but batch {number} is a {type(batch).__name__}{size}; {hint}")
        for tensor in _tensors(batch):
            if not tensor.numel():
                raise ValueError(f"data: batch {number} is empty, it has a tensor of shape {tuple(tensor.shape)}")
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise ValueError(f"data: batch {number} holds a NaN or an infinity; leave such examples out")
        batches.append((batch[0], batch[1]))
    moved: list[Batch] = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().to(device), batches)
    return moved


def made_new(task: str, batches: list[Batch], chance: torch.Generator) -> list[Batch]:
    """The batches of a task, for one seed."""
    if task == "permuted_inputs":
        return _permuted(batches, chance)
    return _shuffled(batches, chance) if task == "random_labels" else batches


def _permuted(batches: list[Batch], chance: torch.Generator) -> list[Batch]:
    """The elements of each example of every floating-point input in one other order."""
    orders: dict[int, Tensor] = {}

    def permute(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dim() < 2:
            return tensor
        flat = tensor.flatten(1)
        size = flat.shape[1]
        if size not in orders:
            orders[size] = torch.randperm(size, generator=chance)
        return flat[:, orders[size].to(flat.device)].view(tensor.shape)

    made = [(pytree.tree_map_only(Tensor, permute, x), y) for x, y in batches]
    if not orders:
        raise ValueError(
            "task='permuted_inputs' needs inputs of floating point, (batch, ...): use task='random_labels', or data "
            "that are new to the network"
        )
    return made


def _shuffled(batches: list[Batch], chance: torch.Generator) -> list[Batch]:
    """The targets in another order, over all examples of all batches."""
    targets = [y for _, y in batches]
    if not all(isinstance(y, Tensor) and y.dim() for y in targets) or len({y.shape[1:] for y in targets}) > 1:
        raise ValueError("task='random_labels' needs targets that are tensors, (batch, ...), of one shape")
    every = torch.cat(targets)
    every = every[torch.randperm(len(every), generator=chance).to(every.device)]
    return [(x, y) for (x, _), y in zip(batches, every.split([len(y) for y in targets]), strict=True)]


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]


@contextmanager
def _generators_as_found(data: Any) -> Iterator[None]:
    """The generators of a DataLoader and of its sampler are given back their state."""
    owners = (data, getattr(data, "sampler", None))
    generators = [g for g in (getattr(o, "generator", None) for o in owners) if isinstance(g, torch.Generator)]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
