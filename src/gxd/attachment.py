"""Hang plasticity methods on a model and its optimizer: hooks, checkpoints, and one batch after the other."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gxd import arguments
from gxd.checkpoint import STATE_VERSION, check_observed, check_state, loaded, mapped, saved
from gxd.checks import check_plan
from gxd.errors import ObservationError, ObservationWarning, warn
from gxd.methods.base import Host, Method
from gxd.methods.unit_reset import UnitResets
from gxd.notices import Notices
from gxd.observe.direction import direction_of, random_signs
from gxd.plan.find import find_units
from gxd.plan.layouts import NamedTensors, unwrap
from gxd.plan.units import UnitPlan
from gxd.processes import Processes
from gxd.score.scorer import Scorer
from gxd.score.state import UnitState
from gxd.steps import after_steps, before_steps, is_nested, stepping, was_skipped

ON_UNOBSERVED = ("raise", "warn", "skip")
CLOSED = "observe() after close(): nothing is attached any more; make a new one"
NO_COPY = (
    "a ContinualBackprop, as all that gxd.attach returns, is hooked to its model and its optimizer, so it cannot be "
    "pickled, nor copied by copy.copy(): "
    "save its state_dict() and load that into a new one, or copy.deepcopy((model, optimizer, cbp)) all three at once"
)


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *methods: Method,
    plan: UnitPlan | None = None,
    example_inputs: Tensor | tuple[Any, ...] | Mapping[str, Any] | list[Any] | None = None,
    scaler: Any = None,
    seed: int = 0,
    process_group: Any = None,
    on_unobserved: str = "raise",
) -> Attachment:
    """Let methods act around every ``optimizer.step()``, in the order they are given.

    The model is not wrapped, and its ``state_dict`` gains no key.

    Args:
        model: any module; methods that reset units need one that a plan can be made from.
        optimizer: the optimizer that trains it, or several (Muon for matrices, AdamW for the rest) in the order they
            step in; methods act after the step of the last.
        methods: from :func:`gxd.method`, or your own.
        plan: from :func:`gxd.find_units`, for methods that need units; or give ``example_inputs``.
        example_inputs: as for :func:`gxd.find_units`.
        scaler: the ``GradScaler``, if there is one: a change of its scale tells that a step was skipped, so that the
            skipped batch is forgotten, and ``loss_gradient`` needs it to undo the scale.
        seed: of the fresh weights and of random directions. The global random state is never used.
        process_group: of the processes that train together. Default: the default group if ``torch.distributed`` is
            initialised; False: none.
        on_unobserved: what becomes of a step that a method needs to observe, and that showed it nothing: ``raise``;
            ``warn`` once, and ``skip``, go on as on a step that is not scored.

    Example::

        redo, l2_init = gxd.method("redo", threshold=0.1), gxd.method("l2_init", strength=1e-3)
        attached = gxd.attach(model, optimizer, redo, l2_init, example_inputs=x[:2])
        for x, y in stream:
            loss = F.cross_entropy(model(x), y)
            loss.backward(); optimizer.step(); optimizer.zero_grad()
    """
    return Attachment(
        model,
        optimizer,
        methods,
        plan=plan,
        example_inputs=example_inputs,
        scaler=scaler,
        seed=seed,
        process_group=process_group,
        on_unobserved=on_unobserved,
    )


@dataclass
class Part:
    """One attached method: what it sees, what it remembers, and what observes for it."""

    method: Method
    host: Host
    state: Any
    scorer: Scorer | None
    key: str
    device: torch.device
    told: bool = False  # of a step without an observation
    observed: UnitState | None = None  # what a compiled step has made of the units

    @property
    def units(self) -> UnitState:
        units: UnitState = self.state.units
        return units


class Attachment:
    """What :func:`gxd.attach` returns.

    Attributes:
        model: the model, unwrapped.
        optimizer: as it was given.
        plan: the units of the model; without groups if no method needs them.
        methods: as they were given.
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
        if (plan is not None and example_inputs is not None) or (needed and plan is None and example_inputs is None):
            raise ValueError(
                "give either example_inputs (the model is traced) or plan (from gxd.find_units), not both or neither"
            )
        if plan is not None:
            arguments.plan(plan)
        elif needed:
            plan = find_units(self.model, example_inputs)
        if plan is not None and needed:
            check_plan(plan, self.model, self._optimizers)
        self.plan = plan if plan is not None else UnitPlan(())
        processes = Processes(process_group)
        self._paused = 0
        self._hooks: list[Any] = []
        self._parts: list[Part] = []
        tensors = NamedTensors(self.model, self.plan.shapes)
        if self.plan.groups:
            self.plan = processes.agreed_inits(self.plan, tensors[self.plan.groups[0].producers[0].weight].device)
        notices, generator = Notices(None), torch.Generator().manual_seed(seed)
        self.host = Host(self.model, self.plan, tensors, self._optimizers, processes, generator, notices)
        try:
            for number, method in enumerate(methods):
                self._add(number, method, seed)
            self._hook()
        except BaseException:
            self.close()
            raise

    def _add(self, number: int, method: Method, seed: int) -> None:
        # Each has generators of its own, by its name, so that one more method does not change what another one draws.
        # Those of ContinualBackprop are the seed's own.
        twins = sum(part.method.name == method.name for part in self._parts)
        apart = zlib.crc32(method.name.encode()) - zlib.crc32(b"continual_backprop") + 1_000_003 * twins
        seed, processes = (seed + apart) % 2**63, self.host.processes
        generator = torch.Generator().manual_seed(seed)
        noise = torch.Generator().manual_seed((seed + 1 + 7919 * processes.rank) % 2**63)
        host = replace(self.host, generator=generator, notices=Notices(method.utility))
        with torch.no_grad():
            state = processes.agreed(method.init(host))
        scorer = None
        if method.utility is not None:
            scorer = Scorer(
                host.model,
                host.plan,
                host.tensors,
                method.utility,
                method.positions,
                method.decay,
                state.units,
                noise,
                processes=processes,
                notices=host.notices,
                scaler=self.scaler,
            )
            scorer.observer.active = method.observes(state)
        self._parts.append(Part(method, host, state, scorer, f"{number}.{method.name}", host.device))

    # --- what the user calls ------------------------------------------------------------------------------------------

    def observe(
        self,
        logits: Tensor | None = None,
        target: Tensor | None = None,
        *,
        score: Tensor | None = None,
        class_dim: int | None = None,
    ) -> None:
        """Measure the effect of every unit on the output of the forward pass that gave ``logits``.

        Call it after the forward pass and before ``loss.backward()``, once per forward pass. Where no method needs an
        output gradient it does nothing.

        Groups that the output does not depend on are not shown by the pass: if that is so for a whole step, they are
        neither scored nor reset, with a warning.

        Args:
            logits: ``(batch, classes)``, ``(batch, classes, ...)`` or ``(batch, ..., classes)``.
            target: the class indices, as for ``F.cross_entropy`` (-100 is ignored), or class probabilities of the
                logits' shape, in [0, 1]. The single logit of a binary problem, ``(batch, 1)``, may have a target of
                its shape or of ``(batch,)``: 1 counts the logit up, 0 counts it down, and a probability t counts it
                ``2 t - 1`` times. Not needed by ``gxd_sketch`` and ``gxd_all_logit``.
            score: instead of logits and target: ``(batch,)`` or any shape with the batch first, the quantity whose
                change counts (for regression or RL the prediction, the value, the log-probability; for several labels
                per example ``(2 * target - 1) * logits``). Its sum is differentiated.
            class_dim: the axis of the classes, 1 or -1, where the shapes leave it open.
        """
        if not self._hooks:
            raise ObservationError(CLOSED)
        for part in self._parts:
            scorer = part.scorer
            if scorer is None or not scorer.utility.needs_observe:
                continue
            scorer.notices.count_pass()
            if scorer.observer.active:
                self._follow_device(part)
                signs = lambda like, noise=scorer.noise: random_signs(like, noise)  # noqa: E731
                scorer.observe(direction_of(scorer.utility.gradient, logits, target, score, signs, class_dim))

    @torch.no_grad()
    def boundary(self) -> None:
        """A task has ended: let methods act that wait for it. Where there is none it does nothing."""
        for part in self._parts:
            self._follow_device(part)
            self._keep(part, part.method.at_boundary(part.host, part.state))
            self._tell_others(part)
        self._switch()

    def discard(self) -> None:
        """Forget what was observed since the last optimizer step."""
        for part in self._parts:
            part.observed = None
            if part.scorer is not None:
                part.scorer.forget()

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

    def utilities(self, method: str | None = None) -> dict[str, Tensor]:
        """Group name -> ``(size,)`` bias-corrected running utility. ``method``: whose, if several score units."""
        return self._by_group(self._unit_part(method).units.utilities())

    def ages(self, method: str | None = None) -> dict[str, Tensor]:
        """Group name -> ``(size,)`` optimizer steps since each unit was reset."""
        return self._by_group(self._unit_part(method).units.ages())

    def references(self, method: str | None = None) -> dict[str, Tensor]:
        """Group name -> ``(size,)`` bias-corrected running mean of h; ``(views, size)`` for units with several
        views.
        """
        flat, slices = self._unit_part(method).units.references(), self.plan.view_slices
        stacked = [torch.stack([flat[slices[view]] for view in numbers]) for numbers in self.plan.views_of]
        groups = zip(self.plan.groups, stacked, strict=True)
        return {group.name: value[0] if len(value) == 1 else value for group, value in groups}

    @property
    def last_resets(self) -> dict[str, Tensor]:
        """Group name -> the units that the last step has reset."""
        found: dict[str, Tensor] = {}
        for part in self._unit_parts():
            for name, index in part.state.last.items():
                found[name] = torch.cat([found[name], index]).unique() if name in found else index
        return found

    @property
    def total_resets(self) -> int:
        """How many units were reset so far."""
        return sum(part.state.total for part in self._unit_parts())

    @property
    def nonfinite_observations(self) -> int:
        """How many observations were left out because they held an infinity or a NaN."""
        return sum(int(part.units.nonfinite) for part in self._unit_parts())

    def state_dict(self) -> dict[str, Any]:
        """Everything a bit-exact resume needs, as tensors and plain values (safe to load with ``weights_only=True``).

        What the current step has observed is included, so a checkpoint between micro-batches is exact; a forward pass
        that was not observed yet is not.
        """
        return {
            "version": STATE_VERSION,
            "groups": {group.name: group.size for group in self.plan.groups},
            "fingerprint": self.plan.fingerprint(),
            "inits": self.plan.inits(),
            "methods": {part.key: self._saved_part(part) for part in self._parts},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`. Raises :class:`gxd.PlanError`, and changes nothing, if it is of another
        model or plan.

        Rates, maturity and the other settings are those of the constructor.
        """
        own = self.state_dict()
        check_state(state, own)
        states, sizes = [], (len(self.plan.views), len(self.plan.groups))
        for part in self._parts:
            given = state["methods"][part.key]
            states.append(loaded(given["state"], part.state, f"methods.{part.key}.state"))
            like = own["methods"][part.key]
            for name in ("generator", "noise"):
                loaded(given[name], like[name], f"methods.{part.key}.{name}", like[name] is None)
            if part.scorer is not None:
                check_observed(
                    given["observed"], part.units.mean, part.units.utility, *sizes, f"methods.{part.key}.observed"
                )
        self.plan = self.plan.with_inits(state["inits"])
        for part, loaded_state in zip(self._parts, states, strict=True):
            given = state["methods"][part.key]
            part.state, part.host.plan = loaded_state, self.plan
            part.host.generator.set_state(given["generator"].cpu())
            if part.scorer is not None:
                part.scorer.units = part.units
                part.scorer.noise.set_state(given["noise"].cpu())
                part.scorer.load_state_dict(given["observed"])
                part.host.notices.nonfinite = int(part.units.nonfinite)
        self._switch()

    def close(self) -> None:
        """Remove every hook. The model and the optimizer are as if this had never been attached."""
        for part in self._parts:
            if part.scorer is not None:
                part.scorer.observer.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return not self._hooks

    def __deepcopy__(self, memo: dict[Any, Any]) -> Attachment:
        """Copies the model and the optimizer along (or finds their copies in ``memo``), and is attached to these."""
        for part in self._parts:
            if part.scorer is not None:
                part.scorer.use_passes()
        copied = memo[id(self)] = object.__new__(type(self))
        state = {name: value for name, value in vars(self).items() if name != "_hooks"}
        vars(copied).update(copy.deepcopy(state, memo))
        copied._hooks = []
        if self._hooks:  # torch copies an optimizer without its hooks
            copied._hook()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(NO_COPY)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(method.name for method in self.methods) or "no method"
        return f"{type(self).__name__}({names}; {len(self.plan)} groups, {self.plan.size} units)"

    # --- around the optimizer's step ----------------------------------------------------------------------------------

    def _hook(self) -> None:
        self._hooks = after_steps(self._optimizers[-1], self._after_step)
        for optimizer in self._optimizers if self.acts_before_steps is not None else ():
            self._hooks += before_steps(optimizer, self._before_step)
        self._hooks.sort(key=lambda hook: not isinstance(hook, RemovableHandle))  # what made hooks possible goes last

    @torch.compiler.disable
    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer) -> None:
        if was_skipped(optimizer):
            return
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer unscales the gradients itself
        for part in self._parts:
            self._follow_device(part)
            part.host.grad_scale = float(scale) if scale is not None else 1.0
            part.host.stepping = optimizer
            try:
                self._keep(part, part.method.before_step(part.host, part.state))
            finally:
                part.host.stepping = None

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():  # a compiled optimizer.step stops here
            return _outside_the_graph(self._after_step, optimizer, args, kwargs)
        if is_nested(optimizer):  # an optimizer whose step calls its parent's: the outer one counts
            return
        if was_skipped(optimizer):
            self.discard()
        else:
            self.stepped()

    @torch.no_grad()
    def stepped(self) -> None:
        """The optimizer has stepped."""
        try:
            observed = [self._observed(part) for part in self._parts]  # all, before a method changes the weights
        except BaseException:
            self.discard()
            raise
        try:
            for part, units in zip(self._parts, observed, strict=True):
                self._advance(part, units)
        finally:  # when all have counted the step, so that what one has reset is of age 0 to the others
            for part in self._parts:
                self._tell_others(part)

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
            self._follow_device(part)
        units = scorer.finish()
        if isinstance(units, UnitState):
            return units
        if self.on_unobserved == "raise":
            raise ObservationError(units)
        if self.on_unobserved == "warn" and not part.told:
            part.told = True
            warn(f"{units}. Such steps are passed over from here on", ObservationWarning)
        return None

    def _advance(self, part: Part, observed: UnitState | None) -> None:
        """The optimizer has stepped: let a method act. If that fails, the step counts for nothing: its state is what
        it was before the step was observed.
        """
        self._follow_device(part)
        host, scorer, notices = part.host, part.scorer, part.host.notices
        notices.passes, host.observed = 0, observed
        try:
            state = part.method.after_step(host, part.state)
        finally:
            host.observed = None
        before = part.state
        self._keep(part, state)
        if scorer is None:
            return
        units = part.units
        scorer.observer.active = not self._paused and part.method.observes(state)
        # The count is on the device, and is looked at when the host has to wait anyway.
        if host.chosen or (units.nonfinite is not before.units.nonfinite and units.birth.device.type == "cpu"):
            notices.of_nonfinite(int(units.nonfinite))

    def _keep(self, part: Part, state: Any) -> None:
        part.state = state
        if part.scorer is not None:
            part.scorer.units = part.units

    def _tell_others(self, part: Part) -> None:
        """Of the units that a method has reset."""
        chosen, part.host.chosen = part.host.chosen, []
        for other in self._parts if chosen else ():
            if other is not part:
                self._keep(other, other.method.on_reset(other.host, other.state, chosen))

    # --- for a compiled step ------------------------------------------------------------------------------------------

    def watched(self) -> list[tuple[Part, Scorer]]:
        """The methods that observe the coming step."""
        return [(part, part.scorer) for part in self._parts if part.scorer is not None and part.scorer.observer.active]

    @property
    def own_hooks(self) -> tuple[Any, ...]:
        """What may hang on the model and on the optimizer without being foreign."""
        return (self._after_step, *(part.scorer.observer for part in self._parts if part.scorer is not None))

    @property
    def acts_before_steps(self) -> str | None:
        """The first method that does, if there is one."""
        for method in self.methods:
            if type(method).before_step is not Method.before_step:
                return method.name
        return None

    # --- help ---------------------------------------------------------------------------------------------------------

    def _switch(self) -> None:
        for part in self._parts:
            if part.scorer is not None:
                part.scorer.observer.active = not self._paused and part.method.observes(part.state)

    def _follow_device(self, part: Part) -> None:
        """Move what a method remembers to where the model is."""
        device = part.host.device
        if device != part.device:
            part.device, part.state = device, mapped(part.state, lambda tensor: tensor.to(device))
            if part.scorer is not None:
                part.scorer.units = part.units
                part.scorer.to(device)

    def _unit_parts(self) -> list[Part]:
        return [part for part in self._parts if isinstance(part.state, UnitResets)]

    def _unit_part(self, name: str | None) -> Part:
        parts = self._unit_parts()
        found = [part for part in parts if name in (None, part.method.name, part.key)]
        if len(found) != 1:
            keys = ", ".join(repr(part.key) for part in parts) or "none"
            raise KeyError(f"method={name!r} does not name one of the attached methods that score units: {keys}")
        return found[0]

    def _by_group(self, flat: Tensor) -> dict[str, Tensor]:
        return {g.name: flat[s].clone() for g, s in zip(self.plan.groups, self.plan.unit_slices, strict=True)}

    def _saved_part(self, part: Part) -> dict[str, Any]:
        return {
            "utility": None if part.method.utility is None else part.method.utility.name,
            "observed": None if part.scorer is None else part.scorer.state_dict(),
            "generator": part.host.generator.get_state(),
            "noise": None if part.scorer is None else part.scorer.noise.get_state(),
            "state": saved(part.state),
        }


@torch.compiler.disable
def _outside_the_graph(function: Callable[..., None], *arguments: Any) -> None:
    function(*arguments)
