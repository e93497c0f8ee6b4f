"""What gxd costs per training step: the ratio to plain training in the same process, which is all that travels.

    OMP_NUM_THREADS=1 python benchmarks/overhead.py                 a small MLP: the fixed cost of a step
    OMP_NUM_THREADS=1 python benchmarks/overhead.py --nets          a ResNet-18 and a transformer encoder, too
    OMP_NUM_THREADS=1 python benchmarks/overhead.py --only gxd      rows whose name contains a word

All rows of a network take turns in short blocks of steps, and each counts with its best block: other programs on the
machine slow down single blocks, and never speed one up. Time is that of this process on the processor.

Units are mature after two steps, so that resets, which come at the method's own rate, are in every block.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd

Step = Callable[[], object]
Built = tuple[nn.Module, Tensor, Tensor]  # a network, and a batch for it
PLAIN, PLAIN_COMPILED = "plain", "plain, compiled"


def mlp() -> Built:
    """784-[256]x4-10, a batch of 16: so small that the fixed cost of a step shows."""
    widths = [784, 256, 256, 256, 256]
    layers = [layer for n, m in pairwise(widths) for layer in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(256, 10)), torch.randn(16, 784), torch.randint(10, (16,))


class Block(nn.Module):
    """Of a residual network."""

    def __init__(self, n: int, m: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(n, m, 3, stride, 1, bias=False), nn.BatchNorm2d(m)
        self.conv2, self.bn2 = nn.Conv2d(m, m, 3, 1, 1, bias=False), nn.BatchNorm2d(m)
        skip = [nn.Conv2d(n, m, 1, stride, bias=False), nn.BatchNorm2d(m)] if stride > 1 or n != m else []
        self.skip = nn.Sequential(*skip)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.skip(x))


def resnet18() -> Built:
    """For images of 32 x 32."""
    sizes = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2)]
    blocks = [Block(*size) for size in [*sizes, (512, 512, 1)]]
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*stem, *blocks, *head), torch.randn(16, 3, 32, 32), torch.randint(10, (16,))


class Layer(nn.Module):
    """Of a transformer, with the norms first."""

    def __init__(self, n: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out, self.heads = nn.LayerNorm(n), nn.Linear(n, 3 * n), nn.Linear(n, n), heads
        self.norm2, self.up, self.down = nn.LayerNorm(n), nn.Linear(n, 4 * n), nn.Linear(4 * n, n)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """Six layers of 384."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(1000, 384), nn.Sequential(*[Layer(384, 6) for _ in range(6)])
        self.norm, self.head = nn.LayerNorm(384), nn.Linear(384, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.embed(tokens))).mean(1))


def encoder() -> Built:
    """Of the size of a small BERT."""
    return Encoder(), torch.randint(1000, (4, 128)), torch.randint(10, (4,))


def setups() -> dict[str, Callable[[nn.Module, torch.optim.Optimizer, Tensor], gxd.Attachment | None]]:
    """Row -> what is attached. Those whose name ends in ``compiled`` are run by :func:`gxd.compiled_step`."""

    def method(**options: int) -> Callable[..., gxd.Attachment]:
        return lambda m, o, x: gxd.attach(m, o, gxd.method("gxd", maturity=2, **options), example_inputs=x[:2])

    def utility(name: str) -> Callable[..., gxd.Attachment]:
        return lambda m, o, x: gxd.ContinualBackprop(m, o, example_inputs=x[:2], utility=name, maturity=2)

    return {
        PLAIN: lambda *_: None,
        "gxd": method(),
        "gxd, every 10": method(score_every=10),
        "random": utility("random"),
        "contribution": utility("contribution"),
        "paper's gxd": utility("gxd"),
        PLAIN_COMPILED: lambda *_: None,
        "gxd, compiled": method(),
        "paper's gxd, compiled": utility("gxd"),
    }


def made(name: str, build: Callable[[], Built]) -> Step:
    """The training step of a row."""
    torch.manual_seed(0)
    model, x, y = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    attached = setups()[name](model, optimizer, x)
    if name.endswith("compiled"):
        compiled = gxd.compiled_step(model, optimizer, F.cross_entropy, attached)
        return lambda: compiled(x, y)
    observed = attached is not None and any(method.needs_observe for method in attached.methods)

    def step() -> None:
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        if observed:
            attached.observe(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def best(steps: dict[str, Step], rounds: int, seconds: float) -> dict[str, float]:
    """Name -> seconds per step in the best of its blocks; the blocks take turns."""
    found, counts = {}, {}
    for name, step in steps.items():
        for _ in range(5):  # the last is warm, and has compiled what there is to compile
            start = time.process_time()
            step()
            once = time.process_time() - start
        counts[name], found[name] = 10 + 10 * int(seconds / 10 / once), float("inf")
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.process_time()
            for _ in range(counts[name]):
                step()
            found[name] = min(found[name], (time.process_time() - start) / counts[name])
    return found


def main() -> None:
    """Measure, and print a table for each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", action="store_true", help="larger networks, too, without the compiled rows")
    parser.add_argument("--only", nargs="*", default=[""], help="rows whose name contains one of these")
    parser.add_argument("--rounds", type=int, default=100, help="blocks of each row (nets: a fiftieth)")
    options = parser.parse_args()
    for build in (mlp, resnet18, encoder) if options.nets else (mlp,):
        names = [name for name in setups() if name == PLAIN or any(word in name for word in options.only)]
        names = [name for name in names if build is mlp or not name.endswith("compiled")]
        rounds = options.rounds if build is mlp else max(2, options.rounds // 50)
        found = best({name: made(name, build) for name in names}, rounds, 0.01)
        print(f"{build.__name__}: plain step {1e6 * found[PLAIN]:.0f} us")
        for name, once in found.items():
            print(f"  {name:24}{1e6 * once:10.0f} us{once / found[PLAIN]:8.2f}", flush=True)


if __name__ == "__main__":
    main()
