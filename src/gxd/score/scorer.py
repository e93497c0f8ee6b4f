"""From the forward passes of one step to a score for every unit: observe, score, average, in that order.

``ContinualBackprop`` has one, fed by the user's training loop; a compiled step has one while it is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from gxd.errors import ObservationError
from gxd.guards import NO_PASS, OBSERVED, nothing_seen
from gxd.observe.captures import Gradients, Observer, Pass
from gxd.observe.direction import Direction
from gxd.plan.units import UnitPlan
from gxd.score.statistics import Statistics
from gxd.score.tally import Tally
from gxd.score.utilities import Utility


class Scorer:
    """Hooks a model, and brings the statistics of its units up to date once per step.

    Attributes:
        unreached: the groups that ran in the last step, but that the output (or the loss) does not depend on.

    Args:
        unscale: the factor that undoes a scale of the loss.
        begin: called when a forward pass begins.
        reduce: sums a tensor over the processes that train together.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: UnitPlan,
        tensors: Mapping[str, Tensor],
        utility: Utility,
        statistics: Statistics,
        positions: str,
        noise: torch.Generator,
        *,
        unscale: Callable[[], float] = lambda: 1.0,
        begin: Callable[[], None] = lambda: None,
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.utility, self.statistics = utility, statistics
        self._unscale, self._begin = unscale, begin
        self.unreached: list[int] = []
        self._place = (tensors, plan.groups[0].producers[0].weight)
        self.tally = Tally(plan, tensors, utility, statistics, positions, noise, reduce)
        self.observer = Observer(model, plan, utility.gradient == "loss", self._pass_begins)

    def observe(self, direction: Direction) -> None:
        """Score the passes behind an output by its gradients in each direction."""
        self.follow_device()
        passes = [one for one in self.observer.passes if one]
        if not passes:
            raise ObservationError(NO_PASS if self.tally.empty else OBSERVED)
        # Several directions at once, where that takes little memory: values without positions.
        stacked = direction.several and all(c.source.dim() == 2 for one in passes for c in one.values())
        gradients = self.observer.gradients(direction, passes, stacked)
        first = next(gradients)
        if not first:
            for capture in (c for one in passes for c in one.values()):
                capture.values()  # says so if it was changed in place
            raise ObservationError(
                "observe() got an output that depends on no unit of the plan: it is of another model, of an evaluation "
                "pass (call model.train()), or of a forward pass that was already observed (once each)"
            )
        if len(passes) == 1 and passes[0].whole:  # as in most training loops
            self.observer.passes = [one for one in self.observer.passes if one is not passes[0]]
            self.tally.add(passes, chain([first], gradients), direction.examples, stacked)
            return
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
        self.tally.add(behind, map(arranged, chain([first], gradients)), direction.examples, stacked)

    def use_passes(self) -> None:
        """Score the passes that have all they need: at once for local utilities, after the backward pass for
        ``loss``.
        """
        if self.utility.needs_observe:
            return
        ready: list[Pass] = []
        waiting: list[Pass] = []
        gradients: dict[int, dict[int, Tensor]] = {}
        for one in self.observer.passes:
            found = {view: c.loss_gradient() for view, c in one.items()} if self.utility.gradient == "loss" else {}
            if self.utility.gradient == "loss" and all(g is None for g in found.values()):
                waiting.append(one)
            else:
                unscale = self._unscale() if found else 1.0
                gradients[len(ready)] = {
                    view: g if unscale == 1.0 else g * unscale for view, g in found.items() if g is not None
                }
                ready.append(one)
        self.observer.passes = waiting
        if ready:
            self.follow_device()
            self.tally.add(ready, [gradients], None)

    def finish(self) -> None:
        """The optimizer has stepped: take what was seen into the statistics."""
        self.observer.drop_unfinished()
        seen = any(self.observer.passes)
        self.use_passes()
        waiting = any(self.observer.passes)
        self.observer.clear()
        if self.tally.empty:
            raise ObservationError(nothing_seen(self.utility, seen, waiting))
        self.statistics.update(*self.tally.scores())
        self.unreached = self.tally.unreached()
        self.tally.clear()

    def forget(self) -> None:
        """Drop what this step has shown so far."""
        self.tally.clear()
        self.observer.clear()

    def _pass_begins(self) -> None:
        self._begin()
        if self.observer.active:
            self.use_passes()

    def follow_device(self) -> None:
        """Move the statistics to where the model is."""
        tensors, name = self._place
        device = tensors[name].device
        if device != self.statistics.device:
            self.statistics.to(device)
            self.tally.to(device)
