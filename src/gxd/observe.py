"""Room one: see the units in the user's own forward pass. Nothing is wrapped, averaged or ranked here.

A *tap* on each consumer replaces the consumer's input by an alias and keeps the alias. Its gradient is the partial
derivative through that consumer alone; the gradients that reach the parameters, and the order they are summed in, are
those of training without taps.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from gxd.directions import Direction
from gxd.errors import ObservationError, ObservationWarning
from gxd.hooks import Begin, End, Hook, Unseen
from gxd.plan import UnitPlan, View

MOST_PASSES = 256  # forward passes that are kept for an observe() that may never come


class Capture:
    """One view in one forward pass: the tensor its consumers read, and an alias for each of them."""

    __slots__ = ("aliases", "loss_gradients", "source", "version")

    def __init__(self, source: Tensor) -> None:
        self.source, self.version = source, source._version
        self.aliases: list[Tensor] = []
        self.loss_gradients: list[Tensor] = []

    def values(self) -> Tensor:
        """What the consumers read, detached."""
        return self.checked().detach()

    def checked(self) -> Tensor:
        """What the consumers read."""
        if self.source._version != self.version:
            raise ObservationError(
                "a tensor that holds hidden units was changed in place after a layer had read it, so their values are "
                "lost: make that operation out of place, or leave the layer before it out of the plan (exclude=...)"
            )
        return self.source

    def loss_gradient(self) -> Tensor | None:
        """The gradient of the loss by the view, through the consumers the loss depends on; None before it arrives."""
        return sum_of(self.loss_gradients) if self.loss_gradients else None


Gradients = Mapping[int, Mapping[int, Tensor]]  # number of the pass -> view -> gradient, of the captured tensor's shape


class Pass(dict[int, Capture]):
    """The captures of one forward pass, by view number.

    Attributes:
        whole: of a call of the model itself, not of its parts.
        examples: how many the model was given, if that is known.
    """

    def __init__(
        self, captures: dict[int, Capture] | None = None, whole: bool = False, examples: int | None = None
    ) -> None:
        super().__init__(captures or {})
        self.whole, self.examples = whole, examples


class Observer:
    """Collects the views of every training forward pass between two optimizer steps.

    Attributes:
        passes: one entry per forward pass since the last :meth:`clear`.
        active: captures only while True; the owner switches it off on steps that are not scored.
        unseen: the hooks on modules that the plan does not know, by name.
        on_pass: called when a forward pass begins, active or not: the owner may use up what it can of the last ones.
    """

    def __init__(self, model: nn.Module, plan: UnitPlan, loss_gradients: bool, on_pass: Callable[[], None]) -> None:
        self.active = True
        self.on_pass = on_pass
        self.loss_gradients = loss_gradients
        self.muted = False
        self.passes: list[Pass] = []
        self.running = False  # inside a call of the model
        self.over = False  # the last pass is complete
        self.told_of_compiler = False  # that the model is compiled, which a warning has said
        self.unseen: dict[str, RemovableHandle] = {}
        self.handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(Begin(self, model), prepend=True, with_kwargs=True),
            model.register_forward_hook(End(self, model)),
        ]
        sites: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        views = [view for group in plan.groups for view in group.views]
        self.folded = any(view.fold != "none" for view in views)  # examples and positions share an axis
        self.batch_dim = plan.batch_dim
        several = [len(group.views) > 1 for group in plan.groups for _ in group.views]
        for number, view in enumerate(views):
            for consumer in view.consumers:
                numbers = sites.setdefault((consumer.site, consumer.ports), [])
                if number not in numbers:
                    numbers.append(number)
        for (site, ports), numbers in sites.items():
            module = model.get_submodule(site)
            if "heads" in ports:
                self.handles.append(module.register_forward_hook(HeadsTap(self, module, tuple(numbers))))
            else:
                # The gradient by a tensor that feeds one view alone is the partial derivative already.
                nested = any(several[number] for number in numbers)
                tap = Tap(self, module, tuple(numbers), ports, nested)
                self.handles.append(module.register_forward_pre_hook(tap, with_kwargs=True))

    def warn_of(self, names: Sequence[str], model: nn.Module) -> None:
        """Warn when one of these modules, which the trace did not see, runs in training."""
        modules = dict(model.named_modules(remove_duplicate=False))
        for name in names:
            if name in modules:
                hook = Unseen(self, modules[name], name)
                self.unseen[name] = modules[name].register_forward_pre_hook(hook, with_kwargs=True)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Observer:
        """For the copy of the model: its hooks, which were copied with it or will be, become those of this copy."""
        copied = memo[id(self)] = object.__new__(type(self))
        for hook in memo.pop(("hooks of", id(self)), ()):
            hook.observer = copied
        # What a pass has captured belongs to the graph of the pass, which is not copied.
        state = {name: value for name, value in vars(self).items() if name not in ("passes", "running", "over")}
        vars(copied).update(copy.deepcopy(state, memo))
        copied.clear()
        return copied

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call of the whole model begins. If the one before did not come to its end, it raised: it does not count."""
        if not self.active:
            return self.on_pass()
        if self.running:
            self.passes.pop()
        self.start(whole=True, examples=batch_size(args, kwargs, self.batch_dim) if self.folded else None)
        self.running = True

    def end(self) -> None:
        self.running, self.over = False, True

    def start(self, whole: bool, examples: int | None = None) -> None:
        self.on_pass()
        if len(self.passes) >= MOST_PASSES:
            self.passes.pop(0)
            warnings.warn(
                f"{MOST_PASSES} training forward passes without observe() or optimizer.step(): the oldest are "
                "forgotten. Run passes that are not trained on under torch.no_grad()",
                ObservationWarning,
                stacklevel=2,
            )
        self.passes.append(Pass(whole=whole, examples=examples))
        self.over = False

    def capture(self, numbers: Sequence[int], source: Tensor, alias: Tensor) -> None:
        """Note that a consumer of these views is about to read ``alias``: an alias of ``source``, or itself."""
        for number in numbers:
            # A part of the model may be called by itself; then a view that is seen again tells that a new pass began.
            capture = self.passes[-1].get(number) if self.passes else None
            if not self.passes or self.over or (capture is not None and capture.source is not source):
                self.start(whole=False)
                capture = None
            if capture is None:
                capture = self.passes[-1][number] = Capture(source)
            elif alias is source:
                continue  # its gradient counts all its consumers already
            capture.aliases.append(alias)
            if self.loss_gradients and alias.requires_grad:
                alias.register_hook(lambda gradient, kept=capture.loss_gradients: self._keep(kept, gradient))

    def _keep(self, kept: list[Tensor], gradient: Tensor) -> None:
        if not self.muted:
            kept.append(gradient.detach())

    def gradients(self, direction: Direction, passes: Sequence[Pass], stacked: bool = False) -> Iterator[Gradients]:
        """The gradients of an output by all captured views, for one cotangent after the other; or, ``stacked``, for all
        at once, with the directions on a first axis.
        """
        captures = [(number, view, c) for number, one in enumerate(passes) for view, c in one.items()]
        aliases = [alias for _, _, c in captures for alias in c.aliases]
        for cotangent in [direction.stacked()] if stacked else direction.cotangents():
            try:
                parts = iter(self._pull_back(direction.output, aliases, cotangent, stacked))
            except RuntimeError:
                for _, _, c in captures:
                    c.values()  # says so if it was changed in place
                raise
            found: dict[int, dict[int, Tensor]] = {}
            for number, view, c in captures:
                gradients = [g for g in islice(parts, len(c.aliases)) if g is not None]
                if gradients:
                    found.setdefault(number, {})[view] = sum_of(gradients)
            yield found

    def _pull_back(
        self, output: Tensor, aliases: Sequence[Tensor], cotangent: Tensor, stacked: bool
    ) -> tuple[Tensor | None, ...]:
        self.muted = True  # these are no gradients of the loss
        try:
            return torch.autograd.grad(
                output, aliases, cotangent, retain_graph=True, allow_unused=True, is_grads_batched=stacked
            )
        except RuntimeError as error:
            if "second time" in str(error) or "freed" in str(error):
                raise ObservationError("observe() after the graph was freed: call it before loss.backward()") from error
            raise
        finally:
            self.muted = False

    def drop_unfinished(self) -> None:
        """Forget a pass whose forward raised."""
        if self.running:
            self.passes.pop()
            self.running = False

    def clear(self) -> None:
        self.passes = []
        self.running = self.over = False

    def close(self) -> None:
        for handle in (*self.handles, *self.unseen.values()):
            handle.remove()
        self.handles.clear()
        self.unseen.clear()
        self.clear()


class Tap(Hook):
    """A consumer is called: it reads an alias of its input from now on, and the alias is kept."""

    def __init__(
        self,
        observer: Observer | None = None,
        module: nn.Module | None = None,
        numbers: tuple[int, ...] = (),
        ports: tuple[str, ...] = ("input",),
        nested: bool = True,
    ) -> None:
        super().__init__(observer, module)
        self.numbers, self.ports, self.nested = numbers, ports, nested

    def act(self, observer: Observer, *call: Any) -> Any:
        args, kwargs = call
        if len(args) == 1 and not kwargs and self.ports == ("input",):  # as most layers are called
            source = args[0]
            alias = self.alias(observer, source)
            return None if alias is source else ((alias,), kwargs)
        return replace_arguments(self.ports, args, kwargs, lambda source: self.alias(observer, source))

    def alias(self, observer: Observer, source: Tensor) -> Tensor:
        # A detached input has no gradient of its own; a leaf in its place gives us one and changes nothing else.
        if source.requires_grad:
            alias = source.view_as(source) if self.nested else source
        else:
            alias = source.detach().requires_grad_()
        observer.capture(self.numbers, source, alias)
        return alias


class HeadsTap(Hook):
    """``nn.MultiheadAttention`` uses the weight of ``out_proj`` without calling it: read its input off the graph."""

    def __init__(
        self, observer: Observer | None = None, module: nn.Module | None = None, numbers: tuple[int, ...] = ()
    ) -> None:
        super().__init__(observer, module)
        self.numbers = numbers

    def act(self, observer: Observer, *call: Any) -> None:
        _, output = call
        source = attention_output(output[0])
        observer.capture(self.numbers, source, source)


def batch_size(args: tuple[Any, ...], kwargs: dict[str, Any], batch_dim: int) -> int | None:
    """How many examples a call of the model has: as when it was traced, the first input with a batch axis tells."""
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.dim() > batch_dim:
            return leaf.shape[batch_dim]
    return None


_POSITION = {"query": 0, "key": 1, "value": 2}


def replace_arguments(
    ports: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], function: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a module call with the given ones replaced; a tensor passed twice stays one tensor."""
    done: dict[int, Tensor] = {}
    arguments: dict[int | str, Any] = dict(enumerate(args))
    arguments.update(kwargs)
    for port in ports:
        if port == "input":  # the first tensor, whatever it is called
            place: int | str = next(key for key, value in arguments.items() if isinstance(value, Tensor))
        else:
            place = _POSITION[port] if _POSITION[port] < len(args) else port
        source = arguments[place]
        if id(source) not in done:
            done[id(source)] = function(source)
        arguments[place] = done[id(source)]
    return tuple(arguments[n] for n in range(len(args))), {key: arguments[key] for key in kwargs}


def attention_output(output: Tensor) -> Tensor:
    """The input of ``out_proj``, ``(tokens, features)``, of the attention module that returned ``output``."""
    node = output.grad_fn
    while node is not None and not node.name().startswith(("AddmmBackward", "MmBackward")):
        node = node.next_functions[0][0] if node.next_functions else None
    if node is None:
        raise ObservationError(
            "the heads of nn.MultiheadAttention cannot be seen inside a compiled or checkpointed "
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
        one_each = self.consecutive and self.k == 1 and self.start == 0
        self.plain = one_each and self.axis == -1 and self.fold == "none" and not self.separate

    def __call__(self, tensor: Tensor, examples: int | None) -> Tensor:
        if self.plain and tensor.dim() == 2 and tensor.shape[1] == self.n:
            return tensor.unsqueeze(1)
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
