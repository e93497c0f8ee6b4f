"""What a reset really costs, unit by unit, and how well the utilities predict it: the reset-cost assay.

Each unit is clamped to its reference on probe data, one at a time, and the change of the outputs is its *shock*. A
utility is good if it ranks the units as the shocks do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gxd import arguments
from gxd.cost.lesion import Data, Lesion
from gxd.cost.ranks import mean_of_lowest, mean_over_groups, spearman
from gxd.cost.sets import METRICS, SetCosts, set_costs
from gxd.observe.direction import class_axis
from gxd.observe.output import logits_in
from gxd.plan.find import find_units
from gxd.plan.layouts import NamedTensors, unwrap
from gxd.plan.units import UnitPlan
from gxd.sandbox.called import called_by
from gxd.sandbox.substitute import evaluation
from gxd.score.utilities import Utility, get_utility
from gxd.score.utilities import utilities as registered
from gxd.sharded import refuse_shards
from gxd.tables import html_table, shown

ByGroup = dict[str, float]


@dataclass(frozen=True, repr=False)
class ResetCost:
    """The result of :func:`reset_cost`. ``print`` it.

    Attributes:
        units: group name -> ``(n,)`` the units that were clamped; the rest of the group is left out of everything.
        references: group name -> ``(views, n)`` what they were clamped to.
        scores: utility -> group name -> ``(n,)``.
        shocks: metric (``"l1"``, ``"kl"``) -> group name -> ``(n,)``, the mean over the probe examples.
        calibration: the number of examples the utilities were scored on.
        probe: the number of examples the shocks were measured on.
        sets: what whole sets of units cost, if that was asked for.
    """

    units: Mapping[str, Tensor]
    references: Mapping[str, Tensor]
    scores: Mapping[str, Mapping[str, Tensor]]
    shocks: Mapping[str, Mapping[str, Tensor]]
    calibration: int
    probe: int
    sets: SetCosts | None = None

    def spearman(self, metric: str = "l1") -> dict[str, float]:
        """Utility -> rank correlation of scores and shocks, the mean over the groups where it is defined."""
        return {name: mean_over_groups(by_group) for name, by_group in self.spearman_by_group(metric).items()}

    def spearman_by_group(self, metric: str = "l1") -> dict[str, ByGroup]:
        """Utility -> group -> rank correlation; ties get their average rank.

        It is NaN where there is nothing to rank: a group of one unit, scores that are all the same or not finite.
        """
        shocks = self._shocks(metric)
        return {u: {g: spearman(s, shocks[g]) for g, s in scores.items()} for u, scores in self.scores.items()}

    def undefined(self, metric: str = "l1") -> dict[str, list[str]]:
        """Utility -> the groups whose rank correlation is undefined and left out of the mean."""
        found = self.spearman_by_group(metric)
        return {u: [g for g, rho in by_group.items() if math.isnan(rho)] for u, by_group in found.items()}

    def shock(self, fraction: float = 0.05, metric: str = "l1") -> dict[str, float]:
        """Utility -> mean shock of the units it ranks lowest, ``ceil(fraction)`` of each group; mean over groups."""
        return {name: mean_over_groups(by_group) for name, by_group in self.shock_by_group(fraction, metric).items()}

    def shock_by_group(self, fraction: float = 0.05, metric: str = "l1") -> dict[str, ByGroup]:
        """Utility -> group -> mean shock of the lowest units. Of units that tie, the mean shock counts."""
        shocks, share = self._shocks(metric), _fraction(fraction)
        return {
            u: {g: mean_of_lowest(s, shocks[g], share) for g, s in scores.items()} for u, scores in self.scores.items()
        }

    def oracle(self, fraction: float = 0.05, metric: str = "l1") -> float:
        """The shock that a perfect utility would have: of the units whose shock is lowest."""
        return mean_over_groups(self.oracle_by_group(fraction, metric))

    def oracle_by_group(self, fraction: float = 0.05, metric: str = "l1") -> ByGroup:
        """Group -> mean shock of the units whose shock is lowest."""
        share = _fraction(fraction)
        return {g: mean_of_lowest(s, s, share) for g, s in self._shocks(metric).items()}

    def __str__(self) -> str:
        rho = {metric: self.spearman(metric) for metric in METRICS}
        shock = {metric: self.shock(metric=metric) for metric in METRICS}
        width = max(len(name) for name in [*self.scores, "utility"])
        lines = [f"{'':{width}}  Spearman      Shock@5%", f"{'utility':{width}}  L1     KL     L1         KL"]
        for name in self.scores:
            cells = f"{rho['l1'][name]:6.3f} {rho['kl'][name]:6.3f}  {shock['l1'][name]:<9.3g}  {shock['kl'][name]:.3g}"
            lines.append(f"{name:{width}} {cells}")
        lines.append(f"{'oracle':{width}}  {'':13} {self.oracle():<9.3g}  {self.oracle(metric='kl'):.3g}")
        return "\n".join([*lines, *self._notes(), *([] if self.sets is None else [str(self.sets)])])

    def __repr__(self) -> str:
        return f"ResetCost({self._notes()[0]}; print it)"

    def _repr_html_(self) -> str:
        columns = [by(metric) for by in (self.spearman, lambda m: self.shock(metric=m)) for metric in METRICS]
        rows = [[name, *(shown(column[name]) for column in columns)] for name in self.scores]
        rows.append(["oracle", "", "", *(shown(self.oracle(metric=metric)) for metric in METRICS)])
        header = ("utility", "Spearman L1", "Spearman KL", "Shock@5% L1", "Shock@5% KL")
        return html_table(header, rows, "Reset cost", self._notes())

    def _notes(self) -> list[str]:
        size = sum(map(len, self.units.values()))
        notes = [
            f"{len(self.units)} groups, {size} units; scored on {self.calibration} examples, clamped on {self.probe}"
        ]
        for name, groups in self.undefined().items():
            if groups:
                notes.append(f"{name}: no rank correlation in {len(groups)} group(s), left out: {', '.join(groups)}")
        return notes

    def _shocks(self, metric: str) -> Mapping[str, Tensor]:
        if metric not in self.shocks:
            raise ValueError(f"metric={metric!r} is not one of {', '.join(map(repr, self.shocks))}")
        return self.shocks[metric]


def reset_cost(
    model: nn.Module,
    calibration: tuple[Any, Tensor | None],
    probe: Any,
    *,
    utilities: Sequence[str] | str | None = None,
    plan: UnitPlan | None = None,
    units_per_group: int | None = None,
    all_logit_examples: int | None = None,
    positions: str = "signed",
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    output: Callable[[Any], Tensor] | None = None,
    class_dim: int | None = None,
    chunk: int = 256,
    seed: int = 0,
    sets: float | None = None,
    random_sets: int = 32,
    report: Callable[[int, int], None] | None = None,
    call: Callable[..., Any] | None = None,
) -> ResetCost:
    """Clamp every unit to its reference, one at a time, and compare the shock with what the utilities predicted.

    The reference is the mean of h over the calibration data (exact, not a running average). Everything happens in
    evaluation mode: dropout is off and BatchNorm uses its running statistics. The model is left as it was found:
    modes, parameters, buffers, gradients, and the global random state.

    Many units are clamped in one forward pass, and what lies before them is computed once for all. This is checked
    against plain clamping on two units of every group; where it does not work, units are clamped one by one, with a
    warning.

    Args:
        model: a model whose output is ``(batch, classes)``, or has positions too.
        calibration: ``(x, y)``: the inputs (a tensor, a tuple of arguments, or a dict, as for
            :func:`gxd.find_units`) and the target classes; y may be None if no utility needs it.
        probe: other inputs of the same kind, or ``(x, y)``; y is not used.
        utilities: names of registered utilities. Default: all of them but those that need second derivatives, which not
            every model has (without a target: all that need none).
        plan: default: ``find_units(model, ...)``.
        units_per_group: clamp only so many units of each group, drawn at random. All are clamped by default.
        all_logit_examples: score utilities that need one backward pass per class on only so many calibration examples.
        positions: ``"signed"`` or ``"abs"``, as for :class:`gxd.ContinualBackprop`.
        loss: ``(logits, y) -> mean loss``, for ``loss_gradient``. Default: the cross entropy.
        output: takes the logits from what the model returns. Default: the tensor itself, or its ``logits``.
        class_dim: the axis of the classes, 1 or -1, where the shapes of the logits and of y leave it open.
        chunk: examples per forward pass, for scores, and for clamps that are done one by one.
        seed: of the choice of units and of sets, of ``gxd_sketch``, ``gxd_kl``, ``gxd_second_order`` and ``random``.
        sets: clamp whole sets, too: this share of each group at once, as each utility would choose it, and at random.
            The result is in ``ResetCost.sets``.
        random_sets: how many sets of each group are drawn at random.
        report: called with the number of clamps done and their total.
        call: as for :func:`gxd.find_units`.

    Example::

        cost = gxd.reset_cost(model, (x[:2048], y[:2048]), x[2048:4096], utilities=["gxd", "contribution"])
        print(cost)
        cost.spearman("l1")["gxd"]
    """
    arguments.module(model)
    _check_numbers(
        units_per_group=units_per_group, all_logit_examples=all_logit_examples, chunk=chunk, random_sets=random_sets
    )
    share = None if sets is None else _fraction(sets, "sets")
    if positions not in ("signed", "abs"):
        raise ValueError(f"positions={positions!r} is not 'signed' or 'abs'")
    inputs, target = _calibration(calibration)
    wanted = _utilities(utilities, target)
    model = unwrap(model)
    refuse_shards(model, "reset_cost")
    if plan is None:
        plan = find_units(model, inputs, call=call)
    arguments.plan(plan)
    if not plan.groups:
        raise ValueError("the plan has no group, so there is nothing to clamp: print(plan) says why")
    plan.validate(NamedTensors(model))
    data = Data(inputs, target, plan.batch_dim, "calibration")
    probes = Data(_probe_inputs(probe, inputs), None, plan.batch_dim, "probe")
    lesion = Lesion(model, plan, _checked(output) if output is not None else logits_of, positions, seed)
    units = [_some(group.size, units_per_group, seed) for group in plan.groups]
    with evaluation(model), called_by(model, call):
        classes = _class_dim(lesion, data, probes, class_dim)
        references = lesion.references(data, chunk)
        scores, grams = lesion.scores(
            data, wanted, references, loss, classes, chunk, all_logit_examples, pairs=share is not None
        )
        shocks = lesion.shocks(probes, units, references, classes, chunk, report)
        names, of_sets = [group.name for group in plan.groups], None
        if share is not None:
            clamp = lambda number, some: lesion.shocks_of_sets(  # noqa: E731
                probes, number, some, references[number], classes, chunk
            )
            of_sets = set_costs(share, random_sets, names, units, scores, grams, shocks, clamp, seed)
    picked = dict(zip(names, units, strict=True))
    return ResetCost(
        units=picked,
        references={n: r[:, picked[n]] for n, r in zip(names, references, strict=True)},
        scores={u: {n: s[picked[n]] for n, s in zip(names, by_group, strict=True)} for u, by_group in scores.items()},
        shocks={m: dict(zip(names, by_group, strict=True)) for m, by_group in shocks.items()},
        calibration=data.size,
        probe=probes.size,
        sets=of_sets,
    )


# --- arguments --------------------------------------------------------------------------------------------------------


def _calibration(calibration: Any) -> tuple[Any, Tensor | None]:
    if not isinstance(calibration, (tuple, list)) or len(calibration) != 2:
        raise TypeError(f"calibration must be (x, y), the inputs and the targets, got {type(calibration).__name__}")
    inputs, target = calibration
    if target is not None and not isinstance(target, Tensor):
        raise TypeError(f"calibration must be (x, y) with a tensor (or None) for y, got {type(target).__name__}")
    return inputs, target


def _probe_inputs(probe: Any, inputs: Any) -> Any:
    """The inputs of ``x`` or ``(x, y)``. A tuple of arguments is told apart by what the calibration inputs are."""
    nested = isinstance(probe, (tuple, list)) and len(probe) == 2 and isinstance(probe[0], type(inputs))
    if isinstance(inputs, tuple):
        return probe[0] if nested else probe
    return probe[0] if nested and not isinstance(probe, type(inputs)) else probe


def _utilities(names: Sequence[str] | str | None, target: Tensor | None) -> list[Utility]:
    if names is None:
        every = [utility for utility in map(get_utility, registered()) if not utility.curvature]
        return [u for u in every if target is not None or u.gradient not in ("target", "loss", "weights")]
    wanted = [get_utility(name) for name in ([names] if isinstance(names, str) else names)]
    if not wanted:
        raise ValueError(f"utilities={names!r} is empty; the registered ones are {', '.join(registered())}")
    for utility in wanted:
        if target is None and utility.gradient in ("target", "loss", "weights"):
            raise ValueError(f"the utility {utility.name!r} needs targets: give calibration=(x, y), not (x, None)")
    return list({utility.name: utility for utility in wanted}.values())


def _check_numbers(**numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name}={value!r} must be a whole number, 1 or more")


def _fraction(value: float, name: str = "fraction") -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 1:
        raise ValueError(f"{name}={value!r} must be a number above 0, at most 1")
    return float(value)


def _some(size: int, wanted: int | None, seed: int) -> Tensor:
    if wanted is None or wanted >= size:
        return torch.arange(size)
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:wanted].sort().values


# --- the model --------------------------------------------------------------------------------------------------------


def logits_of(output: Any) -> Tensor:
    """What a model returns, or the logits in it."""
    return logits_in(output, "output=lambda out: ...")


def _checked(output: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    def checked(returned: Any) -> Tensor:
        found = output(returned)
        if not isinstance(found, Tensor):
            raise TypeError(f"output must return a tensor, got {type(found).__name__}")
        return found

    return checked


def _class_dim(lesion: Lesion, data: Data, probes: Data, given: int | None) -> int:
    """The class axis of the logits, from a first look at a few examples of each set."""
    call, target, _ = data.part(0, 2)
    logits, _ = lesion.watch(call)
    if logits.dim() < 2:
        raise ValueError(f"the model's output has shape {tuple(logits.shape)}, expected (batch, classes)")
    for name, few in (("calibration", logits), ("probe", lesion.watch(probes.part(0, 2)[0])[0])):
        if not bool(few.isfinite().all()):
            raise ValueError(f"the model's outputs on the {name} data are not finite (NaN or inf)")
    return class_axis(logits, target, given)
