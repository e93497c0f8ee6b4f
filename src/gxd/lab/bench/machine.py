"""The facts about the machine that numbers need beside them."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

import gxd

BUSY = 0.5
"""Load average, per torch thread and without ourselves, above which a machine is not quiet."""


def facts(device: str) -> dict[str, Any]:
    """Processor, threads, versions and load."""
    found: dict[str, Any] = {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device,
        "torch": torch.__version__,
        "gxd": gxd.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "load": load(),
    }
    if torch.device(device).type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def load() -> float | None:
    """The load average of the last minute, where the system tells."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def warning(found: float | None, clock: str, own: int = 0) -> str:
    """One line if others were at work too, else nothing. ``own`` is the load we cause ourselves."""
    if found is None or found - own <= BUSY:
        return ""
    whose = f", {own} of it ours" if own else ""
    remedy = "" if clock == "cpu" else ", or with --clock cpu"
    return (
        f"the machine is busy (load average {found:g}{whose}): times are too long and ratios rough; "
        f"run it again on a quiet machine{remedy}"
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"
