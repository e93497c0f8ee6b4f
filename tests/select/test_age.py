"""Ranking by age against loops over units, as it is defined: E[u | age] of a group in half-octave buckets of age, a
running mean taken every ten steps and when a reset is due; the units of lowest u / E[u | age] ** exponent go.
"""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd
from gxd.plan.units import UnitPlan
from gxd.score.state import UnitState
from gxd.select import ByAge, LowestRate, Normalise

SIZES = (7, 5)
DECAY = 0.99


def plan_of(sizes: tuple[int, ...] = SIZES) -> UnitPlan:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    before = 3
    for size in sizes:
        layers += [nn.Linear(before, size), nn.ReLU()]
        before = size
    return gxd.find_units(nn.Sequential(*layers, nn.Linear(before, 2)), torch.zeros(2, 3))


def bucket(age: int) -> int:
    return math.floor(2 * math.log2(max(age, 1)))


class Naive:
    """The rule, one unit after the other, in Python's numbers."""

    def __init__(self, rate: float, maturity: int, exponent: float | None) -> None:
        self.rate, self.maturity, self.exponent = rate, maturity, exponent
        self.budget = [0.0 for _ in SIZES]
        self.mean: dict[tuple[int, int], tuple[float, float]] = {}  # group, bucket -> average, weight

    def step(self, number: int, ages: list[list[int]], utilities: list[list[float | None]]) -> dict[int, list[int]]:
        eligible = [[unit for unit, age in enumerate(group) if age > self.maturity] for group in ages]
        self.budget = [b + self.rate * len(units) for b, units in zip(self.budget, eligible)]
        counts = [min(math.floor(b), len(units)) for b, units in zip(self.budget, eligible)]
        if any(counts) or number % 10 == 0:
            self.look(ages, utilities)
        if not any(counts):
            return {}
        chosen = {}
        for group, count in enumerate(counts):
            self.budget[group] -= count
            ranked = sorted(eligible[group], key=lambda unit: (self.rank(group, ages, utilities, unit), unit))
            if count:
                chosen[group] = sorted(ranked[:count])
        return chosen

    def look(self, ages: list[list[int]], utilities: list[list[float | None]]) -> None:
        for group, members in enumerate(ages):
            peers: dict[int, list[float]] = {}
            for age, utility in zip(members, utilities[group]):
                if utility is not None:
                    peers.setdefault(bucket(age), []).append(utility)
            for number, values in peers.items():
                average, weight = self.mean.get((group, number), (0.0, 0.0))
                new = sum(values) / len(values)
                self.mean[group, number] = DECAY * average + (1 - DECAY) * new, DECAY * weight + 1 - DECAY

    def rank(self, group: int, ages: list[list[int]], utilities: list[list[float | None]], unit: int) -> float:
        utility = utilities[group][unit]
        if utility is None:
            return math.inf
        average, weight = self.mean.get((group, bucket(ages[group][unit])), (0.0, 0.0))
        if self.exponent is None or average == 0:
            return utility
        return utility / (average / weight) ** self.exponent


def simulated(normalise: Normalise, naive: Naive, steps: int = 300, seed: int = 0) -> list[tuple[dict, dict]]:
    """What both choose, step by step, of units whose utility grows with their age, with noise."""
    plan, generator = plan_of(), torch.Generator().manual_seed(seed)
    units = UnitState.new(plan, torch.device("cpu"), torch.float64)
    selector = LowestRate(naive.rate, naive.maturity)
    state, means = selector.init(plan, units), normalise.init(plan, units)
    found = []
    for step in range(1, steps + 1):
        age = step - units.birth
        noise = torch.rand(plan.size, generator=generator, dtype=torch.float64)
        seen = age > 2  # the youngest have not been scored yet
        weight = torch.where(seen, 0.5, 0.0).double()
        units = units._replace(step=step, utility=weight * noise * age.sqrt(), utility_weight=weight)
        ages = [age[where].tolist() for where in plan.unit_slices]
        values = torch.where(seen, units.utilities(), math.nan)
        utilities = [[None if math.isnan(v) else v for v in values[where].tolist()] for where in plan.unit_slices]
        state, due = selector.advance(plan, units, state)
        means = normalise.advance(plan, units, means, due)
        chosen: dict[int, Tensor] = {}
        if due:
            chosen, state = selector.select(plan, normalise(plan, units, means), state, lambda number: True)
        found.append(({n: index.tolist() for n, index in chosen.items()}, naive.step(step, ages, utilities)))
        birth = units.birth.clone()
        for number, index in chosen.items():
            birth[index + plan.unit_slices[number].start] = step
        units = units._replace(birth=birth)
    return found


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("rate", "maturity"), [(0.02, 5), (0.11, 3), (0.004, 0)])
def test_the_units_that_go_are_those_of_a_loop_over_units(exponent: float, rate: float, maturity: int):
    found = simulated(ByAge(exponent), Naive(rate, maturity, exponent))
    assert all(ours == theirs for ours, theirs in found)
    assert sum(len(units) for ours, _ in found for units in ours.values()) >= 10


def test_the_absolute_ranking_is_that_of_the_loop_too_and_another_one():
    absolute, age = (
        simulated(normalise, Naive(0.05, 5, exponent))
        for normalise, exponent in ((Normalise(), None), (ByAge(0.5), 0.5))
    )
    for found in (absolute, age):
        assert all(ours == theirs for ours, theirs in found)
    assert absolute != age


def test_an_exponent_of_zero_is_the_absolute_ranking():
    naive = Naive(0.05, 5, None)
    assert all(o == t for o, t in simulated(ByAge(0.0), naive))


def test_the_expected_utility_of_an_age_is_the_running_mean_over_the_units_of_that_age():
    """The numbers themselves, for three looks written out by hand."""
    plan = plan_of((4,))
    units = UnitState.new(plan, torch.device("cpu"), torch.float64)
    normalise = ByAge()
    means = normalise.init(plan, units)
    births = torch.tensor([0, 0, 7, 7])
    looks = [[1.0, 3.0, 10.0, 20.0], [2.0, 2.0, 5.0, 5.0], [4.0, 8.0, 1.0, 3.0]]
    for step in range(1, 31):
        utility = torch.tensor(looks[step // 10 - 1] if step % 10 == 0 else [99.0] * 4, dtype=torch.float64)
        units = units._replace(step=step, birth=births, utility=utility, utility_weight=torch.ones_like(utility))
        means = normalise.advance(plan, units, means, due=False)
    # ages 10, 20, 30 are in buckets 6, 8, 9; ages 3, 13, 23 in buckets 3, 7, 9
    expected = {6: 2.0, 8: 2.0, 3: 15.0, 7: 5.0, 9: (6.0 * 2 + 2.0 * 2) / 4}
    for number, value in expected.items():
        assert float(means.mean[number] / means.weight[number]) == pytest.approx(value)
    assert int((means.weight > 0).sum()) == len(expected)


# ---- in training


def trained(ranking: str, utility: str, steps: int = 400, **options: Any) -> tuple[list[int], gxd.ContinualBackprop]:
    """A network of tanh units: a newborn is cheap, for its outgoing weights grow slowly. The ages of all that went."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    cbp = gxd.ContinualBackprop(
        model,
        optimizer,
        example_inputs=torch.zeros(2, 6),
        utility=utility,
        replacement_rate=0.01,
        maturity=20,
        decay=0.9,
        ranking=ranking,
        **options,
    )
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(6, 3, generator=generator)
    ages = []
    for _ in range(steps):
        x = torch.randn(16, 6, generator=generator)
        y, before = (x @ teacher).argmax(1), cbp.ages()["0"] + 1
        logits = model(x)
        cbp.observe(logits, y)
        F.cross_entropy(logits, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        ages += before[cbp.last_resets.get("0", torch.zeros(0, dtype=torch.long))].tolist()
    return ages, cbp


def churn(ages: list[int], maturity: int = 20) -> float:
    """The share of resets of units younger than 1.5 x maturity."""
    return sum(age < 1.5 * maturity for age in ages) / len(ages)


@pytest.mark.parametrize("utility", ["gxd", "contribution"])
def test_newborns_are_reset_over_and_over_by_absolute_utility_and_less_by_age(utility: str):
    absolute, half, whole = (
        trained(ranking, utility, exponent=exponent)[0]
        for ranking, exponent in (("absolute", 0.5), ("age", 0.5), ("age", 1.0))
    )
    assert len(absolute) == len(half) == len(whole) > 90
    assert churn(absolute) > 0.8
    assert churn(whole) < churn(half) < churn(absolute) - 0.1
    assert sorted(whole)[len(whole) // 2] > sorted(absolute)[len(absolute) // 2]


def test_a_checkpoint_of_one_ranking_goes_on_with_the_other():
    """Settings are those of the constructor. What units of an age are worth is learnt anew, and is not ignored."""
    _, absolute = trained("absolute", "gxd", steps=60)
    _, age = trained("age", "gxd", steps=60)
    _, other = trained("age", "gxd", steps=0)
    other.load_state_dict(absolute.state_dict())
    assert not other._parts[0].state.normalise.weight.any()
    assert age._parts[0].state.normalise.weight.any()
    absolute.load_state_dict(age.state_dict())


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"ranking": "ages"}, "ranking='ages' is not one of 'absolute', 'age'. Did you mean 'age'"),
        ({"exponent": -1.0}, "exponent=-1.0 must be a number, from 0 to 10"),
        ({"exponent": True}, "exponent=True"),
        ({"ranking": None}, "ranking=None"),
    ],
)
def test_a_wrong_ranking_is_refused_with_what_it_may_be(options: dict[str, Any], word: str):
    with pytest.raises(ValueError, match=word):
        gxd.method("continual_backprop", **options)
