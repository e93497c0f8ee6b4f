"""``gxd.probe``: does a network still learn as well as a fresh one?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from gxd import arguments
from gxd.diagnose.definitions import readiness
from gxd.diagnose.fresh import copied, parameters_of, renewed
from gxd.diagnose.tasks import TASKS, Batch, batches_of, made_new, most_batches
from gxd.diagnose.verdict import Probe
from gxd.errors import ObservationWarning, warn
from gxd.plan.find import call_arguments
from gxd.plan.layouts import unwrap
from gxd.sandbox.snapshot import as_found
from gxd.sandbox.substitute import seed_all

READINESS_BATCHES = 128
"""That optimization readiness, and the loss before training, are measured on."""
MOST = 4
"""Fresh networks at most, as a multiple of ``seeds``."""
_FIRST_SEED = 1_000_003
"""Of the fresh networks: not one of those that people seed their own networks with, which would make the same one."""

Loss = Callable[[Any, Any], Tensor]
MakeOptimizer = Callable[[list[Tensor]], Optimizer]


def probe(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    data: Iterable[Any],
    loss: Loss,
    *,
    steps: int = 200,
    seeds: int = 5,
    most: int | None = None,
    fresh: Callable[[], nn.Module] | None = None,
    task: str = "given",
    confidence: float = 0.95,
) -> Probe:
    """Train copies of the network and fresh networks on the same data, and compare how much they learn.

    The network is trained in several orders of the data, each fresh network in one of them. Fresh networks differ by
    the luck of their first weights, so the question is whether this network is worse than such luck explains. Where
    the first ``seeds`` fresh networks do not decide that, more are trained. How much each learns, and the verdict, are
    defined by :class:`gxd.diagnose.verdict.Probe`. Nothing of the model, its gradients, buffers, hooks, or of the
    global random state changes.

    Give data that are **new to the network**: the next task, not what it was trained on. On old data it is ahead by
    what it remembers, which says nothing about how it learns. Without new data, ``task`` makes some. Train as you
    train: the optimizer, its learning rate and the batch size are part of the question.

    Args:
        model: the network, as it is.
        make_optimizer: ``parameters -> optimizer``, such as ``lambda p: torch.optim.SGD(p, lr=0.1)``. Every run gets a
            new one.
        data: batches ``(x, y)``, with x as for :func:`gxd.find_units`: a tensor, a tuple of arguments, or a dict. At
            most ``steps`` are taken, and kept; if there are fewer, they come again.
        loss: ``(output of the model, y) -> scalar``.
        steps: of each run. A fresh network should be well on its way by then: the longer the runs, the less fresh
            networks differ.
        seeds: orders of the data, and fresh networks to begin with, 2 or more. It takes ``2 * seeds`` runs where the
            verdict is clear.
        most: fresh networks at most, which it takes ``seeds + most`` runs to train. Default: ``4 * seeds``. Their
            number is doubled as long as the verdict is undecided.
        fresh: makes a new network like this one: ``lambda: Net()``. **Recommended**. It draws from torch's global
            random state, which is seeded for it and given back. Default: each module's own ``reset_parameters``, or
            ``_init_weights``, which is not what your constructor does if it initialises in a way of its own.
        task: ``given``: the data as they are. ``permuted_inputs``: the elements of each input in another order, drawn
            once per seed. ``random_labels``: the targets shuffled over all examples, to be memorised: of the data only
            ``steps / 50`` batches are used, so that each comes fifty times.
        confidence: of the interval.

    Example::

        found = gxd.probe(model, lambda p: torch.optim.SGD(p, lr=0.1), next_task, F.cross_entropy, fresh=lambda: Net())
        print(found)
        assert found.verdict != "lost"
    """
    arguments.module(model)
    arguments.every("steps", steps)
    counts = _counts(seeds, most)
    arguments.choice("task", task, TASKS)
    if not 0 < arguments.number("confidence", confidence, 0.0, 1.0) < 1:
        raise ValueError(f"confidence={confidence!r} must be a number above 0 and below 1")
    for name, function in (("make_optimizer", make_optimizer), ("loss", loss), ("fresh", fresh)):
        if not callable(function) and (function is not None or name != "fresh"):
            raise TypeError(f"{name} must be a function, got {type(function).__name__}")
    if isinstance(fresh, nn.Module):
        raise TypeError("fresh must be a function that makes a new network, such as lambda: Net(), got a module")
    model = unwrap(model)
    if not parameters_of(model):
        raise ValueError("the model has no parameter that is trained (requires_grad=True): there is nothing to probe")
    with as_found(model, values=True), torch.enable_grad():
        batches = batches_of(data, most_batches(task, steps), next(model.parameters()).device)
        begins: dict[str, list[_Begin]] = {"old": [], "fresh": []}
        losses: dict[str, list[Tensor]] = {"old": [], "fresh": []}

        def run(name: str, network: nn.Module, seed: int, begin: bool) -> None:
            several, order = _ordered(task, batches, steps, seed)
            if begin:
                begins[name].append(_Begin(network, several, loss, seed))
            losses[name].append(_trained(network, make_optimizer, [several[n] for n in order], loss, seed))

        for seed in range(seeds):
            run("old", copied(model, fresh), seed, begin=seed == 0)
        found: Probe | None = None
        for look, count in enumerate(counts, 1):
            if found is not None and (found.verdict != "undecided" or found.is_hopeless):
                break
            for number in range(len(losses["fresh"]), count):
                run("fresh", renewed(model, fresh, _FIRST_SEED + number), number % seeds, begin=number < seeds)
            found = Probe(
                losses={name: torch.stack(curves) for name, curves in losses.items()},
                readiness={n: torch.tensor([b.readiness for b in several]) for n, several in begins.items()},
                start=sum(begin.loss for begin in begins["fresh"]) / seeds,
                batches=len(batches),
                task=task,
                confidence=float(confidence),
                looks=len(counts),
                look=look,
            )
    assert found is not None
    if len({begin.weights for begin in begins["fresh"]}) == 1:
        warn(
            "fresh= made the same weights for every seed: the interval does not show how fresh networks differ. Let it "
            "draw from torch's global random state, which is seeded for it",
            ObservationWarning,
        )
    return found


def _counts(seeds: Any, most: Any) -> list[int]:
    """How many fresh networks there are at each look: doubled from ``seeds`` until ``most``."""
    if not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 2:
        raise ValueError(f"seeds={seeds!r} must be a whole number, 2 or more: an interval needs two runs")
    most = MOST * seeds if most is None else most
    if not isinstance(most, int) or isinstance(most, bool) or most < seeds:
        raise ValueError(f"most={most!r} must be a whole number, and no fewer fresh networks than seeds={seeds}")
    counts = [seeds]
    while counts[-1] < most:
        counts.append(min(2 * counts[-1], most))
    return counts


def _ordered(task: str, batches: list[Batch], steps: int, seed: int) -> tuple[list[Batch], list[int]]:
    """The batches of a task, and which one each step takes: every one once before any comes again."""
    chance = torch.Generator().manual_seed(seed)
    several = made_new(task, batches, chance)
    rounds = -(-steps // len(several))
    return several, [n for _ in range(rounds) for n in _permutation(len(several), chance)][:steps]


class _Begin:
    """A network before training: the mean loss over the batches, optimization readiness, and the sum of the weights.
    Buffers are left as they were.
    """

    def __init__(self, network: nn.Module, batches: list[Batch], loss: Loss, seed: int) -> None:
        seed_all(seed)
        parameters = parameters_of(network)
        buffers = [(buffer, buffer.clone()) for buffer in network.buffers()]
        total = [torch.zeros_like(p) for p in parameters]
        squares, losses = [], []
        for number, (x, y) in enumerate(islice(batches, READINESS_BATCHES)):
            try:
                returned = _returned(network, x, y, loss)
            except Exception as error:  # whatever a model or a loss raises
                raise ValueError(
                    f"data: loss(model(x), y) fails on batch {number} (x, y): {type(error).__name__}: {error}"
                ) from error
            value = _checked(returned)
            found = torch.autograd.grad(value, parameters, allow_unused=True)
            gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
            torch._foreach_add_(total, gradients)
            squares.append(_square(gradients))
            losses.append(float(value.detach()))
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        self.weights = sum(float(p.detach().double().sum()) for p in parameters)
        self.loss = sum(losses) / len(losses)
        self.readiness = readiness(self.loss, _square(total) / len(losses) ** 2, squares)


def _trained(network: nn.Module, make: MakeOptimizer, batches: list[Batch], loss: Loss, seed: int) -> Tensor:
    """``(steps,)`` the loss of each batch before its step. Once it is not finite it stays so, and training ends."""
    optimizer = _optimizer(network, make)
    seed_all(seed)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        value = _checked(_returned(network, x, y, loss))
        losses.append(float(value.detach()))
        if not math.isfinite(losses[-1]):
            break
        value.backward()
        optimizer.step()
    return torch.tensor(losses + [math.nan] * (len(batches) - len(losses)), dtype=torch.float64)


def _returned(network: nn.Module, x: Any, y: Any, loss: Loss) -> Any:
    args, kwargs = call_arguments(_cloned(x))
    return loss(network(*args, **kwargs), _cloned(y))


def _cloned(value: Any) -> Any:
    """A model, and a loss, may write to what they are given."""
    return value.clone() if type(value) is Tensor else pytree.tree_map_only(Tensor, torch.clone, value)


def _checked(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ValueError(f"loss(output, y) must return a scalar tensor, got {got}: take its mean")
    if not value.requires_grad:
        raise ValueError("loss(output, y) does not depend on the parameters: it must be differentiable, no .item()")
    return value.reshape(())


def _optimizer(network: nn.Module, make: MakeOptimizer) -> Optimizer:
    given = parameters_of(network)
    optimizer = make(list(given))
    arguments.optimizer(optimizer)
    own = {id(p) for p in given}
    if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "make_optimizer must train the parameters that it is given, of a copy, and no others: "
            "lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )
    return optimizer


def _square(tensors: list[Tensor]) -> float:
    return float(torch.stack(torch._foreach_norm(tensors)).double().square().sum())


def _permutation(length: int, chance: torch.Generator) -> list[int]:
    order: list[int] = torch.randperm(length, generator=chance).tolist()
    return order
