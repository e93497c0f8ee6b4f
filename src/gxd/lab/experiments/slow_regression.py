"""The slowly changing regression problem of Dohare et al.: Loss of Plasticity in Deep Continual Learning, Nature 632,
2024 (the bit-flipping problem of their earlier paper).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gxd.lab.experiments.base import register
from gxd.lab.experiments.feedforward import Perceptron
from gxd.lab.streams import Stream, Task, generator

SLOW, FAST = 15, 5  # bits
PERIOD, BIN = 10_000, 20_000  # examples
UNITS, BETA = 100, 0.7  # of the target network


@register
@dataclass(frozen=True)
class SlowRegression(Perceptron):
    """Slowly changing regression of Dohare et al.: 20 bits, one of which flips now and then, and a target network that
    five hidden units cannot represent. The defaults are theirs. A task is a bin of 20,000 examples, in which the input
    changes twice; the learner is not told, so methods that act between tasks have no place here.
    """

    name: ClassVar[str] = "slow-regression"
    train_size: ClassVar[int] = BIN
    classifies: ClassVar[bool] = False
    metric: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False
    learned_nothing: ClassVar[float] = math.inf
    boundaries: ClassVar[bool] = False

    flip: Literal["one", "all"] = "one"
    """Every 10,000 examples one of the 15 slow bits flips, or all of them are drawn anew.
    Paper: one; their code's first setting is all."""
    width: int = 5
    """Hidden units.
    Paper: 5."""
    depth: int = 1
    """Hidden layers.
    Paper: 1."""
    tasks: int = 50
    """How many bins of 20,000 examples follow one another.
    Paper: 50, and more: a million examples."""
    batch_size: int = 1
    """Examples per step.
    Paper: 1."""
    lr: float | None = None
    """Learning rate. None: 0.01 for SGD, 1e-3 for Adam.
    Paper: the best of {0.01, 0.003, 0.001} for each activation."""
    rate: float | None = None
    """Replacement rate: the share of the mature units reset per step. None: 1e-3 for gxd, 1e-4 for utilities.
    This and the next five are of gxd and of utilities; other methods have --options.
    Paper: the best of {1e-6 ... 1e-2}."""

    def stream(self) -> Stream:
        return SlowBits(self.seed, self.batch_size, self.device, self.flip)

    def default_lr(self) -> float:
        return 0.01 if self.optimizer == "sgd" else 1e-3


class SlowBits(Stream):
    """Inputs of 20 bits: 15 that stay as they are for 10,000 examples, 5 that are drawn for every example.

    The target is a network of 100 linear threshold units of the bits and a constant 1, ``[w_i x >= 0.7 * 21 - s_i]``,
    all weights +1 or -1, where ``s_i`` counts the weights -1 of unit i; its output is their sum with weights +1 or -1,
    plus a bias of +1 or -1. (The authors' code counts half of the constant's weight into ``s_i``, with the other sign.)

    Examples come in the order they are drawn. The test set of a task are the 32 inputs that the slow bits of its end
    allow, each once.
    """

    classes, input_shape = 1, (SLOW + FAST,)

    def __init__(self, seed: int, batch_size: int, device: torch.device | str = "cpu", flip: str = "one") -> None:
        chance = generator(seed, "target")
        self.hidden = 2.0 * torch.randint(2, (UNITS, SLOW + FAST + 1), generator=chance) - 1
        self.output = 2.0 * torch.randint(2, (UNITS + 1,), generator=chance) - 1
        self._seed, self._batch_size, self._device, self._flip = seed, batch_size, device, flip

    def task(self, number: int) -> Task:
        self.check(number)
        periods = range(number * BIN // PERIOD, (number + 1) * BIN // PERIOD)
        slow = torch.cat([self.slow_bits(period).expand(PERIOD, -1) for period in periods])
        fast = torch.randint(2, (BIN, FAST), generator=generator(self._seed, number, "bits")).float()
        every = torch.tensor([[n >> bit & 1 for bit in range(FAST)] for n in range(2**FAST)], dtype=torch.float32)
        train, test = torch.cat([slow, fast], 1), torch.cat([slow[-1].expand(2**FAST, -1), every], 1)
        return Task(
            self._seed,
            number,
            self._batch_size,
            train.to(self._device),
            self.target(train).to(self._device),
            test.to(self._device),
            self.target(test).to(self._device),
            shuffled=False,
        )

    def slow_bits(self, period: int) -> Tensor:
        """``(15,)`` the slow bits in a period of 10,000 examples."""
        if self._flip == "all":
            return torch.randint(2, (SLOW,), generator=generator(self._seed, period, "slow bits")).float()
        flips = [torch.randint(SLOW, (1,), generator=generator(self._seed, n, "flip")) for n in range(1, period + 1)]
        bits = torch.randint(2, (SLOW,), generator=generator(self._seed, 0, "slow bits"))
        return ((bits + torch.bincount(torch.cat([bits.new_empty(0), *flips]), minlength=SLOW)) % 2).float()

    def target(self, x: Tensor) -> Tensor:
        """``(n, 20) -> (n, 1)`` what is to be learned."""
        threshold = BETA * (SLOW + FAST + 1) - (self.hidden < 0).sum(1)
        on = torch.cat([x, x.new_ones(len(x), 1)], 1) @ self.hidden.T >= threshold
        return (on.float() @ self.output[:-1] + self.output[-1])[:, None]
