"""``gxd bench``: what a training step costs, relative to plain eager backprop of the same model."""

from __future__ import annotations

import difflib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console

from gxd.lab.arguments import parse
from gxd.lab.bench import machine, methods, suites, table, whole
from gxd.lab.bench.measure import Row
from gxd.lab.errors import UserError
from gxd.lab.run import find_device
from gxd.lab.store import write_bytes, write_json

SUITES: dict[str, Callable[[suites.Scope], Iterator[list[Row]]]] = {
    "mlp": suites.mlp,
    "resnet": suites.resnet,
    "resnet18": suites.resnet18,
    "vit": suites.vit,
    "scaling": suites.scaling,
    "resets": suites.resets,
    "memory": whole.memory,
    "methods": methods.methods,
    "loop": whole.loop,
    "assay": whole.assay,
}
DEFAULT = ("mlp", "resnet", "resets", "memory")


@dataclass(frozen=True)
class Options:
    """What a step costs, relative to plain eager backprop of the same model.

    Variants take turns in short blocks in one process. The ratio is that of the best blocks; the quartiles are those of
    the ratios within each round.
    """

    suites: Annotated[tuple[str, ...], tyro.conf.Positional] = DEFAULT
    """mlp, resnet, resnet18, vit, scaling, resets, memory, methods, loop, assay, or all."""
    quick: bool = False
    """Fewer rounds and fewer variants."""
    rounds: int | None = None
    """Blocks of each variant. Default: what the suite thinks right."""
    only: tuple[str, ...] = ()
    """Patterns of the variants to time, such as 'gxd*'. Plain backprop is always there."""
    threads: int = 1
    """CPU threads of torch."""
    clock: Literal["wall", "cpu"] = "wall"
    """wall: what a user waits for. cpu: processor time, which other programs on a busy machine disturb less."""
    device: str = "cpu"
    """Where to train: cpu, cuda, mps."""
    json: Path | None = None
    """Write the numbers here, as JSON."""
    markdown: Path | None = None
    """Write the tables here, as markdown."""


def command(argv: list[str]) -> int:
    """Run ``gxd bench``."""
    options = parse(Options, argv, "gxd bench", config=(tyro.conf.FlagCreatePairsOff,))
    chosen = _check(options)
    console = Console(width=None if sys.stdout.isatty() else 160)
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        facts = {**machine.facts(options.device), "clock": options.clock}
        console.print(", ".join(f"{name} {value}" for name, value in facts.items()), highlight=False)
        _warn(machine.warning(facts["load"], options.clock))
        began = time.perf_counter()
        rows: list[Row] = []
        clock = time.process_time if options.clock == "cpu" else time.perf_counter
        scope = suites.Scope(options.quick, options.rounds, options.only, options.device, clock)
        for name in chosen:
            print(f"{name} ...", file=sys.stderr)
            for part in _guarded(name, SUITES[name](scope)):
                table.show(part, console)
                rows += part
                facts["load_after"], facts["seconds"] = machine.load(), round(time.perf_counter() - began, 1)
                _save(options, facts, rows)
    finally:
        torch.set_num_threads(before)
    if facts["seconds"] > 60:  # a load average is of the last minute: of it, as many as we have threads are ours
        _warn(machine.warning(facts["load_after"], options.clock, own=options.threads))
    return int(any(row.note.startswith("failed") for row in rows))


def _guarded(name: str, parts: Iterator[list[Row]]) -> Iterator[list[Row]]:
    """The parts of a suite; if it fails, a row that says so, and the next suite has its turn."""
    try:
        yield from parts
    except (UserError, OSError):
        raise
    except Exception as error:
        yield [Row(name, "", "", note=f"failed: {type(error).__name__}: {error}")]


def _save(options: Options, facts: dict[str, Any], rows: list[Row]) -> None:
    """Write what there is so far: an interrupted benchmark keeps what it has measured."""
    if options.json is not None:
        write_json(options.json, {"machine": facts, "rows": [table.as_dict(row) for row in rows]})
    if options.markdown is not None:
        write_bytes(options.markdown, table.markdown(rows, facts).encode())


def _check(options: Options) -> tuple[str, ...]:
    """The suites to run. Everything that can be wrong is found before minutes are spent."""
    chosen = tuple(SUITES) if "all" in options.suites else tuple(dict.fromkeys(options.suites))
    for name in chosen:
        if name not in SUITES:
            near = difflib.get_close_matches(name, SUITES, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UserError(f"unknown suite {name!r}.{hint} There are {', '.join(SUITES)}, and all")
    for field, value in (("threads", options.threads), ("rounds", options.rounds)):
        if value is not None and value < 1:
            raise UserError(f"{field}={value} must be a whole number, 1 or more")
    alone = find_device(options.device).type == "cpu" and options.threads == 1
    if options.clock == "cpu" and not alone:
        raise UserError("--clock cpu is for one thread on the CPU: it would not see a GPU, and add threads up")
    for path in (options.json, options.markdown):
        if path is not None and not path.resolve().parent.is_dir():
            raise UserError(f"{path}: there is no directory {path.parent}; make it first")
        if path is not None and path.is_dir():
            raise UserError(f"{path} is a directory: name a file in it")
    return chosen


def _warn(text: str) -> None:
    if text:
        print(f"gxd bench: {text}", file=sys.stderr)
