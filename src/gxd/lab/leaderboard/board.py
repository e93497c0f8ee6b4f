"""The numbers of the board: a row for every entry on every stream, and the ranks over all streams."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gxd.lab.leaderboard.plan import Place, score
from gxd.lab.leaderboard.protocol import Track
from gxd.lab.leaderboard.records import Record, Records, timing_name
from gxd.lab.leaderboard.timing import Times
from gxd.lab.report.numbers import Interval, paired

BASE, FRESH = "backprop", "full_reset"
RESAMPLES = 2000
ENOUGH = 0.9
"""A stream counts for the ranks over all streams if it has this share of the entries of the most complete one."""
NAMED = 6  # of what is missing, more are only counted
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """An entry on a stream: a line of board.csv.

    Attributes:
        seeds: how many reported runs there are.
        mean, low, high: the metric over the stream and the seeds, with its 95 % t interval. A run that diverged or
            failed counts as one that has learned nothing.
        last_tenth: over the last tenth of the tasks that count.
        diverged: the share of the reported runs that diverged; ``tuning_diverged``: of all trials.
        time_ratio: of a step, to backprop.
        rank: on this stream, 1 is the best, among entries that are complete.
        gain, gain_low, gain_high: how much better than backprop, seed by seed, with its 95 % interval.
        churn, age: see :class:`gxd.lab.leaderboard.records.Record`.
        setting: the best of the trials.
        note: why there is no number, or what failed.
        told: whether the method acts when a task ends, and so is told the boundaries.
    """

    stream: str
    method: str
    seeds: int = 0
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    diverged: float | None = None
    time_ratio: float | None = None
    rank: float | None = None
    last_tenth: float | None = None
    last_low: float | None = None
    last_high: float | None = None
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None
    churn: float | None = None
    age: float | None = None
    trials: int = 0
    tuning_diverged: float | None = None
    setting: str = ""
    note: str = ""
    told: bool = False

    @classmethod
    def columns(cls) -> list[str]:
        """Of board.csv."""
        return [each.name for each in fields(cls)]

    def values(self) -> dict[str, Any]:
        """By column; what there is not is empty."""
        return {name: "" if getattr(self, name) is None else getattr(self, name) for name in self.columns()}


@dataclass(frozen=True)
class Standing:
    """An entry over all streams that count and that it is complete on: the mean of its ranks, with a 95 % interval by
    resampling the seeds, the worst of them, on how many of these streams it is surely better or worse than backprop,
    and whether it is told the boundaries of tasks.
    """

    method: str
    streams: int
    mean_rank: float
    low: float
    high: float
    worst: float
    better: int
    worse: int
    told: bool


@dataclass(frozen=True)
class Scores:
    """An entry on a stream that is complete: what counts of each seed, and its learning curve, the mean over seeds."""

    row: Row
    values: tuple[float, ...]
    curve: tuple[float, ...]


@dataclass(frozen=True)
class Board:
    """All of it. ``complete`` has the entries of each stream on all seeds, in the order of the rows, ``own`` the names
    of those that are the user's own.
    """

    tracks: tuple[Track, ...]
    rows: tuple[Row, ...]
    complete: Mapping[str, tuple[Scores, ...]]
    standings: tuple[Standing, ...]
    own: tuple[str, ...] = ()

    def of(self, track: Track) -> list[Row]:
        """The rows of a stream, the best first, what has no rank last."""
        here = [row for row in self.rows if row.stream == track.name]
        return sorted(here, key=lambda row: math.inf if row.rank is None else row.rank)

    def missing(self) -> list[str]:
        """What is not there yet, in lines."""
        lines = []
        for track in self.tracks:
            open_ = [row.method for row in self.rows if row.stream == track.name and row.note.startswith("missing")]
            if open_:
                named = f" ({', '.join(open_)})" if len(open_) <= NAMED else ""
                many = "1 entry is" if len(open_) == 1 else f"{len(open_)} entries are"
                lines.append(f"{track.name}: {many} not complete{named}")
        return lines


def make_board(
    places: Sequence[Place],
    records: Records,
    times: Times,
    objections: Mapping[str, Mapping[str, str]],
    failures: Mapping[str, str],
) -> Board:
    """The board of these places, from what is known of their runs, and of their timings where these failed."""
    tracks = tuple(dict.fromkeys(place.track for place in places))
    rows: list[Row] = []
    complete: dict[str, tuple[Scores, ...]] = {}
    for track in tracks:
        here = [place for place in places if place.track is track]
        whys = objections.get(track.name, {})
        found = [_row(p, records, whys.get(p.entry.name, ""), times.get(track.name, {})) for p in here]
        whole = _ranked(track, [scores for _, scores in found if scores is not None])
        complete[track.name] = whole
        known = {scores.row.method: scores.row for scores in whole}
        rows += [known.get(row.method, row) for row, _ in found]
    return Board(tracks, tuple(_untimed(row, failures) for row in rows), complete, _standings(tracks, complete))


def _untimed(row: Row, failures: Mapping[str, str]) -> Row:
    """With a note why it has no time, if it has all else."""
    why = failures.get(timing_name(row.stream, row.method))
    if row.rank is None or why is None:
        return row
    return replace(row, note="; ".join(filter(None, (row.note, f"not timed: {why}"))))


def _row(place: Place, records: Records, why: str, times: Mapping[str, float]) -> tuple[Row, Scores | None]:
    """What can be said of an entry on a stream; its scores if it is complete."""
    protocol, track = place.protocol, place.track
    row = Row(track.name, place.entry.name, time_ratio=times.get(place.entry.name), told=place.is_told)
    why = place.refusal or why
    if why:
        return replace(row, note=f"not on this stream: {why}"), None
    names = [run.name for run in place.trials()]
    tried = [records[name] for name in names if name in records]
    row = replace(row, trials=len(tried) // len(protocol.tuning_seeds))
    if len(tried) < len(names):
        return replace(row, note=f"missing: {len(names) - len(tried)} of {len(names)} tuning runs"), None
    row = replace(row, tuning_diverged=_share(tried))
    best = place.best(records)
    if best is None:
        return replace(row, note=f"all trials failed: {tried[0].note}"), None
    runs = place.reports(best)
    reported = [records[run.name] for run in runs if run.name in records]
    row = replace(row, setting=runs[0].setting, seeds=len(reported))
    if reported:
        row = _measured(row, reported, track)
    if len(reported) < len(runs):
        return replace(row, note=f"missing: {len(runs) - len(reported)} of {len(runs)} seeds"), None
    failed = [record.note for record in tried if record.status == "failed"]
    if failed and not row.note:
        row = replace(row, note=f"{len(failed)} of {len(tried)} trials failed: {failed[0]}")
    curves = [record.curve for record in reported if record.curve]
    curve = tuple(fmean(point) for point in zip(*curves, strict=True)) if len(curves) == len(reported) else ()
    return row, Scores(row, tuple(score(record, track) for record in reported), curve)


def _measured(row: Row, reported: Sequence[Record], track: Track) -> Row:
    nothing = track.kind.learned_nothing
    mean = interval([score(record, track) for record in reported])
    last = interval([nothing if record.last is None else record.last for record in reported])
    failed = [record.note for record in reported if record.status == "failed"]
    return replace(
        row,
        mean=mean.value,
        low=finite(mean.low),
        high=finite(mean.high),
        last_tenth=last.value,
        last_low=finite(last.low),
        last_high=finite(last.high),
        diverged=_share(reported),
        churn=_mean_of([record.churn for record in reported]),
        age=_mean_of([record.age for record in reported]),
        note=f"{len(failed)} of {len(reported)} runs failed: {failed[0]}" if failed else "",
    )


def interval(values: Sequence[float]) -> Interval:
    """The mean with its 95 % t interval. With an infinite loss among the values there is no interval."""
    if not all(map(math.isfinite, values)):
        return Interval(math.inf, math.nan, math.nan)
    return paired(values, [0.0] * len(values))


def finite(value: float) -> float | None:
    """None for what is no number: a single seed has no interval."""
    return value if math.isfinite(value) else None


def _share(records: Sequence[Record]) -> float:
    return sum(record.status == "diverged" for record in records) / len(records)


def _mean_of(values: Sequence[float | None]) -> float | None:
    kept = [value for value in values if value is not None]
    return fmean(kept) if kept else None


# --- ranks ------------------------------------------------------------------------------------------------------------


def average_ranks(values: Array, higher_is_better: bool) -> Array:
    """``(entries, ...)`` -> the rank of each along the first axis, from 1; equals share the mean of their ranks."""
    signed = -values if higher_is_better else values
    less = (signed[None] < signed[:, None]).sum(1)
    equal = (signed[None] == signed[:, None]).sum(1)
    ranks: Array = less + (equal + 1) / 2
    return ranks


def _ranked(track: Track, whole: Sequence[Scores]) -> tuple[Scores, ...]:
    """With their ranks and their gains over backprop."""
    if not whole:
        return ()
    higher = track.kind.higher_is_better
    ranks = average_ranks(np.array([fmean(scores.values) for scores in whole]), higher)
    base = next((scores.values for scores in whole if scores.row.method == BASE), None)
    made = []
    for scores, rank in zip(whole, ranks, strict=True):
        gain = _gain(scores.values, base, higher)
        row = replace(
            scores.row,
            rank=float(rank),
            gain=None if gain is None else gain.value,
            gain_low=None if gain is None else finite(gain.low),
            gain_high=None if gain is None else finite(gain.high),
        )
        made.append(replace(scores, row=row))
    return tuple(made)


def _gain(values: Sequence[float], base: Sequence[float] | None, higher: bool) -> Interval | None:
    if base is None or not all(map(math.isfinite, (*values, *base))):
        return None
    return paired(values, base) if higher else paired(base, values)


def _standings(tracks: Sequence[Track], complete: Mapping[str, Sequence[Scores]]) -> tuple[Standing, ...]:
    """Ranks over all streams, the best first; who is not on all of them comes after those who are.

    The seeds of a stream are resampled together for all entries, for they have seen the same tasks. Ranks among few of
    the entries are no ranks: a stream that is under way does not count.
    """
    chance = np.random.default_rng(0)
    most = max(map(len, complete.values()), default=0)
    counted: dict[str, list[Row]] = {}
    resampled: dict[str, list[Array]] = {}
    for track in tracks:
        whole = complete[track.name]
        if len(whole) < max(2, ENOUGH * most):
            continue
        values = np.array([scores.values for scores in whole])
        drawn = chance.integers(values.shape[1], size=(RESAMPLES, values.shape[1]))
        many = average_ranks(values[:, drawn].mean(-1), track.kind.higher_is_better)
        for scores, line in zip(whole, many, strict=True):
            counted.setdefault(scores.row.method, []).append(scores.row)
            resampled.setdefault(scores.row.method, []).append(line)
    found = []
    for method, rows in counted.items():
        low, high = np.quantile(np.mean(resampled[method], axis=0), [0.025, 0.975])
        own = [row.rank for row in rows if row.rank is not None]
        better = sum(row.gain_low is not None and row.gain_low > 0 for row in rows)
        worse = sum(row.gain_high is not None and row.gain_high < 0 for row in rows)
        told = any(row.told for row in rows)
        found.append(Standing(method, len(own), fmean(own), float(low), float(high), max(own), better, worse, told))
    return tuple(sorted(found, key=lambda standing: (-standing.streams, standing.mean_rank)))
