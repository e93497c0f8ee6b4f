"""The layer families: one canonical view of a weight, and what the plan needs to know about a module.

A family is everything that sets a layer type apart: how its weight is laid out, which axis of its input holds the
columns, and the distribution its weight has by default. To support a new layer type, add a family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from gxd.sharded import embedded, is_sharded, local, region, summed

LINEAR, LINEAR_TRANSPOSED, CONV, CONV_TRANSPOSE = "linear", "linear_transposed", "conv", "conv_transpose"


@dataclass(frozen=True)
class Layout:
    """How the weight of a layer is laid out.

    Attributes:
        family: one of :data:`LINEAR`, :data:`LINEAR_TRANSPOSED`, :data:`CONV`, :data:`CONV_TRANSPOSE`.
        groups: the number of blocks of a grouped convolution, 1 otherwise.
    """

    family: str
    groups: int = 1

    def canonical(self, tensor: Tensor) -> Tensor:
        """View a weight, or a tensor of its shape, as ``(groups, out / groups, in / groups, *kernel)``.

        The result shares memory with ``tensor``: writing to it writes to the weight.
        """
        blocks = tensor.unflatten(0, (self.groups, -1))
        return blocks.transpose(1, 2) if self.is_transposed else blocks

    def canonical_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of :meth:`canonical` for a weight of this shape."""
        first, second, *kernel = shape
        first //= self.groups
        return (self.groups, *((second, first) if self.is_transposed else (first, second)), *kernel)

    @property
    def is_transposed(self) -> bool:
        """Whether the weight's first axis counts inputs."""
        return self.family in (CONV_TRANSPOSE, LINEAR_TRANSPOSED)

    def axis(self, kind: str) -> int | None:
        """The axis of a weight that counts its ``rows`` or ``columns``; None if it counts them block by block."""
        return self._axes[kind]

    @cached_property
    def _axes(self) -> dict[str, int | None]:
        """Kind -> axis: resets ask for it again and again."""
        found: dict[str, int | None] = {}
        for kind in ("rows", "columns"):
            first = (kind == "rows") != self.is_transposed
            found[kind] = (0 if first else 1) if self.groups == 1 or (first and kind == "rows") else None
        return found

    def row(self, tensor: Tensor, rows: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The canonical view and the index of the given output rows: ``view[index]`` is ``(n, in / groups,
        *kernel)``.
        """
        view = self.canonical(tensor)
        rows = rows.to(tensor.device)
        return view, (rows // view.shape[1], rows % view.shape[1])

    def column(self, tensor: Tensor, columns: Tensor) -> tuple[Tensor, tuple[Tensor | slice, ...]]:
        """The canonical view and the index of the given input columns: ``view[index]`` is ``(n, out / groups,
        *kernel)``.
        """
        view = self.canonical(tensor)
        columns = columns.to(tensor.device)
        return view, (columns // view.shape[2], slice(None), columns % view.shape[2])


def layout_of(module: nn.Module) -> Layout | None:
    """The layout of a layer that gxd can reset, or None."""
    if is_transposed(module):
        return Layout(LINEAR_TRANSPOSED)
    for kind, describe in _FAMILIES.items():
        if isinstance(module, kind):
            return describe(module)
    return None


def is_plain_call(module: nn.Module) -> bool:
    """Whether calling the module applies its weight to its input and does nothing else.

    A subclass with a ``forward`` of its own may do anything before the weight is used.
    """
    return "forward" not in vars(module) and any(type(module).forward is kind.forward for kind in _PLAIN)


def is_transposed(module: nn.Module) -> bool:
    """Whether this is the ``Conv1D`` of Hugging Face's GPT models, known by name so that nothing need be imported."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def default_bound(module: nn.Module, weight: Tensor) -> float | None:
    """The bound of the uniform distribution that ``reset_parameters`` of the layer draws its weight from; None for an
    embedding, which is normal, of whatever scale.
    """
    if isinstance(module, nn.Embedding):
        return None
    if isinstance(module, nn.MultiheadAttention):  # xavier_uniform_
        return math.sqrt(6.0 / (weight.shape[0] + weight.shape[1]))
    return 1.0 / math.sqrt(max(1, math.prod(weight.shape[1:])))  # kaiming_uniform_(a=sqrt(5))


_CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CONV_TRANSPOSE = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_PLAIN: tuple[type[nn.Module], ...] = (nn.Linear, *_CONV, *_CONV_TRANSPOSE)
_FAMILIES: dict[type[nn.Module], Callable[[nn.Module], Layout]] = {
    nn.Linear: lambda module: Layout(LINEAR),
    nn.MultiheadAttention: lambda module: Layout(LINEAR),
    **{kind: lambda module: Layout(CONV, int(module.groups)) for kind in _CONV},  # type: ignore[arg-type]
    **{kind: lambda module: Layout(CONV_TRANSPOSE, int(module.groups)) for kind in _CONV_TRANSPOSE},  # type: ignore[arg-type]
}


CACHED = 2**16  # elements that a CPU keeps at hand between two operations


def _in_cache(weight: Tensor) -> Sequence[Tensor]:
    """A large weight on the CPU in parts along its first axis: the absolute values of all of it would be written to
    memory, and read again. What is traced is left whole, for the compiler fuses the two.
    """
    if weight.device.type != "cpu" or weight.numel() < 2 * CACHED or type(weight) is not Tensor:
        return (weight,)
    return weight.split(max(1, CACHED * len(weight) // weight.numel()))


class AbsoluteSums:
    """The sum of the absolute weights of each unit: of its ``rows`` (incoming) or ``columns`` (outgoing) of a weight.

    Args:
        index: ``(n, k)`` the rows or columns of each of the ``n`` units.
    """

    def __init__(self, layout: Layout, kind: str, index: Tensor) -> None:
        self.layout, self.kind, self.axis, self.index = layout, kind, layout.axis(kind), index
        self.several = index.shape[1] > 1
        self.in_order = not self.several and torch.equal(index[:, 0], torch.arange(len(index)))

    def __call__(self, weight: Tensor) -> Tensor:
        """``(n,)``."""
        sums = self._of_shards(weight) if is_sharded(weight) else self._of_all(weight.detach())
        if self.in_order and len(sums) == len(self.index):
            return sums
        if self.index.device != sums.device:
            self.index = self.index.to(sums.device)
        found = sums[self.index]
        return found.sum(1) if self.several else found.squeeze(1)

    def _of_all(self, weight: Tensor) -> Tensor:
        """The sums of all rows, or all columns."""
        if self.axis is None:
            view = self.layout.canonical(weight)
            mine = 1 if self.kind == "rows" else 2
            return view.abs().sum([d for d in range(1, view.dim()) if d != mine]).flatten()
        others = [d for d in range(weight.dim()) if d != self.axis]
        parts = [part.abs().sum(others) for part in _in_cache(weight)]
        return parts[0] if len(parts) == 1 else torch.cat(parts) if self.axis == 0 else torch.stack(parts).sum(0)

    def _of_shards(self, weight: Tensor) -> Tensor:
        """The same of a weight that processes share out: each sums its shard, and the sums are added."""
        if self.axis is None:
            return summed(self._of_all(embedded(weight)), weight)
        sums = torch.zeros(weight.shape[self.axis], dtype=weight.dtype, device=weight.device)
        sums[region(weight)[self.axis]] = self._of_all(local(weight))
        return summed(sums, weight)


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside ``torch.compile`` and ``DistributedDataParallel``, whose names carry no prefix."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        elif isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        else:
            return model


class NamedTensors(Mapping[str, Tensor]):
    """Parameters and buffers of a model by qualified name, looked up afresh at every access: a model may be given new
    ones.
    """

    def __init__(self, model: nn.Module, names: Iterable[str] | None = None) -> None:
        if names is None:
            named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
            names = [name for name, _ in named]
        self.model = model
        self.places: dict[str, tuple[nn.Module, str]] = {}
        self.links: dict[str, tuple[nn.Module, str, nn.Module]] = {}  # path -> parent, name in it, module
        for name in names:
            path, _, attribute = name.rpartition(".")
            self.places[name] = (model.get_submodule(path), attribute)
            while path and path not in self.links:
                parent, _, child = path.rpartition(".")
                self.links[path] = (model.get_submodule(parent), child, model.get_submodule(path))
                path = parent

    def __getitem__(self, name: str) -> Tensor:
        module, attribute = self.places[name]
        parameters = module._parameters  # `getattr` would look here too, but only after two other places
        tensor: Any = parameters[attribute] if attribute in parameters else getattr(module, attribute)
        return tensor

    def is_frozen(self, name: str) -> bool:
        """Whether this is a parameter that is not trained."""
        module, attribute = self.places[name]
        parameter = module._parameters.get(attribute)
        return parameter is not None and not parameter.requires_grad

    def replaced(self) -> list[str]:
        """The names of modules that are no longer where they were found, and of tensors that are now computed (pruned,
        parametrized): what is written to them has no effect.
        """
        gone = [path for path, (parent, name, module) in self.links.items() if parent._modules.get(name) is not module]
        for name, (module, key) in self.places.items():
            if key not in module._parameters and key not in module._buffers:
                gone.append(name)
        return gone

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def aliases(parameters: Mapping[str, Tensor]) -> dict[int, list[str]]:
    """The id of each parameter -> all names of it, and of others that lie in the same memory: tied weights."""
    by_storage: dict[int, dict[int, tuple[range, list[str]]]] = {}
    for name, parameter in parameters.items():
        here = by_storage.setdefault(parameter.untyped_storage()._cdata, {})
        here.setdefault(id(parameter), (_extent(parameter), []))[1].append(name)
    return {
        key: [name for other, names in here.values() if other is extent or _overlap(extent, other) for name in names]
        for here in by_storage.values()
        for key, (extent, _) in here.items()
    }


def _extent(tensor: Tensor) -> range:
    """Where in its storage a tensor lies."""
    start = tensor.storage_offset()
    last = start + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return range(start, last + 1) if tensor.numel() else range(start, start)


def _overlap(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def state_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """float64 where the model has float64 parameters, else float32: statistics are never kept in half precision."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors.values()) else torch.float32
