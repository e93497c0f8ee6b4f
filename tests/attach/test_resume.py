"""What outlives a step: checkpoints, copies, other dtypes and devices, steps without a score, and nothing else.

Ground truth is an uninterrupted run, a run without gxd, or arithmetic by hand.
"""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd
from tests.attach.test_regimes import KINDS, Batch, attach, attached, batches, clone, close, hidden, mlp, same, train

# ---- checkpoints


def saved_and_loaded(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def normal_mlp(seed: int) -> nn.Sequential:
    """Initialised in a way that is seen in the weights only while they are new."""
    model = mlp(seed)
    for layer in (model[0], model[2], model[4]):
        nn.init.normal_(layer.weight, std=0.2 * (seed + 1))
    return model


def run_of(model: nn.Module, optimizer: str, **options: Any):
    make = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
        "adam": lambda: torch.optim.Adam(model.parameters(), 0.02, amsgrad=True),
        "adafactor": lambda: torch.optim.Adafactor(model.parameters(), 0.02),
    }[optimizer]()
    return model, make, attach(model, make, **options)


def states(model: nn.Module, optimizer: torch.optim.Optimizer, cbp: gxd.ContinualBackprop) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "gxd": cbp.state_dict()}


def resumed(state: dict[str, Any], optimizer: str, loaded_first: bool, **options: Any):
    """Objects built anew, in another process as it were: other initial weights, or the trained ones from the start."""
    model = normal_mlp(seed=5)
    if loaded_first:
        model.load_state_dict(state["model"])
    model, opt, cbp = run_of(model, optimizer, **options)
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["optimizer"])
    cbp.load_state_dict(state["gxd"])
    return model, opt, cbp


@pytest.mark.parametrize("loaded_first", [False, True], ids=["other weights", "trained weights"])
@pytest.mark.parametrize("utility", [*KINDS, "mc_adaptable_contribution", "random"])
def test_a_resumed_run_is_the_uninterrupted_run_to_the_last_bit(utility: str, loaded_first: bool):
    options = {"utility": utility, "replacement_rate": 0.07, "decay": 0.9, "seed": 3}
    data = batches(24)
    whole = run_of(normal_mlp(seed=0), "adam", **options)
    train(*whole, data[:11])
    kept = saved_and_loaded(states(*whole))
    before = whole[2].total_resets
    train(*whole, data[11:])
    # Another seed: that of the checkpoint counts.
    again = resumed(kept, "adam", loaded_first, **{**options, "seed": 8})
    train(*again, data[11:])
    assert same(states(*whole), states(*again))
    assert 0 < before < whole[2].total_resets


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adafactor"])
@pytest.mark.parametrize("every", [1, 3])
def test_every_step_is_a_good_step_to_stop_at(optimizer: str, every: int):
    options = {"score_every": every, "replacement_rate": 0.13, "maturity": 3}
    data = batches(12)
    whole = run_of(normal_mlp(seed=0), optimizer, **options)
    kept = []
    for batch in data:
        train(*whole, [batch])
        kept.append(saved_and_loaded(states(*whole)))
    for step in range(0, len(data), 2):
        again = resumed(kept[step], optimizer, True, **options)
        assert same(again[2].last_resets, kept[step]["gxd"]["methods"]["0.continual_backprop"]["state"]["last"])
        train(*again, data[step + 1 :])
        assert same(states(*whole), states(*again)), f"resumed after step {step}"


@pytest.mark.parametrize("utility", [*KINDS, "mc_contribution"])
def test_a_checkpoint_between_micro_batches_is_exact(utility: str):
    options = {"utility": utility, "replacement_rate": 0.13}

    def micro_batch(model: nn.Module, cbp: gxd.ContinualBackprop, x: Tensor, y: Tensor) -> None:
        logits = model(x)
        cbp.observe(logits, y)
        F.cross_entropy(logits, y).backward()

    def rest(model: nn.Module, optimizer: torch.optim.Optimizer, cbp: gxd.ContinualBackprop) -> None:
        micro_batch(model, cbp, *data[7])
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, cbp, data[8:])

    data = batches(12)
    whole = run_of(normal_mlp(seed=0), "sgd", **options)
    train(*whole, data[:6])
    micro_batch(whole[0], whole[2], *data[6])
    kept = saved_and_loaded({**states(*whole), "grad": {n: p.grad for n, p in whole[0].named_parameters()}})
    rest(*whole)
    again = resumed(kept, "sgd", True, **options)
    for name, p in again[0].named_parameters():
        p.grad = kept["grad"][name]
    rest(*again)
    assert same(states(*whole), states(*again))


def test_a_state_of_another_model_is_refused_and_changes_nothing():
    _, _, cbp = attached()
    wide = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3))
    other = attach(wide, torch.optim.SGD(wide.parameters(), 0.1))
    before = cbp.state_dict()
    for state in (
        other.state_dict(),
        {},
        {**before, "version": 99},
        {**before, "methods": {"0.redo": before["methods"]["0.continual_backprop"]}},
    ):
        with pytest.raises(gxd.PlanError):
            cbp.load_state_dict(state)
        assert same(cbp.state_dict(), before)


# ---- copies


def by_deepcopy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def by_pickle(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class Attention(nn.Module):
    """A residual stream with four readers (q, k, v and the sum), and an nn.MultiheadAttention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.o(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))
        return self.head(x + self.attention(x, x, x)[0]).mean(1)


@pytest.mark.parametrize("copied", [by_deepcopy, by_pickle])
@pytest.mark.parametrize("utility", KINDS)
def test_forwards_of_a_copy_of_the_model_leave_no_trace(utility: str, copied: Callable[[nn.Module], nn.Module]):
    data, runs = batches(6, shape=(5, 4)), []
    for target_network in (True, False):
        torch.manual_seed(0)
        model = Attention()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        plan = gxd.find_units(model, data[0][0], residual="group")
        assert any("heads" in c.ports for g in plan.groups for c in g.consumers)
        cbp = attach(model, optimizer, plan=plan, utility=utility, replacement_rate=0.05)
        other = copied(model)
        assert same(other.state_dict(), model.state_dict())
        for x, y in data:
            logits = model(x)
            if target_network:
                target = other(x)
                assert target.requires_grad
                target.sum().backward()
                assert all(p.grad is not None for p in other.parameters())
            cbp.observe(logits, y)
            F.cross_entropy(logits, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append((cbp.state_dict(), model.state_dict()))
        assert cbp.total_resets > 0
    assert same(*runs)


# ---- dtypes, devices, new parameters


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_statistics_are_kept_in_a_dtype_that_can_hold_them(dtype: torch.dtype, kept: torch.dtype):
    model = mlp(dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    cbp = attach(model, optimizer)
    (x, _), *_ = data = batches(8, dtype=dtype)
    expected = hidden(model, x)["0"].detach().to(kept).mean(0)
    train(model, optimizer, cbp, data[:1])
    torch.testing.assert_close(cbp.references()["0"], expected)
    train(model, optimizer, cbp, data[1:])
    assert {t.dtype for t in (*cbp.references().values(), *cbp.utilities().values())} == {kept}
    assert cbp.total_resets > 0
    assert {p.dtype for p in model.parameters()} == {dtype}
    for name, index in cbp.last_resets.items():
        assert not model[int(name) + 2].weight[:, index].any()
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_model_may_change_its_dtype_while_it_trains():
    model, optimizer, cbp = attached()
    train(model, optimizer, cbp, batches(4))
    model.double()
    optimizer.state.clear()
    train(model, optimizer, cbp, batches(4, dtype=torch.float64))
    assert int(cbp.ages()["0"].max()) == 8
    assert cbp.total_resets > 2
    assert {p.dtype for p in model.parameters()} == {torch.float64}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
def test_the_state_follows_the_model_to_another_device():
    model, optimizer, cbp = attached()
    train(model, optimizer, cbp, batches(4))
    model.cuda()
    optimizer.state.clear()
    train(model, optimizer, cbp, [(x.cuda(), y.cuda()) for x, y in batches(6)])
    assert all(t.is_cuda for t in (*cbp.references().values(), *cbp.utilities().values(), *cbp.ages().values()))
    assert cbp.total_resets > 2


def test_resets_reach_parameters_assigned_by_load_state_dict():
    model, optimizer, cbp = attached()
    train(model, optimizer, cbp, batches(2))
    model.load_state_dict(clone(model.state_dict()), assign=True)
    optimizer.param_groups[0]["params"] = list(model.parameters())  # as one must, or nothing is trained any more
    train(model, optimizer, cbp, batches(4))
    assert cbp.total_resets > 0
    for name, index in cbp.last_resets.items():
        assert not model[int(name) + 2].weight[:, index].any()
        assert not optimizer.state[model[int(name)].weight]["momentum_buffer"][index].any()


# ---- scoring only some steps


@pytest.mark.parametrize("every", [1, 3])
def test_the_average_of_a_constant_is_the_constant_at_every_age(every: int):
    model, optimizer, cbp = attached(utility="gxi", score_every=every, replacement_rate=0.0)
    optimizer.param_groups[0]["lr"] = 0.0
    (batch,) = batches(1)
    train(model, optimizer, cbp, [batch])
    references, utilities = cbp.references(), cbp.utilities()
    for _ in range(7):
        train(model, optimizer, cbp, [batch])
        assert close(cbp.references(), references, 1e-6)
        assert close(cbp.utilities(), utilities, 1e-6)


def test_scoring_every_third_step_keeps_the_horizon():
    model, optimizer, cbp = attached(score_every=3, decay=0.9, replacement_rate=0.0)
    mean, weight = torch.zeros(8), 0.0
    for step, (x, y) in enumerate(batches(8)):
        if step % 3 == 0:  # steps 0, 3 and 6 are scored
            h = hidden(model, x)["0"].detach().mean(0)
            mean, weight = 0.9**3 * mean + (1 - 0.9**3) * h, 0.9**3 * weight + (1 - 0.9**3)
        train(model, optimizer, cbp, [(x, y)])
        torch.testing.assert_close(cbp.references()["0"], mean / weight)


@pytest.mark.parametrize("utility", KINDS)
def test_unscored_steps_capture_nothing_and_observe_does_nothing(utility: str, monkeypatch: pytest.MonkeyPatch):
    model, optimizer, cbp = attached(score_every=4, utility=utility, replacement_rate=0.0)
    data = batches(6)
    model(data[0][0])
    assert cbp._parts[0].scorer.observer.passes
    train(model, optimizer, cbp, data[:1])
    before, utilities = cbp.state_dict(), cbp.utilities()
    monkeypatch.setattr(torch.autograd, "grad", None)  # observe() must not even differentiate
    for x, y in data[1:4]:
        logits = model(x)
        assert not cbp._parts[0].scorer.observer.passes
        cbp.observe(logits, y)
        F.cross_entropy(logits, y).backward()
        optimizer.step()
    after = cbp.state_dict()
    then, now = (state["methods"]["0.continual_backprop"]["state"] for state in (before, after))
    then["units"]["step"] += 3
    then["selector"] = now["selector"]
    assert same(before, after)
    monkeypatch.undo()
    train(model, optimizer, cbp, data[4:5])
    assert not same(cbp.utilities(), utilities)


def test_scoring_fewer_steps_resets_as_many_units():
    totals = []
    for every in (1, 4):
        model, optimizer, cbp = attached(score_every=every)
        train(model, optimizer, cbp, batches(20))
        totals.append(cbp.total_resets)
    assert totals[0] == totals[1] > 10


# ---- nothing else


class Shared(nn.Module):
    """In-place and reused activations, BatchNorm, dropout, and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(6), nn.BatchNorm2d(6)
        self.act, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.3)
        self.fc1, self.fc2, self.head = nn.Linear(96, 10), nn.Linear(10, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(x))
        y += x
        x = self.drop(self.act(y)).flatten(1)
        return self.head(F.relu_(self.fc2(self.act(self.fc1(x)))))


class Branches(nn.Module):
    """One tensor, read by three layers of different depth, all at once and again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(8, 6)
        self.deep, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.stem(x))
        return self.head(F.silu(self.deep(F.gelu(self.b(h)))) * self.a(h).sigmoid() + F.relu_(self.c(h)))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "in place": (Shared, (2, 4, 4)),
    "four readers": (Attention, (5, 4)),
    "branches": (Branches, (4,)),
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3)), (4,)),
}


def trained(name: str, data: list[Batch], utility: str | None) -> list[Any]:
    """Gradients of every step, then parameters, buffers and the global random state."""
    torch.manual_seed(0)
    model = MODELS[name][0]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    cbp = None
    if utility is not None:
        plan = gxd.find_units(model, data[0][0], residual="group")
        cbp = attach(model, optimizer, plan=plan, utility=utility, replacement_rate=0.0)
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append([p.grad.clone() for p in model.parameters()]))
    train(model, optimizer, cbp, data)
    return [*seen, model.state_dict(), torch.get_rng_state()]


@pytest.mark.parametrize("utility", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_training_is_bit_identical_to_training_without_gxd_while_no_reset_is_due(name: str, utility: str):
    data = batches(4, shape=MODELS[name][1])
    assert same(trained(name, data, None), trained(name, data, utility))


def hooks_of(model: nn.Module) -> list[Any]:
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
    extra = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
    return [hook for module in model.modules() for name in names + extra for hook in getattr(module, name).items()]


@pytest.mark.parametrize("name", MODELS)
def test_finding_and_checking_units_leaves_the_model_as_it_was_found(name: str):
    torch.manual_seed(0)
    model, (x, _) = MODELS[name][0](), batches(1, shape=MODELS[name][1])[0]
    next(model.children()).eval()
    list(model.parameters())[-1].requires_grad_(False)
    state, random = clone(model.state_dict()), torch.get_rng_state()
    flags = [(m.training, [p.requires_grad for p in m.parameters()]) for m in model.modules()]
    for _ in range(2):
        gxd.verify_plan(model, x, plan=gxd.find_units(model, x, residual="group"))
        assert flags == [(m.training, [p.requires_grad for p in m.parameters()]) for m in model.modules()]
        assert same(model.state_dict(), state)
        assert list(model.state_dict()) == list(state)
        assert torch.equal(torch.get_rng_state(), random)
        assert all(p.grad is None for p in model.parameters())
        assert not hooks_of(model)
        model.eval()
        flags = [(False, grads) for _, grads in flags]


@pytest.mark.parametrize("by", ["close", "context manager", "an exception"])
def test_closing_removes_every_hook(by: str):
    torch.manual_seed(0)
    model, (x, y) = Attention(), batches(1, shape=(5, 4))[0]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    keys = list(model.state_dict())
    cbp = attach(model, optimizer, plan=gxd.find_units(model, x, residual="group"))
    assert hooks_of(model)
    assert list(model.state_dict()) == keys
    if by == "close":
        cbp.close()
        cbp.close()
    elif by == "context manager":
        with cbp as entered:
            assert entered is cbp
    else:
        with pytest.raises(ZeroDivisionError), cbp:
            raise ZeroDivisionError
    assert not hooks_of(model)
    assert not optimizer._optimizer_step_post_hooks
    assert not optimizer._optimizer_step_pre_hooks
    train(model, optimizer, None, [(x, y)])
    assert not cbp.ages()["embed"].any()
    with pytest.raises(gxd.ObservationError, match="close"):
        cbp.observe(model(x), y)


def test_closing_while_a_reset_is_told_of_leaves_the_step_and_its_other_hooks_alone():
    torch.manual_seed(0)
    model, data, called = mlp(), batches(4), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    cbp = attach(
        model, optimizer, replacement_rate=1.0, maturity=0, on_reset=lambda _: (called.append("reset"), cbp.close())
    )
    optimizer.register_step_post_hook(lambda *_: called.append("another's"))
    train(model, optimizer, cbp, data[:1])
    assert called == ["reset", "another's"] and cbp.closed and not hooks_of(model)
    train(model, optimizer, None, data[1:])
    assert called == ["reset", *["another's"] * 4]
    assert all(int(ages.max()) == 0 for ages in cbp.ages().values())
