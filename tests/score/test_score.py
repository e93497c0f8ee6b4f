"""The registry of utilities, and a new one in a few lines."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gxd
from gxd.plan import layouts as layers

PAPER = ["activation", "contribution", "mc_contribution", "mc_adaptable_contribution", "loss_gradient", "gxi", "gxd"]


def test_every_row_of_the_table_is_registered():
    assert set(PAPER) | {"gxd_all_logit", "gxd_sketch", "random"} <= set(gxd.utilities())


def steps(utility, count=12):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    cbp = gxd.ContinualBackprop(
        model, opt, example_inputs=torch.randn(2, 5), utility=utility, maturity=3, replacement_rate=0.05
    )
    for _ in range(count):
        x, y = torch.randn(6, 5), torch.randint(0, 3, (6,))
        logits = model(x)
        cbp.observe(logits, y)
        F.cross_entropy(logits, y).backward()
        opt.step()
        opt.zero_grad()
    return cbp


@pytest.mark.parametrize("utility", ["activation", "gxd", "gxd_all_logit", "gxd_sketch", "loss_gradient", "random"])
def test_every_kind_of_utility_resets_units(utility):
    assert steps(utility).total_resets > 0


def test_a_new_utility_takes_a_few_lines():
    @gxd.register_utility("variance_for_test")
    def variance(o):
        return sum((v.h - v.r).square().mean((0, 1)) * v.w_out for v in o.views) / o.w_in

    assert "variance_for_test" in gxd.utilities()
    cbp = steps("variance_for_test")
    assert cbp.total_resets > 0
    assert all((value >= 0).all() for value in cbp.utilities().values())


def test_a_new_utility_may_use_the_gradient_it_asks_for():
    @gxd.register_utility("taylor_for_test", gradient="target")
    def taylor(o):
        return sum((v.h * v.g).sum(1) for v in o.views).abs().mean(0)

    torch.testing.assert_close(steps("taylor_for_test").utilities()["0"], steps("gxi").utilities()["0"])


def test_the_random_control_gives_every_unit_a_chance_and_depends_on_the_seed_alone():
    first, second = steps("random"), steps("random")
    assert torch.equal(first.utilities()["0"], second.utilities()["0"])
    assert len(first.utilities()["0"].unique()) == 9


def test_the_sketch_needs_no_target():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 2))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    with gxd.ContinualBackprop(model, opt, example_inputs=torch.randn(2, 5), utility="gxd_sketch") as cbp:
        prediction = model(torch.randn(6, 5))
        cbp.observe(prediction)
        prediction.square().mean().backward()
        opt.step()
        assert (cbp.utilities()["0"] > 0).any()


def test_a_score_of_the_users_own_stands_in_for_the_target_logit():
    def utilities(use_score):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
        opt = torch.optim.SGD(model.parameters(), 0.1)
        cbp = gxd.ContinualBackprop(model, opt, example_inputs=torch.randn(2, 5), utility="gxd")
        x, y = torch.randn(6, 5), torch.randint(0, 3, (6,))
        logits = model(x)
        if use_score:
            cbp.observe(score=logits.gather(1, y[:, None]).squeeze(1))
        else:
            cbp.observe(logits, y)
        F.cross_entropy(logits, y).backward()
        opt.step()
        return cbp.utilities()["0"]

    torch.testing.assert_close(utilities(True), utilities(False))


def test_targets_may_be_dense_or_probabilities_and_ignored_ones_do_not_count():
    def utilities(target):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv1d(2, 6, 1), nn.Tanh(), nn.Conv1d(6, 3, 1))
        opt = torch.optim.SGD(model.parameters(), 0.1)
        cbp = gxd.ContinualBackprop(model, opt, example_inputs=torch.randn(2, 2, 4), utility="gxd")
        logits = model(torch.randn(5, 2, 4))
        cbp.observe(logits, target)
        logits.sum().backward()
        opt.step()
        return cbp.utilities()["0"]

    dense = torch.randint(0, 3, (5, 4), generator=torch.Generator().manual_seed(1))
    one_hot = F.one_hot(dense, 3).movedim(-1, 1).float()
    torch.testing.assert_close(utilities(dense), utilities(one_hot))
    ignored = dense.clone()
    ignored[:, 1:] = -100
    one_hot[:, :, 1:] = 0
    torch.testing.assert_close(utilities(ignored), utilities(one_hot))
    assert not torch.allclose(utilities(dense), utilities(ignored))


@pytest.mark.parametrize("kind", ["rows", "columns"])
@pytest.mark.parametrize(
    "layer",
    [nn.Linear(301, 907), nn.Conv2d(30, 1000, 3), nn.Conv2d(1000, 30, 3), nn.ConvTranspose1d(40, 900, 5)],
    ids=lambda layer: type(layer).__name__ + str(tuple(layer.weight.shape)),
)
def test_the_absolute_weights_of_a_layer_too_large_for_the_cache_are_summed_as_those_of_any_other(layer, kind):
    layout, weight = layers.layout_of(layer), layer.weight.detach()
    assert weight.numel() > 2 * layers.CACHED
    units = layout.axis(kind)
    index = torch.randperm(weight.shape[units])[:50].unsqueeze(1)
    one_by_one = torch.stack([weight.double().select(units, int(unit)).abs().sum() for unit in index])
    found = layers.AbsoluteSums(layout, kind, index)(layer.weight)
    torch.testing.assert_close(found, one_by_one.float(), rtol=1e-5, atol=0)
