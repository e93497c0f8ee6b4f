"""gxd.diagnose: what it finds in networks that are known to be dead, stuck or fresh, and that it changes nothing."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gxd
from gxd.diagnose.definitions import DEFINITIONS
from tests import models as zoo
from tests.rig import refused, same


def net(activation=nn.ReLU, norm=False):
    torch.manual_seed(0)
    layers = [nn.Linear(8, 12), *([nn.BatchNorm1d(12)] if norm else []), activation(), nn.Linear(12, 10), activation()]
    return nn.Sequential(*layers, nn.Linear(10, 3))


G = torch.Generator().manual_seed(1)
X, Y = torch.randn(40, 8, generator=G), torch.randint(3, (40,), generator=G)


def test_every_metric_of_every_group_has_a_definition():
    found = gxd.diagnose(net(), X, Y)
    assert set(found.overall) == set(DEFINITIONS) and list(found.groups) == ["0", "2"]
    assert all(set(metrics) == set(DEFINITIONS) for metrics in found.groups.values())
    assert all(math.isfinite(value) for value in found.to_dict().values())
    assert found.to_dict()["2/dormant"] == found.groups["2"]["dormant"] and len(found.to_dict()) == 3 * len(DEFINITIONS)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.SiLU, nn.Sigmoid, lambda: nn.LeakyReLU(0.01)])
def test_the_metrics_of_a_group_are_those_of_a_naive_loop(activation):
    model = net(activation)
    with torch.no_grad():
        model[0].weight.mul_(4)
    found = gxd.diagnose(model, X, Y, threshold=0.5)
    steepest = 0.25 if activation is nn.Sigmoid else 1.0
    a = model[0](X).detach().requires_grad_()
    h = model[1](a)
    slopes = torch.autograd.grad(h.sum(), a)[0] / steepest
    flat, never, always, low = 0, 0, 0, 0
    mean = h.abs().mean().item()
    for unit in range(12):
        column = slopes[:, unit].abs().tolist()
        flat += sum(s <= 0.1 for s in column)
        never += all(s <= 0.1 for s in column)
        always += all(s >= 0.9 for s in column)
        low += h[:, unit].abs().mean().item() <= 0.5 * mean
    s = torch.linalg.svdvals(h.detach().double())
    p = s / s.sum()
    F.cross_entropy(model(X), Y).backward()
    utilities = h.abs().mean(0) * model[2].weight.abs().sum(0)
    expected = {
        "units": 12,
        "dormant": low / 12,
        "saturation": flat / (12 * 40),
        "never_active": never / 12,
        "always_active": always / 12,
        "effective_rank": math.exp(-(p * p.log()).sum()),
        "stable_rank": (s.square().sum() / s.max() ** 2).item(),
        "weight_norm": model[0].weight.norm().item(),
        "bias_norm": model[0].bias.norm().item(),
        "gradient_norm": torch.cat([model[0].weight.grad.flatten(), model[0].bias.grad]).norm().item(),
        "utility_05": utilities.quantile(0.05).item(),
        "utility_50": utilities.quantile(0.5).item(),
        "utility_95": utilities.quantile(0.95).item(),
    }
    assert found.groups["0"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    every = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    assert found.overall["gradient_norm"] == pytest.approx(every, rel=1e-4)


def test_a_dead_network_is_dormant_and_never_on_and_raises_nothing():
    model = net()
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.bias.fill_(-1000.0)
    for utility in gxd.utilities():
        found = gxd.diagnose(model, X, Y, utility=utility)
        for name in ("dormant", "saturation", "never_active"):
            assert found.overall[name] == 1
        assert found.overall["always_active"] == 0 == found.overall["effective_rank"]
        assert "100 %" in str(found) and found._repr_html_()


def test_a_relu_that_is_always_on_is_found():
    model = net()
    with torch.no_grad():
        model[0].bias[:3] = 1000.0
    found = gxd.diagnose(model, X)
    assert found.groups["0"]["always_active"] == 3 / 12


def test_a_saturated_tanh_is_flat_but_not_dormant():
    model = net(nn.Tanh)
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([20.0, -20.0]).repeat(6))
    found = gxd.diagnose(model, X).groups["0"]
    assert found["never_active"] == 1 == found["saturation"] and found["dormant"] == 0
    assert found["effective_rank"] == pytest.approx(1, abs=1e-2)


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_a_diverged_network_gives_nans_and_no_exception(activation):
    model = net(activation)
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    found = gxd.diagnose(model, X, Y)
    shares = ("dormant", "saturation", "never_active", "always_active")
    for name in (*shares, "effective_rank", "gradient_norm", "weight_norm"):
        assert math.isnan(found.overall[name]) and math.isnan(found.groups["0"][name])
    assert str(found)


def test_without_a_target_gradient_norms_are_unknown():
    found = gxd.diagnose(net(), X)
    assert math.isnan(found.overall["gradient_norm"]) and math.isnan(found.groups["0"]["gradient_norm"])


@pytest.mark.parametrize("name", ["mlp", "conv", "resnet", "branches", "transformer"])
def test_every_kind_of_model_is_diagnosed_and_left_exactly_as_it_was(name):
    model, batch, _ = zoo.make(name)
    x, _ = batch()
    for module in list(model.modules())[1::2]:
        module.training = False  # modes of their own
    model.train()
    parameters = list(model.parameters())
    parameters[0].grad = torch.ones_like(parameters[0])
    optimizer = torch.optim.SGD(parameters, 0.1)
    cbp = gxd.ContinualBackprop(model, optimizer, example_inputs=x, utility="contribution")
    seen = []
    handle = parameters and model.register_forward_hook(lambda *args: seen.append(1))
    before = copy.deepcopy((model.state_dict(), cbp.state_dict()))
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    modes = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    found = gxd.diagnose(model, x)
    assert same(before, (model.state_dict(), cbp.state_dict())) and not seen
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert modes == [m.training for m in model.modules()] and torch.equal(state, torch.get_rng_state())
    assert parameters[0].grad.eq(1).all() and all(p.grad is None for p in parameters[1:])
    assert 0 <= found.overall["dormant"] < 0.5 and found.overall["effective_rank"] >= 1
    handle.remove()
    cbp.close()


def test_convolutions_with_batch_norm_have_the_slopes_of_their_own_activation():
    model, batch, _ = zoo.make("conv")
    x, _ = batch()
    found = gxd.diagnose(model, x)
    model.eval()
    with torch.no_grad():
        before = model.bn1(model.conv1(x))
    off = (before <= 0).movedim(1, -1).flatten(0, -2)
    assert found.groups["conv1"]["saturation"] == pytest.approx(off.double().mean().item())
    assert found.groups["conv1"]["never_active"] == pytest.approx(off.all(0).double().mean().item())


def test_units_of_one_layer_in_two_groups_have_the_slopes_of_their_own_rows():
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.left, self.right = nn.Linear(8, 12), nn.Linear(5, 3), nn.Linear(7, 3)

        def forward(self, x):
            h = self.fc(x).relu()
            return self.left(h[:, :5]) + self.right(h[:, 5:])

    model = Split()
    with torch.no_grad():
        model.fc.bias[:5] = -1e3
        model.fc.bias[5:] = 1e3
    found = list(gxd.diagnose(model, X).groups.values())
    assert [(m["units"], m["never_active"], m["always_active"]) for m in found] == [(5, 1, 0), (7, 0, 1)]


def test_the_table_fits_a_screen_however_many_groups_there_are():
    torch.manual_seed(0)
    layers = [layer for _ in range(40) for layer in (nn.Linear(6, 6), nn.ReLU())]
    blocks = nn.Sequential()
    blocks.add_module("a_rather_long_name_of_a_module", nn.Sequential(*layers, nn.Linear(6, 2)))
    text = str(gxd.diagnose(blocks, torch.randn(9, 6)))
    assert len(text.splitlines()) < 40 and max(map(len, text.splitlines())) <= 120 and "16 more groups" in text


@pytest.mark.parametrize(
    ("arguments", "exception", "words"),
    [
        ({"target": [1, 2]}, TypeError, ("target", "list")),
        ({"target": X}, ValueError, ("loss=",)),
        ({"loss": F.mse_loss}, ValueError, ("target",)),
        ({"utility": "gxd"}, ValueError, ("gxd", "target")),
        ({"utility": "gdx"}, ValueError, ("did you mean",)),
        ({"threshold": -1}, ValueError, ("threshold", "-1")),
        ({"target": Y[:7]}, ValueError, ("40", "7")),
        ({"target": Y, "loss": lambda z, y: z}, ValueError, ("scalar", "(40, 3)")),
        ({"plan": "fc1"}, TypeError, ("plan",)),
    ],
)
def test_bad_input_is_refused_in_words(arguments, exception, words):
    refused(lambda: gxd.diagnose(net(), X, **arguments), exception, words)
