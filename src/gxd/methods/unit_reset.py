"""Methods that reset units: a utility, a normalisation, a selector, and what becomes of the units that are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gxd import arguments
from gxd.checkpoint import Some
from gxd.methods.base import Host, Method
from gxd.methods.recent import Recent
from gxd.plan.layouts import state_dtype
from gxd.plan.units import Group, UnitPlan
from gxd.reset.operator import Reset
from gxd.reset.units import WHOLE
from gxd.score.state import UnitState, forgotten
from gxd.score.utilities import get_utility, utilities
from gxd.select import Normalise, Selector
from gxd.select.base import Selection
from gxd.select.normalise import normalisation

POSITIONS = ("signed", "abs")


class UnitResets(NamedTuple):
    """The state of :class:`UnitReset`.

    Attributes:
        last: group name -> the units that the last step has reset, wholly or in part.
        total: how many were reset so far.
        initial: the incoming weights as they began, by name, if they are what a reset writes.
        recent: the ages at which the last of them were reset.
    """

    units: UnitState
    selector: Any
    normalise: Any
    last: Some
    total: int
    initial: dict[str, Tensor]
    recent: Recent


class UnitReset(Method):
    """Score all units in every observed step, and reset those that the selector chooses.

    Args:
        utility: one of :func:`gxd.utilities`.
        selector: which units go, and when.
        reset: what becomes of them.
        normalise: what utilities are compared with: ``none``, ``layer_mean`` or ``age``. Default: the selector's.
        decay: of the running averages, per observation; 0: the last batch alone counts. Default: the selector's.
        positions: ``signed`` or ``abs``, see :class:`gxd.ContinualBackprop`.
    """

    name = "unit_reset"
    needs_units = True
    sharded = True

    def __init__(
        self,
        utility: str,
        selector: Selector,
        *,
        reset: Reset = WHOLE,
        normalise: str | Normalise | None = None,
        decay: float | None = None,
        positions: str = "signed",
    ) -> None:
        self.utility = get_utility(utility)
        if selector.pairs and self.utility.effects is None:
            known = ", ".join(name for name in utilities() if get_utility(name).effects is not None)
            raise ValueError(
                f"{type(selector).__name__} needs the effects of units on single examples, which the utility "
                f"{utility!r} does not have: use one of {known}"
            )
        self.selector, self.reset = selector, reset
        self.decay = arguments.decay(selector.decay if decay is None else decay)
        if self.decay and not selector.decay:
            raise ValueError(f"decay={decay!r}: {type(selector).__name__} judges single batches, so it takes decay=0")
        self.normalise = normalisation(selector.normalise if normalise is None else normalise)
        if selector.pairs and type(self.normalise) is not Normalise:
            raise ValueError(
                f"normalise={type(self.normalise).__name__} is of single units: with {type(selector).__name__} "
                "leave it at 'none'"
            )
        self.positions = arguments.choice("positions", positions, POSITIONS)

    def init(self, host: Host) -> UnitResets:
        units = UnitState.new(host.plan, host.device, state_dtype(host.tensors), self.selector.pairs)
        names = {p.weight for group in host.plan.groups for p in group.producers if self.reset.incoming == "initial"}
        initial = {name: host.tensors[name].detach().clone() for name in sorted(names)}
        selector, normalise = self.selector.init(host.plan, units), self.normalise.init(host.plan, units)
        return UnitResets(units, selector, normalise, Some(), 0, initial, Recent.none(host.device))

    def observes(self, state: UnitResets) -> bool:
        return self.selector.observes(state.units.step + 1)

    def after_step(self, host: Host, state: UnitResets) -> UnitResets:
        plan, step = host.plan, state.units.step + 1
        if host.observed is None:
            units = state.units._replace(step=step)
        else:
            units = host.observed._replace(step=step, scored=step)
        selector, due = self.selector.advance(plan, units, state.selector)
        normalise = self.normalise.advance(plan, units, state.normalise, due)
        state = UnitResets(units, selector, normalise, Some(), state.total, state.initial, state.recent)
        if not self.selector.idle(plan):
            host.check_new_state()
        if not due:
            return state
        judged = self.normalise(plan, units, normalise)
        selection, selector = self.selector.select(plan, judged, selector, lambda n: self._may_be_reset(host, units, n))
        chosen = _chosen(host, selection, self.selector.soft)
        state = state._replace(selector=selector)
        return self._reset(host, state, chosen) if chosen else state

    def _reset(self, host: Host, state: UnitResets, chosen: dict[int, tuple[Tensor, Tensor | None]]) -> UnitResets:
        plan, units = host.plan, state.units
        references = self.references(host, units, list(chosen)) if self.reset.compensate else {}
        groups = [(plan.groups[number], index) for number, (index, _) in chosen.items()]
        amounts = {plan.groups[number].name: amount for number, (_, amount) in chosen.items() if amount is not None}
        whole = host.reset(groups, references, self.reset, amounts=amounts, initial=state.initial)
        last = Some({group.name: index for group, index in groups})
        total = state.total + sum(len(index) for _, index in groups)
        state = state._replace(last=last, total=total)
        if not whole:
            return state
        places = _places(plan, whole)
        ages = units.step - units.birth[places.units.to(units.birth.device)]
        return self._forgotten(state._replace(recent=state.recent.then(places.groups, ages)), places)

    def on_reset(self, host: Host, state: UnitResets, chosen: Sequence[tuple[Group, Tensor]]) -> UnitResets:
        state = self._forgotten(state, _places(host.plan, chosen))
        return state._replace(selector=self.selector.recounted(state.selector))

    def references(self, host: Host, units: UnitState, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Group name -> ``(views, size)`` the running means of h, of the groups of these numbers."""
        flat, plan = units.references(), host.plan
        found = {}
        for group, views in [(plan.groups[n], plan.views_of[n]) for n in numbers]:
            start = plan.view_slices[views[0]].start
            found[group.name] = flat[start : start + len(views) * group.size].view(len(views), group.size)
        return found

    def _may_be_reset(self, host: Host, units: UnitState, number: int) -> bool:
        """A group is left alone, with a warning, on steps that do not show it, and while it is frozen."""
        group, why = host.plan.groups[number], None
        if units.seen is not None and not bool(units.seen[host.plan.unit_slices[number]].any()):
            why = (
                "no forward pass of this step has shown its units (a branch that does not run, another task's head, "
                "layers in evaluation mode, a region checkpointed with use_reentrant=True, or gradients that are all 0)"
            )
        else:
            frozen = [name for name in group.tensors if host.tensors.is_frozen(name)]
            if frozen:
                why = f"{', '.join(frozen)} was frozen (requires_grad=False)"
        if why is not None:
            host.notices.of_left_alone(group.name, why)
        return why is None

    def _forgotten(self, state: UnitResets, places: _Places) -> UnitResets:
        """What is known of units that begin anew begins anew."""
        units = forgotten(state.units, places.units, places.views)
        return state._replace(units=units, selector=self.selector.forgotten(state.selector, places.units))


class _Places(NamedTuple):
    """Some units of several groups: the number of the group of each, and where they stand in the flat tensors of all
    units and of all views.
    """

    groups: Tensor
    units: Tensor
    views: Tensor


def _places(plan: UnitPlan, chosen: Sequence[tuple[Group, Tensor]]) -> _Places:
    numbers = {group.name: number for number, group in enumerate(plan.groups)}
    found = [(numbers[group.name], index) for group, index in chosen]
    units = torch.cat([index + plan.unit_slices[n].start for n, index in found])
    if len(plan.views) == len(plan.groups):
        views = units
    else:
        views = torch.cat([index + plan.view_slices[v].start for n, index in found for v in plan.views_of[n]])
    return _Places(torch.tensor([n for n, index in found for _ in range(len(index))]), units, views)


def _chosen(host: Host, selection: Selection, soft: bool) -> dict[int, tuple[Tensor, Tensor | None]]:
    """Group number -> indices, on the host, and how far each of these units goes (None: all the way)."""
    if host.processes.several:
        selection = _agreed(host, selection, soft)
    chosen: dict[int, tuple[Tensor, Tensor | None]] = {}
    for number, given in selection.items():
        given = given.cpu()
        index = given.nonzero().flatten() if soft else given
        if len(index):
            chosen[number] = (index, given[index] if soft else None)
    return chosen


def _agreed(host: Host, selection: Selection, soft: bool) -> Selection:
    """The first process's choice: the others may have chosen another number of units."""
    amounts = torch.zeros(host.plan.size, dtype=torch.float64, device=host.device)
    for number, given in selection.items():
        here = amounts[host.plan.unit_slices[number]]
        here.copy_(given) if soft else here.index_fill_(0, given.to(here.device), 1.0)
    host.processes.agree(amounts)
    parts = {number: amounts[where] for number, where in enumerate(host.plan.unit_slices)}
    return parts if soft else {number: part.nonzero().flatten() for number, part in parts.items()}
