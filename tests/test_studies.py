"""The studies: their methods are methods of gxd, and say what they claim to be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gxd
from gxd.methods import registry

AGE = Path(__file__).parents[1] / "studies" / "age"

pytestmark = pytest.mark.skipif(not AGE.is_dir(), reason="not a checkout: a source distribution has no studies")


@pytest.fixture
def expected_age(monkeypatch):
    """The module, as the script beside it imports it; what it registers is forgotten."""
    monkeypatch.syspath_prepend(AGE)
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    sys.modules.pop("expected_age", None)
    import expected_age

    return expected_age


def trained(method):
    """The weights after training with it, and the units that were reset, step by step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    attached = gxd.attach(model, optimizer, method, example_inputs=torch.zeros(2, 5))
    steps = []
    for _ in range(60):
        x = torch.randn(8, 5)
        y = torch.randint(3, (8,))
        logits = model(x)
        attached.observe(logits, y)
        F.cross_entropy(logits, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append({name: index.tolist() for name, index in attached.last_resets.items()})
    return [p.detach() for p in model.parameters()], steps


def test_the_old_ranking_with_exponent_zero_is_the_papers_rule_bit_for_bit(expected_age):
    options = {"replacement_rate": 0.05, "maturity": 5}
    same = gxd.method("expected_age", exponent=0.0, **options)
    same.name = "continual_backprop"  # fresh weights are drawn by the name
    ours, resets = trained(same)
    papers, as_in_paper = trained(gxd.method("continual_backprop", **options))
    assert resets == as_in_paper and any(resets)
    assert all(torch.equal(one, other) for one, other in zip(ours, papers, strict=True))


def test_the_old_ranking_spares_newborn_units(expected_age):
    options = {"replacement_rate": 0.05, "maturity": 5}
    _, by_cost = trained(gxd.method("continual_backprop", **options))
    _, by_age = trained(gxd.method("expected_age", exponent=1.0, **options))
    reached = lambda steps: {(name, unit) for step in steps for name, units in step.items() for unit in units}
    assert len(reached(by_age)) > len(reached(by_cost))


def test_the_old_ranking_keeps_the_laws_of_methods(expected_age):
    gxd.testing.check_method("expected_age")
