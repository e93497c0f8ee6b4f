"""Models that are run by ``call=``: agents without a forward, and policies with distributions."""

import os
import tempfile
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

import gxd
from tests.rig import X, Y, mlp


class Agent(nn.Module):
    """As in scripts of one file: no forward, a shared body and two heads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.actor, self.critic = nn.Linear(8, 3), nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 1))

    def act(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.actor(h), self.critic(h)


class WithForward(Agent):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.act(x)


def run(agent: Agent, x: Tensor) -> tuple[Tensor, Tensor]:
    return agent.act(x)


def test_an_agent_without_forward_has_the_plan_of_one_with_it():
    plan = gxd.find_units(Agent(), X, call=run)
    assert plan.fingerprint() == gxd.find_units(WithForward(), X).fingerprint()
    assert {group.name for group in plan.groups} == {"body.0", "critic.0"}


def test_the_agent_is_left_as_it_was():
    agent = Agent()
    before = dict(vars(agent))
    gxd.find_units(agent, X, call=run)
    gxd.verify_plan(agent, X, call=run)
    assert vars(agent).keys() == before.keys() and "forward" not in vars(agent)
    with pytest.raises(NotImplementedError):
        agent(X)


def test_a_forward_of_the_instances_own_is_given_back():
    model = mlp()
    mine = lambda x: nn.Sequential.forward(model, x) * 2
    model.forward = mine
    gxd.find_units(model, X, call=lambda model, x: model(x) + 1)
    assert model.forward is mine


def test_what_call_returns_is_the_output_and_all_it_runs_is_seen():
    model = mlp()
    assert gxd.find_units(model, X, call=lambda model, x: model(x)).size == gxd.find_units(model, X).size
    body = gxd.find_units(model, X, call=lambda model, x: model.fc2(model.act1(model.fc1(x))))
    assert [group.name for group in body.groups] == ["fc1"]
    after = gxd.find_units(model, X, call=lambda model, x: F.relu(model(x)).sum(1))
    assert after.size == gxd.find_units(model, X).size


def test_units_behind_the_models_own_output_are_found():
    class Two(nn.Sequential):
        pass

    torch.manual_seed(0)
    model = Two(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6))
    model.add_module("late", nn.Linear(6, 2))
    first = lambda model, x: model.late(nn.Sequential(*list(model)[:3])(x).relu())
    plan = gxd.find_units(model, X, call=first)
    assert {group.name for group in plan.groups} == {"0", "2"}

    class Own(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self[2](self[1](self[0](x)))

    own = Own(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6))
    own.add_module("late", nn.Linear(6, 2))
    plan = gxd.find_units(own, X, call=lambda model, x: model.late(model(x).relu()))
    assert {group.name for group in plan.groups} == {"0", "2"}


def test_a_plan_that_is_right_for_the_call_passes_and_one_that_misses_a_reader_does_not():
    agent = Agent()
    assert gxd.verify_plan(agent, X, call=run).ok
    partial = gxd.find_units(agent, X, call=lambda agent, x: agent.actor(agent.body(x)))
    assert not gxd.verify_plan(agent, X, plan=partial, call=run).ok


def test_reset_cost_of_an_agent_is_that_of_a_model_with_the_same_forward():
    agent = Agent()
    model = nn.Sequential(agent.body, agent.actor)
    found = gxd.reset_cost(agent, (X, Y), X, utilities=["gxd"], call=lambda agent, x: agent.actor(agent.body(x)))
    expected = gxd.reset_cost(model, (X, Y), X, utilities=["gxd"])
    torch.testing.assert_close(found.scores["gxd"]["body.0"], expected.scores["gxd"]["0.0"])
    torch.testing.assert_close(found.shocks["l1"]["body.0"], expected.shocks["l1"]["0.0"])


def test_an_agent_without_forward_trains_with_a_plan_of_its_call():
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), 0.01)
    plan = gxd.find_units(agent, X, call=run)
    cbp = gxd.ContinualBackprop(agent, optimizer, plan=plan, utility="gxd_sketch", maturity=2, replacement_rate=0.2)
    for _ in range(8):
        logits, value = agent.act(X)
        cbp.observe(torch.cat([logits, value], 1))
        (F.cross_entropy(logits, Y) + value.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert cbp.total_resets > 4 and {name: bool(u.any()) for name, u in cbp.utilities().items()} == {
        "body.0": True,
        "critic.0": True,
    }


@pytest.mark.parametrize("given", ["act", 3])
def test_what_cannot_be_called_is_refused(given: Any):
    with pytest.raises(TypeError, match="call must be a function"):
        gxd.find_units(Agent(), X, call=given)


def test_without_call_the_error_says_how_to_give_it():
    with pytest.raises(gxd.TraceError, match="call=lambda"):
        gxd.find_units(Agent(), X)


class Policy(nn.Module):
    """Samples in its forward, with argument checks of torch.distributions, and says so on all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.discrete, self.mean = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 2)
        self.log_std = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.body(x).tanh()
        choice, move = Categorical(logits=self.discrete(h)), Normal(self.mean(h), self.log_std.exp())
        action, by = choice.sample(), move.rsample()
        return action, choice.log_prob(action) + move.log_prob(by).sum(1), choice.entropy()


def test_policies_with_distributions_trace_silently_and_their_argument_checks_stay_on():
    with tempfile.TemporaryFile() as file:
        kept = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)  # what C++ writes, too
        try:
            plan = gxd.find_units(Policy(), X)
        finally:
            os.dup2(kept[0], 1), os.dup2(kept[1], 2)
        file.seek(0)
        assert file.read() == b""
    assert [group.name for group in plan.groups] == ["body"]
    with pytest.raises(ValueError, match="constraint"):
        Normal(torch.zeros(1), -torch.ones(1))
