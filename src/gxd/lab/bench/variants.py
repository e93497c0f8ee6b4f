"""The ways to train a model that are compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gxd
from gxd.lab import steps
from gxd.lab.bench.measure import Make, Step
from gxd.lab.errors import UserError

# Units must mature within the warm-up, so that resets fall into what is timed.
MATURITY = 10
Trainee = tuple[nn.Module, torch.optim.Optimizer, gxd.Attachment | None]


@dataclass
class Setting:
    """A model and its batches, the same for every variant."""

    title: str
    model: Callable[[], nn.Module]
    batch: tuple[int, ...]
    classes: int
    momentum: float = 0.0
    adam: bool = False
    device: str = "cpu"
    _plans: dict[str, gxd.UnitPlan] = field(default_factory=dict)

    def fresh(self) -> nn.Module:
        """A new model, equal each time."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.model().to(self.device)

    def plan(self, residual: str = "skip") -> gxd.UnitPlan:
        """The units of the model; traced once."""
        if residual not in self._plans:
            example = torch.zeros(2, *self.batch[1:], device=self.device)
            self._plans[residual] = gxd.find_units(self.fresh(), example, residual=residual)
        return self._plans[residual]

    def trainee(self, utility: str | None, **options: Any) -> Trainee:
        """A new model and its optimizer, with resets by ``utility`` attached to them, or without."""
        model = self.fresh()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=self.momentum)
        if self.adam:
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        if utility is None:
            return model, optimizer, None
        options = {"replacement_rate": 1e-4, "maturity": MATURITY, "residual": "skip", **options}
        plan = self.plan(options.pop("residual"))
        return model, optimizer, gxd.ContinualBackprop(model, optimizer, plan=plan, utility=utility, **options)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """A few batches, so that the loss does not vanish."""
        draw = torch.Generator().manual_seed(1)
        return [
            (
                torch.randn(self.batch, generator=draw).to(self.device),
                torch.randint(self.classes, self.batch[:1], generator=draw).to(self.device),
            )
            for _ in range(8)
        ]

    def repeat(self, step: steps.Step) -> Step:
        """The step on one batch after the other."""
        turn = itertools.cycle(self.batches())
        return lambda: step(*next(turn))


def eager(setting: Setting, utility: str | None = None, **options: Any) -> Make:
    """Backprop, or resets by ``utility``, as in the README. The options are those of ``ContinualBackprop``, and
    ``residual``.
    """

    def make() -> Step:
        model, optimizer, cbp = setting.trainee(utility, **options)
        return setting.repeat(steps.eager_step(model, optimizer, F.cross_entropy, cbp))

    return make


def compiled(setting: Setting, utility: str | None = None, **options: Any) -> Make:
    """The same as one compiled function."""

    def make() -> Step:
        model, optimizer, cbp = setting.trainee(utility, **options)
        return setting.repeat(gxd.compiled_step(model, optimizer, F.cross_entropy, cbp))

    return make


def bare(setting: Setting, utility: str) -> Make:
    """The least that an eager step can do: ``gxd`` or ``contribution`` on an MLP by hand, without a check, a reset or a
    choice. What the library costs beyond this is its own; the rest is torch's.
    """

    def make() -> Step:
        model, optimizer, _ = setting.trainee(None)
        layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
        seen: list[Tensor] = []
        for layer in layers[1:]:
            layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        units = sum(layer.in_features for layer in layers[1:])
        one, zeros = torch.ones((), device=setting.device), torch.zeros(units, device=setting.device)
        averages = [zeros, zeros, zeros, zeros]  # of h, of the score, and of 1 beside each
        rows = torch.eye(setting.classes, device=setting.device)

        def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            logits = model(x)
            value = F.cross_entropy(logits, y)
            pulled = torch.autograd.grad(logits, seen, rows[y], retain_graph=True) if utility == "gxd" else ()
            with torch.no_grad():
                h = torch.cat(seen, -1)
                mean, weight = torch.lerp(averages[0], h.mean(0), 0.01), torch.lerp(averages[1], one, 0.01)
                if utility == "gxd":
                    score = (h - mean / weight).mul_(torch.cat(pulled, -1)).abs_().mean(0)
                else:
                    score = h.abs().mean(0) * torch.cat([layer.weight.abs().sum(0) for layer in layers[1:]])
                averages[:] = mean, weight, torch.lerp(averages[2], score, 0.01), torch.lerp(averages[3], one, 0.01)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.clear()
            return value.detach(), logits.detach()

        return setting.repeat(step)

    return make


def ccbp(setting: Setting, **options: Any) -> Make:
    """The optimizer wrapper of ccbp-pytorch."""

    def make() -> Step:
        try:
            from ccbp_pytorch import CCBP
        except ImportError:
            raise UserError("ccbp-pytorch is not installed") from None
        model, optimizer, _ = setting.trainee(None)
        return setting.repeat(steps.eager_step(model, CCBP(optimizer, model=model, **options), F.cross_entropy))

    return make
