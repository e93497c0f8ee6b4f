"""What the forward passes between two optimizer steps have shown, and the gradients by it.

A hook on each consumer replaces the consumer's input by an alias and keeps the alias. Its gradient is the partial
derivative through that consumer alone; the gradients that reach the parameters, and the order they are summed in, are
those of training without hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from gxd.errors import ObservationError, ObservationWarning, warn
from gxd.observe.backward import Backwards
from gxd.observe.consumers import Site, register, replace_heads, replace_input, sites_of
from gxd.observe.direction import Direction
from gxd.observe.hooks import Begin, End, Hook, Owner, Unseen
from gxd.observe.reading import sum_of
from gxd.plan.units import UnitPlan

MOST_PASSES = 256  # forward passes that are kept for an observe() that may never come


class Capture:
    """One view in one forward pass: the tensor its consumers read, an alias for each of them, and the gradients of the
    loss by these as far as they have arrived.
    """

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


class Observer(Owner):
    """Collects the views of every training forward pass between two optimizer steps.

    Attributes:
        passes: one entry per forward pass since the last :meth:`clear`.
        active: captures only while True; the owner switches it off on steps that are not scored.
        backwards: tells which backward passes count; None: the gradients of the loss are not kept.
        unseen: the hooks on modules that the plan does not know, by name.
        on_pass: called when a forward pass begins, active or not: the owner may use up what it can of the last ones.
    """

    fleeting = ("passes", "running", "over")

    def __init__(
        self, model: nn.Module, plan: UnitPlan, backwards: Backwards | None, on_pass: Callable[[], None]
    ) -> None:
        self.active = True
        self.on_pass = on_pass
        self.backwards = backwards
        self.passes: list[Pass] = []
        self.running = False  # inside a call of the model
        self.over = False  # the last pass is complete
        self.unseen: dict[str, RemovableHandle] = {}
        begin, end = Begin(self, model), End(self, model)
        begin.recomputed = end.recomputed = backwards is not None
        self.handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(begin, prepend=True, with_kwargs=True),
            model.register_forward_hook(end),
        ]
        self.folded = any(view.fold != "none" for view in plan.views)  # examples and positions share an axis
        self.batch_dim = plan.batch_dim
        several = [len(group.views) > 1 for group in plan.groups for _ in group.views]
        for site in sites_of(plan.views):
            module = model.get_submodule(site.module)
            # The gradient by a tensor that feeds one view alone is the partial derivative already.
            nested = any(several[number] for number in site.views)
            kind = Heads if site.inside_attention else Input
            self.handles.append(register(model, site, kind(self, module, site, nested)))

    def warn_of(self, names: Sequence[str], model: nn.Module) -> None:
        """Warn when one of these modules, which the trace did not see, runs in training."""
        modules = dict(model.named_modules(remove_duplicate=False))
        for name in names:
            if name in modules:
                hook = Unseen(self, modules[name], name)
                self.unseen[name] = modules[name].register_forward_pre_hook(hook, with_kwargs=True)

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
        if torch._C._current_graph_task_id() == -1:  # in a backward pass, the gradients are yet to come
            self.on_pass()
        if len(self.passes) >= MOST_PASSES:
            self.passes.pop(0)
            warn(
                f"{MOST_PASSES} training forward passes without observe() or optimizer.step(): the oldest are "
                "forgotten. Run passes that are not trained on under torch.no_grad()",
                ObservationWarning,
            )
        self.passes.append(Pass(whole=whole, examples=examples))
        self.over = False

    def capture(self, numbers: Sequence[int], source: Tensor, alias: Tensor) -> None:
        """Note that a consumer of these views is about to read ``alias``: an alias of ``source``, or itself."""
        source = getattr(source, "_gxd_source", source)
        within = torch._C._current_graph_task_id()  # of a backward pass that recomputes a segment, or -1
        for number in numbers:
            # A part of the model may be called by itself; then a view that is seen again tells that a new pass began.
            # What is recomputed belongs to the pass before.
            there = self.passes and (within != -1 or not self.over)
            capture = self.passes[-1].get(number) if there else None
            if not there or (capture is not None and capture.source is not source):
                self.start(whole=False)
                capture = None
            if capture is None:
                capture = self.passes[-1][number] = Capture(source)
            elif alias is source:
                continue  # its gradient counts all its consumers already
            capture.aliases.append(alias)
            if self.backwards is not None and alias.requires_grad:
                self.backwards.keep(alias, number, capture.loss_gradients, within)

    def void(self) -> None:
        """The backward passes so far do not count."""
        for one in self.passes:
            for capture in one.values():
                capture.loss_gradients.clear()

    def gradients(
        self, direction: Direction, passes: Sequence[Pass], stacked: bool = False, graph: bool = False
    ) -> Iterator[Gradients]:
        """The gradients of an output by all captured views, for one cotangent after the other; or, ``stacked``, for all
        at once, with the directions on a first axis. ``graph``: so that they can be differentiated again.
        """
        if len(passes) == 1 and not direction.several and all(len(c.aliases) == 1 for c in passes[0].values()):
            (cotangent,) = direction.cotangents()
            only = [c.aliases[0] for c in passes[0].values()]
            parts = self._pull_back(passes, direction.output, only, cotangent, graph=graph)
            found = {view: g for view, g in zip(passes[0], parts, strict=True) if g is not None}
            yield {0: found} if found else {}  # as in most training loops
            return
        captures = [(number, view, c) for number, one in enumerate(passes) for view, c in one.items()]
        aliases = [alias for _, _, c in captures for alias in c.aliases]
        for cotangent in [direction.stacked()] if stacked else direction.cotangents():
            rest = iter(self._pull_back(passes, direction.output, aliases, cotangent, stacked, graph))
            pulled: dict[int, dict[int, Tensor]] = {}
            for number, view, c in captures:
                gradients = [g for g in islice(rest, len(c.aliases)) if g is not None]
                if gradients:
                    pulled.setdefault(number, {})[view] = sum_of(gradients)
            yield pulled

    def _pull_back(
        self,
        passes: Sequence[Pass],
        output: Tensor,
        aliases: Sequence[Tensor],
        cotangent: Tensor,
        stacked: bool = False,
        graph: bool = False,
    ) -> tuple[Tensor | None, ...]:
        try:
            return torch.autograd.grad(
                output,
                aliases,
                cotangent,
                retain_graph=True,
                create_graph=graph,
                allow_unused=True,
                is_grads_batched=stacked,
            )
        except RuntimeError as error:
            if "second time" in str(error) or "freed" in str(error):
                raise ObservationError("observe() after the graph was freed: call it before loss.backward()") from error
            for capture in (c for one in passes for c in one.values()):
                capture.values()  # says so if it was changed in place
            raise

    def drop_unfinished(self) -> None:
        """Forget a pass whose forward raised."""
        if self.running:
            self.passes.pop()
            self.running = False

    def clear(self) -> None:
        self.passes = []
        self.running = self.over = False
        if self.backwards is not None:
            self.backwards.stepped()
            self.backwards.refused = False

    def close(self) -> None:
        for handle in (*self.handles, *self.unseen.values()):
            handle.remove()
        self.handles.clear()
        self.unseen.clear()
        self.clear()


class Input(Hook):
    """A consumer is called: it reads an alias of its input from now on, and the alias is kept."""

    def __init__(self, observer: Observer, module: nn.Module, site: Site, nested: bool) -> None:
        super().__init__(observer, module)
        self.site, self.nested = site, nested
        self.recomputed = observer.backwards is not None  # else it is observed before there is a backward pass
        self.plain = site.ports == ("input",)

    def act(self, observer: Observer, *call: Any) -> Any:
        args, kwargs = call
        if self.plain and len(args) == 1 and not kwargs:  # as most layers are called
            source = args[0]
            alias = self.alias(observer, source)
            return None if alias is source else ((alias,), kwargs)
        return replace_input(self.site.ports, args, kwargs, lambda source: self.alias(observer, source))

    def alias(self, observer: Observer, source: Tensor) -> Tensor:
        # A detached input has no gradient of its own; a leaf in its place gives us one and changes nothing else.
        if source.requires_grad:
            alias = source.view_as(source) if self.nested else source
        else:
            alias = source.detach().requires_grad_()
        if alias is not source:  # another observer would take the aliases of two consumers for two tensors
            alias._gxd_source = getattr(source, "_gxd_source", source)  # type: ignore[attr-defined]
        observer.capture(self.site.views, source, alias)
        return alias


class Heads(Input):
    """The same inside ``nn.MultiheadAttention``, whose output projection is not called."""

    def act(self, observer: Observer, *call: Any) -> Any:
        _, output = call
        return replace_heads(self.module, output, lambda source: self.alias(observer, source))

    def alias(self, observer: Observer, source: Tensor) -> Tensor:
        observer.capture(self.site.views, source, source)
        return source


def batch_size(args: tuple[Any, ...], kwargs: dict[str, Any], batch_dim: int) -> int | None:
    """How many examples a call of the model has: as when it was traced, the first input with a batch axis tells."""
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.dim() > batch_dim:
            return leaf.shape[batch_dim]
    return None
