"""Continual Backpropagation on any module: the rooms, hooked to the optimizer's step."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gxd import arguments
from gxd.errors import ObservationError, PlanError
from gxd.guards import NO_COPY, STATE_VERSION, check_arguments, check_plan, check_state, with_inits
from gxd.notices import Notices
from gxd.observe.direction import direction_of, random_signs
from gxd.plan.find import find_units
from gxd.plan.layouts import NamedTensors, state_dtype, unwrap
from gxd.plan.units import Group, UnitPlan, tensor_names
from gxd.processes import Processes
from gxd.reset.optimizers import NewState
from gxd.reset.units import operate
from gxd.reset.writes import SetEntry
from gxd.score.scorer import Scorer
from gxd.score.statistics import Statistics
from gxd.score.tally import side_by_side
from gxd.score.utilities import Utility, get_utility
from gxd.select.lowest import Schedule, lowest
from gxd.steps import after_steps, is_nested, stepping, was_skipped


class ContinualBackprop:
    """Reset the cheapest units of a model while it trains.

    Attach it to a model and its optimizer; ageing, scoring and resets then run after every ``optimizer.step()``. The
    model is not wrapped, its ``state_dict`` gains no key, and gradients are untouched.

    Args:
        model: any module the plan can be made from.
        optimizer: the optimizer that trains it, or several (Muon for matrices, AdamW for the rest) in the order they
            step in; resets follow the step of the last.
        example_inputs: as for :func:`gxd.find_units`; give this or ``plan``.
        plan: a plan made before.
        utility: one of :func:`gxd.utilities`.
        replacement_rate: the share of the eligible units of each group that is reset per step; groups with a rate of
            their own keep it.
        maturity: a unit is eligible when more than this many steps old.
        decay: of the running averages, per step.
        compensate: whether to move the mean contribution of a unit into its consumers' biases when it is reset.
        score_every: score only every so many steps; the decay is adjusted so that the horizon stays the same.
        seed: of the fresh weights and of random directions. The global random state is never used.
        positions: ``signed`` sums the effect of a unit over positions (space, tokens) before taking its absolute
            value; ``abs`` takes the absolute value at every position, as the paper seems to have done.
        step_policy: what becomes of Adam's ``step`` on a reset: ``keep`` or ``reset``.
        scaler: the ``GradScaler``, if there is one: a change of its scale tells that a step was skipped, so that the
            skipped batch is forgotten, and ``loss_gradient`` needs it to undo the scale.
        process_group: of the processes that train together. Default: the default group if ``torch.distributed`` is
            initialised; False: none.

    Example::

        cbp = gxd.ContinualBackprop(model, optimizer, example_inputs=x[:2], utility="gxd")
        for x, y in stream:
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            cbp.observe(logits, y)
            loss.backward(); optimizer.step(); optimizer.zero_grad()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        example_inputs: Tensor | tuple[Any, ...] | Mapping[str, Any] | list[Any] | None = None,
        plan: UnitPlan | None = None,
        utility: str = "gxd",
        replacement_rate: float = 1e-4,
        maturity: int = 100,
        decay: float = 0.99,
        compensate: bool = True,
        score_every: int = 1,
        seed: int = 0,
        positions: str = "signed",
        step_policy: str = "keep",
        scaler: Any = None,
        process_group: Any = None,
    ) -> None:
        check_arguments(replacement_rate, maturity, decay, score_every, seed, positions, step_policy)
        arguments.module(model)
        self._optimizers = tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)
        for one in self._optimizers:
            arguments.optimizer(one)
        if not self._optimizers:
            raise ValueError("optimizer is an empty list: give the optimizer that trains the model")
        stepping(self._optimizers[-1])
        arguments.switch("compensate", compensate)
        if scaler is not None and not hasattr(scaler, "get_scale"):
            raise TypeError(f"scaler must be a torch.amp.GradScaler or None, got {type(scaler).__name__}")
        self._utility: Utility = get_utility(utility)
        self.model, self.optimizer = unwrap(model), optimizer
        if (plan is None) == (example_inputs is None):
            raise ValueError(
                "give either example_inputs (the model is traced) or plan (from gxd.find_units), not both or neither"
            )
        if plan is not None:
            arguments.plan(plan)
        self.plan = plan if plan is not None else find_units(self.model, example_inputs)
        check_plan(self.plan, self.model, self._optimizers)
        self.replacement_rate, self.maturity, self.decay = replacement_rate, maturity, decay
        self.compensate, self.score_every, self.step_policy = compensate, score_every, step_policy
        self.scaler, self._processes = scaler, Processes(process_group)

        self._tensors = NamedTensors(self.model, self.plan.shapes)
        self._check_new_state = NewState(self._optimizers, self._tensors)
        first = self._tensors[self.plan.groups[0].producers[0].weight]
        # One observation stands for score_every steps.
        self._statistics = Statistics(self.plan, decay**score_every, first.device, state_dtype(self._tensors))
        self._schedules = [Schedule(g.size, self._rate(g), maturity) for g in self.plan.groups]
        self._generator = torch.Generator().manual_seed(seed)
        self.plan = self._processes.agreed_inits(self.plan, first.device)
        self._noise = torch.Generator().manual_seed(seed + 1 + 7919 * self._processes.rank)
        self.positions = positions
        self._scale: float | None = None  # of the loss, when this step's first pass began
        self._notices = Notices(self._utility)
        self.last_resets: dict[str, Tensor] = {}
        self.total_resets = 0
        self._scorer = Scorer(
            self.model,
            self.plan,
            self._tensors,
            self._utility,
            self._statistics,
            positions,
            self._noise,
            unscale=self._unscale,
            begin=self._pass_begins,
            reduce=self._processes.sum if self._processes.several else None,
        )
        self._scorer.observer.warn_of(self.plan.unseen, self.model)
        self._hooks = self._hooked()

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

        Call it after the forward pass and before ``loss.backward()``, once per forward pass. Utilities that need no
        output gradient ignore it.

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
            raise ObservationError("observe() after close(): this ContinualBackprop is detached; make a new one")
        if not self._utility.needs_observe:
            return
        self._notices.count_pass()
        if not self._scorer.observer.active:
            return
        self._scorer.observe(direction_of(self._utility.gradient, logits, target, score, self._signs, class_dim))

    def utilities(self) -> dict[str, Tensor]:
        """Group name -> ``(size,)`` bias-corrected running utility."""
        return self._by_group(self._statistics.utilities())

    def ages(self) -> dict[str, Tensor]:
        """Group name -> ``(size,)`` optimizer steps since each unit was reset."""
        return self._by_group(self._statistics.ages())

    def references(self) -> dict[str, Tensor]:
        """Group name -> ``(size,)`` bias-corrected running mean of h; ``(views, size)`` for units with several
        views.
        """
        stacked = self._references(range(len(self.plan.groups)))
        return {name: value[0] if len(value) == 1 else value for name, value in stacked.items()}

    @property
    def nonfinite_observations(self) -> int:
        """How many observations were left out because they held an infinity or a NaN."""
        return int(self._statistics.nonfinite)

    def state_dict(self) -> dict[str, Any]:
        """Everything a bit-exact resume needs, as tensors and plain values (safe to load with ``weights_only=True``).

        What the current step has observed is included, so a checkpoint between micro-batches is exact; a forward pass
        that was not observed yet is not.
        """
        self._scorer.use_passes()
        return {
            "version": STATE_VERSION,
            "utility": self._utility.name,
            "groups": {group.name: group.size for group in self.plan.groups},
            "fingerprint": self.plan.fingerprint(),
            "statistics": self._statistics.state_dict(),
            "tally": self._scorer.tally.state_dict(),
            "schedules": [schedule.state_dict() for schedule in self._schedules],
            "inits": [[[p.init.kind, p.init.scale] for p in group.producers] for group in self.plan.groups],
            "generator": self._generator.get_state(),
            "noise": self._noise.get_state(),
            "last_resets": {name: index.clone() for name, index in self.last_resets.items()},
            "total_resets": self.total_resets,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`. Raises :class:`gxd.PlanError`, and changes nothing, if it is of another
        model or plan.

        Rates, maturity and the other settings are those of the constructor.
        """
        check_state(state, self.plan, self._utility, self.state_dict())
        self.plan = with_inits(self.plan, state["inits"])
        self._statistics.load_state_dict(state["statistics"])
        self._scorer.tally.load_state_dict(state["tally"])
        for schedule, saved in zip(self._schedules, state["schedules"], strict=True):
            schedule.load_state_dict(saved)
        self._generator.set_state(state["generator"].cpu())
        self._noise.set_state(state["noise"].cpu())
        self.last_resets = {name: index.clone() for name, index in state["last_resets"].items()}
        self.total_resets = int(state["total_resets"])
        if not self._scorer.tally.empty:
            self._statistics.references_with(*self._scorer.tally.means())
        self._notices.nonfinite = self.nonfinite_observations
        self._scorer.observer.clear()
        self._scorer.observer.active = self._is_scored()

    def close(self) -> None:
        """Remove every hook. The model and the optimizer are as if this had never been attached."""
        self._scorer.observer.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __deepcopy__(self, memo: dict[Any, Any]) -> ContinualBackprop:
        """Copies the model and the optimizer along (or finds their copies in ``memo``), and is attached to these."""
        self._scorer.use_passes()
        copied = memo[id(self)] = object.__new__(type(self))
        state = {name: value for name, value in vars(self).items() if name != "_hooks"}
        vars(copied).update(copy.deepcopy(state, memo))
        copied._hooks = copied._hooked() if self._hooks else []  # torch copies an optimizer without its hooks
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(NO_COPY)

    def __enter__(self) -> ContinualBackprop:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"ContinualBackprop(utility={self._utility.name!r}, {len(self.plan)} groups, {self.plan.size} units, "
            f"replacement_rate={self.replacement_rate:g}, maturity={self.maturity}, step={self._statistics.step}, "
            f"total_resets={self.total_resets})"
        )

    def _hooked(self) -> list[Any]:
        return after_steps(self._optimizers[-1], self._after_step)

    # --- select -> operate --------------------------------------------------------------------------------------------

    @torch.compiler.disable  # a compiled optimizer.step stops here
    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_nested(optimizer):  # an optimizer whose step calls its parent's: the outer one counts
            return
        self._scale, self._notices.passes = None, 0
        if was_skipped(optimizer):
            self._scorer.forget()
            return
        before = self._statistics.now()
        if self._scorer.observer.active:
            self._scorer.finish()
            self._warn_of_unreached(self._scorer.unreached)
        self._advance(before)

    def _advance(self, before: dict[str, Any]) -> None:
        """The statistics are up to date: count the step, and reset what is due. If that fails, the step counts for
        nothing: they are again what they were ``before`` it was observed.
        """
        self._notices.passes = 0
        step, resets = self._statistics.step + 1, self.last_resets
        try:
            self._statistics.step, self.last_resets = step, {}
            due = [schedule.advance(step) for schedule in self._schedules]
            if any(schedule.rate for schedule in self._schedules):
                self._check_new_state()
            if any(due):
                self._reset(due)
        except BaseException:
            self._statistics.take_back(before)
            self.last_resets = resets
            for schedule in self._schedules:
                schedule.undo(step)
            self._scorer.observer.active = self._is_scored()
            raise
        if any(due) or self._statistics.alarm:
            self._statistics.alarm = False
            self._notices.of_nonfinite(self.nonfinite_observations)
        self._scorer.observer.active = self._is_scored()

    def _reset(self, due: Sequence[int]) -> None:
        self._scorer.follow_device()
        replaced = self._tensors.replaced()
        if replaced:
            raise PlanError(
                f"{', '.join(map(repr, replaced))} was replaced (or pruned, or parametrized) after this "
                "ContinualBackprop was made: a reset would write to what is no longer used, so nothing was reset. "
                "close() this one, and make another with a new plan"
            )
        statistics, views_of = self._statistics, self._scorer.tally.views_of
        utilities, eligible = statistics.candidates(self.maturity)
        selection: dict[int, tuple[Group, Tensor]] = {}
        for number, count in enumerate(due):
            if count and not self._may_be_reset(number):
                self._schedules[number].cancel(count)
            elif count:
                units = statistics.unit_slices[number]
                index = self._processes.agree(lowest(utilities[units], eligible[units], count))
                selection[number] = (self.plan.groups[number], index.cpu())
        if not selection:
            return
        chosen = list(selection.values())
        forgetting = statistics.forgetting(
            side_by_side([index + statistics.unit_slices[n].start for n, (_, index) in selection.items()]),
            side_by_side(
                [index + statistics.view_slices[v].start for n, (_, index) in selection.items() for v in views_of[n]]
            ),
        )
        counts = {
            "last_resets": {group.name: index for group, index in chosen},
            "total_resets": self.total_resets + sum(len(index) for _, index in chosen),
        }
        operate(
            self._tensors,
            chosen,
            self._references(selection) if self.compensate else {},
            self._generator,
            optimizers=self._optimizers,
            step_policy=self.step_policy,
            also=[*forgetting, *(SetEntry(vars(self), name, value) for name, value in counts.items())],
        )

    # --- help ---------------------------------------------------------------------------------------------------------

    def _rate(self, group: Group) -> float:
        return self.replacement_rate if group.rate is None else group.rate

    def _is_scored(self) -> bool:
        return self._statistics.step % self.score_every == 0

    def _by_group(self, flat: Tensor) -> dict[str, Tensor]:
        return {g.name: flat[s].clone() for g, s in zip(self.plan.groups, self._statistics.unit_slices, strict=True)}

    def _references(self, numbers: Iterable[int]) -> dict[str, Tensor]:
        """Group name -> ``(views, size)``, of the groups of these numbers."""
        flat, slices = self._statistics.references(), self._statistics.view_slices
        return {
            self.plan.groups[n].name: torch.stack([flat[slices[view]] for view in self._scorer.tally.views_of[n]])
            for n in numbers
        }

    def _signs(self, like: Tensor) -> Tensor:
        return random_signs(like, self._noise)

    def _unscale(self) -> float:
        return 1.0 if self.scaler is None else 1.0 / float(self.scaler.get_scale())

    def _pass_begins(self) -> None:
        """A scale that has changed since this step's first pass tells that its step was skipped."""
        if not self._utility.needs_observe:
            self._notices.count_pass()
        if self.scaler is None or not self._scorer.observer.active:  # to read the scale takes a host round trip
            return
        scale = float(self.scaler.get_scale())
        if self._scale is not None and scale != self._scale:
            self._scorer.tally.clear()
            self._scorer.observer.passes = []
            self._notices.passes = 0
        self._scale = scale

    def _warn_of_unreached(self, numbers: Iterable[int]) -> None:
        new = [n for n in numbers if not self._notices.have_named(self.plan.groups[n].name)]
        if self._processes.several:  # another one may have shown them
            new = [n for n in new if not self._statistics.shown(n)]
        if new:
            self._notices.of_unreached([self.plan.groups[n].name for n in new])

    def _may_be_reset(self, number: int) -> bool:
        """A group is left alone, with a warning, on steps that do not show it, and while it is frozen."""
        group, why = self.plan.groups[number], None
        if not self._statistics.shown(number):
            why = (
                "no forward pass of this step has shown its units (a branch that does not run, another task's head, "
                "layers in evaluation mode, or a region checkpointed with use_reentrant=True)"
            )
        else:
            frozen = [name for name in tensor_names([group]) if self._tensors.is_frozen(name)]
            if frozen:
                why = f"{', '.join(frozen)} was frozen (requires_grad=False)"
        if why is not None:
            self._notices.of_left_alone(group.name, why)
        return why is None
