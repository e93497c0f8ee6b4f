"""Agents of Stable-Baselines3: the right networks, observed on their own losses alone, saved and loaded exactly."""

import copy
import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gxd
from tests.rig import same

sb3 = pytest.importorskip("stable_baselines3")
gym = pytest.importorskip("gymnasium")
from stable_baselines3.common.logger import configure  # noqa: E402

from gxd.integrations.stable_baselines3 import GxdCallback  # noqa: E402

OFTEN: dict[str, Any] = {"maturity": 2, "replacement_rate": 0.05}
OFF: dict[str, Any] = {"learning_starts": 20, "batch_size": 16, "buffer_size": 500}
AGENTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "DQN": ("DQN", "CartPole-v1", {**OFF, "train_freq": 1, "target_update_interval": 10}),
    "PPO": ("PPO", "CartPole-v1", {"n_steps": 32, "batch_size": 16, "n_epochs": 3}),
    "PPO of numbers": ("PPO", "Pendulum-v1", {"n_steps": 32, "batch_size": 16, "n_epochs": 3}),
    "A2C": ("A2C", "CartPole-v1", {}),
    "SAC": ("SAC", "Pendulum-v1", OFF),
    "TD3": ("TD3", "Pendulum-v1", OFF),
    "DDPG": ("DDPG", "Pendulum-v1", OFF),
}
PARTS: dict[str, list[str]] = {"DQN": ["q_net"], "PPO": ["policy"], "PPO of numbers": ["policy"], "A2C": ["policy"]}
PARTS.update({name: ["actor", "critic"] for name in ("SAC", "TD3", "DDPG")})


def agent(name: str, **options: Any) -> Any:
    kind, environment, settings = AGENTS[name]
    net = {"net_arch": [12, 10]}
    settings = {**settings, "policy_kwargs": net, **options}
    return getattr(sb3, kind)("MlpPolicy", environment, seed=0, device="cpu", **settings)


@cache
def plans(name: str) -> dict[str, gxd.UnitPlan]:
    """Found by the callback itself, once."""
    callback, made = GxdCallback(), agent(name)
    with attached(made, callback):
        return {part: cbp.plan for part, cbp in callback.cbps.items()}


def callback_of(name: str, utility: str | None = None, **options: Any) -> GxdCallback:
    """By default the method ``gxd``; with a utility ContinualBackprop."""
    options = {**OFTEN, **options}
    if utility is None:
        return GxdCallback(plan=plans(name), **options)
    return GxdCallback(gxd.method("continual_backprop", utility=utility, **options), plan=plans(name))


UTILITIES = [None, "gxd_sketch"]


@contextmanager
def attached(made: Any, callback: GxdCallback) -> Iterator[None]:
    """As within ``learn()``, without an environment."""
    made.set_logger(configure(None, []))
    callback.init_callback(made)
    callback.on_training_start({}, {})
    try:
        yield
    finally:
        callback.on_training_end()


def hooks(module: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize("utility", UTILITIES)
def test_units_of_the_right_networks_are_reset_and_no_hook_is_left(name: str, utility: str | None):
    made, callback = agent(name), callback_of(name, utility)
    made.learn(70, callback=callback)
    assert list(callback.cbps) == PARTS[name]
    for part, cbp in callback.cbps.items():
        assert cbp.total_resets > 3 and cbp.closed, part
        network = made.policy if part == "policy" else getattr(made.policy, part)
        assert cbp.model is network
        assert cbp.optimizer is (network if hasattr(network, "optimizer") else made.policy).optimizer
        assert all(bool(utility.any()) for utility in cbp.utilities().values()), "each group was scored"
    assert not hooks(made.policy)
    if len(PARTS[name]) == 1:
        assert callback.cbp is callback.cbps[PARTS[name][0]]
    else:
        with pytest.raises(AttributeError, match=r"actor, critic: use cbps\['actor'\]"):
            callback.cbp  # noqa: B018


@pytest.mark.parametrize("name", ["DQN", "SAC", "TD3"])
@pytest.mark.parametrize("utility", UTILITIES)
def test_target_networks_are_not_touched(name: str, utility: str | None):
    made, callback = agent(name), callback_of(name, utility)
    targets = [module for part, module in made.policy.named_children() if part.endswith("_target")]
    assert targets
    with attached(made, callback):
        assert not any(map(hooks, targets))
        assert hooks(made.policy) > (3 if utility is None else 4)  # call, return, two consumers; and the output


@pytest.mark.parametrize("name", ["DQN", "PPO", "SAC", "TD3"])
@pytest.mark.parametrize("utility", UTILITIES)
def test_an_inert_callback_changes_no_weight_and_no_random_number(name: str, utility: str | None):
    with_gxd = agent(name)
    method = gxd.method("continual_backprop", utility=utility, replacement_rate=0.0) if utility else None
    with_gxd.learn(60, callback=GxdCallback(method) if method else GxdCallback(replacement_rate=0.0))
    after = torch.rand(3), np.random.rand(3)
    without = agent(name)  # which seeds all generators
    without.learn(60)
    assert same(dict(with_gxd.policy.state_dict()), dict(without.policy.state_dict()))
    assert torch.equal(after[0], torch.rand(3)) and (after[1] == np.random.rand(3)).all()


def recorded(critic: nn.Module, on_data: list[Tensor], for_actor: list[Tensor]) -> list[Any]:
    """What the second layer of the first Q network reads, apart by whose loss it is for."""
    whose: list[Any] = [for_actor]

    def begin(module: nn.Module, args: Any) -> None:
        whose.append(for_actor if args[1].requires_grad else on_data)

    reader = critic.q_networks[0][2]
    return [
        critic.register_forward_pre_hook(begin),
        critic.register_forward_hook(lambda *_: whose.pop() and None),
        reader.register_forward_pre_hook(
            lambda _, args: whose[-1].append(args[0].detach()) if torch.is_grad_enabled() else None
        ),
    ]


@pytest.mark.parametrize("name", ["SAC", "TD3"])
def test_the_actors_loss_does_not_count_for_the_critic(name: str):
    made, callback = agent(name), callback_of(name, "activation", decay=0.0, replacement_rate=0.0)
    made.learn(40)
    on_data: list[Tensor] = []
    for_actor: list[Tensor] = []
    with attached(made, callback):
        handles = recorded(made.critic, on_data, for_actor)
        made.train(6, 16)
        found = callback.cbps["critic"].utilities()["qf0.0"]
        assert len(on_data) == 6 and len(for_actor) == (6 if name == "SAC" else 3)
        torch.testing.assert_close(found, on_data[-1].abs().mean(0))
        assert callback.cbps["critic"]._parts[0].units.step == 6
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("name", ["SAC", "TD3"])
@pytest.mark.parametrize("utility", [None, "loss_gradient"])
def test_gradients_of_the_actors_loss_do_not_count_for_the_critic(name: str, utility: str | None):
    made = agent(name)
    made.learn(40)
    alone: dict[str, Any] = {"decay": 0.0, "replacement_rate": 0.0}  # one batch
    callback = callback_of(name, utility, **alone)
    inputs: list[Any] = []
    gradients: dict[int, Tensor] = {}  # of the critic's loss, by each of its outputs

    def watch(critic: nn.Module, args: Any, output: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled() and not args[1].requires_grad:
            inputs.append(args)
            for number, q in enumerate(output):
                q.register_hook(lambda gradient, number=number: gradients.update({number: gradient}))

    with attached(made, callback):
        made._n_updates = 1  # so that TD3 trains its actor, too
        made.train(1, 16)
        twin = copy.deepcopy(made.critic)
        handle = made.critic.register_forward_hook(watch)
        made.train(1, 16)
        found = callback.cbps["critic"].utilities()
    handle.remove()
    method = gxd.method("continual_backprop", utility=utility, **alone) if utility else gxd.method("gxd", **alone)
    cbp = gxd.attach(twin, twin.optimizer, method, plan=plans(name)["critic"])
    torch.autograd.backward(twin(*inputs[0]), [gradients[number] for number in range(2)])
    twin.optimizer.step()
    for group, utility in cbp.utilities().items():
        torch.testing.assert_close(found[group], utility)


@contextmanager
def by_hand(made: Any, name: str, utility: str | None) -> Iterator[dict[str, gxd.Attachment]]:
    """The line that a user writes for each network. With a utility of the output, it is observed."""
    optimizers = {"q_net": "policy", "policy": "policy", "actor": "actor", "critic": "critic"}
    method = gxd.method("continual_backprop", utility=utility, **OFTEN) if utility else gxd.method("gxd", **OFTEN)
    found = {}
    for part in PARTS[name]:
        network = made.policy if part == "policy" else getattr(made.policy, part)
        optimizer = getattr(made, optimizers[part]).optimizer
        found[part] = gxd.attach(network, optimizer, method, plan=plans(name)[part])
        if utility:
            found[part].observe_output()
    try:
        yield found
    finally:
        for one in found.values():
            one.close()


@pytest.mark.parametrize(
    ("name", "utility"),
    [*((name, None) for name in ("DQN", "PPO", "A2C", "SAC", "TD3", "DDPG")), ("DQN", "gxd_sketch")],
)
def test_a_training_is_that_of_networks_with_the_one_line_each(name: str, utility: str | None):
    """Nothing is paused there: what the actor's loss shows of the critic is zeroed before the critic's step."""
    made, callback = agent(name), callback_of(name, utility)
    made.learn(70, callback=callback)
    expected = agent(name)
    with by_hand(expected, name, utility) as resets:
        expected.learn(70)
        for one in resets.values():
            one.discard()
    assert all(one.total_resets > 3 for one in resets.values())
    assert same(dict(made.policy.state_dict()), dict(expected.policy.state_dict()))
    assert same(callback.state_dict(), {part: one.state_dict() for part, one in resets.items()})


@pytest.mark.parametrize("name", ["DQN", "PPO", "SAC", "TD3"])
@pytest.mark.parametrize("utility", UTILITIES)
def test_saved_and_loaded_it_goes_on_exactly(name: str, utility: str | None, tmp_path: Path):
    made, callback = agent(name), callback_of(name, utility)
    made.learn(60, callback=callback)
    made.save(tmp_path / "agent")
    torch.save(callback.state_dict(), tmp_path / "gxd.pt")
    loaded, again = type(made).load(tmp_path / "agent", env=made.get_env()), callback_of(name, utility)
    again.load_state_dict(torch.load(tmp_path / "gxd.pt", weights_only=True))
    for one in ("replay_buffer", "rollout_buffer"):
        if hasattr(made, one):
            setattr(loaded, one, copy.deepcopy(getattr(made, one)))

    def train(one: Any, its: GxdCallback) -> None:
        torch.manual_seed(1), np.random.seed(1)
        with attached(one, its):
            one.train() if name == "PPO" else one.train(20, 16)

    before = {part: cbp.total_resets for part, cbp in callback.cbps.items()}
    train(made, callback)
    train(loaded, again)
    assert all(cbp.total_resets > before[part] for part, cbp in again.cbps.items())
    assert same(dict(loaded.policy.state_dict()), dict(made.policy.state_dict()))
    assert same(again.state_dict(), callback.state_dict())


@pytest.mark.parametrize("utility", UTILITIES)
def test_acting_and_evaluating_leave_no_trace(utility: str | None):
    made, callback = agent("DQN"), callback_of("DQN", utility)
    with attached(made, callback):
        made.policy.set_training_mode(True)
        before = copy.deepcopy(callback.state_dict())
        made.predict(np.zeros(4, dtype=np.float32))
        assert same(callback.state_dict(), before)


@pytest.mark.parametrize("utility", UTILITIES)
def test_an_update_that_stops_early_leaves_nothing_to_the_next(utility: str | None):
    made, callback = agent("PPO"), callback_of("PPO", utility)
    made.learn(32)
    made.target_kl = 1e-9
    with attached(made, callback):
        made.train()
        (part,) = callback.cbps["policy"]._parts
        kept = part.scorer.observer.passes if utility is None else not part.scorer.sums.empty
        assert kept, "it has seen a batch, and stopped"
        callback.on_rollout_start()
        callback.on_rollout_end()
        assert part.scorer.sums.empty and not part.scorer.observer.passes


def test_policies_trace_silently():
    with tempfile.TemporaryFile() as file:
        kept = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
        try:
            for name in ("PPO", "PPO of numbers", "SAC"):
                with attached(agent(name), GxdCallback()):
                    pass
        finally:
            os.dup2(kept[0], 1), os.dup2(kept[1], 2)
        file.seek(0)
        assert file.read() == b""


def test_some_parts_methods_and_the_logger(tmp_path: Path):
    redo = gxd.method("redo", threshold=0.5, every=4)
    made = agent("SAC")
    made.set_logger(configure(str(tmp_path), ["csv"]))
    callback = GxdCallback(redo, parts="critic")
    made.learn(60, callback=callback, log_interval=1)
    assert list(callback.cbps) == ["critic"] and callback.cbps["critic"].methods == (redo,)
    made.logger.dump(1)
    assert "gxd/critic/resets" in (tmp_path / "progress.csv").read_text()


@pytest.mark.parametrize("name", ["PPO", "DQN", "SAC"])
def test_the_table_in_the_terminal_has_room_for_the_metrics_and_files_have_all(name: str, tmp_path: Path, capsys: Any):
    made = agent(name)
    made.set_logger(configure(str(tmp_path), ["stdout", "log", "csv"]))  # as verbose=1 does
    methods = gxd.method("continual_backprop", utility="gxd_sketch", **OFTEN), gxd.method("gxd", **OFTEN)
    made.learn(450, callback=GxdCallback(*methods), log_interval=1)  # Pendulum ends an episode after 200 steps
    part = PARTS[name][-1]
    assert f"{part}/nonfinite_observations" in capsys.readouterr().out
    assert f"gxd/{part}/continual_backprop/utility_median" in (tmp_path / "progress.csv").read_text()


@pytest.mark.parametrize("name", ["PPO", "SAC"])
def test_networks_are_saved_while_attached_without_a_trace_of_gxd(name: str):
    made, file = agent(name), io.BytesIO()
    with attached(made, GxdCallback("gxd", gxd.method("continual_backprop", utility="gxd_sketch"), plan=plans(name))):
        networks = [made.policy] if name == "PPO" else [made.actor, made.critic]
        torch.save(networks, file)
        assert any(map(hooks, networks))
    assert b"gxd" not in file.getvalue()


class Grid(gym.Env):  # type: ignore[misc, name-defined]
    """Observations that are a dict of a number and an image."""

    observation_space = gym.spaces.Dict({"at": gym.spaces.Discrete(5), "near": gym.spaces.Box(-1, 1, (3,))})
    action_space = gym.spaces.Discrete(2)

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return {"at": 1, "near": np.zeros(3, dtype=np.float32)}, {}

    def step(self, action: Any) -> Any:
        return {"at": 2, "near": np.ones(3, dtype=np.float32)}, 1.0, bool(self.np_random.random() < 0.2), False, {}


def test_observations_may_be_dicts_of_numbers_and_vectors():
    made = sb3.PPO("MultiInputPolicy", Grid(), n_steps=32, batch_size=16, policy_kwargs={"net_arch": [8]}, device="cpu")
    callback = GxdCallback(**OFTEN)
    made.learn(64, callback=callback)
    assert callback.cbps["policy"].total_resets > 3


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "exception", "words"),
    [
        ({"utility": "gxd_sketch"}, ValueError, r"give the method, as gxd\.method\('continual_backprop', utility"),
        ({"replacment_rate": 0.1}, ValueError, "Did you mean 'replacement_rate'"),
        ({"example_inputs": torch.zeros(2, 4)}, TypeError, "the spaces of the environment tell"),
        ({"plan": 3}, TypeError, "part -> plan"),
        ({"replacement_rate": -1}, ValueError, "replacement_rate=-1"),
    ],
)
def test_wrong_options_are_refused_before_learning(options: dict[str, Any], exception: Any, words: str):
    with pytest.raises(exception, match=words):
        GxdCallback(**options)


def test_a_method_that_needs_the_logit_of_a_target_is_refused_before_learning():
    with pytest.raises(ValueError, match="use 'gxd_sketch'"):
        GxdCallback(gxd.method("continual_backprop", utility="gxd"))
    with pytest.raises(ValueError, match="attribution_sketch"):
        GxdCallback(gxd.method("swr", score="attribution"))
    GxdCallback(gxd.method("swr", score="attribution_sketch"))


def test_a_part_that_an_agent_does_not_have_is_refused_and_nothing_stays_attached():
    made = agent("SAC")
    with pytest.raises(ValueError, match="Did you mean 'critic'"):
        made.learn(10, callback=GxdCallback(parts=["actor", "critc"], plan=plans("SAC")))
    with pytest.raises(ValueError, match="part='q_net'"):
        made.learn(10, callback=GxdCallback(plan=plans("DQN")))
    assert not hooks(made.policy)


def test_a_callback_that_is_given_twice_or_to_another_agent_is_refused():
    made, twice = agent("DQN"), callback_of("DQN")
    with pytest.raises(RuntimeError, match="given twice"):
        made.learn(30, callback=[twice, twice])
    assert not hooks(made.policy)
    callback = callback_of("DQN")
    made.learn(30, callback=callback)
    with pytest.raises(RuntimeError, match="has trained another model"):
        agent("DQN").learn(30, callback=callback)


def test_a_state_of_another_plan_is_refused_and_nothing_stays_attached():
    other, made = callback_of("SAC"), agent("SAC", policy_kwargs={"net_arch": [7, 5]})
    with attached(agent("SAC"), other):
        state = other.state_dict()
    callback = GxdCallback()
    callback.load_state_dict(state)
    with pytest.raises(gxd.PlanError, match="another model or plan"):
        made.learn(10, callback=callback)
    assert not hooks(made.policy)


def test_a_learn_that_was_interrupted_can_be_taken_up_again():
    made, callback = agent("DQN"), callback_of("DQN")

    def stop(local: Any, _: Any) -> bool:
        if made.num_timesteps == 40:
            raise KeyboardInterrupt
        return True

    with pytest.raises(KeyboardInterrupt):
        made.learn(60, callback=[callback, sb3.common.callbacks.ConvertCallback(stop)])
    resets = callback.cbps["q_net"].total_resets
    made.learn(60, callback=callback, reset_num_timesteps=False)
    assert callback.cbps["q_net"].total_resets > resets > 0
    assert not hooks(made.policy)
