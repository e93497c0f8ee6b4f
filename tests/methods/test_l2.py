"""L2 against its equation, strength / 2 * |theta|^2."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gxd
from tests.methods.naive import OPTIMIZERS, X, attached, goes_where_the_equation_says, step

FORMS = pytest.mark.parametrize("decoupled", [True, False], ids=["decoupled", "coupled"])
NORMS = ("bn", "ln")


def equation(named: dict[str, nn.Parameter]) -> Tensor:
    return sum(p.square().sum() / 2 for name, p in named.items() if name.split(".")[0] not in NORMS)  # type: ignore[return-value]


@FORMS
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_parameters_go_where_the_equation_says(optimizer: str, decoupled: bool):
    goes_where_the_equation_says("l2", optimizer, decoupled, equation, strength=0.3)


@FORMS
def test_it_is_the_weight_decay_of_the_optimizer_on_all_but_norms(decoupled: bool):
    """AdamW's is decoupled (and comes before the step), Adam's is in the gradient."""
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    torch.manual_seed(0)
    models = [nn.Linear(4, 3).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x = X.double().flatten(1)[:, :4]
    made = [kind(models[0].parameters(), 0.01, weight_decay=0.5), kind(models[1].parameters(), 0.01, weight_decay=0.0)]
    gxd.attach(models[1], made[1], gxd.method("l2", strength=0.5, decoupled=decoupled))
    for model, optimizer in zip(models, made, strict=True):
        model(x).square().sum().backward()
        optimizer.step()
    # After the step instead of before it: a product of two small numbers.
    torch.testing.assert_close(*(model.state_dict() for model in models), rtol=0, atol=1e-4 if decoupled else 1e-12)


@FORMS
def test_weights_shrink_and_norms_and_what_is_excluded_do_not(decoupled: bool):
    model, optimizer, _ = attached("l2", "sgd", strength=0.5, decoupled=decoupled, exclude=["head", "*.bias"])
    before = copy.deepcopy(model.state_dict())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.state_dict().items():
        expected = before[name] * (1 - 0.1 * 0.5) if name in ("conv.weight", "fc.weight") else before[name]
        torch.testing.assert_close(p, expected)


def test_a_decay_of_more_than_all_of_it_ends_at_zero():
    model, optimizer, _ = attached("l2", "sgd", strength=1000.0)
    step(model, optimizer)
    assert not model.fc.weight.any() and model.ln.weight.all()


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"strength": -1.0}, ValueError, "strength=-1.0 must be a number, 0 or more"),
        ({"decoupled": "no"}, TypeError, "decoupled='no' must be True or False"),
        ({"exclude": 3}, TypeError, "exclude=3 must be a name"),
        ({"exclude": ["a", ""]}, TypeError, "must be a name"),
    ],
)
def test_a_wrong_option_is_refused_with_its_value(options: dict[str, Any], error: Any, word: str):
    with pytest.raises(error, match=word):
        gxd.method("l2", **options)


def test_a_sparse_gradient_is_refused_in_words_and_no_gradient_is_changed_unless_the_pull_is_decoupled():
    for decoupled in (True, False):
        model = nn.Sequential(nn.Linear(3, 4), nn.Embedding(5, 3, sparse=True))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        gxd.attach(model, optimizer, gxd.method("l2", decoupled=decoupled))
        model[0](model[1](torch.tensor([1, 2]))).square().sum().backward()
        weight, before = model[0].weight, model[0].weight.grad.clone()
        if decoupled:
            optimizer.step()
            continue
        with pytest.raises(gxd.PlanError, match=r"the gradient of '1.weight' is sparse.*l2.*decoupled=True"):
            optimizer.step()
        assert weight.grad is not None and torch.equal(weight.grad, before)
