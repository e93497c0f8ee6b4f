"""Fresh incoming weights follow the distribution the layer was initialised with, whatever it was."""

from functools import partial

import pytest
import torch
from scipy import stats
from torch import nn

import gxd
from gxd.plan.init import Init, fit
from gxd.reset.fresh import distributions, fresh

INITS = {
    "the default": lambda w: None,
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_uniform": partial(nn.init.kaiming_uniform_, nonlinearity="relu"),
    "kaiming_normal": partial(nn.init.kaiming_normal_, mode="fan_out"),
    "trunc_normal": partial(nn.init.trunc_normal_, std=0.02),
    "orthogonal": partial(nn.init.orthogonal_, gain=2**0.5),
}
LAYERS = {
    "linear": (lambda: [nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 3)], (40,)),
    "conv": (lambda: [nn.Conv2d(8, 32, 3), nn.ReLU(), nn.Conv2d(32, 3, 3)], (8, 8, 8)),
    "grouped conv": (lambda: [nn.Conv1d(16, 64, 5, groups=4), nn.ReLU(), nn.Conv1d(64, 3, 3)], (16, 12)),
    "transposed conv": (lambda: [nn.ConvTranspose2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 3, 3)], (16, 6, 6)),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("init", INITS)
def test_fresh_incoming_weights_follow_the_original_initialisation(layer, init):
    torch.manual_seed(0)
    build, shape = LAYERS[layer]
    model = nn.Sequential(*build())
    INITS[init](model[0].weight)
    original = model[0].weight.detach().clone()
    plan = gxd.find_units(model, torch.randn(2, *shape))
    fresh = []
    for seed in range(4):
        gxd.reset_units(model, plan, {"0": torch.arange(plan["0"].size)}, generator=torch.Generator().manual_seed(seed))
        fresh.append(model[0].weight.detach().clone().flatten())
    assert stats.ks_2samp(original.flatten().numpy(), torch.cat(fresh).numpy()).pvalue > 1e-3
    ratio = torch.cat(fresh).std() / original.std()
    assert 0.93 < ratio < 1.07


def test_a_layer_that_was_trained_falls_back_on_its_default():
    torch.manual_seed(0)
    weight = torch.randn(200, 100) * torch.rand(200, 1) ** 4  # heavy tails, as after training
    assert fit(weight, 0.1) == Init("uniform", 0.1)


def test_a_zero_initialised_layer_falls_back_on_its_default():
    assert fit(torch.zeros(8, 8), 0.35) == Init("uniform", 0.35)


def test_the_distribution_is_the_one_at_the_time_of_the_plan_not_of_the_reset():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 60), nn.ReLU(), nn.Linear(60, 3))
    plan = gxd.find_units(model, torch.randn(2, 50))
    with torch.no_grad():
        model[0].weight.mul_(100.0)
    gxd.reset_units(model, plan, {"0": [0, 1, 2]})
    assert model[0].weight[:3].abs().max() <= 1 / 50**0.5
    assert model[0].weight[3:].abs().max() > 1


def test_a_function_of_torch_nn_init_can_be_given_and_sees_the_whole_weight():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 60), nn.ReLU(), nn.Linear(60, 3))
    plan = gxd.find_units(model, torch.randn(2, 50), init={"0": nn.init.xavier_normal_})
    assert "xavier_normal_" in str(plan["0"].producers[0].init)
    gxd.reset_units(model, plan, {"0": torch.arange(60)})
    expected = (2 / (50 + 60)) ** 0.5
    assert model[0].weight.std().item() == pytest.approx(expected, rel=0.1)


def test_every_parameter_of_a_fresh_network_has_the_distribution_that_it_was_drawn_from():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(64, 50), nn.Linear(50, 9))
    nn.init.xavier_normal_(model[3].weight)
    nn.init.zeros_(model[3].bias)
    found = distributions(model)
    assert found["0.weight"] == ("uniform", pytest.approx(27**-0.5)) and found["0.bias"][0] == "uniform"
    assert found["1.weight"] == ("constant", 1.0) and found["1.bias"] == ("constant", 0.0)
    assert found["3.weight"] == ("normal", pytest.approx((2 / 114) ** 0.5, rel=0.05))
    assert found["3.bias"] == ("constant", 0.0)
    assert found["4.bias"] == ("uniform", pytest.approx(50**-0.5))


def test_what_was_trained_is_drawn_from_the_layers_default_and_norms_begin_with_one_and_zero():
    model = nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30))
    with torch.no_grad():
        model[0].weight.pow_(3)
        for p in model[1].parameters():
            p.uniform_(-2, 2)
    found = distributions(model)
    assert found["0.weight"] == ("uniform", pytest.approx(40**-0.5))
    assert found["1.weight"] == ("constant", 1.0) and found["1.bias"] == ("constant", 0.0)
    drawn = fresh("0.weight", model[0].weight, found, torch.Generator().manual_seed(3))
    assert drawn.shape == (30, 40) and float(drawn.abs().max()) == pytest.approx(40**-0.5, rel=0.01)
