"""A training step, traced and compiled for batches of one shape.

The step is run once on fake tensors with the code of the eager step, and every operation is written down below
autograd. What comes out is a flat graph without hooks, modules and autograd, which the compiler may fuse as it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from enum import Enum
from itertools import chain, islice
from numbers import Number
from operator import is_
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from gxd.compile.inductor import compile_graph
from gxd.compile.noise import noise_as_inputs
from gxd.compile.recipe import Recipe
from gxd.compile.refusals import (
    NoConverting,
    NoReading,
    no_recomputation,
    refuse_other_buffers,
    refuse_other_leaves,
    refuse_own_tensors,
)
from gxd.compile.updates import Update, real
from gxd.errors import ObservationError
from gxd.observe.direction import RANDOM, check_probabilities, direction_of, noise
from gxd.plan.find import call_arguments
from gxd.score.scorer import Scorer
from gxd.score.state import UnitState
from gxd.score.sums import NOTHING

CONSTANTS = (Number, str, bytes, NoneType, Enum, torch.dtype, torch.device)  # of a batch, beside tensors
KEPT = ("mean", "mean_weight", "utility", "utility_weight", "nonfinite")


class Parts(NamedTuple):
    """All tensors that a step reads."""

    tensors: list[Tensor]  # parameters and buffers
    states: list[Tensor]  # of the optimizer
    rates: list[Tensor]
    kept: list[Tensor]  # what is known of the units, for each method that observes them
    noise: list[Tensor]  # that random directions are drawn with
    batch: list[Tensor]


class StateMissing(Exception):
    """A parameter has a gradient, and the optimizer has not made its state yet. An eager step makes it."""


class Program:
    """One training step, for batches like the given one."""

    def __init__(self, recipe: Recipe, inputs: Any, target: Any) -> None:
        self.recipe, self.attached = recipe, recipe.attached
        # A parameter that never had a gradient (the head of another task) has no state, and needs none.
        kept = recipe.kept()
        self.kept = [one for one in kept if recipe.states([one]) is not None]
        if kept and not self.kept:
            raise StateMissing
        states = recipe.states(self.kept) or []
        self.watched = [] if self.attached is None else self.attached.watched()
        leaves, self.structure = tree_flatten((inputs, target))
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            raise ValueError("the batch requires a gradient, which a compiled step does not give it; detach it")
        self.batch = [(isinstance(leaf, Tensor), leaf if not isinstance(leaf, Tensor) else None) for leaf in leaves]
        self.probabilities = False  # whether the target has to lie in [0, 1]
        self.drawn: list[tuple[Scorer, Tensor]] = []  # who draws random numbers, and like what
        noisy = [scorer for _, scorer in self.watched if scorer.utility.gradient in RANDOM]
        if noisy and recipe.score is None:
            _, fakes = self._trace(lambda parts: self._drawn_like(parts, noisy), states, inputs, target)
            likes = [torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device) for fake in fakes]
            self.drawn = list(zip(noisy, likes, strict=True))
        graph, _ = self._trace(self._step, states, inputs, target)
        self.outside = outside_as_inputs(graph)
        self.draws = noise_as_inputs(graph)
        refuse_own_tensors(recipe, self.outside)
        self._states, self._layouts = states, list(map(_layout, states))
        self.outdated = False  # whether the optimizer's states are laid out in another way by now
        with torch.no_grad(), torch.random.fork_rng():
            parts = self._parts(states, inputs, target, traced=True)
            self.function = compile_graph(graph, [*chain(*parts), *self.outside, *(draw() for draw in self.draws)])

    @torch.no_grad()
    def __call__(self, inputs: Any, target: Any) -> tuple[Tensor, Any] | None:
        """Train on one batch; None, and nothing is done, if the optimizer's states were cleared or laid out anew."""
        states = self.recipe.states(self.kept)
        if states is None or not self._fits(states):
            return None
        if self.probabilities:  # out here, for values cannot be looked at in the trace
            check_probabilities(target)
        parts = self._parts(states, inputs, target)
        drawn = [draw() for draw in self.draws]
        try:
            results = iter(self.function(*chain(*parts), *self.outside, *drawn))
        except Exception:
            self._try_eagerly(inputs, target)
            raise
        loss = next(results)
        if self.one_tensor:
            output = next(results)
        else:
            output = tree_unflatten([next(results) if tensor else leaf for tensor, leaf in self.output], self.returned)
        for (part, scorer), (incomplete, unreached) in zip(self.watched, self.seen, strict=True):
            values = [next(results) for _ in _kept(part.units)]
            part.observed = _units(part.units, values, next(results) if incomplete else None)
            if unreached:
                scorer.warn_of_unreached(unreached, part.observed)
        if self.graded:
            self._leave_gradients(results)
        if self.recipe.update is None:
            try:
                self._step_by_itself()
            finally:  # if it failed, this batch does not count
                for part, _ in self.watched:
                    part.observed = None
        elif self.attached is not None:
            self.attached.stepped()
        self.recipe.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask for it
        return loss, output

    def _try_eagerly(self, inputs: Any, target: Any) -> None:
        """Raise what the model itself has to say of a batch that compiled code failed with; else nothing is changed."""
        places = self.recipe.places
        buffers = [(held, key, held[key]) for held, key in places if not isinstance(held[key], nn.Parameter)]
        copies = [tensor.clone() for _, _, tensor in buffers]
        try:
            with torch.random.fork_rng(), nullcontext() if self.attached is None else self.attached.paused():
                _Judged(self.recipe)(inputs, target)
        finally:
            for (held, key, tensor), copy in zip(buffers, copies, strict=True):
                held[key] = tensor.copy_(copy)

    def _fits(self, states: list[Tensor]) -> bool:
        """Whether the code was made for such states. Loading them makes others, and of another layout perhaps."""
        if not all(map(is_, states, self._states)):
            self.outdated = list(map(_layout, states)) != self._layouts
            self._states = states
        return not self.outdated

    def _leave_gradients(self, gradients: Iterator[Tensor]) -> None:
        """As ``backward()`` does: what another optimizer trains may be waiting for several steps' gradients."""
        tensors = self.recipe.tensors()
        for number, gradient in zip(self.graded, gradients, strict=True):
            before = tensors[number].grad
            tensors[number].grad = gradient if before is None else before.add_(gradient)

    def _step_by_itself(self) -> None:
        """The optimizer steps in its own way; the units are scored already."""
        self.recipe.optimizer.step()
        self.recipe.optimizer.zero_grad()
        tensors = self.recipe.tensors()
        for number in chain(*self.recipe.trained):
            tensors[number].grad = None  # it may have been set to zero only

    def _parts(self, states: list[Tensor], inputs: Any, target: Any, traced: bool = False) -> Parts:
        """All that the step reads."""
        if isinstance(inputs, Tensor) and isinstance(target, Tensor):
            batch = [inputs, target]
        else:
            batch = [leaf for leaf in tree_leaves((inputs, target)) if isinstance(leaf, Tensor)]
        kept = [tensor for part, _ in self.watched for tensor in _kept(part.units)]
        drawn = [
            noise(scorer.utility.gradient, torch.Generator() if traced else scorer.noise)(like)
            for scorer, like in self.drawn
        ]
        return Parts(self.recipe.tensors(), states, self.recipe.learning_rates(), kept, drawn, batch)

    # --- tracing: from here on all tensors are fake -------------------------------------------------------------------

    def _trace(
        self, function: Callable[[Parts], Any], states: list[Tensor], inputs: Any, target: Any
    ) -> tuple[GraphModule, Any]:
        """The graph of a function of the parts, taken one by one, and what it returned, without values."""
        parts = self._parts(states, inputs, target, traced=True)
        returned: list[Any] = []

        def flat(*tensors: Tensor) -> Any:
            rest = iter(tensors)
            with NoReading():
                returned.append(function(Parts(*(list(islice(rest, len(part))) for part in parts))))
            return returned[-1]

        with ExitStack() as stack, torch.enable_grad():
            stack.enter_context(no_recomputation())
            stack.enter_context(NoConverting())
            for _, scorer in self.watched:
                stack.enter_context(scorer.aside())
            graph = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(
                *[tensor.detach() for tensor in chain(*parts)]
            )
        return graph, returned[-1]

    def _forward(self, parts: Parts) -> tuple[list[Tensor], dict[int, Tensor], tuple[Any, Tensor, Any]]:
        """The parameters and buffers as autograd sees them, what took the places of buffers, and the model's output,
        its loss and its score.
        """
        real = self.recipe.tensors()
        leaves = [
            t.detach().requires_grad_() if r.requires_grad else t for t, r in zip(parts.tensors, real, strict=True)
        ]
        given = {f"model.{name}": leaves[number] for name, number in self.recipe.names.items()}
        held = dict(given)
        results = torch.func.functional_call(_Judged(self.recipe), held, self._given_batch(parts))
        now = {name: held[f"model.{name}"] for name in self.recipe.names}
        refuse_other_buffers(self.recipe, leaves, now, parts.batch)
        new = {n: now[name].clone() for name, n in self.recipe.names.items() if now[name] is not leaves[n]}
        return leaves, new, results

    def _drawn_like(self, parts: Parts, scorers: Sequence[Scorer]) -> list[Tensor]:
        """What each of the directions draws random numbers for."""
        *_, (output, _, _) = self._forward(parts)
        output, target = logits_of(output), self._given_batch(parts)[1]
        likes: list[Tensor] = []

        def note(like: Tensor) -> Tensor:
            likes.append(like)
            return torch.zeros_like(like)

        for scorer in scorers:
            direction_of(scorer.utility.gradient, output, target, None, note, traced=True)
        return likes

    def _given_batch(self, parts: Parts) -> tuple[Any, Any]:
        rest = iter(parts.batch)
        leaves = [next(rest) if tensor else leaf for tensor, leaf in self.batch]
        return tree_unflatten(leaves, self.structure)

    def _step(self, parts: Parts) -> list[Tensor]:
        target = self._given_batch(parts)[1]
        tensors = {name: parts.tensors[number] for name, number in self.recipe.names.items()}
        kept, drawn = iter(parts.kept), iter(parts.noise)
        states = [_units(part.units, [next(kept) for _ in _kept(part.units)], None) for part, _ in self.watched]
        leaves, replaced, (output, loss, score) = self._forward(parts)
        refuse_other_leaves(self.recipe, loss, list(chain(*parts)))
        sums = [NOTHING for _ in self.watched]
        for number, (_, scorer) in enumerate(self.watched):
            if scorer.utility.needs_observe:
                logits, classes = (logits_of(output), target) if score is None else (None, None)
                draw = lambda _: next(drawn)  # noqa: E731
                direction = direction_of(scorer.utility.gradient, logits, classes, score, draw, traced=True)
                self.probabilities = self.probabilities or direction.probabilities
                sums[number] = scorer.scored(states[number], NOTHING, tensors, direction)
        graded = [n for n, tensor in enumerate(self.recipe.tensors()) if tensor.requires_grad]
        with ExitStack() as stack:
            for _, scorer in self.watched:
                if scorer.observer.backwards is not None:
                    stack.enter_context(scorer.observer.backwards.telling(True))
            found = torch.autograd.grad(loss, [leaves[n] for n in graded], allow_unused=True)
        gradients = dict(zip(graded, found, strict=True))
        with torch.no_grad():
            if self.recipe.update is not None:
                for counter in self._apply(self.recipe.update, parts, gradients):
                    counter.add_(_one_after(loss) if counter.device == loss.device else 1)
            for number, (_, scorer) in enumerate(self.watched):
                if not scorer.utility.needs_observe:
                    sums[number] = scorer.used(states[number], NOTHING, tensors)
                if scorer.utility.gradient == "weights":
                    of_weights = {name: gradients.get(n) for name, n in self.recipe.names.items()}
                    sums[number] = scorer.scoring.by_weights(sums[number], tensors, of_weights)
                if sums[number].empty:
                    raise ObservationError("the step shows no unit of the plan")
                states[number] = scorer.scoring.close(states[number], sums[number], wait=False)
            for n, new in replaced.items():  # only now, for the backward pass may need the old ones
                parts.tensors[n].copy_(new)
        values, self.returned = tree_flatten(output)
        if not all(isinstance(value, (Tensor, int, float, str, type(None))) for value in values):
            raise TypeError(f"the model returns a {type(output).__name__}, which cannot be taken apart into tensors")
        self.output = [(isinstance(value, Tensor), None if isinstance(value, Tensor) else value) for value in values]
        self.one_tensor = isinstance(output, Tensor)
        results = [loss.detach(), *(value.detach() for value in values if isinstance(value, Tensor))]
        self.seen = []
        for state, shown, (_, scorer) in zip(states, sums, self.watched, strict=True):
            results += _kept(state)
            results += [] if state.seen is None else [state.seen]
            self.seen.append((state.seen is not None, scorer.scoring.unreached(shown)))
        stepped = set() if self.recipe.update is None else set(chain(*self.recipe.trained))
        left = {n: g for n, g in gradients.items() if g is not None and n not in stepped}
        self.graded = list(left)
        return [*results, *_apart(left.values(), [*chain(*parts), *results])]

    def _apply(self, update: Update, parts: Parts, gradients: Mapping[int, Tensor | None]) -> list[Tensor]:
        """Returns what counts the steps of those that were updated."""
        states, kept = iter(parts.states), dict(self.kept)
        counters = []
        for group, numbers, lr in zip(self.recipe.groups, self.recipe.trained, parts.rates, strict=True):
            names = update.state(group)
            for n in numbers:
                state = {name: real(next(states)) for name in kept.get(n, ())}
                gradient = gradients.get(n)
                if gradient is not None:
                    if len(state) < len(names):
                        raise StateMissing(self.recipe.name(n))
                    update.apply(real(parts.tensors[n]), real(gradient), state, lr, group)
                    counters += [state[update.counter]] if update.counter is not None else []
        return counters


class _Judged(nn.Module):
    """The model, and what is asked of its output: the loss too may read parameters, and must see those of the trace."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.model, self.recipe = recipe.model, recipe

    def forward(self, inputs: Any, target: Any) -> tuple[Any, Tensor, Any]:
        args, kwargs = call_arguments(inputs)
        output = self.model(*args, **kwargs)
        loss, score = self.recipe.loss(output, target), self.recipe.score
        # In the order, and on the steps, of the eager loop: either may draw random numbers.
        return output, loss, None if score is None or self.recipe.attached is None else score(output, target)


def outside_as_inputs(graph: GraphModule) -> list[Tensor]:
    """Make inputs of the tensors that the graph holds but did not make: class weights, a mask that is no buffer.

    The compiler would take the numbers in them for constants, and they may be changed in place.
    """
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    found: dict[str, tuple[Tensor, Node]] = {}
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        tensor = getattr(graph, node.target)
        if not isinstance(tensor, Tensor) or all("lift_fresh" in str(user.target) for user in node.users):
            continue  # `torch.tensor(3.0)` within the step is a constant
        if node.target not in found:
            with graph.graph.inserting_after(inputs[-1]):
                inputs.append(graph.graph.placeholder(f"outside{len(found)}"))
            inputs[-1].meta.update(node.meta)
            found[node.target] = (tensor, inputs[-1])
        node.replace_all_uses_with(found[node.target][1])
        graph.graph.erase_node(node)
    graph.recompile()
    return [tensor for tensor, _ in found.values()]


def _one_after(loss: Tensor) -> Tensor:
    """One, as soon as the loss is known: code that raises over a batch must not have counted the step by then.

    That the compiler leaves the loss in it is tested: a loss that is not a number would be one, too, if it were used.
    """
    return 1.0 + 0.0 * loss.isnan().any()


def _apart(gradients: Iterable[Tensor], others: Iterable[Tensor]) -> list[Tensor]:
    """Each in memory of its own, as ``backward()`` leaves them: they may be written to."""
    found, known = [], {tensor.untyped_storage()._cdata for tensor in others}
    for gradient in gradients:
        memory = gradient.untyped_storage()
        whole = memory.nbytes() == gradient.nbytes
        found.append(gradient if whole and memory._cdata not in known else gradient.clone())
        known.add(memory._cdata)
    return found


def _kept(units: UnitState) -> list[Tensor]:
    """Of the units, what a step brings up to date."""
    return [*(getattr(units, name) for name in KEPT), *units.gram]


def _units(units: UnitState, kept: Sequence[Tensor], seen: Tensor | None) -> UnitState:
    """The units with other averages."""
    named = dict(zip(KEPT, kept, strict=False))
    return units._replace(**named, seen=seen, gram=tuple(kept[len(KEPT) :]))  # type: ignore[arg-type]


def logits_of(output: Any) -> Any:
    """A model's output, or the logits in it."""
    return output if isinstance(output, Tensor) else getattr(output, "logits", output)


def detached(output: Any) -> Any:
    """A model's output without its graph."""
    return tree_map_only(Tensor, Tensor.detach, output)


def shape_of(batch: Any) -> Any:
    """What a program depends on, of a batch: shapes, kinds, and whatever is not a tensor.

    Raises :class:`TypeError` if tensors may hide in it.
    """
    if isinstance(batch, Tensor):
        return (batch.shape, batch.stride(), batch.dtype, batch.device, batch.requires_grad)
    leaves, structure = tree_flatten(batch)
    return (repr(structure), *map(_leaf, leaves))


def _leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return shape_of(leaf)
    if not isinstance(leaf, CONSTANTS):
        raise TypeError(
            f"the batch has a {type(leaf).__name__} in it, whose tensors cannot be found; give them in tuples, lists "
            "or dicts"
        )
    return repr(leaf)


def _layout(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
