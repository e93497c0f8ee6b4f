"""What a plasticity method is: anything that acts around ``optimizer.step()``."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gxd.errors import PlanError
from gxd.methods.task_data import TaskData
from gxd.notices import Notices
from gxd.plan.layouts import NamedTensors
from gxd.plan.units import Group, UnitPlan
from gxd.processes import Processes
from gxd.reset.operator import Reset
from gxd.reset.optimizers import NewState, all_inside, follow
from gxd.reset.units import WHOLE, operate
from gxd.reset.writes import Write, carry_out
from gxd.score.state import UnitState
from gxd.score.utilities import Utility


class UnitsReset(NamedTuple):
    """Units of a group that a method has reset, so that they begin anew.

    Attributes:
        units: their indices.
        operator: what was done to them.
        references: ``(views, size)`` the means that were moved into the consumers' biases; None: none were.
    """

    group: Group
    units: Tensor
    operator: Reset
    references: Tensor | None


class Trained(NamedTuple):
    """A parameter that an optimizer trains.

    Attributes:
        lr: None if the optimizer sizes its steps itself, as Adafactor may; see :attr:`rate`.
    """

    name: str
    parameter: nn.Parameter
    lr: float | None
    maximize: bool

    @property
    def rate(self) -> float:
        """The learning rate, for a method that cannot do without and has called :meth:`Host.need_rates`."""
        if self.lr is None:
            raise PlanError(
                f"the optimizer has no learning rate for {self.name!r} (lr=None), and a method multiplies by it"
            )
        return self.lr


class _Place(NamedTuple):
    """Where a parameter of the model is in an optimizer."""

    name: str
    parameter: nn.Parameter
    optimizer: Any
    number: int
    group: Mapping[str, Any]


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
        done: what :meth:`reset` has reset, of which the other methods are told.
        data: of the task that begins, at a boundary, if it was given.
        observed: the units with this step's observation taken in; None on steps that were not observed.
        output_gradients: parameter name -> the gradient of the output that was observed in this step, for methods
            that ask for it; None on steps that were not observed.
    """

    model: nn.Module
    plan: UnitPlan
    tensors: NamedTensors
    optimizers: Sequence[Any]
    processes: Processes
    generator: torch.Generator
    notices: Notices
    observed: UnitState | None = None
    output_gradients: Mapping[str, Tensor] | None = None
    grad_scale: float = 1.0
    stepping: Any = None
    done: list[UnitsReset] = field(default_factory=list)
    data: TaskData | None = None

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
        for place in self._places():
            if place.parameter.requires_grad:
                lr = place.group.get("lr")
                rate = None if lr is None else float(lr)
                yield Trained(place.name, place.parameter, rate, bool(place.group.get("maximize")))

    def need_rates(self, method: str, names: Container[str], instead: str) -> None:
        """Raise PlanError if an optimizer has no learning rate for one of these parameters, also of those that are
        frozen now; for ``init`` of a method that multiplies by it.

        Args:
            method: its name.
            instead: what can be done about it, other than to give one.
        """
        for place in self._places():
            if place.name in names and place.group.get("lr") is None:
                raise PlanError(
                    f"{method} needs the learning rate of {place.name!r}, and parameter group {place.number} of the "
                    f"optimizer, {type(place.optimizer).__name__}, has lr=None: it sizes its steps itself. Give the "
                    f"group an lr (for Hugging Face's Adafactor with relative_step=False), or {instead}"
                )

    def _places(self) -> Iterator[_Place]:
        """Of all parameters of the model that are in an optimizer, each once."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        for optimizer in all_inside(self.optimizers if self.stepping is None else [self.stepping]):
            for number, group in enumerate(getattr(optimizer, "param_groups", ())):
                for parameter in group["params"]:
                    name = names.pop(id(parameter), None)
                    if name is not None:
                        yield _Place(name, parameter, optimizer, number, group)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Those of :meth:`trained`, by name."""
        return {one.name: one.parameter for one in self.trained()}

    def reset(
        self,
        chosen: Sequence[tuple[Group, Tensor]],
        references: Mapping[str, Tensor],
        reset: Reset = WHOLE,
        *,
        amounts: Mapping[str, Tensor] | None = None,
        initial: Mapping[str, Tensor] | None = None,
    ) -> list[tuple[Group, Tensor]]:
        """Reset units: all of it, or nothing if it fails. Arguments as for :func:`gxd.reset.units.operate`.

        Returns:
            The units that begin anew, of which the other methods are told: all but those that have an amount, and go
            only a part of the way. What is known of these still holds.
        """
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
            reset,
            amounts=amounts,
            initial=initial,
            optimizers=self.optimizers,
        )
        whole = []
        for group, index in chosen:
            amount = (amounts or {}).get(group.name)
            index = index if amount is None else index[amount * reset.blend == 1]
            whole += [(group, index)] if len(index) else []
        self.done += [UnitsReset(group, index, reset, references.get(group.name)) for group, index in whole]
        return whole

    def write(self, writes: Sequence[Write], memories: str = "keep", step_policy: str = "keep") -> None:
        """Write to parameters: all of it, or nothing if it fails. Copies of them that optimizers keep are written too.

        Args:
            writes: see :mod:`gxd.reset.writes`.
            memories: of the optimizers, of gradients of what is set: ``keep``, or ``reset``, as those of a new one.
            step_policy: of counters that a parameter's elements share (Adam's ``step``): ``keep`` or ``reset``.
        """
        names = dict(self.model.named_parameters())
        carry_out([*writes, *follow(writes, self.optimizers, step_policy, names, memories)])

    def all_units_are_new(self) -> None:
        """Say so to the other methods: all weights were drawn anew."""
        self.done += [UnitsReset(group, torch.arange(group.size), WHOLE, None) for group in self.plan.groups]

    def gradients(self) -> Iterator[dict[str, Tensor]]:
        """At a boundary, for methods with ``needs_data``: name -> gradient of the loss of a batch of the new task, mean
        over the processes, for everything that is trained. The model is left as it was found.
        """
        assert self.data is not None
        return self.data.gradients(self.model, [one.name for one in self.trained()], self.processes)


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
        needs_data: whether it needs data of the new task at a boundary.
        also_changes: what it may change beside trained parameters: ``buffers`` (those of norms, at most), or
            ``requires_grad``.
        output_gradient: ``target`` or ``sketch``: on steps that it observes, ``host.output_gradients`` has the
            gradients of that output by the parameters, for one more backward pass; None: not at all.
        sharded: whether it works with parameters that processes share out (FSDP2): it touches them by
            :meth:`Host.reset` and :meth:`Host.write`, or by operations that DTensors have, element by element.
    """

    name: str = "method"
    utility: Utility | None = None
    decay: float = 0.99
    positions: str = "signed"
    needs_units: bool = False
    needs_data: bool = False
    also_changes: tuple[str, ...] = ()
    output_gradient: str | None = None
    sharded: bool = False

    @property
    def needs_observe(self) -> bool:
        """Whether the training loop has to call ``observe``."""
        return self.output_gradient is not None or (self.utility is not None and self.utility.needs_observe)

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

    def on_load(self, host: Host, state: Any) -> Any:
        """A state was loaded: put right what follows from it and is in no checkpoint, as ``requires_grad``."""
        return state

    def evaluation_weights(self, host: Host, state: Any) -> Mapping[str, Tensor]:
        """Parameters and buffers, by name, that the model is to be evaluated with instead of its own."""
        return {}

    def __repr__(self) -> str:
        return f"gxd.method({self.name!r})"
