"""What can be set while training goes on takes effect, what another loss shows is left out, wrong input is refused."""

import copy
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd
from gxd.methods.unit_reset import UnitReset
from gxd.select import LowestRate
from tests.rig import X, Y, attach, mlp, plan_of, refused, same, sgd

SIZES = {"fc1": 5, "fc2": 6}
KINDS = ["gxd", "activation", "loss_gradient"]


# ---- rates and maturities


class Naive:
    """The rule with settings that change, for units whose utility is their number."""

    def __init__(self, rate: float, maturity: int) -> None:
        self.rates, self.maturities = dict.fromkeys(SIZES, rate), dict.fromkeys(SIZES, maturity)
        self.ages = {name: [0] * size for name, size in SIZES.items()}
        self.budget = dict.fromkeys(SIZES, 0.0)

    def step(self) -> dict[str, list[int]]:
        chosen: dict[str, list[int]] = {}
        for name, ages in self.ages.items():
            ages[:] = [age + 1 for age in ages]
            eligible = [unit for unit, age in enumerate(ages) if age > self.maturities[name]]
            self.budget[name] += self.rates[name] * len(eligible)
            count = min(math.floor(self.budget[name]), len(eligible))
            self.budget[name] -= count
            for unit in eligible[:count]:
                ages[unit] = 0
                chosen.setdefault(name, []).append(unit)
        return chosen


def common_rate(step: int, cbp: gxd.ContinualBackprop, naive: Naive) -> None:
    if step in (5, 12):
        cbp.replacement_rate = rate = {5: 0.3, 12: 0.05}[step]
        naive.rates = dict.fromkeys(SIZES, rate)


def common_maturity(step: int, cbp: gxd.ContinualBackprop, naive: Naive) -> None:
    if step in (6, 14):
        cbp.maturity = maturity = {6: 1, 14: 9}[step]
        naive.maturities = dict.fromkeys(SIZES, maturity)


def own_rate(step: int, cbp: gxd.ContinualBackprop, naive: Naive) -> None:
    if step == 4:
        cbp.replacement_rates["fc1"] = naive.rates["fc1"] = 0.4
    if step == 8:
        cbp.replacement_rate = naive.rates["fc2"] = 0.0  # the one of fc1 is its own
    if step == 14:
        del cbp.replacement_rates["fc1"]
        naive.rates["fc1"] = 0.0


def own_maturity(step: int, cbp: gxd.ContinualBackprop, naive: Naive) -> None:
    if step == 3:
        cbp.maturities["fc2"] = naive.maturities["fc2"] = 0
    if step == 9:
        cbp.maturity = naive.maturities["fc1"] = 1
    if step == 15:
        del cbp.maturities["fc2"]
        naive.maturities["fc2"] = 1


@pytest.mark.parametrize("change", [common_rate, common_maturity, own_rate, own_maturity], ids=lambda f: f.__name__)
def test_a_setting_that_is_changed_takes_effect_at_the_next_step(change: Callable[..., None]):
    @gxd.register_utility("number")
    def number(o: gxd.Observation) -> Tensor:
        return torch.arange(o.views[0].h.shape[-1]).to(o.views[0].h)

    rig = attach("number", replacement_rate=0.15, maturity=4, decay=0.0)
    naive, unchanged, found, expected = Naive(0.15, 4), Naive(0.15, 4), [], []
    for step in range(25):
        change(step, rig.cbp, naive)
        rig.train()
        found.append({name: index.tolist() for name, index in rig.cbp.last_resets.items()})
        expected.append(naive.step())
        assert {name: ages.tolist() for name, ages in rig.cbp.ages().items()} == naive.ages
    assert found == expected
    assert found != [unchanged.step() for _ in range(25)]


def test_settings_read_as_what_is_in_force():
    rig = attach(replacement_rate=0.1, maturity=4, plan=plan_of().select(rates={"fc2": 0.5}))
    cbp = rig.cbp
    assert dict(cbp.replacement_rates) == {"fc1": 0.1, "fc2": 0.5}  # the plan's is kept
    cbp.replacement_rate = 0.2
    cbp.replacement_rates["fc2"] = 0.3
    cbp.maturities["fc1"] = 7
    assert (cbp.replacement_rate, dict(cbp.replacement_rates)) == (0.2, {"fc1": 0.2, "fc2": 0.3})
    assert (cbp.maturity, dict(cbp.maturities)) == (4, {"fc1": 7, "fc2": 4})
    assert repr(cbp.maturities) == "{'fc1': 7, 'fc2': 4}" and len(cbp.maturities) == 2
    del cbp.replacement_rates["fc2"], cbp.replacement_rates["fc1"], cbp.maturities["fc1"]
    assert dict(cbp.replacement_rates) == {"fc1": 0.2, "fc2": 0.5}
    assert dict(cbp.maturities) == {"fc1": 4, "fc2": 4}
    assert "replacement_rate=0.2" in repr(cbp)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda c: setattr(c, "replacement_rate", 1.5), ValueError, ("replacement_rate=1.5", "[0, 1]")),
        (lambda c: setattr(c, "replacement_rate", "0.1"), ValueError, ("replacement_rate='0.1'",)),
        (lambda c: setattr(c, "maturity", -1), ValueError, ("maturity=-1", "0 or more")),
        (lambda c: setattr(c, "maturity", 2.5), ValueError, ("maturity=2.5",)),
        (lambda c: c.replacement_rates.__setitem__("fc1", -0.1), ValueError, ("replacement_rate=-0.1",)),
        (lambda c: c.maturities.__setitem__("fc1", True), ValueError, ("maturity=True",)),
        (lambda c: c.replacement_rates.__setitem__("fc11", 0.1), KeyError, ("'fc11'", "Did you mean 'fc1'", "fc2")),
        (lambda c: c.maturities["nothing"], KeyError, ("'nothing'", "fc1, fc2")),
        (lambda c: c.maturities.__delitem__("fc3"), KeyError, ("'fc3'", "Did you mean")),
    ],
)
def test_a_wrong_setting_is_refused_with_its_value_and_changes_nothing(change: Any, error: Any, words: tuple):
    cbp = attach(replacement_rate=0.1, maturity=4).cbp
    refused(lambda: change(cbp), error, words)
    assert dict(cbp.replacement_rates) == {"fc1": 0.1, "fc2": 0.1}
    assert dict(cbp.maturities) == {"fc1": 4, "fc2": 4}


def test_a_rate_that_was_zero_is_set_and_units_begin_to_go():
    rig = attach(replacement_rate=0.0, maturity=0)
    for _ in range(3):
        rig.train()
    assert rig.cbp.total_resets == 0
    rig.cbp.replacement_rate = 1.0
    rig.train()
    assert {name: len(index) for name, index in rig.cbp.last_resets.items()} == SIZES


# ---- observations that do not count


@pytest.mark.parametrize("utility", KINDS)
def test_what_is_discarded_leaves_no_trace(utility: str):
    rigs = [attach(utility, replacement_rate=0.1, maturity=1) for _ in range(2)]
    for step in range(6):
        if step % 2:
            model, optimizer, cbp = rigs[0].model, rigs[0].optimizer, rigs[0].cbp
            logits = model(X + step)
            if step != 3:
                cbp.observe(logits, Y)
            F.cross_entropy(logits, Y).backward()
            optimizer.zero_grad()
            cbp.discard()
        for rig in rigs:
            rig.train()
    first, second = rigs
    assert same(first.cbp.state_dict(), second.cbp.state_dict())
    assert same(first.model.state_dict(), second.model.state_dict())
    assert first.cbp.total_resets > 0


def test_after_a_discard_a_step_without_an_observation_is_unobserved():
    rig = attach()
    logits = rig.model(X)
    rig.cbp.observe(logits, Y)
    rig.cbp.discard()
    F.cross_entropy(logits, Y).backward()
    with pytest.raises(gxd.ObservationError, match=r"without observe\(\)"):
        rig.optimizer.step()


class Agent:
    """A critic Q(s, a) in training, and an actor that climbs it: through the critic itself, or through a copy."""

    def __init__(self, utility: str, own: bool) -> None:
        torch.manual_seed(0)
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 1))
        self.actor = nn.Linear(4, 2)
        self.optimizer = torch.optim.Adam(self.critic.parameters(), 0.02)
        self.climber = torch.optim.SGD(self.actor.parameters(), 0.1)
        self.cbp = gxd.ContinualBackprop(
            self.critic,
            self.optimizer,
            example_inputs=torch.zeros(2, 6),
            utility=utility,
            replacement_rate=0.1,
            maturity=1,
        )
        self.own = own

    def climb(self, state: Tensor, pause: bool = True) -> None:
        critic = self.critic if self.own else copy.deepcopy(self.critic)
        with self.cbp.paused() if pause else nullcontext():
            loss = -critic(torch.cat([state, self.actor(state)], 1)).mean()
            gradients = torch.autograd.grad(loss, list(self.actor.parameters()))
        for parameter, gradient in zip(self.actor.parameters(), gradients):
            parameter.grad = gradient
        self.climber.step()

    def run(self, pause: bool = True) -> Any:
        generator = torch.Generator().manual_seed(1)
        for _ in range(6):
            state, action = (torch.randn(8, n, generator=generator) for n in (4, 2))
            self.climb(state, pause)
            value = self.critic(torch.cat([state, action], 1))
            self.cbp.observe(score=value)
            self.climb(state, pause)  # between the critic's forward pass and its backward pass
            (value.squeeze(1) - state.sum(1)).square().mean().backward()
            self.climb(state, pause)
            self.optimizer.step()
            self.optimizer.zero_grad()
        assert self.cbp.total_resets > 0
        return self.cbp.state_dict(), self.critic.state_dict(), self.actor.state_dict()


@pytest.mark.parametrize("utility", [*KINDS, "mc_contribution"])
def test_an_actors_loss_through_its_paused_critic_leaves_the_scores_as_without_it(utility: str):
    assert same(Agent(utility, own=True).run(), Agent(utility, own=False).run())


def test_an_actors_loss_through_a_critic_that_is_not_paused_counts():
    assert not same(Agent("activation", own=True).run(pause=False), Agent("activation", own=False).run())


@pytest.mark.parametrize("utility", ["loss_gradient", "gxd_loss"])
def test_a_utility_of_the_loss_needs_no_pause_for_the_actors_loss(utility: str):
    """That pass does not end in the critic's gradients."""
    assert same(Agent(utility, own=True).run(pause=False), Agent(utility, own=False).run())


def test_pauses_nest_and_end_with_an_exception():
    rig = attach("activation")
    cbp = rig.cbp
    with cbp.paused():
        with cbp.paused():
            rig.model(X)
        assert not cbp.watched()
        rig.model(X)
    assert cbp.watched()
    with pytest.raises(RuntimeError, match="mine"), cbp.paused():
        rig.model(X)
        raise RuntimeError("mine")
    assert cbp.watched()
    other = attach("activation")
    rig.train()
    other.train()
    assert same(cbp.state_dict(), other.cbp.state_dict())


def test_a_step_within_a_pause_ages_the_units_and_scores_none():
    rig = attach(replacement_rate=0.0)
    rig.train()
    before = rig.cbp.utilities()
    with rig.cbp.paused():
        rig.train()
        rig.train(observe=False)
    assert same(rig.cbp.utilities(), before)
    assert rig.cbp.ages()["fc1"].tolist() == [3] * 5
    rig.train()
    assert not same(rig.cbp.utilities(), before)


def test_a_pause_leaves_steps_unobserved_that_are_not_scored_anyway():
    rig = attach(score_every=3)
    rig.train()
    assert not rig.cbp.watched()
    with rig.cbp.paused():
        pass
    assert not rig.cbp.watched()


# ---- steps that show nothing


def unobserved(utility: str, word: str) -> list[warnings.WarningMessage]:
    """Every other step is not observed. The warnings of it."""
    rig = attach(utility, on_unobserved=word, replacement_rate=0.2, maturity=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(8):
            if step % 2 and utility == "gxd":
                rig.train(observe=False)
            elif step % 2:
                rig.optimizer.step()  # of the gradients of the last one
            else:
                rig.train()
    assert rig.cbp.total_resets > 0
    assert rig.cbp._parts[0].units.step == 8
    return caught


@pytest.mark.parametrize("utility", ["gxd", "activation"])
def test_a_step_that_shows_nothing_is_passed_over_with_one_warning_or_none(utility: str):
    assert unobserved(utility, "skip") == []
    (warning,) = unobserved(utility, "warn")
    assert issubclass(warning.category, gxd.ObservationWarning)
    assert "optimizer.step()" in str(warning.message) and "passed over" in str(warning.message)
    with pytest.raises(gxd.ObservationError, match=r"optimizer\.step\(\) without"):
        unobserved(utility, "raise")


def test_a_step_that_is_refused_counts_for_no_method():
    """Neither for the one that saw nothing, nor for those before it."""
    model = mlp()
    optimizer = sgd(model)
    redo, cbp = gxd.method("redo", threshold=0.9, every=1), gxd.method("continual_backprop", utility="gxd")
    attached = gxd.attach(model, optimizer, redo, cbp, plan=plan_of())
    F.cross_entropy(model(X), Y).backward()
    with pytest.raises(gxd.ObservationError, match="no unit was scored or reset"):
        optimizer.step()
    assert attached.total_resets == 0
    assert not attached.ages("redo")["fc1"].any() and not attached.ages("continual_backprop")["fc1"].any()


def test_a_word_that_is_not_known_is_refused_with_the_nearest():
    refused(lambda: attach(on_unobserved="warm"), ValueError, ("on_unobserved='warm'", "'raise'", "mean 'warn'"))
    refused(lambda: attach(on_unobserved=None), ValueError, ("on_unobserved=None", "'skip'"))


# ---- what is attached


L2, REDO = (lambda: gxd.method("l2_init")), (lambda: gxd.method("redo"))


@pytest.mark.parametrize(
    ("methods", "options", "error", "words"),
    [
        (lambda: ["gdx"], {}, ValueError, ("gdx", "Did you mean 'gxd'")),
        (lambda: [gxd.Method], {}, TypeError, ("the class Method", "make an instance")),
        (lambda: [gxd.methods()["redo"]], {}, TypeError, ("MethodInfo", "gxd.method(name)")),
        (lambda: [None], {}, TypeError, ("NoneType",)),
        (lambda: [[REDO()]], {}, TypeError, ("list",)),
        (lambda: [REDO()], {}, ValueError, ("pass example_inputs=x[:2]", "plan")),
        (lambda: [L2(), REDO()], {}, ValueError, ("pass example_inputs=x[:2]", "plan")),
        (lambda: [REDO()], {"plan": plan_of(), "example_inputs": X}, ValueError, ("both",)),
        (lambda: [L2()], {"plan": plan_of(), "example_inputs": X}, ValueError, ("both",)),
        (lambda: [L2()], {"plan": "auto"}, TypeError, ("plan", "UnitPlan", "str")),
        (lambda: [L2()], {"seed": -1}, ValueError, ("seed=-1",)),
        (lambda: [L2()], {"scaler": 1.0}, TypeError, ("scaler", "GradScaler", "float")),
        (lambda: [L2()], {"on_unobserved": "ignore"}, ValueError, ("on_unobserved='ignore'",)),
    ],
)
def test_what_cannot_be_attached_is_refused_and_leaves_no_hook(methods: Any, options: Any, error: Any, words: tuple):
    model = mlp()
    optimizer = sgd(model)
    refused(lambda: gxd.attach(model, optimizer, *methods(), **options), error, words)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert not optimizer._optimizer_step_post_hooks and not optimizer._optimizer_step_pre_hooks


def test_a_method_whose_start_fails_leaves_no_hook_of_the_others():
    class Fails(gxd.Method):
        def init(self, host: gxd.Host) -> Any:
            raise RuntimeError("mine")

    model = mlp()
    optimizer = sgd(model)
    with pytest.raises(RuntimeError, match="mine"):
        gxd.attach(model, optimizer, REDO(), Fails(), plan=plan_of())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert not optimizer._optimizer_step_post_hooks


def test_several_that_score_units_are_asked_for_by_name():
    model = mlp()
    attached = gxd.attach(model, sgd(model), REDO(), REDO(), gxd.method("continual_backprop"), plan=plan_of())
    assert set(attached.ages("continual_backprop")) == set(attached.utilities("1.redo")) == set(SIZES)
    for name in (None, "redo", "cbp"):
        refused(lambda name=name: attached.ages(name), KeyError, (repr(name), "'0.redo'", "'2.continual_backprop'"))


# ---- the registry


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("redoo", {}, ValueError, ("unknown method 'redoo'", "Did you mean 'redo'")),
        ("L2_Init", {}, ValueError, ("Did you mean 'l2_init'",)),
        ("dropout", {}, ValueError, ("unknown method 'dropout'", "continual_backprop")),
        (None, {}, ValueError, ("unknown method None",)),
        ("redo", {"tau": 0.1}, TypeError, ("redo has no option 'tau'", "threshold")),
        ("redo", {"treshold": 0.1}, TypeError, ("'treshold'", "Did you mean 'threshold'")),
        ("continual_backprop", {"utility": "gdx"}, ValueError, ("unknown utility 'gdx'", "'gxd'?")),
        ("continual_backprop", {"selector": 1}, TypeError, ("no option 'selector'",)),
    ],
)
def test_a_wrong_name_or_option_is_refused_with_the_nearest(name: Any, options: Any, error: Any, words: tuple):
    refused(lambda: gxd.method(name, **options), error, words)


def test_the_registry_says_what_each_method_is_and_cannot_be_written_to():
    known = gxd.methods()
    assert {"continual_backprop", "redo", "l2_init"} <= set(known)
    for name, info in known.items():
        assert info.name == name and info.description and set(info.inert) <= set(info.options)
        assert gxd.method(name).name == name and repr(gxd.method(name)) == f"gxd.method({name!r})"
    with pytest.raises(TypeError):
        known["redo"] = None  # type: ignore[index]
    with pytest.raises(TypeError):
        known["redo"].inert["every"] = 1  # type: ignore[index]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: gxd.register_method(len, description="", inert={}), TypeError, ("name, a string", "builtin")),
        (
            lambda: gxd.register_method("mine", description="", inert={"rat": 0})(lambda rate=1.0: gxd.Method()),
            ValueError,
            ("'mine'", "'rat'"),
        ),
    ],
)
def test_a_wrong_registration_is_refused(call: Any, error: Any, words: tuple):
    before = dict(gxd.methods())
    refused(call, error, words)
    assert dict(gxd.methods()) == before


def test_a_selector_may_be_given_to_a_method_by_hand():
    model = mlp()
    optimizer = sgd(model)
    method = UnitReset("activation", LowestRate(0.5, 0), decay=0.9, reset=gxd.Reset(compensate=False))
    attached = gxd.attach(model, optimizer, method, plan=plan_of())
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    assert {name: len(index) for name, index in attached.last_resets.items()} == {"fc1": 2, "fc2": 3}
