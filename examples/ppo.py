"""PPO of Stable-Baselines3 on a pole whose physics change: gxd as one callback.

Every change of the world draws gravity, pole length and strength of the push anew, and turns the push around: what the
agent has learned to do is now wrong. The same agent without the callback is what to compare with; returns differ so
much from seed to seed that one of them tells little (`--seed`).

    python examples/ppo.py    # about 60 seconds on one core
"""

import argparse

import gymnasium
import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback

from gxd.integrations.stable_baselines3 import GxdCallback


class ChangingCartPole(gymnasium.Wrapper):
    """CartPole-v1 in a new world after every so many steps."""

    def __init__(self, change_every):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.change_every, self.steps = change_every, 0

    def reset(self, **options):
        # A world lasts until the episode in which its time is over has ended.
        world, pole = self.steps // self.change_every, self.unwrapped
        chance = np.random.default_rng(world)
        pole.gravity, pole.length = chance.uniform(5, 15), chance.uniform(0.3, 1.0)
        pole.polemass_length = pole.masspole * pole.length
        pole.force_mag = chance.uniform(8, 12) * (-1) ** world
        return self.env.reset(**options)

    def step(self, action):
        self.steps += 1
        return self.env.step(action)


class Returns(BaseCallback):
    """Keeps the length of each episode, which is its return, and when it ended."""

    def _on_training_start(self):
        self.episodes = []

    def _on_step(self):
        self.episodes += [(self.num_timesteps, i["episode"]["r"]) for i in self.locals["infos"] if "episode" in i]
        return True

    def by_world(self, change_every):
        """The mean return of the second half of each world, when there was time to learn it."""
        late = [(step // change_every, r) for step, r in self.episodes if step % change_every >= change_every / 2]
        return {world: float(np.mean([r for w, r in late if w == world])) for world in sorted({w for w, _ in late})}


def main(argv=None):
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--worlds", type=int, default=4)
    options.add_argument("--steps", type=int, default=10_000, help="in each world")
    options.add_argument("--rate", type=float, default=1e-4, help="share of the units that is reset per gradient step")
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args(argv)
    # Policy and value network have an optimizer in common and are observed together. There is no target, so the
    # utility is gxd_sketch: the effect of a unit on a random mixture of all outputs.
    gxd_callback, results = GxdCallback(replacement_rate=args.rate, maturity=100), {}
    for name, callbacks in {"PPO": [], "PPO with gxd": [gxd_callback]}.items():
        returns = Returns()
        agent = PPO("MlpPolicy", ChangingCartPole(args.steps), n_steps=512, batch_size=64, seed=args.seed, device="cpu")
        agent.learn(args.worlds * args.steps, callback=[returns, *callbacks])
        results[name] = returns.by_world(args.steps)
    print(gxd_callback.cbp.plan, end="\n\n")
    print("mean return in the second half of each world")
    for name, found in results.items():
        print(f"{name:15}" + "".join(f"{found.get(world, float('nan')):8.1f}" for world in range(args.worlds)))
    print(f"{gxd_callback.cbp.total_resets} units were reset")
    return results, gxd_callback.cbp


if __name__ == "__main__":
    main()
