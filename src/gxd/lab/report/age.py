"""The page of the age study: whom do resets reach, is that why utilities fail, and which rule mends it?

``python -m gxd.lab.report.age RUNS... --out age`` reads the runs of the sweeps ``age-digits``, ``age-mnist``,
``age-mnist-long`` and ``age-resnet``, as far as they are, and writes ``index.html``, a figure per stream and rate, one
of all that GXD gains, and the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from gxd.lab.errors import UserError
from gxd.lab.report import digest, page
from gxd.lab.report.age_figure import forest, picture
from gxd.lab.report.age_results import collect, rates_of, reported, write_digest
from gxd.lab.report.age_tables import (
    against_paper,
    by_maturity,
    by_reach,
    by_rule,
    chosen_table,
    overview,
    settings_table,
    tally,
)
from gxd.lab.report.page import Block, Section


@dataclass(frozen=True)
class Options:
    """The tables and the figure of the age study, from its runs as far as they are."""

    directories: tyro.conf.Positional[tuple[Path, ...]]
    """Where the runs of the sweeps are, or results/age, the digest of ours."""
    out: Path = Path("age-report")
    """Where the page, the figures and the tables go."""


def write(directories: Sequence[Path], out: Path) -> Path:
    """Write the page and what belongs to it into ``out``; return the path of the page."""
    found = collect(directories)
    if not any(reported(by_seed) for by_seed in found.values()):
        raise UserError(f"no run below {', '.join(map(str, directories))} is over: {digest.REMEDY}")
    out.mkdir(parents=True, exist_ok=True)
    streams = list(dict.fromkeys(setting.stream for setting in found))
    shown_at = [(stream, rate) for stream in streams for rate in rates_of(found, stream)]
    first, *more = (picture(found, *one) for one in shown_at)
    pictures = [first, *forest(found, "gxd"), *more]
    compared = [against_paper(found), by_maturity(found)]
    made = [
        by_reach(found),
        by_rule(found),
        *(overview(found, *one) for one in shown_at),
        *compared,
        chosen_table(found),
    ]
    made = [table for table in (*made, settings_table(found)) if table.rows]  # of one seed there is no comparison
    shown = page.save_pictures(pictures, out)
    page.save_tables(made, out)
    write_digest(found, out)
    every = [result for by_seed in found.values() for result in by_seed.values()]
    hours = sum(result.seconds for result in every) / 3600
    blocks = [Block(picture=one) for one in shown.values()]
    blocks += [Block(table=table, kind="dense wide", fold=len(table.rows) > 40) for table in made]
    texts = [tally(table) for table in compared if table.rows]
    index = out / "index.html"
    lead = f"{len(every)} runs, {hours:.1f} hours of computing on one core."
    index.write_text(
        page.render(
            "Newborn churn, and reach",
            lead,
            [],
            [Section("found", "What was found", texts, blocks)],
            made_by="gxd",
        ),
        encoding="utf-8",
    )
    return index


if __name__ == "__main__":
    options = tyro.cli(Options, prog="python -m gxd.lab.report.age")
    try:
        print(write(options.directories, options.out))
    except UserError as error:
        raise SystemExit(f"gxd: {error}") from None
