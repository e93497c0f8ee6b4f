"""L2-Init against loops over parameters: theta <- theta - lr * strength * (theta - theta_0) after a step, or
strength * (theta - theta_0) as a part of the gradient before it.
"""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd
from tests.methods.naive import OPTIMIZERS, Net, X, Y, goes_where_the_equation_says, groups, loss_of, lr_of, step
from tests.rig import Gate, same

STRENGTH = 0.3
NORMS = ("bn", "ln")


def pulled(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if name.split(".")[0] not in NORMS}


class Naive:
    """The same, by hand."""

    def __init__(self, optimizer: str, decoupled: bool, strength: float = STRENGTH) -> None:
        self.model = Net()
        self.optimizer = OPTIMIZERS[optimizer](groups(self.model))
        self.start = {name: p.detach().clone() for name, p in pulled(self.model).items()}
        self.decoupled, self.strength = decoupled, strength

    @torch.no_grad()
    def penalise(self) -> None:
        for name, p in pulled(self.model).items():
            assert p.grad is not None
            p.grad += self.strength * (p - self.start[name])

    def step(self) -> None:
        step(self.model, self.optimizer, self.penalise if not self.decoupled else lambda: None)
        with torch.no_grad():
            for name, p in pulled(self.model).items() if self.decoupled else ():
                p -= lr_of(self.optimizer, p) * self.strength * (p - self.start[name])


def attached(
    optimizer: str, decoupled: bool = True, strength: float = STRENGTH, **options: Any
) -> tuple[Net, torch.optim.Optimizer, gxd.Attachment]:
    model = Net()
    made = OPTIMIZERS[optimizer](groups(model))
    method = gxd.method("l2_init", strength=strength, decoupled=decoupled)
    return model, made, gxd.attach(model, made, method, **options)


@pytest.mark.parametrize("decoupled", [True, False], ids=["decoupled", "coupled"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_parameters_go_where_the_equation_says(optimizer: str, decoupled: bool):
    naive = Naive(optimizer, decoupled)
    model, made, _ = attached(optimizer, decoupled)
    for number in range(6):
        if number == 3:  # a schedule is followed
            for one in (made, naive.optimizer):
                one.param_groups[0]["lr"] *= 0.5
        step(model, made)
        naive.step()
        torch.testing.assert_close(model.state_dict(), naive.model.state_dict(), rtol=1e-5, atol=1e-6)


def test_with_plain_sgd_both_forms_agree_to_first_order():
    """Decoupled, the pull is taken where the step has gone: they differ by a product of two small numbers."""
    models = []
    for decoupled in (True, False):
        model, made, _ = attached("sgd", decoupled, strength=0.01)
        step(model, made)
        step(model, made)
        models.append(dict(pulled(model)))
    plain = Net()
    made = OPTIMIZERS["sgd"](groups(plain))
    step(plain, made)
    step(plain, made)
    for name, p in pulled(plain).items():
        difference = (models[0][name] - models[1][name]).abs().max()
        assert difference < 2 * (models[0][name] - p).abs().max() + 1e-7


@pytest.mark.parametrize("decoupled", [True, False], ids=["decoupled", "coupled"])
def test_the_parameters_of_norms_and_what_is_not_trained_are_left_alone(decoupled: bool):
    model, made, _ = attached("adam", decoupled)
    model.conv.requires_grad_(False)
    model.bn.weight.data.fill_(3.0)
    model.conv.weight.data.fill_(2.0)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for group in made.param_groups:
        group["params"] = [p for p in group["params"] if p is not model.fc.bias]
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.fc.weight += 1.0
        model.fc.bias += 1.0
    made.step()
    after = model.state_dict()
    assert not torch.equal(after["fc.weight"], before["fc.weight"] + 1.0)
    assert torch.equal(after["fc.bias"], before["fc.bias"] + 1.0)  # no optimizer has it
    for name in ("conv.weight", "bn.weight", "bn.bias", "ln.weight", "bn.running_mean"):
        assert torch.equal(after[name], before[name]), name


@pytest.mark.parametrize("decoupled", [True, False], ids=["decoupled", "coupled"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_step_with_a_closure_is_the_same_as_one_without(optimizer: str, decoupled: bool):
    model, made, _ = attached(optimizer, decoupled)
    other, made_too, _ = attached(optimizer, decoupled)

    closure = partial(loss_of, model, made)
    for number in range(4):
        assert (made.step(closure) if number % 2 else made.step(closure=closure)) is not None
        step(other, made_too)
    assert same(model.state_dict(), other.state_dict())


def test_an_optimizer_that_calls_its_closure_often_sees_the_penalty_each_time():
    """L-BFGS minimises the penalised loss: written into the loss, it ends in the same place."""
    ends = []
    for by_hand in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 3).double()
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)
        if not by_hand:
            gxd.attach(model, optimizer, gxd.method("l2_init", strength=STRENGTH, decoupled=False))
        x = X.flatten(1)[:, :4].double()

        def closure(
            model: nn.Module = model, x: Tensor = x, by_hand: bool = by_hand, start: Any = start, o: Any = optimizer
        ) -> Tensor:
            o.zero_grad()
            loss = F.cross_entropy(model(x), Y)
            if by_hand:
                loss = loss + STRENGTH / 2 * sum((p - start[n]).square().sum() for n, p in model.named_parameters())
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        ends.append(model.state_dict())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-5)


class Twice(torch.optim.SGD):
    """Its step calls its parent's, so that hooks run twice."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("decoupled", [True, False], ids=["decoupled", "coupled"])
def test_a_step_that_calls_the_step_of_its_parent_counts_once(decoupled: bool, closure: bool):
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)  # its class has hooks, too
    naive = Naive("sgd", decoupled)
    model = Net()
    made = Twice(groups(model), lr=0.1)
    gxd.attach(model, made, gxd.method("l2_init", strength=STRENGTH, decoupled=decoupled))

    for _ in range(3):
        if closure:
            made.step(lambda: loss_of(model, made))
        else:
            step(model, made)
        naive.step()
    torch.testing.assert_close(dict(pulled(model)), dict(pulled(naive.model)))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("decoupled", [True, False], ids=["decoupled", "coupled"])
def test_a_gradient_scaler_does_not_change_the_pull_and_a_skipped_step_has_none(decoupled: bool, fused: bool):
    name = "fused" if fused else "adam"
    naive = Naive(name, decoupled)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, made, _ = attached(name, decoupled, scaler=scaler)
    for number in range(4):
        skipped = number == 2
        before = copy.deepcopy(dict(pulled(model)))
        made.zero_grad()
        scaler.scale(F.cross_entropy(model(X), Y) * (torch.inf if skipped else 1.0)).backward()
        if not fused:
            scaler.unscale_(made)  # as for clipping
        scaler.step(made)
        scaler.update()
        if skipped:
            assert same(dict(pulled(model)), before)
        else:
            naive.step()
    torch.testing.assert_close(dict(pulled(model)), dict(pulled(naive.model)), rtol=1e-4, atol=1e-5)


def test_a_pull_that_would_overshoot_ends_at_the_initial_value():
    model, made, _ = attached("sgd", strength=1000.0)
    start = copy.deepcopy(dict(pulled(model)))
    step(model, made)
    torch.testing.assert_close(dict(pulled(model)), start, rtol=0, atol=0)


@pytest.mark.parametrize("norm", ["l2", "l1", "huber", "wasserstein"])
def test_a_learning_rate_of_zero_pulls_nothing_also_where_nothing_is_to_be_pulled(norm: str):
    """As in the first step of a warm-up, where all parameters are still where they began."""
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    gxd.attach(model, optimizer, gxd.method("l2_init", norm=norm))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before)


def test_two_optimizers_pull_each_parameter_once_with_its_own_rate():
    model, naive = Net(), Naive("sgd", True)
    first, second = groups(model)
    optimizers = [torch.optim.SGD(first["params"], 0.1), torch.optim.SGD(second["params"], 0.4)]
    gxd.attach(model, optimizers, gxd.method("l2_init", strength=STRENGTH))
    for _ in range(3):
        F.cross_entropy(model(X), Y).backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
        naive.step()
    torch.testing.assert_close(dict(pulled(model)), dict(pulled(naive.model)))


def test_a_model_that_cannot_be_planned_needs_no_example_inputs():
    torch.manual_seed(0)
    model, x = Gate(), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with pytest.raises(gxd.TraceError):
        gxd.attach(model, optimizer, gxd.method("redo"), example_inputs=x)
    attached = gxd.attach(model, optimizer, gxd.method("l2_init", strength=10.0))
    start = model.fc1.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        model(x).sum().backward()
        moved = model.fc1.weight.detach() - 0.01 * model.fc1.weight.grad
        optimizer.step()
        torch.testing.assert_close(model.fc1.weight.detach(), moved - 0.01 * 10.0 * (moved - start))
    assert len(attached.plan) == 0 and "l2_init" in repr(attached)


def test_the_initial_values_are_those_of_the_first_attachment_after_a_resume():
    model, made, l2_init = attached("adam")
    start = copy.deepcopy(dict(pulled(model)))
    for _ in range(5):
        step(model, made)
    other = Net()
    other.load_state_dict(model.state_dict())  # before the method is attached, as is usual
    resumed_optimizer = OPTIMIZERS["adam"](groups(other))
    resumed_optimizer.load_state_dict(copy.deepcopy(made.state_dict()))
    resumed = gxd.attach(other, resumed_optimizer, gxd.method("l2_init", strength=STRENGTH))
    resumed.load_state_dict(l2_init.state_dict())
    assert same(dict(resumed._parts[0].state), {name: p.detach() for name, p in start.items()})
    step(model, made)
    step(other, resumed_optimizer)
    assert same(model.state_dict(), other.state_dict())


def test_the_state_of_another_model_is_refused_and_nothing_is_changed():
    """There is no plan to tell them apart: names and shapes do."""
    _, _, l2_init = attached("sgd")
    for other, word in (
        (nn.Sequential(nn.Linear(4, 3)), "0.weight is missing"),
        (nn.ModuleDict({"conv": nn.Conv2d(2, 5, 3, bias=False)}), "fc.weight is not known here"),
    ):
        optimizer = torch.optim.SGD(other.parameters(), 0.1)
        attachment = gxd.attach(other, optimizer, gxd.method("l2_init"))
        before = attachment.state_dict()
        with pytest.raises(gxd.PlanError, match=word):
            attachment.load_state_dict(l2_init.state_dict())
        assert same(attachment.state_dict(), before)


@pytest.mark.parametrize("decoupled", [True, False], ids=["decoupled", "coupled"])
def test_the_initial_values_follow_the_model_to_another_device(decoupled: bool):
    """The meta device has no values, but it refuses to mix with others."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    l2_init = gxd.attach(model, optimizer, gxd.method("l2_init", decoupled=decoupled))
    for p in model.parameters():
        torch.utils.swap_tensors(p, nn.Parameter(p.detach().to("meta")))
    model(torch.zeros(2, 4, device="meta")).sum().backward()
    optimizer.step()
    assert {tensor.device.type for tensor in l2_init._parts[0].state.values()} == {"meta"}


class Bare(torch.optim.SGD):
    """Made without ``Optimizer.__init__``, so without hooks."""

    def __init__(self, params: Any) -> None:
        made = torch.optim.SGD(params, 0.1)
        self.param_groups, self.state, self.defaults = made.param_groups, made.state, made.defaults


@pytest.mark.parametrize("decoupled", [True, False], ids=["decoupled", "coupled"])
def test_close_takes_away_hooks_that_an_optimizer_did_not_have(decoupled: bool):
    model = Net()
    optimizer = Bare(model.parameters())
    before = set(vars(optimizer))
    l2_init = gxd.attach(model, optimizer, gxd.method("l2_init", decoupled=decoupled, strength=0.5))
    l2_init.close()
    assert set(vars(optimizer)) == before


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"strength": -1.0}, ValueError, "strength=-1.0 must be a number, 0 or more"),
        ({"strength": "a"}, ValueError, "strength='a'"),
        ({"decoupled": "no"}, TypeError, "decoupled='no' must be True or False"),
        ({"strenght": 1.0}, TypeError, "no option 'strenght'. Did you mean 'strength'"),
        ({"norm": "L1"}, ValueError, "norm='L1' is not one of .* Did you mean 'l1'"),
        ({"anchor": "redraw"}, ValueError, "anchor='redraw' is not one of .* Did you mean 'redrawn'"),
    ],
)
def test_a_wrong_option_is_refused_with_its_value(options: dict[str, Any], error: Any, word: str):
    with pytest.raises(error, match=word):
        gxd.method("l2_init", **options)


# ---- other norms, other anchors


EQUATIONS: dict[str, Any] = {
    "l1": lambda p, start: (p - start).abs().sum(),
    "huber": lambda p, start: F.huber_loss(p, start, reduction="sum", delta=1.0),
    "wasserstein": lambda p, start: (p.flatten().sort().values - start.flatten().sort().values).square().sum() / 2,
}


def moved(model: Net, by: float) -> None:
    with torch.no_grad():
        for p in pulled(model).values():
            p += torch.where(torch.arange(p.numel()).view_as(p) % 2 == 0, by, -by)


@pytest.mark.parametrize("decoupled", [True, False], ids=["decoupled", "coupled"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("norm", list(EQUATIONS))
def test_other_norms_go_where_their_equations_say(norm: str, optimizer: str, decoupled: bool):
    start = {name: p.detach().clone() for name, p in pulled(Net().double()).items()}

    def equation(named: dict[str, nn.Parameter]) -> Tensor:
        return sum(EQUATIONS[norm](named[name], value) for name, value in start.items())  # type: ignore[return-value]

    # Huber's on both of its branches; so far that no step passes the beginning, where the sum of |d| has no gradient.
    away = partial(moved, by=9.0 if norm == "l1" else 0.9)
    goes_where_the_equation_says("l2_init", optimizer, decoupled, equation, strength=0.02, norm=norm, moved=away)


@pytest.mark.parametrize("norm", ["l2", "l1", "huber", "wasserstein"])
def test_whatever_the_norm_a_long_pull_ends_at_the_initial_value_and_not_beyond(norm: str):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    gxd.attach(model, optimizer, gxd.method("l2_init", strength=1e4, norm=norm))
    start = copy.deepcopy(dict(pulled(model)))
    with torch.no_grad():
        for p in pulled(model).values():
            p += 2.0  # the order of the weights stays
            p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(dict(pulled(model)), start, rtol=0, atol=0)


def test_wasserstein_pulls_the_distribution_and_not_the_weights():
    """A permutation of the initial weights costs nothing."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gxd.attach(model, optimizer, gxd.method("l2_init", strength=1.0, norm="wasserstein"))
    with torch.no_grad():
        for p in pulled(model).values():
            p.copy_(p.flatten().flip(0).view_as(p))
            p.grad = torch.zeros_like(p)
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=1e-7)


@pytest.mark.parametrize("norm", ["l2", "wasserstein"])
def test_a_redrawn_anchor_keeps_the_distribution_and_forgets_the_values(norm: str):
    """With a pull of all the way, each step ends at a new draw from what the layer began with."""
    torch.manual_seed(0)
    model = nn.Linear(100, 200)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    attachment = gxd.attach(model, optimizer, gxd.method("l2_init", strength=1.0, anchor="redrawn", norm=norm))
    assert attachment.state_dict()["methods"]["0.l2_init"]["state"]["weight"] == ["uniform", 0.1]
    seen = []
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        seen.append(model.weight.detach().clone())
        assert model.weight.abs().max() <= 0.1 and abs(model.weight.std().item() - 0.1 / 3**0.5) < 1e-3
    assert not torch.equal(*seen)


@pytest.mark.parametrize("decoupled", [True, False], ids=["decoupled", "coupled"])
def test_what_is_excluded_is_not_pulled(decoupled: bool):
    model, other = Net(), Net()
    optimizer, alone = (OPTIMIZERS["sgd"](groups(one)) for one in (model, other))
    gxd.attach(model, optimizer, gxd.method("l2_init", strength=0.5, exclude=["head", "conv"], decoupled=decoupled))
    with torch.no_grad():
        for p in (*model.parameters(), *other.parameters()):
            p += 1.0
    step(model, optimizer)
    step(other, alone)
    changed = {name for name, p in other.state_dict().items() if not torch.equal(p, model.state_dict()[name])}
    assert changed == {"fc.weight", "fc.bias"}
