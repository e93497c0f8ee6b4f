"""A training step, traced and compiled for batches of one shape.

The step is run once on fake tensors with the rooms' own code, and every operation is written down below autograd. What
comes out is a flat graph without hooks, modules and autograd, which the compiler may fuse as it likes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from gxd.continual import ContinualBackprop
from gxd.directions import direction_of
from gxd.find import call_arguments
from gxd.scorer import Scorer
from gxd.statistics import Statistics
from gxd.updates import Update

KEPT = ("mean", "mean_weight", "utility", "utility_weight", "nonfinite")  # the statistics that a step brings up to date


class Parts(NamedTuple):
    """All tensors that a step reads."""

    tensors: list[Tensor]  # parameters and buffers
    states: list[Tensor]  # of the optimizer
    rates: list[Tensor]
    kept: list[Tensor]  # statistics of the units
    signs: list[Tensor]  # for gxd_sketch
    batch: list[Tensor]


class Recipe:
    """What a step is made of, and where its tensors are found at each call.

    Attributes:
        foreign: how many of the optimizer's parameters are not the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        update: Update | None,
        loss: Callable[[Any, Any], Tensor],
        cbp: ContinualBackprop | None,
        score: Callable[[Any, Any], Tensor] | None,
    ) -> None:
        self.model, self.optimizer, self.update = model, optimizer, update
        self.loss, self.cbp, self.score = loss, cbp, score
        # A tied parameter has several names, and is one tensor.
        self.names: dict[str, int] = {}
        self.places: list[tuple[dict[str, Any], str]] = []
        known: dict[int, int] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            for held in (module._parameters, module._buffers):
                for key, tensor in held.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in known:
                        known[id(tensor)] = len(self.places)
                        self.places.append((held, key))
                    self.names[f"{path}.{key}" if path else key] = known[id(tensor)]
        self.groups = optimizer.param_groups
        trained = [[known.get(id(p)) for p in group["params"]] for group in self.groups]
        self.foreign = sum(n is None for numbers in trained for n in numbers)
        self.trained = [[n for n in numbers if n is not None] for numbers in trained]  # by parameter group
        self.rates = [torch.zeros((), dtype=torch.float64) for _ in self.groups]
        self._numbers = [0.0 for _ in self.groups]  # what they hold, to compare without a tensor

    def tensors(self) -> list[Tensor]:
        """Parameters and buffers."""
        return [held[key] for held, key in self.places]

    def states(self) -> list[Tensor] | None:
        """What the update keeps of the trained parameters; None if the optimizer has not made it yet."""
        if self.update is None:
            return []
        found = []
        for group in self.groups:
            names = self.update.state(group)
            for p in group["params"] if names else []:
                if p.requires_grad:
                    state = self.optimizer.state.get(p, {})
                    for name in names:
                        if not isinstance(state.get(name), Tensor):
                            return None
                        found.append(state[name])
        return found

    def settings(self) -> tuple[Any, ...]:
        """What is compiled in, of the parameters and of the optimizer's options."""
        options: Sequence[str] = self.update.settings if self.update else ()
        return (
            tuple([held[key].requires_grad for held, key in self.places]),
            tuple([tuple([group[name] for name in options]) for group in self.groups]),
        )

    def learning_rates(self) -> list[Tensor]:
        """One for each parameter group, as tensors, so that a schedule need not compile anew."""
        for number, group in enumerate(self.groups if self.update else []):
            lr = group["lr"]
            if isinstance(lr, Tensor):
                self.rates[number], self._numbers[number] = lr, math.nan
            elif self._numbers[number] != lr:
                self.rates[number], self._numbers[number] = torch.tensor(lr, dtype=torch.float64), lr
        return self.rates


class Program:
    """One training step, for batches like the given one."""

    def __init__(self, recipe: Recipe, states: list[Tensor], inputs: Any, target: Any) -> None:
        self.recipe, self.cbp = recipe, recipe.cbp
        self.scored = self.cbp is not None and self.cbp._scorer.observer.active
        leaves, self.structure = tree_flatten((inputs, target))
        self.batch = [(isinstance(leaf, Tensor), leaf if not isinstance(leaf, Tensor) else None) for leaf in leaves]
        self.logits: Tensor | None = None  # like them, for the signs that are drawn
        if self.scored and self.cbp is not None and self.cbp._utility.gradient == "sketch" and recipe.score is None:
            _, fake = self._trace(lambda parts: logits_of(self._forward(parts)[1]), states, inputs, target)
            self.logits = torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device)
        # Made out here: what is done with real tensors while tracing becomes part of the graph.
        self.weights: dict[str, Tensor] = {}
        self.scorer = self._own_scorer() if self.scored else None
        try:
            graph, _ = self._trace(self._step, states, inputs, target)
        finally:
            if self.scorer is not None:
                self.scorer.observer.close()
        with torch.no_grad(), torch.random.fork_rng(), _kept(self.cbp):
            example = list(chain(*self._parts(states, inputs, target, torch.ones_like)))
            self.function = compile_graph(graph, example)
            self.function(*[tensor.clone() for tensor in example])  # what cannot be run shall not fail half-way

    @torch.no_grad()
    def __call__(self, states: list[Tensor], inputs: Any, target: Any) -> tuple[Tensor, Any]:
        """Train on one batch."""
        draw = torch.ones_like if self.cbp is None else self.cbp._signs
        results = iter(self.function(*chain(*self._parts(states, inputs, target, draw))))
        loss = next(results)
        if self.one_tensor:
            output = next(results)
        else:
            output = tree_unflatten([next(results) if tensor else leaf for tensor, leaf in self.output], self.returned)
        if self.scored and self.cbp is not None:
            for name in KEPT:
                setattr(self.cbp._statistics, name, next(results))
            self.cbp._statistics.seen = next(results) if self.partial else None
            self.cbp._statistics.alarm = self.cbp._statistics.waits
        if self.recipe.update is None:
            self._step_by_itself(results)
        elif self.cbp is not None:
            self.cbp._advance()
        self.recipe.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask for it
        return loss, output

    def _step_by_itself(self, gradients: Iterator[Tensor]) -> None:
        """The optimizer steps in its own way; the units are scored already."""
        tensors = self.recipe.tensors()
        for number, has_gradient in self.graded:
            tensors[number].grad = next(gradients) if has_gradient else None
        if self.cbp is not None:
            self.cbp._scorer.observer.active = False
        self.recipe.optimizer.step()
        self.recipe.optimizer.zero_grad()

    def _parts(self, states: list[Tensor], inputs: Any, target: Any, draw: Callable[[Tensor], Tensor]) -> Parts:
        """All that the step reads."""
        if isinstance(inputs, Tensor) and isinstance(target, Tensor):
            batch = [inputs, target]
        else:
            batch = [leaf for leaf in tree_leaves((inputs, target)) if isinstance(leaf, Tensor)]
        kept = [getattr(self.cbp._statistics, n) for n in KEPT] if self.scored and self.cbp is not None else []
        signs = [] if self.logits is None else [draw(self.logits)]
        return Parts(self.recipe.tensors(), states, self.recipe.learning_rates(), kept, signs, batch)

    # --- tracing: from here on all tensors are fake -------------------------------------------------------------------

    def _trace(
        self, function: Callable[[Parts], Any], states: list[Tensor], inputs: Any, target: Any
    ) -> tuple[GraphModule, Any]:
        """The graph of a function of the parts, taken one by one, and what it returned, without values."""
        parts = self._parts(states, inputs, target, torch.ones_like)
        returned: list[Any] = []

        def flat(*tensors: Tensor) -> Any:
            rest = iter(tensors)
            returned.append(function(Parts(*(list(islice(rest, len(part))) for part in parts))))
            return returned[-1]

        observer = self.cbp._scorer.observer if self.cbp is not None else None
        active = observer is not None and observer.active
        try:
            if observer is not None:  # the traced step has its own
                observer.active = False
            with torch.enable_grad():
                graph = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(
                    *[tensor.detach() for tensor in chain(*parts)]
                )
        finally:
            if observer is not None:
                observer.active = active
        return graph, returned[-1]

    def _forward(self, parts: Parts) -> tuple[list[Tensor], Any]:
        """The parameters and buffers as autograd sees them, and the model's output."""
        real = self.recipe.tensors()
        leaves = [
            t.detach().requires_grad_() if r.requires_grad else t for t, r in zip(parts.tensors, real, strict=True)
        ]
        given = {name: leaves[number] for name, number in self.recipe.names.items()}
        held = dict(given)
        args, kwargs = call_arguments(self._given_batch(parts)[0])
        output = torch.func.functional_call(self.recipe.model, held, args, kwargs)
        for name, number in self.recipe.names.items():
            if held[name] is not given[name]:  # a buffer that was not written to but replaced
                parts.tensors[number].copy_(held[name])
        return leaves, output

    def _given_batch(self, parts: Parts) -> tuple[Any, Any]:
        rest = iter(parts.batch)
        leaves = [next(rest) if tensor else leaf for tensor, leaf in self.batch]
        return tree_unflatten(leaves, self.structure)

    def _step(self, parts: Parts) -> list[Tensor]:
        target, scorer = self._given_batch(parts)[1], self.scorer
        if scorer is not None:
            self.weights.update((name, parts.tensors[number]) for name, number in self.recipe.names.items())
            for name, tensor in zip(KEPT, parts.kept, strict=True):
                setattr(scorer.statistics, name, tensor)
        leaves, output = self._forward(parts)
        loss = self.recipe.loss(output, target)
        if scorer is not None and scorer.utility.needs_observe:
            score = None if self.recipe.score is None else self.recipe.score(output, target)
            logits, classes = (logits_of(output), target) if score is None else (None, None)
            signs = lambda _: parts.signs[0]  # noqa: E731
            scorer.observe(direction_of(scorer.utility.gradient, logits, classes, score, signs, traced=True))
        trained = [n for numbers in self.recipe.trained for n in numbers if leaves[n].requires_grad]
        found = torch.autograd.grad(loss, [leaves[n] for n in trained], allow_unused=True)
        gradients = dict(zip(trained, found, strict=True))
        with torch.no_grad():
            if self.recipe.update is not None:
                self._apply(self.recipe.update, parts, gradients)
            if scorer is not None:
                scorer.finish()
        values, self.returned = tree_flatten(output)
        if not all(isinstance(value, (Tensor, int, float, str, type(None))) for value in values):
            raise TypeError(f"the model returns a {type(output).__name__}, which cannot be taken apart into tensors")
        self.output = [(isinstance(value, Tensor), None if isinstance(value, Tensor) else value) for value in values]
        self.one_tensor = isinstance(output, Tensor)
        self.graded = [(n, g is not None) for n, g in gradients.items()]
        results = [loss.detach(), *(value.detach() for value in values if isinstance(value, Tensor))]
        if scorer is not None:
            results += [getattr(scorer.statistics, name) for name in KEPT]
            seen = scorer.statistics.seen
            self.partial = seen is not None
            results += [seen] if seen is not None else []
        if self.recipe.update is None:
            results += [g for g in gradients.values() if g is not None]
        return results

    def _own_scorer(self) -> Scorer:
        """The rooms, for the trace."""
        cbp = self.cbp
        assert cbp is not None
        like = cbp._statistics
        statistics = Statistics(cbp.plan, like.decay, like.device, like.dtype)
        statistics.waits = False
        return Scorer(cbp.model, cbp.plan, self.weights, cbp._utility, statistics, cbp.positions, cbp._noise)

    def _apply(self, update: Update, parts: Parts, gradients: Mapping[int, Tensor | None]) -> None:
        states = iter(parts.states)
        for group, numbers, lr in zip(self.recipe.groups, self.recipe.trained, parts.rates, strict=True):
            names = update.state(group)
            for n in numbers:
                if n in gradients:
                    state = {name: next(states) for name in names}
                    gradient = gradients[n]
                    if gradient is not None:
                        update.apply(parts.tensors[n], gradient, state, lr, group)


@contextmanager
def _kept(cbp: ContinualBackprop | None) -> Iterator[None]:
    """Leave the random numbers of utilities as they are."""
    state = None if cbp is None else cbp._noise.get_state()
    try:
        yield
    finally:
        if cbp is not None and state is not None:
            cbp._noise.set_state(state)


def compile_graph(graph: GraphModule, example: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Compile a flat graph for arguments like these."""
    import torch._inductor  # takes a while

    # Inductor keeps what it has compiled, for the next process too, but only of graphs with a shape environment.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake: list[Any] = [mode.from_tensor(tensor, static_shapes=True) for tensor in example]
    # Random numbers as in eager mode, so that dropout is the same in both.
    options: dict[str, Any] = {"fallback_random": True}
    if any(node.kwargs.get("generator") is not None for node in graph.graph.nodes):
        options["fx_graph_cache"] = False  # it would bring back the generator that the graph was first compiled with
    elif all(tensor.device.type == "cpu" for tensor in example):
        options["cpp_wrapper"] = True  # the kernels are called from C++ too: a quarter of a small network's time
    return torch._inductor.compile(graph, fake, options=options)


def logits_of(output: Any) -> Any:
    """A model's output, or the logits in it."""
    return output if isinstance(output, Tensor) else getattr(output, "logits", output)


def detached(output: Any) -> Any:
    """A model's output without its graph."""
    return tree_map_only(Tensor, Tensor.detach, output)


def shape_of(batch: Any) -> Any:
    """What a program depends on, of a batch: shapes, kinds, and whatever is not a tensor."""
    if isinstance(batch, Tensor):
        return (batch.shape, batch.stride(), batch.dtype, batch.device)
    leaves, structure = tree_flatten(batch)
    return (repr(structure), *(shape_of(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves))
