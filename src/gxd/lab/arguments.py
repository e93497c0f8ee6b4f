"""The options of a command: tyro reads them, and a mistake becomes one line instead of a box."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any, TypeVar

import tyro

from gxd.lab.errors import UserError

T = TypeVar("T")


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
    """The first paragraph of what tyro prints, and the options it suggests."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip("│╭╮╰╯ \t") for line in box.strip().splitlines()]
    lines = ["" if not line.strip("-─") else line for line in lines]  # rules; boxes are drawn in ASCII where need be
    paragraphs = [part.split("\n") for part in re.split(r"\n{2,}", "\n".join(lines[1:]).strip())]  # without the title
    message = " ".join(" ".join(paragraphs[0]).split()).rstrip(".")
    near = [line for part in paragraphs[1:] for line in part if line.startswith("--")]
    if "Unrecognized options" in message and near:
        return f"{message}. Did you mean {re.split(r'[ ,]', near[0])[0]}?"
    return f"{message}."
