"""What the runs say: settings grouped over seeds, curves over the living runs, assay cells."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gxd.lab.experiments import base
from gxd.lab.report import numbers, paper
from gxd.lab.report.digest import NEUTRAL, SETTLED, Assay, Run, identity

Panel = tuple[str, bool]  # activation, with LayerNorm
# What may differ between methods that are compared: it is chosen for each of them, or of no consequence.
CHOSEN = ("method", "lr", "rate", "compile")
# What belongs to a method alone.
RESETS = (*base.RESETS, "residual", "options")


@dataclass(frozen=True)
class Group:
    """The seeds of one setting. Accuracies come from settled runs, rates of divergence from all that were started:
    a run that diverges is settled early, so among the settled ones alone there would be too many.
    """

    runs: tuple[Run, ...]

    @property
    def method(self) -> str:
        """The method of all runs."""
        return str(self.runs[0].config.get("method", "?"))

    @property
    def panel(self) -> Panel:
        """Activation, and whether there is LayerNorm."""
        config = self.runs[0].config
        return str(config.get("activation", "?")), bool(config.get("layer_norm", False))

    @property
    def training(self) -> str:
        """What is trained and how: methods that differ in this are not comparable."""
        return identity(self.runs[0].config, (*CHOSEN, *RESETS))

    @property
    def resetting(self) -> str:
        """How units are reset, beside the rate; empty for backprop, which resets none."""
        config = self.runs[0].config
        if self.method == "backprop":
            return ""
        return identity({name: config.get(name) for name in RESETS}, CHOSEN)

    @property
    def compensates(self) -> bool:
        """Whether resets move the mean contribution into the biases."""
        return bool(self.runs[0].config.get("compensate", True))

    @property
    def settled(self) -> tuple[Run, ...]:
        """Runs that are complete or have diverged."""
        return tuple(run for run in self.runs if run.status in SETTLED)

    @property
    def complete(self) -> bool:
        """Whether no run is under way."""
        return len(self.settled) == len(self.runs)

    @property
    def so_far(self) -> str:
        """What to write behind a rate of divergence that may still grow."""
        return "" if self.complete else " so far"

    @property
    def diverged(self) -> tuple[Run, ...]:
        """Runs that have diverged."""
        return tuple(run for run in self.runs if run.status == "diverged")

    @property
    def tasks(self) -> int:
        """The planned length of the runs."""
        return max(run.planned for run in self.runs)

    def finals(self) -> dict[int, float]:
        """Accuracy over the last tasks by seed, of the runs that lived to the end."""
        values = {run.seed: run.last() for run in self.settled}
        return {seed: value for seed, value in values.items() if value is not None}

    def first(self) -> numbers.Mean:
        """Accuracy over the first tasks, of the runs that lived that long."""
        return numbers.mean(run.first() for run in self.settled)

    def last(self) -> numbers.Mean:
        """Accuracy over the last tasks, of the runs that lived to the end."""
        return numbers.mean(self.finals().values())

    def drops(self) -> list[float]:
        """First minus last of every run that lived to the end: the plasticity that was lost."""
        pairs = [(run.first(), run.last()) for run in self.settled]
        return [first - last for first, last in pairs if first is not None and last is not None]


@dataclass(frozen=True)
class Curve:
    """A metric over tasks: mean and SE over the runs alive at each point, and how many of ``n`` these are.

    ``n`` are the runs that were drawn; ``under_way`` are left out for now.
    """

    x: tuple[float, ...]
    mean: tuple[float, ...]
    se: tuple[float, ...]
    alive: tuple[int, ...]
    n: int
    deaths: tuple[float, ...]  # where on x a run diverged
    living: int  # runs that reached the end
    tasks: int  # that were planned
    under_way: int = 0

    @property
    def label(self) -> str:
        """Empty, or for example "3/5 alive"."""
        if self.living == self.n:
            return ""
        alive = f"{self.living + self.under_way}/{self.n + self.under_way} alive"
        return f"{alive} so far" if self.under_way else alive


def groups(runs: Iterable[Run]) -> list[Group]:
    """The runs by study and setting."""
    found: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
    for run in runs:
        found[run.study, run.experiment, run.key].append(run)
    return [Group(tuple(sorted(members, key=lambda run: run.seed))) for members in found.values()]


def shown(runs: Sequence[Run]) -> dict[Panel, dict[str, Group]]:
    """One setting per method and panel, for one experiment; in a panel all were trained alike.

    Candidates compensate as the paper does. Where a panel has runs of several networks, lengths or the like, the family
    with the most methods on two seeds is shown, then with more tasks; in it, of several learning or replacement rates
    of a method, those with more seeds, then with higher final accuracy. Before all this comes the study with the most
    methods: a stress test of two must not replace them in a comparison of eight.
    """
    candidates = [group for group in groups(runs) if group.compensates]
    studies: dict[tuple[Panel, str], set[str]] = defaultdict(set)
    for group in candidates:
        studies[group.panel, group.runs[0].study].add(group.method)

    def coverage(group: Group) -> int:
        return len(studies[group.panel, group.runs[0].study])

    def merit(group: Group) -> tuple[float, ...]:
        final = group.last().value
        return coverage(group), len(group.settled), len(group.runs), final if math.isfinite(final) else -1.0

    def weight(family: Sequence[Group]) -> tuple[int, ...]:
        repeated = {group.method for group in family if len(group.runs) > 1}
        methods, tasks = {group.method for group in family}, max(group.tasks for group in family)
        return max(map(coverage, family)), len(repeated), tasks, len(methods), sum(len(group.runs) for group in family)

    chosen = {}
    for panel in sorted({group.panel for group in candidates}, key=panel_order):
        family = max(_families([group for group in candidates if group.panel == panel]), key=weight)
        best = {group.method: group for group in sorted(family, key=merit)}
        chosen[panel] = dict(sorted(best.items(), key=lambda item: paper.method_order(item[0])))
    return chosen


def left_out(runs: Sequence[Run], panels: Mapping[Panel, Mapping[str, Group]]) -> list[tuple[Panel, str, list[str]]]:
    """Methods that a panel does not show because they were trained otherwise, and the settings in which they were."""
    found = {}
    for group in groups(runs):
        here = panels.get(group.panel, {})
        if group.compensates and here and group.method not in here:
            nearest = max(here.values(), key=lambda other: other.method != "backprop")  # it has no reset settings
            found[group.panel, group.method] = _differing(group, nearest)
    return [(panel, method, fields) for (panel, method), fields in found.items()]


def _differing(group: Group, other: Group) -> list[str]:
    ours, theirs = group.runs[0].config, other.runs[0].config
    free = {*CHOSEN, *NEUTRAL, *(RESETS if "backprop" in (group.method, other.method) else ())}
    return [name for name in sorted({*ours, *theirs} - free) if ours.get(name) != theirs.get(name)]


def _families(candidates: Sequence[Group]) -> list[list[Group]]:
    """The groups that may stand side by side. Backprop belongs to all families that train as it does."""
    found: dict[tuple[str, str], list[Group]] = defaultdict(list)
    for group in candidates:
        found[group.training, group.resetting].append(group)
    return [
        members if not resetting else [*members, *found.get((training, ""), ())]
        for (training, resetting), members in found.items()
    ]


def curve(
    group: Group, metric: str = "test_accuracy", *, smooth: int = 1, baseline: Group | None = None
) -> Curve | None:
    """The curve of a metric, or None without data.

    ``smooth`` is a moving average over so many tasks. ``baseline`` is subtracted, seed by seed; seeds that it lacks, or
    has in another length, are left out: their blocks are of other tasks. Runs that are still under way are used only if
    no run is settled, and then to where all of them are.
    """
    runs = group.settled or group.runs
    lines: list[tuple[Run, tuple[float, ...]]] = []
    theirs = {run.seed: run for run in (baseline.settled or baseline.runs)} if baseline else {}
    for run in runs:
        values = run.blocks(metric)
        if baseline is not None:
            other = theirs.get(run.seed)
            if other is None or (other.block, other.planned) != (run.block, run.planned):
                continue
            values = tuple(a - b for a, b in zip(values, other.blocks(metric), strict=False))
        lines.append((run, moving_average(values, max(1, smooth // run.block))))
    lines = [(run, values) for run, values in lines if values or run.diverged_at is not None]
    if not any(values for _, values in lines):
        return None
    length = max(len(values) for _, values in lines)
    if not group.settled:
        length = min(len(values) for _, values in lines)
    x, means, errors, alive = [], [], [], []
    block, end = lines[0][0].block, max(run.tasks for run, _ in lines)
    for i in range(length):
        here = numbers.mean(values[i] for _, values in lines if i < len(values))
        if here.n == 0:
            continue
        x.append((i * block + 1 + min((i + 1) * block, end)) / 2)
        means.append(here.value)
        errors.append(here.se)
        alive.append(here.n)
    dead = [run for run, _ in lines if run.diverged_at is not None]
    return Curve(
        tuple(x),
        tuple(means),
        tuple(errors),
        tuple(alive),
        len(lines),
        tuple(float(run.diverged_at) for run in dead if run.diverged_at is not None),
        len(lines) - len(dead),
        max(run.planned for run, _ in lines),
        len(group.runs) - len(runs),
    )


def moving_average(values: Sequence[float], width: int) -> tuple[float, ...]:
    """The mean over the ``width`` values up to each one (fewer at the start)."""
    if width <= 1:
        return tuple(values)
    return tuple(numbers.mean(values[max(0, i + 1 - width) : i + 1]).value for i in range(len(values)))


def difference(ours: Group, theirs: Group) -> numbers.Mean:
    """Final accuracy of ``ours`` minus ``theirs``: paired over common seeds if there are two, else by group."""
    gaps = paired_gaps(ours, theirs)
    if gaps:
        return numbers.mean(gaps)
    left, right = ours.last(), theirs.last()
    return numbers.Mean(left.value - right.value, math.hypot(left.se, right.se), min(left.n, right.n))


def paired_gaps(ours: Group, theirs: Group) -> list[float]:
    """Final accuracy of ``ours`` minus ``theirs``, seed by seed; nothing if fewer than two seeds lived in both."""
    a, b = ours.finals(), theirs.finals()
    common = sorted(a.keys() & b.keys())
    return [a[seed] - b[seed] for seed in common] if len(common) >= 2 else []


def twins(runs: Sequence[Run], field: str, value: object, other: object) -> list[tuple[Group, Group]]:
    """Pairs of settings that differ in one field only: ``value`` first, then ``other``. Studies are pooled."""
    found: dict[str, dict[object, dict[int, Run]]] = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        if run.config.get("method") == "backprop" or run.config.get(field) not in (value, other):
            continue
        rest = f"{run.experiment} {identity(run.config, (field,))}"
        seen = found[rest][run.config[field]]
        if run.seed not in seen or run.progress > seen[run.seed].progress:
            seen[run.seed] = run
    pairs = []
    for sides in found.values():
        if value in sides and other in sides:
            pairs.append((Group(tuple(sides[value].values())), Group(tuple(sides[other].values()))))
    return sorted(pairs, key=lambda pair: _setting_order(pair[0].runs[0]))


def _setting_order(run: Run) -> tuple[object, ...]:
    config = run.config
    return (
        run.experiment,
        str(config.get("activation")),
        paper.method_order(str(config.get("method"))),
        float(config.get("lr") or 0),
        float(config.get("rate") or 0),
        run.planned,
    )


def panel_order(panel: Panel) -> tuple[int, str, bool]:
    """Sorts panels as the paper's figures do, unknown ones last."""
    names = list(paper.ACTIVATIONS)
    return (names.index(panel[0]) if panel[0] in names else len(names), panel[0], panel[1])


# --- the assay --------------------------------------------------------------------------------------------------------

Sample = tuple[int, int]  # seed and checkpoint


@dataclass(frozen=True)
class AssayColumn:
    """All assays of one model and activation, as values per (seed, checkpoint): the mean over layers comes first."""

    column: paper.Column
    assays: tuple[Assay, ...]

    def spearman(self, utility: str, metric: str) -> dict[Sample, float]:
        """Rank correlation of utility and shock."""
        return self._samples(lambda point: point["utilities"].get(utility, {}).get("spearman", {}).get(metric))

    def shock(self, utility: str, metric: str) -> dict[Sample, float]:
        """Mean shock of the lowest 5 % of the units by this utility, or by the truth (``oracle``)."""
        if utility == "oracle":
            return self._samples(lambda point: point.get("oracle", {}).get(metric))
        return self._samples(lambda point: point["utilities"].get(utility, {}).get("shock", {}).get(metric))

    @property
    def utilities(self) -> list[str]:
        """Every utility that was assayed, in the paper's order."""
        names = {name for assay in self.assays for point in assay.checkpoints for name in point["utilities"]}
        return sorted(names, key=paper.method_order)

    def _samples(self, pick: Callable[[Mapping[str, Any]], Any]) -> dict[Sample, float]:
        values = {}
        for assay in self.assays:
            for point in assay.checkpoints:
                by_layer = pick(point)
                if isinstance(by_layer, dict):
                    value = numbers.mean(by_layer.values())
                    if value.n:
                        values[assay.seed, int(point["checkpoint"])] = value.value
        return values


def assay_columns(assays: Sequence[Assay]) -> dict[paper.Column, AssayColumn]:
    """The assays by model and activation, the paper's columns first; of several settings the one with most points.

    Assays under way are used only where none is settled: their late checkpoints would be missing from the mean.
    """
    found: dict[paper.Column, dict[str, list[Assay]]] = defaultdict(lambda: defaultdict(list))
    for assay in assays:
        found[assay.column][assay.key].append(assay)
    order = [*paper.COLUMNS, *sorted(column for column in found if column not in paper.COLUMNS)]
    columns = {}
    for column in order:
        if column in found:
            members = max(found[column].values(), key=lambda group: sum(len(assay.checkpoints) for assay in group))
            settled = [assay for assay in members if assay.status in SETTLED]
            columns[column] = AssayColumn(column, tuple(settled or members))
    return columns
