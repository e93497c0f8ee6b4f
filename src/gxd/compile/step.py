"""One training step as one compiled function: forward, both gradients, the statistics and the update.

Resets stay outside, between two steps. ``gxd.compile.program`` traces and compiles; this module decides when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gxd import arguments
from gxd.attachment import Attachment
from gxd.compile.program import Program, StateMissing, detached, logits_of, shape_of
from gxd.compile.recipe import Recipe
from gxd.compile.updates import update_of
from gxd.compile.watch import Watch
from gxd.errors import CompileWarning, warn
from gxd.plan.find import call_arguments
from gxd.plan.layouts import unwrap
from gxd.reset.optimizers import is_optimizer

MOST_PROGRAMS = 8  # when more are asked for, steps run eagerly
CLOSED = "cbp is closed: attach a new one"


class Key(NamedTuple):
    """Everything that is fixed when a program is made. What it reads anew at each call is not here."""

    batch: Any
    options: Any
    autocast: Any
    watch: Watch
    scored: tuple[str, ...]  # the methods that observe the step


def compiled_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Callable[[Any, Any], Tensor],
    cbp: Attachment | None = None,
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

    A batch of a new shape is compiled when it is first seen, which takes seconds. What was compiled is run once beside
    the operations one by one, and used only if it gives their numbers. Where that is not possible, a
    :class:`gxd.CompileWarning` says why, and the step runs eagerly with the same result.

    A compiled step keeps what Python has computed, so this is its contract:

    - Read anew at each call: all tensors (parameters, buffers, states of the optimizer, class weights) and learning
      rates. Change them in place or replace them.
    - Compared at each call; a new value compiles again, an old one finds its program again: the batch's shape,
      autocast, the mode and every attribute of modules (``model.task``, ``Dropout.p``), modules and parameters
      themselves, the optimizer's options, and what ``loss``, ``score`` and ``forward`` reach by name: their closures,
      defaults and globals, and from there attributes and keys (``args.beta``, ``config["beta"]``).
    - Run eagerly: hooks of yours, a step that sets attributes, variables or what is in containers, or reads numbers
      from tensors (``item``), activation checkpointing, batches that require a gradient or hold their tensors in
      objects of their own class, a loss that has gradients for more than the model, buffers that are replaced by others
      of another shape or kind, layers that have yet to learn their shape, and steps before which gradients wait in
      ``.grad``.
    - Not followed: what is inside lists or behind computed keys, variables of installed libraries, iterators and NumPy
      arrays that the step moves on, random numbers drawn by Python or NumPy, and what Python checks about the values in
      a batch (``F.one_hot`` its classes). After a change of these call :meth:`CompiledStep.recompile`; a step that
      changes them itself is not for this.

    Args:
        model: the model. Its parameters may be changed in place at any time, as always.
        optimizer: SGD, Adam and AdamW are compiled too; others, and those whose ``step`` was replaced (to clip
            gradients in it), step by themselves after the compiled part.
        loss: ``loss(output, target)``, a scalar, such as ``F.cross_entropy``.
        cbp: resets the units of ``model`` and ``optimizer``. None: plain backpropagation.
        score: ``score(output, target)``, one number per example, is observed in place of the logits and the target:
            ``cbp.observe(score=...)``. By default the model's output, or its ``logits``, is observed.

    Returns:
        A callable. ``step(inputs, target)`` returns the loss and the output, detached. Inputs are a tensor, a tuple
        of positional arguments, or a dict of keyword arguments. Gradients of what ``optimizer`` trains are not left in
        ``.grad``; those of other parameters are added there, for an optimizer of theirs (``requires_grad_(False)``
        spares what nobody trains). ``step.recompile()`` compiles anew, ``step.why_eager`` says why a step is not
        compiled.

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
        cbp: Attachment | None,
        score: Callable[[Any, Any], Tensor] | None,
    ) -> None:
        arguments.module(model)
        arguments.optimizer(optimizer)
        if not is_optimizer(optimizer):
            raise TypeError(f"{type(optimizer).__name__} shows no param_groups and state: give the optimizer inside it")
        for name, function in (("loss", loss), ("score", score)):
            if not callable(function) and (name == "loss" or function is not None):
                raise TypeError(f"{name} must be a function of (output, target), got {type(function).__name__}")
        if cbp is not None and not isinstance(cbp, Attachment):
            what = "a gxd.ContinualBackprop (or what gxd.attach returns) or None"
            raise TypeError(f"cbp must be {what}, got {type(cbp).__name__}")
        if cbp is not None and cbp.closed:
            raise ValueError(CLOSED)
        if cbp is not None and (cbp.model is not unwrap(model) or cbp.optimizer is not optimizer):
            raise ValueError("cbp belongs to another model or optimizer: give the ones it was made with")
        self.model, self.optimizer, self.loss, self.cbp, self.score = model, optimizer, loss, cbp, score
        self.recompile()

    def recompile(self) -> None:
        """Forget all that was compiled, and compile at the next call: after a change that is not followed (see
        :func:`compiled_step`), or after the reason for running eagerly is gone.
        """
        self.why_eager: str | None = None
        self._programs: dict[Key, Program] = {}
        self._watches: list[Watch] = []
        self._watch: Watch | None = None
        self._warm = self._told = False
        self._doubt: str | None = None  # why this batch was not compiled; it counts if an eager step takes the batch
        self._recipe = self._new_recipe()
        self._look()

    def __call__(self, inputs: Any, target: Any) -> tuple[Tensor, Any]:
        """Train on one batch; returns the loss and the model's output, detached."""
        if self.cbp is not None and self.cbp.closed:
            raise ValueError(CLOSED)
        if isinstance(inputs, Mapping):
            inputs = dict(inputs)  # of whatever class, as tokenizers return
        if self.why_eager is None and (self._watch is None or not self._watch.unchanged()):
            self._look()
        self._doubt = None
        ready = self.why_eager is None and self._watch is not None and not self._gradients_wait()
        program = self._program(inputs, target) if ready else None
        result = program(inputs, target) if program is not None else None
        if result is not None:
            return result
        if program is not None and program.outdated:
            self._programs = {key: other for key, other in self._programs.items() if other is not program}
        with nullcontext() if self.why_eager else _as_written():
            result = self._eager(inputs, target)
        if self._doubt is not None:  # a batch that the model itself refuses says nothing about compiling
            self._fall_back(self._doubt)
        return result

    def _gradients_wait(self) -> bool:
        """Whether gradients from before the step are to be added to its own, which an eager one does."""
        waiting = self._recipe.with_gradient()
        if waiting is not None and not self._told:
            self._told = True
            warn(
                f"compiled_step runs a step eagerly where gradients from before it wait to be added (as "
                f"{self._recipe.name_of(waiting)!r} has one): zero them, or add what they are of to the loss",
                CompileWarning,
            )
        return waiting is not None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a compiled step cannot be copied or pickled, for it is made for the tensors of its model: copy (or save) "
            "the model, the optimizer and cbp, and make another with gxd.compiled_step"
        )

    def _new_recipe(self) -> Recipe:
        return Recipe(unwrap(self.model), self.optimizer, update_of(self.optimizer), self.loss, self.cbp, self.score)

    def _look(self) -> None:
        """Take note of what the model, the optimizer and the functions are now."""
        recipe = self._new_recipe()
        if not recipe.same_as(self._recipe):
            self._recipe = recipe
            self._programs.clear()
            self._watches.clear()
        if self._recipe.unfinished():
            self._watch = None  # an eager step gives the layers their shapes
            return
        known = next((watch for watch in self._watches if watch.unchanged()), None)
        if known is None:
            known = Watch(self._recipe)
            self._watches.append(known)
        self._watch = known
        why = _impossible(self.model, self.optimizer, self.cbp, self._recipe, known)
        if why is not None:
            self._fall_back(why)

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

    def _program(self, inputs: Any, target: Any) -> Program | None:
        """The program for this batch, or None if there is none."""
        assert self._watch is not None
        device = self._recipe.device()
        try:
            batch = (shape_of(inputs), shape_of(target))
        except TypeError as error:
            self._doubt = str(error)
            return None
        key = Key(
            batch,
            self._recipe.settings(),
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),
            self._watch,
            () if self.cbp is None else tuple([part.key for part, _ in self.cbp.watched()]),
        )
        program = self._programs.get(key)
        if program is None and len(self._programs) >= MOST_PROGRAMS:
            self._fall_back(self._too_many(key))
        elif program is None:
            program = self._make(inputs, target)
            if program is not None:
                self._programs[key] = program
        return program

    def _make(self, inputs: Any, target: Any) -> Program | None:
        assert self._watch is not None
        try:
            with self._watch.undone() as changed, _as_written():
                program = Program(self._recipe, inputs, target)
        except StateMissing:
            return None  # the eager step makes it
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            self._doubt = f"{type(error).__name__}: {lines[0]}"
            return None
        if changed and self._warm:
            self._fall_back(f"the step sets {changed[0]!r}, which a compiled step cannot do; return it instead")
        if changed:  # it may be set in the first pass alone: let an eager one come first
            self._warm = True
            return None
        return program

    def _too_many(self, key: Key) -> str:
        """What made so many programs necessary, and what to do about it."""
        keys = [*self._programs, key]
        number = {name: len({getattr(one, name) for one in keys}) for name in key._fields}
        most = max(number, key=lambda name: number[name])
        if most == "watch":
            names = keys[-2].watch.differences(keys[-1].watch)
            what = ", ".join(map(repr, names[:3]))
            return f"{what} has had {number[most]} values; keep it in a tensor, a buffer say, and change that in place"
        return {
            "batch": f"batches of more than {MOST_PROGRAMS} shapes; bring them to one shape, or drop the last",
            "options": f"the optimizer's options other than lr have had {number[most]} values; keep them as they are "
            "(a schedule of momentum: cycle_momentum=False)",
            "scored": f"the attached methods observe steps in {number[most]} combinations; let them observe the "
            "same ones (score_every, every)",
            "autocast": f"autocast has had {number[most]} settings; keep to one",
        }[most]

    def _fall_back(self, why: str) -> None:
        self.why_eager = why
        self._programs.clear()
        self._watches.clear()  # they keep what they have seen
        self._watch = None
        warn(f"compiled_step runs eagerly from here on: {why}", CompileWarning)


@contextmanager
def _as_written() -> Iterator[None]:
    """What is compiled by itself (``model.compile()``, a loss) runs as it was written: the step is compiled whole."""
    with torch.compiler.set_stance("force_eager"), torch._dynamo.config.patch(error_on_nested_fx_trace=False):
        yield


def _impossible(
    model: nn.Module, optimizer: Optimizer, cbp: Attachment | None, recipe: Recipe, watch: Watch
) -> str | None:
    """Why this training cannot be compiled as one function, if that is known beforehand."""
    several = cbp is not None and cbp.host.processes.several
    if several or isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return "several processes train together, and exchange gradients during the backward pass"
    if cbp is not None and cbp.scaler is not None:
        return "a GradScaler decides about each step on the host"
    before = cbp.acts_before_steps if cbp else None
    if before is not None:
        return f"{before} reads or rewrites gradients before the step of the optimizer"
    pulls = next((method.name for method in cbp.methods if method.output_gradient), None) if cbp else None
    if pulls is not None:
        return f"{pulls} reads gradients of the output by the parameters"
    hook = watch.foreign_hook(cbp.own_hooks if cbp else ())
    if hook is not None:
        return f"{hook}, which a compiled step would pass over; remove it, or make the step without compiled_step"
    replaced = cbp.host.tensors.replaced() if cbp else []
    if replaced:
        return f"{replaced[0]!r} was replaced after cbp was made: close() that one, and make another with a new plan"
    if recipe.foreign:
        return f"the optimizer trains {recipe.foreign} parameters that are not the model's"
    for method in cbp.methods if cbp is not None and recipe.update is None else ():
        if method.utility is not None and method.utility.gradient in (None, "loss"):
            return (
                f"the utility {method.utility.name!r} is scored after the step of the optimizer, and "
                f"{type(optimizer).__name__} steps by itself"
            )
    return None
