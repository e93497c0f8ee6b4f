"""Whatever the loop, the method ``gxd`` sees what plain autograd says, and at a rate of zero it changes nothing.

The only line is ``gxd.attach(model, optimizer, "gxd", ...)``. The truth is a second model that returns its hidden
layers, trained by the same loop without gxd. Scores are computed from these with ``torch.autograd.grad``, as the
definition says: the mean over examples of ``|sum over positions of (h - r) dL/dh|``, as a share of its layer's mean, in
a running average. ``r`` is the running mean of ``h``, the batch included.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch import multiprocessing as mp
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import gxd
from tests.attach.test_regimes import same

DECAY, STEPS = 0.9, 7
Batch = tuple[Tensor, Tensor]
Hidden = list[Tensor]  # of one forward pass, by layer
Round = tuple[list[Hidden], Tensor]  # forward passes, and the loss that is made of them


# --- models that tell what they hide ----------------------------------------------------------------------------------


class Mlp(nn.Module):
    """``reentrant``: None, or how its middle is checkpointed."""

    groups = ("fc1", "fc2", "fc3")
    reentrant: bool | None = None

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2, self.fc3 = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, outputs)
        self.double()

    def middle(self, h: Tensor) -> Tensor:
        return self.fc3(F.gelu(self.fc2(h)))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc1(x))
        h = self.middle(h) if self.reentrant is None else checkpoint(self.middle, h, use_reentrant=self.reentrant)
        return self.head(torch.tanh(h))

    def opened(self, x: Tensor) -> tuple[Tensor, Hidden]:
        first = torch.tanh(self.fc1(x))
        second = F.gelu(self.fc2(first))
        third = torch.tanh(self.fc3(second))
        return self.head(third), [first, second, third]


class Tokens(nn.Module):
    """Positions that see those before them."""

    groups = ("fc1", "fc2")

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2, self.head = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.opened(x)[0]

    def opened(self, x: Tensor) -> tuple[Tensor, Hidden]:
        first = torch.tanh(self.fc1(x.cumsum(1)))
        second = F.gelu(self.fc2(first))
        return self.head(second), [first, second]


class Convolutions(nn.Module):
    groups = ("conv1", "conv2", "fc")

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 5, 3)
        self.fc, self.head = nn.Linear(5 * 4, 7), nn.Linear(7, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.opened(x)[0]

    def opened(self, x: Tensor) -> tuple[Tensor, Hidden]:
        first = torch.tanh(self.conv1(x))
        second = F.gelu(self.conv2(first)).flatten(1)
        third = torch.tanh(self.fc(second))
        # (examples, positions, units), as the first two are read
        return self.head(third), [first, second, third]


def by_units(group: str, h: Tensor) -> Tensor:
    """``(examples, positions, units)``."""
    if group == "conv1":
        return h.flatten(2).mT
    if group == "conv2":
        return h.unflatten(1, (5, 4)).mT
    return h if h.dim() == 3 else h.unsqueeze(1)


# --- the truth --------------------------------------------------------------------------------------------------------


class Naive:
    """The running averages of one model, by the definition."""

    def __init__(self, groups: Sequence[str]) -> None:
        self.groups = groups
        self.means = [torch.zeros(1, dtype=torch.float64) for _ in groups]
        self.utilities = [torch.zeros(1, dtype=torch.float64) for _ in groups]
        self.steps = 0

    def step(self, rounds: Sequence[Round]) -> None:
        """What one step of the optimizer has used: the backward passes, in their order."""
        self.steps += 1
        correction = 1 - DECAY**self.steps
        gradients = [
            torch.autograd.grad(loss, [h for one in passes for h in one], retain_graph=True) for passes, loss in rounds
        ]
        for number, group in enumerate(self.groups):
            total, count, score, examples = torch.zeros(1, dtype=torch.float64), 0, 0.0, 0
            ahead = self.means[number]
            for (passes, _), found in zip(rounds, gradients):
                each = [
                    (by_units(group, one[number].detach()), by_units(group, found[place * len(self.groups) + number]))
                    for place, one in enumerate(passes)
                ]
                total = total + sum(h.sum((0, 1)) for h, _ in each)
                count += sum(h.shape[0] * h.shape[1] for h, _ in each)
                ahead = DECAY * self.means[number] + (1 - DECAY) * total / count
                for h, g in each:
                    score = score + ((h - ahead / correction) * g).sum(1).abs().sum(0)
                    examples += len(h)
            self.means[number] = ahead
            score = score / examples
            self.utilities[number] = DECAY * self.utilities[number] + (1 - DECAY) * score / score.mean()

    def found(self) -> dict[str, Tensor]:
        return {name: u / (1 - DECAY**self.steps) for name, u in zip(self.groups, self.utilities)}


# --- loops ------------------------------------------------------------------------------------------------------------


class Loop:
    """How to train for a step, and which losses it takes the gradients of."""

    build: Callable[[], Any] = Mlp
    shape: tuple[int, ...] = (4,)
    examples = 8
    classes: int | None = 3  # None: numbers

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def prepared(self, model: Any) -> Any:
        """What is called in place of the model."""
        return model

    def batches(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(1)
        for step in range(STEPS):
            x = torch.randn(self.examples, *self.shape, generator=generator, dtype=torch.float64)
            if self.classes is None:
                yield x, torch.randn(self.examples, 2, generator=generator, dtype=torch.float64)
            else:
                yield x, self.targets(generator, step)

    def targets(self, generator: torch.Generator, step: int) -> Tensor:
        return torch.randint(3, (self.examples,), generator=generator)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output, y)

    def run(self, model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        self.loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def truth(self, model: Any, x: Tensor, y: Tensor) -> list[Round]:
        output, hidden = model.opened(x)
        return [([hidden], self.loss(output, y))]


class Images(Loop):
    build, shape = Convolutions, (2, 4, 4)


class Regression(Loop):
    build, classes = partial(Mlp, 2), None

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return F.smooth_l1_loss(output, y, reduction="sum")


class Contrastive(Loop):
    """A loss that compares the examples of a batch: no example has a loss of its own."""

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(output, dim=1)
        return F.cross_entropy(z @ z.T.detach() / 0.5, torch.arange(len(z)))


class MaskedTokens(Loop):
    """Sequences of different length: the targets behind their ends are ignored, and one sequence is empty."""

    build, shape = Tokens, (5, 4)

    def targets(self, generator: torch.Generator, step: int) -> Tensor:
        y = torch.randint(3, (self.examples, 5), generator=generator)
        lengths = torch.randint(1, 6, (self.examples,), generator=generator)
        lengths[step % self.examples] = 0
        return y.where(torch.arange(5) < lengths.unsqueeze(1), -100)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output.transpose(1, 2), y, ignore_index=-100)


class BackwardEach(Loop):
    """Two losses of one forward pass with a backward pass each."""

    def run(self, model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        output = model(x)
        self.loss(output, y).backward(retain_graph=True)
        (0.3 * output.square().mean()).backward()
        optimizer.step()

    def truth(self, model: Any, x: Tensor, y: Tensor) -> list[Round]:
        output, hidden = model.opened(x)
        return [([hidden], self.loss(output, y) + 0.3 * output.square().mean())]


class TwoPasses(Loop):
    """Two forward passes and one backward pass, as for consistency between two views of the data."""

    def parts(self, one: Any, other: Any, y: Tensor) -> Tensor:
        return self.loss(one, y) + 0.5 * (one - other).square().mean()

    def run(self, model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        self.parts(model(x), model(x + 0.5), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    def truth(self, model: Any, x: Tensor, y: Tensor) -> list[Round]:
        (one, first), (other, second) = model.opened(x), model.opened(x + 0.5)
        return [([first, second], self.parts(one, other, y))]


class Accumulated(Loop):
    """Micro-batches, the last of which is small; the loss is divided by their number, and gradients are clipped."""

    def run(self, model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        for x_part, y_part in zip(x.split(3), y.split(3)):
            (self.loss(model(x_part), y_part) / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    def truth(self, model: Any, x: Tensor, y: Tensor) -> list[Round]:
        found = []
        for x_part, y_part in zip(x.split(3), y.split(3)):
            output, hidden = model.opened(x_part)
            found.append(([hidden], self.loss(output, y_part) / 3))
        return found


class Closure(Loop):
    def run(self, model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


class Lbfgs(Closure):
    """Calls the closure several times in a step: the gradients of the last call count, for others were zeroed."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.LBFGS(model.parameters(), 0.1, max_iter=4)

    def truth(self, model: Any, x: Tensor, y: Tensor) -> list[Round]:
        model = copy.deepcopy(model)
        optimizer = self.optimizer(model)
        optimizer.load_state_dict(copy.deepcopy(self.before))
        calls: list[Round] = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(model(x), y)
            loss.backward()
            # The weights change in place before the next call, so the gradients are taken from a copy of them.
            output, hidden = copy.deepcopy(model).opened(x)
            calls.append(([hidden], self.loss(output, y)))
            return loss

        optimizer.step(closure)
        assert len(calls) == 4
        return calls[-1:]

    def run(self, model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        super().run(model, optimizer, x, y)
        self.before = copy.deepcopy(optimizer.state_dict())


class Discarded(Loop):
    """A loss of another network runs through this one, and its gradients are zeroed."""

    def run(self, model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        model(x.flip(0) * 3).square().sum().backward()
        optimizer.zero_grad(set_to_none=False)
        super().run(model, optimizer, x, y)
        model(x * 2).sum().backward()
        optimizer.zero_grad()


class Penalized(Loop):
    """A gradient penalty: one backward pass inside the loss, by ``autograd.grad``, and one through it."""

    def penalty(self, output: Tensor, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        return 0.1 * slope.square().sum(1).mean()

    def run(self, model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        x = x.clone().requires_grad_()
        output = model(x)
        (self.loss(output, y) + self.penalty(output, x)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def truth(self, model: Any, x: Tensor, y: Tensor) -> list[Round]:
        x = x.clone().requires_grad_()
        output, hidden = model.opened(x)
        return [([hidden], self.loss(output, y) + self.penalty(output, x))]


class Inputs(Loop):
    """Says which tensors get a gradient."""

    def run(self, model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        model(x * 2).sum().backward(inputs=list(model.head.parameters()))
        optimizer.zero_grad()
        self.loss(model(x), y).backward(inputs=list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()


class Scaled(Loop):
    """A gradient scaler that gxd is not told of, whose scale grows."""

    def __init__(self) -> None:
        self.scalers: dict[int, Any] = {}

    def run(self, model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        options = {"init_scale": 8.0, "growth_interval": 2, "growth_factor": 4.0}
        scaler = self.scalers.setdefault(id(optimizer), torch.amp.GradScaler("cpu", **options))
        scaler.scale(self.loss(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


class Functional(Loop):
    """The model is called with a dict of its own parameters."""

    def run(self, model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        output = torch.func.functional_call(model, dict(model.named_parameters()), (x,))
        self.loss(output, y).backward()
        optimizer.step()
        optimizer.zero_grad()


class Evaluated(Loop):
    """Validation in between, in every way."""

    def run(self, model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        loss = self.loss(model(x), y)
        with torch.no_grad():
            model(x * 5)
        with torch.inference_mode():
            model(x * 7)
        model.eval()
        model(x * 9)
        model.train()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class TwoOptimizers(Loop):
    def optimizer(self, model: Any) -> Any:
        hidden = [p for name, p in model.named_parameters() if not name.startswith("head")]
        return [torch.optim.SGD(hidden, 0.1), torch.optim.Adam(model.head.parameters(), 0.01)]

    def run(self, model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
        self.loss(model(x), y).backward()
        for one in optimizer:
            one.step()
            one.zero_grad()


class Checkpointed(Loop):
    """The middle of the network is computed again in the backward pass."""

    reentrant = False

    def prepared(self, model: Any) -> Any:
        model.reentrant = self.reentrant
        return model


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class CheckpointedAccumulated(Accumulated, CheckpointedReentrant):
    pass


class CheckpointedTwoPasses(TwoPasses, CheckpointedReentrant):
    pass


class CheckpointedDiscarded(Discarded, CheckpointedReentrant):
    pass


class CheckpointedWhole(Loop):
    """All of the model is computed again."""

    reentrant = True

    def run(self, model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        x = x.clone().requires_grad_()  # or reentrant checkpointing has no gradients
        self.loss(checkpoint(model, x, use_reentrant=self.reentrant), y).backward()
        optimizer.step()
        optimizer.zero_grad()


class CheckpointedWholeNot(CheckpointedWhole):
    reentrant = False


class CheckpointedTokens(CheckpointedWhole):
    build, shape = Tokens, (5, 4)
    targets, loss = MaskedTokens.targets, MaskedTokens.loss


class Compiled(Loop):
    """Its twin is not: of two models of a class, the second would run what was compiled for the first."""

    def prepared(self, model: Any) -> Any:
        torch.compiler.reset()
        return torch.compile(model, backend="eager")


LOOPS: dict[str, type[Loop]] = {
    "a classification": Loop,
    "images": Images,
    "a regression": Regression,
    "a loss between examples": Contrastive,
    "masked tokens": MaskedTokens,
    "two losses with a backward pass each": BackwardEach,
    "two forward passes and one backward pass": TwoPasses,
    "micro-batches": Accumulated,
    "a closure": Closure,
    "a closure that is called several times": Lbfgs,
    "passes whose gradients are zeroed": Discarded,
    "a gradient penalty": Penalized,
    "a backward pass to given tensors": Inputs,
    "a gradient scaler": Scaled,
    "a functional call": Functional,
    "an evaluation in between": Evaluated,
    "two optimizers": TwoOptimizers,
    "a checkpointed segment": Checkpointed,
    "a checkpointed segment, reentrant": CheckpointedReentrant,
    "a checkpointed segment, reentrant, in micro-batches": CheckpointedAccumulated,
    "a checkpointed segment, reentrant, in two passes": CheckpointedTwoPasses,
    "a checkpointed segment, reentrant, and passes whose gradients are zeroed": CheckpointedDiscarded,
    "a checkpointed model": CheckpointedWholeNot,
    "a checkpointed model, reentrant": CheckpointedWhole,
    "a checkpointed model of tokens, reentrant": CheckpointedTokens,
    "a compiled model": Compiled,
}


@contextmanager
def silent(loop: Loop) -> Iterator[None]:
    """No warning of ours, except that a compiled model is left at every layer."""
    with warnings.catch_warnings():
        for kind in (gxd.ObservationWarning, gxd.NonFiniteWarning, gxd.CompileWarning):
            warnings.simplefilter("error", kind)
        if isinstance(loop, Compiled):
            warnings.simplefilter("ignore", gxd.CompileWarning)
        yield


def attached(loop: Loop, rate: float) -> tuple[Any, Any, Any, gxd.Attachment]:
    model = loop.build()
    optimizer = loop.optimizer(model)
    plan = gxd.find_units(model, torch.zeros(2, *loop.shape, dtype=torch.float64))
    called = loop.prepared(model)
    method = gxd.method("gxd", replacement_rate=rate, maturity=2, decay=DECAY)
    return model, called, optimizer, gxd.attach(model, optimizer, method, plan=plan)


@pytest.mark.parametrize("name", LOOPS)
def test_utilities_are_those_of_plain_autograd_and_a_rate_of_zero_is_plain_training(name: str):
    loop, plain = LOOPS[name](), LOOPS[name]()
    model, called, optimizer, resets = attached(loop, 0.0)
    twin = plain.build()
    its_optimizer = plain.optimizer(twin)
    its_call = twin if isinstance(plain, Compiled) else plain.prepared(twin)
    if isinstance(plain, Lbfgs):
        plain.before = copy.deepcopy(its_optimizer.state_dict())
    naive = Naive(twin.groups)
    for x, y in loop.batches():
        naive.step(plain.truth(twin, x, y))
        plain.run(its_call, its_optimizer, x, y)
        with silent(loop):
            loop.run(called, optimizer, x, y)
        torch.testing.assert_close(resets.utilities(), naive.found(), rtol=1e-8, atol=1e-12)
    assert same(dict(model.state_dict()), dict(twin.state_dict()))
    mine, its = optimizer, its_optimizer
    for one, other in zip(*(each if isinstance(each, list) else [each] for each in (mine, its))):
        assert same(one.state_dict()["state"], other.state_dict()["state"])
    assert resets.nonfinite_observations == 0


@pytest.mark.parametrize("name", [name for name in LOOPS if LOOPS[name] is not Lbfgs])  # which is refused
def test_units_of_every_layer_are_reset(name: str):
    loop = LOOPS[name]()
    _, called, optimizer, resets = attached(loop, 0.2)
    hit: set[str] = set()
    resets.on_reset(hit.update)
    for x, y in loop.batches():
        with silent(loop):
            loop.run(called, optimizer, x, y)
    assert hit == set(resets.utilities())
    assert all(bool(utility.isfinite().all()) for utility in resets.utilities().values())


def test_an_optimizer_whose_state_a_reset_cannot_be_carried_over_to_is_refused_with_the_remedy():
    loop = Lbfgs()
    _, called, optimizer, _ = attached(loop, 0.2)
    with pytest.raises(gxd.PlanError, match=r"LBFGS .*Train with another optimizer"):
        for x, y in loop.batches():
            loop.run(called, optimizer, x, y)


# --- one compiled step ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Loop, MaskedTokens])
def test_a_compiled_step_sees_the_same(kind: type[Loop]):
    loop = kind()
    model, _, optimizer, resets = attached(loop, 0.0)
    step = gxd.compiled_step(model, optimizer, loop.loss, resets)
    twin = loop.build()
    its_optimizer, naive = loop.optimizer(twin), Naive(twin.groups)
    for x, y in loop.batches():
        naive.step(loop.truth(twin, x, y))
        loop.run(twin, its_optimizer, x, y)
        with silent(loop):
            step(x, y)
        torch.testing.assert_close(resets.utilities(), naive.found(), rtol=1e-7, atol=1e-10)
    assert step.why_eager is None
    torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()), rtol=1e-10, atol=1e-12)


# --- two processes ----------------------------------------------------------------------------------------------------


class Alone(Loop):
    """A step in a process that has every other example; ``parts``: in how many micro-batches."""

    parts = 1
    checkpointed: bool | None = None
    discards = False

    def prepared(self, model: Any) -> Any:
        model.reentrant = self.checkpointed
        return model

    def run(self, model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        if self.discards:
            model(x * 3).square().sum().backward()
            optimizer.zero_grad()
        for number, (x_part, y_part) in enumerate(zip(x.chunk(self.parts), y.chunk(self.parts))):
            last = number == self.parts - 1
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(last)
            later = isinstance(model, DistributedDataParallel) and not last
            with model.no_sync() if later else nullcontext():
                (self.loss(model(x_part), y_part) / self.parts).backward()
        optimizer.step()
        optimizer.zero_grad()

    def truth(self, model: Any, x: Tensor, y: Tensor) -> list[Round]:
        """Of all examples: those of the first process are followed by those of the second."""
        found = []
        chunks = zip(*(one[rank::2].chunk(self.parts) for one in (x, y) for rank in (0, 1)))
        for first, second, its, others in chunks:
            output, hidden = model.opened(torch.cat([first, second]))
            found.append(([hidden], self.loss(output, torch.cat([its, others]))))
        return found


class InParts(Alone):
    parts = 2


class WithCheckpoints(Alone):
    checkpointed = False


class WithReentrantCheckpoints(Alone):
    checkpointed = True


class WithAnother(Alone):
    discards = True


SHARED = {"ddp": DistributedDataParallel, "fsdp": fully_shard}
CASES = {
    f"{how}, {name}": (how, loop)
    for how in SHARED
    for name, loop in [
        ("whole batches", Alone),
        ("micro-batches", InParts),
        ("checkpointed", WithCheckpoints),
        ("checkpointed, reentrant", WithReentrantCheckpoints),
        ("another loss", WithAnother),
    ]
    if how == "ddp" or loop is not WithAnother  # under FSDP2 all backward passes count
}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def shared(how: str, kind: type[Loop], rank: int, rate: float | None) -> dict[str, Any]:
    """What came of a training on every other example, at a rate; None: without gxd."""
    loop = kind()
    model = loop.build()
    plan = gxd.find_units(model, torch.zeros(2, *loop.shape, dtype=torch.float64))
    called = SHARED[how](loop.prepared(model))
    optimizer = loop.optimizer(model)
    resets, chosen = None, []
    if rate is not None:
        method = gxd.method("gxd", replacement_rate=rate, maturity=2, decay=DECAY)
        resets = gxd.attach(called, optimizer, method, plan=plan)
        resets.on_reset(lambda units: chosen.append({name: index.tolist() for name, index in units.items()}))
    with silent(loop):
        for x, y in loop.batches():
            loop.run(called, optimizer, x[rank::2], y[rank::2])
    return {
        "parameters": {name: whole(p) for name, p in model.named_parameters()},
        "utilities": {} if resets is None else resets.utilities(),
        "references": {} if resets is None else resets.references(),
        "resets": chosen,
    }


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = {
        name: {rate: shared(how, loop, rank, rate) for rate in (None, 0.0, 0.2)} for name, (how, loop) in CASES.items()
    }
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("no gloo")
    folder: Path = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_reset_the_same_units_and_end_with_the_same(ranks: list, name: str):
    first, second = (rank[name] for rank in ranks)
    assert same(first, second)
    assert {group for units in first[0.2]["resets"] for group in units} == set(Mlp.groups)


@pytest.mark.parametrize("name", CASES)
def test_a_rate_of_zero_is_plain_training_of_two_processes(ranks: list, name: str):
    assert same(ranks[0][name][0.0]["parameters"], ranks[0][name][None]["parameters"])


@pytest.mark.parametrize("name", CASES)
def test_utilities_of_two_processes_are_those_of_all_their_examples(ranks: list, name: str):
    loop = CASES[name][1]()
    twin = loop.build()
    optimizer, naive = loop.optimizer(twin), Naive(twin.groups)
    for x, y in loop.batches():
        naive.step(loop.truth(twin, x, y))
        Loop.run(loop, twin, optimizer, x, y)
    found = ranks[0][name][0.0]
    torch.testing.assert_close(found["utilities"], naive.found(), rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(found["parameters"], dict(twin.state_dict()), rtol=1e-10, atol=1e-12)
