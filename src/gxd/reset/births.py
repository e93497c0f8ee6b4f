"""The incoming weights of a newborn unit: which direction, and how long."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gxd import arguments

HE = math.sqrt(2.0)
"""Length of a row of weights that are drawn with He's standard deviation, ``sqrt(2 / fan_in)``."""
NAMES = ("fresh", "initial", "he")

# (n, fan_in) fresh rows, (m, fan_in) the rows of the units that live on, a generator -> (n, fan_in)
Birth = Callable[[Tensor, Tensor, torch.Generator], Tensor]


def check(incoming: Any) -> None:
    """Raise unless this is what :class:`gxd.Reset` takes as ``incoming``."""
    allowed = f"{', '.join(map(repr, NAMES))}, a length above 0, or a function (fresh, living, generator) -> rows"
    if isinstance(incoming, str):
        if incoming not in NAMES:
            raise ValueError(f"incoming={incoming!r} is not one of {allowed}{arguments.near(incoming, NAMES)}")
    elif isinstance(incoming, (int, float)) and not isinstance(incoming, bool):
        if not 0 < incoming < math.inf:
            raise ValueError(f"incoming={incoming!r} is not one of {allowed}")
    elif not callable(incoming):
        raise TypeError(f"incoming={incoming!r} is not one of {allowed}")


def needs_living(incoming: Any) -> bool:
    """Whether the rows of the units that live on are looked at."""
    return callable(incoming)


def born(incoming: Any, fresh: Tensor, living: Tensor | None, generator: torch.Generator) -> Tensor:
    """``(n, fan_in)`` the incoming weights of ``n`` newborn units.

    ``"he"`` and a number are random directions of that length, whatever the layer began with.

    Args:
        fresh: ``(n, fan_in)`` drawn from the distribution that the layer began with.
        living: ``(m, fan_in)`` the rows of the layer's other units, for a function.
        generator: of the directions.
    """
    if incoming in ("fresh", "initial"):
        return fresh
    if callable(incoming):
        return _made(incoming, fresh, living, generator)
    length = HE if incoming == "he" else float(incoming)
    direction = torch.empty(fresh.shape).normal_(generator=generator)
    return direction * (length / direction.norm(dim=1, keepdim=True))


def _made(function: Birth, fresh: Tensor, living: Tensor | None, generator: torch.Generator) -> Tensor:
    assert living is not None
    called = f"incoming={getattr(function, '__name__', function)!r}"
    try:
        rows = function(fresh.clone(), living, generator)
    except Exception as error:
        raise ValueError(
            f"{called} failed on {tuple(fresh.shape)} fresh rows beside {tuple(living.shape)} living ones: "
            f"{type(error).__name__}: {error}. Nothing was reset"
        ) from error
    if not isinstance(rows, Tensor) or rows.shape != fresh.shape:
        got = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(f"{called} must return rows of shape {tuple(fresh.shape)}, got {got}. Nothing was reset")
    if not bool(rows.isfinite().all()):
        raise ValueError(f"{called} returned weights that are not finite. Nothing was reset")
    return rows.detach().float().cpu()
