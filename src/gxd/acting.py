"""Methods that act around the steps of an optimizer, one batch after the other."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gxd import arguments
from gxd.checks import check_plan, check_shards
from gxd.errors import ObservationError, ObservationWarning, warn
from gxd.methods.base import Host, Method, UnitsReset
from gxd.notices import Notices
from gxd.observe.output import OutputObserver
from gxd.part import Part
from gxd.plan.find import find_units
from gxd.plan.layouts import NamedTensors, unwrap
from gxd.plan.units import UnitPlan
from gxd.processes import Processes
from gxd.score.scorer import Scorer
from gxd.score.state import UnitState
from gxd.sharded import reshard, sharded_modules
from gxd.steps import after_steps, before_steps, is_nested, stepping, take_away, was_skipped

OnReset = Callable[[Mapping[str, Tensor]], object]
Listener = Callable[[Sequence[UnitsReset]], object]
ON_UNOBSERVED = ("raise", "warn", "skip")
_OPEN: weakref.WeakSet[Acting] = weakref.WeakSet()  # everything that is attached


class Acting:
    """The methods that are attached to a model and its optimizer, and what makes them act; see
    :class:`gxd.Attachment`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        methods: Sequence[Method],
        *,
        plan: UnitPlan | None,
        example_inputs: Any,
        scaler: Any,
        seed: int,
        process_group: Any,
        on_unobserved: str,
        on_reset: OnReset | None = None,
    ) -> None:
        arguments.seed(seed)
        arguments.module(model)
        self._optimizers = tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)
        for one in self._optimizers:
            arguments.optimizer(one)
        if not self._optimizers:
            raise ValueError("optimizer is an empty list: give the optimizer that trains the model")
        stepping(self._optimizers[-1])
        if scaler is not None and not hasattr(scaler, "get_scale"):
            raise TypeError(f"scaler must be a torch.amp.GradScaler or None, got {type(scaler).__name__}")
        for method in methods:
            arguments.method(method, Method)
        self.on_unobserved = arguments.choice("on_unobserved", on_unobserved, ON_UNOBSERVED)
        self.model, self.optimizer, self.methods, self.scaler = unwrap(model), optimizer, tuple(methods), scaler
        needed = any(method.needs_units for method in methods)
        if plan is not None and example_inputs is not None:
            raise ValueError("give either example_inputs (the model is traced) or plan (from gxd.find_units), not both")
        if needed and plan is None and example_inputs is None:
            raise ValueError(
                "the units of the model are not known: pass example_inputs=x[:2], a batch of two as the model is "
                "called with, or plan=gxd.find_units(model, x[:2])"
            )
        if plan is not None:
            arguments.plan(plan)
        elif needed:
            plan = find_units(self.model, example_inputs)
        check_shards(self.model, methods)
        self._sharded = sharded_modules(self.model)
        if plan is not None and needed:
            check_plan(plan, self.model, self._optimizers)
        self.plan = plan if plan is not None else UnitPlan(())
        processes = Processes(process_group)
        self._paused = self._evaluating = 0
        self._in_hook = False  # of the optimizer: its hooks are being called, one after the other
        self._hooks: list[Any] = []
        self._outputs: list[OutputObserver] = []
        self._listeners: OrderedDict[int, Listener] = OrderedDict()
        self._done: list[UnitsReset] = []  # of this step, by all methods
        if on_reset is not None:
            self.on_reset(on_reset)
        self._parts: list[Part] = []
        tensors = NamedTensors(self.model, self.plan.shapes)
        if self.plan.groups:
            self.plan = processes.agreed_inits(self.plan, tensors[self.plan.groups[0].producers[0].weight].device)
        notices, generator = Notices(None), torch.Generator().manual_seed(seed)
        self.host = Host(self.model, self.plan, tensors, self._optimizers, processes, generator, notices)
        try:
            for number, method in enumerate(methods):
                twins = sum(part.method.name == method.name for part in self._parts)
                self._parts.append(Part.new(method, self.host, f"{number}.{method.name}", twins, seed, self.scaler))
            self._replace()
            self._hook()
        except BaseException:
            self.close()
            raise

    # --- what the user calls ------------------------------------------------------------------------------------------

    def on_reset(self, function: OnReset) -> RemovableHandle:
        """Call a function after every step, or boundary, that has reset units, with group name -> their indices.

        To write the same into a copy of the model, see :func:`gxd.mirror_resets`. A copy of this attachment does not
        call it. Returns a handle with ``remove()``.
        """
        if not callable(function):
            raise TypeError(f"on_reset must be a function of (group name -> indices), got {type(function).__name__}")
        return self.listen(lambda done: function(united([(one.group.name, one.units) for one in done])))

    def discard(self) -> None:
        """Forget what was observed since the last optimizer step."""
        for part in self._parts:
            part.forget()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within this context, forward passes are not observed: those of another loss, as an actor's through its
        critic.
        """
        self._paused += 1
        self._switch()
        try:
            yield
        finally:
            self._paused -= 1
            self._switch()

    def close(self) -> None:
        """Remove every hook. The model and the optimizer are as if this had never been attached."""
        for part in self._parts:
            if part.scorer is not None:
                part.scorer.observer.close()
        for hook in (*self._hooks, *self._outputs):
            take_away(hook, self._in_hook)
        self._hooks, self._outputs = [], []
        _OPEN.discard(self)

    @property
    def has_scored(self) -> bool:
        """Whether a step has shown units to all methods that score them."""
        return all(part.units.scored > 0 for part in self._parts if part.scorer is not None)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return not self._hooks

    # --- around the optimizer's step ----------------------------------------------------------------------------------

    def _replace(self) -> None:
        """Close what does the same to the same parameters: an earlier run of the cell of a notebook, of which the user
        may have no handle left.
        """
        names = {method.name for method in self.methods}
        for other in list(_OPEN):
            if names & {method.name for method in other.methods} and not self._changed().isdisjoint(other._changed()):
                other.close()
                warn(
                    f"{other!r} was attached here already, as when a cell of a notebook is run twice. It was closed, "
                    "because two of them would reset twice as much. The new one takes its place, with fresh "
                    "statistics: load_state_dict() continues the old ones. To use a method twice, give both in one "
                    "call: gxd.attach(model, optimizer, first, second)",
                    ObservationWarning,
                )

    def _changed(self) -> set[int]:
        """The ids of the parameters that it acts on: the weights of its units, or all that is trained."""
        weights = {producer.weight for group in self.plan.groups for producer in group.producers}
        if weights:
            return {id(p) for name, p in self.model.named_parameters(remove_duplicate=False) if name in weights}
        return {id(one.parameter) for one in self.host.trained()}

    def _hook(self) -> None:
        _OPEN.add(self)
        self._hooks = after_steps(self._optimizers[-1], self._after_step)
        for optimizer in self._optimizers[:-1]:
            self._hooks += after_steps(optimizer, self._between_steps)
        for optimizer in self._optimizers if self.acts_before_steps is not None else ():
            self._hooks += before_steps(optimizer, self._before_step)
        self._hooks.sort(key=lambda hook: not isinstance(hook, RemovableHandle))  # what made hooks possible goes last

    @torch.compiler.disable
    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer) -> None:
        if was_skipped(optimizer):
            return
        self._not_while_evaluating("optimizer.step()")
        reshard(self._sharded)
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer unscales the gradients itself
        for part in self._parts:
            part.follow_device()
            part.host.grad_scale = float(scale) if scale is not None else 1.0
            part.host.stepping = optimizer
            try:
                part.keep(part.method.before_step(part.host, part.state))
            finally:
                part.host.stepping = None

    def _between_steps(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Another optimizer than the last has stepped: the gradients it used count, even if they are zeroed now."""
        for part in self._parts:
            if part.scorer is not None and part.scorer.observer.backwards is not None:
                part.scorer.observer.backwards.stepped()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():  # a compiled optimizer.step stops here
            return _outside_the_graph(self._after_step, optimizer, args, kwargs)
        if is_nested(optimizer):  # an optimizer whose step calls its parent's: the outer one counts
            return
        if was_skipped(optimizer):
            self.discard()
        else:
            self._in_hook = True
            try:
                self.stepped()
            finally:
                self._in_hook = False

    @torch.no_grad()
    def stepped(self) -> None:
        """The optimizer has stepped."""
        self._not_while_evaluating("optimizer.step()")
        reshard(self._sharded)
        try:
            # All, before a method changes the weights.
            observed = [(self._observed(part), self._output_gradients(part)) for part in self._parts]
        except BaseException:
            self.discard()
            raise
        try:
            for part, seen in zip(self._parts, observed, strict=True):
                self._advance(part, *seen)
        finally:  # when all have counted the step, so that what one has reset is of age 0 to the others
            for part in self._parts:
                self._tell_others(part)
            self._tell_listeners()

    def _observed(self, part: Part) -> UnitState | None:
        """The units with this step's observation taken in; None if it is not to be observed."""
        if part.observed is not None:
            given, part.observed = part.observed, None
            return given
        scorer = part.scorer
        if scorer is None:
            return None
        if not scorer.observer.active and scorer.sums.empty and not scorer.observer.passes:
            return None  # not a step to be scored, or all of it was paused
        if not scorer.utility.needs_observe:  # else observe() has done so
            part.follow_device()
        units = scorer.finish()
        if isinstance(units, UnitState):
            return units
        self._unobserved(part, units)
        return None

    def _output_gradients(self, part: Part) -> Mapping[str, Tensor] | None:
        """Of this step's output by the parameters; None if it is not to be observed."""
        outputs = part.outputs
        if outputs is None or not part.observes or (self._paused and not outputs.pulled.examples):
            return None
        found = outputs.finish(part.host.parameters(), part.host.device)
        if found is None:
            self._unobserved(
                part,
                f"optimizer.step() without observe(): {part.method.name} needs attached.observe(logits, target) "
                "between the forward pass and loss.backward() of this step. The parameters were updated, and nothing "
                "else",
            )
        return found

    def _unobserved(self, part: Part, why: str) -> None:
        """A step that has to be observed was not."""
        if self.on_unobserved == "raise":
            raise ObservationError(why)
        if self.on_unobserved == "warn" and not part.told:
            part.told = True
            warn(f"{why}. Such steps are passed over from here on", ObservationWarning)

    def _advance(self, part: Part, observed: UnitState | None, gradients: Mapping[str, Tensor] | None) -> None:
        """The optimizer has stepped: let a method act. If that fails, the step counts for nothing: its state is what
        it was before the step was observed.
        """
        part.follow_device()
        host, scorer, notices = part.host, part.scorer, part.host.notices
        notices.passes, host.observed, host.output_gradients = 0, observed, gradients
        try:
            state = part.method.after_step(host, part.state)
        finally:
            host.observed = host.output_gradients = None
        before = part.state
        part.keep(state)
        if scorer is None:
            return
        units = part.units
        scorer.observer.active = not self._paused and part.method.observes(state)
        # The count is on the device, and is looked at when the host has to wait anyway.
        if host.done or (units.nonfinite is not before.units.nonfinite and units.birth.device.type == "cpu"):
            notices.of_nonfinite(int(units.nonfinite))

    def _tell_others(self, part: Part) -> None:
        """Of the units that a method has reset."""
        done, part.host.done = part.host.done, []
        self._done += done
        for other in self._parts if done else ():
            if other is not part:
                chosen = [(one.group, one.units) for one in done]
                other.keep(other.method.on_reset(other.host, other.state, chosen))

    def _tell_listeners(self) -> None:
        """Of the units that all methods have reset."""
        done, self._done = self._done, []
        if not done:
            return
        with ExitStack() as told:  # all of them, also if one raises: a copy that misses a reset stays apart
            for listener in reversed(self._listeners.values()):
                told.callback(listener, done)

    def listen(self, function: Listener) -> RemovableHandle:
        """Call a function with what each step has reset, in the order of the methods."""
        handle = RemovableHandle(self._listeners)
        self._listeners[handle.id] = function
        return handle

    # --- for a compiled step ------------------------------------------------------------------------------------------

    def watched(self) -> list[tuple[Part, Scorer]]:
        """The methods that observe the coming step."""
        return [(part, part.scorer) for part in self._parts if part.scorer is not None and part.scorer.observer.active]

    @property
    def awaits_output(self) -> bool:
        """Whether a method needs :meth:`observe` for the coming step."""
        scored = any(scorer.utility.needs_observe for _, scorer in self.watched())
        return scored or any(self._pulls(part) for part in self._parts)

    @property
    def own_hooks(self) -> tuple[Any, ...]:
        """What may hang on the model and on the optimizer without being foreign."""
        return (
            self._after_step,
            self._between_steps,
            *(part.scorer.observer for part in self._parts if part.scorer is not None),
        )

    @property
    def acts_before_steps(self) -> str | None:
        """The first method that does, if there is one."""
        for method in self.methods:
            if type(method).before_step is not Method.before_step:
                return method.name
        return None

    # --- help ---------------------------------------------------------------------------------------------------------

    def _pulls(self, part: Part) -> bool:
        """Whether a method needs the gradients of the coming step's output by the parameters."""
        return part.outputs is not None and not self._paused and part.observes

    def _switch(self) -> None:
        for part in self._parts:
            if part.scorer is not None:
                part.scorer.observer.active = not self._paused and part.observes

    def _not_while_evaluating(self, call: str) -> None:
        if self._evaluating:
            raise RuntimeError(
                f"{call} within evaluating(): the weights there are not those of training. Leave it first"
            )


def united(units: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Group name -> units, of what several methods have reset: each unit once."""
    found: dict[str, Tensor] = {}
    for name, index in units:
        found[name] = torch.cat([found[name], index]).unique() if name in found else index
    return found


@torch.compiler.disable
def _outside_the_graph(function: Callable[..., None], *arguments: Any) -> None:
    function(*arguments)
