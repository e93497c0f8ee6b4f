"""Modules that the trace did not see: training says so when they run."""

import copy
import dataclasses
import pickle
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd
from tests.rig import X, Y


class Optional(nn.Module):
    """An auxiliary head and an adapter that run when they are asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.aux = nn.ModuleDict({"head": nn.Linear(6, 3)})
        self.adapter = nn.Linear(6, 6)

    def forward(self, x: Tensor, aux: bool = False, adapt: bool = False) -> Tensor:
        h = self.body(x).tanh()
        if adapt:
            h = h + self.adapter(h)
        return self.head(h) + (self.aux["head"](h) if aux else 0)


@cache
def plan_of(unseen: tuple[str, ...] = ("aux.head", "adapter")) -> gxd.UnitPlan:
    return dataclasses.replace(gxd.find_units(Optional(), X), unseen=unseen)


def attached(utility: str = "gxd", **options: Any) -> tuple[Optional, torch.optim.Optimizer, gxd.ContinualBackprop]:
    model = Optional()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"plan": plan_of(), **options}
    return model, optimizer, gxd.ContinualBackprop(model, optimizer, utility=utility, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, cbp: gxd.ContinualBackprop, **call: bool) -> None:
    logits = model(X, **call)
    cbp.observe(logits, Y)
    F.cross_entropy(logits, Y).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def of_modules(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if w.category is gxd.ObservationWarning]


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


@pytest.mark.parametrize("score_every", [1, 3])
@pytest.mark.parametrize("utility", ["gxd", "activation"])
def test_a_module_that_the_trace_did_not_see_is_named_once_when_training_runs_it(
    utility: str, score_every: int, caught: list
):
    parts = attached(utility, score_every=score_every)
    for _ in range(2):
        train(*parts)
    assert of_modules(caught) == []
    for _ in range(3):
        train(*parts, aux=True)
    (message,) = of_modules(caught)
    for word in ("'aux.head'", "trace", "fresh units", "columns", "example_inputs", "list"):
        assert word in message
    train(*parts, aux=True, adapt=True)
    assert ["'adapter'" in message for message in of_modules(caught)] == [False, True]


def test_its_hook_is_gone_after_the_warning_and_all_are_after_close(caught: list):
    parts = attached()
    _, _, plain = attached(plan=plan_of(()))
    assert hooks(parts[0]) == hooks(plain.model) + 2
    train(*parts, aux=True)
    assert hooks(parts[0]) == hooks(plain.model) + 1
    parts[2].close()
    assert hooks(parts[0]) == 0


def test_evaluation_passes_and_passes_without_gradients_are_no_training(caught: list):
    model, _, _ = attached()
    with torch.no_grad():
        model(X, aux=True)
    model.eval()
    model(X, aux=True)
    assert of_modules(caught) == []


def test_a_name_that_the_model_does_not_have_any_more_is_passed_over(caught: list):
    parts = attached(plan=plan_of(("aux.gone", "adapter", "gone")))
    train(*parts, adapt=True)
    assert len(of_modules(caught)) == 1


def test_a_selection_of_the_plan_keeps_what_was_not_seen():
    assert plan_of().select(rates={"*": 0.5}).unseen == ("aux.head", "adapter")
    _, _, cbp = attached()
    cbp.load_state_dict(cbp.state_dict())
    assert cbp.plan.unseen == ("aux.head", "adapter")
    assert gxd.UnitPlan(()).unseen == ()


def test_copies_of_the_model_alone_say_nothing(caught: list):
    model, _, _ = attached()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(X, aux=True).sum().backward()
    assert of_modules(caught) == []


def test_a_copy_of_all_warns_by_itself_of_what_the_original_has_not_named(caught: list):
    parts = attached()
    train(*parts, aux=True)
    twin = copy.deepcopy(parts)
    train(*twin, aux=True, adapt=True)
    assert ["'adapter'" in message for message in of_modules(caught)] == [False, True]
    train(*parts, aux=True, adapt=True)
    assert ["'adapter'" in message for message in of_modules(caught)] == [False, True, True]
    assert hooks(twin[0]) == hooks(parts[0])


class Switched(Optional):
    """What runs is an attribute, which a compiled step follows."""

    run_aux = run_adapter = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, self.run_aux, self.run_adapter)


def test_a_compiled_step_warns_when_it_is_traced_and_stays_compiled(caught: list, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gxd.compile.program.compile_graph", lambda graph, example: graph)
    model = Switched()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cbp = gxd.ContinualBackprop(model, optimizer, plan=plan_of())
    step = gxd.compiled_step(model, optimizer, F.cross_entropy, cbp)
    step(X, Y)
    assert of_modules(caught) == []
    for name in ("run_aux", "run_adapter"):
        setattr(model, name, True)
        for _ in range(3):
            step(X, Y)
    assert ["'adapter'" in message for message in of_modules(caught)] == [False, True]
    assert step.why_eager is None
    step._eager(X, Y)
    assert len(of_modules(caught)) == 2
    assert not cbp._parts[0].scorer.observer.unseen
