"""The global random states, on the CPU: to give them back, and to draw without touching them."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def random_states() -> tuple[Any, Any, Any]:
    """Of torch, of Python, and of numpy if it is there."""
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state()


def set_random_states(states: tuple[Any, Any, Any]) -> None:
    """Go back to what :func:`random_states` has returned."""
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy = sys.modules.get("numpy")
    if numpy is not None and states[2] is not None:
        numpy.random.set_state(states[2])


class Apart:
    """A context in which global random numbers come from a stream of its own, that goes on when it is entered again."""

    def __init__(self) -> None:
        self.own = self.outside = random_states()

    def __enter__(self) -> None:
        self.outside = random_states()
        set_random_states(self.own)

    def __exit__(self, *exception: object) -> None:
        self.own = random_states()
        set_random_states(self.outside)
