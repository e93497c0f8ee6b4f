"""Prove a plan on the user's own model, with numbers.

For a few units of every group, the model is run with the units' views clamped to a value, and again with the units'
incoming weights drawn anew. If the plan is right, the second run gives the same outputs (there is no other way out of
the units), only the claimed columns of the consumers have moved, and parameters that went through the reset operator
give the same outputs without any clamp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gxd import arguments
from gxd.plan.find import find_units
from gxd.plan.layouts import NamedTensors, unwrap
from gxd.plan.units import Group, UnitPlan
from gxd.plan.verify.probe import MARGIN, Clamp, Probe
from gxd.sandbox.called import called_by
from gxd.sandbox.freeze import Calls
from gxd.sandbox.substitute import evaluation
from gxd.sharded import refuse_shards
from gxd.tables import html_table

PASSED, APPROXIMATE, INCONCLUSIVE, WRONG = "passed", "approximate", "inconclusive", "wrong"
_ATTEMPTS = 5  # a unit drawn anew may be silent on these inputs


@dataclass(frozen=True)
class GroupCheck:
    """The verdict on one group.

    Attributes:
        name: of the group.
        status: ``passed``, ``approximate``, ``inconclusive`` or ``wrong``.
        error: largest difference of the outputs between the clamped and the reset model, over the clamp's effect.
        detail: what was seen, in words.
    """

    name: str
    status: str
    error: float
    detail: str


@dataclass(frozen=True, repr=False)
class CheckReport:
    """The verdict on a plan. ``print`` it; ``report.ok`` is False if any group is wrong."""

    plan: UnitPlan
    groups: tuple[GroupCheck, ...]

    @property
    def ok(self) -> bool:
        return all(group.status != WRONG for group in self.groups)

    def __getitem__(self, name: str) -> GroupCheck:
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(f"no group {name!r} in the report; it has {', '.join(g.name for g in self.groups) or 'none'}")

    def __str__(self) -> str:
        if not self.groups:
            return "the plan has no group to check"
        width = max(len(group.name) for group in self.groups)
        lines = [f"{g.name.ljust(width)}  {g.status.ljust(12)}  error {g.error:.0e}  {g.detail}" for g in self.groups]
        return "\n".join([*lines, self._counts()])

    def __repr__(self) -> str:
        return f"CheckReport({self._counts() or 'no group'}; print it)"

    def _repr_html_(self) -> str:
        rows = [(g.name, g.status, f"{g.error:.0e}", g.detail) for g in self.groups]
        return html_table(("group", "verdict", "error", ""), rows, self._counts() or str(self))

    def _counts(self) -> str:
        counts = {s: sum(g.status == s for g in self.groups) for s in (PASSED, APPROXIMATE, INCONCLUSIVE, WRONG)}
        return ", ".join(f"{n} {status}" for status, n in counts.items() if n)


def verify_plan(
    model: nn.Module,
    example_inputs: Tensor | tuple[Any, ...] | Mapping[str, Any] | list[Any],
    *,
    plan: UnitPlan | None = None,
    units_per_group: int = 3,
    tolerance: float = 1e-3,
    seed: int = 0,
    call: Callable[..., Any] | None = None,
) -> CheckReport:
    """Verify a plan numerically on a model. The model is left as it is: everything happens on copies of its tensors.

    The copies are in float64, so that small errors show; where a model does not run in float64 they are in single
    precision, or in the model's own types, and the verdict says so. Biases, norms, and all that is constant or next to
    nothing (zero-initialised heads, layer scales) are disturbed, so that it hides nothing.

    Args:
        model: the model.
        example_inputs: as for :func:`gxd.find_units`; here their values matter, so give real data.
        plan: default: ``find_units(model, example_inputs)``.
        units_per_group: how many units of each group to try, at most half of it; half of it where they do not show.
        tolerance: largest relative error of a group that passes.
        seed: of the choice of units and of the fresh weights.
        call: as for :func:`gxd.find_units`.

    Returns:
        For each group ``passed``; ``approximate``, where the plan says so (zero padding at the borders, a norm that
        couples units, no bias to compensate in) and only that part differs; ``inconclusive``, where the units have no
        effect on the outputs that could be told from rounding; or ``wrong``: the plan does not describe this model.
    """
    arguments.module(model)
    if not isinstance(units_per_group, int) or isinstance(units_per_group, bool) or units_per_group < 1:
        raise ValueError(f"units_per_group={units_per_group!r} must be a whole number, 1 or more")
    if not isinstance(tolerance, (int, float)) or not tolerance >= 0:
        raise ValueError(f"tolerance={tolerance!r} must be a number, 0 or more")
    model = unwrap(model)
    refuse_shards(model, "verify_plan")
    plan = plan if plan is not None else find_units(model, example_inputs, call=call)
    arguments.plan(plan)
    tensors = NamedTensors(model)
    plan.validate(tensors)
    several = example_inputs if isinstance(example_inputs, list) else [example_inputs]
    with evaluation(model), called_by(model, call):
        probes = [_Probes(model, inputs, seed) for inputs in several]
        checks = [
            max(
                (_check_group(probe, group, plan.batch_dim, units_per_group, tolerance) for probe in probes),
                key=lambda found: _SAYS_MORE.index(found.status),
            )
            for group in plan.groups
        ]
    return CheckReport(plan, tuple(checks))


_SAYS_MORE = (INCONCLUSIVE, PASSED, APPROXIMATE, WRONG)  # of the verdicts on several calls, the last of these counts


class _Probes:
    """The model in float64; where it does not run so, in single precision; then in its own types. Made when needed."""

    def __init__(self, model: nn.Module, example_inputs: Any, seed: int) -> None:
        self.arguments = (model, example_inputs, seed)
        own = {t.dtype for t in NamedTensors(model).values() if t.is_floating_point()}
        common = own <= {torch.float64, torch.float32}
        self.left: list[torch.dtype | None] = [torch.float64, *([] if common else [torch.float32]), None]
        self.made: list[Probe] = []

    def __iter__(self) -> Iterator[Probe]:
        yield from self.made
        while self.left:
            dtype = self.left.pop(0)
            try:
                probe = Probe(*self.arguments, dtype)
            except Exception:  # a model that insists on a type of its own fails in many ways
                if not self.left and not self.made:
                    raise
            else:
                self.made.append(probe)
                yield probe


def _check_group(probes: _Probes, group: Group, batch_dim: int, units: int, tolerance: float) -> GroupCheck:
    failure = ""
    for probe in probes:
        try:
            verdict = _verdict(probe, group, batch_dim, units, tolerance)
        except Exception as error:  # clamped units may lead where float64 is not known
            failure = f"{type(error).__name__}: {error}".partition("\n")[0]
        else:
            name = str(probe.precision).removeprefix("torch.")
            single = "" if probe.precision == torch.float64 else f" (in {name})"
            return replace(verdict, detail=verdict.detail + single)
    return GroupCheck(group.name, INCONCLUSIVE, 0.0, f"the model fails when these units are clamped: {failure[:200]}")


def _verdict(probe: Probe, group: Group, batch_dim: int, units: int, tolerance: float) -> GroupCheck:
    if not probe.finite:
        detail = "the outputs are not finite (NaN or inf): give real data"
        return GroupCheck(group.name, INCONCLUSIVE, 0.0, detail)
    clamp = _clamp(probe, group, units)
    if not clamp.shows:
        return GroupCheck(group.name, INCONCLUSIVE, 0.0, _why_nothing_shows(probe, group, clamp))
    index = clamp.index
    norms = probe.frozen_norms(group, clamp)
    far, stray, still = _draw_anew(probe, group, clamp, norms or {})
    reset, _ = probe.run(tensors=probe.operated(group, index))
    outgoing, _ = probe.run(tensors=probe.operated(replace(group, producers=(), norms=()), index))
    error = clamp.distance(reset) / clamp.effect
    allowed = tolerance * clamp.effect + clamp.floor

    silent = _not_called(group, clamp)

    def verdict(status: str, detail: str) -> GroupCheck:
        detail += f"; {silent[0]!r} is not called on these inputs" if silent else ""
        return GroupCheck(group.name, status, error, detail)

    # A norm that couples the units and cannot be frozen carries them everywhere.
    if far > tolerance * clamp.effect + clamp.drift and norms is not None:
        return verdict(WRONG, "the units reach the outputs past the claimed consumers")
    if stray and norms is not None:
        return verdict(WRONG, f"drawn anew, the units move columns of {stray!r} that the plan does not claim")
    if still:
        return verdict(INCONCLUSIVE, f"drawn anew, the units do not move their columns of {still!r}")
    if probe.other_examples_move(group, clamp, batch_dim):
        return verdict(WRONG, "the examples lie on another axis of the views than the plan says")
    if clamp.distance(reset) <= allowed:
        return verdict(PASSED, f"a reset equals the clamp on {len(index)} units")
    if clamp.distance(outgoing) > allowed and not any(c.approximate for c in group.consumers):
        return verdict(WRONG, "the compensated reset differs from the clamp")
    if not group.approximate:
        return verdict(WRONG, "the reset differs from the clamp")
    return verdict(APPROXIMATE, "; ".join(group.approximate))


def _clamp(probe: Probe, group: Group, units: int) -> Clamp:
    """Some units clamped, or half of them if some do not show; not all, whose columns could be in any order."""
    order, half = torch.randperm(group.size, generator=probe.generator), (group.size + 1) // 2
    clamp = probe.clamp(group, order[: min(units, half)].sort().values)
    return clamp if clamp.shows or half <= units else probe.clamp(group, order[:half].sort().values)


def _not_called(group: Group, clamp: Clamp) -> list[str]:
    return [c.module for n, view in enumerate(group.views) for c in view.consumers if (n, c.module) not in clamp.seen]


def _why_nothing_shows(probe: Probe, group: Group, clamp: Clamp) -> str:
    silent = _not_called(group, clamp)
    if silent:
        return f"{silent[0]!r} is not called on these inputs"
    if clamp.effect == math.inf > probe.drift:
        return "clamping these units changes the shapes of the outputs, or makes them infinite"
    if probe.drift > 0 and clamp.effect <= MARGIN * clamp.drift:
        return "the outputs differ from run to run: the model keeps a state, or draws random numbers of its own"
    return f"clamping these units does not change the outputs{' by more than rounding does' if clamp.effect else ''}"


def _draw_anew(
    probe: Probe, group: Group, clamp: Clamp, norms: Mapping[str, Calls]
) -> tuple[float, str | None, str | None]:
    """Draw the producers of the clamped units anew, until each has moved.

    Returns:
        How far the outputs moved; a consumer of which unclaimed columns moved; one of which no column of a unit did.
    """
    far, stray = 0.0, None
    moved = {key: torch.zeros(len(clamp.index), dtype=torch.bool) for key in clamp.seen}
    for _ in range(_ATTEMPTS):
        outputs, seen = probe.draw_anew(group, clamp, norms)
        far = max(far, clamp.distance(outputs))
        for key, source in clamp.seen.items():
            view = group.views[key[0]]
            change = (seen[key] - source).abs().movedim(view.axis, -1).flatten(0, -2).amax(0).cpu()
            own, others = view.columns[clamp.index], torch.ones(change.shape, dtype=torch.bool)
            others[own.flatten()] = False
            moved[key] |= change[own].amax(1) > clamp.drifts[key]
            if bool((change[others] > clamp.drifts[key]).any()):
                stray = key[1]
        if all(bool(units.all()) for units in moved.values()):
            break
    return far, stray, next((key[1] for key, units in moved.items() if not units.any()), None)
