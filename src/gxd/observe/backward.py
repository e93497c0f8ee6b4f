"""Which backward passes a step learns from: those whose gradients the optimizer will use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gxd.sharded import is_sharded


class Stamp(NamedTuple):
    """What a weight's ``grad`` was when a backward pass began: a tensor at a version, or None (-1)."""

    weight: str
    gradient: weakref.ref[Tensor] | None
    version: int


class Backwards:
    """Tells the backward passes that train the units from all others that run through them.

    An actor's loss runs through the critic, a gradient penalty through the discriminator, and a batch that a gradient
    scaler skips through everything. The optimizer uses none of these gradients. Two rules find them:

    1. A backward pass counts if it ends in the ``grad`` of the units' weights. One by ``torch.autograd.grad`` does not.
    2. What earlier passes have shown is void once ``grad`` has been zeroed, or set to None, before the step.

    FSDP2 puts other tensors into the graph than the sharded parameters that are seen here, so with it every backward
    pass counts.

    Args:
        tensors: parameters by name.
        weights: for each view, the names of the weights that its units are made of and read by.
        void: called when what earlier backward passes of this step have shown does not count.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], weights: Sequence[Sequence[str]], void: Callable[[], None]
    ) -> None:
        self.tensors, self.weights, self.void = tensors, weights, void
        self.refused = False  # whether a backward pass of this step did not count
        self._told: bool | None = None
        self._sharded = any(is_sharded(tensors[name]) for names in weights for name in names)
        self._stamps: list[Stamp] = []
        self._running, self._counts = -1, False
        self._nodes: dict[str, Any] = {}  # of the graph, by weight: where a gradient is added to `grad`

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_nodes": {}}  # nodes cannot be copied

    def keep(self, tensor: Tensor, view: int, kept: list[Tensor]) -> None:
        """Collect the gradients that backward passes bring to a view, in a list: those that count."""

        def arrives(gradient: Tensor) -> None:  # for each view in each backward pass, so that every call counts
            known = torch._C._current_graph_task_id() == self._running and self._told is None
            if self._counts if known else self._new_counts(view):
                kept.append(gradient.detach() if gradient.requires_grad else gradient)

        tensor.register_hook(arrives)

    def _new_counts(self, view: int) -> bool:
        """Whether the gradient counts that a backward pass has just brought to a view, its first."""
        if self._told is not None or self._sharded:
            return self._told is not False
        name = next((name for name in self.weights[view] if self.tensors[name].requires_grad), None)
        if name is None:  # frozen, as a critic is for its actor's loss
            return False
        weight = self.tensors[name]
        self._running, self._counts = torch._C._current_graph_task_id(), self._accumulates(name, weight)
        self.refused |= not self._counts
        if self._counts:
            self._check()
            gradient = weight.grad
            stamp = (None, -1) if gradient is None else (weakref.ref(gradient), gradient._version)
            self._stamps.append(Stamp(name, *stamp))
        return self._counts

    def stepped(self) -> None:
        """An optimizer has used the gradients so far."""
        self._stamps, self._running = [], -1

    @contextmanager
    def telling(self, counts: bool) -> Iterator[None]:
        """Within this context backward passes count or do not: a trace takes all gradients by ``autograd.grad``, and
        knows which are those of the loss.
        """
        before, self._told = self._told, counts
        try:
            yield
        finally:
            self._told = before

    def _check(self) -> None:
        """Void what came before, if it did not stay in the gradients."""
        if not all(map(self._holds, self._stamps)):
            self._stamps = []
            self.void()

    def _holds(self, stamp: Stamp) -> bool:
        gradient = self.tensors[stamp.weight].grad
        if gradient is None or (stamp.gradient is not None and stamp.gradient() is not gradient):
            return False
        # A backward pass adds to it in place, once. Whatever else has written to it may have zeroed it.
        return gradient._version <= stamp.version + 1 or bool(gradient.any())

    def _accumulates(self, name: str, weight: Tensor) -> bool:
        """Whether the running backward pass ends in ``weight.grad``, as that of ``loss.backward()`` does."""
        known = self._nodes.get(name)
        if known is not None and known.variable is weight and _is_executed(known):
            return True
        # To find the node takes a while. It may be another one by now, if the weight has changed its type or device.
        self._nodes[name] = node = torch.autograd.graph.get_gradient_edge(weight).node
        return _is_executed(node)


def _is_executed(node: Any) -> bool:
    """Whether the running backward pass comes to a node."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad returns the gradient by this weight
        return False
