"""The steps of optimizers as they come, wrapped, nested, or made without ``Optimizer.__init__``: how to learn of them,
and which count.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable
from types import CodeType, FrameType, MethodType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gxd.reset.optimizers import directly_inside

_DICTS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
# What torch puts around the `step` of every class of optimizers, and what runs the hooks.
_STEP: CodeType = Optimizer.profile_hook_step(lambda: None).__code__


def stepping(optimizer: Any, around: tuple[Any, ...] = ()) -> Any:
    """The optimizer to hook so as to learn that this one has stepped. Raises TypeError if there is none.

    A wrapper that only passes calls on (its state is that of the optimizer inside) may be called without a step being
    made: the optimizer inside is hooked. One that has a state of its own takes part in the step, and is hooked itself.

    Args:
        around: the wrappers that were opened on the way here.
    """
    if _has_hooks(optimizer):
        return optimizer
    inside, state = directly_inside(optimizer), getattr(optimizer, "state", None)
    if isinstance(optimizer, Optimizer) and not any(one.state is state for one in inside):
        return optimizer
    around = (*around, optimizer)
    for one in reversed(inside):  # of several, the last to step
        if not any(one is wrapper for wrapper in around):
            return stepping(one, around)
    raise TypeError(
        f"the optimizer {type(optimizer).__name__} has no step hooks (register_step_post_hook), and there is no "
        "torch.optim.Optimizer inside it: give the optimizer that updates the parameters"
    )


def after_steps(optimizer: Any, function: Callable[..., None]) -> list[Any]:
    """Call a function after every step of an optimizer; returns handles with ``remove()``."""
    optimizer = stepping(optimizer)
    made = [] if _has_hooks(optimizer) else [_Hooked(optimizer)]
    return [optimizer.register_step_post_hook(function), *made]


def before_steps(optimizer: Any, function: Callable[[Any], None]) -> list[Any]:
    """Call a function before every step of an optimizer, when the gradients are there: with a closure, after each call
    of it. Returns handles with ``remove()``.
    """

    def before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_nested(optimizer):  # a step that calls its parent's: the outer one has done it
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None:
            function(optimizer)
            return None

        def then() -> Any:
            loss = closure()
            function(optimizer)
            return loss

        return ((args[0], then, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": then})

    optimizer = stepping(optimizer)
    made = [] if _has_hooks(optimizer) else [_Hooked(optimizer)]
    return [optimizer.register_step_pre_hook(before), *made]


def take_away(hook: Any, in_hook: bool) -> None:
    """Remove a hook. Torch fails if one goes while it calls them, as when ``on_reset`` closes the attachment: then
    something that does nothing takes its place.
    """
    hooks = hook.hooks_dict_ref() if in_hook and isinstance(hook, RemovableHandle) else None
    if hooks is None:
        hook.remove()
    elif hook.id in hooks:
        hooks[hook.id] = _nothing


def _nothing(*_: Any) -> None:
    pass


def _has_hooks(optimizer: Any) -> bool:
    """Whether step hooks can be registered, and will be called."""
    if not isinstance(optimizer, Optimizer):
        return callable(getattr(type(optimizer), "register_step_post_hook", None))
    return _calls_hooks(optimizer) and all(name in vars(optimizer) for name in _DICTS)


def _calls_hooks(optimizer: Optimizer) -> bool:
    """Whether ``step`` calls hooks: torch makes it do so for a class when ``Optimizer.__init__`` makes the first of its
    instances, or ``zero_grad`` meets one that was made without.
    """
    return any(getattr(step, "hooked", False) for step in (type(optimizer).step, vars(optimizer).get("step")))


class _Hooked:
    """Gives one optimizer what ``Optimizer.__init__`` would have: hooks around its ``step``.

    Not around that of its class, as torch does: others of the class that were made without hooks would fail.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        own = vars(optimizer)
        self.before = {name: own[name] for name in (*_DICTS, "step") if name in own}
        self.added: dict[str, Any] = {name: OrderedDict() for name in _DICTS if name not in own}
        if not _calls_hooks(optimizer):
            step = optimizer.step

            @functools.wraps(step)
            def within(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
                return step(*args, **kwargs)

            function = Optimizer.profile_hook_step(within)
            function.hooked = True  # type: ignore[attr-defined]
            self.added["step"] = MethodType(function, optimizer)
        own.update(self.added)

    def remove(self) -> None:
        """Take it away again, unless others have built on it: their hooks, a learning rate scheduler's ``step``."""
        own = vars(self.optimizer)
        if all(own.get(name) is value for name, value in self.added.items()) and not any(own[n] for n in _DICTS):
            for name in self.added:
                del own[name]
            own.update(self.before)


def is_nested(optimizer: Optimizer) -> bool:
    """Whether the hook that asks was called by a step inside another step that will call it again.

    An optimizer whose ``step`` calls its parent's runs its hooks twice, but only if torch has put them around the
    parent's, too, which it does when the first instance of a class is made. The call stack tells the two apart, and
    a step that raised leaves nothing there.
    """
    hooks = getattr(optimizer, "_optimizer_step_post_hooks", None)
    steps = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and steps < 2:
        code = frame.f_code  # another object than _STEP where the step is compiled
        if code.co_name == _STEP.co_name and code.co_filename == _STEP.co_filename:
            stepped = frame.f_locals["args"][0]  # this optimizer, or one around it that shares its hooks
            steps += getattr(stepped, "_optimizer_step_post_hooks", None) is hooks
        frame = frame.f_back
    return steps > 1


def was_skipped(optimizer: Optimizer) -> bool:
    """A fused optimizer is called by the GradScaler even when it shall not step."""
    found_inf = getattr(optimizer, "found_inf", None)
    return isinstance(found_inf, Tensor) and bool(found_inf.item())
