"""The tables of docs/beyond-first-order.md: every utility, and sets of units, against the true cost of resets.

``python -m gxd.lab.beyond`` trains MLPs on permuted digits, clamps their units alone and together, and times a step of
each utility. ``--model small_resnet`` does the same on CIFAR-100.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

import torch
import torch.nn.functional as F
import tyro

import gxd
from gxd.cost.ranks import mean_over_groups, spearman
from gxd.lab import models
from gxd.lab.assay_config import AssayConfig
from gxd.lab.bench.measure import compare, measure
from gxd.lab.bench.variants import Setting, eager
from gxd.lab.experiments.base import Activation

METRICS = ("l1", "kl")
OF_SETS = ("activation", "contribution", "gxd", "gxd_all_logit", "gxd_sketch", "gxd_kl")
Row = dict[str, float]


@dataclass(frozen=True)
class Beyond:
    """Train models, clamp units and sets of units, print the tables as Markdown."""

    model: str = "mlp"
    """mlp (on permuted digits) or small_resnet (on CIFAR-100)."""
    activations: tuple[Activation, ...] = ("relu", "silu", "tanh")
    """The non-linearities of the MLP; a ResNet has ReLU."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """The cells are means over them."""
    tasks: int = 6
    """Tasks of the MLP, or epochs of the ResNet, before the units are clamped."""
    lr: float = 0.1
    """Learning rate of SGD."""
    sets: tuple[float, ...] = (0.05, 0.25)
    """The shares of a layer that are clamped together."""
    examples: int | None = None
    """To score on, and others to clamp on. None: 720, half of the digits; 256 of CIFAR-100."""
    train_size: int | None = None
    """Images to train on. None: all."""
    units_per_group: int | None = None
    """Clamp only so many units of each layer. None: all."""
    times: bool = True
    """Whether to time the steps of the MLP."""
    data_dir: str | None = None
    """Where the data are, as for gxd run."""

    def assay(self, activation: Activation, seed: int) -> AssayConfig:
        """The training of one model."""
        common = AssayConfig(seed=seed, lr=self.lr, data_dir=self.data_dir, train_size=self.train_size)
        if self.model == "mlp":
            digits = replace(common, activation=activation, data="permuted-digits", width=64, tasks=self.tasks)
            return replace(digits, epochs=2, batch_size=16).resolved()
        return replace(common, model=self.model, epochs=self.tasks, lr_drops=()).resolved()


def main(config: Beyond) -> None:
    """Print all tables."""
    torch.set_num_threads(1)
    timed = step_times() if config.times and config.model == "mlp" else {}
    for name in sorted(timed.keys() - {"backprop", *gxd.utilities()}):
        print(f"A step of {name}: {timed[name]:.2f} times one of backprop")
    for activation in config.activations if config.model == "mlp" else ("relu",):
        found = [assayed(config, config.assay(activation, seed)) for seed in config.seeds]
        print(f"\n### {activation}\n")
        singles = [one for one, _ in found]
        header = ["utility", "Spearman L1", "KL", "shock@5 % L1", "KL", *(["time of a step"] if timed else [])]
        rows = {name: _mean([one[name] for one in singles]) for name in singles[0]}
        for name in rows if timed else ():
            rows[name]["time"] = timed.get(name, math.nan)
        print(_markdown(header, rows), flush=True)
        for share in config.sets:
            of_sets = [sets[share] for _, sets in found]
            print(f"\nSets of {share:.0%}:\n")
            header = ["chosen by", "Spearman L1", "KL", "shock L1", "KL", "units alone L1", "KL"]
            print(_markdown(header, {rule: _mean([one[rule] for one in of_sets]) for rule in of_sets[0]}), flush=True)


def assayed(config: Beyond, assay: AssayConfig) -> tuple[dict[str, Row], dict[float, dict[str, Row]]]:
    """Train one model. Returns utility -> cells, and share -> rule -> cells."""
    stream = assay.stream()
    model = assay.build(stream)
    assert assay.lr is not None and assay.momentum is not None and assay.weight_decay is not None
    assert assay.epochs is not None and assay.tasks is not None
    optimizer = torch.optim.SGD(model.parameters(), assay.lr, momentum=assay.momentum, weight_decay=assay.weight_decay)
    task = stream.task(0)
    for number in range(assay.tasks):
        task = stream.task(number)
        for epoch in range(assay.epochs):
            for step, (x, y) in enumerate(task.batches(epoch)):
                if assay.train_size is not None and step * len(x) >= assay.train_size:
                    break
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    size = config.examples or (720 if config.model == "mlp" else 256)
    calibration, probe = task.draw(size, size)
    plan = gxd.find_units(model, calibration[0][:2], residual="group")
    cost_on = partial(gxd.reset_cost, model, calibration, plan=plan, units_per_group=config.units_per_group)
    again = cost_on(calibration[0], utilities="random")
    single = _single(cost_on(probe, utilities=gxd.utilities()), again)
    return single, {s: _sets(cost_on(probe, utilities=OF_SETS, sets=s, random_sets=64)) for s in config.sets}


def _single(cost: gxd.ResetCost, again: gxd.ResetCost) -> dict[str, Row]:
    """Utility -> cells. ``again``: the shocks on the data that the utilities were scored on."""
    rows: dict[str, Row] = {name: {} for name in [*cost.scores, "true, on the scored data", "true"]}
    for metric in METRICS:
        rho, shock = cost.spearman(metric), cost.shock(metric=metric)
        true = {group: spearman(s, cost.shocks[metric][group]) for group, s in again.shocks[metric].items()}
        rho |= {"true, on the scored data": mean_over_groups(true), "true": 1.0}
        shock |= {"true, on the scored data": math.nan, "true": cost.oracle(metric=metric)}
        for name, row in rows.items():
            row[f"rho {metric}"], row[f"shock {metric}"] = rho[name], shock[name]
    order = ("rho l1", "rho kl", "shock l1", "shock kl")
    return {name: {column: row[column] for column in order} for name, row in rows.items()}


def _sets(cost: gxd.ResetCost) -> dict[str, Row]:
    """Rule -> cells."""
    assert cost.sets is not None
    rows: dict[str, Row] = {}
    for name, part in (("rho", cost.sets.spearman), ("shock", cost.sets.shock), ("alone", cost.sets.sum_alone)):
        for metric in METRICS:
            values = part(metric)
            for rule in cost.sets.shock(metric):
                rows.setdefault(rule, {})[f"{name} {metric}"] = values.get(rule, math.nan)
    return rows


def step_times() -> dict[str, float]:
    """Utility (or ``gxd_sketch, set``) -> the time of a step of the digits MLP relative to backprop."""
    setting = Setting("digits", lambda: models.mlp(64, 10, width=64), (16, 64), 10)
    variants = {"backprop": eager(setting)}
    for utility in gxd.utilities():
        variants[utility] = eager(setting, utility)
    variants["gxd_sketch, set"] = eager(setting, "gxd_sketch", selection="set")
    timings = measure(variants, steps=50, rounds=12, warmup=20)
    return {row.variant: row.ratio for row in compare("beyond", "digits", timings) if row.ratio is not None}


def _mean(rows: Sequence[Mapping[str, float]]) -> Row:
    return {column: fmean(row[column] for row in rows) for column in rows[0]}


def _markdown(header: Sequence[str], rows: Mapping[str, Mapping[str, float]]) -> str:
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for name, cells in rows.items():
        texts = [_text(value, 3 if "rho" in column else 2) for column, value in cells.items()]
        lines.append(f"| {name} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _text(value: float, digits: int) -> str:
    if math.isnan(value):
        return ""
    return f"{value:.{digits}f}" if abs(value) >= 0.1 or digits == 3 else f"{value:.2g}"


if __name__ == "__main__":
    main(tyro.cli(Beyond))
