"""Hooks on the modules of a model, which tell their owner of its forward passes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from gxd.errors import CompileWarning, ObservationWarning, warn

if TYPE_CHECKING:
    from gxd.observe.captures import Observer


class Owner:
    """Whom hooks tell of forward passes: an observer of units, or of outputs.

    Attributes:
        active: whether it wants to know.
        told_of_compiler: that the model is compiled, which a warning has said.
        fleeting: the names of attributes that belong to the graph of a pass, which is not copied.
    """

    active = True
    told_of_compiler = False
    fleeting: tuple[str, ...] = ()

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        """For the copy of the model: its hooks, which were copied with it or will be, become those of this copy."""
        copied = memo[id(self)] = object.__new__(type(self))
        for hook in memo.pop(("hooks of", id(self)), ()):
            hook.observer = copied
        state = {name: value for name, value in vars(self).items() if name not in self.fleeting}
        vars(copied).update(copy.deepcopy(state, memo))
        copied.clear()
        return copied

    def clear(self) -> None:
        """Forget the passes so far."""


NOTHING = nullcontext.__exit__  # a function that takes anything and does nothing, and is there without gxd


class LeftOut:
    """A hook that is not in a pickle of the module it hangs on, nor in a copy."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The pickle has an entry for it all the same, because the dict that holds it is the module's own.
        return getattr, (nullcontext, NOTHING.__name__)


class Plain(LeftOut):
    """A function as a hook."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *call: Any) -> Any:
        return self.function(*call)


class Hook(LeftOut):
    """A hook that tells an observer of the passes of one module. A deep copy of the module has it, too: inert, unless
    the observer is copied along.
    """

    always = False  # or only while the observer is active
    # Whether it acts on what a backward pass recomputes, too: reentrant checkpointing makes its gradients there.
    recomputed = False

    def __init__(self, observer: Any, module: nn.Module) -> None:
        self.observer, self.module = observer, module

    def __deepcopy__(self, memo: dict[Any, Any]) -> Hook:
        copied = memo[id(self)] = object.__new__(type(self))
        vars(copied).update(vars(self), module=memo.get(id(self.module)), observer=memo.get(id(self.observer)))
        if copied.observer is None:  # not copied yet, or not at all
            memo.setdefault(("hooks of", id(self.observer)), []).append(copied)
        elif copied.module is None:
            copied.module = copy.deepcopy(self.module, memo)
        return copied

    def __call__(self, module: nn.Module, *call: Any) -> Any:
        """Act, but only in training passes of the module itself: not in evaluation, not when acting without gradients,
        not inside a transform of torch.func, and of what a backward pass recomputes only what had no gradients before.
        """
        observer = self.observer
        if observer is None:
            return None
        if torch.compiler.is_compiling():  # by export, which must not see us, or by dynamo, which must stop here
            return None if torch.compiler.is_exporting() else _outside_the_graph(self, module, call)
        if (
            not (observer.active or self.always)
            or module is not self.module
            or not module.training
            or not torch.is_grad_enabled()
            or (torch._C._current_graph_task_id() != -1 and not (self.recomputed and is_recomputed_with_gradients()))
            or torch._C._functorch.maybe_current_level() is not None
        ):
            return None
        return self.act(observer, *call)

    def act(self, observer: Any, *call: Any) -> Any:
        raise NotImplementedError


def is_recomputed_with_gradients() -> bool:
    """Whether a forward pass inside a backward pass makes the gradients of its segment, as reentrant checkpointing
    does. Otherwise (``use_reentrant=False``) only the saved tensors are made again, which has been seen before.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is None or "_recomputation_hook" not in getattr(hooks[0], "__qualname__", "")


@torch.compiler.disable
def _outside_the_graph(hook: Hook, module: nn.Module, call: tuple[Any, ...]) -> Any:
    """A compiled model is left here: observe() differentiates by tensors between the layers, and those inside a graph
    are never made. Nor can a hook that has nothing to do be compiled away, for dynamo does not look at hooks again.
    """
    if hook.observer is not None and not hook.observer.told_of_compiler:
        hook.observer.told_of_compiler = True
        warn(
            "the model runs through torch.compile, which has to leave its graph at every layer that is observed: most "
            "of what it could fuse is lost (all of it in an nn.Sequential). The results are right. To have the whole "
            "training step compiled, observation included, use gxd.compiled_step; or do without torch.compile",
            CompileWarning,
        )
    return hook(module, *call)


class Begin(Hook):
    """The model is called. Its owner wants to know it on steps that are not scored, too."""

    always = True

    def act(self, observer: Observer, *call: Any) -> None:
        observer.begin(*call)


class End(Hook):
    """The model has returned."""

    def act(self, observer: Observer, *call: Any) -> None:
        observer.end()


class Unseen(Hook):
    """A module is called that the trace did not see: say so once."""

    always = True

    def __init__(self, observer: Observer, module: nn.Module, name: str) -> None:
        super().__init__(observer, module)
        self.name, self.told = name, False

    def act(self, observer: Observer, *call: Any) -> None:
        if not self.told:
            self.told = True
            warn(
                f"{self.name!r} runs in training, but did not when the model was traced, so the plan does not know "
                "what it reads: a reset leaves it connected to the fresh units (its columns are not zeroed). Trace "
                "all that training runs: example_inputs may be a list of calls",
                ObservationWarning,
            )
        if get_proxy_mode() is None:  # after a compiled step is traced, all hooks are put back
            observer.unseen.pop(self.name).remove()
