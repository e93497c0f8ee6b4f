"""DQN of Stable-Baselines3 on a pole whose physics change: gxd as a callback, saved with the agent and resumed.

Halfway both the agent and the state of gxd are saved, and training goes on with what was loaded, as after a crash. In
the end `gxd.diagnose` looks at the Q network of this agent, and of one that was trained without resets, on what is in
its replay buffer: how many of its ReLUs are dormant?

    python examples/dqn.py    # about 45 seconds on one core
"""

import argparse
import tempfile
from pathlib import Path

import gymnasium
import numpy as np
import torch
from stable_baselines3 import DQN

import gxd
from gxd.integrations.stable_baselines3 import GxdCallback


class ChangingCartPole(gymnasium.Wrapper):
    """CartPole-v1 in which the push is turned around after every so many steps, and gravity and length are others."""

    def __init__(self, change_every):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.change_every, self.steps, self.returns = change_every, 0, {}

    def reset(self, **options):
        # A world lasts until the episode in which its time is over has ended.
        self.world, pole = self.steps // self.change_every, self.unwrapped
        chance = np.random.default_rng(self.world)
        pole.gravity, pole.length = chance.uniform(5, 15), chance.uniform(0.3, 1.0)
        pole.polemass_length = pole.masspole * pole.length
        pole.force_mag = 10 * (-1) ** self.world
        self.returns.setdefault(self.world, []).append(0)
        return self.env.reset(**options)

    def step(self, action):
        self.steps += 1
        self.returns[self.world][-1] += 1  # the reward of every step is 1
        return self.env.step(action)

    def late_returns(self):
        """World -> the mean return of the second half of its episodes."""
        return {world: float(np.mean(found[len(found) // 2 :])) for world, found in self.returns.items()}


def make(environment, seed):
    settings = {"learning_rate": 1e-3, "batch_size": 64, "train_freq": 4, "target_update_interval": 250}
    settings |= {"buffer_size": 5000, "learning_starts": 500, "exploration_fraction": 0.05, "gamma": 0.98}
    net = {"net_arch": [64, 64]}
    return DQN("MlpPolicy", environment, **settings, policy_kwargs=net, seed=seed, device="cpu")


def main(argv=None):
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--worlds", type=int, default=4)
    options.add_argument("--steps", type=int, default=8000, help="in each world")
    options.add_argument("--rate", type=float, default=1e-3, help="share of the units that is reset per gradient step")
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args(argv)
    half, worlds, agents = args.worlds * args.steps // 2, {}, {}
    for name in ("DQN", "DQN with gxd"):
        worlds[name] = ChangingCartPole(args.steps)
        agents[name] = make(worlds[name], args.seed)
    agents["DQN"].learn(2 * half)

    agent, callback = agents["DQN with gxd"], GxdCallback(replacement_rate=args.rate, maturity=100)
    agent.learn(half, callback=callback)
    resets = [callback.cbp.total_resets]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        agent.save(path / "agent.zip")
        agent.save_replay_buffer(path / "buffer.pkl")
        torch.save(callback.state_dict(), path / "gxd.pt")

        agent = agents["DQN with gxd"] = DQN.load(path / "agent.zip", env=agent.get_env())
        agent.load_replay_buffer(path / "buffer.pkl")
        # Rates are settings and no state: they are given anew.
        callback = GxdCallback(replacement_rate=args.rate, maturity=100)
        callback.load_state_dict(torch.load(path / "gxd.pt", weights_only=True))
    agent.learn(half, callback=callback, reset_num_timesteps=False)
    resets.append(callback.cbp.total_resets)

    print("mean return in the second half of each world")
    for name, world in worlds.items():
        print(f"{name:15}" + "".join(f"{value:8.1f}" for value in world.late_returns().values()))
    print(f"resets: {resets[0]} when it was saved, {resets[1]} in the end")
    found = {}
    for name, one in agents.items():
        found[name] = gxd.diagnose(one.q_net, one.replay_buffer.sample(256).observations)
        print(f"\n{name}\n{found[name]}")
    return worlds, resets, found, callback.cbp


if __name__ == "__main__":
    main()
