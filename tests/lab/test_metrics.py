"""Metrics: their definitions, and that measuring changes nothing."""

import math
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gxd
from gxd.lab import metrics, models
from tests import models as zoo

MEASURED = {
    "dormant_fraction",
    "effective_rank",
    "stable_rank",
    "weight_norm",
    "bias_norm",
    "gradient_norm",
    "largest_reference",
    "nonfinite",
}


def probe(model, examples=40, shape=(64,), classes=10):
    g = torch.Generator().manual_seed(1)
    x, y = torch.rand(examples, *shape, generator=g), torch.randint(classes, (examples,), generator=g)
    return x, y, gxd.find_units(model, x[:2], residual="group")


def test_every_metric_that_is_measured_has_a_definition():
    model = models.mlp(64, 10, width=16)
    assert set(metrics.measure(model, *probe(model))) == MEASURED
    others = {"task", "test_accuracy", "test_loss", "online_accuracy", "loss", "resets"}
    others |= {"churn", "median_age_at_reset", "reach"}
    assert set(metrics.DEFINITIONS) == MEASURED | others and all(metrics.DEFINITIONS.values())


@pytest.mark.parametrize("utility", ["gxd", "loss_gradient", "gxd_sketch", "contribution"])
def test_measuring_changes_nothing_in_training(utility):
    def train(measured):
        torch.manual_seed(0)
        model = nn.Sequential(models.small_resnet(seed=0), nn.Dropout(0.1))
        model[0].bn.eval()  # a module with a mode of its own
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        x, y, plan = probe(model, 8, (3, 32, 32), 2)
        cbp = gxd.ContinualBackprop(model, optimizer, plan=plan, utility=utility, replacement_rate=0.02, maturity=1)
        for step in range(4):
            logits = model(x)
            cbp.observe(logits, y)
            if measured and step == 1:  # in the middle of a step
                metrics.measure(model, x, y, plan, cbp)
            F.cross_entropy(logits, y).backward()
            optimizer.step()
            if measured:
                metrics.measure(model, x.flip(0), y, plan, cbp)
                metrics.dormant_units(model, x, plan)
            gradients = [p.grad.clone() for p in model.parameters()]
            optimizer.zero_grad()
        modes = [module.training for module in model.modules()]
        hooks = sum(len(m._forward_pre_hooks) for m in model.modules())
        return model.state_dict(), gradients, cbp.references(), cbp.utilities(), modes, hooks, torch.get_rng_state()

    left, measured = train(False), train(True)
    for one, other in zip(left[:4], measured[:4], strict=True):
        one, other = (list(v.values()) if isinstance(v, dict) else v for v in (one, other))
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert left[4:6] == measured[4:6] and torch.equal(left[6], measured[6])


def test_training_state_is_restored_when_the_model_fails():
    model = models.mlp(64, 10, width=16)
    x, y, plan = probe(model)
    with pytest.raises(RuntimeError):
        metrics.measure(model, x[:, :5], y, plan)
    assert model.training and not model.fc2._forward_pre_hooks


def test_norms_are_those_of_all_weights_biases_and_gradients():
    model = models.mlp(64, 10, width=16, layer_norm=True, init="default")
    x, y, plan = probe(model)
    found = metrics.measure(model, x, y, plan)
    assert all(p.grad is None for p in model.parameters())
    F.cross_entropy(model.eval()(x), y).backward()
    linear = [m for m in model if isinstance(m, nn.Linear)]
    norms = [m for m in model if isinstance(m, nn.LayerNorm)]
    length = lambda tensors: torch.cat([t.flatten() for t in tensors]).norm().item()
    assert found["weight_norm"] == pytest.approx(length([m.weight for m in linear]), rel=1e-5)
    assert found["bias_norm"] == pytest.approx(length([m.bias for m in linear + norms]), rel=1e-5)
    assert found["gradient_norm"] == pytest.approx(length([p.grad for p in model.parameters()]), rel=1e-4)


def test_the_largest_reference_and_the_nonfinite_count_are_those_of_cbp():
    model = models.mlp(64, 10, width=16)
    x, y, plan = probe(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    cbp = gxd.ContinualBackprop(model, optimizer, plan=plan, utility="contribution")
    for _ in range(2):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    found = metrics.measure(model, x, y, plan, cbp)
    assert found["largest_reference"] == max(r.abs().max().item() for r in cbp.references().values()) > 0
    assert found["nonfinite"] == 0
    with pytest.warns(gxd.NonFiniteWarning):
        model(x * math.nan).sum()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert metrics.measure(model, x, y, plan, cbp)["nonfinite"] == cbp.nonfinite_observations > 0
    without = metrics.measure(model, x, y, plan)
    assert without["largest_reference"] == 0 == without["nonfinite"]


@torch.no_grad()
def test_a_unit_is_dormant_at_a_fortieth_of_its_layers_mean():
    model = models.mlp(64, 10, width=16, depth=2, init="default")
    x, y, plan = probe(model)
    before = metrics.dormant_units(model, x, plan)
    model.fc1.weight[3], model.fc1.bias[3] = 0, -1  # never on
    model.fc2.weight[5], model.fc2.bias[5] = 0, 1e-4  # always on, but hardly
    after = metrics.dormant_units(model, x, plan)
    assert after["fc1"][3] and after["fc2"][5]
    hidden = [model[:2](x).abs().mean(0), model[:4](x).abs().mean(0)]
    expected = torch.cat([h <= 0.025 * h.mean() for h in hidden])
    assert torch.equal(torch.cat([after["fc1"], after["fc2"]]), expected)
    assert metrics.measure(model, x, y, plan)["dormant_fraction"] == pytest.approx(expected.float().mean().item())
    assert sum(int(b.sum()) for b in before.values()) < int(expected.sum()) < 16


@torch.no_grad()
def test_a_channel_is_read_after_norm_and_activation_and_is_dormant_only_in_all_views():
    torch.manual_seed(4)
    model = models.ResNet(8, [(8, 1), (8, 1)], classes=10)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.bias.fill_(1)  # every channel is on
    x, _, plan = probe(model, 4, (3, 8, 8))
    assert not any(dormant.any() for dormant in metrics.dormant_units(model, x, plan).values())
    first, last = model.blocks
    last.bn1.weight[2], last.bn1.bias[2] = 0, 0  # a hidden channel
    for norm in (model.bn, first.bn2):  # a channel of the stream, before the last block
        norm.weight[5], norm.bias[5] = 0, 0
    dormant = metrics.dormant_units(model, x, plan)
    assert dormant["blocks.1.conv1"].nonzero().tolist() == [[2]]
    assert not dormant["conv"].any()  # the last block writes it again, and the head reads that
    last.bn2.weight[5], last.bn2.bias[5] = 0, 0
    assert metrics.dormant_units(model, x, plan)["conv"].nonzero().tolist() == [[5]]


def test_units_are_found_without_a_plan():
    model = models.mlp(64, 10, width=16)
    found = metrics.dormant_units(model, torch.rand(9, 64))
    assert {name: len(dormant) for name, dormant in found.items()} == {f"fc{i}": 16 for i in range(1, 5)}


@pytest.mark.parametrize("name", ["mlp", "conv", "resnet", "branches", "transformer"])
def test_every_kind_of_model_can_be_measured(name):
    model, batch, _ = zoo.make(name)
    x, y = batch()
    plan = gxd.find_units(model, x, residual="group")
    flat = lambda logits, target: logits.square().mean()
    found = metrics.measure(model, x, y, plan, loss=flat)
    assert all(math.isfinite(value) for value in found.values()) and found["effective_rank"] >= 1


def test_ranks_of_known_matrices():
    effective, stable = metrics.ranks(torch.eye(50, 7))
    assert effective.item() == pytest.approx(7) and stable.item() == pytest.approx(7)
    effective, stable = metrics.ranks(torch.outer(torch.arange(1.0, 9), torch.arange(1.0, 30)))
    assert effective.item() == pytest.approx(1, abs=1e-4) and stable.item() == pytest.approx(1)
    assert metrics.ranks(torch.zeros(4, 3)) == (0, 0)


def test_ranks_agree_with_the_singular_values_for_tall_and_wide_matrices():
    for shape in ((60, 20), (20, 60)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        s = torch.linalg.svdvals(matrix.double())
        p = s / s.sum()
        effective, stable = metrics.ranks(matrix)
        assert effective.item() == pytest.approx(math.exp(-(p * p.log()).sum()), rel=1e-6)
        assert stable.item() == pytest.approx((s.square().sum() / s.max() ** 2).item(), rel=1e-6)


def test_ranks_are_those_of_what_the_head_reads():
    for model, shape, residual in (
        (models.mlp(64, 10, width=16), (64,), "group"),
        (models.small_resnet(10), (3, 32, 32), "group"),
        (models.small_resnet(10), (3, 32, 32), "skip"),  # its last unit is read by a convolution before the head
    ):
        x, y, _ = probe(model, 6, shape)
        plan = gxd.find_units(model, x[:2], residual=residual)
        read = []
        handle = model.head.register_forward_hook(lambda m, args, out, read=read: read.append(args[0]))
        with torch.no_grad():
            model.eval()(x)
        handle.remove()
        found = metrics.measure(model, x, y, plan)
        assert (found["effective_rank"], found["stable_rank"]) == pytest.approx(
            tuple(v.item() for v in metrics.ranks(read[0])), rel=1e-6
        )


def test_a_diverged_model_gives_nans_and_no_exception():
    model = models.mlp(64, 10, width=16)
    x, y, plan = probe(model)
    with torch.no_grad():
        model.fc2.weight[0, 0] = math.nan
    found = metrics.measure(model, x, y, plan)
    for name in ("dormant_fraction", "effective_rank", "stable_rank", "weight_norm", "gradient_norm"):
        assert math.isnan(found[name])


def test_measuring_the_digits_network_is_cheap():
    model = models.mlp(64, 10, width=64)
    x, y, plan = probe(model, 357)
    metrics.measure(model, x, y, plan)
    seconds = []
    for _ in range(10):
        start = time.process_time()
        metrics.measure(model, x, y, plan)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.01
