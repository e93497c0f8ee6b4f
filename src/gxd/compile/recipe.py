"""What a training step is made of, and where its tensors are found."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gxd.attachment import Attachment
from gxd.compile.updates import Update


class Recipe:
    """What a step is made of, and where its tensors are found at each call.

    Attributes:
        foreign: how many of the optimizer's parameters are not the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        update: Update | None,
        loss: Callable[[Any, Any], Tensor],
        attached: Attachment | None,
        score: Callable[[Any, Any], Tensor] | None,
    ) -> None:
        self.model, self.optimizer, self.update = model, optimizer, update
        self.loss, self.attached, self.score = loss, attached, score
        # A tied parameter has several names, and is one tensor.
        self.names: dict[str, int] = {}
        self.places: list[tuple[dict[str, Any], str]] = []
        known: dict[int, int] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            for held in (module._parameters, module._buffers):
                for key, tensor in held.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in known:
                        known[id(tensor)] = len(self.places)
                        self.places.append((held, key))
                    self.names[f"{path}.{key}" if path else key] = known[id(tensor)]
        trained = [[known.get(id(p)) for p in group["params"]] for group in self.groups]
        self.foreign = sum(n is None for numbers in trained for n in numbers)
        self.trained = [[n for n in numbers if n is not None] for numbers in trained]  # by parameter group
        self.rates = [torch.zeros((), dtype=torch.float64) for _ in self.groups]
        self._numbers = [0.0 for _ in self.groups]  # what they hold, to compare without a tensor

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups, asked for anew: ``load_state_dict`` gives it another list."""
        return self.optimizer.param_groups

    def same_as(self, other: Recipe) -> bool:
        """Whether the tensors are found in the same places, and the optimizer trains the same of them, and alike."""
        return (
            self.names == other.names
            and self.update is other.update
            and all(a[0] is b[0] for a, b in zip(self.places, other.places, strict=True))
            and (self.trained, self.foreign) == (other.trained, other.foreign)
        )

    def name(self, number: int) -> str:
        """A name of a tensor."""
        return next(name for name, known in self.names.items() if known == number)

    def name_of(self, tensor: Tensor) -> str | None:
        """A name of a tensor, if it is the model's."""
        return next((self.name(n) for n, one in enumerate(self.tensors()) if one is tensor), None)

    def tensors(self) -> list[Tensor]:
        """Parameters and buffers."""
        return [held[key] for held, key in self.places]

    def unfinished(self) -> bool:
        """Whether a layer has yet to learn its shape, from the first batch."""
        return any(map(is_lazy, self.tensors()))

    def device(self) -> str:
        """The type of the device that the model is on."""
        held, key = self.places[0]
        return str(held[key].device.type)

    def kept(self) -> list[tuple[int, Sequence[str]]]:
        """The trained parameters, and the names of what the update keeps of each."""
        if self.update is None:
            return []
        names = [self.update.state(group) for group in self.groups]
        tensors = self.tensors()
        found = zip(self.trained, names, strict=True)
        return [(n, kept) for numbers, kept in found if kept for n in numbers if tensors[n].requires_grad]

    def states(self, kept: Sequence[tuple[int, Sequence[str]]]) -> list[Tensor] | None:
        """What the update keeps of these parameters; None if the optimizer has not made it yet."""
        found, known = [], self.optimizer.state
        for n, names in kept:
            held, key = self.places[n]
            state = known.get(held[key], {})
            for name in names:
                if not isinstance(state.get(name), Tensor):
                    return None
                found.append(state[name])
        return found

    def settings(self) -> tuple[Any, ...]:
        """What is compiled in of the optimizer's options; of the learning rate, what kind of number it is."""
        if self.update is None:
            return ()
        options = self.update.settings
        return tuple([(_kind(group["lr"]), *[group[name] for name in options]) for group in self.groups])

    def with_gradient(self) -> Tensor | None:
        """A trained parameter that has a gradient already, if there is one."""
        return next((p for group in self.groups for p in group["params"] if p.grad is not None), None)

    def learning_rates(self) -> list[Tensor]:
        """One for each parameter group, as tensors, so that a schedule need not compile anew."""
        for number, group in enumerate(self.groups if self.update else []):
            lr = group["lr"]
            if isinstance(lr, Tensor):
                self.rates[number], self._numbers[number] = lr, math.nan
            elif self._numbers[number] != lr:
                self.rates[number], self._numbers[number] = torch.tensor(lr, dtype=torch.float64), lr
        return self.rates


def _kind(lr: Any) -> Any:
    return (lr.dtype, lr.device, lr.shape) if isinstance(lr, Tensor) else None
