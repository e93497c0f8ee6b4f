"""What every registered method costs beside plain backprop: a step, an event, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.nn import functional as F

import gxd
from gxd.lab.bench import suites
from gxd.lab.bench.measure import Row, Step
from gxd.lab.bench.suites import Scope, timed
from gxd.lab.bench.variants import MATURITY, Setting, Trainee, eager
from gxd.lab.bench.whole import footprint
from gxd.lab.errors import UserError
from gxd.lab.steps import eager_step

EVERY_STEP, BOUNDARY, KEPT = "every step", "a boundary", "kept"


def methods(scope: Scope) -> Iterator[list[Row]]:
    """All of :func:`gxd.methods` with their defaults, and their events: what is done every so many steps at every step,
    and what is done at a boundary by itself, so that its ratio is how many steps of backprop it takes.
    """
    # With norms and with Adam, so that there is something to do for methods that treat them.
    plain = suites.mlp_setting(scope, layer_norm=True)
    setting = replace(plain, title=f"{plain.title}, Adam", adam=True)
    variants = {"backprop": eager(setting)}
    for name, info in gxd.methods().items():
        variants[name] = partial(_training, setting, name)
        every = info.options.get("every")
        if isinstance(every, int) and every > 1:
            variants[f"{name}, {EVERY_STEP}"] = partial(_training, setting, name, every=1)
        if acts_at_boundaries(name):
            variants[f"{name}, {BOUNDARY}"] = partial(_boundaries, setting, name)
    yield timed("methods", setting, variants, scope, steps=20, rounds=40)
    yield _memory(setting, scope)


def acts_at_boundaries(name: str) -> bool:
    """Whether a method waits for the end of a task, as far as its defaults tell."""
    try:
        return type(gxd.method(name)).at_boundary is not gxd.Method.at_boundary
    except (TypeError, ValueError):  # it has no defaults
        return False


def trainee(setting: Setting, name: str, **options: Any) -> Trainee:
    """A model with a method attached to it. Raises UserError with the reason if the method refuses it."""
    if name == "plasticity_injection":  # prepared, as in a run
        setting = replace(setting, model=partial(_injectable, setting.model))
    model, optimizer, _ = setting.trainee(None)
    try:
        method = gxd.method(name, **options)
        plan = setting.plan() if method.needs_units else None
        return model, optimizer, gxd.attach(model, optimizer, method, plan=plan)
    except (TypeError, ValueError, gxd.PlanError) as error:
        raise UserError(" ".join(str(error).split())) from error


def _injectable(make: Callable[[], nn.Module]) -> nn.Module:
    return gxd.injectable(make(), "head")


def _training(setting: Setting, name: str, **options: Any) -> Step:
    model, optimizer, attached = trainee(setting, name, **options)
    return setting.repeat(eager_step(model, optimizer, F.cross_entropy, attached))


def _boundaries(setting: Setting, name: str) -> Step:
    """The end of a task, and nothing else, in a network that was trained a little."""
    model, optimizer, attached = trainee(setting, name)
    assert attached is not None
    step = setting.repeat(eager_step(model, optimizer, F.cross_entropy, attached))
    for _ in range(MATURITY):
        step()
    boundary: Callable[..., None] = attached.boundary
    needs_data = attached.methods[0].needs_data
    return partial(boundary, setting.batches(), F.cross_entropy) if needs_data else boundary


def _memory(setting: Setting, scope: Scope) -> list[Row]:
    """What is kept between two steps beyond backprop's model, optimizer and gradients, and relative to them."""
    makes: dict[str, Callable[[], Trainee]] = {"backprop": partial(setting.trainee, None)}
    makes |= {name: partial(trainee, setting, name) for name in gxd.methods()}
    rows: list[Row] = []
    plain = 0
    for name, make in scope.choose(makes).items():
        row = Row("methods", setting.title, f"{name}, {KEPT}")
        try:
            kept = footprint(setting, make)["kept"]
        except UserError as reason:
            rows.append(replace(row, note=f"skipped: {reason}"))
            continue
        plain = plain or kept
        more = (kept - plain if rows else kept) / 1024
        rows.append(replace(row, value=more, unit="kB more" if rows else "kB", ratio=kept / plain))
    return rows
