"""``gxd report``: a page about studies, beside the paper where they are of it, and the digest it can be made from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def command(argv: list[str]) -> int:
    """``gxd report DIR...``."""
    from gxd.lab.report.build import command as build

    return build(argv)


def demo_page(run_directories: Sequence[Path], out: Path) -> Path:
    """The page of ``gxd demo``: what happened, and why, in one picture, one table and three sentences."""
    from gxd.lab.report.demo import demo_page as make

    return make(run_directories, out)
