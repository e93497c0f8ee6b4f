"""What a plasticity method is: anything that acts around ``optimizer.step()``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gxd.errors import PlanError
from gxd.notices import Notices
from gxd.plan.layouts import NamedTensors
from gxd.plan.units import Group, UnitPlan
from gxd.processes import Processes
from gxd.reset.optimizers import NewState, all_inside
from gxd.reset.units import operate
from gxd.score.state import UnitState
from gxd.score.utilities import Utility


class Trained(NamedTuple):
    """A parameter that an optimizer trains."""

    name: str
    parameter: nn.Parameter
    lr: float
    maximize: bool


@dataclass
class Host:
    """What a method sees of the training it is attached to.

    Attributes:
        model: the model, unwrapped.
        plan: its units; of no groups if no method asked for them.
        tensors: what the plan names, by name.
        optimizers: that train it, in the order they step in.
        processes: that train it together.
        generator: of this method alone; equal on all processes.
        notices: what the user is warned of, once each.
        check_new_state: refuses optimizer state that appeared since, and that a reset could not be carried over to.
        grad_scale: of the gradients in ``before_step``, if a fused optimizer unscales them itself.
        stepping: the optimizer that is about to step, in ``before_step``; one after the other, if there are several.
        chosen: what :meth:`reset` has reset, of which the other methods are told.
        observed: the units with this step's observation taken in; None on steps that were not observed.
    """

    model: nn.Module
    plan: UnitPlan
    tensors: NamedTensors
    optimizers: Sequence[Any]
    processes: Processes
    generator: torch.Generator
    notices: Notices
    observed: UnitState | None = None
    grad_scale: float = 1.0
    stepping: Any = None
    chosen: list[tuple[Group, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.check_new_state = NewState(self.optimizers, self.tensors)

    @property
    def device(self) -> torch.device:
        """Of the model."""
        if self.plan.groups:
            return self.tensors[self.plan.groups[0].producers[0].weight].device
        return next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))

    def trained(self) -> Iterator[Trained]:
        """All parameters that the optimizers train, each once; before a step, those of the optimizer that steps."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        for optimizer in all_inside(self.optimizers if self.stepping is None else [self.stepping]):
            for group in getattr(optimizer, "param_groups", ()):
                for parameter in group["params"]:
                    name = names.pop(id(parameter), None)
                    if name is not None and parameter.requires_grad:
                        yield Trained(name, parameter, float(group["lr"]), bool(group.get("maximize")))

    def reset(
        self,
        chosen: Sequence[tuple[Group, Tensor]],
        references: Mapping[str, Tensor],
        step_policy: str,
    ) -> None:
        """Reset units: all of it, or nothing if it fails."""
        replaced = self.tensors.replaced()
        if replaced:
            raise PlanError(
                f"{', '.join(map(repr, replaced))} was replaced (or pruned, or parametrized) after this "
                "attachment was made: a reset would write to what is no longer used, so nothing was reset. "
                "close() this one, and make another with a new plan"
            )
        operate(
            self.tensors,
            list(chosen),
            references,
            self.generator,
            optimizers=self.optimizers,
            step_policy=step_policy,
        )
        self.chosen += chosen


class Method:
    """Acts around the optimizer's step. Override what is needed; all else does nothing.

    What a method remembers is its state: tensors, numbers, strings and None, in tuples, named tuples and dicts. It is
    given to each function, and returned anew; then it is checkpointed, resumed, moved between devices, and agreed
    between processes, without a line here. A function that raises leaves the old state.

    Attributes:
        name: that it is registered with.
        utility: by which units are observed and scored for it; None: not at all. If there is one, its state has
            ``units``, a :class:`gxd.score.state.UnitState`.
        decay, positions: how they are scored.
        needs_units: whether it needs a plan of the model.
    """

    name: str = "method"
    utility: Utility | None = None
    decay: float = 0.99
    positions: str = "signed"
    needs_units: bool = False

    def init(self, host: Host) -> Any:
        """The state before the first step."""
        return ()

    def observes(self, state: Any) -> bool:
        """Whether the coming step has to be observed."""
        return False

    def before_step(self, host: Host, state: Any) -> Any:
        """The gradients are complete: they may be rewritten, in place."""
        return state

    def after_step(self, host: Host, state: Any) -> Any:
        """The parameters were updated: they may be rewritten, in place."""
        return state

    def at_boundary(self, host: Host, state: Any) -> Any:
        """A task has ended."""
        return state

    def on_reset(self, host: Host, state: Any, chosen: Sequence[tuple[Group, Tensor]]) -> Any:
        """Another method has reset units."""
        return state

    def __repr__(self) -> str:
        return f"gxd.method({self.name!r})"
