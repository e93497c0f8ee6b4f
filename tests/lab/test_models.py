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
    assert [(g.name, g.size) for g in plan.groups] == [(f"fc{i}", 256) for i in range(1, 5)]
    assert all(bool(g.norms) == layer_norm for g in plan.groups)
    assert model(torch.rand(3, 784)).shape == (3, 10)


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
        ({"activation": "gelu"}, "unknown activation 'gelu'.*relu, silu, leaky_relu, tanh"),
        ({"init": "zeros"}, "unknown init 'zeros'"),
        ({"depth": 0}, "at least one hidden layer"),
    ],
)
def test_a_wrong_setting_is_named(settings, words):
    with pytest.raises(UserError, match=words):
        models.mlp(4, 2, **settings)
