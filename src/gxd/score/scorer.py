"""From the forward passes of one step to the state of the units after it: observe, score, average, in that order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from gxd.checkpoint import mapped
from gxd.errors import ObservationError
from gxd.notices import Notices
from gxd.observe.backward import Backwards
from gxd.observe.captures import Gradients, Observer, Pass
from gxd.observe.direction import Direction
from gxd.observe.reading import sum_of
from gxd.plan.units import UnitPlan
from gxd.processes import Processes
from gxd.score.curvature import needing_second_derivatives
from gxd.score.scoring import Scoring
from gxd.score.state import UnitState
from gxd.score.sums import NOTHING, Sums
from gxd.score.utilities import Utility

OBSERVED = "observe() was already called for this forward pass: call it once per forward pass"
NO_PASS = (
    "observe() saw no training forward pass: run the model in training mode (model.train()) and with "
    "gradients enabled, after gxd was attached "
    "to it; and once per forward pass: this one may have been observed already. "
    "A compiled model that ran before must be recompiled (torch.compiler.reset())"
)


class Scorer:
    """Collects what one step shows of the units of a model.

    Attributes:
        units: what is known of them so far; the owner keeps it up to date.
        sums: what the passes since the last step have shown.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: UnitPlan,
        tensors: Mapping[str, Tensor],
        utility: Utility,
        positions: str,
        decay: float,
        units: UnitState,
        noise: torch.Generator,
        *,
        processes: Processes,
        notices: Notices,
        scaler: Any = None,
    ) -> None:
        self.plan, self.tensors, self.utility, self.units = plan, tensors, utility, units
        self.noise, self.processes, self.notices, self.scaler = noise, processes, notices, scaler
        self.scoring = Scoring(plan, utility, positions, decay, noise, processes)
        self.scoring.follow(units.mean)
        self.sums: Sums = NOTHING
        backwards = Backwards(tensors, weights_of(plan), self._void) if utility.gradient == "loss" else None
        self.observer = Observer(model, plan, backwards, self._pass_begins)
        self.observer.warn_of(plan.unseen, model)
        self._scale: float | None = None  # of the loss, when this step's first pass began

    def observe(self, direction: Direction) -> None:
        """Score the passes behind an output by its gradients in each direction."""
        self.sums = self.scored(self.units, self.sums, self.tensors, direction)

    def scored(self, units: UnitState, sums: Sums, tensors: Mapping[str, Tensor], direction: Direction) -> Sums:
        """The sums with the passes behind an output, which are used up."""
        passes = [one for one in self.observer.passes if one]
        if not passes:
            raise ObservationError(NO_PASS if sums.empty else OBSERVED)
        # Several directions at once, where that takes little memory: values without positions.
        twice = self.utility.curvature
        stacked = direction.several and not twice and all(c.source.dim() == 2 for one in passes for c in one.values())
        gradients = self.observer.gradients(direction, passes, stacked, graph=twice)
        first = next(gradients)
        if not first:
            for capture in (c for one in passes for c in one.values()):
                capture.values()  # says so if it was changed in place
            raise ObservationError(
                "observe() got an output that depends on no unit of the plan: it is of another model, of an evaluation "
                "pass (call model.train()), or of a forward pass that was already observed (once each)"
            )
        found = chain([first], gradients)
        if len(passes) == 1 and passes[0].whole:  # as in most training loops
            self.observer.passes = [one for one in self.observer.passes if one is not passes[0]]
            again = partial(self._again, passes)
            return self.scoring.add(units, sums, tensors, passes, found, direction.examples, stacked, again)
        # What belongs to the output: whole passes of the model, and of loose calls of its parts those it depends on.
        whole = [number for number in first if passes[number].whole]
        loose = Pass()
        for number in first:
            if not passes[number].whole:
                loose.update({view: passes[number].pop(view) for view in first[number]})
        used = {id(passes[number]) for number in whole}
        self.observer.passes = [one for one in self.observer.passes if id(one) not in used]

        def arranged(found: Gradients) -> Gradients:
            parts = [found.get(number, {}) for number in whole]
            return dict(enumerate([*parts, {v: g for n, p in found.items() if n not in whole for v, g in p.items()}]))

        behind = [*(passes[number] for number in whole), *([loose] if loose else [])]
        again = partial(self._again, behind)
        return self.scoring.add(units, sums, tensors, behind, map(arranged, found), direction.examples, stacked, again)

    def _again(self, passes: Sequence[Pass], number: Tensor) -> Gradients:
        """The gradients of a number that was made of gradients."""
        direction = Direction(number, lambda: iter([torch.ones_like(number)]), 1)
        with needing_second_derivatives(self.utility.name):
            return next(self.observer.gradients(direction, passes))

    def use_passes(self) -> None:
        """Score the passes that have all they need: at once for local utilities, after the backward pass for
        ``loss``.
        """
        if not self.utility.needs_observe and self.observer.passes:
            self.sums = self.used(self.units, self.sums, self.tensors)

    def used(self, units: UnitState, sums: Sums, tensors: Mapping[str, Tensor]) -> Sums:
        """The sums with the passes that have all they need, which are used up."""
        ready: list[Pass] = []
        waiting: list[Pass] = []
        gradients: dict[int, dict[int, Tensor]] = {}
        of_loss = self.utility.gradient == "loss"
        for one in self.observer.passes:
            found = {view: sum_of(c.loss_gradients) for view, c in one.items() if c.loss_gradients} if of_loss else {}
            if of_loss and not found:
                waiting.append(one)
                continue
            if found and self.scaler is not None:
                unscale = 1.0 / float(self.scaler.get_scale())
                found = found if unscale == 1.0 else {view: g * unscale for view, g in found.items()}
            gradients[len(ready)] = found
            ready.append(one)
        self.observer.passes = waiting
        return self.scoring.add(units, sums, tensors, ready, [gradients], None) if ready else sums

    def finish(self) -> UnitState | str:
        """The optimizer has stepped: the state of the units with what was seen taken in, or why there is none."""
        self.observer.drop_unfinished()
        seen = any(self.observer.passes)
        self.use_passes()
        waiting = any(self.observer.passes)
        sums = self.sums
        if self.utility.gradient == "weights" and not sums.empty:
            weights = {p.weight for group in self.plan.groups for p in group.producers}
            sums = self.scoring.by_weights(sums, self.tensors, {name: self.tensors[name].grad for name in weights})
        refused = self.observer.backwards is not None and self.observer.backwards.refused
        self.forget()
        if sums.empty:
            return _nothing_seen(self.utility, seen, waiting, refused)
        units = self.scoring.close(self.units, sums, wait=self.units.birth.device.type == "cpu")
        self.warn_of_unreached(self.scoring.unreached(sums), units)
        return units

    def _void(self) -> None:
        """What the backward passes of this step have shown does not count: the gradients were zeroed since."""
        self.sums = NOTHING
        self.observer.void()

    def forget(self) -> None:
        """Drop what this step has shown so far."""
        self.sums = NOTHING
        self.observer.clear()
        self._scale, self.notices.passes = None, 0

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Within this context, passes are captured by themselves: for a trace of the step, which says itself whose
        gradients are the loss's.
        """
        observer = self.observer
        before = (observer.passes, observer.active, observer.running, observer.over)
        observer.passes, observer.active, observer.running, observer.over = [], True, False, False
        on_pass, observer.on_pass = observer.on_pass, lambda: None
        backwards = observer.backwards
        try:
            with nullcontext() if backwards is None else backwards.telling(False):
                yield
        finally:
            observer.passes, observer.active, observer.running, observer.over = before
            observer.on_pass = on_pass

    def warn_of_unreached(self, numbers: list[int], units: UnitState) -> None:
        """Say, once, which groups ran but cannot be scored."""
        new = [n for n in numbers if not self.notices.have_named(self.plan.groups[n].name)]
        if self.processes.several:  # another one may have shown them
            new = [n for n in new if not self.was_shown(n, units)]
        if new:
            self.notices.of_unreached([self.plan.groups[n].name for n in new])

    def was_shown(self, group: int, units: UnitState) -> bool:
        """Whether the last update has seen a group."""
        return units.seen is None or bool(units.seen[self.plan.unit_slices[group]].any())

    def _pass_begins(self) -> None:
        if not self.utility.needs_observe:
            self.notices.count_pass()
        if not self.observer.active:
            return
        if self.scaler is not None:  # to read the scale takes a host round trip
            scale = float(self.scaler.get_scale())
            if self._scale is not None and scale != self._scale:  # so the step of this step's first pass was skipped
                self.sums, self.observer.passes, self.notices.passes = NOTHING, [], 0
            self._scale = scale
        self.use_passes()

    def state_dict(self) -> dict[str, Any]:
        """What the passes since the last step have shown."""
        self.use_passes()
        sums = self.sums if self.sums.empty else self.scoring.counted(self.sums)
        return {
            "mean": None if sums.mean is None else sums.mean.clone(),
            "score": None if sums.score is None else sums.score.clone(),
            "mean_count": list(sums.mean_count),
            "score_count": list(sums.score_count),
            "gram": [pairs.clone() for pairs in sums.gram],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.forget()
        if state["mean"] is not None:
            mean, score = state["mean"].to(self.units.mean, copy=True), state["score"].to(self.units.utility, copy=True)
            gram = tuple(pairs.to(self.units.utility, copy=True) for pairs in state["gram"])
            self.sums = Sums(mean, score, tuple(state["mean_count"]), tuple(state["score_count"]), gram=gram)

    def to(self, device: torch.device) -> None:
        """Follow the model to another device."""
        self.scoring.follow(self.units.mean)
        if not self.sums.empty:
            sums = self.scoring.counted(self.sums)
            self.sums = mapped(sums, lambda tensor: tensor.to(device))


def weights_of(plan: UnitPlan) -> list[list[str]]:
    """For each view, the names of the weights that its units are made of and read by."""
    return [
        [p.weight for p in group.producers] + [c.weight for c in view.consumers]
        for group in plan.groups
        for view in group.views
    ]


def _nothing_seen(utility: Utility, seen: bool, waiting: bool, refused: bool) -> str:
    """Why a step cannot be scored."""
    if utility.needs_observe:
        return (
            f"optimizer.step() without observe(): the utility {utility.name!r} needs "
            "cbp.observe(logits, target) between the "
            "forward pass and loss.backward(). The parameters were updated, no unit was scored or reset"
        )
    if waiting and refused:
        return (
            "optimizer.step() after torch.autograd.grad(): the utility reads the gradients that loss.backward() "
            "leaves, for those of autograd.grad may be of another loss. Call loss.backward(), or choose a utility that "
            "is observed, such as 'gxd_sketch'. The parameters were updated, no unit was scored or reset"
        )
    if waiting:
        return (
            "optimizer.step() without loss.backward(): the utility reads the gradients of the backward pass. Call "
            "loss.backward(), or, where gradients are made in another way, choose a utility that is observed, such as "
            "'gxd_sketch'. The parameters were updated, no unit was scored or reset"
        )
    if seen:
        return (
            "optimizer.step() after a forward pass of an empty batch: no example, no score. Skip such steps. The "
            "parameters were updated, no unit was scored or reset"
        )
    return (
        "optimizer.step() without a training forward pass since the last step: call model.train(), and call the model "
        "that gxd is attached to, with gradients enabled: not a copy of it, nor under torch.no_grad() or in "
        "torch.func. A compiled model that ran before has to be compiled again (torch.compiler.reset()). The "
        "parameters were updated, no unit was scored or reset"
    )
