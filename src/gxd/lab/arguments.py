"""The options of a command: tyro reads them, and a mistake becomes one line instead of a box."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import redirect_stderr
from itertools import groupby
from typing import Any, TypeVar

import tyro
from rich.text import Text

from gxd.lab.errors import UserError

T = TypeVar("T")
EDGES = "│╭╮╰╯ \t"
# What tyro, or Python, calls the type of a value -> in words.
TYPES = {"[INT": "whole numbers", "[FLOAT": "numbers", "INT": "a whole number", "FLOAT": "a number"}
TYPES |= {"int()": TYPES["INT"], "to float": TYPES["FLOAT"]}


def parse(what: Callable[..., T], argv: list[str], prog: str, **options: Any) -> T:
    """``tyro.cli(what, args=argv, prog=prog)``, with :class:`UserError` for options that do not exist or do not fit."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(what, args=argv, prog=prog, **options)
    except SystemExit as end:
        if not end.code:  # --help
            raise
        raise UserError(f"{_one_line(said.getvalue())} See {prog} --help") from None


def _one_line(box: str) -> str:
    """The first paragraph of what tyro prints, and the option it suggests. (That it prints is all that is public:
    its events are marked as private, and may change with any release.)
    """
    lines = [line.strip(EDGES) for line in Text.from_ansi(box).plain.splitlines()[1:]]  # without the title
    lines = ["" if not line.strip("-─") else line for line in lines]  # a rule ends a paragraph, as an empty line does
    first, *rest = [list(part) for filled, part in groupby(lines, bool) if filled]
    message = " ".join(first).rstrip(".")
    if message.startswith("Error parsing "):
        return _misfit(message)
    near = [line.replace(",", " ").split()[0] for part in rest for line in part if line.startswith("--")]
    if "Unrecognized options" in message and near:
        return f"{message}. Did you mean {near[0]}?"
    return f"{message}."


def _misfit(message: str) -> str:
    """That a value does not fit its option, without the names of types."""
    option, _, said = message.removeprefix("Error parsing ").partition(": ")
    given = " ".join(re.findall("'([^']*)'", said)) or "this value"
    kind = next((words for name, words in TYPES.items() if name in said), None)
    return f"{option} does not take {given}." if kind is None else f"{option} {given} must be {kind}."
