"""Gradients of the observed output by the parameters: what one step shows of each weight's effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gxd.checkpoint import Some, loaded, saved
from gxd.errors import ObservationError, PlanError
from gxd.observe.direction import Direction
from gxd.processes import Processes


class Pulled(NamedTuple):
    """What the passes since the last step have shown on this process.

    Attributes:
        examples: how many there were.
        sums: parameter name -> the sum over them of dz/dw, of parameters that the output depends on.
    """

    examples: int = 0
    sums: Some = Some()


class OutputGradients:
    """Adds up ``dz/dw`` over the passes of a step: one more backward pass to the parameters for each.

    Examples are summed with their signs. The sum of absolute values, one per example, would need a gradient for each.

    Args:
        direction: which change of the output counts, as for :func:`gxd.observe.direction.direction_of`.
        noise: draws the signs of a sketch; one of each process.
    """

    def __init__(self, direction: str, noise: torch.Generator, processes: Processes) -> None:
        self.direction, self.noise, self.processes = direction, noise, processes
        self.pulled = Pulled()
        self._scale: float | None = None  # of the loss, when this step's first pass was observed

    def add(self, direction: Direction, parameters: Mapping[str, Tensor], scale: float | None = None) -> None:
        """Take in the pass behind an output. ``scale``: of the loss; when it changes, a step was skipped."""
        if scale != self._scale:
            self.forget()
        self._scale = scale
        (cotangent,) = direction.cotangents()
        found = torch.autograd.grad(
            direction.output, list(parameters.values()), cotangent, retain_graph=True, allow_unused=True
        )
        pairs = zip(parameters, found, strict=True)
        new = {name: gradient.to_dense() for name, gradient in pairs if gradient is not None}
        if not new:
            raise ObservationError(
                "observe() got an output that depends on no trained parameter: it is of another model"
            )
        old = self.pulled.sums
        sums = {name: old[name].to(gradient) + gradient if name in old else gradient for name, gradient in new.items()}
        self.pulled = Pulled(self.pulled.examples + direction.examples, Some({**old, **sums}))

    def finish(self, parameters: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor] | None:
        """The means over the examples of all processes, by name; None if nothing was observed. They are forgotten here.

        Parameters that no observed output depends on are not among them: a zero would say that they have no effect.
        """
        pulled = self.pulled
        self.forget()
        counts = [pulled.examples, *(name in pulled.sums for name in parameters)]
        examples, *reached = self.processes.sum(torch.tensor(counts, device=device)).tolist()
        found = {}
        for (name, parameter), shown in zip(parameters.items(), reached, strict=True):
            if shown:  # by one process at least, and all of them have to take part in the sum
                total = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
                if name in pulled.sums:
                    total.copy_(pulled.sums[name])
                found[name] = self.processes.sum(total).div_(examples)
        return found if examples else None

    def forget(self) -> None:
        """Drop what this step has shown so far."""
        self.pulled, self._scale = Pulled(), None

    def state_dict(self) -> Any:
        """What the passes since the last step have shown."""
        return saved(self.pulled)

    def checked(self, given: Any, parameters: Mapping[str, Tensor], path: str) -> Pulled:
        """What :meth:`state_dict` has returned. Raises PlanError if it is of another model."""
        pulled: Pulled = loaded(given, Pulled(), path)
        for name, tensor in pulled.sums.items():
            if name not in parameters or tensor.shape != parameters[name].shape:
                raise PlanError(f"the saved state is damaged, or of another model: {path}.sums.{name} does not fit")
        return pulled
