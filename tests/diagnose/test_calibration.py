"""How often gxd.probe is wrong: its interval against closed forms and simulations, and real probes of fresh networks.

The large table is made by ``studies/probe_calibration.py``.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gxd
from gxd.diagnose.student import quantile, ratio, shares
from gxd.diagnose.verdict import Probe

CONFIDENCE = 0.9


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


# --- the interval -----------------------------------------------------------------------------------------------------


def test_where_the_runs_of_the_network_agree_the_ends_are_those_of_a_prediction_interval():
    others = doubles(0.8, 1.0, 1.3, 0.9)
    half = quantile(CONFIDENCE, 3) * float(others.std()) * math.sqrt(1 + 1 / 4)
    mean = float(others.mean())
    assert ratio(doubles(0.5, 0.5), others, CONFIDENCE) == pytest.approx((0.5 / (mean + half), 0.5 / (mean - half)))


def test_where_the_others_agree_the_ends_are_those_of_the_interval_of_a_mean():
    one = doubles(0.4, 0.5, 0.7)
    half = quantile(CONFIDENCE, 2) * float(one.std()) / math.sqrt(3)
    mean = float(one.mean())
    assert ratio(one, doubles(2, 2, 2, 2), CONFIDENCE) == pytest.approx(((mean - half) / 2, (mean + half) / 2))


def test_at_the_ends_the_difference_is_as_large_as_its_spread():
    one, others = doubles(0.4, 0.5, 0.45), doubles(0.8, 1.0, 1.3, 0.9, 1.1)
    luck = quantile(CONFIDENCE, 4) ** 2 * float(others.var()) * (1 + 1 / 5)
    runs = quantile(CONFIDENCE, 2) ** 2 * float(one.var()) / 3
    for end in ratio(one, others, CONFIDENCE):
        difference = float(others.mean() - one.mean() / end)
        assert difference**2 == pytest.approx(luck + runs / end**2)


@pytest.mark.parametrize(
    ("one", "others", "expected"),
    [
        ([0.0, 0.0], [0.1, 5.0], (0.0, 0.0)),  # nothing is learned, whatever the others do
        ([1.0, 1.0], [0.1, 5.0], (None, math.inf)),  # a further one may learn nothing
        ([0.0, 1.0], [1.0, 1.0], (0.0, None)),  # the network may learn nothing
    ],
)
def test_ends_that_there_are_not_are_zero_and_infinity(one, others, expected):
    found = ratio(doubles(*one), doubles(*others), 0.95)
    assert all(right is None or left == right for left, right in zip(found, expected)) and found[0] <= 1 <= found[1] + 1


@pytest.mark.parametrize(
    ("order", "noise", "least", "most"), [(0, 0, 0.94, 0.96), (0.05, 0.05, 0.94, 1), (0.2, 0, 0.94, 1)]
)
def test_of_networks_that_are_all_alike_one_is_outside_as_often_as_the_confidence_says(order, noise, least, most):
    draw = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)
    inside = 0
    for _ in range(3000):
        effect, luck = order * normal(5), 0.1 * normal(11)
        one = 1 + luck[0] + effect + noise * normal(5)
        others = 1 + luck[1:] + effect.repeat(2) + noise * normal(10)
        low, high = ratio(one, others, 0.95)
        inside += low <= 1 <= high
    assert least <= inside / 3000 <= most


def test_the_chance_of_an_error_is_split_over_the_looks():
    assert shares(0.95, 1) == [0.95]
    for looks in (2, 3, 6):
        each = [1 - share for share in shares(0.95, looks)]
        assert sum(each) == pytest.approx(0.05) and each[-1] == pytest.approx(0.025) and len(set(each[:-1])) == 1


# --- the verdict ------------------------------------------------------------------------------------------------------


def simulated(draw, lost, spread=0.1):
    """The verdict on a network that truly has lost a share, by looks at 5, 10 and 20 fresh networks, from draws."""
    old = (1 - lost) * (1 + spread * torch.randn(1, generator=draw) + 0.02 * torch.randn(5, generator=draw))
    fresh = 1 + spread * torch.randn(20, generator=draw) + 0.02 * torch.randn(20, generator=draw)
    found = None
    for look, count in enumerate((5, 10, 20), 1):
        losses = {"old": 2 - old[:, None].expand(-1, 10), "fresh": 2 - fresh[:count, None].expand(-1, 10)}
        found = Probe(losses, {}, 2.0, 5, "given", 0.95, looks=3, look=look)
        if found.verdict != "undecided":
            break
    return found


@pytest.mark.parametrize("spread", [0.03, 0.1, 0.15])
def test_stopping_when_the_verdict_is_clear_does_not_raise_false_alarms(spread):
    draw = torch.Generator().manual_seed(1)
    found = [simulated(draw, 0.0, spread) for _ in range(600)]
    assert sum(one.verdict in ("losing", "lost") for one in found) <= 0.035 * 600
    assert sum(one.interval[0] <= 0 <= one.interval[1] for one in found) >= 0.94 * 600


def test_a_loss_of_half_is_found_and_a_small_one_is_none():
    draw = torch.Generator().manual_seed(2)
    assert sum(simulated(draw, 0.5).verdict == "losing" for _ in range(200)) >= 0.95 * 200
    assert all(simulated(draw, 0.05, 0.001).verdict == "healthy" for _ in range(50))
    assert all(simulated(draw, 0.9, 0.05).verdict == "lost" for _ in range(50))


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def test_fresh_networks_are_not_said_to_lose_and_those_that_learn_half_as_much_are():
    draw = torch.Generator().manual_seed(0)
    found: dict[float, list[Probe]] = {1.0: [], 0.1: []}
    for number in range(8):
        x, teacher = torch.randn(128, 8, generator=draw), torch.randn(8, 3, generator=draw)
        data = list(zip(x.split(16), (x @ teacher).argmax(1).split(16)))
        for scale in found:
            with torch.random.fork_rng():
                torch.manual_seed(number)
                model = Net()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(scale)
            make = lambda p: torch.optim.SGD(p, 0.5)
            found[scale].append(gxd.probe(model, make, data, F.cross_entropy, fresh=Net, steps=40))
    assert sum(one.verdict in ("losing", "lost") for one in found[1.0]) <= 1
    assert sum(one.verdict in ("losing", "lost") for one in found[0.1]) >= 7
    assert abs(sum(one.gap for one in found[1.0]) / 8) < 0.1 and 0.4 < sum(one.gap for one in found[0.1]) / 8 < 0.6
