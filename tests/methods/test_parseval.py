"""Parseval regularisation against its equation, |W W' - s I|_F^2."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gxd
from tests.methods.naive import attached, goes_where_the_equation_says

SCALE = 1.5


def equation(named: dict[str, nn.Parameter]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for name in ("conv.weight", "fc.weight"):  # (4, 2 * 3 * 3) and (6, 16): wide
        matrix = named[name].flatten(1)
        total = total + (matrix @ matrix.T - SCALE * torch.eye(len(matrix))).square().sum()
    return total


@pytest.mark.parametrize("decoupled", [True, False], ids=["decoupled", "coupled"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_parameters_go_where_the_equation_says(optimizer: str, decoupled: bool):
    goes_where_the_equation_says("parseval", optimizer, decoupled, equation, strength=0.05, scale=SCALE)


@pytest.mark.parametrize("decoupled", [True, False], ids=["decoupled", "coupled"])
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (7, 7)], ids=["wide", "tall", "square"])
def test_all_singular_values_go_to_the_root_of_the_scale(shape: tuple[int, int], decoupled: bool):
    """Of a tall matrix too, for which W W' has no full rank, and W' W becomes s I."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(shape[1], shape[0]), nn.Linear(shape[0], 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gxd.attach(model, optimizer, gxd.method("parseval", strength=0.2, scale=2.0, decoupled=decoupled))
    head = model[1].weight.detach().clone()
    for _ in range(600):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    values = torch.linalg.svdvals(model[0].weight)
    torch.testing.assert_close(values, torch.full_like(values, 2**0.5), rtol=0, atol=1e-3)
    assert torch.equal(model[1].weight, head)


def test_the_head_is_left_out_unless_nothing_is():
    for exclude, expected in ((None, {"conv.weight", "fc.weight"}), ((), {"conv.weight", "fc.weight", "head.weight"})):
        options = {} if exclude is None else {"exclude": exclude}
        assert set(attached("parseval", "sgd", **options)[2]._parts[0].state) == expected


def test_a_model_that_is_a_head_alone_is_refused_with_a_remedy():
    model = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=r"of Linear, no weight is left .* exclude=\(\) leaves nothing out"):
        gxd.attach(model, torch.optim.SGD(model.parameters(), 0.1), gxd.method("parseval"))


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"scale": -1.0}, ValueError, "scale=-1.0 must be a number, 0 or more"),
        ({"strength": -1.0}, ValueError, "strength=-1.0"),
        ({"sclae": 1.0}, TypeError, "Did you mean 'scale'"),
    ],
)
def test_a_wrong_option_is_refused_with_its_value(options: dict[str, Any], error: Any, word: str):
    with pytest.raises(error, match=word):
        gxd.method("parseval", **options)
