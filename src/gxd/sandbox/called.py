"""Models that are not called as ``model(...)``: agents without a forward, or with several ways to be run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_MISSING = object()


@contextmanager
def called_by(model: nn.Module, call: Callable[..., Any] | None) -> Iterator[None]:
    """Within this context, ``model(...)`` is ``call(model, ...)``. Inside of ``call``, the model is itself again.

    Args:
        call: ``lambda agent, x: (agent.actor(x), agent.critic(x))``; None: the model's own forward.
    """
    if call is None:
        yield
        return
    if not callable(call):
        raise TypeError(f"call must be a function of the model and its inputs, got {type(call).__name__}")
    own = vars(model)
    before = own.get("forward", _MISSING)

    def forward(*args: Any, **kwargs: Any) -> Any:
        _restore()
        try:
            return call(model, *args, **kwargs)
        finally:
            own["forward"] = forward

    def _restore() -> None:
        own.pop("forward", None)
        if before is not _MISSING:
            own["forward"] = before

    own["forward"] = forward
    try:
        yield
    finally:
        _restore()
