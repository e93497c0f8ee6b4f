"""Plasticity injection: the output stays, the head is frozen, a fresh one learns, and a resume knows which is which."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd
from tests.rig import X, Y, mlp, refused, same


def attached(at: int | None = 0, build: Any = mlp, optimizer: Any = torch.optim.Adam, head: str = "head") -> Any:
    model = gxd.injectable(build(), head)
    made = optimizer(model.parameters(), 0.05)
    return model, made, gxd.attach(model, made, gxd.method("plasticity_injection", at=at))


def train(model: nn.Module, optimizer: Any, steps: int = 1, **zero: Any) -> None:
    for _ in range(steps):
        optimizer.zero_grad(**zero)
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()


def test_a_model_that_is_prepared_computes_and_learns_as_before():
    """The output bit for bit, gradients up to the rounding of terms that cancel."""
    plain, model = mlp(), gxd.injectable(mlp(), "head")
    assert torch.equal(model(X), plain(X))
    for one in (plain, model):
        optimizer = torch.optim.SGD(one.parameters(), 0.1, momentum=0.9)
        train(one, optimizer, 5)
    theirs = {name.replace("head.h.", "head."): p for name, p in model.named_parameters() if ".new" not in name}
    for name, p in plain.named_parameters():
        torch.testing.assert_close(theirs[name], p, rtol=1e-4, atol=1e-6)
    assert same(model.head.new.state_dict(), model.head.copy.state_dict())


@pytest.mark.parametrize("at", [0, 3])
def test_at_the_event_the_output_stays_and_from_then_on_the_fresh_head_is_trained(at: int):
    model, optimizer, attachment = attached(at)
    train(model, optimizer, 2)
    assert [p.requires_grad for p in model.head.parameters()] == [True, True, False, False, False, False]
    if at:
        train(model, optimizer)
    before = model(X).detach()
    if not at:
        attachment.boundary()
    assert torch.equal(model(X), before)
    assert [p.requires_grad for p in model.head.parameters()] == [False, False, True, True, False, False]
    frozen = copy.deepcopy((model.head.h.state_dict(), model.head.copy.state_dict()))
    new, trunk = model.head.new.weight.detach().clone(), model.fc1.weight.detach().clone()
    train(model, optimizer, 3)
    assert same((model.head.h.state_dict(), model.head.copy.state_dict()), frozen)
    assert not torch.equal(model.head.new.weight, new) and not torch.equal(model.fc1.weight, trunk)
    assert optimizer.state[model.head.new.weight]["step"] == 3  # its own, and new
    expected = model.head.h(h := features(model)) + model.head.new(h) - model.head.copy(h)
    torch.testing.assert_close(model(X), expected)


def features(model: nn.Module) -> Tensor:
    return model[:-1](X)


def test_the_fresh_head_learns_the_task_by_itself():
    """Public code installs modules that the optimizer never sees. Here the trunk stands still, and the loss falls."""
    model, optimizer, attachment = attached()
    attachment.boundary()
    model[:-1].requires_grad_(False)
    before = F.cross_entropy(model(X), Y).item()
    train(model, optimizer, 60)
    assert F.cross_entropy(model(X), Y).item() < 0.9 * before


def test_it_happens_once():
    model, optimizer, attachment = attached()
    train(model, optimizer, 2)
    attachment.boundary()
    train(model, optimizer, 2)
    model.head.new.bias.requires_grad_(False)  # as a user may
    attachment.boundary()
    assert not model.head.new.bias.requires_grad and model.head.new.weight.requires_grad


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_a_frozen_head_is_not_moved_by_what_the_optimizer_remembers(optimizer: Any):
    """Also where gradients are set to zero instead of None, and weights decay."""
    model, made, _ = attached(at=2, optimizer=optimizer)
    train(model, made, 2, set_to_none=False)
    frozen = copy.deepcopy(model.head.h.state_dict())
    train(model, made, 3, set_to_none=False)
    assert same(model.head.h.state_dict(), frozen)


@pytest.mark.parametrize("saved_at", [1, 4])
@pytest.mark.parametrize("loaded_at", [0, 1, 4])
def test_a_resume_takes_what_is_frozen_from_the_checkpoint(saved_at: int, loaded_at: int):
    """Into a model before or after its own event."""

    def run(start: int, stop: int, rig: Any) -> None:
        model, optimizer, attachment = rig
        for step in range(start, stop):
            train(model, optimizer)
            if step == 2:
                attachment.boundary()

    expected = attached()
    run(0, 7, expected)
    saver = attached()
    run(0, saved_at, saver)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in saver], file)
    file.seek(0)
    resumed = attached()
    run(0, loaded_at, resumed)
    resumed[1].zero_grad()
    for part, state in zip(resumed, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    run(saved_at, 7, resumed)
    assert same([part.state_dict() for part in resumed], [part.state_dict() for part in expected])
    flags = [[p.requires_grad for p in model.parameters()] for model, _, _ in (resumed, expected)]
    assert flags[0] == flags[1]


def test_a_load_before_the_event_leaves_alone_what_the_user_has_frozen():
    model, _, attachment = attached()
    model.head.h.bias.requires_grad_(False)
    attachment.load_state_dict(attachment.state_dict())
    assert not model.head.h.bias.requires_grad and model.head.h.weight.requires_grad


def test_units_that_the_prepared_module_reads_are_not_reset_and_the_others_are():
    model = gxd.injectable(mlp(), "head")
    plan = gxd.find_units(model, X)
    assert [group.name for group in plan.groups] == ["fc1"]
    assert any("fc2" in entry.name and "frozen" in entry.reason for entry in plan.skipped)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    methods = [gxd.method("redo", threshold=1e9, every=2), gxd.method("plasticity_injection")]
    attachment = gxd.attach(model, optimizer, *methods, plan=plan)
    train(model, optimizer, 2)
    attachment.boundary()
    train(model, optimizer, 2)
    assert attachment.total_resets == 10


class Deep(nn.Module):
    """A head of several layers, inside another module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(4, 5)
        self.heads = nn.ModuleDict({"q": nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))})

    def forward(self, x: Tensor) -> Tensor:
        return self.heads["q"](self.trunk(x).relu())


def test_a_head_may_have_layers_and_norms_and_be_anywhere():
    model, optimizer, attachment = attached(build=Deep, head="heads.q")
    train(model, optimizer, 3)
    before = model(X).detach()
    attachment.boundary()
    torch.testing.assert_close(model(X).detach(), before)
    train(model, optimizer, 3)
    assert model.heads.q.new[0].weight.requires_grad and not model.heads.q.h[3].weight.requires_grad


def test_the_seed_says_which_fresh_head_it_is_and_global_numbers_are_not_drawn():
    before = torch.get_rng_state()
    draws = []
    for seed in (0, 0, 1):
        model = mlp()
        torch.set_rng_state(before)
        draws.append(gxd.injectable(model, "head", seed=seed).head.new.weight.detach())
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert draws[0].abs().max() <= 1 / 6**0.5


def tied() -> nn.Module:
    model = mlp()
    model.fc1.extra = model.head.bias
    return model


@pytest.mark.parametrize(
    ("build", "head", "options", "error", "words"),
    [
        (mlp, "haed", {}, ValueError, ("head='haed'", "mean 'head'")),
        (mlp, "", {}, ValueError, ("head=''",)),
        (mlp, None, {}, ValueError, ("head=None",)),
        (mlp, "act1", {}, ValueError, ("'act1'", "no parameter")),
        (mlp, "head", {"seed": -1}, ValueError, ("seed=-1",)),
        (lambda: gxd.injectable(mlp(), "head"), "head", {}, ValueError, ("prepared already",)),
        (lambda: gxd.injectable(mlp(), "head"), "head.new", {}, ValueError, ("prepared already",)),
        (
            lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 3), nn.Dropout())),
            "0",
            {},
            ValueError,
            ("drops at random",),
        ),
        (tied, "head", {}, ValueError, ("shares a parameter with 'fc1'",)),
        (lambda: nn.DataParallel(mlp()), "head", {}, ValueError, ("DataParallel", "prepare the one inside")),
        (lambda: "model", "head", {}, TypeError, ("Module", "str")),
    ],
)
def test_what_cannot_be_prepared_is_refused_and_left_as_it_is(
    build: Any, head: Any, options: Any, error: Any, words: Any
):
    model = build()
    before = repr(model)
    refused(lambda: gxd.injectable(model, head, **options), error, words)
    assert repr(model) == before


def test_an_optimizer_that_does_not_have_the_fresh_head_is_refused():
    model = gxd.injectable(mlp(), "head")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    method = gxd.method("plasticity_injection")
    refused(lambda: gxd.attach(model, optimizer, method), gxd.PlanError, ("head.new.weight", "never be trained"))
