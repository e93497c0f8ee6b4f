"""What whole sets of units cost, against clamping them by hand and products of effects in loops."""

import pytest
import torch
from scipy.stats import spearmanr
from torch import nn

import gxd
from gxd.observe.clamp import clamped

FRACTION, SETS = 0.3, 12


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 7), nn.SiLU(), nn.Linear(7, 4)).double().eval()
    x, y = torch.randn(30, 5, dtype=torch.float64), torch.randint(0, 4, (30,))
    plan = gxd.find_units(model, x[:2])
    utilities = ["activation", "gxd", "gxd_all_logit", "gxd_kl"]
    cost = gxd.reset_cost(
        model, (x[:18], y[:18]), x[18:], plan=plan, utilities=utilities, sets=FRACTION, random_sets=SETS, chunk=7
    )
    return model, plan, x, y, cost


def clamp(model, group, units, cost, x):
    before = model(x).detach()
    with clamped(model, group, units, cost.references[group.name]):
        return before, model(x).detach()


def test_the_shock_of_a_set_is_that_of_clamping_its_units_together(case):
    model, plan, x, _, cost = case
    for group in plan.groups:
        sets = {rule: by_group[group.name].unsqueeze(0) for rule, by_group in cost.sets.chosen.items()}
        for rule, members in {**sets, "random": cost.sets.random[group.name]}.items():
            for number, units in enumerate(members):
                assert len(units) == {9: 3, 7: 3}[group.size]
                before, after = clamp(model, group, units, cost, x[18:])
                l1 = sum(float((a - b).abs().sum()) for a, b in zip(before, after)) / 12
                p, q = before.softmax(1), after.softmax(1)
                kl = sum(float((a * (a / b).log()).sum()) for a, b in zip(p, q)) / 12
                assert float(cost.sets.shocks["l1"][rule][group.name][number]) == pytest.approx(l1)
                assert float(cost.sets.shocks["kl"][rule][group.name][number]) == pytest.approx(kl)
                alone = cost.shocks["l1"][group.name][units].sum()
                torch.testing.assert_close(cost.sets.alone["l1"][rule][group.name][number], alone)


def test_the_prediction_is_the_mean_square_of_the_summed_effects_and_the_greedy_choice_makes_it_small(case):
    model, plan, x, y, cost = case
    hidden = [model[1](model[0](x[:18])), None]
    hidden[1] = model[3](model[2](hidden[0]))
    target = model[4](hidden[1]).gather(1, y[:18, None]).sum()
    gradients = torch.autograd.grad(target, hidden)
    for group, h, g in zip(plan.groups, hidden, gradients):
        effects = ((h - h.mean(0)) * g).detach()
        for units, found in zip(cost.sets.random[group.name], cost.sets.predicted["gxd, set"][group.name]):
            summed = [float(sum(effect[unit] for unit in units)) for effect in effects]
            assert float(found) == pytest.approx(sum(s * s for s in summed) / len(summed))
        for units, found in zip(cost.sets.random[group.name], cost.sets.predicted["gxd"][group.name]):
            torch.testing.assert_close(found, effects.abs().mean(0)[units].sum())
        chosen = cost.sets.chosen["gxd, set"][group.name]
        square = lambda units: float(effects[:, units].sum(1).square().mean())  # noqa: B023
        grown: list[int] = []
        for _ in range(3):
            grown.append(min(set(range(group.size)) - set(grown), key=lambda unit: square([*grown, unit])))
        assert chosen.tolist() == sorted(grown)
        lowest = cost.scores["gxd"][group.name].argsort()[:3].sort().values
        assert cost.sets.chosen["gxd"][group.name].tolist() == lowest.tolist()


def test_behind_a_linear_tail_the_prediction_is_the_squared_change_of_all_logits(case):
    model, plan, x, _, cost = case
    last = plan.groups[-1]
    for units, found in zip(cost.sets.random[last.name], cost.sets.predicted["gxd_all_logit, set"][last.name]):
        before, after = clamp(model, last, units, cost, x[:18])
        torch.testing.assert_close(found, (after - before).square().mean())


def test_rank_correlations_are_those_of_scipy_and_means_go_over_groups(case):
    *_, cost = case
    for metric in ("l1", "kl"):
        rho, shock, alone = cost.sets.spearman(metric), cost.sets.shock(metric), cost.sets.sum_alone(metric)
        assert list(rho) == [
            *("activation", "gxd", "gxd, set", "gxd_all_logit", "gxd_all_logit, set", "gxd_kl", "gxd_kl, set")
        ]
        for rule, by_group in cost.sets.predicted.items():
            true = cost.sets.shocks[metric]["random"]
            each = [spearmanr(values, true[group]).statistic for group, values in by_group.items()]
            assert rho[rule] == pytest.approx(sum(each) / 2)
        each = [float(values.mean()) for values in cost.sets.shocks[metric]["random"].values()]
        assert shock["random"] == pytest.approx(sum(each) / 2)
        assert list(shock) == list(alone) == [*rho, "random"]


def test_the_sets_are_printed_and_are_made_of_the_units_that_were_clamped(case):
    model, plan, x, y, cost = case
    assert "gxd_kl, set" in str(cost)
    assert "over 12 random ones" in str(cost)
    few = gxd.reset_cost(
        model, (x[:18], y[:18]), x[18:], plan=plan, utilities="gxd", units_per_group=4, sets=0.5, random_sets=3
    )
    for group, units in few.units.items():
        for some in (few.sets.chosen["gxd, set"][group], *few.sets.random[group]):
            assert len(some) == 2
            assert set(some.tolist()) <= set(units.tolist())
    without = gxd.reset_cost(model, (x, y), x, plan=plan, utilities="gxd")
    assert without.sets is None
    assert "random ones" not in str(without)


@pytest.mark.parametrize("options", [{"sets": 0}, {"sets": 1.5}, {"sets": "all"}, {"sets": 0.1, "random_sets": 0}])
def test_shares_and_numbers_that_make_no_sense_are_refused(case, options):
    model, plan, x, y, _ = case
    with pytest.raises(ValueError, match=f"{list(options)[-1]}=.* must be a"):
        gxd.reset_cost(model, (x, y), x, plan=plan, utilities="gxd", **options)
