"""The page docs/methods.md: what each registered method needs, changes and costs, and where it comes from.

``python -m gxd.lab.method_page COSTS PAGE`` writes it. All but the costs follows from the registry; the costs are what
``gxd bench methods --json COSTS`` has measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import gxd
from gxd.lab.bench.methods import BOUNDARY, EVERY_STEP, KEPT, acts_at_boundaries
from gxd.lab.methods import PAPER, registered
from gxd.lab.store import write_bytes

HEAD = """# Methods

Written by `make methods`: all but the costs follows from the registry, `gxd.methods()`. The options of a method, with
the values of its paper and each deviation from it, are in its docstring: `help(gxd.methods()[name].make)`.

- **needs**: *units*: `example_inputs`, or a plan from `gxd.find_units`; *observe*: `attached.observe(logits, target)`
  in every pass; *gradients*: of the loss, in or after its backward pass; *boundaries*: `attached.boundary()` when a
  task ends; *data*: of the new task, there; *initial weights*: a copy is kept. What acts on gradients before the
  optimizer's step makes `gxd.compiled_step` eager.
- **step**: the time of a training step relative to plain backprop, with the defaults. **event**: how many steps of
  backprop it takes to act once: when a task ends, or every so many steps. **memory**: what is kept between two steps,
  relative to backprop's model, gradients and optimizer.
"""
VARIANTS = ("", f", {BOUNDARY}", f", {EVERY_STEP}", f", {KEPT}")  # of a method, in the benchmark


def render(costs: Mapping[str, Any]) -> str:
    """The page, with these costs: what ``gxd bench methods --json`` writes, or nothing."""
    ratios = {row["variant"]: row["ratio"] for row in costs.get("rows", ()) if row["suite"] == "methods"}
    setting = next((row["setting"] for row in costs.get("rows", ()) if row["suite"] == "methods"), None)
    machine = ", ".join(f"{name} {value}" for name, value in costs.get("machine", {}).items() if value is not None)
    lines = [HEAD, f"Measured on {setting}: {machine}.\n"] if setting else [HEAD]
    lines += [
        "| method | what it does | needs | changes | step | event | memory | source |",
        "|---|---|---|---|--:|--:|--:|---|",
    ]
    for name, info in gxd.methods().items():
        cells = [f"`{name}`", _about(name), _needs(name), _changes(name), *_costs(name, ratios), info.reference]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _about(name: str) -> str:
    papers = f"; with its default utility it is the rule of the paper, in the lab `{PAPER}`"
    return gxd.methods()[name].description + (papers if name == registered(PAPER) else "")


def listed(page: str) -> list[str]:
    """The methods that a page has a row for, in its order."""
    return [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]


def _needs(name: str) -> str:
    method = gxd.method(name)
    loss = method.utility is not None and method.utility.gradient in ("loss", "weights")
    found = {
        "units": method.needs_units,
        "observe": method.needs_observe,
        "gradients": loss or type(method).before_step is not gxd.Method.before_step,
        "boundaries": acts_at_boundaries(name),
        "data": method.needs_data,
        "initial weights": _keeps_initial_weights(method),
    }
    also = gxd.methods()[name].needs
    return ", ".join([*(what for what, needed in found.items() if needed), *([also] if also else [])]) or "nothing"


def _changes(name: str) -> str:
    """What the registry says, or what follows from the functions that a method has."""
    if gxd.methods()[name].changes:
        return gxd.methods()[name].changes
    method, waits = gxd.method(name), acts_at_boundaries(name)
    found = {
        "units": method.needs_units,
        "gradients": type(method).before_step is not gxd.Method.before_step,
        "weights when a task ends": waits,  # and counts steps until then
        "weights": not (waits or method.needs_units) and type(method).after_step is not gxd.Method.after_step,
    }
    return ", ".join(what for what, changed in found.items() if changed)


def _costs(name: str, ratios: Mapping[str, float | None]) -> list[str]:
    """Time per step, steps per event, memory; empty where it was not measured."""
    step, boundary, each, memory = (ratios.get(name + suffix) for suffix in VARIANTS)
    event = boundary if boundary is not None else None if each is None else max(each - 1.0, 0.0)
    return ["" if cost is None else f"{cost:.2f}" for cost in (step, event, memory)]


def _keeps_initial_weights(method: gxd.Method) -> bool:
    """Whether its state still has them when the weights have moved on."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3))
        x, y = torch.randn(8, 4), torch.arange(8) % 3
    initial = [p.detach().clone() for p in model.parameters() if p.dim() > 1]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        attached = gxd.attach(model, optimizer, method, example_inputs=x if method.needs_units else None)
    except (TypeError, ValueError, gxd.PlanError):  # it treats other models
        return False
    for _ in range(2):
        logits = model(x)
        attached.observe(logits, y)
        F.cross_entropy(logits, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = [value for value in tree_leaves(attached.state_dict()["methods"]) if isinstance(value, Tensor)]
    return any(one.shape == other.shape and torch.equal(one, other) for one in kept for other in initial)


def main(argv: list[str]) -> int:
    """Write the page."""
    if len(argv) != 2:
        print("usage: python -m gxd.lab.method_page COSTS.json PAGE.md", file=sys.stderr)
        return 2
    costs, page = map(Path, argv)
    write_bytes(page, render(json.loads(costs.read_text()) if costs.exists() else {}).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
