"""Timing: variants take turns in short blocks, so that whatever else the machine does hits them alike."""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TypeVar

import torch

from gxd.lab.errors import UserError

Step = Callable[[], object]
Make = Callable[[], Step]
"""A variant: builds all that it needs and returns a function that takes one step. Raises UserError if it cannot be."""
Block = Callable[[], float]
"""Takes some steps and returns the seconds that one of them took."""
T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """The ratio a variant shall not exceed: to the first variant, or to the one named."""

    limit: float
    of: str | None = None


@dataclass(frozen=True)
class Verdict:
    """A target beside what was found, if it could be measured."""

    limit: float
    of: str | None
    found: float | None

    @property
    def met(self) -> bool | None:
        return None if self.found is None else self.found <= self.limit


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        value: in ``unit``; of times it is that of the best block.
        ratio: of the time per step to that of the first variant, best block by best block.
        quartiles: of the ratio within each round.
        ready: seconds until the first block could start: building, tracing, compiling, warming up.
        note: why there is no value, or what to know about it.
    """

    suite: str
    setting: str
    variant: str
    value: float | None = None
    unit: str = "ms"
    ratio: float | None = None
    quartiles: tuple[float, float, float] | None = None
    verdicts: tuple[Verdict, ...] = ()
    ready: float | None = None
    note: str = ""


@dataclass
class Timing:
    """What was measured of one variant.

    Attributes:
        rounds: seconds per step, one number per round.
        single: for each round, the seconds of every step of its block, if they were timed one by one.
    """

    rounds: list[float] = field(default_factory=list)
    single: list[list[float]] = field(default_factory=list)
    ready: float | None = None
    note: str = ""

    @property
    def best(self) -> float | None:
        """Seconds per step of the best block; or of a block made of the best first step, the best second one..."""
        if self.single:
            return statistics.fmean(map(min, zip(*self.single, strict=True)))
        return min(self.rounds, default=None)


def measure(
    variants: Mapping[str, Make],
    *,
    steps: int,
    rounds: int,
    warmup: int,
    device: str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
    one_by_one: bool = False,
) -> dict[str, Timing]:
    """Time ``rounds`` blocks of ``steps`` steps of each variant, in turn.

    A variant that cannot be made, or raises later, gets a note; the others go on. ``one_by_one`` is for steps so long
    that a whole block is hardly ever left in peace: the steps of a block are timed one by one. What does not happen at
    the same place of every block, as most resets, does not count then.
    """
    timings = {name: Timing() for name in variants}
    blocks: dict[str, Block] = {}
    for name, make in variants.items():
        began = time.perf_counter()
        step = _guarded(timings[name], partial(_ready, make, warmup, timings[name]))
        if step is not None:
            single = timings[name].single if one_by_one else None
            blocks[name] = partial(_block, step, steps, device, clock, single)
            timings[name].ready = time.perf_counter() - began
    take_turns(blocks, rounds, timings)
    return timings


def take_turns(blocks: Mapping[str, Block], rounds: int, timings: dict[str, Timing]) -> dict[str, Timing]:
    """Call every block once a round and note its result. One that raises is left out from there on, with a note."""
    running = dict(blocks)
    # What is alive now stays alive: without this, every collection would walk the objects of all the variants.
    gc.collect()
    gc.freeze()
    try:
        for number in range(rounds):
            names = list(running)
            first = number % max(len(names), 1)
            for name in names[first:] + names[:first]:
                seconds = _guarded(timings[name], running[name])
                if seconds is None:
                    del running[name]
                else:
                    timings[name].rounds.append(seconds)
    finally:
        gc.unfreeze()
    return timings


def compare(
    suite: str,
    setting: str,
    timings: Mapping[str, Timing],
    targets: Mapping[str, Sequence[Target]] | None = None,
    unit: str = "ms",
) -> list[Row]:
    """The timings as rows: ratios to the first of them, their spread, and the verdict on each target.

    ``unit`` is ms (per step), or something per second.
    """
    base = next(iter(timings))
    rows = []
    for name, timing in timings.items():
        best = timing.best
        goals = (targets or {}).get(name, ())
        rows.append(
            Row(
                suite,
                setting,
                name,
                value=None if best is None else 1e3 * best if unit == "ms" else 1 / best,
                unit=unit,
                ratio=_ratio(timings, name, base),
                quartiles=_quartiles([a / b for a, b in zip(timing.rounds, timings[base].rounds, strict=False)]),
                verdicts=tuple(Verdict(t.limit, t.of, _ratio(timings, name, t.of or base)) for t in goals),
                ready=timing.ready,
                note=timing.note,
            )
        )
    return rows


def _ready(make: Make, warmup: int, timing: Timing) -> Step:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = make()
        for _ in range(warmup):
            step()
    ours = [str(w.message) for w in caught if w.category.__module__.startswith("gxd")]
    timing.note = "; ".join(dict.fromkeys(ours))  # a compiled step that fell back to eager says so here
    return step


def _block(
    step: Step, steps: int, device: str, clock: Callable[[], float], single: list[list[float]] | None = None
) -> float:
    if single is None:
        step()  # brings the model back into the caches, as in training without turns
    synchronize(device)
    ends = [clock()]
    for _ in range(steps):
        step()
        if single is not None:
            synchronize(device)
            ends.append(clock())
    synchronize(device)
    if single is None:
        ends.append(clock())
    else:
        single.append([after - before for before, after in pairwise(ends)])
    return (ends[-1] - ends[0]) / steps


def synchronize(device: str) -> None:
    """Wait for the device, if it is one that works ahead."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize()


def _guarded(timing: Timing, function: Callable[[], T]) -> T | None:
    try:
        return function()
    except UserError as reason:
        timing.note = f"skipped: {reason}"
    except (Exception, SystemExit) as error:  # one variant's failure must not cost the others their numbers
        text = str(error).strip().splitlines()
        timing.note = f"failed: {type(error).__name__}: {text[0] if text else ''}"
    return None


def _ratio(timings: Mapping[str, Timing], name: str, of: str) -> float | None:
    one, other = timings[name].best, timings[of].best if of in timings else None
    return None if one is None or other is None else one / other


def _quartiles(ratios: list[float]) -> tuple[float, float, float] | None:
    if len(ratios) < 2:
        return None
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, middle, high
