"""The processes that train one model together: sums over them, and one decision for all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from gxd.checkpoint import mapped
from gxd.plan.units import UnitPlan
from gxd.sharded import is_sharded


class Processes:
    """The processes of a group, or just this one.

    Args:
        group: a process group; None for the default one, if ``torch.distributed`` is initialised; False for none.
    """

    def __init__(self, group: Any = None) -> None:
        # The default group is asked for when it is needed, and not kept: an attachment may outlive it, as a part of a
        # cycle, and a group of gloo that is freed only when the interpreter ends aborts the process.
        self._own: Any = group or None
        together = group is not False and dist.is_available() and dist.is_initialized()
        self.several = together and dist.get_world_size(self._own) > 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Processes:
        return self  # a copy of what they train is trained by the same ones

    @property
    def group(self) -> Any:
        """The process group; None: this process alone."""
        return (self._own or dist.group.WORLD) if self.several else None

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group) if self.several else 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the processes, in place."""
        if self.several:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def agree(self, tensor: Tensor) -> Tensor:
        """The first process's tensor, in place."""
        if self.several:
            dist.broadcast(tensor, src=dist.get_global_rank(self.group, 0), group=self.group)
        return tensor

    def agreed(self, state: Any) -> Any:
        """The first process's state: its tensors, copied, and the plain values; see :mod:`gxd.checkpoint`. What they
        share out is the same to all of them.
        """
        if not self.several:
            return state
        plain: list[Any] = []
        mapped(state, lambda tensor: tensor, plain.append)
        if plain:
            dist.broadcast_object_list(plain, src=dist.get_global_rank(self.group, 0), group=self.group)
        rest = iter(plain)
        copied = lambda tensor: tensor.clone(memory_format=torch.contiguous_format)  # noqa: E731
        agreed = lambda tensor: tensor if is_sharded(tensor) else self.agree(copied(tensor))  # noqa: E731
        return mapped(state, agreed, lambda _: next(rest))

    def agreed_inits(self, plan: UnitPlan, device: torch.device) -> UnitPlan:
        """Fresh weights must be the same everywhere, also if the processes started from different weights."""
        if not self.several:
            return plan
        kinds = ["uniform", "normal", "function"]
        inits = [[kinds.index(str(kind)), scale] for group in plan.inits() for kind, scale in group]
        agreed = self.agree(torch.tensor(inits, dtype=torch.float64, device=device))
        pairs = iter([(kinds[int(kind)], scale) for kind, scale in agreed.tolist()])
        return plan.with_inits([[next(pairs) for _ in group.producers] for group in plan.groups])
