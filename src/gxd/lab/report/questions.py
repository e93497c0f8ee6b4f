"""Two questions that the paper leaves open: does compensation help or destabilise, and does gxd_sketch beat gxd."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gxd.lab.report import numbers, paper
from gxd.lab.report.digest import Run
from gxd.lab.report.evidence import Group, twins
from gxd.lab.report.tables import Cell, Table, panel_label, plus_minus, points, rate, short

ENOUGH_SEEDS = 10


MORE, LESS, OPEN = "more", "less", "open"
UNDER_WAY = "runs under way"


@dataclass(frozen=True)
class Question:
    """A question, the pairs of settings that bear on it, and the answer that follows from them by rule."""

    title: str
    table: Table
    answers: list[str]
    missing: str = ""


def compensation(runs: Sequence[Run]) -> Question:
    """Does true bias compensation help or destabilise?"""
    return _question(
        "compensation",
        "Does bias compensation help, or does it destabilise?",
        "compensation",
        ("with", "without"),
        twins(runs, "compensate", True, False),
        "gxd run permuted-digits --method gxd --activation silu --rate 1e-3 --seed 0 (and again with --no-compensate)",
    )


def sketch(runs: Sequence[Run]) -> Question:
    """Does gxd_sketch beat gxd?"""
    return _question(
        "sketch",
        "Does GXD sketch beat GXD?",
        "GXD sketch",
        ("sketch", "GXD"),
        twins(runs, "method", "gxd_sketch", "gxd"),
        "gxd run permuted-digits --method gxd_sketch --activation silu --seed 0 (and again with --method gxd)",
    )


def _question(
    name: str,
    title: str,
    subject: str,
    sides: tuple[str, str],
    pairs: Sequence[tuple[Group, Group]],
    command: str,
) -> Question:
    pairs = [pair for pair in pairs if pair[0].settled and pair[1].settled]
    enough = [pair for pair in pairs if not _unfit(pair)]
    left_out = f" {len(pairs) - len(enough)} settings with fewer than {ENOUGH_SEEDS} complete seeds are left out."
    caption = left_out if enough and len(enough) < len(pairs) else ""
    pairs = enough or pairs
    table = Table(
        f"question-{name}",
        title,
        "Settings that differ in nothing else. Diverged: rate with Wilson's 95 % interval; the difference of the rates "
        f"({sides[0]} − {sides[1]}, percentage points) with Newcombe's. Last: test accuracy in % over the last tasks "
        "of the runs that lived; its difference in percentage points over the seeds that lived in both, with the 95 "
        f"% t interval. What follows: an interval that leaves out 0 decides.{caption}",
        [
            "Setting",
            *(f"Diverged, {side}" for side in sides),
            "Difference",
            *(f"Last, {side}" for side in sides),
            "Paired difference",
            f"What follows for {subject}",
        ],
    )
    tally: Counter[tuple[str, str]] = Counter()
    for ours, theirs in pairs:
        config, experiment = ours.runs[0].config, ours.runs[0].experiment
        method = "" if name == "sketch" else f"{paper.method_label(ours.method)}, "
        rates = f"lr {short(config.get('lr'))}, rate {short(config.get('rate'))}"
        note = f"{paper.EXPERIMENTS.get(experiment, experiment)}, {ours.tasks} tasks"
        note += "" if name == "compensation" or ours.compensates else ", no compensation"
        dead, n = len(ours.diverged), len(ours.runs)
        dead0, n0 = len(theirs.diverged), len(theirs.runs)
        gap = numbers.rate_difference(dead, n, dead0, n0)
        a, b = ours.finals(), theirs.finals()
        common = sorted(a.keys() & b.keys())
        change = numbers.paired([a[seed] for seed in common], [b[seed] for seed in common])
        unfit = _unfit((ours, theirs))
        if not unfit:
            tally["divergence", _side(gap)] += 1
            tally["accuracy", _side(change)] += 1
        table.rows.append(
            [
                Cell(f"{method}{panel_label(ours.panel)}, {rates}", note),
                Cell(rate(dead, n) + ours.so_far, "", "bad" if dead else ""),
                Cell(rate(dead0, n0) + theirs.so_far, "", "bad" if dead0 else ""),
                Cell(points(gap, 0)),
                Cell(plus_minus(ours.last())),
                Cell(plus_minus(theirs.last())),
                Cell(points(change), f"{len(common)} pairs"),
                Cell("open" if unfit == UNDER_WAY else _follows(gap, change), unfit),
            ]
        )
        table.records.append(
            {
                "experiment": experiment,
                "method": ours.method,
                "activation": ours.panel[0],
                "layer_norm": ours.panel[1],
                "compensate": ours.compensates,
                "lr": config.get("lr"),
                "rate": config.get("rate"),
                "tasks": ours.tasks,
                "diverged": dead,
                "n": n,
                "other_diverged": dead0,
                "other_n": n0,
                **_bounds("rate_difference", gap),
                **_bounds("paired_difference", change),
                "pairs": len(common),
            }
        )
    return Question(title, table, [_summary(subject, tally)] if pairs else [], "" if pairs else command)


def _unfit(pair: tuple[Group, Group]) -> str:
    """Why a pair does not count, or nothing. Of runs under way too few have diverged yet, or only those that have
    are settled: the rates say nothing.
    """
    if not all(group.complete for group in pair):
        return UNDER_WAY
    return f"fewer than {ENOUGH_SEEDS} seeds" if min(len(group.runs) for group in pair) < ENOUGH_SEEDS else ""


def _side(interval: numbers.Interval) -> str:
    """An interval that leaves out 0 decides; one that holds it, or is unbounded, leaves the question open."""
    return MORE if interval.low > 0 else LESS if interval.high < 0 else OPEN


def _follows(gap: numbers.Interval, change: numbers.Interval) -> str:
    divergence = {MORE: "diverges more often", LESS: "diverges less often", OPEN: ""}[_side(gap)]
    accuracy = {MORE: "ends higher", LESS: "ends lower", OPEN: ""}[_side(change)]
    return ", ".join(filter(None, [divergence, accuracy])) or "open"


def _summary(subject: str, tally: Counter[tuple[str, str]]) -> str:
    settings = sum(count for (what, _), count in tally.items() if what == "divergence")
    if not settings:
        return f"No setting has {ENOUGH_SEEDS} seeds on both sides, so the question stays open here."
    d, a = ({side: tally[what, side] for side in (MORE, LESS, OPEN)} for what in ("divergence", "accuracy"))
    return (
        f"Of the {settings} settings with at least {ENOUGH_SEEDS} seeds, {subject} diverges more often in "
        f"{d[MORE]}, less often in {d[LESS]}, undecided in {d[OPEN]}; the runs that lived end higher in {a[MORE]}, "
        f"lower in {a[LESS]}, undecided in {a[OPEN]}."
    )


def _bounds(name: str, interval: numbers.Interval) -> dict[str, str]:
    return {
        name: f"{interval.value:.5g}",
        f"{name}_low": f"{interval.low:.5g}",
        f"{name}_high": f"{interval.high:.5g}",
    }
