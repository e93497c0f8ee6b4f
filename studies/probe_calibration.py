"""How often is ``gxd.probe`` wrong? Fresh networks, networks that learn half as much, and dead ones, in six settings.

    python studies/probe_calibration.py           # about an hour on one core; run it again to go on after a stop
    python studies/probe_calibration.py --table   # results/probe/calibration.md from calibration.csv alone

Every probe has data, a network, and damage of its own. Two kinds of networks learn half as much as fresh ones:

- ``scaled``: with SGD the weights of the last two layers are too small, and take long to grow. Adam does not mind that,
  so with Adam the weights of all layers are too large;
- ``dead units``: a share of the units of every hidden layer never changes its output.

How strong the damage has to be is searched on other networks and other data, and written to ``strengths.json``. The
true loss of learning, over all networks of a kind together, is 1 - (learned by them) / (learned by fresh networks).
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import gxd

HERE = Path(__file__).resolve().parent.parent / "results" / "probe"
KINDS = {"fresh": 200, "scaled": 40, "dead units": 40, "dead": 16}
"""Kind of network -> how many are probed in each setting."""
FIELDS = ("setting", "kind", "number", "verdict", "gap", "low", "high", "networks", "old", "fresh", "before", "seconds")
T4 = 2.7764  # Student's t with four degrees of freedom, 95 %


def mlp(*sizes: int, activation: type[nn.Module] = nn.ReLU, norm: bool = False) -> nn.Module:
    """A perceptron, with LayerNorm before the activations if asked for."""
    layers: list[nn.Module] = []
    for inner, outer in pairwise(sizes[:-1]):
        layers += [nn.Linear(inner, outer), *([nn.LayerNorm(outer)] if norm else []), activation()]
    return nn.Sequential(*layers, nn.Linear(*sizes[-2:]))


def cnn() -> nn.Module:
    """Two convolutions on images of 8 x 8."""
    first = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, nn.Conv2d(8, 16, 2), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))


@dataclass(frozen=True)
class Setting:
    """A network, its optimizer, and how many steps on which data."""

    network: Callable[[], nn.Module]
    optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer]
    inputs: int
    classes: int
    examples: int
    steps: int
    task: str = "given"
    scaled: str = "too small"


def sgd(rate: float) -> Callable[[list[torch.Tensor]], torch.optim.Optimizer]:
    """Plain SGD."""
    return lambda parameters: torch.optim.SGD(parameters, lr=rate)


def adam(rate: float) -> Callable[[list[torch.Tensor]], torch.optim.Optimizer]:
    """Adam."""
    return lambda parameters: torch.optim.Adam(parameters, lr=rate)


SETTINGS = {
    "8-32-3, ReLU, SGD 0.1": Setting(lambda: mlp(8, 32, 3), sgd(0.1), 8, 3, 256, 80),
    "32-64-64-10, ReLU, SGD 0.1": Setting(lambda: mlp(32, 64, 64, 10), sgd(0.1), 32, 10, 1024, 150),
    "the same with LayerNorm": Setting(lambda: mlp(32, 64, 64, 10, norm=True), sgd(0.1), 32, 10, 1024, 150),
    "16-32-32-4, tanh, Adam 0.003": Setting(
        lambda: mlp(16, 32, 32, 4, activation=nn.Tanh), adam(3e-3), 16, 4, 512, 80, "given", "too large"
    ),
    "16-64-4, ReLU, Adam 0.003, random labels": Setting(
        lambda: mlp(16, 64, 4), adam(3e-3), 16, 4, 512, 100, "random_labels", "too large"
    ),
    "CNN 8-16, ReLU, Adam 0.01": Setting(cnn, adam(1e-2), 64, 4, 128, 80, scaled="too large"),
}


def data(setting: Setting, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of 32 random inputs, labelled by a random network."""
    chance = torch.Generator().manual_seed(seed)
    x = torch.randn(setting.examples, setting.inputs, generator=chance)
    first = 1.5 * torch.randn(setting.inputs, 32, generator=chance) / math.sqrt(setting.inputs)
    y = (torch.tanh(x @ first) @ torch.randn(32, setting.classes, generator=chance)).argmax(1)
    return list(zip(x.split(32), y.split(32), strict=True))


@torch.no_grad()
def damaged(model: nn.Module, kind: str, strength: float) -> nn.Module:
    """The network, damaged. Strength 0 is no damage, 1 the most."""
    layers = [m for m in model if isinstance(m, (nn.Linear, nn.Conv2d))][:-1]  # type: ignore[attr-defined]
    norms = [m for m in model if isinstance(m, nn.LayerNorm)]  # type: ignore[attr-defined]
    hidden = norms or layers  # what each unit's activation reads
    if kind == "too small":
        for layer in (hidden[-1], model[-1]):  # type: ignore[index]
            for parameter in layer.parameters():
                parameter.mul_(10 ** (-4 * strength))
    elif kind == "too large":
        for layer in (*hidden, model[-1]):  # type: ignore[index]
            for parameter in layer.parameters():
                parameter.mul_(10 ** (2 * strength))
    elif kind in ("dead units", "dead"):
        for layer in hidden:
            size = len(layer.weight)
            dead = torch.randperm(size)[: size if kind == "dead" else min(size - 1, round(strength * size))]
            layer.weight[dead] = 0.0
            layer.bias[dead] = -1e3
    return model


def made(setting: Setting, kind: str, strength: float, seed: int) -> nn.Module:
    """A network of a kind."""
    torch.manual_seed(seed)
    return damaged(setting.network(), setting.scaled if kind == "scaled" else kind, strength)


def probed(setting: Setting, kind: str, strength: float, seed: int, **settings: int) -> gxd.Probe:
    """A probe of a network, on data of its own."""
    model, batches = made(setting, kind, strength, seed), data(setting, seed)
    settings = {"steps": setting.steps, **settings}
    return gxd.probe(
        model, setting.optimizer, batches, F.cross_entropy, fresh=setting.network, task=setting.task, **settings
    )


def searched(setting: Setting, kind: str) -> float:
    """The strength at which networks of a kind learn half as much as fresh ones, by bisection over 16 networks."""
    low, high = 0.0, 1.0
    for _ in range(7 if kind == "scaled" else 5):
        strength = (low + high) / 2
        found = [probed(setting, kind, strength, 10_000_000 + n, seeds=2, most=2) for n in range(16)]
        old, fresh = (sum(float(one.learned[name].mean()) for one in found) for name in ("old", "fresh"))
        low, high = (strength, high) if old > 0.5 * fresh else (low, strength)
    return (low + high) / 2


def before(found: gxd.Probe) -> str:
    """The verdict by the rule that was used before: Student's interval of a mean over five pairs of runs."""
    old, fresh = found.learned["old"][:5], found.learned["fresh"][:5]
    ratio = old.mean() / fresh.mean()
    gaps = 1 - ratio - (old - ratio * fresh) / fresh.mean()
    half = T4 * float(gaps.std()) / math.sqrt(5)
    low, high = float(gaps.mean()) - half, float(gaps.mean()) + half
    return "healthy" if high <= 0.1 else "lost" if low >= 0.75 else "losing" if low > 0 else "undecided"


def todo(done: set[tuple[str, str, int]]) -> Iterator[tuple[str, str, int]]:
    """What is left, an eighth of every kind after the other, so that a run that is stopped has seen all settings."""
    for eighth in range(8):
        for name in SETTINGS:
            for kind, count in KINDS.items():
                for number in range(eighth * count // 8, (eighth + 1) * count // 8):
                    if (name, kind, number) not in done:
                        yield name, kind, number


def read() -> list[dict[str, str]]:
    """The rows so far."""
    path = HERE / "calibration.csv"
    if not path.exists():
        return []
    with path.open() as file:
        return [row for row in csv.DictReader(file) if row["seconds"]]


def run() -> None:
    """All probes that are missing, one line each."""
    HERE.mkdir(parents=True, exist_ok=True)
    strengths = json.loads(path.read_text()) if (path := HERE / "strengths.json").exists() else {}
    for name, setting in SETTINGS.items():
        for kind in ("scaled", "dead units"):
            if kind not in strengths.setdefault(name, {}):
                strengths[name][kind] = searched(setting, kind)
                path.write_text(json.dumps(strengths, indent=1) + "\n")
    rows = read()
    with (HERE / "calibration.csv").open("w", newline="") as file:  # again, without a line that was cut off
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        file.flush()
        for name, kind, number in todo({(row["setting"], row["kind"], int(row["number"])) for row in rows}):
            begun = time.perf_counter()
            seed = 1000 * list(KINDS).index(kind) + number
            found = probed(SETTINGS[name], kind, strengths[name].get(kind, 0.0), seed)
            spent = time.perf_counter() - begun
            learned = {key: float(values.mean()) for key, values in found.learned.items()}
            numbers = (found.gap, *found.interval)
            writer.writerow({
                "setting": name, "kind": kind, "number": number, "verdict": found.verdict,
                **dict(zip(("gap", "low", "high"), (f"{value:.4f}" for value in numbers), strict=True)),
                "networks": found.networks, **{key: f"{value:.5g}" for key, value in learned.items()},
                "before": before(found), "seconds": f"{spent:.2f}",
            })  # fmt: skip
            file.flush()


def share(rows: list[dict[str, str]], *verdicts: str, key: str = "verdict") -> str:
    """How many of the rows have one of the verdicts, in percent."""
    return f"{100 * sum(row[key] in verdicts for row in rows) / len(rows):.1f} %"


def true_loss(rows: list[dict[str, str]]) -> str:
    """Of all networks of a kind together, with its standard error (the delta method)."""
    old, fresh = (torch.tensor([float(row[key]) for row in rows], dtype=torch.float64) for key in ("old", "fresh"))
    ratio = old.mean() / fresh.mean()
    error = float((old - ratio * fresh).std() / fresh.mean()) / math.sqrt(len(rows))
    return f"{100 * (1 - float(ratio)):.1f} ± {100 * error:.1f} %"


def table(rows: list[dict[str, str]]) -> str:
    """False alarms, and how often damage is found."""
    of = {(name, kind): [] for name in SETTINGS for kind in KINDS}  # type: ignore[var-annotated]
    for row in rows:
        of[row["setting"], row["kind"]].append(row)
    lines = [
        "# Calibration of gxd.probe",
        "",
        "Made by `python studies/probe_calibration.py`, which says how the networks were made. Default options.",
        "",
        "## Fresh networks",
        "",
        "False alarms are fresh networks that are called losing or lost. *Before*: by the interval of a mean over five "
        "pairs of runs, on the same runs.",
        "",
        "| setting | networks | false alarms, before | false alarms | undecided | fresh networks trained | runs |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in SETTINGS:
        if own := of[name, "fresh"]:
            alarms = share(own, "losing", "lost", key="before"), share(own, "losing", "lost"), share(own, "undecided")
            trained = sum(int(row["networks"]) for row in own) / len(own)
            lines.append(f"| {name} | {len(own)} | {' | '.join(alarms)} | {trained:.1f} | {trained + 5:.1f} |")
    lines += [
        "",
        "## Damaged networks",
        "",
        "Found: called losing or lost. True loss: of all networks of the row together, ± its standard error. Spread: "
        "the standard deviation of the loss between networks. The same damage costs some networks more than others, so "
        "the last column counts those alone whose own loss, over their five runs, is between 40 and 60 %.",
        "",
        "| setting | damage | networks | true loss | spread | found | called healthy | undecided | 40 to 60 %: found |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, setting in SETTINGS.items():
        for kind in list(KINDS)[1:]:
            if own := of[name, kind]:
                damage = {"scaled": f"weights {setting.scaled}", "dead units": "some units dead", "dead": "all dead"}
                found = share(own, "losing", "lost"), share(own, "healthy"), share(own, "undecided")
                spread = f"{100 * float(torch.tensor([float(row['gap']) for row in own]).std()):.0f} %"
                half = [row for row in own if 0.4 <= float(row["gap"]) <= 0.6]
                of_half = f"{sum(row['verdict'] in ('losing', 'lost') for row in half)} of {len(half)}" if half else "-"
                cells = name, damage[kind], str(len(own)), true_loss(own), spread, *found, of_half
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what is missing, and write the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--table", action="store_true", help="only write the table")
    if not options.parse_args().table:
        run()
    (HERE / "calibration.md").write_text(table(read()))


if __name__ == "__main__":
    main()
