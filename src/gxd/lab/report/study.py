"""A study: the runs of one experiment in one place. What was swept in it, what each setting reached, which is best.

A *facet* is what was learned by which network (activation, width, number of tasks ...): within one, methods can be
compared. The other settings (rates, options of a method) are *tuned*: a method has a best one in every facet.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gxd.lab import methods
from gxd.lab.errors import UserError
from gxd.lab.experiments import EXPERIMENTS, base, experiment
from gxd.lab.report import numbers, paper
from gxd.lab.report.digest import GUESSED, NEUTRAL, Run
from gxd.lab.report.evidence import CHOSEN, RESETS, Curve, Group, curve, groups
from gxd.lab.report.tables import short
from gxd.lab.selection import LAST

TUNED = (*CHOSEN, *RESETS, "momentum", "weight_decay")
FIRST_FIELDS = ("method", "activation", "layer_norm", "network", "optimizer", "lr", "rate", "maturity")  # then the rest
# Where a study's settings were chosen, if that was a study of its own: of `gxd sweep`, and of `gxd leaderboard`.
CHOOSERS: tuple[Callable[[str], str], ...] = (
    lambda name: f"{name}-selection",
    lambda name: "tuning" if name == "report" else "",
)

Facet = tuple[tuple[str, str], ...]  # field and value, as they are shown


@dataclass(frozen=True)
class Goal:
    """What counts in an experiment. Of one that this version does not know it is guessed from what was logged."""

    metric: str = "test_accuracy"
    higher: bool = True
    nothing: float = math.nan  # what a network has that has learned nothing
    counts: Callable[[int], bool] = lambda task: True

    @property
    def percent(self) -> bool:
        """Whether it is shown in percent."""
        return is_share(self.metric)

    @property
    def label(self) -> str:
        """The metric in words."""
        return self.metric.replace("_", " ") + (", %" if self.percent else "")

    @property
    def better(self) -> str:
        """Which way is up, in words."""
        return "higher is better" if self.higher else "lower is better"

    def over(self, run: Run, *, last: bool) -> float | None:
        """The mean over the first or the last tenth of the tasks that count, in whole blocks; None if there is none."""
        if last and run.status != "done":
            return None
        values = [(value, size) for value, size, _ in self._counted(run)]
        planned = sum(map(self.counts, range(run.planned)))
        blocks = -(-max(1, round(LAST * planned)) // run.block)
        kept = values[-blocks:] if last else values[:blocks]
        if len(kept) < blocks:
            return None
        total = math.fsum(value * size for value, size in kept) / sum(size for _, size in kept)
        return total if math.isfinite(total) else None

    def _counted(self, run: Run) -> list[tuple[float, int, int]]:
        """Value, number of tasks and first task of each block that counts."""
        found = []
        for i, value in enumerate(run.blocks(self.metric)):
            start = i * run.block
            if run.block > 1 or self.counts(start):
                found.append((value, min(run.block, run.tasks - start), start))
        return found


def goal(name: str, runs: Sequence[Run]) -> Goal:
    """The goal of an experiment."""
    if name in EXPERIMENTS:
        kind = experiment(name)
        return Goal(kind.metric, kind.higher_is_better, kind.learned_nothing, kind().counts)
    logged = {metric for run in runs for metric in run.series}
    metric = next((metric for metric in GUESSED if metric in logged), GUESSED[0])
    return Goal(metric) if metric.endswith("accuracy") else Goal(metric, higher=False, nothing=math.inf)


def is_share(metric: str) -> bool:
    """Whether a metric is a share, and so shown in percent."""
    return metric.endswith(("accuracy", "fraction")) or metric in ("churn", "reach")


@dataclass(frozen=True)
class Setting:
    """The seeds of one setting, its values as they are shown, and what it reached."""

    group: Group
    values: Mapping[str, str]
    facet: Facet
    goal: Goal

    @property
    def method(self) -> str:
        """The method."""
        return self.group.method

    def first(self) -> numbers.Mean:
        """Over the first tenth of the tasks."""
        return numbers.mean(self.goal.over(run, last=False) for run in self.group.runs)

    @cached_property
    def finals(self) -> dict[int, float]:
        """Over the last tenth of the tasks, by seed, of the runs that lived to the end."""
        found = {run.seed: self.goal.over(run, last=True) for run in self.group.runs}
        return {seed: value for seed, value in found.items() if value is not None}

    def last(self) -> numbers.Mean:
        """The mean of ``finals``."""
        return numbers.mean(self.finals.values())

    def merit(self) -> float:
        """The larger the better: as `gxd sweep` chooses, a run that diverged has learned nothing."""
        reached = [*self.finals.values(), *[self.goal.nothing] * len(self.group.diverged)]
        if not reached:
            return -math.inf
        value = sum(reached) / len(reached)
        return -math.inf if math.isnan(value) else value if self.goal.higher else -value

    def curve(self, metric: str | None = None) -> Curve | None:
        """A metric over the tasks; by default the one that counts, at the tasks that count."""
        line = curve(self.group, metric or self.goal.metric)
        if line is None or metric is not None or self.group.runs[0].block > 1:
            return line
        kept = [i for i, x in enumerate(line.x) if self.goal.counts(round(x) - 1)]
        x, mean, se = (tuple(values[i] for i in kept) for values in (line.x, line.mean, line.se))
        alive = tuple(line.alive[i] for i in kept)
        return Curve(x, mean, se, alive, line.n, line.deaths, line.living, line.tasks, line.under_way)


@dataclass(frozen=True)
class Best:
    """The best setting of a method in a facet, and of how many it was chosen."""

    setting: Setting
    candidates: int
    waiting: int  # settings with fewer seeds, which take no part


@dataclass(frozen=True)
class Study:
    """The runs of one experiment below one directory."""

    name: str
    experiment: str
    goal: Goal
    settings: tuple[Setting, ...]
    swept: Mapping[str, tuple[str, ...]]  # field -> its values in order
    fixed: Mapping[str, str]
    facet_fields: tuple[str, ...]

    @property
    def runs(self) -> list[Run]:
        """All runs."""
        return [run for setting in self.settings for run in setting.group.runs]

    @property
    def methods(self) -> list[str]:
        """All methods, those of the paper first."""
        return sorted({setting.method for setting in self.settings}, key=paper.method_order)

    @property
    def varied(self) -> list[str]:
        """What a setting is told from others by: the method first."""
        return list(dict.fromkeys(("method", *self.facet_fields, *self.swept)))

    @cached_property
    def facets(self) -> dict[Facet, list[Setting]]:
        """The settings by facet."""
        found: dict[Facet, list[Setting]] = defaultdict(list)
        for setting in self.settings:
            found[setting.facet].append(setting)
        return dict(found)

    def best(self, facet: Facet) -> dict[str, Best]:
        """The best setting of each method: of those with the most seeds that are over, as a search ends with more
        seeds of what it found; then by :meth:`Setting.merit`. Of equals the first.
        """
        found: dict[str, Best] = {}
        for method in self.methods:
            here = [setting for setting in self.facets[facet] if setting.method == method]
            if not here:
                continue
            most = max(len(setting.group.settled) for setting in here)
            able = [setting for setting in here if len(setting.group.settled) == most]
            found[method] = Best(max(able, key=Setting.merit), len(able), len(here) - len(able))
        return found

    def chosen(self) -> list[Setting]:
        """The best settings of all facets."""
        return [best.setting for facet in self.facets for best in self.best(facet).values()]

    def comparisons(self) -> Iterator[tuple[str, Facet, dict[str, list[Setting]]]]:
        """Swept setting, the rest of a facet, and the settings of each method that has several values of it there.

        A setting that is itself part of the facets is compared across them.
        """
        for field, values in self.swept.items():
            by_rest: dict[Facet, dict[str, list[Setting]]] = defaultdict(lambda: defaultdict(list))
            for setting in self.settings:
                if setting.values[field] in values and (setting.finals or setting.group.diverged):
                    rest = tuple(pair for pair in setting.facet if pair[0] != field)
                    by_rest[rest][setting.method].append(setting)
            for rest, found in by_rest.items():
                several = {m: found[m] for m in self.methods if len({one.values[field] for one in found[m]}) > 1}
                if several:
                    yield field, rest, several

    def words(self, setting: Setting) -> str:
        """What tells a setting from the others of its method and facet."""
        others = [one for one in self.facets[setting.facet] if one.method == setting.method]
        names = [n for n in sorted(setting.values, key=field_order) if len({one.values[n] for one in others}) > 1]
        return ", ".join(f"{name} {setting.values[name]}" for name in names)


def studies(runs: Sequence[Run]) -> list[Study]:
    """The runs by place and experiment."""
    found: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        found[run.study, run.experiment].append(run)
    return [_study(name, kind, members) for (name, kind), members in found.items()]


def chooser(study: Study, every: Sequence[Study]) -> Study | None:
    """The study whose seeds have chosen the settings of this one, if it is here too."""
    names = [name(study.name) for name in CHOOSERS]
    return next((one for one in every if one.experiment == study.experiment and one.name in names), None)


def _study(name: str, kind: str, runs: Sequence[Run]) -> Study:
    members, aim = groups(runs), goal(kind, runs)
    configs = [_flat(group.runs[0].config) for group in members]
    options = {option for group in members for option in _options(group.runs[0].config)}
    fields = sorted({field for config in configs for field in config}, key=field_order)
    shown = [{field: short(config[field]) for field in fields if field in config} for config in configs]
    for group, values in zip(members, shown, strict=True):
        # What a run leaves out has the value that everything had before there was such a field, or is an option that
        # has its default.
        usual = {**base.BEFORE, **_defaults(group.runs[0].config)}
        values.update({field: short(usual.get(field)) for field in fields if field not in values})
    fixed = {field: shown[0][field] for field in fields if len({values[field] for values in shown}) == 1}
    facet_fields = tuple(field for field in fields if field not in {*fixed, *TUNED, *options})
    settings = [
        Setting(group, values, tuple((field, values[field]) for field in facet_fields), aim)
        for group, values in zip(members, shown, strict=True)
    ]
    swept = {}
    for field in fields:
        # What differs between methods alone, as the replacement rate of backprop does, was not swept.
        by_method: dict[str, set[str]] = defaultdict(set)
        for setting in settings:
            by_method[setting.method].add(setting.values[field])
        several = [values for values in by_method.values() if len(values) > 1]
        if several and field != "method":
            swept[field] = tuple(sorted(set().union(*several), key=value_order))
    settings.sort(key=lambda one: ([value_order(value) for _, value in one.facet], paper.method_order(one.method)))
    return Study(name, kind, aim, tuple(settings), swept, fixed, facet_fields)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that make the numbers what they are; options of the method stand beside its fields."""
    plain = {name: value for name, value in config.items() if name not in {*NEUTRAL, "compile", "options"}}
    return {**plain, **_options(config)}


def _options(config: Mapping[str, Any]) -> dict[str, Any]:
    options = config.get("options") or {}
    if not isinstance(options, dict):  # of another version
        return {"options": options}
    return _beside(config, options)


def _beside(config: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by names that no field has."""
    return {f"options.{name}" if name in config else name: value for name, value in options.items()}


def _defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run's method with their defaults; none if this version does not know it."""
    return _beside(config, methods.defaults(str(config.get("method"))))


def field_order(field: str) -> tuple[int, str]:
    """The fields that people ask for first, then the others by name."""
    return (FIRST_FIELDS.index(field) if field in FIRST_FIELDS else len(FIRST_FIELDS), field)


def value_order(text: str) -> tuple[int, float, str]:
    """Numbers by size, then words."""
    try:
        return 0, float(text), ""
    except ValueError:
        return 1, 0.0, text


def steps_per_task(run: Run) -> int | None:
    """Optimizer steps of a task; None for settings that this version does not know."""
    try:
        return experiment(run.experiment).from_dict(run.config).steps_per_task
    except UserError:
        return None
