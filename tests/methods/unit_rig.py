"""Small networks, and steps with and without a unit method, for its comparison with loops over units."""

import copy
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd


def net(kind: str, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(1)
    if kind == "linear":
        layers = OrderedDict(first=nn.Linear(4, 9), act1=activation(), second=nn.Linear(9, 7), act2=activation())
        return nn.Sequential(OrderedDict(**layers, head=nn.Linear(7, 3)))
    layers = OrderedDict(first=nn.Conv2d(2, 6, 3), act1=activation(), second=nn.Conv2d(6, 5, 2), act2=activation())
    return nn.Sequential(OrderedDict(**layers, flat=nn.Flatten(), head=nn.Linear(5 * 4, 3)))


SHAPES = {"linear": (4,), "conv": (2, 5, 5)}
LAYERS = ("first", "second")


def batches(kind: str, count: int, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(size, *SHAPES[kind], generator=generator), torch.randint(0, 3, (size,), generator=generator))
        for _ in range(count)
    ]


class Run:
    def __init__(self, kind: str, method: gxd.Method, activation: type[nn.Module] = nn.ReLU) -> None:
        self.kind, self.model = kind, net(kind, activation)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.attached = gxd.attach(
            self.model, self.optimizer, method, example_inputs=torch.zeros(2, *SHAPES[kind]), seed=3
        )

    def step(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Train on a batch. Returns the gradients of the step."""
        self.optimizer.zero_grad()
        logits = self.model(x)
        self.attached.observe(logits, y)
        F.cross_entropy(logits, y).backward()
        gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        self.optimizer.step()
        return gradients

    def stepped_plainly(self, x: Tensor, y: Tensor) -> tuple[nn.Sequential, dict[Tensor, Tensor]]:
        """The model as the same step would leave it without the method, and Adam's first moments by parameter."""
        model = copy.deepcopy(self.model)  # its hooks are inert in the copy
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        return model, {p: state["exp_avg"] for p, state in optimizer.state.items()}

    def values(self, x: Tensor) -> dict[str, Tensor]:
        """What the units of each layer are on a batch, ``(examples, units, positions)``."""
        found, h = {}, x
        with torch.no_grad():
            for name, module in copy.deepcopy(self.model).named_children():
                h = module(h)
                if name in ("act1", "act2"):
                    found[LAYERS[int(name[-1]) - 1]] = h.flatten(2) if h.dim() > 2 else h.unsqueeze(2)
        return found

    @property
    def resets(self) -> dict[str, list[int]]:
        return {name: index.tolist() for name, index in self.attached.last_resets.items()}


def gradient_of_rows(gradients: dict[str, Any], layer: str) -> list[float]:
    """The mean absolute gradient of the incoming weights of each unit, one after the other."""
    weight = gradients[f"{layer}.weight"]
    return [float(weight[unit].abs().sum()) / weight[unit].numel() for unit in range(len(weight))]
