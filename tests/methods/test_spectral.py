"""Spectral regularisation against its equation, and its power iteration against decompositions."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gxd
from tests.methods.naive import Net, attached, goes_where_the_equation_says

GAINS = ("bn.weight", "ln.weight")


def with_a_gap(model: Net) -> None:
    """Between the two largest singular values, so that power iteration has arrived before the first step."""
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                matrix = p.flatten(1)
                matrix += 5.0 * torch.outer(*(torch.ones(n, dtype=p.dtype) / n**0.5 for n in matrix.shape))


class Equation:
    """The penalty, with one power iteration by hand each time that it is looked at."""

    def __init__(self, power: float) -> None:
        self.power = power
        start = Net().double()
        with_a_gap(start)
        weights = {name: p.detach().flatten(1) for name, p in start.named_parameters() if p.dim() > 1}
        self.left = {name: torch.linalg.svd(matrix)[0][:, 0] for name, matrix in weights.items()}

    def __call__(self, named: dict[str, nn.Parameter]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for name, p in named.items():
            if name in GAINS:
                total = total + sum((gain - 1) ** 2 for gain in p)
            elif p.dim() == 1:
                total = total + sum(entry**2 for entry in p) ** self.power
            else:
                total = total + (self.largest(name, p.flatten(1)) ** self.power - 1) ** 2
        return total

    def largest(self, name: str, matrix: Tensor) -> Tensor:
        fixed = matrix.detach()
        right = self.left[name] @ fixed
        right /= right.norm()
        left = fixed @ right
        self.left[name] = left / left.norm()
        return self.left[name] @ matrix @ right


@pytest.mark.parametrize("decoupled", [True, False], ids=["decoupled", "coupled"])
@pytest.mark.parametrize(("optimizer", "power"), [("sgd", 2.0), ("momentum", 1.0), ("adam", 2.0), ("adam", 1.5)])
def test_parameters_go_where_the_equation_says(optimizer: str, power: float, decoupled: bool):
    goes_where_the_equation_says(
        "spectral", optimizer, decoupled, Equation(power), 1e-3, with_a_gap, tolerance=1e-8, power=power
    )


@pytest.mark.parametrize("size", [1.0, 10.0], ids=["from below", "from above"])
def test_the_largest_singular_value_goes_to_one_biases_to_zero_and_gains_to_one(size: float):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), nn.Flatten(), nn.Linear(7, 5))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(size * 0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    gxd.attach(model, optimizer, gxd.method("spectral", strength=0.5))
    for _ in range(800):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    for p in (model[0].weight, model[3].weight):
        assert abs(torch.linalg.matrix_norm(p.flatten(1), 2).item() - 1) < 0.02
    assert model[0].bias.norm() < 0.3 and (model[1].weight - 1).abs().max() < 0.01  # |b|^4 is flat near zero


def test_power_iteration_follows_a_matrix_that_changes_all_the_time():
    model, optimizer, spectral = attached("spectral", "momentum", strength=1e-3, decoupled=True)
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        with torch.no_grad():
            for p in model.parameters():
                p.grad = 0.1 * torch.randn(p.shape, generator=generator).to(p)
        optimizer.step()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = spectral._parts[0].state
    for name, p in before.items():
        if p.dim() > 1:
            top = state[name]
            assert abs(top.value - torch.linalg.matrix_norm(p.flatten(1), 2)) < 0.05 * top.value
            torch.testing.assert_close(torch.stack([top.left.norm(), top.right.norm()]), torch.ones(2).double())


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_a_matrix_of_zeros_is_no_accident(power: float):
    """And it is found again when it is no longer zero."""
    model = nn.Linear(4, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    spectral = gxd.attach(model, optimizer, gxd.method("spectral", strength=0.1, power=power))
    for number in range(30):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        if number == 2:
            assert (model.weight == 0).all() if power > 1 else model.weight.norm() > 0
            nn.init.normal_(model.weight)
    assert model.weight.isfinite().all()
    top = spectral._parts[0].state["weight"].value
    assert abs(top - torch.linalg.matrix_norm(model.weight, 2)) < 0.1 * top


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"power": 0.5}, ValueError, "power=0.5 must be a number, 1 or more"),
        ({"strength": float("nan")}, ValueError, "strength=nan must be"),
        ({"powr": 2}, TypeError, "Did you mean 'power'"),
    ],
)
def test_a_wrong_option_is_refused_with_its_value(options: dict[str, Any], error: Any, word: str):
    with pytest.raises(error, match=word):
        gxd.method("spectral", **options)
