"""SNR in training, against a loop over units: who is silent, for how long, and who goes."""

from typing import Any

import pytest
import torch
from torch import nn

import gxd
from tests.methods.unit_rig import LAYERS, Run, batches
from tests.select.test_selectors import NaiveSilences


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_the_units_that_go_are_those_that_are_silent_for_longer_than_their_own_silences(kind: str):
    run = Run(kind, gxd.method("snr", rejection=0.3, most=4, calibrate=5))
    sizes = [run.attached.plan[layer].size for layer in LAYERS]
    naive, total = NaiveSilences(0.3, most=4, calibrate=5), 0
    naive.silent, naive.limit = [0] * sum(sizes), [4] * sum(sizes)
    naive.lengths = [[] for _ in range(sum(sizes))]
    for number, (x, y) in enumerate(batches(kind, 60, size=2), 1):
        fires = [fired(h[:, unit].flatten().tolist()) for h in run.values(x).values() for unit in range(h.shape[1])]
        run.step(x, y)
        over = naive_step(naive, number, fires)
        found = [unit + (0 if layer == "first" else sizes[0]) for layer, own in run.resets.items() for unit in own]
        assert sorted(found) == over
        total += len(found)
    assert total >= 5


def fired(values: list[float]) -> bool:
    """Anything but zero, and but for one and the same value throughout, where there are values enough to tell."""
    mean = sum(values) / len(values)
    return any(v != 0 and (len(values) < 8 or abs(v - mean) > 1e-3 * abs(mean)) for v in values)


def naive_step(naive: NaiveSilences, number: int, fires: list[bool]) -> list[int]:
    """Of any number of units."""
    for unit, fired in enumerate(fires):
        if fired and naive.silent[unit]:
            naive.lengths[unit].append(naive.silent[unit])
        naive.silent[unit] = 0 if fired else naive.silent[unit] + 1
    if number % naive.calibrate == 0:
        for unit, lengths in enumerate(naive.lengths):
            if lengths:
                rounded = sorted(naive.longest_alike(length) for length in lengths)
                need = (1 - naive.rejection) * len(rounded)
                quantile = next(v for n, v in enumerate(rounded, 1) if n >= need - 1e-9)
                limit = quantile if quantile < naive.limit[unit] else 2 * naive.limit[unit]
                naive.limit[unit] = max(1, min(naive.most, limit))
            lengths.clear()
    over = [unit for unit in range(len(fires)) if naive.silent[unit] >= naive.limit[unit]]
    for unit in over:
        naive.lengths[unit].append(naive.silent[unit])
        naive.silent[unit] = 0
    return over


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_a_unit_that_is_dead_or_saturated_is_reset_after_the_limit_and_comes_alive(activation: type[nn.Module]):
    run = Run("linear", gxd.method("snr", most=5), activation)
    with torch.no_grad():
        run.model.first.bias[2] = -100.0
    for number, (x, y) in enumerate(batches("linear", 6), 1):
        run.step(x, y)
        assert (2 in run.resets.get("first", [])) == (number == 5)
    values = run.values(batches("linear", 1)[0][0])["first"][:, 2]
    assert float(values.max() - values.min()) > 0.01
    assert not run.attached.ages()["first"][2] > 1


def test_an_example_at_a_time_fires_where_it_is_not_zero():
    """A single value cannot be compared with its own mean."""
    run = Run("linear", gxd.method("snr", most=1000))
    for x, y in batches("linear", 5, size=1):
        fires = {layer: (h > 0).any(0).any(1) for layer, h in run.values(x).items()}
        run.step(x, y)
        for layer, expected in fires.items():
            assert torch.equal(run.attached.utilities()[layer] > 0, expected)


@pytest.mark.parametrize(("options", "word"), [({"rejection": -0.1}, "rejection=-0.1"), ({"most": 0}, "most=0")])
def test_a_wrong_option_is_refused_with_its_value(options: dict[str, Any], word: str):
    with pytest.raises(ValueError, match=word):
        gxd.method("snr", **options)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_unit_that_fires_on_all_of_a_few_examples_is_not_silent_because_they_are_alike_by_chance(size: int):
    model = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 2))
    with torch.no_grad():
        model[0].bias.fill_(5.0)  # on, whatever the input
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    snr = gxd.method("snr", most=1)
    attached = gxd.attach(model, optimizer, snr, example_inputs=torch.zeros(2, 3))
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        model(torch.randn(size, 3, generator=generator)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert attached.total_resets == 0
