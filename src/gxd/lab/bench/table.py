"""Rows as a table on the screen, as markdown, as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from gxd.lab.bench.measure import Row, Verdict

HEADER = ("variant", "best", "ratio", "quartiles", "ready after", "target", "note")


def cells(row: Row) -> tuple[str, ...]:
    """One row as text, in the order of ``HEADER``."""
    quartiles = f"{row.quartiles[0]:.2f} {row.quartiles[1]:.2f} {row.quartiles[2]:.2f}" if row.quartiles else ""
    return (
        row.variant,
        "" if row.value is None else f"{row.value:.4g} {row.unit}",
        "" if row.ratio is None else f"{row.ratio:.2f}",
        quartiles,
        "" if row.ready is None else f"{row.ready:.1f} s",
        "; ".join(map(_verdict, row.verdicts)),
        row.note,
    )


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the rows, a table for each setting."""
    for title, part in _by_setting(rows):
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for name in HEADER:
            table.add_column(name, justify="right" if name in HEADER[1:5] else "left", overflow="fold")
        for row in part:
            table.add_row(*cells(row))
        console.print(table)
        console.print()


def markdown(rows: Sequence[Row], machine: dict[str, Any]) -> str:
    """The tables for a document, with the machine they were made on."""
    lines = [", ".join(f"{name} {value}" for name, value in machine.items() if value is not None) + ".", ""]
    for title, part in _by_setting(rows):
        lines += [f"### {title}", "", f"| {' | '.join(HEADER)} |", "|---|--:|--:|--:|--:|---|---|"]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row)) + " |" for row in part]
        lines.append("")
    return "\n".join(lines)


def as_dict(row: Row) -> dict[str, Any]:
    """One row as JSON has it."""
    return {**asdict(row), "verdicts": [{**asdict(v), "met": v.met} for v in row.verdicts]}


def _verdict(verdict: Verdict) -> str:
    other = f" of {verdict.of}" if verdict.of else ""
    found = f" (is {verdict.found:.2f})" if verdict.of and verdict.found is not None else ""
    met = {True: "met", False: "not met", None: "not measured"}[verdict.met]
    return f"<= {verdict.limit:.2f}{other}{found}: {met}"


def _by_setting(rows: Iterable[Row]) -> Iterable[tuple[str, list[Row]]]:
    for (suite, setting), part in groupby(rows, key=lambda row: (row.suite, row.setting)):
        yield f"{suite}: {setting}", list(part)
