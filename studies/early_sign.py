"""Do squared gradients on random labels say, without training, what ``gxd.probe`` will say?

    python studies/early_sign.py           # about ten minutes on one core; run it again to go on after a stop
    python studies/early_sign.py --table   # results/probe/early_sign.md from early_sign.csv alone

The sign is that of "Local Redundancy: An Information-Theoretic Measure of Plasticity from Synthetic Memorization"
(OpenReview ucbH88BgIk): the mean squared norm of the gradient of -log p(y | x) of single examples, with y drawn at
random from all classes. Networks are trained on a stream of permuted digits. At checkpoints they are probed on the next
permutation, and the sign is measured on its inputs, relative to the mean of five fresh networks.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

import gxd
from gxd.lab.data import digits

HERE = Path(__file__).resolve().parent.parent / "results" / "probe"
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "silu": nn.SiLU, "relu + LayerNorm": nn.ReLU}
OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "SGD 0.1": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD 0.3": lambda p: torch.optim.SGD(p, lr=0.3),
    "Adam 0.003": lambda p: torch.optim.Adam(p, lr=0.003),
}
CHECKPOINTS = (2, 10, 30, 60, 120)
"""Tasks, of 90 steps each."""
SEEDS = (0,)
SIGNS = ("random labels", "own labels", "readiness", "dormant", "saturation", "effective_rank", "weight_norm")
FIELDS = ("network", "optimizer", "seed", "tasks", "verdict", "gap", "low", "high", *SIGNS)
Batch = tuple[torch.Tensor, torch.Tensor]


def network(kind: str) -> nn.Module:
    """64-64-64-64-10, with Glorot's first weights."""
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(64, 64), *([nn.LayerNorm(64)] if "Norm" in kind else []), ACTIVATIONS[kind]()]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return model


def squared_gradients(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """The mean over examples of the squared norm of the gradient of the loss of each."""

    def loss(parameters: dict[str, torch.Tensor], one: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, parameters, (one[None],)), label[None])

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    found = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
    return sum(float(g.square().sum()) for g in found.values()) / len(x)


def signs(model: nn.Module, x: torch.Tensor) -> dict[str, float]:
    """All signs of one network that need no training."""
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        own = torch.distributions.Categorical(logits=model(x)).sample()
    metrics = gxd.diagnose(model, x).overall
    return {
        "random labels": squared_gradients(model, x, torch.randint(10, (len(x),), generator=drawn)),
        "own labels": squared_gradients(model, x, own),
        **{name: metrics[name] for name in ("dormant", "saturation", "effective_rank", "weight_norm")},
    }


def tasks(seed: int) -> Iterator[list[Batch]]:
    """Batches of the digits, the pixels in another order in every task."""
    images = digits()
    x, y = images.train_images / images.full, images.train_labels
    drawn = torch.Generator().manual_seed(seed)
    while True:
        pixels, order = torch.randperm(64, generator=drawn), torch.randperm(len(x), generator=drawn)
        yield list(zip(x[order][:, pixels].split(16), y[order].split(16), strict=True))


def run() -> None:
    """All checkpoints that are missing; a stream begins again where one of its checkpoints is."""
    path = HERE / "early_sign.csv"
    rows = read()
    done = {
        (row["network"], row["optimizer"], int(row["seed"])) for row in rows if int(row["tasks"]) == CHECKPOINTS[-1]
    }
    rows = [row for row in rows if (row["network"], row["optimizer"], int(row["seed"])) in done]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        file.flush()
        for seed, kind, name in product(SEEDS, ACTIVATIONS, OPTIMIZERS):
            if (kind, name, seed) not in done:
                for row in stream(kind, name, seed):
                    writer.writerow(row)
                    file.flush()


def stream(kind: str, name: str, seed: int) -> Iterator[dict[str, object]]:
    """The rows of one network, at every checkpoint."""
    torch.manual_seed(seed)
    model = network(kind)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    for number, batches in enumerate(tasks(seed)):
        if number in CHECKPOINTS:
            x = torch.cat([x for x, _ in batches])[:512]
            found = gxd.probe(
                model, OPTIMIZERS[name], batches, F.cross_entropy, steps=len(batches), fresh=lambda: network(kind)
            )
            torch.manual_seed(10_000 + seed)
            fresh = [signs(network(kind), x) for _ in range(5)]
            state = torch.get_rng_state()
            here = signs(model, x) | {"readiness": float(found.readiness["old"].mean())}
            there = {key: sum(one[key] for one in fresh) / 5 for key in fresh[0]}
            there["readiness"] = float(found.readiness["fresh"].mean())
            torch.set_rng_state(state)
            relative = {key: here[key] - there[key] for key in ("dormant", "saturation")}
            relative |= {key: here[key] / there[key] for key in here if key not in relative}
            yield {
                "network": kind, "optimizer": name, "seed": seed, "tasks": number, "verdict": found.verdict,
                "gap": f"{found.gap:.4f}", "low": f"{found.interval[0]:.4f}", "high": f"{found.interval[1]:.4f}",
                **{key: f"{relative[key]:.4g}" for key in SIGNS},
            }  # fmt: skip
            if number == CHECKPOINTS[-1]:
                return
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


def read() -> list[dict[str, str]]:
    """The rows so far."""
    path = HERE / "early_sign.csv"
    if not path.exists():
        return []
    with path.open() as file:
        return [row for row in csv.DictReader(file) if row["weight_norm"]]


def ranks(values: list[float]) -> torch.Tensor:
    """From 0; ties share their mean."""
    v = torch.tensor(values, dtype=torch.float64)
    return (v[:, None] > v).double().sum(1) + ((v[:, None] == v).double().sum(1) - 1) / 2


def spearman(left: list[float], right: list[float]) -> float:
    """The correlation of ranks; NaN where one side is constant."""
    a, b = ranks(left), ranks(right)
    a, b = a - a.mean(), b - b.mean()
    scale = float(a.norm() * b.norm())
    return float(a @ b) / scale if scale > 0 else math.nan


def told_apart(values: list[float], lost: list[bool]) -> float:
    """The chance that a network that has lost has the larger value than one that has not (area under the ROC curve)."""
    bad, good = ([v for v, is_lost in zip(values, lost, strict=True) if is_lost is side] for side in (True, False))
    wins = sum((v > w) + 0.5 * (v == w) for v in bad for w in good)
    return wins / (len(bad) * len(good)) if bad and good else math.nan


def table(rows: list[dict[str, str]]) -> str:
    """How well every sign agrees with the probe."""
    kept = [row for row in rows if all(math.isfinite(float(row[key])) for key in ("gap", *SIGNS))]
    streams = sorted({(row["network"], row["optimizer"], row["seed"]) for row in kept})
    counts = {name: sum(row["verdict"] == name for row in kept) for name in ("healthy", "undecided", "losing", "lost")}
    clear = [row for row in kept if row["verdict"] != "undecided"]
    lines = [
        "# Signs that need no training, against the probe",
        "",
        f"{len(kept)} networks ({', '.join(f'{count} {name}' for name, count in counts.items())}), from {len(streams)} "
        f"streams. {len(rows) - len(kept)} networks whose numbers are not finite are left out. Made by "
        "`python studies/early_sign.py`, which says what is measured.",
        "",
        "Spearman: the correlation of ranks of the sign with the probe's gap, over all networks, and the mean over the "
        "checkpoints of one stream each. Told apart: the chance that a network that is losing or lost has a larger "
        "sign than a healthy one; 0.5 is chance, and 0 or 1 would be perfect. Signs are relative to fresh networks.",
        "",
        "| sign | Spearman, all | Spearman, within a stream | told apart |",
        "|---|---|---|---|",
    ]
    for sign in SIGNS:
        value = {id(row): float(row[sign]) for row in kept}
        every = spearman([value[id(row)] for row in kept], [float(row["gap"]) for row in kept])
        within = []
        for key in streams:
            own = [row for row in kept if (row["network"], row["optimizer"], row["seed"]) == key]
            within.append(spearman([value[id(row)] for row in own], [float(row["gap"]) for row in own]))
        within = [one for one in within if math.isfinite(one)]
        apart = told_apart([value[id(row)] for row in clear], [row["verdict"] != "healthy" for row in clear])
        mean = sum(within) / len(within) if within else math.nan
        lines.append(f"| {sign} | {every:.2f} | {mean:.2f} | {apart:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what is missing, and write the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--table", action="store_true", help="only write the table")
    if not options.parse_args().table:
        run()
    (HERE / "early_sign.md").write_text(table(read()))


if __name__ == "__main__":
    main()
