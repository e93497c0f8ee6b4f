"""The joint cost of sets of units, against clamping them; and the set that is chosen."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gxd
from gxd.observe.clamp import clamped
from gxd.score.utilities import _REGISTRY, get_utility
from gxd.select.lowest_set import lowest_set
from tests.models import make

UNITS = 6


def mlp(outputs: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, UNITS), nn.Tanh(), nn.Linear(UNITS, outputs)).double()


def attached(model: nn.Module, utility: str, x: Tensor, **options: object) -> gxd.Attachment:
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    selector = gxd.LowestSet(**{"rate": 0.0, **options})  # type: ignore[arg-type]
    return gxd.attach(model, optimizer, gxd.UnitReset(utility, selector, decay=0.9), example_inputs=x[:2], seed=2)


def step(cbp: gxd.Attachment, x: Tensor, y: Tensor | None = None) -> Tensor:
    logits = cbp.model(x)
    cbp.observe(logits, torch.zeros(len(x), dtype=torch.long) if y is None else y)
    logits.square().mean().backward()
    cbp.optimizer.step()
    cbp.optimizer.zero_grad()
    return logits.detach()


def joint(cbp: gxd.Attachment, group: int = 0) -> Tensor:
    return cbp._parts[0].units.joint(group, cbp.plan.unit_slices[group])


def change(cbp: gxd.Attachment, x: Tensor, units: tuple[int, ...]) -> Tensor:
    """What clamping a set of units to their references does to the logits."""
    group, before = cbp.plan.groups[0], cbp.model(x)
    with clamped(cbp.model, group, torch.tensor(units), cbp.references()[group.name].unsqueeze(0)):
        return (cbp.model(x) - before).detach()


SETS = [s for size in (1, 2, 3, UNITS) for s in combinations(range(UNITS), size)]


def test_behind_a_linear_tail_the_joint_cost_is_the_squared_change_of_the_logits_by_clamping_the_set():
    x = torch.randn(9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cbp = attached(mlp(), "gxd_all_logit", x)
    step(cbp, x)
    gram = joint(cbp)
    for units in SETS:
        expected = change(cbp, x, units).square().mean()  # over examples and logits
        torch.testing.assert_close(gram[list(units)][:, list(units)].sum(), expected)


def test_of_the_target_logit_it_is_the_squared_change_of_that_one():
    x = torch.randn(9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.arange(9) % 4
    cbp = attached(mlp(), "gxd", x)
    step(cbp, x, y)
    for units in SETS:
        expected = change(cbp, x, units).gather(1, y[:, None]).square().mean()
        torch.testing.assert_close(joint(cbp)[list(units)][:, list(units)].sum(), expected)


def test_the_sketch_gives_it_in_expectation_and_the_labels_that_are_drawn_the_kl_divergence():
    x = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for utility in ("gxd_sketch", "gxd_kl"):
        model = mlp()
        with torch.no_grad():
            model[2].weight.mul_(0.2)
        cbp = attached(model, utility, x)
        step(cbp, x.repeat(5000, 1))
        for units in SETS[::5]:
            dz = change(cbp, x, units)
            if utility == "gxd_sketch":
                expected = dz.square().sum(1).mean()
            else:
                z = model(x).detach()
                p, q = z.log_softmax(1), (z + dz).log_softmax(1)
                expected = 2 * (p.exp() * (p - q)).sum(1).mean()
            found = joint(cbp)[list(units)][:, list(units)].sum()
            torch.testing.assert_close(found, expected, rtol=0.08, atol=0)


@pytest.mark.parametrize("name", ["mlp", "resnet_coordinates", "transformer"])
def test_of_one_unit_it_is_the_mean_squared_effect_whatever_the_layer(name):
    """Also over micro-batches, which are summed in another way."""
    model, batch, options = make(name)
    plan = gxd.find_units(model, batch(2)[0], **options)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    cbp = gxd.attach(model, optimizer, gxd.UnitReset("gxd_kl", gxd.LowestSet(0.0)), plan=plan)
    for number in range(6):
        for part in batch(8)[0].chunk(1 + number % 2):
            logits = model(part)
            cbp.observe(logits)
            logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for number, group in enumerate(plan.groups):
        torch.testing.assert_close(joint(cbp, number).diagonal(), cbp.utilities()[group.name], rtol=1e-4, atol=1e-9)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 7), nn.Linear(6, 8)
        self.head_a, self.head_b = nn.Linear(7, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.trunk(x))
        return self.head_a(torch.tanh(self.a(x))), self.head_b(torch.tanh(self.b(x)))


@pytest.mark.filterwarnings("ignore:the observed output does not depend")
def test_a_group_that_the_output_does_not_depend_on_keeps_what_was_known_of_its_pairs():
    torch.manual_seed(0)
    model, x = TwoHeads(), torch.randn(9, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    cbp = gxd.attach(model, optimizer, gxd.UnitReset("gxd_kl", gxd.LowestSet(0.0), decay=0.5), example_inputs=x[:2])
    kept = None
    for number in range(4):
        for part in x.split(5):
            outputs = model(part)
            cbp.observe(outputs[0] if number else torch.cat(outputs, 1))
            (outputs[0].sum() + outputs[1].sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        grams = {group.name: joint(cbp, place) for place, group in enumerate(cbp.plan.groups)}
        for name, gram in grams.items():
            torch.testing.assert_close(gram.diagonal(), cbp.utilities()[name], rtol=1e-4, atol=1e-9)
        assert kept is None or torch.equal(grams["b"], kept["b"])
        assert kept is None or not torch.equal(grams["a"], kept["a"])
        kept = grams


def test_units_that_were_reset_start_anew_and_a_pair_counts_since_the_younger_of_the_two():
    seen: list[Tensor] = []

    @gxd.register_utility("effects_for_test", gradient="target", effects="abs")
    def effects(o: gxd.Observation) -> Tensor:
        seen.append(((o.views[0].h - o.views[0].r) * o.views[0].g).squeeze(1))
        return seen[-1].clone()

    try:
        data = torch.Generator().manual_seed(4)
        cbp = attached(mlp(), "effects_for_test", torch.zeros(2, 5).double(), rate=0.1, maturity=2)
        birth, resets = [0] * UNITS, 0
        for number in range(1, 25):
            step(cbp, torch.randn(7, 5, dtype=torch.float64, generator=data))
            for unit in cbp.last_resets.get("0", torch.zeros(0)).tolist():
                birth[int(unit)] = number
                resets += 1
            found = joint(cbp)
            for i in range(UNITS):
                for j in range(UNITS):
                    since = max(birth[i], birth[j])
                    weights = [0.9 ** (number - t) for t in range(since + 1, number + 1)]
                    products = [float((e[:, i] * e[:, j]).mean()) for e in seen[since:]]
                    if not weights:
                        assert found[i, j].isnan()
                    else:
                        expected = sum(w * p for w, p in zip(weights, products, strict=True)) / sum(weights)
                        assert float(found[i, j]) == pytest.approx(expected, rel=1e-9, abs=1e-15)
        assert resets > 8
    finally:
        del _REGISTRY["effects_for_test"]


# ---- the choice


def naive(gram: list[list[float]], eligible: list[bool], count: int) -> list[int]:
    """Grow the set by whatever makes the sum of all its entries smallest."""

    def cost(units: list[int]) -> float:
        return sum(gram[i][j] for i in units for j in units)

    chosen: list[int] = []
    for _ in range(count):
        rest = [unit for unit in range(len(gram)) if eligible[unit] and unit not in chosen]
        chosen.append(min(rest, key=lambda unit: cost([*chosen, unit])))
    return sorted(chosen)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(0, 10**6), st.floats(0, 1))
def test_the_set_grows_by_the_unit_that_adds_least(units, seed, share):
    generator = torch.Generator().manual_seed(seed)
    effects = torch.randn(12, units, dtype=torch.float64, generator=generator)
    gram, eligible = effects.mT @ effects, torch.rand(units, generator=generator) < 0.8
    count = int(share * int(eligible.sum()))
    if count:
        assert lowest_set(gram, eligible, count).tolist() == naive(gram.tolist(), eligible.tolist(), count)


def test_units_that_were_never_observed_come_last_and_those_that_may_not_go_never():
    gram = torch.diag(torch.tensor([3.0, 1.0, 2.0, 4.0]))
    gram[1], gram[:, 1] = torch.nan, torch.nan
    eligible = torch.tensor([True, True, False, True])
    assert [lowest_set(gram, eligible, k).tolist() for k in (1, 2, 3)] == [[0], [0, 3], [0, 1, 3]]


def test_units_that_cancel_go_together_where_those_of_lowest_utility_would_add_up():
    def resets(selection: str) -> list[int]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        with torch.no_grad():  # all four units say the same, and count differently
            model[0].weight.copy_(model[0].weight[:1].expand(4, 5))
            model[0].bias.fill_(0.1)
            model[2].weight.copy_(torch.tensor([1.0, 1.05, 3.0, -1.1]).expand(3, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        x = torch.randn(32, 5)
        options = {"utility": "gxd_sketch", "replacement_rate": 0.5, "maturity": 1, "selection": selection}
        cbp = gxd.ContinualBackprop(model, optimizer, example_inputs=x[:2], **options)
        for _ in range(2):
            step(cbp, x)
        return cbp.last_resets["0"].tolist()

    assert resets("units") == [0, 1]
    assert resets("set") == [0, 3]


# ---- what is refused


def test_a_utility_without_effects_is_refused_with_those_that_have_them():
    with pytest.raises(ValueError, match=r"LowestSet needs the effects .*'activation' does not .*gxi, .*gxd, .*gxd_kl"):
        gxd.UnitReset("activation", gxd.LowestSet())
    with pytest.raises(ValueError, match="is of single units: with LowestSet leave it at 'none'"):
        gxd.method("continual_backprop", selection="set", ranking="age")
    with pytest.raises(ValueError, match=r"selection='sets'.*'set'"):
        gxd.method("continual_backprop", selection="sets")


def test_a_function_of_effects_that_returns_something_else_is_told_what_is_expected():
    @gxd.register_utility("wrong_for_test", gradient="target", effects="square")
    def wrong(o: gxd.Observation) -> Tensor:
        return o.views[0].g.sum(1).mean(0)

    try:
        x = torch.randn(3, 5, dtype=torch.float64)
        with pytest.raises(ValueError, match=r"'wrong_for_test' must return an effect .* \(3, 6\), got \(6,\)"):
            step(attached(mlp(), "wrong_for_test", x), x)
        with pytest.raises(ValueError, match="effects='sum' is not one of None, 'abs', 'square'"):
            gxd.register_utility("wrong_for_test", effects="sum")
    finally:
        del _REGISTRY["wrong_for_test"]
    assert get_utility("gxd").effects is not None
