"""How much memory a function takes, as the allocator saw it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


def allocations(function: Callable[[], object], device: torch.device | str = "cpu") -> tuple[int, int]:
    """Bytes that ``function`` leaves behind, and the most it held at once, both beyond what was there before.

    On the CPU the profiler records every allocation, also inside operators; tracemalloc does not see them.
    """
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        function()
        torch.accelerator.synchronize()
        return torch.accelerator.memory_allocated() - before, torch.accelerator.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler greets on stderr otherwise
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [e for e in events if e["name"] == "[memory]"]
    held = peak = 0
    for event in sorted(changes, key=lambda e: (e["ts"], e["args"]["Ev Idx"])):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return held, peak
