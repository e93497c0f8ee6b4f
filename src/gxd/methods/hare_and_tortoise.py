"""Hare and tortoise: fast weights that learn, slow ones that follow, and now and then are where the fast ones go on."""

from __future__ import annotations

import torch
from torch import Tensor

from gxd import arguments
from gxd.methods.base import Host
from gxd.methods.event import STATISTICS, Event, EventState
from gxd.methods.registry import register_method
from gxd.reset.fresh import is_norm
from gxd.reset.writes import Whole, Write


class HareAndTortoise(Event):
    """Remembers the slow weights, by name, and slow statistics of norms.

    Attributes:
        decay: of the average that they are.
    """

    also_changes = ("buffers",)

    def __init__(self, decay: float, every: int | None) -> None:
        super().__init__(every)
        self.decay = arguments.number("decay", decay, 0.0, 1.0)

    def begin(self, host: Host) -> dict[str, Tensor]:
        fast = {**_parameters(host), **_statistics(host)}
        # The average in 32 bits at least: in fewer it would stand still.
        return {n: t.detach().to(torch.promote_types(t.dtype, torch.float32), copy=True) for n, t in fast.items()}

    def advance(self, host: Host, own: dict[str, Tensor]) -> dict[str, Tensor]:
        fast = {**_parameters(host), **host.processes.agreed(_statistics(host))}  # each process has its own
        toward = [fast[name].detach().to(slow) for name, slow in own.items()]
        return dict(zip(own, torch._foreach_lerp(list(own.values()), toward, 1.0 - self.decay), strict=True))

    def act(self, host: Host, own: dict[str, Tensor]) -> dict[str, Tensor]:
        fast = {**{one.name: one.parameter for one in host.trained()}, **_statistics(host)}
        # A weight that was not finite for a step has no average from then on: it begins again with what it is now.
        mended = {n: slow.where(slow.isfinite(), fast[n].detach().to(slow)) for n, slow in own.items() if n in fast}
        host.write([Write(fast[name], Whole(), slow) for name, slow in mended.items()])
        return {**own, **mended}

    def evaluation_weights(self, host: Host, state: EventState) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = state.own
        return weights


def _parameters(host: Host) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in host.model.named_parameters() if tensor.is_floating_point()}


def _statistics(host: Host) -> dict[str, Tensor]:
    """Of norms, those that can be averaged: a count of batches cannot. All other buffers are the model's own: an
    infinite mask has no average, a cache may change its size, and nobody knows what else there is.
    """
    norms = {path for path, module in host.model.named_modules() if is_norm(module)}

    def is_statistic(name: str) -> bool:
        path, _, key = name.rpartition(".")
        return path in norms and key in STATISTICS

    return {name: t for name, t in host.model.named_buffers() if t.is_floating_point() and is_statistic(name)}


@register_method(
    "hare_and_tortoise",
    description="when a task ends, go on from a slow average of the weights; evaluate with that average",
    reference="Lee, Cho, Kim, Kim, Min, Choo, Lyle: Slow and Steady Wins the Race: Maintaining Plasticity with Hare "
    "and Tortoise Networks, ICML 2024",
    inert={"every": None},
    changes="all parameters, statistics of norms, when a task ends; what is evaluated",
    needs="`attached.evaluating()` around evaluation",
)
def hare_and_tortoise(decay: float = 0.999, every: int | None = 0) -> HareAndTortoise:
    """``slow <- decay * slow + (1 - decay) * fast`` after every step, of parameters and running statistics of norms,
    and ``fast <- slow`` at each event. The optimizer's state is kept, as published.

    Evaluate within ``attached.evaluating()``: the slow weights are what is evaluated in the paper. The authors' code
    was read. Deviations: values are copied (there both networks share memory after an event, so that the next step of
    the optimizer moves the tortoise as far as the hare); all other buffers (counts of batches, masks, caches), which
    are averaged there, are the model's own, and left alone; what is frozen is not written; of 16-bit weights the
    average has 32.

    Args:
        decay: of the average.
        every: 0: when a task ends; else every so many steps instead (the authors copy every ten epochs); None: never.
    """
    return HareAndTortoise(decay, every)
