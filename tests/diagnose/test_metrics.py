"""Attachment.metrics(): what is logged, its definitions, and that ages at reset survive a resume exactly."""

import copy
import math
import statistics

import pytest
import torch
import torch.nn.functional as F

import gxd
from gxd.methods.recent import RECENT
from tests import models as zoo
from tests.rig import X, Y, attach, mlp, plan_of, same, sgd


def train(rig, steps):
    for _ in range(steps):
        rig.train()


def naive(rig, steps, earliest):
    """Trains, and returns the ages of all units that were reset, by a loop over units, and which were young."""
    births = {group.name: [0] * group.size for group in rig.cbp.plan.groups}
    ages, young = [], []
    for step in range(1, steps + 1):
        rig.train()
        for name, index in rig.cbp.last_resets.items():
            for unit in index.tolist():
                age = step - births[name][unit]
                ages.append(age)
                young.append(age < 1.5 * earliest[name])
                births[name][unit] = step
    return ages, young


def test_churn_and_the_median_age_are_those_of_the_last_resets():
    rig = attach("contribution", replacement_rate=0.2, maturity=3)
    rig.cbp.maturities["fc2"] = 6
    ages, young = naive(rig, 120, {"fc1": 3, "fc2": 6})
    assert 50 < len(ages) < RECENT
    found = rig.cbp.metrics()
    assert found["gxd/resets"] == len(ages) == rig.cbp.total_resets
    assert found["gxd/median_age_at_reset"] == pytest.approx(statistics.median(ages))
    assert found["gxd/churn"] == pytest.approx(sum(young) / len(young)) and 0 < found["gxd/churn"] < 1
    churn, age = rig.cbp.reset_ages(20)
    assert age == statistics.median(ages[-20:]) and churn == pytest.approx(sum(young[-20:]) / 20)


def test_reach_is_the_share_of_all_units_that_were_reset_in_the_second_half_of_the_steps():
    rig = attach("contribution", replacement_rate=0.05, maturity=3)
    last = {}  # the step of the last reset of each unit that ever had one
    for step in range(1, 61):
        rig.train()
        last |= {(name, unit): step for name, index in rig.cbp.last_resets.items() for unit in index.tolist()}
        late = sum(2 * when > step for when in last.values())
        assert rig.cbp.metrics()["gxd/reach"] == pytest.approx(late / rig.cbp.plan.size)
    assert late < len(last) < rig.cbp.plan.size  # some were reset early only, and some never


def test_units_that_one_of_two_methods_resets_are_reached():
    model = mlp()
    optimizer, plan = sgd(model), plan_of()
    methods = [gxd.method("continual_backprop", utility="random", replacement_rate=rate) for rate in (0.2, 0.0)]
    both = gxd.attach(model, optimizer, *methods, plan=plan)
    for _ in range(120):
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert both.total_resets > 0 and both.metrics()["gxd/reach"] > 0


def test_no_more_than_the_last_resets_are_remembered():
    rig = attach("contribution", replacement_rate=1.0, maturity=0)
    ages, _ = naive(rig, 150, {"fc1": 0, "fc2": 0})
    assert len(ages) > RECENT
    assert rig.cbp.metrics()["gxd/median_age_at_reset"] == statistics.median(ages[-RECENT:])
    assert rig.cbp.metrics()["gxd/churn"] == 1 == rig.cbp.reset_ages(10**6)[0]  # every unit goes at its first chance


def test_resets_so_rare_that_a_newborn_is_older_at_its_first_chance_are_churn_all_the_same():
    """The same unit at every reset, but the interval is longer than 1.5 times the maturity."""
    rig = attach("contribution", replacement_rate=1 / (20 * plan_of().groups[0].size), maturity=10)
    rig.cbp.replacement_rates["fc2"] = 0.0
    ages, _ = naive(rig, 400, {"fc1": 10, "fc2": 10})
    same_again = [age for age in ages if age < 40]
    assert min(ages) >= 20 > 1.5 * 10 and len(same_again) > 1
    assert rig.cbp.metrics()["gxd/churn"] == pytest.approx(sum(age < 1.5 * 20 for age in ages) / len(ages))
    assert rig.cbp.metrics()["gxd/churn"] > 0


def test_of_redo_a_unit_is_young_if_it_goes_at_the_next_opportunity():
    model = mlp()
    with torch.no_grad():
        model.fc1.bias[0] = -100.0  # dead; a reset revives it
    optimizer = sgd(model)
    attached = gxd.attach(model, optimizer, gxd.method("redo", threshold=1e9, every=5), plan=plan_of())
    for _ in range(20):
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
    found = attached.metrics()
    assert found["gxd/resets"] == 4 * 11 == found["gxd/redo/resets"]
    assert found["gxd/churn"] == 1 and found["gxd/median_age_at_reset"] == 5


def test_a_resume_has_the_same_metrics_as_a_run_that_was_not_interrupted(tmp_path):
    whole, first, second = (attach("contribution", replacement_rate=0.2, maturity=3) for _ in range(3))
    train(whole, 60)
    train(first, 31)
    torch.save((first.model.state_dict(), first.optimizer.state_dict(), first.cbp.state_dict()), tmp_path / "state.pt")
    for part, state in zip(vars(second).values(), torch.load(tmp_path / "state.pt", weights_only=True), strict=True):
        part.load_state_dict(state)
    assert second.cbp.metrics()["gxd/churn"] == first.cbp.metrics()["gxd/churn"] > 0
    train(second, 29)
    known = [{k: v for k, v in rig.cbp.metrics().items() if not math.isnan(v)} for rig in (whole, second)]
    assert known[0] == known[1] and known[0]["gxd/resets"] > 20


def test_asking_for_metrics_changes_nothing_and_needs_no_forward_pass():
    rig = attach("gxd", replacement_rate=0.2, maturity=3)
    train(rig, 20)
    calls = []
    rig.model.register_forward_pre_hook(lambda *args: calls.append(1))
    before, state = copy.deepcopy(rig.cbp.state_dict()), torch.get_rng_state()
    assert rig.cbp.metrics() == rig.cbp.metrics()
    assert not calls and same(before, rig.cbp.state_dict()) and torch.equal(state, torch.get_rng_state())


def test_the_other_metrics_are_what_they_say():
    rig = attach("contribution", replacement_rate=0.05, maturity=3)
    train(rig, 29)
    found, cbp = rig.cbp.metrics(), rig.cbp
    utilities = torch.cat(list(cbp.utilities().values()))
    length = lambda tensors: torch.cat([t.detach().flatten() for t in tensors]).norm().item()
    named = dict(rig.model.named_parameters())
    expected = {
        "gxd/continual_backprop/utility_median": utilities.quantile(0.5).item(),
        "gxd/continual_backprop/utility_05": utilities.quantile(0.05).item(),
        "gxd/continual_backprop/utility_95": utilities.quantile(0.95).item(),
        "gxd/continual_backprop/age_median": torch.cat(list(cbp.ages().values())).double().quantile(0.5).item(),
        "gxd/continual_backprop/reference_max": max(r.abs().max().item() for r in cbp.references().values()),
        "gxd/weight_norm": length([p for n, p in named.items() if "weight" in n]),
        "gxd/bias_norm": length([p for n, p in named.items() if "bias" in n]),
        "gxd/gradient_norm": length([p.grad for p in named.values()]),
        "gxd/nonfinite_observations": 0,
    }
    # A unit that was reset in the last step has not been seen since.
    assert not cbp.last_resets
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    rig.optimizer.zero_grad()
    assert math.isnan(cbp.metrics()["gxd/gradient_norm"])


@pytest.mark.parametrize("name", gxd.methods())
def test_every_method_has_metrics_before_while_and_after_it_is_attached(name):
    model = mlp(norm=True)
    if name == "plasticity_injection":
        model = gxd.injectable(model, "head")
    optimizer, method = sgd(model), gxd.method(name)
    plan = plan_of(norm=True) if method.needs_units else None
    attached = gxd.attach(model, optimizer, method, plan=plan, on_unobserved="skip")
    first = attached.metrics()
    assert first["gxd/resets"] == 0
    assert all(math.isnan(first[f"gxd/{name}"]) for name in ("churn", "median_age_at_reset", "reach"))
    for _ in range(3):
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
    attached.close()
    last = attached.metrics()
    assert first.keys() == last.keys() and all(type(value) is float for value in last.values())
    assert last["gxd/weight_norm"] > 0


def test_methods_of_one_name_are_told_apart():
    model = mlp()
    methods = [gxd.method("redo"), gxd.method("redo", threshold=0.2), gxd.method("l2_init")]
    found = gxd.attach(model, sgd(model), *methods, plan=plan_of()).metrics()
    assert "gxd/0.redo/resets" in found and "gxd/1.redo/resets" in found


def test_a_selector_of_ones_own_has_ages_and_no_churn():
    class Always(gxd.Selector):
        def advance(self, plan, units, state):
            return state, units.step % 4 == 0

        def select(self, plan, units, state, allowed):
            return {0: torch.tensor([1, 2])}, state

    model = mlp()
    optimizer = sgd(model)
    attached = gxd.attach(model, optimizer, gxd.UnitReset("contribution", Always()), plan=plan_of())
    for _ in range(8):
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
    assert attached.metrics()["gxd/median_age_at_reset"] == 4 and math.isnan(attached.metrics()["gxd/churn"])
    attached.close()
    redo = gxd.method("redo", threshold=10.0, every=4)  # all units, at every age of 4
    attached = gxd.attach(model, optimizer, gxd.UnitReset("contribution", Always()), redo, plan=plan_of())
    for _ in range(4):
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
    assert attached.metrics()["gxd/churn"] == 1.0  # that of redo, which is known


def test_units_that_are_reset_in_part_do_not_begin_anew_and_have_no_age_at_reset():
    model = mlp()
    optimizer = sgd(model)
    soft = gxd.UnitReset("activation", gxd.Soft(every=2, sharpness=1.0, center=0.0), decay=0.0)
    attached = gxd.attach(model, optimizer, soft, plan=plan_of())
    for _ in range(4):
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
    whole = int((attached.ages()["fc1"] < 4).sum() + (attached.ages()["fc2"] < 4).sum())
    known = attached._unit_methods()["unit_reset"][1].recent.last(RECENT).age
    assert attached.total_resets > len(known) >= whole


def test_tensorboard_takes_them_as_they_are(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    rig = attach("contribution", replacement_rate=0.2, maturity=3)
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(12):
            rig.train()
            for name, value in rig.cbp.metrics().items():
                writer.add_scalar(name, value, step)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(rig.cbp.metrics())
    assert events.Scalars("gxd/resets")[-1].value == rig.cbp.total_resets > 0


def test_units_with_several_views_and_batch_norm_have_metrics():
    model, batch, _ = zoo.make("resnet")
    x, _ = batch()
    optimizer = sgd(model)
    plan = gxd.find_units(model, x, residual="group")
    cbp = gxd.ContinualBackprop(model, optimizer, plan=plan, utility="contribution", replacement_rate=0.3, maturity=2)
    for _ in range(8):
        model(x).square().mean().backward()
        optimizer.step()
    found = cbp.metrics()
    assert found["gxd/resets"] > 10 and found["gxd/median_age_at_reset"] >= 3
    assert all(math.isfinite(value) for value in found.values())
