"""Rows as a table on the screen, as markdown, as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gxd.lab.bench.measure import Row, Verdict

RIGHT = ("best", "ratio", "quartiles", "ready after")  # numbers


def cells(row: Row) -> dict[str, str]:
    """One row as text, by column."""
    return {
        "setting": row.setting,
        "variant": row.variant,
        "best": "" if row.value is None else f"{row.value:.4g} {row.unit}".strip(),
        "ratio": "" if row.ratio is None else f"{row.ratio:.2f}",
        "quartiles": " ".join(f"{q:.2f}" for q in row.quartiles or ()),
        "ready after": "" if row.ready is None else f"{row.ready:.1f} s",
        "target": "; ".join(map(_verdict, row.verdicts)),
        "note": row.note,
    }


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the rows, one table for each suite."""
    for title, columns in _tables(rows):
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for name in columns:
            table.add_column(name, justify="right" if name in RIGHT else "left", overflow="fold")
        for line in zip(*columns.values(), strict=True):
            table.add_row(*map(escape, line))
        console.print(table, "", highlight=False)


def markdown(rows: Sequence[Row], machine: dict[str, Any]) -> str:
    """The tables for a document, with the machine they were made on."""
    lines = [", ".join(f"{name} {value}" for name, value in machine.items() if value is not None) + "."]
    for title, columns in _tables(rows):
        rule = ("--:" if name in RIGHT else "---" for name in columns)
        lines += ["", f"### {title}", "", f"| {' | '.join(columns)} |", f"|{'|'.join(rule)}|"]
        for line in zip(*columns.values(), strict=True):
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |")
    return "\n".join(lines) + "\n"


def as_dict(row: Row) -> dict[str, Any]:
    """One row as JSON has it."""
    return {**asdict(row), "verdicts": [{**asdict(v), "met": v.met} for v in row.verdicts]}


def _verdict(verdict: Verdict) -> str:
    other = f" of {verdict.of}" if verdict.of else ""
    found = f" (is {verdict.found:.2f})" if verdict.of and verdict.found is not None else ""
    met = {True: "met", False: "not met", None: "not measured"}[verdict.met]
    return f"<= {verdict.limit:.2f}{other}{found}: {met}"


def _tables(rows: Iterable[Row]) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """For each suite a title and the columns that say something; a setting that all rows share stands in the title."""
    for suite, group in groupby(rows, key=lambda row: row.suite):
        lines = [cells(row) for row in group]
        columns = {name: [line[name] for line in lines] for name in lines[0]}
        title = suite
        if len(set(columns["setting"])) == 1:
            title = f"{suite}: {columns.pop('setting')[0]}"
        yield title, {name: column for name, column in columns.items() if any(column)}
