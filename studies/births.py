"""Which incoming weights should a newborn unit get? One method, several births, many streams.

    python studies/births.py --out results/births --rules fresh he peers --streams digits cartpole --seeds 0 1 2

Each run appends one line to ``runs.jsonl``; runs that are there already are skipped, so the command resumes.
Scores are higher-is-better: online accuracy, minus the loss for the decoder, the mean return for CartPole.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd
from gxd.lab import experiments, streams
from gxd.lab.streams import generator

RATE = 1e-3


# --- births: (fresh, living, generator) -> rows, or what gxd.Reset takes as incoming


def directions(fresh: Tensor, chance: torch.Generator) -> Tensor:
    """Random unit vectors."""
    rows = torch.empty(fresh.shape).normal_(generator=chance)
    return rows / rows.norm(dim=1, keepdim=True)


def peers(most: float) -> Callable[[Tensor, Tensor, torch.Generator], Tensor]:
    """As long as the median living row, at most ``most``."""

    def born(fresh: Tensor, living: Tensor, chance: torch.Generator) -> Tensor:
        own = living.norm(dim=1).median() if len(living) else fresh.norm(dim=1).median()
        return directions(fresh, chance) * min(float(own), most)

    return born


def orthogonal(length: float) -> Callable[[Tensor, Tensor, torch.Generator], Tensor]:
    """Of this length, orthogonal to the living rows as far as there is room."""

    def born(fresh: Tensor, living: Tensor, chance: torch.Generator) -> Tensor:
        rows = directions(fresh, chance)
        basis = torch.linalg.svd(living, full_matrices=False)
        strong = basis.Vh[basis.S > 0.1 * basis.S.max()]
        rest = rows - rows @ strong.T @ strong
        rows = torch.where(rest.norm(dim=1, keepdim=True) > 0.1, rest, rows)
        return rows / rows.norm(dim=1, keepdim=True) * length

    return born


RULES: dict[str, object] = {
    "fresh": "fresh",
    "he": "he",
    "1.0": 1.0,
    "2.0": 2.0,
    "peers": peers(math.sqrt(2)),
    "peers_uncapped": peers(math.inf),
    "orthogonal": orthogonal(math.sqrt(2)),
}


def attach(rule: str, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, seed: int) -> gxd.Attachment | None:
    """The recommended method with these births; None for plain backprop."""
    if rule == "backprop":
        return None
    method = gxd.method("gxd", incoming=RULES[rule], replacement_rate=RATE)
    return gxd.attach(model, optimizer, method, example_inputs=x, seed=seed)


# --- streams of tasks of the lab


def supervised(name: str, rule: str, seed: int, **settings: object) -> float:
    """Mean online accuracy over the tasks that count."""
    config = experiments.experiment(name).from_dict({"method": "backprop", "seed": seed, **settings}).resolved()
    stream = config.stream()
    model = config.build(stream)
    optimizer = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[config.optimizer](model.parameters(), lr=config.lr)
    attached = attach(rule, model, optimizer, torch.zeros(2, *stream.input_shape), generator(seed, "resets").initial_seed())
    step = gxd.compiled_step(model, optimizer, config.loss, attached)
    model.train()
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


# --- a decoder that memorises text whose tokens are permuted in every task


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, vocabulary: int = 1000, width: int = 64, length: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(Block(width, 4), Block(width, 4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.tokens(x) + self.places(places))))


def text() -> Tensor:
    """8,192 + 1 words of Python's own documentation, the 999 most frequent by number, 0 for the rest."""
    import collections
    import pydoc_data.topics
    import re

    words = re.findall(r"\w+|[^\w\s]", " ".join(pydoc_data.topics.topics.values()))[: 8192 + 1]
    number = {word: i + 1 for i, (word, _) in enumerate(collections.Counter(words).most_common(999))}
    return torch.tensor([number.get(word, 0) for word in words])


def decoder(rule: str, seed: int, tasks: int = 30, epochs: int = 10) -> float:
    torch.manual_seed(seed)
    model, words = Decoder(), text()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
    attached = attach(rule, model, optimizer, torch.zeros(2, 32, dtype=torch.long), seed)
    losses = []
    for task in range(tasks):
        chance = generator(seed, task, "tokens")
        permuted = torch.randperm(1000, generator=chance)[words]
        x, y = permuted[:-1].view(-1, 32), permuted[1:].view(-1, 32)
        total, steps = 0.0, 0
        for epoch in range(epochs):
            for rows in torch.randperm(len(x), generator=chance).split(8):
                loss = F.cross_entropy(model(x[rows]).flatten(0, 1), y[rows].flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                total, steps = total + float(loss.detach()), steps + 1
        losses.append(total / steps)
    del attached
    return -sum(losses[tasks // 2 :]) / len(losses[tasks // 2 :])


# --- PPO on CartPole, whose observations are shifted by another constant in every level


class CartPole:
    """Several pendulums side by side, with the usual constants and a limit of 500 steps."""

    def __init__(self, many: int, chance: torch.Generator) -> None:
        self.many, self.chance = many, chance
        self.state, self.steps = torch.zeros(many, 4), torch.zeros(many)
        self.reset(torch.ones(many, dtype=torch.bool))

    def reset(self, which: Tensor) -> None:
        self.state[which] = (torch.rand(int(which.sum()), 4, generator=self.chance) - 0.5) * 0.1
        self.steps[which] = 0

    def step(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Which have fallen, and which are at the limit."""
        x, speed, angle, turn = self.state.unbind(1)
        push, cos, sin = torch.where(action == 1, 10.0, -10.0), angle.cos(), angle.sin()
        drive = (push + 0.05 * turn**2 * sin) / 1.1
        twist = (9.8 * sin - cos * drive) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        pull = drive - 0.05 * twist * cos / 1.1
        self.state = torch.stack([x + 0.02 * speed, speed + 0.02 * pull, angle + 0.02 * turn, turn + 0.02 * twist], 1)
        self.steps = self.steps + 1
        fallen = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > math.radians(12))
        return fallen, (self.steps >= 500) & ~fallen


class Agent(nn.Module):
    """A policy and a value network of three layers of 64 each."""

    def __init__(self) -> None:
        super().__init__()

        def network(outputs: int) -> nn.Sequential:
            sizes, layers = (4, 64, 64, 64), []
            for before, after in zip(sizes, sizes[1:]):
                layers += [nn.Linear(before, after), nn.ReLU()]
            return nn.Sequential(*layers, nn.Linear(64, outputs))

        self.policy, self.value = network(2), network(1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(x).log_softmax(1), self.value(x).squeeze(-1)


def cartpole(rule: str, seed: int, levels: int = 10, iterations: int = 25, many: int = 8, horizon: int = 100) -> float:
    """Mean return over all levels but the first; ``rule="new"``: a fresh agent for every level."""
    chance = torch.Generator().manual_seed(1000 + seed)
    torch.manual_seed(seed)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), 1e-3)
    attached = attach(rule, agent, optimizer, torch.zeros(2, 4), seed) if rule != "new" else None
    found = []
    for level in range(levels):
        shift = torch.randn(4, generator=chance) * 2
        if rule == "new" and level:
            agent = Agent()
            optimizer = torch.optim.Adam(agent.parameters(), 1e-3)
        env, running, returns = CartPole(many, chance), torch.zeros(many), []
        for _ in range(iterations):
            states, actions, odds, values, ends, beyond = [], [], [], [], [], []
            with torch.no_grad():
                for _ in range(horizon):
                    state = env.state + shift
                    log, value = agent(state)
                    action = torch.multinomial(log.exp(), 1, generator=chance).squeeze(1)
                    states.append(state), actions.append(action), values.append(value)
                    odds.append(log.gather(1, action[:, None]).squeeze(1))
                    fallen, late = env.step(action)
                    running += 1
                    end = fallen | late
                    after = torch.where(late, agent(env.state + shift)[1], 0.0) if bool(late.any()) else torch.zeros(many)
                    if bool(end.any()):
                        returns += running[end].tolist()
                        running[end] = 0
                        env.reset(end)
                    ends.append(end), beyond.append(after)
                ahead, sum_, advantages = agent(env.state + shift)[1], torch.zeros(many), [torch.zeros(0)] * horizon
                for t in reversed(range(horizon)):
                    delta = 1 + 0.99 * torch.where(ends[t], beyond[t], ahead) - values[t]
                    sum_ = delta + 0.99 * 0.95 * sum_ * ~ends[t]
                    advantages[t], ahead = sum_, values[t]
            x, a, old, v, gain = (torch.stack(one).flatten(0, 1) for one in (states, actions, odds, values, advantages))
            goal = gain + v
            for _ in range(5):
                for rows in torch.randperm(many * horizon, generator=chance).split(32):
                    log, value = agent(x[rows])
                    ratio = (log.gather(1, a[rows][:, None]).squeeze(1) - old[rows]).exp()
                    g = (gain[rows] - gain[rows].mean()) / (gain[rows].std() + 1e-8)
                    entropy = -(log.exp() * log).sum(1).mean()
                    policy = -torch.min(ratio * g, ratio.clamp(0.8, 1.2) * g).mean()
                    loss = policy + 0.5 * F.mse_loss(value, goal[rows]) - 0.01 * entropy
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                    optimizer.step()
        found.append(sum(returns) / max(1, len(returns)))
    del attached
    return sum(found[1:]) / (levels - 1)


DIGITS = {"tasks": 100, "width": 64, "compile": "no"}
STREAMS: dict[str, Callable[[str, int], float]] = {
    "digits": lambda r, s: supervised("permuted-digits", r, s, **DIGITS),
    "digits, LayerNorm": lambda r, s: supervised("permuted-digits", r, s, layer_norm=True, **DIGITS),
    "digits, tanh": lambda r, s: supervised("permuted-digits", r, s, activation="tanh", **DIGITS),
    "digits, torch's first weights": lambda r, s: supervised("permuted-digits", r, s, init="default", **DIGITS),
    "digits, lr 0.03": lambda r, s: supervised("permuted-digits", r, s, lr=0.03, **DIGITS),
    "digits, Adam": lambda r, s: supervised("permuted-digits", r, s, optimizer="adam", init="default", **DIGITS),
    "digits, Adam 3e-3": lambda r, s: supervised(
        "permuted-digits", r, s, optimizer="adam", init="default", lr=3e-3, **DIGITS
    ),
    "digits, width 24": lambda r, s: supervised("permuted-digits", r, s, **{**DIGITS, "width": 24}),
    "digits, width 192": lambda r, s: supervised("permuted-digits", r, s, **{**DIGITS, "width": 192}),
    "random labels": lambda r, s: supervised("random-label-mnist", r, s, tasks=12, epochs=15),
    "5+1 CIFAR": lambda r, s: supervised("cifar-5+1", r, s, tasks=9, epochs=2),
    "decoder": decoder,
    "cartpole": cartpole,
}


def runs(path: Path) -> Iterator[dict[str, object]]:
    """What is there already."""
    if path.exists():
        yield from map(json.loads, path.read_text().splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/births"))
    parser.add_argument("--rules", nargs="+", default=["backprop", *RULES], choices=["backprop", "new", *RULES])
    parser.add_argument("--streams", nargs="+", default=list(STREAMS), choices=list(STREAMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    path = chosen.out / "runs.jsonl"
    torch.set_num_threads(1)
    for seed in chosen.seeds:
        for stream in chosen.streams:
            for rule in chosen.rules:
                name = {"stream": stream, "rule": rule, "seed": seed}
                if any(name.items() <= run.items() for run in runs(path)):
                    continue
                if rule == "new" and stream != "cartpole":
                    continue
                start = time.perf_counter()
                score = STREAMS[stream](rule, seed)
                line = {**name, "score": round(score, 5), "seconds": round(time.perf_counter() - start, 1)}
                with path.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(line, flush=True)


if __name__ == "__main__":
    main()
