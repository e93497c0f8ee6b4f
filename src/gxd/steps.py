"""Which calls of ``optimizer.step()`` count: the outermost, unless a GradScaler made it for nothing."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

from torch import Tensor
from torch.optim import Optimizer

# What torch puts around the `step` of every class of optimizers, and what runs the hooks.
_STEP: CodeType = Optimizer.profile_hook_step(lambda: None).__code__


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
