"""Events: what is done to a whole network now and then, at the end of a task or by the clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn

from gxd import arguments
from gxd.methods.base import Host, Method
from gxd.reset.fresh import Distributions, fixed_rows, fresh, is_norm, with_rows_of
from gxd.reset.optimizers import trained_by
from gxd.reset.writes import Whole, Write

MANY_STEPS = 1000  # without the end of a task
STATISTICS = {"running_mean": 0.0, "running_var": 1.0, "num_batches_tracked": 0.0}  # of norms, and what they begin with


class EventState(NamedTuple):
    """The state of an :class:`Event`.

    Attributes:
        steps, boundaries: how many there were.
        own: what the method remembers.
    """

    steps: int
    boundaries: int
    own: Any


class Event(Method):
    """Acts when a task ends, or every so many steps of the optimizer.

    Args:
        every: 0: whenever a task ends (:meth:`gxd.Attachment.boundary`). Else every so many steps instead. None: never.
    """

    writes = True  # to parameters, so that the optimizer's state has to be known

    def __init__(self, every: int | None = 0) -> None:
        self.every = None if every is None else arguments.every("every", every, least=0)

    def begin(self, host: Host) -> Any:
        """What it remembers before the first step; raises if it cannot treat this model."""
        return ()

    def advance(self, host: Host, own: Any) -> Any:
        """What it remembers after a step."""
        return own

    def act(self, host: Host, own: Any) -> Any:
        """The event. Returns what it remembers."""
        raise NotImplementedError

    def init(self, host: Host) -> EventState:
        return EventState(0, 0, self.begin(host))

    def after_step(self, host: Host, state: EventState) -> EventState:
        steps, own = state.steps + 1, self.advance(host, state.own)
        if self.every is not None and self.writes:
            host.check_new_state()
        if self.every and steps % self.every == 0:
            own = self.act(host, own)
        if self.every == 0 and steps == MANY_STEPS and not state.boundaries:
            host.notices.of_no_boundary(self.name, steps)
        return EventState(steps, state.boundaries, own)

    def at_boundary(self, host: Host, state: EventState) -> EventState:
        own = self.act(host, state.own) if self.every == 0 else state.own
        return EventState(state.steps, state.boundaries + 1, own)


# --- what several of them do ------------------------------------------------------------------------------------------


def begin_anew(host: Host, writes: Iterable[Write] = ()) -> None:
    """Write to parameters, and let all that the optimizers remember, of what is written and of the rest, begin anew."""
    writes = list(writes)
    written = {id(write.tensor) for write in writes}
    same = [Write(p, Whole(), p.detach()) for p in trained_by(host.optimizers) if id(p) not in written]
    host.write([*writes, *same], memories="reset", step_policy="reset")


def draw_anew(host: Host, known: Distributions, within: nn.Module, everything: bool = False) -> None:
    """Fresh values for all of a module that is trained, and for the statistics of its norms; what the optimizers
    remember of it, or of everything, begins anew. If that fails, all is as it was, the generator too.
    """
    mine, before = {id(p) for p in within.parameters()}, host.generator.get_state()
    try:
        writes, fixed = [], fixed_rows(host.model)
        for name, parameter, *_ in host.trained():
            if id(parameter) in mine:
                value = fresh(name, parameter, known, host.generator)
                writes.append(Write(parameter, Whole(), with_rows_of(parameter, fixed.get(id(parameter), ()), value)))
        writes += fresh_statistics(within)
        if everything:
            begin_anew(host, writes)
        else:
            host.write(writes, memories="reset", step_policy="reset")
    except BaseException:
        host.generator.set_state(before)
        raise


def fresh_statistics(within: nn.Module) -> list[Write]:
    """Of norms that are trained, or have nothing to train: a frozen one goes on with what it was frozen with."""
    writes: list[Write] = []
    for module in filter(is_norm, within.modules()):
        own = list(module.parameters(recurse=False))
        if not own or any(p.requires_grad for p in own):
            for name, value in STATISTICS.items():
                buffer = module._buffers.get(name)
                if isinstance(buffer, Tensor):
                    writes.append(Write(buffer, Whole(), value))
    return writes
