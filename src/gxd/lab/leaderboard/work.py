"""Do the runs of the board: breadth first, what is missing only, whatever becomes of a single one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from gxd.lab import cluster, workers
from gxd.lab.errors import UserError
from gxd.lab.leaderboard.board import BASE
from gxd.lab.leaderboard.conduct import objection
from gxd.lab.leaderboard.entries import Entry, entries
from gxd.lab.leaderboard.plan import Place, Run, gather
from gxd.lab.leaderboard.protocol import Protocol, Track
from gxd.lab.leaderboard.records import (
    REPORT,
    TUNING,
    ByStream,
    Record,
    Records,
    change_by_stream,
    change_failures,
    failure_name,
    joined,
    read_by_stream,
    read_digest,
    read_failures,
    timing_name,
)
from gxd.lab.leaderboard.timing import TIMES, read_times, time_ratios
from gxd.lab.progress import Board
from gxd.lab.run import make_stream
from gxd.lab.selection import table
from gxd.lab.store import read_json, write_json
from gxd.lab.streams import Stream

PROTOCOL_FILE = "protocol.json"
OBJECTIONS = "objections.json"


@dataclass(frozen=True)
class Means:
    """With what the runs are done: local processes, or Ray."""

    processes: int | None = None
    ray: str | None = None
    files: Sequence[Path] = ()

    def train(self, jobs: Sequence[workers.Job], root: Path) -> list[workers.Outcome]:
        """All of them, in this order."""
        with Board(len(jobs)) as board:
            if self.ray is None:
                return workers.run_all(jobs, root, board, processes=self.processes, files=self.files)
            return cluster.run_all(jobs, root, board, address=self.ray, processes=self.processes, files=self.files)


def claim(out: Path, protocol: Protocol) -> None:
    """Make a directory one of this protocol. Raises :class:`UserError` if it is of another one."""
    if check_protocol(out, protocol):
        return
    workers.prepare(out)
    write_json(out / PROTOCOL_FILE, {"fingerprint": protocol.fingerprint(), **protocol.to_dict()})


def check_protocol(out: Path, protocol: Protocol) -> bool:
    """Whether a directory is of this protocol; False if it is of none. Raises :class:`UserError` if of another, or if a
    file that the board is made of is damaged: after hours of runs is late to hear of it.
    """
    file = out / PROTOCOL_FILE
    if not file.exists():
        if out.is_dir() and any(out.iterdir()):
            raise UserError(
                f"{out} has files but no {PROTOCOL_FILE}, so it is no leaderboard: choose another directory"
            )
        return False
    theirs = read_json(file, "restore it, or choose another directory")
    if theirs.get("fingerprint") != protocol.fingerprint():
        raise UserError(
            f"{out} is of another protocol (version {theirs.get('version')}, {theirs.get('fingerprint')}; this is "
            f"version {protocol.version}, {protocol.fingerprint()}), and numbers of two protocols are not compared: "
            "choose another directory"
        )
    for read in (read_digest, read_times, read_objections, read_failures):
        read(out)
    return True


def places(protocol: Protocol, chosen: Iterable[Entry], tracks: Sequence[Track] = ()) -> list[Place]:
    """Every entry on every stream, the cheapest stream first."""
    rows = list(chosen)
    return [Place(protocol, track, row) for track in (tracks or protocol.tracks) for row in rows]


def do(chosen: Sequence[Place], out: Path, means: Means) -> list[str]:
    """All runs of these places that are missing, stream after stream. Returns what went wrong, in lines."""
    claim(out, chosen[0].protocol)
    wrong: list[str] = []
    for track in dict.fromkeys(place.track for place in chosen):
        here = [place for place in chosen if place.track is track]
        try:
            stream = make_stream(track.config({}, here[0].protocol.tuning_seeds[0]))
        except UserError as error:
            wrong.append(f"{track.name} is left out: {error}")
            continue
        wrong += _do_track(track, here, stream, out, means)
    return wrong


def _do_track(track: Track, here: list[Place], stream: Stream, out: Path, means: Means) -> list[str]:
    found = {place.entry.name: objection(place, stream) for place in here}
    change_by_stream(out / OBJECTIONS, str, lambda known: joined(known, {track.name: found}))
    able = [place for place in here if not found[place.entry.name]]
    print(f"{track.name}: {len(able)} entries", flush=True)
    for name, why in found.items():
        if why:
            print(f"  {name} is not on this stream: {why}", flush=True)
    if not able:
        return []
    _time(track, able, stream, out)
    known = read_digest(out)  # a copy without the runs goes on where they stopped
    wrong = _stage(TUNING, [run for place in able for run in place.trials()], out, means, known)
    records = collect(able, out, known)
    chosen = [(place, place.best(records)) for place in able]
    # Seed after seed, so that an early look sees all entries.
    runs = [run for place, values in chosen if values is not None for run in place.reports(values)]
    return wrong + _stage(REPORT, sorted(runs, key=lambda run: run.config.seed), out, means, known)


def _stage(stage: str, runs: list[Run], out: Path, means: Means, known: Records) -> list[str]:
    """What is missing of these runs. One that failed before is tried again."""
    root = out / stage
    over = {name for name, record in known.items() if record.status in workers.SETTLED}
    # By name, for entries may share a run.
    missing = {run.name: run for run in runs if run.name not in over and not _settled(run, root)}
    print(f"  {stage}: {len(runs)} runs, {len(runs) - len(missing)} of them done before", flush=True)
    if not missing:
        return []
    jobs = [workers.Job(_label(run), run.config) for run in missing.values()]
    outcomes = means.train(jobs, root)
    failures: dict[str, str | None] = {}
    wrong = []
    for run, outcome in zip(missing.values(), outcomes, strict=True):
        failures[failure_name(run.draft)] = None
        if outcome.failure is not None:
            if not outcome.failure.elsewhere:  # else it is still missing
                failures[failure_name(run.draft)] = outcome.failure.reason
            wrong.append(f"{outcome.job.name} failed: {outcome.failure.reason}")
    change_failures(out, failures)
    return wrong


def _settled(run: Run, root: Path) -> bool:
    try:
        return workers.settled(run.config, root)
    except UserError:  # its directory is damaged: trying it says so, and the others go on
        return False


def _label(run: Run) -> str:
    return f"{run.place.track.name} {run.place.entry.name} {run.setting} seed {run.config.seed}"


def _time(track: Track, able: list[Place], stream: Stream, out: Path) -> None:
    """Measure the entries that were not yet, beside backprop."""
    known = read_times(out).get(track.name, {})
    new = [place for place in able if place.entry.name not in known and place.entry.name != BASE]
    if new or BASE not in known:
        base = Place(able[0].protocol, track, entries()[BASE])
        found = time_ratios([base, *new], stream)
        times = {name: time for name, time in found.items() if isinstance(time, float)}
        change_by_stream(out / TIMES, float, lambda known: joined(known, {track.name: times}))
        whys = {name: why if isinstance(why, str) else None for name, why in found.items()}
        change_failures(out, {timing_name(track.name, name): why for name, why in whys.items()})


def read_objections(out: Path) -> ByStream[str]:
    """Why an entry is not there; empty if nothing speaks against it."""
    return read_by_stream(out / OBJECTIONS, str)


def collect(chosen: Iterable[Place], out: Path, known: Records | None = None) -> Records:
    """The records of all runs of these places: from their directories, else what is known of them."""
    failures, records = read_failures(out), Records()
    for place in chosen:  # a run that entries share has the name of the first of them
        records |= gather(place.trials(), out, failures, known) | records
        values = place.best(records)
        if values is not None:
            records |= gather(place.reports(values), out, failures, known) | records
    return records


# --- the estimate -----------------------------------------------------------------------------------------------------


def estimate(chosen: Sequence[Place], out: Path) -> str:
    """How long the missing runs take on one core: from the pace of those on disk, else from the protocol."""
    rows, total = [["stream", "entries", "runs", "missing", "seconds each", "from", "hours"]], 0.0
    for track in dict.fromkeys(place.track for place in chosen):
        here = [place for place in chosen if place.track is track and place.settings]
        records: Records = collect(here, out, read_digest(out)) if out.exists() else {}
        protocol = chosen[0].protocol
        count = len(here) * (protocol.trials * len(protocol.tuning_seeds) + len(protocol.seeds))
        over = [record for record in records.values() if record.status != "failed"]
        seconds, whence = _pace(track, over)
        hours = max(count - len(over), 0) * seconds / 3600
        total += hours
        missing = str(max(count - len(over), 0))
        rows.append([track.name, str(len(here)), str(count), missing, f"{seconds:.0f}", whence, f"{hours:.1f}"])
    return f"{table(rows)}\n\nabout {total:.1f} hours on one core"


def _pace(track: Track, over: Sequence[Record]) -> tuple[float, str]:
    measured = [record.seconds for record in over if record.status == "done" and record.seconds]
    if measured:
        return fmean(measured), "runs on disk"
    return track.config({}, 0).steps * track.step / 1000, "the protocol"
