"""Resets of the head, of the optimizer and of the whole network: what is fresh, what is left, and that it learns."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import gxd
from tests import models
from tests.rig import X, Y, mlp, refused, same, snapshot


def train(model: nn.Module, optimizer: Any, x: Tensor = X, y: Tensor = Y, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


# ---- the head


def changed(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}


def test_the_last_layer_is_drawn_anew_with_fresh_optimizer_state_and_nothing_else_changes():
    model = mlp()
    optimizer = optim.Adam(model.parameters(), 0.01)
    attached = gxd.attach(model, optimizer, gxd.method("head_reset"))
    train(model, optimizer, steps=3)
    before, kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    attached.boundary()
    assert changed(model, before) == {"head.weight", "head.bias"}
    bound = 1 / 6**0.5  # of nn.Linear(6, 3)
    for p in (model.head.weight, model.head.bias):
        assert p.abs().max() <= bound and p.abs().max() > bound / 3
        assert not any(value.any() for value in optimizer.state[p].values())
    after = optimizer.state_dict()["state"]
    assert same([after[n] for n in range(4)], [kept[n] for n in range(4)])


def test_a_head_that_was_reset_is_trained():
    """Public code puts a new module in place, which the optimizer never sees."""
    model = mlp()
    optimizer = optim.SGD(model.parameters(), 0.5)
    attached = gxd.attach(model, optimizer, gxd.method("head_reset"))
    attached.boundary()
    drawn = model.head.weight.detach().clone()
    before = F.cross_entropy(model(X), Y).item()
    train(model, optimizer, steps=30)
    assert not torch.equal(model.head.weight, drawn)
    assert F.cross_entropy(model(X), Y).item() < before / 2


@pytest.mark.parametrize(
    ("network", "head"), [("resnet", "head"), ("transformer", "head"), ("mlp", "head"), ("conv", "head")]
)
def test_the_last_layer_of_a_network_is_found(network: str, head: str):
    model, _, _ = models.make(network)
    attached = gxd.attach(model, optim.SGD(model.parameters(), 0.1), gxd.method("head_reset"))
    before = copy.deepcopy(model.state_dict())
    attached.boundary()
    assert changed(model, before) == {name for name in before if name.startswith(head + ".")}


def test_a_head_that_is_named_is_reset_with_all_that_is_in_it():
    model, batch, _ = models.make("resnet")
    optimizer = optim.SGD(model.parameters(), 0.1)
    attached = gxd.attach(model, optimizer, gxd.method("head_reset", head="block2"))
    train(model, optimizer, *batch(8))
    before = copy.deepcopy(model.state_dict())
    attached.boundary()
    assert changed(model, before) == {name for name in before if name.startswith("block2.")}
    fresh = models.make("resnet")[0].block2
    norms = {name: tensor for name, tensor in fresh.state_dict().items() if "bn" in name or "shortcut.1" in name}
    assert same({name: model.block2.state_dict()[name] for name in norms}, norms)  # gains, shifts and statistics


def test_a_head_that_shares_its_weight_is_refused():
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "fc": nn.Linear(4, 4), "head": nn.Linear(4, 5)})
    model["head"].weight = model["embed"].weight
    optimizer = optim.SGD(model.parameters(), 0.1)
    method = gxd.method("head_reset", head="head")
    refused(lambda: gxd.attach(model, optimizer, method), gxd.PlanError, ("'head'", "'embed'", "shares"))


# ---- the optimizer

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": partial(optim.SGD, lr=0.05),
    "momentum": partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adam": partial(optim.Adam, lr=0.01, amsgrad=True),
    "fused adam": partial(optim.Adam, lr=0.01, fused=True),
    "adamw": partial(optim.AdamW, lr=0.01),
    "nadam": partial(optim.NAdam, lr=0.01),
    "radam": partial(optim.RAdam, lr=0.01),
    "adamax": partial(optim.Adamax, lr=0.01),
    "rmsprop": partial(optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "adagrad": partial(optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "adadelta": partial(optim.Adadelta, lr=1.0),
    "asgd": partial(optim.ASGD, lr=0.05, lambd=0.5),
    "rprop": partial(optim.Rprop, lr=0.01),
    "adafactor": partial(optim.Adafactor, lr=0.05),
}


@pytest.mark.parametrize("every", [0, 4])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_training_goes_on_as_with_a_new_optimizer(name: str, every: int):
    models = [mlp(), mlp()]
    optimizer = OPTIMIZERS[name](models[0].parameters())
    attached = gxd.attach(models[0], optimizer, gxd.method("optimizer_reset", every=every))
    train(models[0], optimizer, steps=4)
    if not every:
        attached.boundary()
    models[1].load_state_dict(models[0].state_dict())
    fresh = OPTIMIZERS[name](models[1].parameters())
    train(models[0], optimizer, steps=3)
    train(models[1], fresh, steps=3)
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=1e-5, atol=1e-7)


def test_an_optimizer_that_remembers_something_would_have_gone_elsewhere():
    """Else the test above says nothing."""
    for name in [name for name in OPTIMIZERS if name != "sgd"]:
        models = [mlp(), mlp()]
        optimizer = OPTIMIZERS[name](models[0].parameters())
        train(models[0], optimizer, steps=4)
        models[1].load_state_dict(models[0].state_dict())
        train(models[0], optimizer, steps=3)
        train(models[1], OPTIMIZERS[name](models[1].parameters()), steps=3)
        assert (models[0].fc1.weight - models[1].fc1.weight).abs().max() > 1e-5, name


def test_what_rows_and_columns_share_is_forgotten_too():
    """Adafactor keeps one number per row and one per column."""
    model = mlp()
    optimizer = OPTIMIZERS["adafactor"](model.parameters())
    attached = gxd.attach(model, optimizer, gxd.method("optimizer_reset"))
    train(model, optimizer, steps=2)
    state = optimizer.state[model.fc1.weight]
    assert state["row_var"].all() and state["row_var"].shape != model.fc1.weight.shape
    attached.boundary()
    assert not any(value.any() for state in optimizer.state.values() for value in state.values())


def test_a_reset_of_the_optimizer_leaves_weights_and_learning_rates_alone():
    model = mlp()
    optimizer = optim.Adam(model.parameters(), 0.01)
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    attached = gxd.attach(model, optimizer, gxd.method("optimizer_reset"))
    train(model, optimizer)
    schedule.step()
    before = copy.deepcopy(model.state_dict())
    attached.boundary()
    assert same(model.state_dict(), before) and optimizer.param_groups[0]["lr"] == 0.005
    assert schedule.last_epoch == 1


# ---- the network


def test_a_full_reset_is_a_fresh_network_and_a_fresh_optimizer():
    """Its draws have the range and the spread of a new network's, and none of the old values is left."""
    torch.manual_seed(0)
    make = lambda: nn.Sequential(
        nn.Conv2d(2, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Linear(256, 100), nn.LayerNorm(100)
    )
    model = make()
    nn.init.normal_(model[4].weight, std=0.3)
    nn.init.zeros_(model[4].bias)
    optimizer = optim.Adam(model.parameters(), 0.1)
    attached = gxd.attach(model, optimizer, gxd.method("full_reset"))
    x, y = torch.randn(8, 2, 4, 4), torch.randint(0, 9, (8,))
    train(model, optimizer, x, y, steps=5)
    before = copy.deepcopy(model.state_dict())
    attached.boundary()
    assert changed(model, before) == set(before)
    conv, linear = model[0], model[4]
    bound = 1 / 18**0.5
    assert 0.98 * bound < conv.weight.abs().max() <= bound
    assert abs(conv.weight.std().item() / (bound / 3**0.5) - 1) < 0.05
    assert abs(linear.weight.std().item() / 0.3 - 1) < 0.05 and not linear.bias.any()
    fresh = make()
    for n in (1, 5):
        assert same(model[n].state_dict(), fresh[n].state_dict())  # gains, shifts, running statistics and their count
    assert not any(value.any() for state in optimizer.state.values() for value in state.values())


def test_two_full_resets_draw_two_networks_and_a_seed_says_which():
    def draws(seed: int) -> list[Tensor]:
        model = mlp()
        attached = gxd.attach(model, optim.SGD(model.parameters(), 0.1), gxd.method("full_reset"), seed=seed)
        found = []
        for _ in range(2):
            attached.boundary()
            found.append(model.fc1.weight.detach().clone())
        return found

    first, second = draws(0)
    assert not torch.equal(first, second)
    assert same(draws(0), [first, second]) and not same(draws(1), [first, second])


def test_the_statistics_of_a_frozen_norm_stay_and_those_of_one_without_parameters_do_not():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.BatchNorm1d(5, affine=False))
    model[1].requires_grad_(False)
    optimizer = optim.SGD(model.parameters(), 0.1)
    attached = gxd.attach(model, optimizer, gxd.method("full_reset"))
    train(model, optimizer)
    frozen = copy.deepcopy(model[1].state_dict())
    attached.boundary()
    assert same(model[1].state_dict(), frozen)
    assert same(model[3].state_dict(), nn.BatchNorm1d(5, affine=False).state_dict())


@pytest.mark.parametrize("name", ["full_reset", "head_reset"])
def test_a_reset_that_fails_is_undone_and_draws_the_same_when_it_is_tried_again(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    rigs = []
    for fails in (True, False):
        model = mlp()
        optimizer = optim.Adam(model.parameters(), 0.01)
        attached = gxd.attach(model, optimizer, gxd.method(name))
        train(model, optimizer)
        if fails:
            before, bias = snapshot(model, optimizer), model.head.bias
            with monkeypatch.context() as patch:
                patch.setattr(bias, "copy_", lambda *_: 1 / 0, raising=False)
                refused(attached.boundary, ZeroDivisionError, ())
            assert same(snapshot(model, optimizer), before)
        attached.boundary()
        rigs.append(snapshot(model, optimizer))
    assert same(*rigs)
