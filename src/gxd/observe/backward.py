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

    Reentrant checkpointing runs backward passes inside a backward pass. They are parts of it, and while it lasts, a
    ``grad`` that is still None has not been set to None.

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
        self._whole = -1  # the backward pass that all others run in
        self._parts: dict[int, bool] = {}  # the backward passes in it, and itself, by number: whether they count
        self._nodes: dict[str, Any] = {}  # of the graph, by weight: where a gradient is added to `grad`

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_nodes": {}}  # nodes cannot be copied

    def keep(self, tensor: Tensor, view: int, kept: list[Tensor], within: int = -1) -> None:
        """Collect the gradients that backward passes bring to a view, in a list: those that count.

        Args:
            within: the backward pass that has made the tensor, or -1.
        """

        def arrives(gradient: Tensor) -> None:  # for each view in each backward pass, so that every call counts
            known = torch._C._current_graph_task_id() == self._running and self._told is None
            if self._counts if known else self._new_counts(view, within):
                kept.append(gradient.detach() if gradient.requires_grad else gradient)

        tensor.register_hook(arrives)

    def _new_counts(self, view: int, within: int) -> bool:
        """Whether the gradient counts that a backward pass has just brought to a view: its first, or the first since
        another one ran inside it.
        """
        if self._told is not None or self._sharded:
            return self._told is not False
        names = [name for name in self.weights[view] if self.tensors[name].requires_grad]
        if not names:  # frozen, as a critic is for its actor's loss
            return False
        self._running = task = torch._C._current_graph_task_id()
        if task in self._parts:
            self._counts = self._parts[task]
            return self._counts
        whole = self._whole if within in self._parts else task if within == -1 else within
        begins = whole != self._whole
        if begins:
            self._whole, self._parts = whole, {}
        # One is enough: a checkpointed segment has its weights in a backward pass of its own.
        name = next((name for name in names if self._accumulates(name, self.tensors[name])), None)
        self._counts = self._parts[task] = name is not None
        self.refused |= not self._counts
        if name is not None:
            if begins:
                self._check()
            gradient = self.tensors[name].grad
            stamp = (None, -1) if gradient is None else (weakref.ref(gradient), gradient._version)
            self._stamps.append(Stamp(name, *stamp))
        return self._counts

    def stepped(self) -> None:
        """An optimizer has used the gradients so far."""
        self._stamps, self._running, self._whole, self._parts = [], -1, -1, {}

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
