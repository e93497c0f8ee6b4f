"""The suites that time training steps: each yields its rows, one setting at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from typing import TypeVar

import gxd
from gxd.lab import models
from gxd.lab.bench.measure import Make, Row, Target, compare, measure
from gxd.lab.bench.variants import MATURITY, Setting, bare, ccbp, compiled, eager
from gxd.lab.bench.vit import ViT

T = TypeVar("T")


@dataclass(frozen=True)
class Scope:
    """How much to measure, and where.

    Attributes:
        quick: fewer rounds, and only the variants that matter most.
        rounds: blocks of each variant; None: as many as the suite thinks right.
        only: patterns of variant names; the first variant, the measure of the others, is always there. Empty: all.
        clock: seconds.
    """

    quick: bool = False
    rounds: int | None = None
    only: tuple[str, ...] = ()
    device: str = "cpu"
    clock: Callable[[], float] = time.perf_counter

    def choose(self, variants: Mapping[str, T]) -> dict[str, T]:
        """The variants that are wanted."""
        patterns = (next(iter(variants)), *self.only) if self.only else ("*",)
        return {name: v for name, v in variants.items() if any(fnmatch(name, pattern) for pattern in patterns)}

    def repeats(self, usual: int) -> int:
        """How many rounds, where ``usual`` is a good number."""
        return self.rounds or (max(usual // 4, 3) if self.quick else usual)


def mlp(scope: Scope) -> Iterator[list[Row]]:
    """Every utility on the MLP of Permuted MNIST."""
    setting = mlp_setting(scope)
    targets = {
        "gxd": (Target(1.40),),
        "gxd, every 10": (Target(1.08),),
        "contribution": (Target(1.20),),
        "gxd, compiled": (Target(0.72),),
        "gxd_all_logit, compiled": (Target(1.30),),
    }
    variants = {"backprop": eager(setting), "backprop, compiled": compiled(setting)}
    for utility in sorted(gxd.utilities(), key=lambda name: not name.startswith("gxd")):
        variants[utility] = eager(setting, utility)
        variants[f"{utility}, every 10"] = eager(setting, utility, score_every=10)
        variants[f"{utility}, compiled"] = compiled(setting, utility)
    for utility in ("gxd", "contribution"):
        variants[f"{utility}, bare"] = bare(setting, utility)
    variants["ccbp-pytorch"] = ccbp(setting, replacement_rate=1e-4, reset_interval=1)
    if scope.quick and not scope.only:
        others = ("backprop", "backprop, compiled", "gxd, bare", "contribution, bare", "ccbp-pytorch")
        wanted = {*others, *targets}
        variants = {name: make for name, make in variants.items() if name in wanted}
    yield timed("mlp", setting, variants, scope, steps=20, rounds=60, targets=targets)
    adam = replace(setting, title=f"{setting.title}, Adam", adam=True)
    variants = {
        "backprop": eager(adam),
        "backprop, compiled": compiled(adam),
        "gxd": eager(adam, "gxd"),
        "gxd, compiled": compiled(adam, "gxd"),
    }
    yield timed("mlp", adam, variants, scope, steps=20, rounds=60, targets={"gxd, compiled": (Target(0.70),)})


def resnet(scope: Scope) -> Iterator[list[Row]]:
    """The paper's small ResNet."""
    title, shape = "small CIFAR ResNet, batch 100", (100, 3, 32, 32)
    setting = Setting(title, models.small_resnet, shape, 2, momentum=0.9, device=scope.device)
    limits = {"gxd": 1.38, "gxd, every 10": 1.06, "gxd, residual": 1.38, "gxd, residual, every 10": 1.06}
    targets = {name: (Target(limit),) for name, limit in limits.items()}
    yield timed("resnet", setting, _residual(setting), scope, steps=10, rounds=10, targets=targets, one_by_one=True)


def resnet18(scope: Scope) -> Iterator[list[Row]]:
    """ResNet-18 on 32x32 images."""
    title, shape = "ResNet-18, batch 16", (16, 3, 32, 32)
    setting = Setting(title, models.resnet18, shape, 100, momentum=0.9, device=scope.device)
    yield timed("resnet18", setting, _residual(setting), scope, steps=10, rounds=3, one_by_one=True)


def vit(scope: Scope) -> Iterator[list[Row]]:
    """A small vision transformer: the units of its MLPs and the value dimensions of its attention."""
    setting = Setting("ViT, width 128, depth 4, batch 16", ViT, (16, 3, 32, 32), 100, device=scope.device)
    yield timed("vit", setting, _residual(setting), scope, steps=10, rounds=8, one_by_one=True)


def scaling(scope: Scope) -> Iterator[list[Row]]:
    """How the cost grows with the batch, the width and the depth."""
    cases = [(batch, 256, 4) for batch in (1, 16, 64, 256)]
    cases += [(16, width, 4) for width in (64, 512, 1024)]
    cases += [(16, 256, depth) for depth in (2, 8, 16)]
    for batch, width, depth in cases:
        setting = mlp_setting(scope, width, depth, batch)
        variants = {
            "backprop": eager(setting),
            "gxd": eager(setting, "gxd"),
            "gxd, every 10": eager(setting, "gxd", score_every=10),
            "contribution": eager(setting, "contribution"),
        }
        yield timed("scaling", setting, variants, scope, steps=20, rounds=20)


def resets(scope: Scope) -> Iterator[list[Row]]:
    """A reset almost every step beside almost none."""
    setting = mlp_setting(scope)
    rates = ("1e-5", "1e-4", "1e-3", "1e-2")
    variants = {"backprop": eager(setting)}
    variants |= {f"gxd, rate {rate}": eager(setting, "gxd", replacement_rate=float(rate)) for rate in rates}
    if not scope.quick:
        for rate in ("1e-5", "1e-3"):
            variants[f"gxd, rate {rate}, compiled"] = compiled(setting, "gxd", replacement_rate=float(rate))
    targets = {"gxd, rate 1e-3": (Target(1.05, of="gxd, rate 1e-5"),)}
    # 40 steps: at 1e-4 a layer of 256 units has a reset in each block.
    yield timed("resets", setting, variants, scope, steps=40, rounds=40, targets=targets)


def mlp_setting(scope: Scope, width: int = 256, depth: int = 4, batch: int = 16, layer_norm: bool = False) -> Setting:
    """The MLP of Permuted MNIST, or one like it."""
    title = f"MLP 784-[{width}]x{depth}-10{', LayerNorm' if layer_norm else ''}, batch {batch}"
    model = partial(models.mlp, 784, 10, width=width, depth=depth, layer_norm=layer_norm)
    return Setting(title, model, (batch, 784), 10, device=scope.device)


def timed(
    suite: str,
    setting: Setting,
    variants: Mapping[str, Make],
    scope: Scope,
    *,
    steps: int,
    rounds: int,
    targets: Mapping[str, Sequence[Target]] | None = None,
    one_by_one: bool = False,
) -> list[Row]:
    """Time the variants. ``steps`` is a multiple of 10, so that every block holds its share of scored steps."""
    timings = measure(
        scope.choose(variants),
        steps=steps,
        rounds=scope.repeats(rounds),
        warmup=MATURITY + 2,
        device=scope.device,
        clock=scope.clock,
        one_by_one=one_by_one,
    )
    return compare(suite, setting.title, timings, targets)


def _residual(setting: Setting) -> dict[str, Make]:
    """For a model with a residual stream, whose coordinates are left alone, or ("residual") reset too."""
    return {
        "backprop": eager(setting),
        "backprop, compiled": compiled(setting),
        "gxd": eager(setting, "gxd"),
        "gxd, every 10": eager(setting, "gxd", score_every=10),
        "gxd, compiled": compiled(setting, "gxd"),
        "gxd, residual": eager(setting, "gxd", residual="group"),
        "gxd, residual, every 10": eager(setting, "gxd", residual="group", score_every=10),
        "gxd, residual, compiled": compiled(setting, "gxd", residual="group"),
        "contribution": eager(setting, "contribution"),
    }
