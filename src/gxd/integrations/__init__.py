"""Callbacks for training frameworks, one file each. A framework is imported when its file is, and not before."""

from __future__ import annotations

import importlib
from typing import Any

_FRAMEWORKS = ("avalanche", "lightning", "stable_baselines3", "transformers")


def __getattr__(name: str) -> Any:
    if name in _FRAMEWORKS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; the frameworks are {', '.join(_FRAMEWORKS)}")
