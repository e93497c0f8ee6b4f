"""What an observed output says about units: of branches it does not depend on, nothing."""

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd
from tests.oracle import View, naive_scores
from tests.rig import OBSERVED, same

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3


class PolicyAndValue(nn.Module):
    """A body, and two heads with hidden units of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 7), nn.Tanh())
        self.policy = nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))
        self.value = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.policy(h), self.value(h)


class Detached(PolicyAndValue):
    """The value does not train the body."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.policy(h), self.value(h.detach())


class Convolutional(PolicyAndValue):
    """The same with positions: its units are not scored side by side."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Conv1d(1, 7, 2), nn.Tanh())
        self.policy = nn.Sequential(nn.Conv1d(7, 6, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))
        self.value = nn.Sequential(nn.Conv1d(7, 5, 2), nn.Tanh(), nn.Flatten(), nn.Linear(10, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x.unsqueeze(1))


@cache
def plan_of(net: type[nn.Module]) -> gxd.UnitPlan:
    return gxd.find_units(net(), X[:2], residual="group")


def attached(model: nn.Module, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, gxd.ContinualBackprop]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"replacement_rate": 0.1, "maturity": 2, "plan": plan_of(type(model)), **options}
    return model, optimizer, gxd.ContinualBackprop(model, optimizer, **options)


Observe = Callable[[gxd.ContinualBackprop, Tensor, Tensor], None]


def policy_alone(cbp: gxd.ContinualBackprop, logits: Tensor, value: Tensor) -> None:
    cbp.observe(logits, Y)


def value_alone(cbp: gxd.ContinualBackprop, logits: Tensor, value: Tensor) -> None:
    cbp.observe(score=value)


def both(cbp: gxd.ContinualBackprop, logits: Tensor, value: Tensor) -> None:
    cbp.observe(score=logits.logsumexp(1) + value.squeeze(1))


def train(model: nn.Module, optimizer: Any, cbp: gxd.ContinualBackprop, steps: int, observe: Observe) -> dict[str, int]:
    """Group -> how many of its units were reset."""
    resets = {group.name: 0 for group in cbp.plan.groups}
    for _ in range(steps):
        logits, value = model(X)
        observe(cbp, logits, value)
        loss = F.cross_entropy(logits, Y) + (0 if cbp.methods[0].utility.gradient == "loss" else value.square().mean())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, index in cbp.last_resets.items():
            resets[name] += len(index)
    return resets


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def of_groups(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if w.category is gxd.ObservationWarning]


@pytest.mark.parametrize("score_every", [1, 3])
@pytest.mark.parametrize("net", [PolicyAndValue, Convolutional, Detached])
@pytest.mark.parametrize("utility", ["gxd", "gxd_all_logit", "gxd_sketch", "loss_gradient"])
def test_a_branch_that_the_output_does_not_depend_on_is_left_alone_with_a_warning(
    utility: str, net: Callable[[], nn.Module], score_every: int, caught: list
):
    model, optimizer, cbp = attached(net(), utility=utility, score_every=score_every)
    before = copy.deepcopy(model.value[-1].state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    resets = train(model, optimizer, cbp, 1, policy_alone)
    (message,) = of_groups(caught)
    what = "the loss" if utility == "loss_gradient" else "the observed output"
    assert message.startswith(f"{what} does not depend on the group 'value.0':"), "at the first step"
    assert "exclude" in message and ("score=" in message or utility == "loss_gradient")
    resets = train(model, optimizer, cbp, 30, policy_alone)
    assert len(of_groups(caught)) == 1
    assert resets["value.0"] == 0
    assert resets["policy.0"] > 0
    assert resets["body.0"] > 0
    assert not cbp.utilities()["value.0"].any()
    assert same(model.value[-1].state_dict(), before)


@pytest.mark.parametrize("utility", OBSERVED)
def test_its_units_are_still_followed_by_their_references(utility: str):
    model, optimizer, cbp = attached(PolicyAndValue(), utility=utility, maturity=100)
    h = model.value[1](model.value[0](model.body(X))).detach()
    with pytest.warns(gxd.ObservationWarning):
        train(model, optimizer, cbp, 1, policy_alone)
    torch.testing.assert_close(cbp.references()["value.0"], h.mean(0))


def test_steps_that_observe_one_output_each_average_each_branch_over_its_own_steps(caught: list):
    model, optimizer, cbp = attached(PolicyAndValue(), utility="gxi", maturity=100)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, cbp, 5, policy_alone)
    train(model, optimizer, cbp, 3, value_alone)
    train(model, optimizer, cbp, 1, policy_alone)
    assert [message.split("'")[1] for message in of_groups(caught)] == ["value.0", "policy.0"]
    h = model.body(X)
    for name, weights, branch in (
        ("policy.0", model.policy[2].weight[Y], model.policy),
        ("value.0", model.value[2].weight.expand(12, -1), model.value),
    ):
        hidden = branch[1](branch[0](h)).detach()
        expected = naive_scores("gxi", [View(hidden[:, None], weights.detach()[:, None], torch.zeros(hidden.shape[1]))])
        torch.testing.assert_close(cbp.utilities()[name], torch.tensor(expected), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("net", [PolicyAndValue, Convolutional])
@pytest.mark.parametrize("utility", OBSERVED)
def test_passes_of_one_step_that_observe_one_output_each_show_both_branches(utility: str, net: Any, caught: list):
    model, optimizer, cbp = attached(net(), utility=utility, seed=3)
    for _ in range(20):
        for part, observe in ((slice(0, 4), policy_alone), (slice(4, 12), value_alone)):
            logits, value = model(X[part])
            if observe is policy_alone:
                cbp.observe(logits, Y[part])
            else:
                cbp.observe(score=value)
            (logits.square().mean() + value.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert of_groups(caught) == []
    assert all(bool(u.any()) for u in cbp.utilities().values())
    # What was seen of a branch in the other's pass does not thin out its score.
    model, optimizer, cbp = attached(net(), utility="gxi", maturity=100)
    alone, alone_optimizer, expected = attached(net(), utility="gxi", maturity=100)
    for part, observed in ((slice(0, 4), 0), (slice(4, 12), 1)):
        cbp.observe(score=model(X[part])[observed].sum(1))
        if observed:
            expected.observe(score=alone(X[part])[observed].sum(1))
    optimizer.step()
    alone_optimizer.step()
    torch.testing.assert_close(cbp.utilities()["value.0"], expected.utilities()["value.0"])


def test_a_utility_that_is_not_zero_without_a_gradient_is_not_averaged_either():
    try:
        gxd.register_utility("one_more", gradient="target")(lambda o: 1 + sum(v.g.abs().mean((0, 1)) for v in o.views))
        for net in (PolicyAndValue, Convolutional):
            model, optimizer, cbp = attached(net(), utility="one_more", maturity=100)
            with pytest.warns(gxd.ObservationWarning, match=r"value\.0"):
                train(model, optimizer, cbp, 3, policy_alone)
            assert not cbp.utilities()["value.0"].any()
            assert bool((cbp.utilities()["policy.0"] > 1).all())
    finally:
        gxd.score.utilities._REGISTRY.pop("one_more")


class TwoReaders(nn.Module):
    """A residual stream: its units have a view in each branch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.mlp, self.head = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.aside = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(x)
        aside = self.aside(x)
        return self.head(x + self.mlp(self.norm(x)).tanh()), aside


@pytest.mark.parametrize("utility", ["gxd", "gxd_all_logit"])
def test_units_that_the_output_reads_in_one_place_of_several_are_scored_by_that_one(utility: str, caught: list):
    assert any(len(group.views) > 1 for group in plan_of(TwoReaders).groups)
    model, optimizer, cbp = attached(TwoReaders(), utility=utility)
    resets = train(model, optimizer, cbp, 20, policy_alone)
    assert of_groups(caught) == []
    assert all(resets.values())


def test_a_score_in_the_middle_of_accumulation_is_resumed_with_what_was_shown():
    runs = []
    for interrupted in (False, True):
        model, optimizer, cbp = attached(PolicyAndValue(), maturity=1)
        for step in range(6):
            for observe in (policy_alone, value_alone if step % 2 else policy_alone):
                if interrupted:
                    state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), cbp.state_dict()))
                    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
                    model, optimizer, cbp = attached(PolicyAndValue(), maturity=1)
                    for new, old in zip((model, optimizer, cbp), state, strict=True):
                        new.load_state_dict(old)
                    for p, gradient in zip(model.parameters(), gradients, strict=True):
                        p.grad = gradient
                else:
                    cbp.state_dict()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", gxd.ObservationWarning)
                    logits, value = model(X)
                    observe(cbp, logits, value)
                    (F.cross_entropy(logits, Y) + value.square().mean()).backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", gxd.ObservationWarning)
                optimizer.step()
            optimizer.zero_grad()
        runs.append((model.state_dict(), cbp.state_dict()))
    assert same(*runs)
    assert bool(cbp.utilities()["value.0"].any())


@pytest.mark.parametrize("net", [PolicyAndValue, Convolutional])
@pytest.mark.parametrize("utility", ["gxd", "gxd_all_logit", "loss_gradient"])
def test_a_compiled_step_leaves_alone_what_the_eager_one_does(
    utility: str, net: Any, caught: list, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gxd.compile.program.compile_graph", lambda graph, example: graph)
    runs = []

    def loss(output: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        penalty = 0 if utility == "loss_gradient" else output[1].square().mean()
        return F.cross_entropy(output[0], y) + penalty

    for compiled in (False, True):
        del caught[:]
        model, optimizer, cbp = attached(net(), utility=utility)
        score = None if utility == "loss_gradient" else lambda output, y: output[0].gather(1, y[:, None]).sum(1)
        step = gxd.compiled_step(model, optimizer, loss, cbp, score=score)
        for _ in range(12):
            step(X, Y) if compiled else step._eager(X, Y)
        assert step.why_eager is None
        assert len(of_groups(caught)) == 1 and "'value.0'" in of_groups(caught)[0]
        assert cbp.total_resets > 0
        runs.append((dict(model.state_dict()), cbp.utilities(), cbp.ages(), cbp._parts[0].units.seen))
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-4, atol=1e-5)


def test_reset_cost_gives_no_score_to_units_that_the_output_does_not_depend_on():
    model = PolicyAndValue()
    cost = gxd.reset_cost(
        model, (X, Y), X, utilities=["gxd", "loss_gradient", "activation"], output=lambda output: output[0]
    )
    for utility in ("gxd", "loss_gradient"):
        assert bool(cost.scores[utility]["value.0"].isnan().all())
        assert bool(cost.scores[utility]["policy.0"].isfinite().all())
        assert cost.undefined()[utility] == ["value.0"]
    assert bool(cost.scores["activation"]["value.0"].isfinite().all())
