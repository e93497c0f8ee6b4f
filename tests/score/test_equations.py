"""The library against the equations, written out as loops in ``tests/oracle.py``, step by step through many resets."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gxd
from tests.oracle import UTILITIES, NaiveCBP, View, naive_scores

ACTIVATIONS = {"relu": torch.relu, "silu": F.silu, "tanh": torch.tanh}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
}
LR = {"sgd": 0.05, "momentum": 0.05, "adam": 0.02}


class Mlp(nn.Module):
    def __init__(self, widths, activation):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.activation = activation

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)


def run_both(utility, optimizer="sgd", activation="relu", steps=40, compensate=True, ranking="absolute"):
    """Train the library and the oracle side by side; the oracle replays the library's fresh rows."""
    torch.manual_seed(3)
    model = Mlp([5, 8, 7, 6, 4], ACTIVATIONS[activation]).double()
    for layer in model.layers:
        nn.init.normal_(layer.bias, std=0.3)
    linears = list(model.layers)
    naive = NaiveCBP.of_linears(
        linears,
        activation=ACTIVATIONS[activation],
        utility=utility,
        fresh=lambda layer, unit, fan_in: linears[layer].weight[unit].detach().clone(),
        rate=1 / 16,
        maturity=5,
        decay=0.9,
        optimizer=optimizer,
        lr=LR[optimizer],
        compensate=compensate,
        by_age=ranking == "age",
    )
    opt = OPTIMIZERS[optimizer](model.parameters())
    cbp = gxd.ContinualBackprop(
        model,
        opt,
        example_inputs=torch.zeros(2, 5, dtype=torch.float64),
        utility=utility,
        replacement_rate=1 / 16,
        maturity=5,
        decay=0.9,
        compensate=compensate,
        ranking=ranking,
        seed=11,
    )
    noise = torch.Generator().manual_seed(12)
    data = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.randn(6, 5, dtype=torch.float64, generator=data)
        y = torch.randint(0, 4, (6,), generator=data)
        logits = model(x)
        cbp.observe(logits, y)
        F.cross_entropy(logits, y).backward()
        opt.step()
        opt.zero_grad()
        drawn = None
        if utility == "gxd_sketch":
            drawn = torch.randint(0, 2, (6, 4), generator=noise, dtype=torch.int8).double() * 2 - 1
        elif utility == "gxd_kl":
            drawn = torch.rand(6, generator=noise)
        record = naive.step(x, y, noise=drawn)
        yield model, cbp, naive, record


def assert_same(cbp, model, naive, record):
    names = [f"layers.{i}" for i in range(3)]
    resets = {names[group]: indices for group, indices in record.resets}
    assert {name: index.tolist() for name, index in cbp.last_resets.items()} == {k: list(v) for k, v in resets.items()}
    for group, name in enumerate(names):
        ages = torch.as_tensor(naive.age[group])
        assert cbp.ages()[name].tolist() == ages.tolist()
        torch.testing.assert_close(cbp.references()[name], torch.as_tensor(naive.references()[group]).double())
        torch.testing.assert_close(cbp.utilities()[name], torch.as_tensor(naive.utilities()[group]).double())
    for ours, theirs in zip(model.parameters(), record.parameters, strict=True):
        torch.testing.assert_close(ours.detach(), theirs)


@pytest.mark.parametrize("utility", UTILITIES)
def test_every_utility_scores_selects_and_resets_as_the_equations_say(utility):
    resets = 0
    for model, cbp, naive, record in run_both(utility):
        assert_same(cbp, model, naive, record)
        resets = cbp.total_resets
    assert resets > 20


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_every_optimizer_and_activation_trains_as_the_equations_say(optimizer, activation):
    for model, cbp, naive, record in run_both("gxd", optimizer, activation):
        assert_same(cbp, model, naive, record)


@pytest.mark.parametrize("utility", ["gxd", "gxd_loss", "contribution"])
def test_ranked_by_age_the_units_of_lowest_utility_per_step_lived_are_reset(utility):
    by_age, absolute = (
        [r.resets for *_, r in run_both(utility, steps=120, ranking=ranking)] for ranking in ("age", "absolute")
    )
    assert by_age != absolute  # or this would show nothing
    for model, cbp, naive, record in run_both(utility, steps=120, ranking="age"):
        assert_same(cbp, model, naive, record)


def test_without_compensation_the_biases_stay_as_the_equations_say():
    for model, cbp, naive, record in run_both("contribution", compensate=False):
        assert_same(cbp, model, naive, record)


def observed(utility, h, g, r, w_in, w_out):
    """A registered utility applied to given tensors, as the library would call it."""
    function = gxd.score.utilities.get_utility(utility).function
    views = [gxd.UnitView(h[v], r[v], g[v], lambda v=v: w_out[v].abs().sum(1)) for v in range(len(h))]
    return function(gxd.Observation(views, lambda: w_in.abs().sum(1), torch.Generator()))


@pytest.mark.parametrize("utility", [u for u in UTILITIES if u != "gxd_all_logit"])
def test_several_views_and_positions_are_scored_as_the_equations_say(utility):
    torch.manual_seed(0)
    units, views = 5, 3
    h = [torch.randn(4, p, units, dtype=torch.float64) for p in (1, 3, 2)]
    g = [torch.randn_like(part) for part in h]
    r = torch.randn(views, units, dtype=torch.float64)
    w_in, w_out = torch.randn(units, 7, dtype=torch.float64), torch.randn(views, units, 6, dtype=torch.float64)
    naive = naive_scores(utility, [View(h[v], g[v], r[v]) for v in range(views)], w_in=w_in, w_out=w_out)
    torch.testing.assert_close(observed(utility, h, g, r, w_in, w_out), torch.tensor(naive, dtype=torch.float64))
