"""What all events have in common: when they happen, what becomes of a boundary that is never called, wrong options, and
that each of them goes on a residual network with BatchNorm and on a transformer.
"""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gxd
from gxd.methods import event
from gxd.testing import Case
from gxd.testing.laws import a_run_is_resumed_exactly_also_between_two_micro_batches
from gxd.testing.training import Training
from tests import models
from tests.methods.contract import case_of
from tests.rig import X, Y, mlp, plan_of, refused, same, sgd

EVENTS = ["fire", "dash", "head_reset", "optimizer_reset", "full_reset", "hare_and_tortoise", "plasticity_injection"]
BY_CLOCK = [name for name in EVENTS if "every" in gxd.methods()[name].options]
AT_BOUNDARIES = [case_of(name, every=0) for name in BY_CLOCK]


def train(model: nn.Module, optimizer: Any, x: Any = X, y: Any = Y) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


class Counting(event.Event):
    """Counts its events."""

    name = "counting"

    def begin(self, host: gxd.Host) -> int:
        return 0

    def act(self, host: gxd.Host, own: int) -> int:
        return own + 1


def counted(every: int | None) -> tuple[nn.Module, Any, gxd.Attachment]:
    model = mlp()
    optimizer = sgd(model)
    return model, optimizer, gxd.attach(model, optimizer, Counting(every))


@pytest.mark.parametrize(("every", "after"), [(0, [0, 0, 1, 1, 1, 2]), (2, [0, 1, 1, 2, 2, 3]), (None, [0] * 6)])
def test_an_event_happens_at_boundaries_or_every_so_many_steps_or_never(every: int | None, after: list[int]):
    model, optimizer, attached = counted(every)
    found = []
    for step in range(6):
        train(model, optimizer)
        if step % 3 == 2:
            attached.boundary()
        found.append(attached._parts[0].state.own)
    assert found == after
    assert attached._parts[0].state[:2] == (6, 2)


def test_that_no_task_ends_is_said_within_a_thousand_steps():
    model, optimizer, _ = counted(0)
    with pytest.warns(gxd.ObservationWarning, match=r"done nothing yet. Call boundary\(\)"):
        for _ in range(1000):
            train(model, optimizer)


@pytest.mark.parametrize(("every", "boundaries", "words"), [(0, 0, 1), (0, 1, 0), (2, 0, 0), (None, 0, 0)])
def test_an_event_that_waits_for_boundaries_says_so_once_if_none_comes(
    every: int | None, boundaries: int, words: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(event, "MANY_STEPS", 4)
    model, optimizer, attached = counted(every)
    for _ in range(boundaries):
        attached.boundary()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            train(model, optimizer)
    assert len(caught) == words
    for warning in caught:
        assert issubclass(warning.category, gxd.ObservationWarning)
        assert all(word in str(warning.message) for word in ("counting", "4 steps", "boundary()", "every="))


@pytest.mark.parametrize("case", AT_BOUNDARIES, ids=str)
def test_an_event_at_boundaries_is_resumed_exactly(case: Case):
    a_run_is_resumed_exactly_also_between_two_micro_batches(case)


@pytest.mark.parametrize("name", BY_CLOCK)
def test_an_event_at_a_boundary_is_the_same_as_by_the_clock_at_that_step(name: str):
    """The boundary of a training comes after the third step."""
    by_clock, at_boundary = (Training(gxd.method(name, every=every)).run(stop=5) for every in (3, 0))
    assert same(by_clock.weights, at_boundary.weights)
    never = Training(gxd.method(name, every=None)).run(stop=5)
    assert not same(by_clock.weights, never.weights)


@pytest.mark.parametrize("network", ["resnet", "transformer"])
@pytest.mark.parametrize("name", EVENTS)
def test_events_go_on_residual_batchnorm_networks_and_on_transformers(name: str, network: str):
    """Training goes on after two of them: the loss is finite, and falls."""
    model, batch, _ = models.make(network)
    if name == "plasticity_injection":
        gxd.injectable(model, "head")
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    attached = gxd.attach(model, optimizer, gxd.method(name))
    x, y = batch(16)
    for task in range(3):
        before = F.cross_entropy(model(x), y).item()
        for _ in range(8):
            train(model, optimizer, x, y)
        assert F.cross_entropy(model(x), y).item() < before
        if task < 2:
            attached.boundary([(x, y)], F.cross_entropy)


@pytest.mark.parametrize("network", ["resnet", "transformer"])
@pytest.mark.parametrize("name", EVENTS)
def test_frozen_parameters_are_left_alone(name: str, network: str):
    model, batch, _ = models.make(network)
    if name == "plasticity_injection":
        gxd.injectable(model, "head")
    frozen = [module for n, module in model.named_modules() if n in ("stem", "bn", "embed", "attn")]
    for module in frozen:
        module.requires_grad_(False).eval()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    attached = gxd.attach(model, optimizer, gxd.method(name))
    x, y = batch(16)
    before = copy.deepcopy([module.state_dict() for module in frozen])
    train(model, optimizer, x, y)
    attached.boundary([(x, y)], F.cross_entropy)
    assert frozen and same([module.state_dict() for module in frozen], before)


@pytest.mark.parametrize("name", ["fire", "dash", "head_reset", "optimizer_reset", "full_reset", "hare_and_tortoise"])
def test_optimizer_state_that_is_not_known_is_refused_and_nothing_is_changed(name: str):
    from tests.optimizers import Kept

    model = mlp()
    optimizer = Kept(model.parameters(), lambda p: {"mystery": torch.ones_like(p)})
    attached = gxd.attach(model, optimizer, gxd.method(name))
    before = copy.deepcopy(model.state_dict())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    message = refused(optimizer.step, gxd.PlanError, ("mystery", "register_optimizer_state"))
    assert "Kept" in message
    refused(lambda: attached.boundary([(X, Y)], F.cross_entropy), gxd.PlanError, ("mystery",))
    assert same(model.state_dict(), before)


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        *((name, {"every": value}, ValueError, (f"every={value!r}",)) for name in BY_CLOCK for value in (-1, 1.5, "a")),
        ("fire", {"rounds": 0}, ValueError, ("rounds=0", "1 or more")),
        ("fire", {"include": 3}, TypeError, ("include=3", "pattern")),
        ("fire", {"exclude": [1]}, TypeError, ("exclude=[1]", "pattern")),
        ("fire", {"optimizer": "rest"}, ValueError, ("optimizer='rest'", "mean 'reset'")),
        ("fire", {"round": 5}, TypeError, ("no option 'round'", "rounds")),
        ("dash", {"alpha": 1.5}, ValueError, ("alpha=1.5", "from 0 to 1")),
        ("dash", {"minimum": -0.1}, ValueError, ("minimum=-0.1", "from 0 to 1")),
        ("dash", {"optimizer": None}, ValueError, ("optimizer=None",)),
        ("dash", {"every": 5}, TypeError, ("no option 'every'",)),
        ("head_reset", {"head": 3}, TypeError, ("head=3", "name of a module")),
        ("hare_and_tortoise", {"decay": 1.1}, ValueError, ("decay=1.1", "from 0 to 1")),
        ("hare_and_tortoise", {"decay": "slow"}, ValueError, ("decay='slow'",)),
        ("plasticity_injection", {"at": -3}, ValueError, ("at=-3", "0 or more")),
        ("plasticity_injection", {"every": 3}, TypeError, ("no option 'every'", "at")),
    ],
)
def test_a_wrong_option_is_refused_with_its_value(name: str, options: dict[str, Any], error: Any, words: tuple):
    refused(lambda: gxd.method(name, **options), error, words)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("fire", {"include": "fc3"}, ("include='fc3'", "mean 'fc2' or 'fc1'", "fc1, fc2, head")),
        ("fire", {"exclude": ["fc1", "hed"]}, ("exclude='hed'", "mean 'head'")),
        ("fire", {"exclude": "*"}, ("excluded",)),
        ("head_reset", {"head": "heads"}, ("head='heads'", "mean 'head'")),
        ("head_reset", {"head": "act1"}, ("head='act1'", "no parameter")),
        ("head_reset", {"head": ""}, ("head=''",)),
        ("plasticity_injection", {}, ("gxd.injectable(model, 'head')", "before the optimizer")),
    ],
)
def test_what_a_model_does_not_have_is_refused_when_the_method_is_attached(name: str, options: Any, words: tuple):
    model = mlp()
    optimizer = sgd(model)
    refused(lambda: gxd.attach(model, optimizer, gxd.method(name, **options)), gxd.PlanError, words)
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("name", EVENTS)
def test_the_end_of_a_task_after_close_is_refused_and_changes_nothing(name: str):
    model = gxd.injectable(mlp(), "head") if name == "plasticity_injection" else mlp()
    optimizer = sgd(model)
    attached = gxd.attach(model, optimizer, gxd.method(name))
    train(model, optimizer)
    attached.close()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    task = ([(X, Y)], F.cross_entropy)
    refused(lambda: attached.boundary(*task), RuntimeError, ("boundary() after close()", "make a new one"))
    assert same((model.state_dict(), optimizer.state_dict()), before)


def test_a_network_that_is_drawn_anew_is_new_to_every_other_method():
    model = mlp()
    optimizer = sgd(model)
    methods = [gxd.method("continual_backprop", utility="activation", maturity=2), gxd.method("full_reset")]
    attached = gxd.attach(model, optimizer, *methods, plan=plan_of())
    for _ in range(5):
        train(model, optimizer)
    assert attached.ages()["fc1"].tolist() == [5] * 5 and all(r.any() for r in attached.references().values())
    attached.boundary()
    for values in (attached.ages(), attached.utilities(), attached.references()):
        assert not any(value.any() for value in values.values())
    train(model, optimizer)
    assert attached.ages()["fc1"].tolist() == [1] * 5


@pytest.mark.parametrize("name", ["fire", "dash"])
def test_an_embedding_that_a_head_shares_stays_as_it_is(name: str):
    """Scaled to the length of a layer, or row by row, its words would mean something else to all layers behind it."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 5, bias=False))
    model[4].weight = model[0].weight
    optimizer, x = sgd(model), torch.tensor([[0, 1, 2], [2, 3, 4]])
    attached = gxd.attach(model, optimizer, gxd.method(name))
    before, hidden = model[0].weight.detach().clone(), model[2].weight.detach().clone()
    attached.boundary([(x, torch.tensor([1, 2]))], F.cross_entropy)
    assert torch.equal(model[4].weight, before) and not torch.equal(model[2].weight, hidden)
