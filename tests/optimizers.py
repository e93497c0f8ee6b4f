"""Small optimizers, written for the tests after the published rules, that keep more than memories of gradients."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gxd


class Kept(Optimizer):
    """SGD that keeps what ``keep(parameter)`` returns."""

    def __init__(self, params: Any, keep: Callable[[Tensor], dict[str, Any]], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.keep = keep

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p].update(self.keep(p))
                p.sub_(p.grad, alpha=group["lr"])


class EightBit(Optimizer):
    """Momentum in 8-bit codes of the largest value: code 255 is 1, code 0 is -1."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"momentum_buffer": torch.full_like(p, 128, dtype=torch.uint8), "scale": torch.tensor(0.0)}
                momentum = 0.9 * (state["momentum_buffer"].float() / 127.5 - 1) * state["scale"] + p.grad
                state["scale"] = momentum.abs().max()
                state["momentum_buffer"].copy_((momentum / state["scale"].clamp(min=1e-12) + 1) * 127.5)
                p.sub_(momentum, alpha=group["lr"])


class SGDScheduleFree(Optimizer):
    """Schedule-free SGD: the gradient is taken at y = (1 - beta) z + beta x, the average x of z is what counts."""

    def __init__(self, params: Any, lr: float = 0.5, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                x = (p - (1 - group["beta"]) * z) / group["beta"]
                z.sub_(p.grad, alpha=group["lr"])
                x.lerp_(z, 1 / group["k"])
                p.copy_(torch.lerp(z, x, group["beta"]))


class MADGRAD(Optimizer):
    """Dual averaging: every step begins at the initial weights x0."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            rate = group["lr"] * group["k"] ** 0.5
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"x0": p.detach().clone(), "s": torch.zeros_like(p), "grad_sum_sq": torch.zeros_like(p)}
                state["s"].add_(p.grad, alpha=rate)
                state["grad_sum_sq"].addcmul_(p.grad, p.grad, value=rate)
                p.copy_(state["x0"] - state["s"] / (state["grad_sum_sq"] ** (1 / 3) + 1e-6))


class MasterWeights(Optimizer):
    """SGD on copies in 32 bits, of which the parameters are roundings."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            master = self.state[p].setdefault("master_param", p.detach().float().clone())
            p.copy_(master.sub_(p.grad.float(), alpha=0.1))


class Lookahead(Optimizer):
    """Every second step goes half-way back to slow weights, kept in a state of its own. Does not call
    ``Optimizer.__init__``, as some in use.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self.state: Any = defaultdict(dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)  # torch's own would hook the class, and break others without hooks

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        first = not self.state
        for p in (p for group in self.param_groups for p in group["params"] if first):
            self.state[p]["slow_param"] = p.detach().clone()
        self.optimizer.step()
        self.count += 1
        for p in (p for group in self.param_groups for p in group["params"] if self.count % 2 == 0):
            p.copy_(self.state[p]["slow_param"].lerp_(p, 0.5))


class LookaheadInLists(Optimizer):
    """The same with the slow weights in lists."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.param_groups, self.defaults = optimizer, optimizer.param_groups, optimizer.defaults
        self.state: Any = defaultdict(dict)
        self.slow_weights = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)  # torch's own would hook the class, and break others without hooks

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        for group, slow in zip(self.param_groups, self.slow_weights):
            for p, kept in zip(group["params"], slow):
                p.copy_(kept.lerp_(p, 0.5))


class Delegating:
    """Passes everything on but a step while gradients are accumulated, as the wrappers of training frameworks do."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self.accumulating = optimizer, False
        self.__class__ = type("Wrapped" + type(optimizer).__name__, (type(self), type(optimizer)), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self, closure: Any = None) -> None:
        if not self.accumulating:
            self._optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none)


class Accelerated(Optimizer):
    """The same by properties, as a subclass that does not call ``Optimizer.__init__``."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.accumulating = optimizer, False

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure: Any = None) -> None:
        if not self.accumulating:
            self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Bare:
    """A user's own, that is no Optimizer and shows nothing."""

    def __init__(self, optimizer: Any) -> None:
        self.inside = {"the": [optimizer]}

    def step(self) -> None:
        self.inside["the"][0].step()

    def zero_grad(self) -> None:
        self.inside["the"][0].zero_grad()


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def backward(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None
    model(torch.randn(8, 4, dtype=next(model.parameters()).dtype)).square().mean().backward()


def train(model: nn.Module, optimizer: Any, steps: int = 5) -> None:
    for _ in range(steps):
        backward(model)
        optimizer.step()


def without_gradient(model: nn.Module, optimizer: Any, steps: int = 5) -> None:
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()


UNITS = {"0": [1, 4], "2": [0]}


def reset_slices(model: nn.Sequential) -> Iterable[tuple[str, Tensor]]:
    """The name of each weight and bias, and where a reset of UNITS sets it, by hand."""
    mask = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in model.named_parameters()}
    for layer, reader in (("0", "2"), ("2", "4")):
        mask[f"{layer}.weight"][UNITS[layer]] = True
        mask[f"{layer}.bias"][UNITS[layer]] = True
        mask[f"{reader}.weight"][:, UNITS[layer]] = True
    return mask.items()


PLAN = gxd.find_units(mlp(), torch.randn(2, 4))
REFERENCES = {"0": torch.linspace(-1, 1, 6), "2": torch.linspace(1, -1, 5)}


def reset(model: nn.Module, optimizer: Any, **options: Any) -> None:
    """Reset UNITS of :func:`mlp`."""
    generator = torch.Generator().manual_seed(3)
    gxd.reset_units(
        model, PLAN, UNITS, references=REFERENCES, optimizer=optimizer, **{"generator": generator, **options}
    )
