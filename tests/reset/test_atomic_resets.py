"""A reset that fails half-way, at whatever write, leaves everything as it was."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gxd
from tests.optimizers import MADGRAD, LookaheadInLists
from tests.rig import same


class Stopped(BaseException):
    """As a KeyboardInterrupt: no Exception."""


class FailAt(TorchDispatchMode):
    """Raises at one of the operations that write to a tensor: before it, or when it has written."""

    def __init__(self, number: int, after: bool, error: type[BaseException]) -> None:
        super().__init__()
        self.number, self.after, self.error = number, after, error

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op._schema.is_mutable:
            self.number -= 1
            if self.number == -1 and not self.after:
                raise self.error("stopped")
        result = op(*args, **(kwargs or {}))
        if op._schema.is_mutable and self.number == -1 and self.after:
            self.number -= 1
            raise self.error("stopped")
        return result


def network() -> nn.Sequential:
    """Norms with and without buffers, a grouped convolution, a bias and none."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, groups=2, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
        nn.LayerNorm(5),
        nn.Tanh(),
        nn.Linear(5, 3),
    )


X = torch.randn(4, 2, 7, 7, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 2, 0])
PLAN = gxd.find_units(network(), X)
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
    "madgrad": MADGRAD,
    "lookahead": lambda p: LookaheadInLists(torch.optim.SGD(p, 0.1, momentum=0.9)),
}


def state_of(optimizer: Any) -> Any:
    inside = getattr(optimizer, "optimizer", optimizer)
    return list(inside.state.values()), getattr(optimizer, "slow_weights", None)


def everything(model: nn.Module, optimizer: Any, generator: torch.Generator) -> Any:
    return copy.deepcopy((dict(model.state_dict()), state_of(optimizer), generator.get_state()))


def trained(name: str) -> tuple[nn.Module, Any]:
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(2):
        for p in model.parameters():
            p.grad = None
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(("after", "error"), [(False, RuntimeError), (True, Stopped), (True, KeyboardInterrupt)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whichever_write_fails_everything_is_as_it_was(name: str, after: bool, error: Any):
    model, optimizer = trained(name)
    generator = torch.Generator().manual_seed(2)
    references = {group.name: torch.randn(len(group.views), group.size) for group in PLAN.groups}
    units = {group.name: [0, group.size - 1] for group in PLAN.groups}
    before = everything(model, optimizer, generator)
    for number in range(1000):
        mode = FailAt(number, after, error)
        try:
            with mode:
                gxd.reset_units(
                    model,
                    PLAN,
                    units,
                    references=references,
                    optimizer=optimizer,
                    generator=generator,
                    step_policy="reset",
                )
        except error:
            assert same(everything(model, optimizer, generator), before), f"write {number}"
        else:
            break
    assert number > 30 and not same(everything(model, optimizer, generator), before)
    other, its = trained(name)  # and a reset after many that failed is what it would have been
    gxd.reset_units(
        other,
        PLAN,
        units,
        references=references,
        optimizer=its,
        generator=torch.Generator().manual_seed(2),
        step_policy="reset",
    )
    assert same(dict(other.state_dict()), dict(model.state_dict())) and same(state_of(its), state_of(optimizer))


def test_an_initialiser_that_fails_leaves_everything_as_it_was():
    model, optimizer = trained("adam")
    calls = []

    def init(tensor: Tensor, generator: torch.Generator) -> None:
        tensor.normal_(generator=generator)
        calls.append(tensor)
        if len(calls) == 5:
            raise RuntimeError("out of ideas")

    plan = PLAN.select(init={"*": init})
    calls[:] = calls[:3]
    generator = torch.Generator().manual_seed(2)
    before = everything(model, optimizer, generator)
    with pytest.raises(RuntimeError, match="ideas"):
        gxd.reset_units(model, plan, {g.name: [1] for g in plan.groups}, optimizer=optimizer, generator=generator)
    assert same(everything(model, optimizer, generator), before)


def test_the_global_generator_is_put_back_too():
    model, optimizer = trained("adam")
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError), FailAt(12, False, RuntimeError):
        gxd.reset_units(model, PLAN, {g.name: [1] for g in PLAN.groups}, optimizer=optimizer)
    assert torch.equal(torch.get_rng_state(), before)


class Training:
    """ContinualBackprop up to the step of a reset, which fails."""

    def __init__(self) -> None:
        self.model = network()
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.mode: FailAt | None = None
        self.before: Any = None
        self.optimizer.register_step_post_hook(self.begin)  # before gxd's own
        self.cbp = gxd.ContinualBackprop(
            self.model, self.optimizer, plan=PLAN, utility="gxd", maturity=2, replacement_rate=0.3
        )
        self.train()
        self.train()

    def train(self) -> None:
        logits = self.model(X)
        self.cbp.observe(logits, Y)
        self.optimizer.zero_grad()
        F.cross_entropy(logits, Y).backward()
        self.optimizer.step()

    def everything(self) -> Any:
        cbp = self.cbp.state_dict()
        for part in cbp["methods"].values():
            del part["observed"]  # by the step that begins
        return copy.deepcopy((cbp, everything(self.model, self.optimizer, self.cbp._parts[0].host.generator)))

    def begin(self, *_: Any) -> None:
        self.before = self.everything()
        if self.mode is not None:
            self.mode.__enter__()

    def fail(self, number: int, after: bool) -> bool:
        self.mode = FailAt(number, after, Stopped)
        try:
            self.train()
        except Stopped:
            return True
        else:
            return False
        finally:
            self.mode.__exit__(None, None, None)
            self.mode = None


@pytest.mark.parametrize("after", [False, True])
def test_statistics_schedules_and_counts_are_as_they_were_too_and_the_reset_is_due_again(after: bool):
    failed = 0
    for number in range(0, 1000, 5):
        training = Training()
        assert training.cbp.total_resets == 0
        if not training.fail(number, after):
            break
        failed += 1
        assert same(training.everything(), training.before), f"write {number}"
        assert training.cbp.last_resets == {} and training.cbp._parts[0].scorer.observer.active
        training.train()
        assert training.cbp.total_resets > 0
    assert failed > 10
