"""Hang plasticity methods on a model and its optimizer: what the user calls."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gxd.acting import Acting, OnReset, united
from gxd.checkpoint import STATE_VERSION, check_state
from gxd.diagnose.logged import ages_at_reset, logged
from gxd.errors import ObservationError
from gxd.methods.base import Method
from gxd.methods.registry import method as named
from gxd.methods.task_data import TaskData
from gxd.methods.unit_reset import UnitReset, UnitResets
from gxd.observe.direction import IGNORED, direction_of, noise
from gxd.observe.output import OutputObserver, Take
from gxd.part import Part
from gxd.plan.units import UnitPlan
from gxd.sharded import reshard

CLOSED = "{}() after close(): nothing is attached any more; make a new one"
NO_COPY = (
    "a ContinualBackprop, as all that gxd.attach returns, is hooked to its model and its optimizer, so it cannot be "
    "pickled, nor copied by copy.copy(): "
    "save its state_dict() and load that into a new one, or copy.deepcopy((model, optimizer, cbp)) all three at once"
)


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *methods: Method | str,
    plan: UnitPlan | None = None,
    example_inputs: Tensor | tuple[Any, ...] | Mapping[str, Any] | list[Any] | None = None,
    scaler: Any = None,
    seed: int = 0,
    process_group: Any = None,
    on_unobserved: str = "raise",
    on_reset: OnReset | None = None,
) -> Attachment:
    """Let methods act around every ``optimizer.step()``, in the order they are given.

    The model is not wrapped, and its ``state_dict`` gains no key.

    Args:
        model: any module; methods that reset units need one that a plan can be made from. One that is sharded by
            ``fully_shard`` (FSDP2) needs a ``plan`` that was made before.
        optimizer: the optimizer that trains it, or several (Muon for matrices, AdamW for the rest) in the order they
            step in; methods act after the step of the last.
        methods: names of registered methods (``"gxd"``), what :func:`gxd.method` returns, or your own.
        plan: from :func:`gxd.find_units`, for methods that need units; or give ``example_inputs``.
        example_inputs: as for :func:`gxd.find_units`.
        scaler: the ``GradScaler``, if there is one: a change of its scale tells that a step was skipped, so that the
            skipped batch is forgotten, and ``loss_gradient`` needs it to undo the scale.
        seed: of the fresh weights and of random directions. The global random state is never used.
        process_group: of the processes that train together. Default: the default group if ``torch.distributed`` is
            initialised; False: none.
        on_unobserved: what becomes of a step that a method needs to observe, and that showed it nothing: ``raise``;
            ``warn`` once, and ``skip``, go on as on a step that is not scored.
        on_reset: as for :meth:`Attachment.on_reset`.

    Example::

        resets = gxd.attach(model, optimizer, "gxd", example_inputs=x[:2])
        for x, y in stream:
            loss = F.cross_entropy(model(x), y)
            loss.backward(); optimizer.step(); optimizer.zero_grad()
    """
    return Attachment(
        model,
        optimizer,
        [named(one) if isinstance(one, str) else one for one in methods],
        plan=plan,
        example_inputs=example_inputs,
        scaler=scaler,
        seed=seed,
        process_group=process_group,
        on_unobserved=on_unobserved,
        on_reset=on_reset,
    )


class Attachment(Acting):
    """What :func:`gxd.attach` returns.

    Attributes:
        model: the model, unwrapped.
        optimizer: as it was given.
        plan: the units of the model; without groups if no method needs them.
        methods: as they were given.
    """

    # --- what the user calls ------------------------------------------------------------------------------------------

    def observe(
        self,
        logits: Tensor | None = None,
        target: Tensor | None = None,
        *,
        score: Tensor | None = None,
        class_dim: int | None = None,
        ignore_index: int = IGNORED,
    ) -> None:
        """Measure the effect of every unit on the output of the forward pass that gave ``logits``.

        Call it after the forward pass and before ``loss.backward()``, once per forward pass. Where no method needs an
        output gradient it does nothing.

        Groups that the output does not depend on are not shown by the pass: if that is so for a whole step, they are
        neither scored nor reset, with a warning.

        Args:
            logits: ``(batch, classes)``, ``(batch, classes, ...)`` or ``(batch, ..., classes)``.
            target: the class indices, as for ``F.cross_entropy``, or class probabilities of the logits' shape, in
                [0, 1], all 0 where a position is masked. The single logit of a binary problem, ``(batch, 1)``, may have
                a target of its shape or of ``(batch,)``: 1 counts the logit up, 0 counts it down, and a probability t
                counts it ``2 t - 1`` times. Not needed by ``gxd_sketch``, ``gxd_all_logit`` and ``gxd_kl``.
            score: instead of logits and target: ``(batch,)`` or any shape with the batch first, the quantity whose
                change counts (for regression or RL the prediction, the value, the log-probability; for several labels
                per example ``(2 * target - 1) * logits``). Its sum is differentiated, whatever direction a utility
                would choose; ``gxd_kl`` squares the effects.
            class_dim: the axis of the classes, 1 or -1, where the shapes leave it open.
            ignore_index: the class index that does not count, as of ``F.cross_entropy``.
        """
        if not self._hooks:
            raise ObservationError(CLOSED.format("observe"))
        if not isinstance(ignore_index, int):
            raise TypeError(f"ignore_index={ignore_index!r} must be a class index, a whole number")
        for part in self._parts:
            scorer = part.scorer
            if scorer is None or not scorer.utility.needs_observe:
                continue
            scorer.notices.count_pass()
            if scorer.observer.active:
                part.follow_device()
                draw = noise(scorer.utility.gradient, scorer.noise)
                scorer.observe(
                    direction_of(scorer.utility.gradient, logits, target, score, draw, class_dim, ignore_index)
                )
        for part in self._parts:
            outputs = part.outputs
            if outputs is not None and self._pulls(part):
                part.host.notices.count_pass()
                draw = noise(outputs.direction, outputs.noise)
                direction = direction_of(outputs.direction, logits, target, score, draw, class_dim, ignore_index)
                scale = None if self.scaler is None else float(self.scaler.get_scale())
                outputs.add(direction, part.host.parameters(), scale)

    def observe_output(
        self,
        module: nn.Module | str | None = None,
        select: Take | None = None,
        target: Take | None = None,
        *,
        defer: bool = False,
    ) -> OutputObserver:
        """Observe what a module returns in every training pass, as :meth:`observe` right after it would, bit for bit:
        for training loops that hide the logits.

        Args:
            module: the model (None), the name of a part of it, or any module: a head, or the loss function, which is
                called with logits and target.
            select: ``(args, kwargs, output) ->`` the logits, of the call of the module; or a dict of arguments of
                :meth:`observe` (``{"score": ...}``); or None: this call is not observed. Default: the tensor it
                returns, or its ``logits``.
            target: ``(args, kwargs, output) ->`` the target. Default: the keyword argument ``labels``, if there is one.
            defer: keep the outputs until ``observe()`` of what this returns is called, which must be before the
                backward pass; ``clear()`` drops them.

        Returns:
            what has ``remove()``. :meth:`close` removes it, too.

        Example::

            cbp.observe_output()  # a model that is called with labels=..., and returns an object with logits
            cbp.observe_output("loss_fn", lambda args, *_: args[0], lambda args, *_: args[1])
        """
        if not self._hooks:
            raise ObservationError(CLOSED.format("observe_output"))
        self._outputs.append(OutputObserver(self, module, select, target, defer))
        return self._outputs[-1]

    @torch.no_grad()
    def boundary(self, data: Iterable[Any] | None = None, loss: Callable[[Any, Any], Tensor] | None = None) -> None:
        """A task has ended, and the next begins: let methods act that wait for it. Where there is none it does nothing.

        Args:
            data: batches ``(x, y)`` of the task that begins, for methods that need them (``dash``): a list or a
                ``DataLoader``, gone through once by each of them. ``x`` as for :func:`gxd.find_units`: a tensor, a
                tuple of arguments, or a dict of them. In several processes, the batches of this one.
            loss: ``loss(output, y)``, a scalar, as ``F.cross_entropy``.
        """
        self._not_while_evaluating("boundary()")
        if self.closed:
            raise RuntimeError(CLOSED.format("boundary"))
        reshard(self._sharded)
        given = None if data is None and loss is None else TaskData(data, loss)
        needing = [part.method.name for part in self._parts if part.method.needs_data]
        if given is None and needing:
            raise ValueError(
                f"{', '.join(needing)} needs data of the task that begins: boundary(data, loss), where data holds "
                "batches (x, y), and loss(output, y) is what is trained on. Nothing was changed"
            )
        if given is not None and len(needing) > 1:
            given.check_repeatable(needing)
        try:
            with self.paused():
                for part in self._parts:
                    part.follow_device()
                    part.host.data = given
                    try:
                        part.keep(part.method.at_boundary(part.host, part.state))
                    finally:
                        part.host.data = None
                        self._tell_others(part)
        finally:
            self._tell_listeners()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within this context the model has the weights that it is to be evaluated with: for ``hare_and_tortoise`` the
        slow ones. Where no method has any it does nothing. Afterwards, also after an exception, parameters and buffers
        are those of training again, bit for bit.

        Modes are left alone: call ``model.eval()`` as ever. Passes are not observed, nested contexts are one, and
        ``optimizer.step()``, :meth:`boundary` and :meth:`load_state_dict` are errors inside.

        Example::

            with attached.evaluating(), torch.no_grad():
                accuracy = evaluate(model.eval())
            model.train()
        """
        weights: dict[str, Tensor] = {}
        for part in self._parts if not self._evaluating else ():
            part.follow_device()
            weights.update(part.method.evaluation_weights(part.host, part.state))
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        kept = [(tensor, tensor.detach().clone()) for name, tensor in named.items() if weights]
        self._evaluating += 1
        try:
            with self.paused():
                for name, weight in weights.items():
                    named[name].data.copy_(weight)  # unnoticed by a graph that waits for its backward pass
                torch.clear_autocast_cache()  # of the weights before, in 16 bits
                yield
        finally:
            self._evaluating -= 1
            for tensor, before in kept:
                tensor.data.copy_(before)
            torch.clear_autocast_cache()

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

    def metrics(self) -> dict[str, float]:
        """What to log, by name: one flat dict of numbers for TensorBoard, W&B or MLflow. NaN where there is nothing.

        No forward pass is made and nothing changes, so it may be called at any time, from several places. Ages at reset
        and churn are those of the last 1000 resets of each method, and are part of the state, exact on resume.

        ======================================  =======================================================================
        ``gxd/resets``                          units reset so far, by all methods
        ``gxd/churn``                           share of the last resets that hit a newborn: a unit younger than 1.5
                                                times its earliest possible age at a reset (the maturity, or more where
                                                resets are rare; of ReDo ``every``)
        ``gxd/median_age_at_reset``             median age of the units of the same resets, in steps
        ``gxd/reach``                           share of all units that were reset in the second half of the steps so
                                                far: how much of the network the resets renew
        ``gxd/nonfinite_observations``          observations left out because they held an infinity or a NaN
        ``gxd/<method>/resets``                 units reset so far by this method
        ``gxd/<method>/utility_median``         median over all units of the running utility; also ``utility_05`` and
                                                ``utility_95``, the 5 % and 95 % quantiles
        ``gxd/<method>/age_median``             median age of all units, in steps
        ``gxd/<method>/reference_max``          largest running mean of a unit, in absolute value
        ``gxd/weight_norm``, ``gxd/bias_norm``  L2 norm of all parameters with two or more axes; of all named bias
        ``gxd/gradient_norm``                   L2 norm of the gradients that the parameters hold now; NaN after
                                                ``zero_grad()``
        ======================================  =======================================================================

        Example::

            for name, value in cbp.metrics().items():
                writer.add_scalar(name, value, step)
        """
        return logged(self.model, self.plan, self._unit_methods())

    def reset_ages(self, count: int) -> tuple[float, float]:
        """Churn and median age, as in :meth:`metrics`, of the last ``count`` resets of each method, at most 1000."""
        return ages_at_reset(self.plan, self._unit_methods().values(), count)

    @property
    def last_resets(self) -> dict[str, Tensor]:
        """Group name -> the units that the last step has reset."""
        return united([(name, units) for part in self._unit_parts() for name, units in part.state.last.items()])

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

        Where processes share out the parameters (FSDP2), all of them call it, for what a method keeps of parameters is
        gathered. Each then loads its own: what it has observed of its own examples, and random directions, are in it.
        """
        return {
            "version": STATE_VERSION,
            "groups": {group.name: group.size for group in self.plan.groups},
            "fingerprint": self.plan.fingerprint(),
            "inits": self.plan.inits(),
            "methods": {part.key: part.saved() for part in self._parts},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`. Raises :class:`gxd.PlanError`, and changes nothing, if it is of another
        model or plan.

        Rates, maturity and the other settings are those of the constructor.
        """
        self._not_while_evaluating("load_state_dict()")
        own = self.state_dict()
        check_state(state, own)
        found = [part.checked(state["methods"][part.key], own["methods"][part.key]) for part in self._parts]
        self.plan = self.plan.with_inits(state["inits"])
        for part, resumed in zip(self._parts, found, strict=True):
            part.resume(resumed, self.plan)
        self._switch()

    def __deepcopy__(self, memo: dict[Any, Any]) -> Attachment:
        """Copies the model and the optimizer along (or finds their copies in ``memo``), and is attached to these."""
        self._not_while_evaluating("copy.deepcopy()")
        for part in self._parts:
            if part.scorer is not None:
                part.scorer.use_passes()
        copied = memo[id(self)] = object.__new__(type(self))
        state = {name: value for name, value in vars(self).items() if name not in ("_hooks", "_listeners")}
        vars(copied).update(copy.deepcopy(state, memo))
        copied._hooks, copied._listeners = [], OrderedDict()
        copied._paused, copied._in_hook = 0, False  # nobody would ever leave the context for it
        copied._switch()
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

    # --- help ---------------------------------------------------------------------------------------------------------

    def _unit_parts(self) -> list[Part]:
        return [part for part in self._parts if isinstance(part.state, UnitResets)]

    def _unit_methods(self) -> dict[str, tuple[UnitReset, UnitResets]]:
        """The methods that reset units, by name, or by key where several have the same, and their states."""
        names = Counter(method.name for method in self.methods)
        parts = {p.method.name if names[p.method.name] == 1 else p.key: p for p in self._unit_parts()}
        return {name: (p.method, p.state) for name, p in parts.items() if isinstance(p.method, UnitReset)}

    def _unit_part(self, name: str | None) -> Part:
        parts = self._unit_parts()
        found = [part for part in parts if name in (None, part.method.name, part.key)]
        if len(found) != 1:
            keys = ", ".join(repr(part.key) for part in parts) or "none"
            raise KeyError(f"method={name!r} does not name one of the attached methods that score units: {keys}")
        return found[0]

    def _by_group(self, flat: Tensor) -> dict[str, Tensor]:
        return {g.name: flat[s].clone() for g, s in zip(self.plan.groups, self.plan.unit_slices, strict=True)}
