"""A fresh model hides its units behind zeros and ones. The check disturbs them, and then proves something."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gxd
from gxd.plan.layouts import NamedTensors
from gxd.plan.verify.disturb import disturb
from gxd.sandbox.substitute import copies
from tests.broken_plans import broken

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(3, 6, 4, 4, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """A residual branch behind a scale, between a stem and a head."""

    def __init__(self, scale, images=False, norm=nn.Identity):
        super().__init__()
        torch.manual_seed(0)

        def layer(a, b):
            return nn.Conv2d(a, b, 1) if images else nn.Linear(a, b)

        self.a, self.b, self.n, self.head = layer(6, 8), layer(8, 6), norm(), layer(6, 3)
        self.scale = nn.Parameter(scale)

    def forward(self, x):
        return self.head(x + self.scale * self.n(self.b(F.gelu(self.a(x)))))


def zeroed(model, *names, value=0.0):
    for name in names:
        nn.init.constant_(model.get_parameter(name), value)
    return model


def scaled(model, name, factor):
    with torch.no_grad():
        model.get_parameter(name).mul_(factor)
    return model


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))


def normed(norm):
    nn.init.zeros_(norm.weight)
    return norm


ONE = torch.ones(())
HIDDEN = {
    "a layer scale of 1e-6": (lambda: Block(torch.full((6,), 1e-6)), X, "a"),
    "a layer scale of 1e-5, for images": (lambda: Block(torch.full((6, 1, 1), 1e-5), images=True), IMAGES, "a"),
    "a layer scale of 1e-5, broadcast": (lambda: Block(torch.full((1, 6, 1, 1), 1e-5), images=True), IMAGES, "a"),
    "a layer scale with some training": (lambda: Block(1e-4 * torch.randn(6)), X, "a"),
    "one scale of 0": (lambda: Block(torch.zeros(())), X, "a"),
    "a zero gamma": (lambda: Block(ONE, norm=lambda: normed(nn.LayerNorm(6))), X, "a"),
    "a zero gamma for images": (lambda: Block(ONE, True, lambda: normed(nn.BatchNorm2d(6))), IMAGES, "a"),
    "a zero gamma of a norm of the user's": (lambda: Block(ONE, norm=lambda: normed(nn.RMSNorm(6))), X, "a"),
    "a zero last layer of a branch": (lambda: zeroed(Block(ONE), "b.weight", "b.bias"), X, "a"),
    "a zero convolution": (lambda: zeroed(Block(ONE, True), "b.weight", "b.bias"), IMAGES, "a"),
    "a zero head": (lambda: zeroed(Block(ONE), "head.weight", "head.bias"), X, "a"),
    "a constant head": (lambda: zeroed(mlp(), "2.weight", value=0.1), X, "0"),
    "a head scaled down": (lambda: scaled(mlp(), "2.weight", 1e-5), X, "0"),
    "two scales in a row": (lambda: zeroed(Block(torch.full((6,), 1e-6)), "head.weight"), X, "a"),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_units_behind_zeros_and_small_scales_are_checked(name):
    build, x, group = HIDDEN[name]
    model = build()
    plan = gxd.find_units(model, x)
    report = gxd.verify_plan(model, x, plan=plan)
    assert report[group].status == "passed", report
    assert report[group].error < 1e-6
    for mistake, wrong in broken(plan, group):
        assert gxd.verify_plan(model, x, plan=wrong)[group].status == "wrong", mistake


def test_a_bias_that_is_wrongly_reset_shows_although_all_are_zero():
    model = zeroed(mlp(), "0.bias")
    plan = gxd.find_units(model, X)
    producer = plan["0"].producers[0]
    wrong = replace(producer, bias_rows=producer.bias_rows.roll(1))
    plan = replace(plan, groups=(replace(plan["0"], producers=(wrong,)),))
    assert gxd.verify_plan(model, X, plan=plan)["0"].status == "wrong"


def test_a_norm_entry_that_is_wrongly_reset_shows_although_all_are_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 3))
    for mistake, wrong in broken(gxd.find_units(model, X), "0"):
        assert gxd.verify_plan(model, X, plan=wrong)["0"].status == "wrong", mistake


@pytest.mark.parametrize("kind", ["zero gammas", "zero scales", "batch norms"])
def test_a_hundred_layers_stay_of_a_sane_size(kind):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = (nn.ModuleList(nn.Linear(*size) for _ in range(100)) for size in ((6, 8), (8, 6)))
            self.inner = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(100))
            self.outer = nn.ModuleList(normed(nn.LayerNorm(6)) for _ in range(100))
            self.scales = nn.ParameterList(torch.zeros(()) for _ in range(100))

        def forward(self, x):
            for i in range(100):
                y = self.b[i](F.relu(self.inner[i](self.a[i](x))))
                x = x + {"zero gammas": self.outer[i], "zero scales": self.scales[i].mul}.get(kind, nn.Identity())(y)
            return x

    model = Deep().eval()
    tensors = copies(NamedTensors(model), torch.float64)
    disturb(tensors, torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = float(model(X).abs().max())
        after = float(torch.func.functional_call(model, tensors, (X.double(),)).abs().max())
    assert 0.1 * before < after < 1e6 * before
    plan = gxd.find_units(model, groups=[gxd.manual_group("a.50", "b.50", norms="inner.50")])
    assert gxd.verify_plan(model, X, plan=plan)["a.50"].status == "passed"


def test_a_deep_network_whose_norms_have_seen_nothing_yet_is_checked():
    """Statistics of 0 and 1 normalise nothing, so that each norm lets a tenth through."""
    torch.manual_seed(0)
    layers = [part for _ in range(16) for part in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())]
    model = nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 3))
    for norm in model[2::3]:
        nn.init.constant_(norm.weight, 0.1)
    plan = gxd.find_units(model, X)
    report = gxd.verify_plan(model, X, plan=plan)
    assert {g.status for g in report.groups} == {"passed"}, report
    assert all(gxd.verify_plan(model, X, plan=wrong)["1"].status == "wrong" for _, wrong in broken(plan, "1"))
    assert not model[2].running_mean.any()


def test_tied_tensors_stay_tied_and_are_disturbed_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.LayerNorm(4))
    model[1].weight, model[3].weight = model[0].weight, model[2].weight
    tensors = copies(NamedTensors(model))
    disturb(tensors, torch.Generator().manual_seed(0))
    assert tensors["0.weight"] is tensors["1.weight"] and tensors["2.weight"] is tensors["3.weight"]
    moved = (tensors["2.weight"].detach() - 1).abs()
    assert float(moved.min()) > 0.09 and float(moved.max()) < 0.31


def test_entries_are_away_from_what_a_reset_writes_and_variances_stay_positive():
    model = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Linear(64, 2))
    nn.init.zeros_(model[0].bias)
    tensors = copies(NamedTensors(model))
    disturb(tensors, torch.Generator().manual_seed(0))
    for name, written in {"0.bias": 0, "1.weight": 1, "1.bias": 0, "1.running_mean": 0, "1.running_var": 1}.items():
        assert float((tensors[name].detach() - written).abs().min()) > 0.05, name
    assert float(tensors["1.running_var"].min()) > 0
    assert torch.equal(tensors["0.weight"], model[0].weight), "weights that hide nothing are left as they are"
    assert torch.equal(tensors["1.num_batches_tracked"], model[1].num_batches_tracked)


@pytest.mark.parametrize("kind", ["not a number", "refused"])
def test_a_parameter_that_may_not_be_moved_is_left_alone(kind):
    class Rooted(nn.Module):
        """Its small parameter must be positive."""

        def __init__(self):
            super().__init__()
            self.body, self.eps = mlp(), nn.Parameter(torch.full((3,), 1e-6))

        def forward(self, x):
            if kind == "refused" and bool((self.eps < 0).any()):
                raise ValueError("eps must be positive")
            return self.body(x) / self.eps.sqrt()

    model = Rooted()
    report = gxd.verify_plan(model, X, plan=gxd.find_units(model, groups=[gxd.manual_group("body.0", "body.2")]))
    assert report["body.0"].status == "passed"
