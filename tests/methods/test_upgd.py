"""UPGD against a loop over single weights: w <- (1 - lr wd) w - lr (g + xi) (1 - sigmoid(u / max u))."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd
from tests.models import make

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).double()
Y = torch.tensor([0, 1, 2, 0, 1, 2])
LR = 0.1


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 3)).double()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=LR),
    "momentum": partial(torch.optim.SGD, lr=LR, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
}


def attached(
    optimizer: str = "sgd", model: nn.Module | None = None, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, gxd.Attachment]:
    model = net() if model is None else model
    made = OPTIMIZERS[optimizer](model.parameters())
    method = gxd.method("upgd", **{"noise": 0.0, "weight_decay": 0.0, **options})
    return model, made, gxd.attach(model, made, method)


def backward(model: nn.Module, sign: float = 1.0) -> None:
    model.zero_grad()
    (sign * F.cross_entropy(model(X), Y)).backward()


class Naive:
    """One number after the other."""

    def __init__(self, decay: float) -> None:
        self.decay, self.steps = decay, 0
        self.average: dict[tuple[str, int], float] = {}

    def gates(self, model: nn.Module) -> dict[str, Tensor]:
        self.steps += 1
        corrected = {}
        for name, p in model.named_parameters():
            for n, (w, g) in enumerate(zip(p.flatten().tolist(), p.grad.flatten().tolist())):
                old = self.average.get((name, n), 0.0)
                self.average[name, n] = self.decay * old + (1 - self.decay) * (-g * w)
                corrected[name, n] = self.average[name, n] / (1 - self.decay**self.steps)
        most = max(corrected.values())
        return {
            name: torch.tensor(
                [1 - 1 / (1 + math.exp(-corrected[name, n] / most)) for n in range(p.numel())], dtype=torch.float64
            ).view_as(p)
            for name, p in model.named_parameters()
        }


@pytest.mark.parametrize("protect", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.9, 0.9999])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_the_steps_are_those_of_the_equation(optimizer: str, decay: float, protect: bool):
    model, made, _ = attached(optimizer, decay=decay, protect=protect, weight_decay=0.3)
    other, naive = net(), Naive(decay)
    plainly = OPTIMIZERS[optimizer](other.parameters())
    for _ in range(4):
        backward(model)
        made.step()
        backward(other)
        gates = naive.gates(other)
        for name, p in other.named_parameters():
            p.data *= 1 - made.param_groups[0]["lr"] * 0.3
            p.grad *= gates[name] if protect else 1.0
        plainly.step()
        torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-10, atol=1e-12)


def test_the_most_useful_weight_is_gated_by_one_minus_sigmoid_of_one_from_the_first_step_on():
    """The authors' maximum is not corrected for its start, and gates are open or shut for ten thousand steps."""
    model, made, _ = attached(decay=0.9999)
    for _ in range(5):
        backward(model)
        gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
        made.step()
        found = torch.cat([p.grad.flatten() for p in model.parameters()]) / gradients
        found = found[gradients != 0]
        assert float(found.min()) == pytest.approx(1 - 1 / (1 + math.exp(-1)), rel=1e-3)
        assert ((found > 0.4) & (found < 0.6)).any()  # not all of them are shut or open


@pytest.mark.parametrize("protect", [True, False])
def test_the_noise_has_its_deviation_and_is_gated_like_the_gradient_and_unlike_it(protect: bool):
    torch.manual_seed(0)
    model = nn.Linear(100, 100, bias=False)
    _, made, attachment = attached(model=model, noise=0.5, protect=protect, decay=0.9)
    sums = []
    for scale in (1.0, 0.0):  # utilities of both signs, then no gradient
        gradient = scale * torch.randn(100, 100)
        model.weight.grad = gradient.clone()
        before = attachment._parts[0].state.sums["weight"]
        weight = model.weight.detach().clone()
        made.step()
        sums = attachment._parts[0].state.sums["weight"]
        # The utility is that of the gradient without the noise.
        torch.testing.assert_close(sums, 0.9 * before + 0.1 * (-gradient * weight))
        corrected = sums / (1 - 0.9 ** attachment._parts[0].state.counts["weight"])
        gate = torch.sigmoid(-corrected / corrected.max())
        noise = (model.weight.grad / gate - gradient) if protect else (model.weight.grad - gradient) / gate
        assert abs(float(noise.mean())) < 0.02 and abs(float(noise.std()) - 0.5) < 0.02
        assert abs(float(torch.corrcoef(torch.stack([noise.flatten(), gate.flatten()]))[0, 1])) < 0.05


def test_noise_moves_useless_weights_further_than_useful_ones_and_harmful_ones_furthest():
    """Weights of 1 whose gradient says: without it the loss would rise, stay, fall. Gates are 1 - sigmoid(1, 0, -1)."""
    model = nn.Linear(1000, 3, bias=False)
    nn.init.ones_(model.weight)
    _, made, _ = attached(model=model, noise=0.05, decay=0.9)
    for _ in range(20):
        model.weight.grad = torch.tensor([[-1e-3], [0.0], [1e-3]]).expand(3, 1000).clone()
        made.step()
    moved = model.weight.detach().std(1) / (LR * 0.05 * 20**0.5)
    torch.testing.assert_close(moved, 1 - torch.sigmoid(torch.tensor([1.0, 0.0, -1.0])), rtol=0.1, atol=0.0)


def test_where_no_weight_is_useful_those_that_harm_move_freely():
    """Divided by a negative maximum, the most harmful would be protected; by zero, nothing is a number."""
    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0, 0.0]]))
    _, made, _ = attached(model=model)
    model.weight.grad = torch.tensor([[1.0, 1.0, 1.0]])
    made.step()
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[1.0 - LR, 2.0 - LR, -LR / 2]]))


def test_a_gradient_scaler_of_a_fused_optimizer_does_not_change_the_utility_and_scales_the_noise():
    ends = []
    for scale in (1.0, 1024.0):
        model = net().float()
        made = torch.optim.Adam(model.parameters(), 0.01, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        attachment = gxd.attach(model, made, gxd.method("upgd", noise=0.1), scaler=scaler)
        for _ in range(3):
            made.zero_grad()
            scaler.scale(F.cross_entropy(model(X.float()), Y)).backward()
            scaler.step(made)
            scaler.update()
        ends.append((model.state_dict(), attachment._parts[0].state))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-6)


def test_to_maximise_the_negative_is_to_minimise():
    ends = []
    for sign in (1.0, -1.0):
        model = net()
        made = torch.optim.SGD(model.parameters(), LR, maximize=sign < 0)
        gxd.attach(model, made, gxd.method("upgd", noise=0.0))
        for _ in range(3):
            backward(model, sign)
            made.step()
        ends.append(model.state_dict())
    torch.testing.assert_close(*ends)


def test_with_two_optimizers_the_maximum_is_over_the_weights_of_both():
    """The second to step sees all that one optimizer would have seen."""
    model, other = net(), net()
    first, second = list(model[0].parameters()), [*model[1].parameters(), *model[3].parameters()]
    optimizers = [torch.optim.SGD(first, LR), torch.optim.SGD(second, LR)]
    gxd.attach(model, optimizers, gxd.method("upgd", noise=0.0))
    _, made, _ = attached(model=other, weight_decay=1e-3)
    for one in (model, other):
        backward(one)
        with torch.no_grad():  # the largest utility is the first layer's
            one[0].weight.grad.copy_(-10 * one[0].weight)
    for one in (*optimizers, made):
        one.step()
    torch.testing.assert_close(model[3].state_dict(), other[3].state_dict())
    alone = net()
    backward(alone)
    _, made, _ = attached(model=nn.Sequential(alone[1], alone[3]))
    made.step()
    assert not torch.allclose(alone[3].weight, model[3].weight)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_does_not_enter_the_average_and_the_rest_does(bad: float):
    """Else one of them is the maximum, or NaN, for ever, also when the weights of before it are put back."""
    model, made, attachment = attached(decay=0.9)
    other, plainly, unharmed = attached(decay=0.9)
    for number in range(4):
        for one in (model, other):
            backward(one)
        good = copy.deepcopy(model.state_dict())
        if number == 2:
            model[0].weight.grad[1, 2] = bad
        made.step()
        plainly.step()
        if number == 2:
            model.load_state_dict(good)
            other.load_state_dict(good)
        found, expected = (one._parts[0].state.sums for one in (attachment, unharmed))
        for name, average in found.items():
            differ = (average != expected[name]).nonzero().tolist()
            assert average.isfinite().all() and differ in ([], [[1, 2]]), name
            assert not differ or (name == "0.weight" and number >= 2)
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_value_that_is_not_finite_leaves_its_average_as_it_was_and_the_step_after_it_counts():
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    _, made, attachment = attached(model=model, decay=0.5)
    averages = []
    for gradient in (-1.0, math.nan, -1.0):
        model.weight.data.fill_(1.0)
        model.weight.grad = torch.tensor([[gradient, -1.0]])
        made.step()
        averages.append(attachment._parts[0].state.sums["weight"].flatten().tolist())
    assert averages == [[0.5, 0.5], [0.5, 0.75], [0.75, 0.875]]


def test_averages_of_a_model_in_half_precision_are_kept_in_full():
    model = net().bfloat16()
    _, made, attachment = attached(model=model, decay=0.9999, noise=0.1)
    for _ in range(3):
        model.zero_grad()
        F.cross_entropy(model(X.bfloat16()), Y).backward()
        made.step()
    sums = attachment._parts[0].state.sums.values()
    assert {tensor.dtype for tensor in sums} == {torch.float32}
    assert all(p.dtype == torch.bfloat16 and p.isfinite().all() for p in model.parameters())


def test_a_parameter_without_a_gradient_is_left_alone_and_a_sparse_one_is_refused():
    model = nn.ModuleDict({"one": nn.Linear(3, 2), "two": nn.Linear(3, 2)})
    before = copy.deepcopy(model["two"].state_dict())
    _, made, attachment = attached(model=model, noise=1.0, weight_decay=0.5)
    model["one"](torch.ones(1, 3)).sum().backward()
    made.step()
    torch.testing.assert_close(model["two"].state_dict(), before, rtol=0, atol=0)
    assert attachment._parts[0].state.counts == {"one.weight": 1, "one.bias": 1, "two.weight": 0, "two.bias": 0}
    model = nn.Embedding(5, 3, sparse=True)
    _, made, attachment = attached(model=model)
    model(torch.tensor([1])).sum().backward()
    before = model.weight.detach().clone()
    with pytest.raises(gxd.PlanError, match=r"the gradient of 'weight' is sparse.*sparse=False"):
        made.step()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("name", ["resnet", "transformer"])
def test_residual_networks_and_transformers_learn_on(name: str):
    model, batch, _ = make(name)
    _, made, _ = attached(model=model, noise=0.01, weight_decay=1e-3)
    x, y = batch()
    losses = []
    for _ in range(80):
        made.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        made.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"decay": 1.0}, ValueError, "decay=1.0 must be below 1"),
        ({"decay": -0.1}, ValueError, "decay=-0.1 must be a number, from 0 to 1"),
        ({"noise": -1}, ValueError, "noise=-1 must be a number, 0 or more"),
        ({"weight_decay": "a"}, ValueError, "weight_decay='a' must be a number"),
        ({"protect": 1}, TypeError, "protect=1 must be True or False"),
        ({"sigma": 0.1}, TypeError, "upgd has no option 'sigma'"),
    ],
)
def test_a_wrong_option_is_refused_with_its_value(options: dict[str, Any], error: Any, word: str):
    with pytest.raises(error, match=word):
        gxd.method("upgd", **options)
