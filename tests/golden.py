"""Golden trajectories: what training does, recorded by one version of gxd and compared bit for bit with another.

    python -m tests.golden record OUT.pt [words...]    run every case, or those whose name contains one of the words
    python -m tests.golden compare A.pt B.pt           print every difference; exit status 1 if there is one
    make golden BASE=<commit>                          record BASE and this tree with this script, then compare

Only the public API is used, and keyword arguments that were renamed are looked up in the signature, so the same script
records any version: PYTHONPATH chooses the package. The bits depend on the machine and on the version of torch: record
both sides on one machine, and commit neither.

A case is a model, a utility, an optimizer and a regime of training, with many resets in few steps. :func:`table` has
every pair of a model and a utility, so that each of both meets every regime, and a list of special settings.
A recording is ``name of the case -> {"trajectory": ..., "end": ...}``, nested dicts of tensors. In a trajectory the
first axis counts the steps, and ``last_resets`` is a mask over the units of a group.

``compare`` prints ``case: key: largest absolute difference, first step``, the earliest first. A difference of 0 means
other bits of an equal value (-0.0 and 0.0).
"""

from __future__ import annotations

import argparse
import copy
import inspect
import io
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch import multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer

import gxd
from tests import models

STEPS, SIZES = 30, (5, 2, 3)  # SIZES: of the micro-batches of one step
RENAMED = {"positions": "position_reduction", "step_policy": "optimizer_step", "rates": "replacement_rates"}


def mlp(act: type[nn.Module]) -> nn.Module:
    layers = {"fc1": nn.Linear(6, 16), "act1": act(), "fc2": nn.Linear(16, 12), "act2": act(), "head": nn.Linear(12, 4)}
    return nn.Sequential(OrderedDict(layers))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "relu": (lambda: mlp(nn.ReLU), models.VECTOR, {}),
    "leaky_relu": (lambda: mlp(nn.LeakyReLU), models.VECTOR, {}),
    "silu": (lambda: mlp(nn.SiLU), models.VECTOR, {}),
    "tanh": (lambda: mlp(nn.Tanh), models.VECTOR, {}),
    "layer_norm": models.MODELS["mlp_layer_norm"],
    "resnet": models.MODELS["resnet_coordinates"],
    "conv": models.MODELS["conv"],
    "attention": (models.Attention, models.TOKENS, {}),
    "multihead": models.MODELS["transformer"],
    "branches": (models.TwoViews, models.VECTOR, {}),
    "tasks": (models.Tasks, models.VECTOR, {}),  # only among the special cases
}
OPTIMIZERS: dict[str, Callable[[Sequence[nn.Parameter]], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, 0.1),
    "momentum": lambda parameters: SGD(parameters, 0.05, momentum=0.9),
    "adam": lambda parameters: Adam(parameters, 0.01),
    "adamw": lambda parameters: AdamW(parameters, 0.01, weight_decay=0.1),
}
LOCAL = ["activation", "contribution", "mc_contribution", "mc_adaptable_contribution", "random"]
UTILITIES = [*LOCAL, "loss_gradient", "gxi", "gxd", "gxd_all_logit", "gxd_sketch"]
# One for each diagonal of the table of models and utilities; to compile is slow, so that is one diagonal.
REGIMES = ["compiled", "two_ranks", *("every_step", "score_every", "accumulation", "resume") * 2]


@dataclass(frozen=True)
class Case:
    """``plan`` and ``settings`` go to ``find_units`` and ``ContinualBackprop``; ``special`` is what else is done."""

    model: str
    utility: str
    optimizer: str
    regime: str = "every_step"
    special: str = ""
    plan: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        options = [f"{key}={value}" for key, value in {**self.plan, **self.settings}.items()]
        return " ".join(filter(None, [self.model, self.utility, self.optimizer, self.regime, self.special, *options]))


def table() -> Iterator[Case]:
    """Each model with each utility; a diagonal has one regime, and meets every model, utility and optimizer."""
    for m, model in enumerate(list(MODELS)[:-1]):
        for u, utility in enumerate(UTILITIES):
            yield Case(model, utility, list(OPTIMIZERS)[(m // 2 + u) % 4], REGIMES[(m + u) % len(REGIMES)])
    yield Case("conv", "gxd", "adam", settings={"positions": "abs"})
    yield Case("attention", "gxd_sketch", "momentum", "accumulation", settings={"positions": "abs"})
    yield Case("resnet", "gxi", "sgd", plan={"residual": "skip"}, settings={"positions": "abs"})
    yield Case("relu", "gxd", "adamw", settings={"compensate": False})
    yield Case("resnet", "mc_contribution", "adam", settings={"compensate": False})
    yield Case("silu", "gxd", "adam", settings={"step_policy": "reset"})
    yield Case("multihead", "contribution", "adamw", "resume", settings={"step_policy": "reset"})
    yield Case("relu", "gxd", "momentum", plan={"rates": {"fc1": 0.1}})
    yield Case("conv", "mc_adaptable_contribution", "adam", "score_every", plan={"rates": {"conv*": 0.02, "fc": 0.0}})
    yield Case("silu", "gxd", "adam", settings={"decay": 0.9, "seed": 7, "maturity": 0})
    yield Case("silu", "gxd", "adam", "compiled", settings={"score_every": 3})
    yield Case("tanh", "gxd", "adam", "compiled", "autocast")
    for utility in ("gxd", "activation", "loss_gradient"):
        for regime in ("every_step", "score_every", "accumulation", "resume"):
            yield Case("tasks", utility, "adam", regime, "tasks")
        yield Case("layer_norm", utility, "adamw", "every_step", "autocast")
        yield Case("silu", utility, "adam", "every_step", "scaler")
        yield Case("branches", utility, "adam", "every_step", "two_optimizers")
    for regime in ("every_step", "score_every", "accumulation", "resume", "compiled"):
        yield Case("silu", "gxd_loss", "adam", regime, settings={"ranking": "age"})
        yield Case("attention", "gxd_loss", "sgd", regime, settings={"ranking": "age"})
        yield Case("branches", "gxd_loss", "momentum", regime, settings={"ranking": "age"})
    yield Case("tasks", "gxd_loss", "adam", "every_step", "tasks", settings={"ranking": "age"})
    for special, utility in [("score", "gxd"), ("score", "gxi"), ("probabilities", "gxd"), ("nonfinite", "gxd")]:
        yield Case("leaky_relu", utility, "adam", "accumulation", special)
    for special in ("double", "evaluation", "deepcopy", "by_hand", "reset_units"):
        yield Case("relu", "gxd", "momentum", "every_step", special)


def call(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Call it with each keyword by the name that this version has for it."""
    known = inspect.signature(function).parameters
    return function(*args, **{k if k in known else RENAMED.get(k, k): v for k, v in keywords.items()})


def built(case: Case, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[case.model][0]().to(torch.double if case.special == "double" else torch.float)


def planned(case: Case, seed: int, known: dict[str, gxd.UnitPlan] = {}) -> gxd.UnitPlan:  # noqa: B006 (a cache)
    """Tracing takes longer than training, and one plan serves all models of a kind."""
    key = f"{case.model} {seed} {case.plan} {case.special if case.special in ('double', 'by_hand') else ''}"
    if key not in known:
        module, (_, shape, options) = built(case, seed), MODELS[case.model]
        x = torch.zeros(2, *shape, dtype=next(module.parameters()).dtype)
        inputs = [(x, 0), (x, 1)] if case.model == "tasks" else x
        if case.special == "by_hand":
            by_hand = getattr(gxd, "manual_group", None) or gxd.manual_group
            inputs, options = None, {"groups": [by_hand("fc1", consumers=["fc2"])]}
        known[key] = call(gxd.find_units, module, inputs, **{**options, **case.plan})
    return known[key]


class Training:
    """A model in training as a case says."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case, self.module = case, built(case, seed)
        self.model = DistributedDataParallel(self.module) if case.regime == "two_ranks" else self.module
        parameters, two = list(self.module.parameters()), case.special == "two_optimizers"
        self.optimizers = [OPTIMIZERS["momentum"](parameters[::2])] if two else []
        self.optimizers.append(OPTIMIZERS[case.optimizer](parameters[1::2] if two else parameters))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if case.special == "scaler" else None
        settings = {"replacement_rate": 0.04, "maturity": 4, "score_every": 3 if case.regime == "score_every" else 1}
        settings |= {"utility": case.utility, "scaler": self.scaler, "plan": planned(case, seed), **case.settings}
        optimizer = self.optimizers if two else self.optimizers[0]
        self.cbp = call(gxd.ContinualBackprop, self.model, optimizer, **settings)
        torch.manual_seed(2)  # only gxd.reset_units draws from the global generator
        self.compiled = None
        if case.regime == "compiled":
            torch.compiler.reset()
            self.compiled = gxd.compiled_step(self.model, self.optimizers[0], F.cross_entropy, self.cbp)

    def backward(self, x: Tensor, y: Tensor, step: int, part: int) -> Tensor:
        """A forward pass, observed, and its backward pass."""
        special = self.case.special
        if special == "evaluation":
            self.model.eval()(x)
            with torch.no_grad():
                self.model.train()(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=special == "autocast"):
            # The heads take turns, in an accumulation among its micro-batches.
            logits = self.model(x, (step // 4 + part) % 2) if special == "tasks" else self.model(x)
            if special == "score":
                self.cbp.observe(score=logits.logsumexp(1) + logits[:, 0])
            elif special == "nonfinite":
                self.cbp.observe(score=logits.sum(1) * (torch.nan if step % 7 == 3 and part == 1 else 1.0))
            else:
                self.cbp.observe(logits, 0.9 * F.one_hot(y, 4) + 0.025 if special == "probabilities" else y)
            loss = F.cross_entropy(logits, y, reduction="sum") / sum(SIZES)
        if self.scaler is None:
            loss.backward()
        else:  # an infinite gradient: the scaler skips the step
            self.scaler.scale(loss * (torch.inf if step % 9 == 5 else 1.0)).backward()
        return loss.detach()

    def step(self, x: Tensor, y: Tensor, step: int) -> tuple[Training, Tensor]:
        """The training that goes on (another one after a resume), and the loss."""
        if self.compiled is not None:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.case.special == "autocast"):
                return self, self.compiled(x, y)[0].detach()
        half = step == STEPS // 2
        if self.case.special == "reset_units" and step % 5 == 4:
            gxd.reset_units(self.module, self.cbp.plan, {"fc2": [step % 4, 7]}, optimizer=self.optimizers[0])
        now = copy.deepcopy(self) if self.case.special == "deepcopy" and half else self
        sizes = list(SIZES) if self.case.regime in ("accumulation", "resume") else [len(x)]
        losses = []
        for part, (x_part, y_part) in enumerate(zip(x.split(sizes), y.split(sizes), strict=True)):
            losses.append(now.backward(x_part, y_part, step, part))
            if self.case.regime == "resume" and half and part == 1:
                now = now.resumed()
        for optimizer in now.optimizers:
            optimizer.step() if now.scaler is None else now.scaler.step(optimizer)
        if now.scaler is not None:
            now.scaler.update()
        now.module.zero_grad()
        return now, torch.stack(losses)

    def resumed(self) -> Training:
        """Fresh objects, of other weights, that go on from a checkpoint; gradients are for the loop to keep."""
        buffer, other = io.BytesIO(), Training(self.case, seed=1)
        states = [part.state_dict() for part in (self.module, *self.optimizers, self.cbp)]
        torch.save((states, [p.grad for p in self.module.parameters()]), buffer)
        buffer.seek(0)
        states, gradients = torch.load(buffer, weights_only=True)
        for part, state in zip((other.module, *other.optimizers, other.cbp), states, strict=True):
            part.load_state_dict(state)
        for parameter, gradient in zip(other.module.parameters(), gradients, strict=True):
            parameter.grad = gradient
        return other

    def now(self) -> dict[str, Any]:
        """What the public accessors say."""
        said = {name: getattr(self.cbp, name)() for name in ("utilities", "ages", "references")}
        resets = {name: torch.zeros(len(ages), dtype=torch.bool) for name, ages in said["ages"].items()}
        for name, units in self.cbp.last_resets.items():
            resets[name][units] = True
        return {**said, "last_resets": resets, "total_resets": torch.tensor(self.cbp.total_resets)}


def trajectory(case: Case, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """What training on every ``ranks``-th example did."""
    training, history = Training(case), []
    draw = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(STEPS):
            x = torch.randn(sum(SIZES), *MODELS[case.model][1], generator=draw).to(next(training.module.parameters()))
            y = torch.randint(4, (sum(SIZES),), generator=draw)
            training, loss = training.step(x[rank::ranks], y[rank::ranks], step)
            history.append(copy.deepcopy({"loss": loss, **flat(training.now())}))
    end = {"parameters": dict(training.module.named_parameters()), "buffers": dict(training.module.named_buffers())}
    end["optimizers"] = {str(i): one.state_dict()["state"] for i, one in enumerate(training.optimizers)}
    end["nonfinite_observations"] = torch.tensor(training.cbp.nonfinite_observations)
    end["ran_eagerly"] = torch.tensor(any(issubclass(one.category, gxd.CompileWarning) for one in said))
    training.cbp.close()
    return {
        "trajectory": {key: torch.stack([entry[key] for entry in history]) for key in history[0]},
        "end": {key: value.detach().clone() for key, value in flat(end).items()},
    }


def flat(nested: Mapping[Any, Any], prefix: str = "") -> dict[str, Tensor]:
    """``{"a": {"b": tensor}} -> {"a/b": tensor}``."""
    leaves: dict[str, Tensor] = {}
    for key, value in nested.items():
        leaves |= flat(value, f"{prefix}{key}/") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return leaves


def on_two_ranks(cases: Sequence[Case]) -> dict[str, Any]:  # one start of two processes: that takes seconds
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(on_a_rank, args=(cases, folder), nprocs=2)
        ranks = [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in range(2)]
    return {case.name: {**ranks[0][case.name], "other_rank": ranks[1][case.name]} for case in cases}


def on_a_rank(rank: int, cases: Sequence[Case], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.save({case.name: trajectory(case, rank, 2) for case in cases}, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def record(cases: Sequence[Case]) -> dict[str, Any]:
    """The trajectory of each case; one that fails is told of and left out."""
    torch.set_num_threads(1)
    recorded: dict[str, Any] = {}
    together = [case for case in cases if case.regime == "two_ranks"]
    for batch in [*([case] for case in cases if case not in together), *([together] if together else [])]:
        began = time.perf_counter()
        try:
            recorded |= on_two_ranks(batch) if batch is together else {batch[0].name: trajectory(batch[0])}
        except Exception:
            print(f"FAILED: {[case.name for case in batch]}\n{traceback.format_exc()}", flush=True)
        else:
            print(f"{time.perf_counter() - began:6.1f} s  {', '.join(case.name for case in batch)}", flush=True)
    return recorded


def compare(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """Every difference in a line of its own."""
    lines = [f"{name}: only in {'A' if name in left else 'B'}" for name in sorted({*left} ^ {*right})]
    for name in [name for name in left if name in right]:
        a, b, found = flat(left[name]), flat(right[name]), []
        for key in {**a, **b}:
            what = f"{name}: {key}"
            if key not in a or key not in b:
                found.append((-1, f"{what}: only in {'A' if key in a else 'B'}"))
            elif a[key].dtype != b[key].dtype or a[key].shape != b[key].shape:
                found.append((-1, f"{what}: {a[key].dtype}{[*a[key].shape]} and {b[key].dtype}{[*b[key].shape]}"))
            elif not same_bits(a[key], b[key]):
                largest = (a[key].double() - b[key].double()).abs().max().item()
                steps = range(len(a[key])) if "trajectory/" in key else ()
                first = next((step for step in steps if not same_bits(a[key][step], b[key][step])), STEPS)
                found.append((first, f"{what}: {largest:.3g}, {'at the end' if first == STEPS else f'step {first}'}"))
        lines += [line for _, line in sorted(found, key=lambda one: one[0])]
    return lines


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["record", "compare"])
    parser.add_argument("file")
    parser.add_argument("words", nargs="*", help="parts of names of cases to record, or the other file to compare with")
    options = parser.parse_args()
    if options.command == "record":
        cases = [case for case in table() if not options.words or any(word in case.name for word in options.words)]
        if not cases:  # two empty recordings would be equal
            parser.error(f"no case has one of {options.words} in its name")
        print(f"recording {len(cases)} cases of {gxd.__file__}", flush=True)
        recorded = record(cases)
        torch.save(recorded, options.file)
        return int(len(recorded) < len(cases))
    if len(options.words) != 1:
        parser.error("compare needs two files")
    left, right = (torch.load(path, weights_only=True) for path in (options.file, options.words[0]))
    lines = compare(left, right)
    print(*lines, f"{len({*left} | {*right})} cases, {len(lines)} differences", sep="\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
