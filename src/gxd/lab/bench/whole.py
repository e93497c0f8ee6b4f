"""The suites that look beyond the step: memory, the whole training loop, the reset-cost assay."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn import functional as F

import gxd
from gxd.lab import methods, models, run
from gxd.lab.bench.measure import Row, Timing, Verdict, compare, synchronize, take_turns
from gxd.lab.bench.memory import allocations
from gxd.lab.bench.suites import Scope, mlp_setting
from gxd.lab.bench.variants import MATURITY, Setting, Trainee
from gxd.lab.experiments import Experiment
from gxd.lab.experiments.permuted_digits import PermutedDigits
from gxd.lab.experiments.permuted_mnist import PermutedMNIST
from gxd.lab.steps import Step, eager_step

# --- memory -----------------------------------------------------------------------------------------------------------


def memory(scope: Scope) -> Iterator[list[Row]]:
    """What resets hold beyond backprop, at three widths: it must grow like the units, not like the weights."""
    widths = (256, 512, 1024)
    extra: dict[str, list[float]] = {}
    for width in widths:
        setting = mlp_setting(scope, width)
        units, weights = setting.plan().size, sum(p.numel() for p in setting.fresh().parameters())
        plain, ours = (footprint(setting, partial(setting.trainee, utility)) for utility in (None, "gxd"))
        rows = []
        for name, found in ours.items():
            more = max(found - plain[name], 0)
            extra.setdefault(name, []).append(more)
            note = f"{more / units:.0f} bytes per unit; the weights take {weights / 256:.0f} kB"
            rows.append(Row("memory", setting.title, f"gxd, {name}", more / 1024, "kB more", note=note))
        yield rows
    growth = []
    for name, sizes in extra.items():
        power = math.log(sizes[-1] / sizes[0], widths[-1] / widths[0]) if min(sizes) > 0 else 0.0
        verdicts = (Verdict(1.1, None, power),)
        note = "the power of the width: 1, like the units; 2, like the weights"
        growth.append(Row("memory", "growth", f"gxd, {name}", power, "", verdicts=verdicts, note=note))
    yield growth


def footprint(setting: Setting, make: Callable[[], Trainee]) -> dict[str, int]:
    """Bytes that a model in training keeps, and the most it holds at once: in a step, and until it was observed."""
    setting.plan()  # tracing takes memory once, and gives it back
    turn = itertools.cycle(setting.batches())
    made: list[tuple[Trainee, Step]] = []

    def start() -> None:
        model, optimizer, cbp = trainee = make()
        made.append((trainee, eager_step(model, optimizer, F.cross_entropy, cbp)))
        for _ in range(MATURITY + 2):
            made[0][1](*next(turn))

    def look() -> None:
        (model, _, cbp), (x, y) = made[0][0], next(turn)
        logits = model(x)
        if cbp is not None:
            cbp.observe(logits, y)

    return {
        "kept": allocations(start, setting.device)[0],
        "peak of a step": allocations(lambda: made[0][1](*next(turn)), setting.device)[1],
        "peak of forward and observe": allocations(look, setting.device)[1],
    }


# --- the loop ---------------------------------------------------------------------------------------------------------


def loop(scope: Scope) -> Iterator[list[Row]]:
    """Steps per second of a whole run: data, training, evaluation, metrics, checkpoints."""
    kind: type[Experiment] = PermutedDigits if scope.quick else PermutedMNIST
    configs = {
        f"{method}{', compiled' if fuse == 'yes' else ''}": kind.from_dict(
            # The second task is timed: compilation and a cold start belong to the first.
            {"method": method, "compile": fuse, "device": scope.device, "tasks": 2, "threads": torch.get_num_threads()}
        )
        for fuse in ("no", "yes")
        for method in ("backprop", methods.PAPER)
    }
    blocks = scope.choose({name: partial(_last_task, config, scope.clock) for name, config in configs.items()})
    timings = take_turns(blocks, scope.repeats(3), {name: Timing() for name in blocks})
    yield compare("loop", kind.name, timings, unit="steps/s")


def _last_task(config: Experiment, clock: Callable[[], float]) -> float:
    """Seconds per step of the last task of a run."""
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as root:
        run.train(config, root, report=lambda _: ends.append(clock()))
    return (ends[-1] - ends[-2]) / (config.steps / config.tasks)


# --- the assay --------------------------------------------------------------------------------------------------------


def assay(scope: Scope) -> Iterator[list[Row]]:
    """Clamps per second of the reset-cost assay, beside plain forward passes on the same probe data."""
    yield _assay(scope, mlp_setting(scope, batch=512 if scope.quick else 2048), None)
    resnet = Setting("ResNet-18, batch 64", models.resnet18, (64, 3, 32, 32), 100, device=scope.device)
    yield _assay(scope, resnet, 8)


def _assay(scope: Scope, setting: Setting, units_per_group: int | None) -> list[Row]:
    model, plan, (probe, y) = setting.fresh().eval(), setting.plan(), setting.batches()[0]
    few = probe[:16], y[:16]  # enough to calibrate: it is the clamps that are timed

    def forward() -> float:
        began = scope.clock()
        with torch.no_grad():
            model(probe)
        synchronize(scope.device)
        return scope.clock() - began

    def clamps() -> float:
        began = scope.clock()
        cost = gxd.reset_cost(model, few, probe, utilities="activation", plan=plan, units_per_group=units_per_group)
        synchronize(scope.device)
        return (scope.clock() - began) / sum(map(len, cost.units.values()))

    blocks = {"a forward pass": forward, "a clamp": clamps}
    timings = take_turns(blocks, scope.repeats(3), {name: Timing() for name in blocks})
    return compare("assay", setting.title, timings, unit="/s")
