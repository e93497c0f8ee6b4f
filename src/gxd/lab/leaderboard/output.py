"""The board as Markdown, as CSV, and as one page that needs nothing else."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gxd.lab.leaderboard import page
from gxd.lab.leaderboard.board import FRESH, Board, Row, Standing
from gxd.lab.leaderboard.protocol import Protocol, Track
from gxd.lab.report.tables import Cell, Table
from gxd.lab.store import write_bytes

PAGE = "board.html"
NONE = "–"
CAPTION = (
    "Mean over the stream and its 95 % t interval over the seeds; gain: over backprop, seed by seed; diverged: share "
    "of the reported runs; time: of a step, relative to backprop, without what happens between tasks; churn: share of "
    "the resets that hit a unit hardly mature; age: the median in steps at a reset; told: whether the method is told "
    "when a task ends."
)


def write(board: Board, protocol: Protocol, out: Path) -> None:
    """board.csv, ranks.csv, board.md and board.html."""
    write_bytes(out / "board.csv", _csv(Row.columns(), (row.values() for row in board.rows)).encode())
    standings = [asdict(standing) for standing in board.standings]
    write_bytes(out / "ranks.csv", _csv(list(Standing.__dataclass_fields__), standings).encode())
    write_bytes(out / "board.md", markdown(board, protocol).encode())
    shown = [(track, stream_table(board, track)) for track in board.tracks]
    text = page.render(lead(board, protocol), board, ranks_table(board), shown)
    write_bytes(out / PAGE, text.encode())


def _csv(columns: Sequence[str], lines: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def lead(board: Board, protocol: Protocol) -> str:
    """What this is, and what is missing, in a few sentences."""
    methods = len({row.method for row in board.rows})
    chosen_on = "seed" if len(protocol.tuning_seeds) == 1 else "seeds"
    text = (
        f"{methods} methods and controls on {len(board.tracks)} streams, protocol {protocol.version} "
        f"({protocol.fingerprint()}): the best of {protocol.trials} settings on {chosen_on} "
        f"{', '.join(map(str, protocol.tuning_seeds))}, reported on {len(protocol.seeds)} other seeds."
    )
    missing = board.missing()
    return f"{text} NOT COMPLETE. {'; '.join(missing)}." if missing else text


def markdown(board: Board, protocol: Protocol) -> str:
    """All tables."""
    parts = ["# Leaderboard", "", lead(board, protocol), ""]
    for table in [ranks_table(board), *(stream_table(board, track) for track in board.tracks)]:
        parts.append(table.markdown())
    return "\n".join(parts)


def ranks_table(board: Board) -> Table:
    """Ranks over all streams, and the gain on each."""
    columns = ["method", "told", "mean rank", "95 % interval", *(track.name for track in board.tracks)]
    columns += ["worst rank", "better than backprop", "worse", "streams"]
    caption = (
        "The mean of the ranks on the streams that an entry is complete on (1 is the best), with an interval by "
        "resampling the seeds. Then its gain over backprop on each stream, in points of accuracy or in loss, and its "
        "rank; and on how many streams the 95 % interval of the gain is above or below 0. Told: whether the method is "
        "told when a task ends."
    )
    rows = {(row.stream, row.method): row for row in board.rows}
    made = Table("ranks", "Ranks over all streams", caption, columns)
    for one in board.standings:
        words = [one.method, _told(one.told), f"{one.mean_rank:.1f}", f"{one.low:.1f} to {one.high:.1f}"]
        gains = [_gain_and_rank(rows.get((track.name, one.method)), track) for track in board.tracks]
        counts = [f"{one.worst:g}", str(one.better), str(one.worse), str(one.streams)]
        made.rows.append([*map(Cell, words), *gains, *map(Cell, counts)])
    return made


def _gain_and_rank(row: Row | None, track: Track) -> Cell:
    if row is None or row.gain is None or row.gain_low is None or row.gain_high is None or row.rank is None:
        return Cell(NONE)
    mark = "good" if row.gain_low > 0 else "bad" if row.gain_high < 0 else ""
    text = f"{100 * row.gain:+.1f}" if track.kind.classifies else f"{row.gain:+.3f}"
    return Cell(text, f"rank {row.rank:g}", mark)


def stream_table(board: Board, track: Track) -> Table:
    """One stream, the best first."""
    percent = track.kind.classifies
    what = "online accuracy, %" if percent else f"{track.metric}, lower is better"
    columns = ["rank", "method", "told", what, "95 % interval", "last tenth", "gain", "diverged", "time"]
    columns += ["churn", "age", "setting"]
    scale = ", ".join(f"{name} {value}" for name, value in track.fixed.items())
    made = Table(track.name, f"{track.name} ({scale})", CAPTION, columns)
    for row in board.of(track):
        mark = "best" if row.rank == 1 else ""
        note = {FRESH: "a fresh network for every task"}.get(row.method, "")
        if row.mean is None:
            made.rows.append([Cell(NONE), Cell(row.method, row.note), Cell(_told(row.told)), *[Cell(NONE)] * 5])
            made.rows[-1] += [Cell(_plain(row.time_ratio)), *[Cell(NONE)] * 3]
            continue
        made.rows.append(
            [
                Cell(NONE if row.rank is None else f"{row.rank:g}"),
                Cell(row.method, row.note or note, mark),
                Cell(_told(row.told)),
                Cell(_value(row.mean, percent), mark=mark),
                Cell(_range(row.low, row.high, percent)),
                Cell(_value(row.last_tenth, percent)),
                Cell(_gain(row, percent)),
                Cell(NONE if row.diverged is None else f"{100 * row.diverged:.0f} %"),
                Cell(_plain(row.time_ratio)),
                Cell(NONE if row.churn is None else f"{100 * row.churn:.0f} %"),
                Cell(NONE if row.age is None else f"{row.age:.0f}"),
                Cell(row.setting),
            ]
        )
    return made


def placed(board: Board, track: Track, method: str) -> str:
    """Where an entry is on a stream, in a line."""
    row = next(row for row in board.of(track) if row.method == method)
    if row.rank is None or row.mean is None:
        return f"{track.name}: {method} has no rank: {row.note}"
    of, percent = len(board.complete[track.name]), track.kind.classifies
    numbers = f"{_value(row.mean, percent)} ({_range(row.low, row.high, percent)}), gain {_gain(row, percent)}"
    return f"{track.name}: {method} is {row.rank:g} of {of}, {track.metric.replace('_', ' ')} {numbers}"


def _value(value: float | None, percent: bool) -> str:
    if value is None:
        return NONE
    if math.isinf(value):
        return "infinite"
    return f"{100 * value:.2f}" if percent else f"{value:.4f}"


def _range(low: float | None, high: float | None, percent: bool) -> str:
    return NONE if low is None or high is None else f"{_value(low, percent)} to {_value(high, percent)}"


def _gain(row: Row, percent: bool) -> str:
    if row.gain is None or row.gain_low is None or row.gain_high is None:
        return NONE
    scale, digits = (100, 2) if percent else (1, 4)
    half = scale * (row.gain_high - row.gain_low) / 2
    return f"{scale * row.gain:+.{digits}f} ± {half:.{digits}f}"


def _told(told: bool) -> str:
    return "yes" if told else "no"


def _plain(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"
