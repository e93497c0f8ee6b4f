"""The page of the age study: is newborn churn what makes utilities fail, and which rule mends it?

``python -m gxd.lab.report.age RUNS... --out docs/age`` reads the runs of the sweeps ``age-digits`` and
``age-mnist``, as far as they are, and writes ``index.html``, a figure per stream, and the tables.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from gxd.lab.errors import UserError
from gxd.lab.report import digest, numbers, page, paper, tables
from gxd.lab.report.age_figure import picture
from gxd.lab.report.age_results import (
    CHOOSING,
    PAPER_MATURITY,
    RANKINGS,
    Results,
    Setting,
    collect,
    interval,
    reported,
    write_digest,
)
from gxd.lab.report.page import Block, Section
from gxd.lab.report.tables import Cell, Table

# --- tables -----------------------------------------------------------------------------------------------------------


def settings_table(found: Results) -> Table:
    """Every setting: accuracy, churn, and the age of the units that were reset."""
    columns = ["Stream", "Network", "Utility", "Ranking", "Maturity", "Rate", "Accuracy, %", "Churn, %", "Age at reset"]
    table = Table(
        "age-settings",
        "Every setting",
        "Mean ± 95 % interval over seeds. Churn: the share of resets that hit a unit younger than 1.5 times the "
        "maturity, so not comparable between maturities. Age: the median age at reset, in steps.",
        [*columns, "Seeds", "Diverged"],
    )
    for setting, by_seed in found.items():
        here = list(reported(by_seed).values())
        if not here:
            continue
        accuracy, churn, age = (interval(getattr(one, name) for one in here) for name in ("accuracy", "churn", "age"))
        diverged = sum(one.diverged for one in here)
        shown = [_plus_minus(accuracy), _plus_minus(churn, digits=0), _plus_minus(age, scale=1.0, digits=0)]
        cells = [*_words(setting), *shown, str(len(here)), str(diverged or "")]
        table.rows.append([Cell(text) for text in cells])
        table.records.append(
            {
                **_record(setting),
                "seeds": len(here),
                "diverged": diverged,
                **_bounds("accuracy", accuracy),
                **_bounds("churn", churn),
                **_bounds("age_at_reset", age),
            }
        )
    return table


def by_age(found: Results) -> Table:
    """Ranking by age against the absolute ranking, at the same utility, maturity, rate and seeds."""
    pairs = [(setting, setting._replace(exponent=0.0)) for setting in found if setting.exponent]
    return _paired(
        "age-against-absolute",
        "Ranked by age, against the absolute ranking in the same setting",
        found,
        pairs,
        lambda ours, theirs: f"{ours.rule}, maturity {ours.maturity}, rate {ours.rate:g}",
    )


def by_maturity(found: Results) -> Table:
    """The absolute ranking with ``maturity = c / rate`` against ranking by age with the shortest maturity."""
    shortest = min((setting.maturity for setting in found if setting.resets), default=0)
    pairs = [
        (setting, setting._replace(exponent=exponent, maturity=shortest))
        for setting in found
        if setting.resets and not setting.exponent and setting.maturity > shortest
        for exponent in RANKINGS
        if exponent
    ]
    return _paired(
        "maturity-against-age",
        f"maturity = c / rate, against ranking by age with maturity {shortest}",
        found,
        pairs,
        lambda ours, theirs: f"c = {ours.c:g}, rate {ours.rate:g}, against {theirs.rule}",
    )


def _paired(
    name: str,
    title: str,
    found: Results,
    pairs: Sequence[tuple[Setting, Setting]],
    words: Callable[[Setting, Setting], str],
) -> Table:
    table = Table(
        name,
        title,
        "Difference of the accuracies in points, pair by pair over the same seeds, with its 95 % t interval; better or "
        "worse where the interval leaves 0 out. There is no correction for the number of comparisons.",
        ["Stream", "Network", "Utility", "What", "Difference", "Pairs", "Verdict"],
    )
    for ours, theirs in pairs:
        a, b = reported(found.get(ours, {})), reported(found.get(theirs, {}))
        seeds = sorted(a.keys() & b.keys())
        if len(seeds) < 2:
            continue
        change = numbers.paired([a[seed].accuracy for seed in seeds], [b[seed].accuracy for seed in seeds])
        verdict = "better" if change.low > 0 else "worse" if change.high < 0 else "undecided"
        mark = {"better": "good", "worse": "bad"}.get(verdict, "unknown")
        what = [*_words(ours)[:3], words(ours, theirs), tables.points(change), str(len(seeds))]
        table.rows.append([*(Cell(text) for text in what), Cell(verdict, "", mark)])
        against = {"against_ranking": theirs.rule, "against_maturity": theirs.maturity}
        table.records.append(
            {**_record(ours), **against, "pairs": len(seeds), **_bounds("difference", change), "verdict": verdict}
        )
    return table


def tally(table: Table) -> str:
    """How the comparisons of a table ended, in a sentence."""
    counts = {word: sum(row[-1].text == word for row in table.rows) for word in ("better", "worse", "undecided")}
    said = ", ".join(f"{count} {word}" for word, count in counts.items())
    return f"{table.title}: of {len(table.rows)} comparisons {said}."


def chosen_table(found: Results) -> Table:
    """Each rule in the setting (maturity, rate) that the choosing seeds prefer, on the other seeds."""
    table = Table(
        "age-chosen",
        "Each rule in its best setting",
        f"Maturity and rate are chosen for each rule by the mean accuracy on seeds from {CHOOSING} on, the numbers are "
        "from the other seeds: mean ± 95 % interval. Absolute at the paper's maturity has only its rate chosen.",
        ["Stream", "Network", "Utility", "Rule", "Chosen", "Accuracy, %", "Churn, %", "Seeds"],
    )
    candidates: dict[tuple[Any, ...], list[Setting]] = defaultdict(list)
    for setting in found:
        rules = [setting.rule]
        if setting.resets and not setting.exponent:
            rules = ["absolute, any maturity"]
            if setting.maturity == PAPER_MATURITY:
                rules.insert(0, f"absolute, maturity {PAPER_MATURITY}")
        for rule in rules:
            candidates[setting.stream, setting.panel, setting.method, rule].append(setting)
    for (*_, rule), settings in candidates.items():
        tried = {s: numbers.mean(r.accuracy for seed, r in found[s].items() if seed >= CHOOSING) for s in settings}
        if any(mean.n == 0 for mean in tried.values()):
            continue  # a choice among some of the settings would favour those that ran first
        best = max(tried, key=lambda setting: tried[setting].value)
        here = list(reported(found[best]).values())
        if not here:
            continue
        accuracy, churn = interval(one.accuracy for one in here), interval(one.churn for one in here)
        stream, panel, method, _, maturity, rate = _words(best)
        values = f"maturity {maturity}, rate {rate}" if best.resets else ""
        shown = [_plus_minus(accuracy), _plus_minus(churn, digits=0), str(len(here))]
        table.rows.append([Cell(text) for text in (stream, panel, method, rule, values, *shown)])
        table.records.append({**_record(best), "rule": rule, "seeds": len(here), **_bounds("accuracy", accuracy)})
    return table


def _words(setting: Setting) -> list[str]:
    stream = paper.EXPERIMENTS.get(setting.stream, setting.stream)
    named = [stream, tables.panel_label(setting.panel), paper.method_label(setting.method), setting.rule]
    return [*named, *([str(setting.maturity), f"{setting.rate:g}"] if setting.resets else ["", ""])]


def _record(setting: Setting) -> dict[str, Any]:
    record = setting._asdict()
    activation, layer_norm = record.pop("panel")
    return {"stream": record.pop("stream"), "activation": activation, "layer_norm": layer_norm, **record}


def _bounds(name: str, value: numbers.Interval) -> dict[str, str]:
    shown = {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
    return {key: f"{number:.5g}" if math.isfinite(number) else "" for key, number in shown.items()}


def _plus_minus(value: numbers.Interval, scale: float = 100.0, digits: int = 1) -> str:
    return (
        tables.plus_minus(numbers.Mean(value.value, value.high - value.value, 1), digits, scale)
        if math.isfinite(value.value)
        else "–"
    )


# --- the page ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """The tables and the figure of the age study, from its runs as far as they are."""

    directories: tyro.conf.Positional[tuple[Path, ...]]
    """Where the runs of the two sweeps are, or results/age, the digest of ours."""
    out: Path = Path("age-report")
    """Where the page, the figures and the tables go."""


def write(directories: Sequence[Path], out: Path) -> Path:
    """Write the page and what belongs to it into ``out``; return the path of the page."""
    found = collect(directories)
    if not any(reported(by_seed) for by_seed in found.values()):
        raise UserError(f"no run below {', '.join(map(str, directories))} is over: {digest.REMEDY}")
    out.mkdir(parents=True, exist_ok=True)
    pictures = [picture(found, stream) for stream in dict.fromkeys(setting.stream for setting in found)]
    compared, all_settings = [by_age(found), by_maturity(found), chosen_table(found)], settings_table(found)
    shown = page.save_pictures(pictures, out)
    page.save_tables([*compared, all_settings], out)
    write_digest(found, out)
    every = [result for by_seed in found.values() for result in by_seed.values()]
    hours = sum(result.seconds for result in every) / 3600
    blocks = [Block(picture=one) for one in shown.values()]
    blocks += [Block(table=table, kind="dense wide", fold=len(table.rows) > 40) for table in (*compared, all_settings)]
    texts = [tally(table) for table in compared[:2] if table.rows]
    index = out / "index.html"
    lead = f"{len(every)} runs, {hours:.1f} hours of computing on one core."
    index.write_text(
        page.render(
            "Newborn churn, and ranking by age",
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
