"""Fetch and verify the files of MNIST and CIFAR-100: ``gxd data``.

A download grows in a ``.part`` file, which a later call goes on with, and gets its name only when its checksum is
right. What is unpacked from it does the same. So a file that has its name is whole.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import shlex
import shutil
import tarfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Literal, cast

import tyro

from gxd.lab.arguments import parse
from gxd.lab.data import directory
from gxd.lab.errors import UserError

BLOCK = 1 << 18  # bytes at a time
PATIENCE = 3  # broken connections in a row, without a byte in between, before giving up
PAUSE = 2.0  # seconds before trying again, more each time
TIMEOUT = 30.0  # seconds without an answer


@dataclass(frozen=True)
class Archive:
    """A file on a server and what is in it.

    Attributes:
        name: its path below the base address, and where it lies below the data directory while it is unpacked.
        checksum: ``algorithm:hex``.
        files: path below the data directory -> checksum, of what it unpacks to.
    """

    name: str
    folder: str
    checksum: str
    files: Mapping[str, str]

    @property
    def place(self) -> str:
        """Where it is put, below the data directory."""
        return f"{self.folder}/{self.name}" if self.folder else self.name


@dataclass(frozen=True)
class Source:
    """A data set: where its files come from."""

    title: str
    url: str
    archives: tuple[Archive, ...]


def _idx(name: str, md5: str, sha256: str) -> Archive:
    return Archive(f"{name}.gz", "MNIST/raw", f"md5:{md5}", {f"MNIST/raw/{name}": f"sha256:{sha256}"})


MNIST = Source(
    "MNIST",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    (
        _idx(
            "train-images-idx3-ubyte",
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        ),
        _idx(
            "train-labels-idx1-ubyte",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        ),
        _idx(
            "t10k-images-idx3-ubyte",
            "9fb629c4189551a2d022fa330f9573f3",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        ),
        _idx(
            "t10k-labels-idx1-ubyte",
            "ec29112dd5afa0611ce80d1b7f02629c",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
)
CIFAR100 = Source(
    "CIFAR-100",
    "https://www.cs.toronto.edu/~kriz/",
    (
        Archive(
            "cifar-100-binary.tar.gz",
            "",
            "md5:03b5dce01913d631647c71ecec9e9cb8",
            {
                "cifar-100-binary/train.bin": "sha256:f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
                "cifar-100-binary/test.bin": "sha256:d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
            },
        ),
    ),
)
SOURCES = {"mnist": MNIST, "cifar100": CIFAR100}

Watch = Callable[[str, int, int | None], None]  # name, bytes so far, bytes in all if known


# --- verify -----------------------------------------------------------------------------------------------------------


def digest(path: Path, algorithm: str) -> str:
    """The checksum of a file."""
    state = hashlib.new(algorithm, usedforsecurity=False)
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            state.update(block)
    return state.hexdigest()


def condition(path: Path, checksum: str) -> str:
    """``ok``, ``missing`` or ``wrong``."""
    algorithm, _, expected = checksum.partition(":")
    if not path.is_file():
        return "missing"
    return "ok" if digest(path, algorithm) == expected else "wrong"


def verify(source: Source, root: Path) -> dict[str, str]:
    """File -> its condition. A gzipped MNIST file counts for the plain one, for it is read just as well."""
    found = {}
    for archive in source.archives:
        for name, checksum in archive.files.items():
            state = condition(root / name, checksum)
            if state == "missing" and archive.name == f"{Path(name).name}.gz" and (root / archive.place).is_file():
                name, state = archive.place, condition(root / archive.place, archive.checksum)
            found[name] = state
    return found


# --- fetch ------------------------------------------------------------------------------------------------------------


def fetch(source: Source, root: Path, url: str | None = None, watch: Watch = lambda name, done, total: None) -> None:
    """Bring all files of a data set that are not there, or are wrong, to the data directory.

    Args:
        url: another base address than the official one.
        watch: told how a download goes on.
    """
    base = (url or os.environ.get("GXD_MIRROR") or source.url).rstrip("/") + "/"
    if not _is_address(base):
        raise UserError(f"{base!r} is no address of a server: give one such as https://server/directory")
    try:
        root.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise UserError(f"cannot write to {root} ({error.strerror}): choose another place with --data-dir") from error
    with _alone(root):
        for archive in source.archives:
            if all(condition(root / name, checksum) == "ok" for name, checksum in archive.files.items()):
                continue
            place = root / archive.place
            theirs = condition(place, archive.checksum) == "ok"
            if not theirs:
                place.parent.mkdir(parents=True, exist_ok=True)
                download(base + archive.name, place, archive.checksum, watch)
            _unpack(place, archive, root)
            if not theirs:
                place.unlink()


def _is_address(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        _ = parts.port
    except ValueError:  # brackets that do not close, or a port that is no number
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def download(
    url: str, place: Path, checksum: str, watch: Watch = lambda name, done, total: None, timeout: float = TIMEOUT
) -> None:
    """Download to ``place.part``, going on with what is there, check it, and give it its name."""
    part = place.with_name(place.name + ".part")
    most = idle = 0
    while True:
        try:
            _transfer(url, part, lambda done, total: watch(place.name, done, total), timeout)
            break
        except ConnectionError as error:
            size = part.stat().st_size if part.exists() else 0
            idle = 0 if size > most else idle + 1
            most = max(most, size)
            if idle >= PATIENCE:
                kept = f"; the {size} bytes that came are kept, and the same command goes on from there" if size else ""
                raise UserError(
                    f"cannot fetch {url} ({error}): check the connection, or name a mirror with --url{kept}"
                ) from error
            time.sleep(idle * PAUSE)
    algorithm, _, expected = checksum.partition(":")
    found = digest(part, algorithm)
    if found != expected:
        part.unlink()
        raise UserError(
            f"{url} has the wrong checksum ({algorithm} {found}, not {expected}): the download was removed; try again, "
            "or name another mirror with --url"
        )
    os.replace(part, place)


def _transfer(url: str, part: Path, watch: Callable[[int, int | None], None], timeout: float) -> None:
    """One request: append to the part file what it lacks."""
    start = part.stat().st_size if part.exists() else 0
    # Compression on the way would make byte positions meaningless.
    request = urllib.request.Request(url, headers={"User-Agent": "gxd", "Accept-Encoding": "identity"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    try:
        response = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code == 416 and start:  # nothing lies behind what we have: it is complete, or not of this file
            return
        if error.code >= 500:  # it may be over soon
            raise ConnectionError(f"{error.code} {error.reason}") from error
        raise UserError(
            f"{url} answers {error.code} {error.reason}: name a mirror that has it with --url or GXD_MIRROR"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(str(getattr(error, "reason", error))) from error
    with response:
        resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        done = start if resumed else 0  # a server that knows no ranges sends everything again
        length = response.headers.get("Content-Length")
        total = done + int(length) if length is not None else None
        with open(part, "ab" if resumed else "wb") as file:
            watch(done, total)
            while block := _received(response):
                file.write(block)
                done += len(block)
                watch(done, total)
    if total is not None and done < total:
        raise ConnectionError(f"the connection broke off at {done} of {total} bytes")


def _received(response: IO[bytes]) -> bytes:
    """The next bytes. Errors of the network are told from those of the disk here."""
    try:
        return response.read(BLOCK)
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(str(error) or type(error).__name__) from error


# --- unpack -----------------------------------------------------------------------------------------------------------


def _unpack(place: Path, archive: Archive, root: Path) -> None:
    """Write the files of an archive, and no others, where they belong. Names in the archive are never used as paths."""
    try:
        if archive.name.endswith(".tar.gz"):
            with tarfile.open(place, "r:gz") as tar:
                members = {member.name.removeprefix("./"): member for member in tar.getmembers() if member.isfile()}
                for name, checksum in archive.files.items():
                    member = tar.extractfile(members[name]) if name in members else None
                    if member is None:
                        raise UserError(f"{place} has no file {name}: delete it and fetch again")
                    _place(member, root / name, checksum)
        else:
            ((name, checksum),) = archive.files.items()
            with gzip.open(place) as content:
                _place(cast(IO[bytes], content), root / name, checksum)
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{place} cannot be unpacked ({error}): delete it and fetch again") from error


def _place(content: IO[bytes], path: Path, checksum: str) -> None:
    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(part, "wb") as file:
            shutil.copyfileobj(content, file, BLOCK)
        if condition(part, checksum) != "ok":
            raise UserError(f"{path.name}, as unpacked, has the wrong checksum: it was removed; fetch again")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Keep a second process from writing to the same part files. The lock goes with the process that holds it."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    with open(root / ".fetch.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another process is fetching to {root}: wait until it has finished") from error
        yield


# --- the command ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """Fetch or verify the files of MNIST and CIFAR-100."""

    action: Annotated[Literal["fetch", "verify"], tyro.conf.Positional]
    """fetch: download what is missing or wrong. verify: compare the checksums of what is there."""
    dataset: Annotated[Literal["mnist", "cifar100"], tyro.conf.Positional]
    """Which data set."""
    data_dir: Path | None = None
    """Where the data lie. Default: GXD_DATA, else ~/.cache/gxd/data."""
    url: str | None = None
    """Base address to fetch from. Default: GXD_MIRROR, else the official one."""


def command(argv: list[str]) -> int:
    """``gxd data fetch|verify mnist|cifar100``."""
    options = parse(Options, argv or ["--help"], "gxd data")
    source, root = SOURCES[options.dataset], directory(options.data_dir)
    if options.action == "fetch":
        with _bars() as watch:
            fetch(source, root, options.url, watch)
        print(f"{source.title} is in {root}; all checksums are right")
        return 0
    found = verify(source, root)
    for name, state in found.items():
        print(f"{state:8s}{root / name}")
    bad = sum(state != "ok" for state in found.values())
    if bad:
        words = ["gxd", "data", "fetch", options.dataset]
        words += ["--data-dir", str(options.data_dir)] if options.data_dir is not None else []
        are = "file is" if bad == 1 else "files are"
        raise UserError(f"{bad} {are} wrong or missing: `{shlex.join(words)}` puts that right")
    return 0


@contextmanager
def _bars() -> Iterator[Watch]:
    """A progress bar per download, on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    tasks: dict[str, Any] = {}
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def watch(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total)
            progress.update(tasks[name], completed=done, total=total)

        yield watch
