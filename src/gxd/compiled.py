"""One training step as one compiled function: forward, both gradients, the statistics and the update.

Resets stay outside, between two steps. ``gxd.program`` does the tracing and compiling; this module decides when.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gxd import expect
from gxd.continual import ContinualBackprop
from gxd.errors import CompileWarning
from gxd.find import call_arguments
from gxd.layers import unwrap
from gxd.program import Program, Recipe, detached, logits_of, shape_of
from gxd.updates import update_of

MOST_PROGRAMS = 8  # batches of more shapes than that run eagerly


def compiled_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Callable[[Any, Any], Tensor],
    cbp: ContinualBackprop | None = None,
    *,
    score: Callable[[Any, Any], Tensor] | None = None,
) -> CompiledStep:
    """Make a whole training step that is compiled as one function.

    ``step(x, y)`` does what this does, faster::

        output = model(x)
        value = loss(output, y)
        cbp.observe(output, y)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    A batch of a new shape is compiled when it is first seen, which takes seconds. Where that is not possible, a
    :class:`gxd.CompileWarning` says why, and the step runs eagerly with the same result.

    Args:
        model: the model. Its parameters may be changed in place at any time, as always.
        optimizer: SGD, Adam and AdamW are compiled too; others step by themselves after the compiled part.
        loss: ``loss(output, target)``, a scalar, such as ``F.cross_entropy``.
        cbp: resets the units of ``model`` and ``optimizer``. None: plain backpropagation.
        score: ``score(output, target)``, one number per example, is observed in place of the logits and the target:
            ``cbp.observe(score=...)``. By default the model's output, or its ``logits``, is observed.

    Returns:
        A callable. ``step(inputs, target)`` returns the loss and the output, detached. Inputs are a tensor, a tuple
        of positional arguments, or a dict of keyword arguments. Gradients are not left in ``.grad``.

    Example::

        cbp = gxd.ContinualBackprop(model, optimizer, example_inputs=x[:2], utility="gxd")
        step = gxd.compiled_step(model, optimizer, F.cross_entropy, cbp)
        for x, y in stream:
            loss, logits = step(x, y)
    """
    return CompiledStep(model, optimizer, loss, cbp, score)


class CompiledStep:
    """See :func:`compiled_step`.

    Attributes:
        why_eager: why steps are not compiled, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Callable[[Any, Any], Tensor],
        cbp: ContinualBackprop | None,
        score: Callable[[Any, Any], Tensor] | None,
    ) -> None:
        expect.module(model)
        expect.optimizer(optimizer)
        for name, function in (("loss", loss), ("score", score)):
            if not callable(function) and (name == "loss" or function is not None):
                raise TypeError(f"{name} must be a function of (output, target), got {type(function).__name__}")
        if cbp is not None and not isinstance(cbp, ContinualBackprop):
            raise TypeError(f"cbp must be a gxd.ContinualBackprop or None, got {type(cbp).__name__}")
        if cbp is not None and not cbp._hooks:
            raise ValueError("cbp is closed: make a new ContinualBackprop")
        if cbp is not None and (cbp.model is not unwrap(model) or cbp.optimizer is not optimizer):
            raise ValueError("cbp belongs to another model or optimizer: give the ones it was made with")
        self.model, self.optimizer, self.loss, self.cbp, self.score = model, optimizer, loss, cbp, score
        self.why_eager: str | None = None
        self._recipe = Recipe(unwrap(model), optimizer, update_of(optimizer), loss, cbp, score)
        self._modules = list(unwrap(model).modules())
        self._programs: dict[Any, Program] = {}
        why = _impossible(model, optimizer, cbp, self._recipe)
        if why is not None:
            self._fall_back(why)

    def __call__(self, inputs: Any, target: Any) -> tuple[Tensor, Any]:
        """Train on one batch; returns the loss and the model's output, detached."""
        states = self._recipe.states() if self.why_eager is None else None
        if states is not None:  # else the optimizer is about to make them, in an eager step
            program = self._program(states, inputs, target)
            if program is not None:
                return program(states, inputs, target)
        return self._eager(inputs, target)

    def _eager(self, inputs: Any, target: Any) -> tuple[Tensor, Any]:
        args, kwargs = call_arguments(inputs)
        output = self.model(*args, **kwargs)
        value = self.loss(output, target)
        if self.cbp is not None and self.score is not None:
            self.cbp.observe(score=self.score(output, target))
        elif self.cbp is not None:
            self.cbp.observe(logits_of(output), target)
        value.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return value.detach(), detached(output)

    def _program(self, states: list[Tensor], inputs: Any, target: Any) -> Program | None:
        """The program for this batch, or None if there is none."""
        # Everything that is fixed when a program is made. What it reads anew at each call is not here.
        key = (
            shape_of(inputs),
            shape_of(target),
            self.cbp is not None and self.cbp._scorer.observer.active,
            tuple([module.training for module in self._modules]),
            self._recipe.settings(),
            torch.is_autocast_enabled(),
        )
        program = self._programs.get(key)
        if program is None and len(self._programs) >= MOST_PROGRAMS:
            self._fall_back(f"batches of more than {MOST_PROGRAMS} shapes; bring them to one shape, or drop the last")
        elif program is None:
            try:
                program = self._programs[key] = Program(self._recipe, states, inputs, target)
            except Exception as error:
                lines = str(error).strip().splitlines() or [""]
                self._fall_back(f"{type(error).__name__}: {lines[0]}")
        return program

    def _fall_back(self, why: str) -> None:
        self.why_eager = why
        warnings.warn(f"compiled_step runs eagerly from here on: {why}", CompileWarning, stacklevel=4)


def _impossible(model: nn.Module, optimizer: Optimizer, cbp: ContinualBackprop | None, recipe: Recipe) -> str | None:
    """Why this training cannot be compiled as one function, if that is known beforehand."""
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)) or (cbp and cbp._processes.several):
        return "several processes train together, and exchange gradients during the backward pass"
    if cbp is not None and cbp.scaler is not None:
        return "a GradScaler decides about each step on the host"
    hooks = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    if hooks > (2 if cbp else 0):
        return "the optimizer has step hooks of its own, which a compiled step would pass over"
    if recipe.foreign:
        return f"the optimizer trains {recipe.foreign} parameters that are not the model's"
    if cbp is not None and recipe.update is None and cbp._utility.gradient in (None, "loss"):
        return (
            f"the utility {cbp._utility.name!r} is scored after the step of the optimizer, and "
            f"{type(optimizer).__name__} steps by itself"
        )
    return None
