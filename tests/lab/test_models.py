"""The paper's networks: shapes, initialisation, and the units gxd finds in them."""

import math

import pytest
import torch
from torch import nn

import gxd
from gxd.lab import models
from gxd.lab.errors import UserError

BUILD = {
    "mlp": lambda seed: models.mlp(20, 10, width=16, seed=seed),
    "small_resnet": lambda seed: models.small_resnet(seed=seed),
    "resnet18": lambda seed: models.resnet18(seed=seed),
}


@pytest.mark.parametrize("name", models.MODELS)
def test_weights_come_from_the_seed_and_the_global_random_state_is_left_alone(name):
    before = torch.get_rng_state()
    one, same, other = BUILD[name](1), BUILD[name](1), BUILD[name](2)
    assert torch.equal(before, torch.get_rng_state())
    pairs = list(zip(one.parameters(), same.parameters(), other.parameters()))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert all(not torch.equal(a, c) for a, _, c in pairs if a.dim() > 1)


@pytest.mark.parametrize("activation", models.ACTIVATIONS)
@pytest.mark.parametrize("layer_norm", [False, True])
def test_the_mlp_has_four_groups_of_units(activation, layer_norm):
    model = models.mlp(784, 10, activation=activation, layer_norm=layer_norm)
    plan = gxd.find_units(model, torch.zeros(2, 784))
    assert [(g.name, g.size) for g in plan.groups] == [(f"fc{i}", model.fc1.out_features) for i in range(1, 5)]
    assert all(bool(g.norms) == layer_norm for g in plan.groups)
    assert model(torch.rand(3, 784)).shape == (3, 10)


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "build",
    [
        lambda name: models.mlp(784, 10, width=100, depth=2, activation=name),
        lambda name: models.mlp(20, 1, width=50, depth=1, activation=name),
        lambda name: models.conv_net(activation=name),
    ],
)
def test_crelu_narrows_the_network_to_as_many_parameters_as_without(build):
    plain, narrow = parameters(build("relu")), parameters(build("crelu"))
    assert 0.85 * plain < narrow <= plain


def test_crelu_keeps_both_signs_and_its_units_are_found():
    x = torch.tensor([[1.0, -2.0]])
    assert models.CReLU()(x).tolist() == [[1.0, 0.0, 0.0, 2.0]]
    assert models.mlp(784, 10, width=100, depth=2, activation="crelu").fc1.out_features == 90
    for model, batch in (
        (models.mlp(12, 3, width=8, depth=2, activation="crelu"), torch.randn(4, 12)),
        (models.conv_net(7, activation="crelu"), torch.randn(4, 3, 32, 32)),
    ):
        report = gxd.verify_plan(model, batch, units_per_group=1)
        assert len(report.groups) >= 2 and {group.status for group in report.groups} == {"passed"}


@pytest.mark.parametrize("activation", models.ACTIVATIONS)
@pytest.mark.parametrize("layer_norm", [False, True])
def test_the_conv_net_has_two_groups_of_channels_and_one_of_units(activation, layer_norm):
    model = models.conv_net(activation=activation, layer_norm=layer_norm)
    plan = gxd.find_units(model, torch.zeros(2, 3, 32, 32))
    channels, units = (16, 100) if activation != "crelu" else (model.conv1.out_channels, model.fc.out_features)
    assert [(g.name, g.size) for g in plan.groups] == [("conv1", channels), ("conv2", channels), ("fc", units)]
    assert all(bool(g.norms) == layer_norm for g in plan.groups)
    assert model(torch.rand(3, 3, 32, 32)).shape == (3, 100)


def test_the_default_init_of_a_convolution_is_torchs():
    conv, own = models.conv_net().conv2, nn.Conv2d(16, 16, 5)
    assert conv.weight.std().item() == pytest.approx(own.weight.std().item(), rel=0.05)
    assert 0.98 / 20 < conv.weight.abs().max() <= 1 / 20 and conv.bias.abs().max() <= 1 / 20


def test_the_linear_model_is_one_layer():
    model = models.linear((3, 4, 4), 7)
    x = torch.rand(2, 3, 4, 4)
    assert torch.allclose(model(x), x.flatten(1) @ model.head.weight.T + model.head.bias, atol=1e-6)
    assert parameters(model) == 48 * 7 + 7 and not gxd.find_units(model, x).groups


def test_input_norm_has_the_moments_of_all_examples_with_weights_that_decay():
    chance = torch.Generator().manual_seed(0)
    batches = [3 + 2 * torch.randn(n, 4, generator=chance, dtype=torch.float64) for n in (5, 1, 8)]
    norm = models.InputNorm((4,), decay=0.9).double()
    for number, batch in enumerate(batches, 1):
        out = norm(batch)
        left = 0.9**number  # of the first mean 0 and variance 1
        weights = [0.1 * 0.9 ** (number - k) / len(one) for k, one in enumerate(batches[:number], 1)]
        first = sum(w * one.sum(0) for w, one in zip(weights, batches))
        second = left + sum(w * one.square().sum(0) for w, one in zip(weights, batches))
        assert torch.allclose(norm.mean, first) and torch.allclose(norm.variance, second - first.square())
        assert torch.allclose(out, (batch - first) / (second - first.square() + norm.eps).sqrt())
    state = {name: value.clone() for name, value in norm.state_dict().items()}
    norm.eval()(batches[0])
    assert set(state) == {"mean", "variance"}
    assert all(torch.equal(value, state[name]) for name, value in norm.state_dict().items())


def test_input_norm_stands_in_front_and_leaves_the_units_as_they_are():
    model, plain = (models.mlp(6, 3, width=5, depth=1, input_norm=norm) for norm in (True, False))
    assert next(model.children()) is model.input_norm and isinstance(model.input_norm, models.InputNorm)
    assert torch.equal(model.fc1.weight, plain.fc1.weight)
    x = torch.rand(2, 6)
    assert gxd.find_units(model, x).fingerprint() == gxd.find_units(plain, x).fingerprint()
    assert not model.input_norm.mean.any()  # tracing counts for nothing


def test_layer_norm_stands_before_the_activation():
    kinds = [type(layer) for layer in models.mlp(8, 2, depth=2, activation="silu", layer_norm=True)]
    assert kinds == [nn.Linear, nn.LayerNorm, nn.SiLU, nn.Linear, nn.LayerNorm, nn.SiLU, nn.Linear]


def test_glorot_is_uniform_with_zero_biases():
    model = models.mlp(784, 10)
    for layer in (model.fc1, model.fc2, model.head):
        bound = math.sqrt(6 / (layer.in_features + layer.out_features))
        assert 0.98 * bound < layer.weight.abs().max() <= bound
        assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
        assert not layer.bias.any()
    plan = gxd.find_units(model, torch.zeros(2, 784))
    drawn = plan["fc1"].producers[0].init  # resets draw from the same distribution
    assert drawn.kind == "uniform" and drawn.scale == pytest.approx(math.sqrt(6 / 1040), rel=1e-3)


def test_the_default_init_is_that_of_nn_linear():
    model = models.mlp(784, 10, init="default")
    for layer in (model.fc1, model.fc4, model.head):
        reference = nn.Linear(layer.in_features, layer.out_features)
        assert layer.weight.std().item() == pytest.approx(reference.weight.std().item(), rel=0.05)
        assert layer.bias.abs().max() <= 1 / math.sqrt(layer.in_features) and layer.bias.any()


def test_the_small_resnet_has_eight_layers_and_208_units():
    model = models.small_resnet()
    assert sum(isinstance(m, (nn.Conv2d, nn.Linear)) for m in model.modules()) == 8
    plan = gxd.find_units(model, torch.zeros(2, 3, 32, 32), residual="group")
    assert {g.name: g.size for g in plan.groups} == {
        "conv": 16,
        "blocks.0.conv1": 32,
        "blocks.0.conv2": 32,
        "blocks.1.conv1": 64,
        "blocks.1.conv2": 64,
    }
    assert model(torch.rand(3, 3, 32, 32)).shape == (3, 2)


def test_resnet18_has_eight_hidden_layers_and_four_streams():
    plan = gxd.find_units(models.resnet18(), torch.zeros(2, 3, 32, 32), residual="group")
    streams = [g.size for g in plan.groups if g.residual]
    hidden = [g.size for g in plan.groups if not g.residual]
    assert streams == [64, 128, 256, 512] and hidden == [64, 64, 128, 128, 256, 256, 512, 512]
    layers = [m for m in models.resnet18().modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert len([m for m in layers if not (isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1))]) == 18


def test_convolutions_are_he_normal():
    conv = models.resnet18().blocks[7].conv2
    assert conv.weight.std().item() == pytest.approx(math.sqrt(2 / (512 * 9)), rel=0.01)
    kurtosis = (conv.weight.flatten()[:100_000] / conv.weight.std()).pow(4).mean().item()
    assert kurtosis == pytest.approx(3, abs=0.15)  # 1.8 for a uniform


def test_running_statistics_keep_nine_tenths_of_the_old_value():
    model = models.small_resnet().train()
    x = torch.rand(8, 3, 32, 32)
    model(x)
    assert torch.allclose(model.bn.running_mean, 0.1 * model.conv(x).mean((0, 2, 3)), atol=1e-6)


def test_zero_head_zeroes_the_head_only():
    model = models.small_resnet()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    models.zero_head(model)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"head.weight"} and not model.head.weight.any() and not model.head.bias.any()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"activation": "gelu"}, "unknown activation 'gelu'.*relu, silu, leaky_relu, tanh, crelu"),
        ({"init": "zeros"}, "unknown init 'zeros'"),
        ({"depth": 0}, "at least one hidden layer"),
    ],
)
def test_a_wrong_setting_is_named(settings, words):
    with pytest.raises(UserError, match=words):
        models.mlp(4, 2, **settings)
