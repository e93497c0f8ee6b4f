"""Small tables: as text for a screen, as HTML for a notebook."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

Rows = Sequence[Sequence[str]]
_STYLE = "text-align:left;vertical-align:top;padding:2px 10px 2px 0"


def text_table(header: Sequence[str], rows: Rows, rule: bool = True) -> list[str]:
    """The lines of a table, its columns as wide as they need to be."""
    every = [header, *rows]
    widths = [max(len(row[i]) for row in every) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in every]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]] if rule else lines


def html_table(header: Sequence[str], rows: Rows, title: str = "", notes: Sequence[str] = ()) -> str:
    """A table for ``_repr_html_``: a title, the rows, and notes below."""

    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f'<{tag} style="{_STYLE}">{escape(cell)}</{tag}>' for cell in cells) + "</tr>"

    parts = [f"<div><b>{escape(title)}</b></div>"] if title else []
    if rows:
        body = "".join(row(cells, "td") for cells in rows)
        parts.append(f"<table><thead>{row(header, 'th')}</thead><tbody>{body}</tbody></table>")
    parts += [f"<div><small>{escape(note)}</small></div>" for note in notes]
    return "<div>" + "".join(parts) + "</div>"


def shown(value: float, digits: int = 3) -> str:
    """A number in few characters; ``-`` for NaN."""
    return "-" if math.isnan(value) else f"{value:.{digits}g}"


def percent(value: float) -> str:
    """A share in percent; ``-`` for NaN."""
    if math.isnan(value):
        return "-"
    return f"{100 * value:.1f} %" if 0 < value < 0.0995 else f"{100 * value:.0f} %"
