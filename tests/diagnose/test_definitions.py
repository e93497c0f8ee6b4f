"""Each metric is what its definition says: naive loops, singular values, scipy."""

import math

import pytest
import torch
from scipy import stats
from torch import nn

from gxd.diagnose.definitions import dormant, norm, quantiles, ranks, readiness, saturation
from gxd.diagnose.student import interval, quantile, within


def test_a_unit_is_dormant_at_a_share_of_its_layers_mean_and_all_are_in_a_layer_of_zeros():
    magnitude = torch.tensor([1.0, 0.1, 0.02, 3.0])
    mean = (1.0 + 0.1 + 0.02 + 3.0) / 4
    for threshold in (0.0, 0.025, 0.1, 1.0):
        assert dormant(magnitude, threshold).tolist() == [m <= threshold * mean for m in magnitude.tolist()]
    assert dormant(torch.zeros(3)).all()


@pytest.mark.parametrize("shape", [(60, 20), (20, 60)])
def test_ranks_are_those_of_the_singular_values(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 0.3
    s = torch.linalg.svdvals(matrix.double())
    p = s / s.sum()
    effective, stable = ranks(matrix)
    assert effective.item() == pytest.approx(math.exp(-(p * p.log()).sum()), rel=1e-6)
    assert stable.item() == pytest.approx((s.square().sum() / s.max() ** 2).item(), rel=1e-6)
    assert [r.item() for r in ranks(torch.zeros(shape))] == [0, 0]
    assert all(math.isnan(r) for r in ranks(matrix.index_fill(0, torch.tensor([0]), math.inf)))


def test_saturation_counts_flat_values_and_units_that_are_never_or_always_on():
    slopes = torch.tensor([[0.0, 1.0, 0.0, 0.5], [0.05, 0.95, 1.0, 0.5], [-0.09, 1.1, 1.0, 0.5]])
    share, never, always = (v.item() for v in saturation(slopes))
    assert share == pytest.approx(sum(abs(s) <= 0.1 for s in slopes.flatten().tolist()) / 12)
    assert never == 1 / 4 and always == 1 / 4
    assert all(math.isnan(v) for v in saturation(slopes * math.nan))


def test_the_norm_of_several_tensors_is_that_of_all_their_elements():
    tensors = [torch.randn(3, 4), torch.randn(5), nn.Parameter(torch.randn(2, 2, 2))]
    assert norm(tensors).item() == pytest.approx(torch.cat([t.detach().flatten() for t in tensors]).norm().item())
    assert norm([]).item() == 0


def test_quantiles_are_those_of_the_finite_values():
    values = torch.randn(37, dtype=torch.float64)
    expected = torch.quantile(values, torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64))
    torch.testing.assert_close(quantiles(torch.cat([values, torch.tensor([math.nan, math.inf]).double()])), expected)
    assert quantiles(torch.tensor([2.0])).tolist() == [2, 2, 2]
    assert quantiles(torch.tensor([math.nan])).isnan().all()


def test_readiness_is_strength_times_reliability_over_the_loss():
    gradients = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)) + 1
    g, squares = gradients.mean(0), gradients.square().sum(1)
    found = readiness(0.7, g.square().sum().item(), squares.tolist())
    assert found == pytest.approx((g.norm() ** 4 / (0.7 * squares.mean())).item())
    assert readiness(0.7, 0.0, [0.0, 0.0]) == 0  # dead
    assert math.isnan(readiness(-1.0, 1.0, [1.0])) and math.isnan(readiness(1.0, math.nan, [math.nan]))


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 9, 30])
def test_students_t_is_that_of_scipy(degrees):
    for t in (0.0, 0.3, 2.0, 15.0):
        assert within(t, degrees) == pytest.approx(2 * stats.t.cdf(t, degrees) - 1, abs=1e-12)
    for confidence in (0.5, 0.95, 0.999):
        assert quantile(confidence, degrees) == pytest.approx(stats.t.ppf((1 + confidence) / 2, degrees), rel=1e-9)


def test_the_interval_of_a_mean_is_that_of_scipy():
    values = torch.tensor([0.1, 0.4, 0.3, 0.9], dtype=torch.float64)
    expected = stats.t.interval(0.95, 3, values.mean().item(), stats.sem(values.numpy()))
    assert interval(values, 0.95) == pytest.approx(expected)
