"""Methods that reset units: a utility, a selector, and what becomes of the units that are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gxd import arguments
from gxd.checkpoint import Some
from gxd.methods.base import Host, Method
from gxd.plan.layouts import state_dtype
from gxd.plan.units import Group, tensor_names
from gxd.reset.units import STEP_POLICIES
from gxd.score.state import UnitState, forgotten
from gxd.score.utilities import get_utility
from gxd.select import Selector
from gxd.select.base import Selection

POSITIONS = ("signed", "abs")


class UnitResets(NamedTuple):
    """The state of :class:`UnitReset`.

    Attributes:
        last: group name -> the units that the last step has reset.
        total: how many were reset so far.
    """

    units: UnitState
    selector: Any
    last: Some
    total: int


class UnitReset(Method):
    """Score all units in every observed step, and reset those that the selector chooses.

    Args:
        utility: one of :func:`gxd.utilities`.
        selector: which units go, and when.
        decay: of the running averages, per observation.
        compensate: whether to move the mean contribution of a unit into its consumers' biases when it is reset.
        positions: ``signed`` or ``abs``, see :class:`gxd.ContinualBackprop`.
        step_policy: what becomes of Adam's ``step`` on a reset: ``keep`` or ``reset``.
    """

    name = "unit_reset"
    needs_units = True

    def __init__(
        self,
        utility: str,
        selector: Selector,
        *,
        decay: float = 0.99,
        compensate: bool = True,
        positions: str = "signed",
        step_policy: str = "keep",
    ) -> None:
        arguments.switch("compensate", compensate)
        self.utility = get_utility(utility)
        self.selector, self.decay, self.compensate = selector, decay, compensate
        self.positions = arguments.choice("positions", positions, POSITIONS)
        self.step_policy = arguments.choice("step_policy", step_policy, STEP_POLICIES)

    def init(self, host: Host) -> UnitResets:
        units = UnitState.new(host.plan, host.device, state_dtype(host.tensors))
        return UnitResets(units, self.selector.init(host.plan, units), Some(), 0)

    def observes(self, state: UnitResets) -> bool:
        return self.selector.observes(state.units.step + 1)

    def after_step(self, host: Host, state: UnitResets) -> UnitResets:
        plan, units = host.plan, state.units if host.observed is None else host.observed
        units = UnitState(state.units.step + 1, *units[1:])
        selector, due = self.selector.advance(plan, units, state.selector)
        if not self.selector.idle(plan):
            host.check_new_state()
        if not due:
            return UnitResets(units, selector, Some(), state.total)
        selection, selector = self.selector.select(plan, units, selector, lambda n: self._may_be_reset(host, units, n))
        selection = _agreed(host, selection) if host.processes.several else selection
        selection = {n: index.cpu() for n, index in selection.items()}
        chosen = [(plan.groups[n], index) for n, index in selection.items()]
        if not chosen:
            return UnitResets(units, selector, Some(), state.total)
        references = self.references(host, units, list(selection)) if self.compensate else {}
        host.reset(chosen, references, self.step_policy)
        last = Some({group.name: index for group, index in chosen})
        total = state.total + sum(len(index) for _, index in chosen)
        return UnitResets(_forgotten(host, units, selection), selector, last, total)

    def on_reset(self, host: Host, state: UnitResets, chosen: Sequence[tuple[Group, Tensor]]) -> UnitResets:
        numbers = {group.name: number for number, group in enumerate(host.plan.groups)}
        units = _forgotten(host, state.units, {numbers[group.name]: index for group, index in chosen})
        return state._replace(units=units, selector=self.selector.recounted(state.selector))

    def references(self, host: Host, units: UnitState, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Group name -> ``(views, size)`` the running means of h, of the groups of these numbers."""
        flat, plan = units.references(), host.plan
        return {
            plan.groups[n].name: torch.stack([flat[plan.view_slices[view]] for view in plan.views_of[n]])
            for n in numbers
        }

    def _may_be_reset(self, host: Host, units: UnitState, number: int) -> bool:
        """A group is left alone, with a warning, on steps that do not show it, and while it is frozen."""
        group, why = host.plan.groups[number], None
        if units.seen is not None and not bool(units.seen[host.plan.unit_slices[number]].any()):
            why = (
                "no forward pass of this step has shown its units (a branch that does not run, another task's head, "
                "layers in evaluation mode, or a region checkpointed with use_reentrant=True)"
            )
        else:
            frozen = [name for name in tensor_names([group]) if host.tensors.is_frozen(name)]
            if frozen:
                why = f"{', '.join(frozen)} was frozen (requires_grad=False)"
        if why is not None:
            host.notices.of_left_alone(group.name, why)
        return why is None


def _agreed(host: Host, selection: Selection) -> Selection:
    """The first process's choice, as one mask: the others may have chosen another number of units."""
    mask = torch.zeros(host.plan.size, dtype=torch.uint8, device=host.device)
    for number, index in selection.items():
        mask[host.plan.unit_slices[number]].index_fill_(0, index.to(mask.device), 1)
    host.processes.agree(mask)
    masks = {number: mask[where].nonzero().flatten() for number, where in enumerate(host.plan.unit_slices)}
    return {number: index for number, index in masks.items() if len(index)}


def _forgotten(host: Host, units: UnitState, selection: dict[int, Tensor]) -> UnitState:
    plan = host.plan
    flat = [index + plan.unit_slices[n].start for n, index in selection.items()]
    views = [index + plan.view_slices[v].start for n, index in selection.items() for v in plan.views_of[n]]
    return forgotten(units, torch.cat(flat), torch.cat(views))
