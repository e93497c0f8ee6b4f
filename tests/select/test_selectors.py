"""Selectors against loops over units: threshold with a cap, the lowest fraction, the test of silence, amounts."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import gxd
from gxd.plan.units import UnitPlan
from gxd.score.state import UnitState
from gxd.select.normalise import normalisation
from gxd.select.silence import EDGES

SIZES = (7, 5)


def plan_of(sizes: tuple[int, ...] = SIZES) -> UnitPlan:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, size in zip((3, *sizes), sizes):
        layers += [nn.Linear(before, size), nn.ReLU()]
    return gxd.find_units(nn.Sequential(*layers, nn.Linear(sizes[-1], 2)), torch.zeros(2, 3))


PLAN = plan_of()


def units_at(step: int, utilities: list[float], births: list[int] | None = None) -> UnitState:
    """NaN: never observed."""
    values = torch.tensor(utilities, dtype=torch.float64)
    weight = (~values.isnan()).double()
    birth = torch.tensor(births or [0] * len(utilities))
    new = UnitState.new(PLAN, torch.device("cpu"), torch.float64)
    return new._replace(
        step=step, birth=birth, utility=values.nan_to_num(0.0), utility_weight=weight, seen=None, scored=step
    )


def chosen(selector: gxd.Selector, units: UnitState, state: Any = None, normalise: str | None = None) -> dict:
    state = selector.init(PLAN, units) if state is None else state
    state, due = selector.advance(PLAN, units, state)
    if not due:
        return {}
    how = normalisation(selector.normalise if normalise is None else normalise)
    found, _ = selector.select(PLAN, how(PLAN, units, how.init(PLAN, units)), state, lambda number: True)
    return {number: index.tolist() for number, index in found.items()}


UTILITIES = [0.1, 2.0, 0.3, math.nan, 0.0, 5.0, 0.2, 3.0, 0.1, 4.0, 0.2, 0.0]


@pytest.mark.parametrize("most", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("maturity", [0, 50])
@pytest.mark.parametrize("normalise", [None, "none"])
def test_a_threshold_takes_the_units_below_it_up_to_a_share_of_the_layer(most: float, maturity: int, normalise: Any):
    births = [0, 0, 80, 0, 0, 0, 0, 0, 80, 0, 0, 0]
    expected = {}
    for number, where in enumerate(PLAN.unit_slices):
        own, young = UTILITIES[where], births[where]
        known = [u for u in own if not math.isnan(u)]
        scale = 1.0 if normalise == "none" else sum(known) / len(known) + 1e-9
        low = [i for i, u in enumerate(own) if u / scale <= 0.25 and 100 - young[i] > maturity]
        low = sorted(sorted(low, key=lambda i: (own[i], i))[: math.ceil(most * len(own))])
        if low:
            expected[number] = low
    selector = gxd.Threshold(0.25, 10, most, maturity)
    assert chosen(selector, units_at(100, UTILITIES, births), normalise=normalise) == expected
    assert chosen(selector, units_at(101, UTILITIES, births)) == {}


@pytest.mark.parametrize("anneal", [0, 60])
@pytest.mark.parametrize("fraction", [0.05, 0.3])
def test_the_lowest_fraction_goes_and_what_is_left_of_a_unit_is_carried_over(fraction: float, anneal: int):
    selector = gxd.LowestFraction(fraction, every=10, anneal=anneal)
    carried, total = [0.0] * len(SIZES), 0
    state = selector.init(PLAN, units_at(0, UTILITIES))
    for step in range(1, 101):
        units = units_at(step, UTILITIES)
        state, due = selector.advance(PLAN, units, state)
        share = fraction * math.cos(math.pi / 2 * step / anneal) if anneal and step < anneal else fraction
        share = 0.0 if anneal and step >= anneal else share
        expected = {}
        if step % 10 == 0:
            for number, where in enumerate(PLAN.unit_slices):
                carried[number] += share * SIZES[number]
                count = math.floor(carried[number])
                order = sorted(
                    range(SIZES[number]), key=lambda i: (math.isnan(UTILITIES[where][i]), UTILITIES[where][i])
                )
                if count:
                    carried[number] -= count
                    expected[number] = sorted(order[:count])
        found: Any = {}
        if due:
            found, state = selector.select(PLAN, units, state, lambda number: True)
        assert {number: index.tolist() for number, index in found.items()} == expected
        total += sum(map(len, expected.values()))
    assert total > 0


def test_the_lowest_fraction_spares_the_young_and_never_takes_more_than_there_are():
    selector = gxd.LowestFraction(1.0, every=1, maturity=10)
    births = [95] * 6 + [0] + [95] * 5
    assert chosen(selector, units_at(100, UTILITIES, births)) == {0: [6]}


def test_amounts_fall_with_the_utility_next_to_the_mean_of_the_layer():
    found = chosen(gxd.Soft(every=5, sharpness=8.0, center=0.9), units_at(10, UTILITIES))
    for number, where in enumerate(PLAN.unit_slices):
        own = UTILITIES[where]
        known = [u for u in own if not math.isnan(u)]
        mean = sum(known) / len(known) + 1e-9
        for utility, amount in zip(own, found[number]):
            if math.isnan(utility):
                assert amount == 0
            else:
                assert amount == pytest.approx(min(1.0, 2 / (1 + math.exp(8 * (utility / mean - 0.9)))), rel=1e-9)
    assert found[0][0] == 1.0 and 0 < found[1][2] < 1e-3


class NaiveSilences:
    """The test of silence, one unit after the other."""

    def __init__(self, rejection: float, most: int, calibrate: int) -> None:
        self.rejection, self.most, self.calibrate = rejection, most, calibrate
        self.silent, self.limit = [0] * 12, [most] * 12
        self.lengths: list[list[int]] = [[] for _ in range(12)]

    def step(self, number: int, fires: list[bool | None]) -> list[int]:
        for unit, fired in enumerate(fires):
            if fired is None:
                continue
            if fired:
                if self.silent[unit]:
                    self.lengths[unit].append(self.silent[unit])
                self.silent[unit] = 0
            else:
                self.silent[unit] += 1
        if number % self.calibrate == 0:
            for unit, lengths in enumerate(self.lengths):
                if lengths:
                    rounded = sorted(self.longest_alike(length) for length in lengths)
                    quantile = rounded[max(0, math.ceil((1 - self.rejection) * len(rounded) - 1e-9) - 1)]
                    limit = quantile if quantile < self.limit[unit] else 2 * self.limit[unit]
                    self.limit[unit] = max(1, min(self.most, limit))
                lengths.clear()
        over = [unit for unit in range(12) if self.silent[unit] >= self.limit[unit]]
        for unit in over:
            self.lengths[unit].append(self.silent[unit])
            self.silent[unit] = 0
        return over

    def longest_alike(self, length: int) -> int:
        """Lengths are told apart by half octaves: 1, 2, 3, 4-5, 6-7, 8-11, ..."""
        bound = 1
        while True:
            after = next(n for n in range(bound + 1, 10**6) if 2 * math.log2(n) >= math.floor(2 * math.log2(bound)) + 1)
            if length < after:
                return after - 1
            bound = after


@pytest.mark.parametrize("rejection", [0.02, 0.25])
def test_a_unit_goes_when_it_is_silent_for_longer_than_its_own_silences(rejection: float):
    naive = NaiveSilences(rejection, most=40, calibrate=50)
    selector = gxd.SilenceTest(rejection, most=40, calibrate=50)
    units = units_at(0, [0.0] * 12)
    state = selector.init(PLAN, units)
    generator = torch.Generator().manual_seed(0)
    chance = torch.linspace(0, 1, 12)  # from never to always
    total = 0
    for step in range(1, 400):
        fires = torch.rand(12, generator=generator) < chance
        seen = torch.rand(12, generator=generator) < 0.9 if step % 3 else None
        units = units_at(step, fires.double().tolist())._replace(seen=seen)
        state, due = selector.advance(PLAN, units, state)
        assert due
        found, state = selector.select(PLAN, units, state, lambda number: True)
        flat = [i + PLAN.unit_slices[number].start for number, index in found.items() for i in index.tolist()]
        told = [f if seen is None or s else None for f, s in zip(fires.tolist(), fires if seen is None else seen)]
        assert flat == naive.step(step, told)
        if flat:
            state = selector.forgotten(state, torch.tensor(flat))
        assert state.silent.tolist() == naive.silent and state.limit.tolist() == naive.limit
        total += len(flat)
    assert total > 20


def test_a_unit_that_fired_in_every_batch_keeps_its_limit_and_one_silent_batch_does_not_reset_it():
    """In one public version its empty histogram gives it the tightest limit."""
    selector = gxd.SilenceTest(0.02, most=30, calibrate=10)
    state = selector.init(PLAN, units_at(0, [1.0] * 12))
    for step in range(1, 61):
        units = units_at(step, [1.0] * 12)
        state, _ = selector.advance(PLAN, units, state)
    assert state.limit.tolist() == [30] * 12
    units = units_at(61, [0.0] * 12)
    state, _ = selector.advance(PLAN, units, state)
    assert selector.select(PLAN, units, state, lambda number: True)[0] == {}


def test_a_step_that_showed_nothing_is_no_silence():
    selector = gxd.SilenceTest(most=2)
    state = selector.init(PLAN, units_at(0, [0.0] * 12))
    stale = units_at(1, [0.0] * 12)
    state, _ = selector.advance(PLAN, stale, state)
    for step in range(2, 9):
        state, _ = selector.advance(PLAN, stale._replace(step=step), state)
    assert state.silent.tolist() == [1] * 12


def test_averages_hide_no_silence_from_the_test():
    """A utility that is averaged over steps is not zero in the first silent one."""
    averaged = gxd.UnitReset("activation", gxd.LowestRate())
    assert gxd.UnitReset("activation", gxd.SilenceTest()).decay == 0 and averaged.decay == 0.99


def test_a_unit_that_is_not_mature_when_a_threshold_is_due_is_first_reset_when_it_is():
    assert gxd.Threshold(0.1, every=2, maturity=5).earliest(PLAN)[0] == 5
    assert gxd.Threshold(0.1, every=7, maturity=5).earliest(PLAN)[0] == 7


def test_the_bins_of_silences_are_half_octaves():
    assert EDGES[:9] == (1, 2, 3, 4, 6, 8, 12, 16, 23) and EDGES[-1] == 2**20


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: gxd.Threshold(0.1, 10, most=1.5), "most=1.5 must be a number, from 0 to 1"),
        (lambda: gxd.Threshold(0.1, 10, maturity=-1), "maturity=-1"),
        (lambda: gxd.LowestFraction(2.0), "fraction=2.0"),
        (lambda: gxd.LowestFraction(anneal=-5), "anneal=-5"),
        (lambda: gxd.SilenceTest(rejection=2), "rejection=2"),
        (lambda: gxd.SilenceTest(most=0), "most=0"),
        (lambda: gxd.SilenceTest(calibrate=0), "calibrate=0"),
        (lambda: gxd.Soft(sharpness=-1), "sharpness=-1"),
        (lambda: gxd.Soft(center="low"), "center='low'"),
        (lambda: gxd.UnitReset("gxd", gxd.Soft(), normalise="layer"), "normalise='layer'.*Did you mean 'layer_mean'"),
    ],
)
def test_a_wrong_option_is_refused_with_its_value(make: Any, word: str):
    with pytest.raises(ValueError, match=word):
        make()
