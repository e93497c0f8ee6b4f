"""Observing what a module returns, in a hook on it: for loops that hide the logits between forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gxd import arguments
from gxd.errors import ObservationError
from gxd.observe.hooks import Hook, Owner

if TYPE_CHECKING:
    from gxd.attachment import Attachment

# What to take from a call of a module: its arguments, its keyword arguments, and what it has returned.
Take = Callable[[tuple[Any, ...], dict[str, Any], Any], Any]


class OutputObserver(Owner):
    """What :meth:`gxd.Attachment.observe_output` returns: ``remove()`` it, or close the attachment.

    Args:
        attached: whose ``observe`` is called.
        module: whose output is observed: a module, its name in the model, or None for the model itself.
        select, target, defer: as for :meth:`gxd.Attachment.observe_output`.
    """

    fleeting = ("waiting",)

    def __init__(
        self,
        attached: Attachment,
        module: nn.Module | str | None,
        select: Take | None,
        target: Take | None,
        defer: bool,
    ) -> None:
        model = attached.model
        self.attached, self.select, self.target, self.defer = attached, select, target, defer
        self.name = module if isinstance(module, str) else type(model if module is None else module).__name__
        for name, function in (("select", select), ("target", target)):
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be a function of (args, kwargs, output), got {type(function).__name__}")
        arguments.switch("defer", defer)
        watched = submodule(model, module)
        self.handles = [watched.register_forward_hook(Returned(self, watched), with_kwargs=True)]
        if watched is not model:
            self.handles.append(model.register_forward_hook(Over(self, model)))
        self.waiting: list[tuple[Any, Mapping[str, Any]]] = []

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """The module has returned. Inside a pass of the whole model the observation waits for its end."""
        if not self.attached.awaits_output:  # paused, or not a step to be scored
            return
        found = logits_in(output) if self.select is None else self.select(args, kwargs, output)
        if found is None:
            return
        if not isinstance(found, Mapping):
            target = kwargs.get("labels") if self.target is None else self.target(args, kwargs, output)
            found = {"logits": found, "target": target}
        scorers = [scorer for _, scorer in self.attached.watched() if scorer.utility.needs_observe]
        running = next((scorer.observer.passes[-1] for scorer in scorers if scorer.observer.running), None)
        if not self.defer:  # what waits from another pass is of one that has raised
            self.waiting = [entry for entry in self.waiting if entry[0] is running]
        self.waiting.append((running, found))
        if running is None:
            self.over()

    def over(self) -> None:
        """The pass of the whole model is complete."""
        if not self.defer:
            self.observe()

    def observe(self) -> int:
        """Observe what waits for it, and return how many outputs that were."""
        waiting, self.waiting = self.waiting, []
        passes = [id(running) for running, _ in waiting if running is not None]
        if len(set(passes)) < len(passes):
            raise ObservationError(
                f"observe_output(): {self.name!r} was called several times in one forward pass of the model, which is "
                "observed once: observe a module that is called once, or the model's output (module=None)"
            )
        for _, found in waiting:
            output = next((value for value in found.values() if isinstance(value, Tensor)), None)
            kind = "cpu" if output is None else output.device.type
            # A backward pass is not run under autocast, whatever the forward pass was.
            with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else torch.enable_grad():
                self.attached.observe(**found)
        return len(waiting)

    def clear(self) -> None:
        """Forget what waits."""
        self.waiting = []

    def remove(self) -> None:
        """Observe no more."""
        for handle in self.handles:
            handle.remove()
        self.clear()


class Returned(Hook):
    """The module has returned."""

    def act(self, observer: OutputObserver, *call: Any) -> None:
        observer.take(*call)


class Over(Hook):
    """The model that the module is a part of has returned."""

    def act(self, observer: OutputObserver, *call: Any) -> None:
        observer.over()


def submodule(model: nn.Module, module: nn.Module | str | None) -> nn.Module:
    """A module of a model, by name; one that is given itself; or the model. Raises ValueError for an unknown name."""
    if module is None or isinstance(module, nn.Module):
        return model if module is None else module
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    if not isinstance(module, str):
        raise TypeError(f"module must be a module, its name or None, got {type(module).__name__}")
    if module not in names:
        near = arguments.near(module, names) or f". Its parts are {', '.join(map(repr, dict(model.named_children())))}"
        raise ValueError(f"{type(model).__name__} has no module {module!r}{near}")
    return model.get_submodule(module)


def logits_in(output: Any, remedy: str = "select=lambda args, kwargs, output: ...") -> Tensor:
    """The tensor that a model returns, or its ``logits``. Raises TypeError, with a remedy, if there is neither."""
    found = getattr(output, "logits", output.get("logits") if isinstance(output, Mapping) else output)
    if not isinstance(found, Tensor):
        raise TypeError(
            f"the model returns a {type(output).__name__} without logits: say which tensor counts, {remedy}"
        )
    return found
