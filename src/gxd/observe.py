"""Room one: see the units in the user's own forward pass. Nothing is wrapped, averaged or ranked here.

A *tap* on each consumer replaces the consumer's input by an alias and keeps the alias. Its gradient is the partial
derivative through that consumer alone; the gradients that reach the parameters, and the order they are summed in, are
those of training without taps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gxd.errors import ObservationError
from gxd.plan import UnitPlan, View


@dataclass(eq=False)
class Capture:
    """One view in one forward pass: the tensor its consumers read, and an alias for each of them."""

    source: Tensor
    aliases: list[Tensor] = field(default_factory=list)
    loss_gradients: list[Tensor] = field(default_factory=list)

    def loss_gradient(self) -> Tensor | None:
        """The gradient of the loss by the view, once every consumer's part has arrived."""
        if not self.loss_gradients or len(self.loss_gradients) < len(self.aliases):
            return None
        return sum_of(self.loss_gradients)


Pass = dict[int, Capture]  # view number -> capture


class Observer:
    """Collects the views of every training forward pass between two optimizer steps.

    Attributes:
        passes: one entry per forward pass since the last :meth:`clear`.
        active: captures only while True; the owner switches it off on steps that are not scored.
        on_pass: called when a forward pass is over and another one begins, so that the owner may use up what it can.
    """

    def __init__(self, model: nn.Module, plan: UnitPlan, loss_gradients: bool, on_pass: Callable[[], None]) -> None:
        self.active = True
        self.on_pass = on_pass
        self.loss_gradients = loss_gradients
        self.muted = False
        self.passes: list[Pass] = []
        self.handles: list[RemovableHandle] = []
        sites: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        views = [view for group in plan.groups for view in group.views]
        for number, view in enumerate(views):
            for consumer in view.consumers:
                numbers = sites.setdefault((consumer.site, consumer.ports), [])
                if number not in numbers:
                    numbers.append(number)
        for (site, ports), numbers in sites.items():
            module = model.get_submodule(site)
            tap = Tap(self, module, tuple(numbers), ports)
            if "heads" in ports:
                self.handles.append(module.register_forward_hook(tap.after))
            else:
                self.handles.append(module.register_forward_pre_hook(tap, with_kwargs=True))

    def capture(self, numbers: Sequence[int], source: Tensor, alias: Tensor) -> None:
        """Note that the consumers of these views are about to read ``alias``, an alias of ``source``."""
        for number in numbers:
            current = self.passes[-1] if self.passes else None
            if current is None or (number in current and current[number].source is not source):
                if current is not None:
                    self.on_pass()
                current = {}
                self.passes.append(current)
            capture = current.setdefault(number, Capture(source))
            capture.aliases.append(alias)
            if self.loss_gradients and alias.requires_grad:
                alias.register_hook(lambda gradient, kept=capture.loss_gradients: self._keep(kept, gradient))

    def _keep(self, kept: list[Tensor], gradient: Tensor) -> None:
        if not self.muted:
            kept.append(gradient.detach())

    def clear(self) -> None:
        self.passes = []

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.clear()


class Tap:
    """The hook on one consumer. A copy of it (a deep copy of the model, a pickle) is inert: it belongs to another
    model.
    """

    def __init__(
        self,
        observer: Observer | None = None,
        module: nn.Module | None = None,
        numbers: tuple[int, ...] = (),
        ports: tuple[str, ...] = ("input",),
    ) -> None:
        self.observer, self.module, self.numbers, self.ports = observer, module, numbers, ports
        self.after = AttentionTap(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tap:
        return Tap()

    def __reduce__(self) -> tuple[Any, ...]:
        return (Tap, ())

    def sees(self, module: nn.Module) -> bool:
        """Only training passes of the module itself count: not evaluation, not acting, not recomputation in a
        backward pass.
        """
        return (
            self.observer is not None
            and self.observer.active
            and module is self.module
            and module.training
            and torch.is_grad_enabled()
            and torch._C._current_graph_task_id() == -1
        )

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (
            torch.compiler.is_compiling()
        ):  # traced: by export, which must not see us, or by dynamo, which must stop here
            return None if torch.compiler.is_exporting() else _outside_the_graph(self, module, args, kwargs)
        return self.tap(module, args, kwargs)

    def tap(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.sees(module):
            return None
        return replace_arguments(self.ports, args, kwargs, self.alias)

    def alias(self, source: Tensor) -> Tensor:
        # A detached input has no gradient of its own; a leaf in its place gives us one and changes nothing else.
        alias = source.view_as(source) if source.requires_grad else source.detach().requires_grad_()
        self.observer.capture(self.numbers, source, alias)  # type: ignore[union-attr]
        return alias


@torch.compiler.disable
def _outside_the_graph(tap: Tap, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return tap.tap(module, args, kwargs)


_POSITION = {"input": 0, "query": 0, "key": 1, "value": 2}


def replace_arguments(
    ports: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], function: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a module call with the given ones replaced; a tensor passed twice stays one tensor."""
    done: dict[int, Tensor] = {}
    positional, named = list(args), dict(kwargs)
    for port in ports:
        place = _POSITION[port]
        source = positional[place] if place < len(positional) else named[port]
        if id(source) not in done:
            done[id(source)] = function(source)
        if place < len(positional):
            positional[place] = done[id(source)]
        else:
            named[port] = done[id(source)]
    return tuple(positional), named


class AttentionTap:
    """``nn.MultiheadAttention`` uses the weight of ``out_proj`` without calling it: read its input off the autograd
    graph.
    """

    def __init__(self, tap: Tap) -> None:
        self.tap = tap

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionTap:
        return AttentionTap(Tap())

    def __reduce__(self) -> tuple[Any, ...]:
        return (_inert_attention_tap, ())

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling():
            if not torch.compiler.is_exporting():
                _read_outside_the_graph(self, module, output)
            return
        self.read(module, output)

    def read(self, module: nn.Module, output: Any) -> None:
        if self.tap.sees(module):
            source = attention_output(module, output[0])
            self.tap.observer.capture(self.tap.numbers, source, source)  # type: ignore[union-attr]


@torch.compiler.disable
def _read_outside_the_graph(tap: AttentionTap, module: nn.Module, output: Any) -> None:
    tap.read(module, output)


def _inert_attention_tap() -> AttentionTap:
    return AttentionTap(Tap())


def attention_output(module: nn.Module, output: Tensor) -> Tensor:
    """The input of ``out_proj``, ``(tokens, features)``, of the attention module that returned ``output``."""
    node = output.grad_fn
    while node is not None and not node.name().startswith(("AddmmBackward", "MmBackward")):
        node = node.next_functions[0][0] if node.next_functions else None
    if node is None:
        raise ObservationError(
            f"the heads of {type(module).__name__} cannot be seen inside a compiled or checkpointed "
            "region: leave them out with "
            "exclude='...', or use a module that calls torch.nn.functional.scaled_dot_product_attention "
            "and then a Linear"
        )
    return node._saved_mat1 if node.name().startswith("Addmm") else node._saved_self  # type: ignore[attr-defined]


class Reader:
    """Turns the input of a consumer into ``(examples, positions, units)``."""

    def __init__(self, view: View, positions: str) -> None:
        self.axis, self.batch_axis, self.fold = view.axis, view.batch_axis, view.fold
        self.separate = positions == "abs"
        self.n, self.k = view.columns.shape
        consecutive, tiled = view.columns.flatten(), view.columns.t().flatten()
        self.start = int(consecutive.min())
        straight = torch.arange(self.start, self.start + self.n * self.k)
        self.consecutive = torch.equal(consecutive, straight)
        self.index = None if self.consecutive or torch.equal(tiled, straight) else tiled

    def __call__(self, tensor: Tensor, examples: int | None) -> Tensor:
        x = tensor.movedim(self.axis, -1) if self.axis != -1 else tensor
        if self.index is not None:
            self.index = self.index.to(x.device)
            x = x.index_select(-1, self.index)
        elif x.shape[-1] != self.n * self.k:
            x = x.narrow(-1, self.start, self.n * self.k)
        if self.k > 1:
            x = x.unflatten(-1, (self.n, self.k)).mT if self.consecutive else x.unflatten(-1, (self.k, self.n))
        if x.dim() > 2 or self.k > 1:
            x = self._examples_first(x, examples)
        elif x.dim() == 1:  # an unbatched vector
            x = x.unsqueeze(0)
        elif self.fold != "none":
            x = self._examples_first(x, examples)
        x = x.flatten(1, -2) if x.dim() > 2 else x.unsqueeze(1)
        return x.flatten(0, 1).unsqueeze(1) if self.separate else x

    def _examples_first(self, x: Tensor, examples: int | None) -> Tensor:
        axis = min(self.batch_axis, x.dim() - 2)
        rows = x.shape[axis]
        if self.fold != "none" and examples and rows % examples == 0:
            shape = (examples, rows // examples) if self.fold == "major" else (rows // examples, examples)
            x = x.unflatten(axis, shape)
            axis += self.fold == "minor"
        return x.movedim(axis, 0) if axis else x


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of one or more tensors of the same shape."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total
