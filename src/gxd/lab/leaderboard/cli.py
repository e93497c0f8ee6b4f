"""The command ``gxd leaderboard``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

import gxd
from gxd.lab import methods
from gxd.lab.arguments import parse
from gxd.lab.config import check_name
from gxd.lab.errors import UserError
from gxd.lab.leaderboard import output, own, work
from gxd.lab.leaderboard.board import Board, make_board
from gxd.lab.leaderboard.entries import DEFAULTS, Entry, entries
from gxd.lab.leaderboard.plan import Place
from gxd.lab.leaderboard.protocol import PROTOCOL, Protocol
from gxd.lab.leaderboard.records import Records, change_by_stream, joined, read_digest, read_failures, write_digest
from gxd.lab.leaderboard.timing import TIMES, read_times

COMMITTED = Path("results/leaderboard")
SHIPPED = Path(__file__).parent / "board"  # where the build puts a copy of it
CHECKOUT = Path(__file__).parents[4] / COMMITTED  # of an installation that is editable
USAGE = """usage: gxd leaderboard run | show | add ...

  run    do the runs of the board that are missing
  show   print the board
  add    run a method of your own under the same protocol, and place it

gxd leaderboard COMMAND --help says what each takes."""


@dataclass(frozen=True)
class RunOptions:
    """Do the runs of the board that are missing: the same command again goes on where it stopped."""

    streams: tuple[str, ...] = ()
    """Only these streams, as they are named on the board. Default: all, the cheapest first."""
    entries: tuple[str, ...] = ()
    """Only these methods and controls. Default: all."""
    out: Path = Path("runs/leaderboard")
    """Where the runs and the board go. With --ray, on a file system that all nodes share."""
    workers: int | None = None
    """Runs at a time, one thread each. Default: as many as there are cores."""
    ray: str | None = None
    """Use Ray: auto joins the cluster that runs on this machine, local starts one, else the address of one."""
    estimate: bool = False
    """Say how long the missing runs take on one core, and do nothing."""


@dataclass(frozen=True)
class ShowOptions:
    """Print the board of a directory.

    A method of your own that `gxd leaderboard add` put there is imported from its file, if that is as it was.
    """

    directory: tyro.conf.Positional[Path | None] = None
    """Where `gxd leaderboard run` put it, or a copy without the runs themselves. Default: results/leaderboard, else the
    board that came with gxd."""
    write: bool = False
    """Also write it there, from the runs: board.csv, ranks.csv, board.md and board.html."""


@dataclass(frozen=True)
class AddOptions:
    """Run a method of your own under the same protocol, and place it on the board.

    The file registers it with gxd.register_method. It is imported, so give only a file that you trust. A list GRID in
    it, of dicts of options, says which 1, 2, 3 or 6 settings of it are tried; with the learning rates they make six
    trials, as of every method. Without, its defaults are tried with six learning rates.
    """

    file: tyro.conf.Positional[Path]
    """The Python file."""
    grid: tuple[str, ...] = ()
    """In place of GRID: settings of the method, each OPTION=VALUE,OPTION=VALUE, as in --grid strength=0.1 strength=1"""
    streams: tuple[str, ...] = ()
    """Only these streams. Default: all."""
    board: Path | None = None
    """The board to place it on. Default: results/leaderboard, else the one that came with gxd."""
    out: Path = Path("runs/leaderboard-mine")
    """Where its runs go, and the board with it."""
    workers: int | None = None
    """Runs at a time, one thread each. Default: as many as there are cores."""
    ray: str | None = None
    """Use Ray: auto joins the cluster that runs on this machine, local starts one, else the address of one."""


def command(argv: list[str], protocol: Protocol = PROTOCOL) -> int:
    """``gxd leaderboard ...``."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    check_name(argv[0], ("run", "show", "add"), "command of gxd leaderboard:")
    prog = f"gxd leaderboard {argv[0]}"
    if argv[0] == "run":
        return _run(parse(RunOptions, argv[1:], prog), protocol)
    if argv[0] == "show":
        return _show(parse(ShowOptions, argv[1:], prog), protocol)
    return _add(parse(AddOptions, argv[1:], prog), protocol)


def _run(options: RunOptions, protocol: Protocol) -> int:
    known = entries()
    for name in options.entries:
        check_name(name, known, "entry")
    rows = [entry for name, entry in known.items() if not options.entries or name in options.entries]
    chosen = _places(protocol, rows, options.streams)
    out = options.out.absolute()  # a method of the user's may go to another directory
    if options.estimate:
        work.check_protocol(out, protocol)
        print(work.estimate(chosen, out))
        return 0
    theirs = own.read(out)
    wrong = work.do(chosen, out, _means(options.workers, options.ray))
    publish(out, protocol, theirs)
    return _conclude(wrong, out)


def _show(options: ShowOptions, protocol: Protocol) -> int:
    directory = _found(options.directory, protocol)
    board, records = _read(directory, protocol, own.read(directory))
    if options.write:
        _write(board, records, directory, protocol)
    print(output.markdown(board, protocol))
    if options.write:
        print(f"{directory / output.PAGE} is the page")
    return 0


def _found(named: Path | None, protocol: Protocol) -> Path:
    """The board that was named, else that of the checkout that we are in, else the one that came with gxd; absolute,
    for a method of the user's may go to another directory.
    """
    directory = named or next((place for place in (COMMITTED, SHIPPED, CHECKOUT) if place.is_dir()), None)
    if directory is None:
        raise UserError(
            f"there is no board in {COMMITTED}, and none came with this gxd. Make one with gxd leaderboard run, and "
            f"name its directory ({RunOptions.out} unless you choose another): gxd leaderboard show DIR, or gxd "
            "leaderboard add FILE --board DIR"
        )
    if not directory.is_dir() or not work.check_protocol(directory, protocol):
        raise UserError(f"{directory} is no leaderboard: make one with gxd leaderboard run --out DIR")
    return directory.absolute()


def publish(out: Path, protocol: Protocol, extra: Sequence[Entry] = (), base: Path | None = None) -> Board:
    """Write the board of a directory beside its runs. Returns it.

    Args:
        extra: entries of the user's own.
        base: a board whose entries are shown with them.
    """
    if base is not None:
        _take_over(base, out, extra)
    board, records = _read(out, protocol, extra)
    _write(board, records, out, protocol)
    return board


def _write(board: Board, records: Records, out: Path, protocol: Protocol) -> None:
    known = read_digest(out)
    # What is not understood here, such as runs of a method that is not loaded, is not ours to throw away.
    write_digest(out, [*records.values(), *(known[name] for name in known if name not in records)])
    output.write(board, protocol, out)


def _read(out: Path, protocol: Protocol, extra: Sequence[Entry] = ()) -> tuple[Board, Records]:
    """The board of a directory, and all that is known of its runs."""
    rows = {**entries(), **{entry.name: entry for entry in extra}}
    every = work.places(protocol, rows.values())
    # A copy without the runs has the digest alone; of a run that is in both, its directory counts.
    records = work.collect(every, out, read_digest(out))
    board = make_board(every, records, read_times(out), work.read_objections(out), read_failures(out))
    return replace(board, own=tuple(entry.name for entry in extra)), records


def _take_over(base: Path, out: Path, extra: Sequence[Entry]) -> None:
    """Write down what another board knows, so that this one can be shown without it; of what both know, ours counts."""
    ours = {entry.name for entry in extra}  # of which the other board may have runs of another version
    theirs = {name: r for name, r in read_digest(base).items() if r.method in entries() and r.method not in ours}
    write_digest(out, {**theirs, **read_digest(out)}.values())
    change_by_stream(out / TIMES, float, lambda known: joined(read_times(base), known))
    change_by_stream(out / work.OBJECTIONS, str, lambda known: joined(work.read_objections(base), known))


def _add(options: AddOptions, protocol: Protocol) -> int:
    # A method of the user's may go to another directory.
    out, file = options.out.absolute(), options.file.absolute()
    named = None if options.board is None else options.board.absolute()
    before, taken = dict(gxd.methods()), {*entries(), *gxd.methods(), *gxd.utilities()}
    module = methods.load(file)
    base = _found(named, protocol)
    new = [name for name, info in gxd.methods().items() if before.get(name) is not info]
    replaced = [name for name in new if name in taken]
    if replaced:
        raise UserError(f"{file} registers {replaced[0]!r}, which is there already: give it a name of its own")
    if not new:
        raise UserError(f"{file} registers no method: decorate its function with gxd.register_method")
    grid = own.grid(file, options.grid, module)
    added = [entries({name: grid})[name] for name in new]
    chosen = _places(protocol, added, options.streams)
    shared = ""
    if len(new) > 1 and grid is not DEFAULTS:
        shared = f"; these settings are tried of {' and '.join(new)}, which {file} registers: give each its own file"
    for place in chosen:
        if place.refusal and place.track.kind.boundaries:
            raise UserError(place.refusal + shared)  # of its grid, which is wrong on all streams
    means = _means(options.workers, options.ray, (file,))
    others = own.read(out, but=new)
    work.claim(out, protocol)
    own.claim(out, file, options.grid, new)
    wrong = work.do(chosen, out, means)
    board = publish(out, protocol, [*others, *added], base)
    for place in chosen:
        print(output.placed(board, place.track, place.entry.name))
    placed = any(row.rank is not None for row in board.rows if row.method in new)
    return max(_conclude(wrong, out), 0 if placed else 1)


def _places(protocol: Protocol, rows: Sequence[Entry], streams: Sequence[str]) -> list[Place]:
    names = [track.name for track in protocol.tracks]
    for name in streams:
        check_name(name, names, "stream")
    return work.places(protocol, rows, [track for track in protocol.tracks if not streams or track.name in streams])


def _means(processes: int | None, ray: str | None, files: Sequence[Path] = ()) -> work.Means:
    if processes is not None and processes < 1:
        raise UserError(f"--workers {processes} must be 1 or more")
    return work.Means(processes, ray, files)


def _conclude(wrong: Sequence[str], out: Path) -> int:
    """Say what went wrong, one line each, and return the exit code."""
    for line in wrong:
        print(f"gxd: {line}", file=sys.stderr)
    if wrong:
        print(f"gxd: {len(wrong)} failed; the same command tries them again", file=sys.stderr)
    print(f"{out / output.PAGE} is the page; gxd leaderboard show {out} prints the board")
    return 1 if wrong else 0
