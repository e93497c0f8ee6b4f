"""Which incoming weights should a newborn unit get? PPO on CartPole, whose observations shift with every level.

    python studies/births/cartpole.py --networks shared --rules backprop new fresh he --seeds 12 --out results/births

All agents, rules x seeds, train side by side and draw from one generator: another list of rules is another run. The
method gxd is written out in plain tensors. Appends to ``cartpole.csv`` the mean return of every level: the mean over
iterations of the mean length of the episodes that ended in the iteration, 0 where none ended.

Rules: backprop; new, a fresh network for every level; and births of units. fresh: uniform, as the layer began. A
number: a random direction of that norm. he: norm sqrt(2). cap: norm sqrt(2) / max(1, rms of the layer's inputs).
With ``_v``, Adam's second moment of a newborn unit's weights starts at the layer's mean instead of 0.
"""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path

import torch
from torch import Tensor

WIDTHS = (4, 64, 64, 64)
LEARNING_RATE, BETA1, BETA2 = 1e-3, 0.9, 0.999
RATE, MATURITY, DECAY = 1e-3, 100, 0.99
ENVIRONMENTS, STEPS, EPOCHS, MINIBATCH = 8, 100, 5, 32
GAMMA, LAMBDA, CLIP, VALUE_WEIGHT, ENTROPY_WEIGHT = 0.99, 0.95, 0.2, 0.5, 0.01
HEADS = {"shared": (3,), "separate": (2, 1)}  # outputs of each network: two logits and a value


# --- births -----------------------------------------------------------------------------------------------------------


def birth_norm(rule: str, input_rms: float) -> float | None:
    """The norm of a newborn unit's incoming weights; None for weights like those the layer began with."""
    name = rule.removesuffix("_v")
    named = {"fresh": None, "he": math.sqrt(2), "cap": math.sqrt(2) / max(1.0, input_rms)}
    return named[name] if name in named else float(name)


def newborn_weights(rules: list[str], inputs: Tensor, chance: torch.Generator) -> Tensor:
    """Incoming weights (born, in) of one newborn unit for each rule; inputs of its layer are (born, batch, in)."""
    born, _, fan_in = inputs.shape
    directions = torch.randn(born, fan_in, generator=chance)
    directions = directions / directions.norm(dim=1, keepdim=True)
    weights = (torch.rand(born, fan_in, generator=chance) * 2 - 1) / math.sqrt(fan_in)
    for i, (rule, input_rms) in enumerate(zip(rules, inputs.square().mean((1, 2)).sqrt(), strict=True)):
        norm = birth_norm(rule, float(input_rms))
        if norm is not None:
            weights[i] = directions[i] * norm
    return weights


# --- networks of all agents -------------------------------------------------------------------------------------------


class Parameter:
    """A parameter of all agents, with Adam's moments: tensors (agents, in, out), of a bias (agents, 1, out)."""

    def __init__(self, initial: Tensor) -> None:
        self.initial, self.value = initial, initial.clone().requires_grad_()
        self.first, self.second = torch.zeros_like(initial), torch.zeros_like(initial)

    def adam_step(self, gradient: Tensor, steps: Tensor) -> None:
        """One step of Adam, which is the agents' step number `steps` (agents, 1, 1)."""
        self.first.lerp_(gradient, 1 - BETA1)
        self.second.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        first, second = self.first / (1 - BETA1**steps), self.second / (1 - BETA2**steps)
        self.value.addcdiv_(first, second.sqrt_().add_(1e-8), value=-LEARNING_RATE)

    def replace(self, agents: Tensor, units: Tensor, dim: int, values: Tensor | float, mean_second: Tensor) -> None:
        """One unit's slice along `dim` gets values and no moments; where `mean_second`, the layer's mean second."""
        for tensor, new in ((self.value, values), (self.first, 0.0), (self.second, 0.0)):
            tensor.transpose(1, dim)[agents, units] = new
        agents, units = agents[mean_second], units[mean_second]
        self.second.transpose(1, dim)[agents, units] = self.second[agents].mean(dim)


class Network:
    """One multilayer perceptron with ReLU per agent, initially uniform as in torch; layers of one shape begin alike."""

    def __init__(self, outputs: int, seeds: list[int]) -> None:
        self.parameters = []
        for fan_in, fan_out in zip(WIDTHS, (*WIDTHS[1:], outputs), strict=True):
            for is_bias, rows in enumerate((fan_in, 1)):
                chances = [torch.Generator().manual_seed(1000 * s + 7 * fan_in + fan_out + is_bias) for s in seeds]
                uniform = torch.stack([torch.rand(rows, fan_out, generator=chance) for chance in chances])
                self.parameters.append(Parameter((uniform * 2 - 1) / math.sqrt(fan_in)))
        self.weights, self.biases = self.parameters[::2], self.parameters[1::2]

    def __call__(self, x: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Outputs (agents, batch, out), and inputs and units of each hidden layer, both (agents, batch, width)."""
        pairs, hidden = [], x
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            x, hidden = hidden, torch.relu(torch.baddbmm(bias.value, hidden, weight.value))
            pairs.append((x, hidden))
        return torch.baddbmm(self.biases[-1].value, hidden, self.weights[-1].value), pairs


class HiddenLayer:
    """What the method gxd knows of one hidden layer of all agents; its tensors are (agents, units)."""

    def __init__(self, network: Network, index: int, rules: list[str]) -> None:
        self.network, self.index, self.rules = network, index, rules
        self.resets = torch.tensor([rule not in ("backprop", "new") for rule in rules])
        self.mean_second = torch.tensor([rule.endswith("_v") for rule in rules])
        self.credit = torch.zeros(len(rules))
        # The averages, mean and utility, start at 0 and are divided by the sum of their coefficients, weight.
        self.state = torch.zeros(4, len(rules), WIDTHS[index + 1])
        self.mean, self.utility, self.weight, self.age = self.state

    def step(self, inputs: Tensor, hidden: Tensor, gradient: Tensor, chance: torch.Generator) -> None:
        """Score units after an update, on hidden and gradient (agents, batch, units), and reset those that are due."""
        self.age += 1
        self.mean.lerp_(hidden.mean(1), 1 - DECAY)
        self.weight.lerp_(torch.ones(()), 1 - DECAY)
        reference = self.mean / self.weight
        score = ((hidden - reference.unsqueeze(1)) * gradient).abs().mean(1)
        layer_mean = score.mean(1, keepdim=True)
        self.utility.lerp_(torch.where(layer_mean > 0, score / layer_mean, 0.0), 1 - DECAY)
        mature = self.age > MATURITY
        self.credit += RATE * mature.sum(1) * self.resets
        agents = (self.credit >= 1).nonzero().squeeze(1)
        if len(agents):
            self.credit[agents] -= 1
            rank = self.utility / self.weight / self.age
            units = rank.masked_fill(~mature, math.inf)[agents].argmin(1)
            incoming = newborn_weights([self.rules[i] for i in agents.tolist()], inputs[agents], chance)
            self.replace(agents, units, reference[agents, units], incoming)

    def replace(self, agents: Tensor, units: Tensor, reference: Tensor, incoming: Tensor) -> None:
        """One newborn unit for each of the agents; the next bias takes over what the old unit gave on average."""
        weights, biases, mean_second = self.network.weights, self.network.biases, self.mean_second[agents]
        outgoing = weights[self.index + 1]
        biases[self.index + 1].value[agents, 0] += outgoing.value[agents, units] * reference.unsqueeze(1)
        outgoing.replace(agents, units, 1, 0.0, mean_second)
        weights[self.index].replace(agents, units, 2, incoming, mean_second)
        biases[self.index].replace(agents, units, 2, 0.0, mean_second)
        self.state[:, agents, units] = 0


# --- CartPole ---------------------------------------------------------------------------------------------------------


class CartPoles:
    """Environments of all agents; states are (agents, environments, 4), everything else (agents, environments)."""

    def __init__(self, shift: Tensor, chance: torch.Generator) -> None:
        self.shift, self.chance, self.shape = shift, chance, (len(shift), ENVIRONMENTS)
        self.state, self.length = torch.zeros(*self.shape, 4), torch.zeros(self.shape)
        self.restart(torch.ones(self.shape, dtype=torch.bool))

    def observe(self) -> Tensor:
        """States, shifted by the constant (agents, 1, 4) of the level."""
        return self.state + self.shift

    def act(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Move on; which episodes failed, and which are cut off after 500 steps. `restart` comes next."""
        _, speed, angle, turning = self.state.unbind(-1)
        force, cos, sin = torch.where(action == 1, 10.0, -10.0), angle.cos(), angle.sin()
        push = (force + 0.05 * turning**2 * sin) / 1.1
        angular = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        linear = push - 0.05 * angular * cos / 1.1
        self.state = self.state + 0.02 * torch.stack([speed, linear, turning, angular], -1)
        self.length += 1
        failed = (self.state[..., 0].abs() > 2.4) | (self.state[..., 2].abs() > math.radians(12))
        return failed, (self.length >= 500) & ~failed

    def restart(self, done: Tensor) -> Tensor:
        """Begin new episodes where they are done; returns of those that are done, 0 elsewhere."""
        returns = self.length * done
        self.length = self.length * ~done
        first_state = (torch.rand(*self.shape, 4, generator=self.chance) - 0.5) * 0.1
        self.state = torch.where(done[..., None], first_state, self.state)
        return returns


# --- PPO --------------------------------------------------------------------------------------------------------------


def ppo_loss(logits: Tensor, values: Tensor, minibatch: list[Tensor]) -> Tensor:
    """PPO's loss (agents,): logits are (agents, batch, 2), values and all of the minibatch (agents, batch)."""
    actions, old_log_probs, old_values, advantages = minibatch
    log_probs = logits.log_softmax(-1)
    ratio = (log_probs.gather(2, actions[..., None]).squeeze(2) - old_log_probs).exp()
    scaled = (advantages - advantages.mean(1, keepdim=True)) / (advantages.std(1, keepdim=True) + 1e-8)
    policy_loss = -torch.min(ratio * scaled, ratio.clamp(1 - CLIP, 1 + CLIP) * scaled).mean(1)
    value_loss = (values - (advantages + old_values)).square().mean(1)
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean(1)
    return policy_loss + VALUE_WEIGHT * value_loss - ENTROPY_WEIGHT * entropy


class Agents:
    """PPO agents side by side, one for each rule and seed given."""

    def __init__(self, networks: str, rules: list[str], seeds: list[int], chance: torch.Generator) -> None:
        self.networks, self.chance = [Network(outputs, seeds) for outputs in HEADS[networks]], chance
        self.layers = [HiddenLayer(network, i, rules) for network in self.networks for i in range(len(WIDTHS) - 1)]
        self.parameters = [parameter for network in self.networks for parameter in network.parameters]
        self.new = torch.tensor([rule == "new" for rule in rules])
        self.steps = torch.zeros(len(rules), 1, 1)

    @torch.no_grad()
    def begin_level(self) -> None:
        """The agents of the rule `new` are as they began."""
        for p in self.parameters:
            p.value[self.new], p.first[self.new], p.second[self.new] = p.initial[self.new], 0.0, 0.0
        self.steps[self.new] = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        """Logits (agents, batch, 2), values (agents, batch), and inputs and units of each hidden layer."""
        outputs, pairs = zip(*(network(x) for network in self.networks), strict=True)
        return outputs[0][..., :2], outputs[-1][..., -1], [pair for of_network in pairs for pair in of_network]

    @torch.no_grad()
    def rollout(self, poles: CartPoles) -> tuple[list[Tensor], Tensor]:
        """Play: observations, actions, log probabilities, values, advantages (GAE); and the mean return (agents,)."""
        steps, ends = [], []
        for _ in range(STEPS):
            observation = poles.observe()
            logits, value, _ = self.forward(observation)
            log_probs = logits.log_softmax(-1)
            action = (torch.rand(poles.shape, generator=self.chance) < log_probs[..., 1].exp()).long()
            failed, cut = poles.act(action)
            # An episode that is cut off would have gone on: its last state has a value.
            final = self.forward(poles.observe())[1] * cut if bool(cut.any()) else torch.zeros(cut.shape)
            ends.append((failed | cut, final, poles.restart(failed | cut)))
            steps.append((observation, action, log_probs.gather(2, action[..., None]).squeeze(2), value))
        next_value, advantage, advantages = self.forward(poles.observe())[1], torch.zeros(poles.shape), []
        for (*_, value), (done, final, _) in zip(reversed(steps), reversed(ends), strict=True):
            error = 1 + GAMMA * torch.where(done, final, next_value) - value
            advantage = error + GAMMA * LAMBDA * advantage * ~done
            advantages.insert(0, advantage)
            next_value = value
        dones, _, returns = (torch.stack(column, 1).flatten(1) for column in zip(*ends, strict=True))
        columns = (*zip(*steps, strict=True), advantages)  # each is, over steps, (agents, environments, ...)
        rows = [torch.stack(column, 1).flatten(1, 2) for column in columns]  # (agents, steps * environments, ...)
        return rows, returns.sum(1) / dones.sum(1).clamp(min=1)

    def iteration(self, poles: CartPoles) -> Tensor:
        """Play, then train: each minibatch an update by Adam and a step of the method. The mean return (agents,)."""
        (observations, *columns), mean_return = self.rollout(poles)
        for _ in range(EPOCHS):
            order = torch.rand(observations.shape[:2], generator=self.chance).argsort(1)  # (agents, rows)
            for rows in order.split(MINIBATCH, 1):
                logits, values, pairs = self.forward(observations.gather(1, rows[..., None].expand(-1, -1, 4)))
                loss = ppo_loss(logits, values, [column.gather(1, rows) for column in columns]).sum()
                wanted = [*(p.value for p in self.parameters), *(hidden for _, hidden in pairs)]
                gradients = iter(torch.autograd.grad(loss, wanted))
                with torch.no_grad():
                    self.steps += 1
                    for parameter in self.parameters:
                        parameter.adam_step(next(gradients), self.steps)
                    for layer, (x, hidden) in zip(self.layers, pairs, strict=True):
                        layer.step(x, hidden, next(gradients), self.chance)
        return mean_return


def run(networks: str, rules: list[str], seeds: range, levels: int, iterations: int) -> list[tuple[object, ...]]:
    """Train all agents; rows of the table."""
    chance = torch.Generator().manual_seed(7)
    shift_chances = [torch.Generator().manual_seed(50 + seed) for seed in seeds]
    pairs = [(rule, seed) for rule in rules for seed in seeds]
    agents = Agents(networks, [rule for rule, _ in pairs], [seed for _, seed in pairs], chance)
    table: list[tuple[object, ...]] = []
    for level in range(levels):
        shifts = torch.stack([torch.randn(4, generator=c) * 2 for c in shift_chances])  # (seeds, 4)
        poles = CartPoles(shifts.repeat(len(rules), 1).unsqueeze(1), chance)
        agents.begin_level()
        means = torch.stack([agents.iteration(poles) for _ in range(iterations)]).mean(0)  # (agents,)
        table += [(networks, *pair, level, round(float(m), 4)) for pair, m in zip(pairs, means, strict=True)]
        by_rule = zip(rules, means.view(len(rules), -1).mean(1).tolist(), strict=True)
        print(level, {rule: round(mean, 1) for rule, mean in by_rule}, flush=True)
    return table


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/births"))
    parser.add_argument("--networks", default="shared", choices=list(HEADS))
    parser.add_argument("--rules", nargs="+", default=["backprop", "new", "fresh", "1.0", "he", "cap"])
    parser.add_argument("--seeds", type=int, default=12, help="how many; the first is 100")
    parser.add_argument("--levels", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=25, help="of every level")
    chosen = parser.parse_args()
    for rule in {*chosen.rules} - {"backprop", "new"}:
        birth_norm(rule, 1.0)  # an unknown name is no number
    torch.set_num_threads(1)
    table = run(chosen.networks, chosen.rules, range(100, 100 + chosen.seeds), chosen.levels, chosen.iterations)
    chosen.out.mkdir(parents=True, exist_ok=True)
    header = [("networks", "rule", "seed", "level", "mean_return")]
    with (chosen.out / "cartpole.csv").open("a", newline="") as file:
        csv.writer(file).writerows(table if file.tell() else header + table)


if __name__ == "__main__":
    main()
