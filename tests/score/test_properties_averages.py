"""Properties of the budget and of the running averages, for any rate, maturity and sequence of steps."""

import io
import math
import random
import warnings
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gxd
from gxd.checkpoint import loaded, saved
from gxd.score.state import UnitState, forgotten
from gxd.select.lowest import LowestRate, lowest
from tests.random_networks import quick

# ---------------------------------------------------------------- the budget


rates = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1e-4, 0.01, 0.1, 1 / 3, 0.5, 1.0]))


def units_of(size: int) -> tuple[gxd.UnitPlan, UnitState]:
    """One group of units, of which nothing is known."""
    model = nn.Sequential(nn.Linear(1, size), nn.ReLU(), nn.Linear(size, 1))
    plan = gxd.find_units(model, groups=[gxd.manual_group("0", consumers=["2"])])  # not traced: that takes longer
    return plan, UnitState.new(plan, torch.device("cpu"), torch.float32)


@quick
@given(st.integers(1, 30), rates, st.integers(0, 12), st.integers(1, 80), st.data())
def test_the_schedule_is_that_of_a_simulation_of_every_unit(
    size: int, rate: float, maturity: int, steps: int, data: Any
):
    """Also across a checkpoint, from which a budget of half a unit survives, across a change of the maturity, and where
    the group may not be reset.
    """
    plan, units = units_of(size)
    selector = LowestRate(rate, maturity)
    state = selector.init(plan, units)
    saved_at, changed_at = data.draw(st.integers(0, steps)), data.draw(st.integers(0, steps))
    rng = random.Random(steps)
    budget, earned, spent = 0.0, [], 0
    for step in range(1, steps + 1):
        if step == saved_at:
            file = io.BytesIO()
            torch.save(saved(state), file)
            file.seek(0)
            state = loaded(torch.load(file, weights_only=True), selector.init(plan, units), "state")
        if step == changed_at:
            maturity = selector.maturities.default = data.draw(st.integers(0, 12))
        units = units._replace(step=step)
        eligible = (units.ages() > maturity).nonzero().flatten().tolist()
        earned.append(rate * len(eligible))
        budget += earned[-1]
        count = min(math.floor(budget), len(eligible))
        budget -= count
        allowed = rng.random() < 0.8
        before = state
        state, due = selector.advance(plan, units, state)
        assert due == (count > 0) and selector.advance(plan, units, before) == (state, due), "a state is not written to"
        if due:
            chosen, state = selector.select(plan, units, state, lambda _, a=allowed: a)
            assert [len(index) for index in chosen.values()] == [count] * allowed
            for index in chosen.values():
                assert set(index.tolist()) <= set(eligible)
                units = forgotten(units, index, index)
            spent += count
        assert state.budget == (budget,)
    if changed_at == 0:
        assert 0 <= math.fsum(earned) - spent < 1 + 1e-9, "what is owed is less than a unit"


@quick
@given(st.integers(1, 1000), st.fractions(0, 1, max_denominator=10_000), st.integers(1, 200))
def test_without_maturity_the_resets_are_the_floor_of_rate_times_units_times_steps(
    size: int, rate: Fraction, steps: int
):
    plan, units = units_of(size)
    selector = LowestRate(float(rate), 0)
    state, total = selector.init(plan, units), 0
    for step in range(1, steps + 1):
        units = units._replace(step=step)
        state, due = selector.advance(plan, units, state)
        if due:
            chosen, state = selector.select(plan, units, state, lambda _: True)
            units = forgotten(units, chosen[0], chosen[0])
            total += len(chosen[0])
    exact = rate * size * steps
    assert total in (math.floor(exact), math.floor(exact - Fraction(1, 10**6))), "one less only by rounding"


utilities = st.lists(st.sampled_from([0.0, -0.0, 1.0, 1.0, 2.5, 1e-30, 1e30, math.inf]), min_size=1, max_size=12)


@quick
@given(st.one_of(utilities, st.lists(st.floats(0, 1e6), min_size=1, max_size=12)), st.data())
def test_the_lowest_are_those_of_a_naive_sort_with_ties_to_the_lower_index(utility: list[float], data: Any):
    eligible = data.draw(st.lists(st.booleans(), min_size=len(utility), max_size=len(utility)))
    count = data.draw(st.integers(0, sum(eligible)))
    candidates = sorted((value, unit) for unit, value in enumerate(utility) if eligible[unit])
    naive = sorted(unit for _, unit in candidates[:count])
    for dtype in (torch.float32, torch.float64):
        values = torch.tensor(utility, dtype=torch.float64).to(dtype)
        if torch.equal(values.double(), torch.tensor(utility, dtype=torch.float64)):
            assert lowest(values, torch.tensor(eligible), count).tolist() == naive


# ---------------------------------------------------------------- running averages


class TwoBranches(nn.Module):
    """Two hidden layers; a forward pass runs one of them, or both."""

    def __init__(self, sizes: tuple[int, int]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, sizes[0]), nn.Linear(3, sizes[1])
        self.c, self.d = nn.Linear(sizes[0], 2), nn.Linear(sizes[1], 2)

    def forward(self, x: Tensor, which: str = "ab") -> Tensor:
        out = x.new_zeros(len(x), 2)
        if "a" in which:
            out = out + self.c(self.a(x).tanh())
        if "b" in which:
            out = out + self.d(self.b(x).tanh())
        return out

    @staticmethod
    def traced(sizes: tuple[int, int]) -> "tuple[TwoBranches, gxd.UnitPlan]":
        torch.manual_seed(0)
        net = TwoBranches(sizes).double()
        if sizes not in PLANS:
            PLANS[sizes] = gxd.find_units(net, torch.zeros(2, 3, dtype=torch.float64))
        return net, PLANS[sizes]


PLANS: dict[tuple[int, int], gxd.UnitPlan] = {}


@quick
@given(
    st.sampled_from([(1, 1), (1, 4), (5, 2), (6, 6)]),
    st.lists(st.sampled_from(["a", "b", "ab", "ab", "nan"]), min_size=1, max_size=25),
    st.floats(0, 0.99),
    rates,
    st.integers(0, 6),
    st.integers(1, 3),
)
def test_the_average_of_a_constant_is_the_constant_at_every_age_and_the_lowest_mature_units_are_reset(
    sizes: tuple[int, int], pattern: list[str], decay: float, rate: float, maturity: int, score_every: int
):
    """Whatever steps were not observed: other branches, infinite batches, steps between scores, resets."""
    net, plan = TwoBranches.traced(sizes)
    x = torch.tensor([[0.7, -1.2, 0.4]], dtype=torch.float64).expand(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    cbp = gxd.ContinualBackprop(
        net,
        optimizer,
        plan=plan,
        utility="activation",
        replacement_rate=rate,
        maturity=maturity,
        decay=decay,
        score_every=score_every,
    )
    assert [g.name for g in cbp.plan.groups] == ["a", "b"]
    seen = {"a": torch.zeros(sizes[0], dtype=torch.bool), "b": torch.zeros(sizes[1], dtype=torch.bool)}
    ages = {name: torch.zeros(len(mask), dtype=torch.long) for name, mask in seen.items()}
    for step, which in enumerate(pattern):
        true = {name: getattr(net, name)(x[0]).tanh().detach() for name in seen}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gxd.NonFiniteWarning)
            warnings.simplefilter("ignore", gxd.ObservationWarning)  # a branch that has never run
            net(x * math.nan if which == "nan" else x, "ab" if which == "nan" else which)
            optimizer.step()
        for name, mask in seen.items():
            mask |= which != "nan" and name in which and step % score_every == 0
            ages[name] += 1
            expected = torch.where(mask, true[name].abs(), math.inf)
            if name in cbp.last_resets:
                index = cbp.last_resets[name]
                assert torch.equal(index, lowest(expected, ages[name] > maturity, len(index)))
                mask[index], ages[name][index] = False, 0
            assert torch.equal(cbp.ages()[name], ages[name])
            assert torch.allclose(cbp.utilities()[name], torch.where(mask, true[name].abs(), 0.0), rtol=1e-9)
            assert torch.allclose(cbp.references()[name], torch.where(mask, true[name], 0.0), rtol=1e-9)
    assert cbp.nonfinite_observations == sum(w == "nan" for i, w in enumerate(pattern) if i % score_every == 0)
    cbp.close()


@quick
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=20), st.floats(0, 0.999), st.integers(1, 4))
def test_an_average_is_the_weighted_mean_of_what_was_seen_since_the_last_reset(
    values: list[float], decay: float, score_every: int
):
    """With weights decay ** (steps ago), whether or not the steps in between were scored."""
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).double()
    with torch.no_grad():
        net[0].weight.fill_(1.0)
        net[0].bias.fill_(0.0)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    cbp = gxd.ContinualBackprop(
        net,
        optimizer,
        plan=gxd.find_units(net, groups=[gxd.manual_group("0", consumers=["1"])]),
        utility="activation",
        replacement_rate=0.0,
        decay=decay,
        score_every=score_every,
    )
    for value in values:
        net(torch.full((2, 1), value, dtype=torch.float64))
        optimizer.step()
    scored = [(i, v) for i, v in enumerate(values) if i % score_every == 0]
    weights = [decay ** (scored[-1][0] - i) for i, _ in scored]
    expected = math.fsum(w * v for w, (_, v) in zip(weights, scored)) / math.fsum(weights)
    assert cbp.references()["0"].item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    size = math.fsum(w * abs(v) for w, (_, v) in zip(weights, scored)) / math.fsum(weights)
    assert cbp.utilities()["0"].item() == pytest.approx(size, rel=1e-9, abs=1e-9)
    cbp.close()
