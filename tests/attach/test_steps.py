"""Which steps of an optimizer count, and what is said when none comes."""

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer

import gxd
from tests.rig import X, Y, attach, mlp, same

UTILITIES = ["gxd", "activation", "loss_gradient"]


def steps(cbp: gxd.ContinualBackprop) -> set[int]:
    return {int(age) for ages in cbp.ages().values() for age in ages}


def closure_of(model: torch.nn.Module, cbp: gxd.ContinualBackprop, optimizer: Optimizer) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        logits = model(X)
        cbp.observe(logits, Y)
        loss = F.cross_entropy(logits, Y)
        loss.backward()
        return loss

    return closure


def parent() -> type[SGD]:
    """A class of optimizers that no other test has made an instance of."""

    class Parent(SGD):
        def step(self, closure: Any = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        if p.grad is not None:
                            p -= group["lr"] * p.grad
            return loss

    return Parent


def plain(base: type[SGD]) -> type[Optimizer]:
    return base


def closure_first(base: type[SGD]) -> type[Optimizer]:
    class ClosureFirst(base):  # type: ignore[misc, valid-type]
        def step(self, closure: Any = None) -> Any:
            with torch.enable_grad():
                loss = None if closure is None else closure()
            super().step()
            return loss

    return ClosureFirst


def closure_passed_on(base: type[SGD]) -> type[Optimizer]:
    class ClosurePassedOn(base):  # type: ignore[misc, valid-type]
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    return ClosurePassedOn


def twice(base: type[SGD]) -> type[Optimizer]:
    class Twice(base):  # type: ignore[misc, valid-type]
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            super().step()
            return loss

    return Twice


def closure_between(base: type[SGD]) -> type[Optimizer]:
    class ClosureBetween(base):  # type: ignore[misc, valid-type]
        def step(self, closure: Any = None) -> Any:
            super().step()
            with torch.enable_grad():
                loss = None if closure is None else closure()
            super().step()
            return loss

    return ClosureBetween


def grandchild(base: type[SGD]) -> type[Optimizer]:
    return closure_first(closure_passed_on(base))  # type: ignore[arg-type]


CLASSES = [plain, closure_first, closure_passed_on, twice, closure_between, grandchild]


@pytest.mark.parametrize("score_every", [1, 3])
@pytest.mark.parametrize("with_closure", [True, False])
@pytest.mark.parametrize("parents_made", [True, False])
@pytest.mark.parametrize("make", CLASSES)
def test_a_step_counts_once_however_many_steps_of_parents_it_calls(
    make: Callable[[type[SGD]], type[Optimizer]], parents_made: bool, with_closure: bool, score_every: int
):
    base = parent()
    cls = make(base)
    if parents_made:  # torch then runs the hooks in their steps, too
        for one in cls.__mro__[1:]:
            if issubclass(one, base):
                one([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    model = mlp()
    optimizer = cls(model.parameters(), lr=0.1)
    cbp = attach("gxd", model=model, optimizer=optimizer, score_every=score_every).cbp
    closure = closure_of(model, cbp, optimizer)
    for _ in range(6):
        if with_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    assert steps(cbp) == {6}


@pytest.mark.parametrize("utility", UTILITIES)
@pytest.mark.parametrize("make", [closure_first, twice])
def test_resets_do_not_depend_on_whether_the_parent_was_used_before(make: Any, utility: str):
    runs = []
    for parents_made in (True, False):
        base = parent()
        cls = make(base)
        if parents_made:
            base([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        model = mlp()
        optimizer = cls(model.parameters(), lr=0.1)
        rig = attach(utility, model=model, optimizer=optimizer, maturity=1, replacement_rate=0.2)
        closure = closure_of(model, rig.cbp, optimizer)
        for _ in range(8):
            optimizer.step(closure)
        assert rig.cbp.total_resets > 0
        runs.append((rig.cbp.state_dict(), model.state_dict()))
    assert same(*runs)


def test_the_many_closures_of_a_line_search_are_one_step():
    model = mlp()
    optimizer = LBFGS(model.parameters(), lr=0.1, max_iter=5, line_search_fn="strong_wolfe")
    cbp = attach("gxd", model=model, optimizer=optimizer, replacement_rate=0.0).cbp  # its state cannot be reset
    for _ in range(3):
        optimizer.step(closure_of(model, cbp, optimizer))
    assert steps(cbp) == {3}


@pytest.mark.parametrize("parents_made", [True, False])
@pytest.mark.parametrize("where", ["before", "between", "after"])
def test_a_step_that_raised_does_not_count_and_the_next_one_does(where: str, parents_made: bool):
    base, fails = parent(), [False]

    class Fails(base):  # type: ignore[misc, valid-type]
        def fail_at(self, place: str) -> None:
            if place == where and fails[0]:
                raise RuntimeError("out of memory")

        def step(self, closure: Any = None) -> Any:
            self.fail_at("before")
            super().step()
            self.fail_at("between")
            super().step()
            self.fail_at("after")

    if parents_made:
        base([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    model = mlp()
    optimizer = Fails(model.parameters(), lr=0.1)
    cbp = attach("gxd", model=model, optimizer=optimizer).cbp
    for number in range(6):
        closure_of(model, cbp, optimizer)()
        fails[0] = number % 2 == 0
        with suppress(RuntimeError):
            optimizer.step()
        fails[0] = False
        if number == 2:  # at once again, as a trainer may do that has freed some memory
            optimizer.step()
    assert steps(cbp) == {4}


class Around(Optimizer):
    """An optimizer that steps another one, and may share its hooks as wrappers do that copy its attributes."""

    def __init__(self, inner: Optimizer, share: bool) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        if share:
            self._optimizer_step_post_hooks = inner._optimizer_step_post_hooks

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.parametrize("given", ["outer", "inner", "shared"])
def test_an_optimizer_inside_an_optimizer_counts_each_step_once(given: str):
    model = mlp()
    inner = SGD(model.parameters(), lr=0.1)
    outer = Around(inner, share=given == "shared")
    cbp = attach("gxd", model=model, optimizer=inner if given == "inner" else outer).cbp
    closure = closure_of(model, cbp, outer)
    for _ in range(2):
        outer.step(closure)
        closure()
        outer.step()
    assert steps(cbp) == {4}


def test_optimizers_that_step_in_several_threads_at_once_are_counted_each_by_itself():
    rigs = [
        attach("gxd", model=(model := mlp()), optimizer=closure_first(SGD)(model.parameters(), lr=0.1)) for _ in "ab"
    ]
    barrier = threading.Barrier(2)

    def run(rig: Any) -> None:
        body = closure_of(rig.model, rig.cbp, rig.optimizer)

        def closure() -> Tensor:
            barrier.wait(30)  # both are inside a step
            return body()

        for _ in range(5):
            rig.optimizer.step(closure)

    threads = [threading.Thread(target=run, args=(rig,)) for rig in rigs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [steps(rig.cbp) for rig in rigs] == [{5}, {5}]


def test_a_step_leaves_no_reference_to_what_it_looked_at():
    model = mlp()
    optimizer = closure_first(parent())(model.parameters(), lr=0.1)
    cbp = attach("gxd", model=model, optimizer=optimizer).cbp
    optimizer.step(closure_of(model, cbp, optimizer))
    before = len(gc.get_referrers(optimizer))
    for _ in range(5):
        optimizer.step(closure_of(model, cbp, optimizer))
    assert len(gc.get_referrers(optimizer)) == before


def test_a_step_of_parents_that_is_compiled_counts_once():
    model, cls = mlp(), closure_passed_on(SGD)
    optimizer = cls(model.parameters(), lr=0.1)
    SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    cbp = attach("gxd", model=model, optimizer=optimizer).cbp
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        closure_of(model, cbp, optimizer)()
        step()
    assert steps(cbp) == {3}


# ---- an optimizer that never steps


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def of_steps(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if w.category is gxd.ObservationWarning and "stepped" in str(w.message)]


@pytest.mark.parametrize("score_every", [1, 7])
@pytest.mark.parametrize("utility", UTILITIES)
def test_an_optimizer_that_was_made_anew_is_warned_of_once(utility: str, score_every: int, caught: list):
    rig = attach(utility, score_every=score_every)
    if score_every > 1:
        rig.train()  # the next steps are not scored
    rig.optimizer = SGD(rig.model.parameters(), lr=0.1)
    for _ in range(99):
        rig.train()
    assert of_steps(caught) == []
    for _ in range(150):
        rig.train()
    (message,) = of_steps(caught)
    for word in ("100", "made anew", "wrapper", "SAM", "accumulated"):
        assert word in message


@pytest.mark.parametrize("utility", UTILITIES)
def test_steps_in_between_and_passes_without_gradients_are_no_sign(utility: str, caught: list):
    rig = attach(utility)
    for _ in range(3):
        for _ in range(60):
            logits = rig.model(X)
            rig.cbp.observe(logits, Y)
            F.cross_entropy(logits, Y).backward()
        rig.optimizer.step()
        with torch.no_grad():
            for _ in range(200):
                rig.model(X)
    assert of_steps(caught) == []


class TwoSteps(Optimizer):
    """SAM: a step up the gradient, then a step of the base optimizer from there."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base

    def second_step(self) -> None:
        self.base.step()


def test_a_scheme_that_steps_its_base_optimizer_is_warned_of_and_the_base_optimizer_is_right(caught: list):
    for given in ("outer", "base"):
        model = mlp()
        outer = TwoSteps(SGD(model.parameters(), lr=0.1))
        cbp = attach("gxd", model=model, optimizer=outer if given == "outer" else outer.base).cbp
        for _ in range(110):
            closure_of(model, cbp, outer)()
            outer.second_step()
        assert len(of_steps(caught)) == 1
        assert steps(cbp) == ({0} if given == "outer" else {110})


def test_compiled_steps_count_as_steps(caught: list, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gxd.compile.program.compile_graph", lambda graph, example: graph)
    for utility in UTILITIES:
        rig = attach(utility, optimizer=SGD((model := mlp()).parameters(), lr=0.1), model=model)
        step = gxd.compiled_step(model, rig.optimizer, F.cross_entropy, rig.cbp)
        for _ in range(110):
            step(X, Y)
        assert step.why_eager is None
    assert of_steps(caught) == []
