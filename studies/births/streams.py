"""Which incoming weights should a newborn unit get? One method, several births, streams of supervised tasks.

    python studies/births/streams.py --out results/births --seeds 0 1 2

Each run appends one line to ``streams.jsonl``. Runs that are there are skipped, so the same command resumes. A score is
the mean online accuracy; of the decoder it is minus the mean loss over the second half of the tasks.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd
from gxd.lab.experiments import Experiment, experiment
from gxd.lab.streams import generator

RATE = 1e-3


# --- births -----------------------------------------------------------------------------------------------------------


def directions(fresh: Tensor, chance: torch.Generator) -> Tensor:
    """Random unit vectors, as many as there are fresh rows."""
    rows = torch.empty(fresh.shape).normal_(generator=chance)
    return rows / rows.norm(dim=1, keepdim=True)


def like_peers(fresh: Tensor, living: Tensor, chance: torch.Generator) -> Tensor:
    """As long as the median living row, at most He's length."""
    own = living if len(living) else fresh
    return directions(fresh, chance) * min(float(own.norm(dim=1).median()), math.sqrt(2))


def orthogonal(fresh: Tensor, living: Tensor, chance: torch.Generator) -> Tensor:
    """Of He's length, orthogonal to the strong directions of the living rows, where there is room."""
    rows = directions(fresh, chance)
    basis = torch.linalg.svd(living, full_matrices=False)
    strong = basis.Vh[0.1 * basis.S.max() < basis.S]
    rest = rows - rows @ strong.T @ strong
    rows = torch.where(rest.norm(dim=1, keepdim=True) > 0.1, rest, rows)
    return rows / rows.norm(dim=1, keepdim=True) * math.sqrt(2)


# Rule -> incoming weights, and what becomes of Adam's averages.
RULES: dict[str, tuple[Any, str]] = {
    "fresh": ("fresh", "reset"),
    "1.0": (1.0, "reset"),
    "he": ("he", "reset"),
    "2.0": (2.0, "reset"),
    "orthogonal": (orthogonal, "reset"),
    "like peers": (like_peers, "reset"),
    "fresh, Adam as peers": ("fresh", "peers"),
    "he, Adam as peers": ("he", "peers"),
}


def attach(rule: str, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, seed: int) -> Any:
    """The method gxd with these births; None for plain backprop."""
    if rule == "backprop":
        return None
    incoming, memories = RULES[rule]
    reset = gxd.Reset(incoming=incoming, memories=memories)
    method = gxd.UnitReset("gxd_loss", gxd.LowestRate(RATE), reset=reset, normalise="age")
    return gxd.attach(model, optimizer, method, example_inputs=x, seed=seed)


# --- networks that the lab does not have ------------------------------------------------------------------------------


class Block(nn.Module):
    """Pre-norm: LayerNorm, a layer of four times the width, back, and the residual sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    """Pre-norm causal attention with four heads, and the residual sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Two layers of attention and a block; all matrices begin with a standard deviation of 0.02."""

    def __init__(self, vocabulary: int = 1000, width: int = 64, length: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(kind(width) for _ in range(2) for kind in (Attention, Block)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.layers(self.tokens(x) + self.places(places))))


def pre_norm() -> nn.Module:
    """Three pre-norm blocks for images of MNIST."""
    return nn.Sequential(nn.Linear(784, 64), Block(64), Block(64), Block(64), nn.LayerNorm(64), nn.Linear(64, 10))


# --- streams ----------------------------------------------------------------------------------------------------------


def tasks_of(name: str, build: Callable[[], nn.Module] | None = None, **settings: Any) -> Callable[[str, int], float]:
    """A stream of the lab."""

    def score(rule: str, seed: int) -> float:
        fields = {"method": "backprop", "seed": seed, **settings}
        config: Experiment = experiment(name).from_dict(fields).resolved()
        stream = config.stream()
        torch.manual_seed(seed)
        model = config.build(stream) if build is None else build()
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[config.optimizer]
        optimizer = kind(model.parameters(), lr=config.lr)
        chance = generator(seed, "resets").initial_seed()
        attached = attach(rule, model, optimizer, torch.zeros(2, *stream.input_shape), chance)
        step = gxd.compiled_step(model, optimizer, config.loss, attached)
        accuracy = []
        for number in range(config.tasks):
            hits, examples = torch.zeros(()), 0
            for x, y in config.batches(stream.task(number)):
                _, logits = step(x, y)
                hits += (logits.argmax(1) == y).sum()
                examples += len(y)
            if config.counts(number):
                accuracy.append(float(hits) / examples)
        return sum(accuracy) / len(accuracy)

    return score


def text() -> Tensor:
    """8,193 words of Python's own documentation: the 999 most frequent by number, 0 for the rest."""
    words = re.findall(r"\w+|[^\w\s]", " ".join(pydoc_data.topics.topics.values()))[:8193]
    number = {word: i + 1 for i, (word, _) in enumerate(Counter(words).most_common(999))}
    return torch.tensor([number.get(word, 0) for word in words])


def decoder(rule: str, seed: int, tasks: int = 30, epochs: int = 10) -> float:
    """A decoder memorises a text whose tokens are permuted in every task."""
    torch.manual_seed(seed)
    model, words = Decoder(), text()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
    attach(rule, model, optimizer, torch.zeros(2, 32, dtype=torch.long), seed)
    losses = []
    for task in range(tasks):
        chance = generator(seed, task, "tokens")
        permuted = torch.randperm(1000, generator=chance)[words]
        x, y = permuted[:-1].view(-1, 32), permuted[1:].view(-1, 32)
        batches = [rows for _ in range(epochs) for rows in torch.randperm(len(x), generator=chance).split(8)]
        total = 0.0
        for rows in batches:
            loss = F.cross_entropy(model(x[rows]).flatten(0, 1), y[rows].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += float(loss.detach())
        losses.append(total / len(batches))
    return -sum(losses[tasks // 2 :]) / len(losses[tasks // 2 :])


def digits(**settings: Any) -> Callable[[str, int], float]:
    """Permuted digits: 64-[64]x4-10, ReLU, Glorot, SGD 0.1."""
    return tasks_of("permuted-digits", **{"tasks": 100, **settings})


STREAMS: dict[str, Callable[[str, int], float]] = {
    "digits": digits(),
    "digits, LayerNorm": digits(layer_norm=True),
    "digits, tanh": digits(activation="tanh"),
    "digits, torch's first weights": digits(init="default"),
    "digits, lr 0.03": digits(lr=0.03),
    "digits, Adam 1e-3": digits(optimizer="adam", init="default"),
    "digits, Adam 3e-3": digits(optimizer="adam", init="default", lr=3e-3),
    "digits, width 24": digits(width=24),
    "digits, width 192": digits(width=192),
    "random labels": tasks_of("random-label-mnist", tasks=12, epochs=15),
    "random labels, pre-norm": tasks_of("random-label-mnist", pre_norm, tasks=12, epochs=15),
    "5+1 CIFAR": tasks_of("cifar-5+1", tasks=9, epochs=2),
    "decoder": decoder,
}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/births"))
    parser.add_argument("--rules", nargs="+", default=["backprop", *RULES], choices=["backprop", *RULES])
    parser.add_argument("--streams", nargs="+", default=list(STREAMS), choices=list(STREAMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    path = chosen.out / "streams.jsonl"
    there = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    torch.set_num_threads(1)
    for seed in chosen.seeds:
        for stream in chosen.streams:
            for rule in chosen.rules:
                name = {"stream": stream, "rule": rule, "seed": seed}
                if any(name.items() <= run.items() for run in there):
                    continue
                start = time.perf_counter()
                score = STREAMS[stream](rule, seed)
                line = {**name, "score": round(score, 5), "seconds": round(time.perf_counter() - start, 1)}
                with path.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(line, flush=True)


if __name__ == "__main__":
    main()
