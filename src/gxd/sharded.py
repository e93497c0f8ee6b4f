"""Parameters that processes share out among themselves: DTensors, as FSDP2 (``fully_shard``) makes them.

Each process holds a part, its shard. Whoever reads or writes a parameter by slices counts in the whole tensor, and asks
here which of that lies in the shard.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gxd.errors import PlanError

_PLAIN = (Tensor, nn.Parameter)  # asked for first: to miss an attribute of a tensor takes a microsecond


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "device_mesh")


def local(tensor: Any) -> Any:
    """This process's shard, which is the same memory; a plain tensor is all here."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor


def region(tensor: Any) -> tuple[slice, ...]:
    """Where in the whole tensor this process's shard lies, axis by axis."""
    where = [slice(0, size) for size in tensor.shape]
    for number, placement in enumerate(tensor.placements):
        if placement.is_shard():
            size, mesh = tensor.shape[placement.dim], tensor.device_mesh
            each = -(-size // mesh.size(number))  # the last ones may have fewer, or none
            start = min(size, each * mesh.get_local_rank(number))
            where[placement.dim] = slice(start, min(size, start + each))
    return tuple(where)


def whole(tensor: Any) -> Any:
    """All of a tensor, on every process, which must all ask for it."""
    return tensor.detach().full_tensor() if is_sharded(tensor) else tensor


def part_of(value: Any, like: Any) -> Any:
    """What belongs into this process's shard of ``like``, of a whole tensor of its shape; a number is for all."""
    if not isinstance(value, Tensor):
        return value
    return local(value) if is_sharded(value) else value[region(like)] if is_sharded(like) else value


def shared_out(value: Tensor, like: Any) -> Any:
    """A copy of a whole tensor, sharded as ``like`` is, and of its type."""
    from torch.distributed.tensor import DTensor

    part = part_of(value, like).to(local(like), copy=True)
    return DTensor.from_local(part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())


def summed(value: Tensor, like: Any) -> Tensor:
    """The sum over the processes that share out a tensor."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    placements = [Partial() if placement.is_shard() else Replicate() for placement in like.placements]
    total: Tensor = DTensor.from_local(value, like.device_mesh, placements, run_check=False).full_tensor()
    return total


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules that ``fully_shard`` was applied to."""
    if not dist.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(modules: list[Any]) -> None:
    """See to it that the parameters of these modules are the shards, which are what the optimizer trains.

    Between a forward and its backward pass, and after a forward without one, a module may show whole copies.
    """
    for module in modules:
        module.reshard()


def refuse_shards(model: nn.Module, what: str) -> None:
    """Raise PlanError if parameters of a model are shared out, for a function that reads all of it."""
    if sharded_modules(model) or any(map(is_sharded, model.parameters())):
        raise PlanError(
            f"{what} needs the whole model, and its parameters are sharded (DTensor): call it before fully_shard. A "
            "plan that was made before, plan = gxd.find_units(model, x), holds for the sharded model"
        )


@torch.no_grad()
def embedded(tensor: Any) -> Tensor:
    """A tensor of the whole shape that is 0 outside of this process's shard."""
    found = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    found[region(tensor)] = local(tensor)
    return found
