"""Methods of the user's own on a board: which file registered each, and what is tried of it (own.json)."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path
from types import ModuleType

import gxd
from gxd.lab import methods
from gxd.lab.errors import UserError
from gxd.lab.leaderboard.entries import DEFAULTS, Entry, Setting, entries
from gxd.lab.store import held, read_json, write_json

OWN = "own.json"
Theirs = dict[str, dict[str, object]]  # by name; of what was added before files were written down, the version alone


def claim(out: Path, file: Path, texts: Sequence[str], names: Sequence[str]) -> None:
    """Write down which file the runs are of. Raises :class:`UserError` if there are runs of another version of it.

    Runs are found by their settings, which do not tell one version of a user's code from the next: the file does.
    """
    version = _version(file)
    about = {"version": version, "file": str(file.absolute()), "grid": list(texts)}
    with held(out):  # another process may be adding its own
        theirs = _theirs(out)
        for name in names:
            if theirs.get(name, {}).get("version", version) != version:
                raise UserError(
                    f"{out} has runs of {name} from before {file} was changed: choose another --out, or delete that "
                    "directory"
                )
        write_json(out / OWN, {**theirs, **dict.fromkeys(names, about)})


def read(out: Path, but: Collection[str] = ()) -> list[Entry]:
    """The user's methods of a board, each imported from its file.

    Raises :class:`UserError` if a file is gone or was changed: a board that is written without its method loses it.
    """
    found = []
    for name, about in _theirs(out).items():
        if name in but:
            continue
        file = _unchanged(out, name, about)
        module = methods.load(file)
        if name not in gxd.methods():
            raise _refusal(out, name, f"{file} does not register it")
        found.append(entries({name: grid(file, about["grid"], module)})[name])
    return found


def grid(file: Path, texts: object, module: ModuleType) -> Sequence[Setting]:
    """The settings of a user's method: those that were named in texts, else GRID of its file, else its defaults."""
    theirs = getattr(module, "GRID", None)
    if texts and isinstance(texts, (list, tuple)):
        return [methods.values_of(tuple(text.split(","))) for text in texts]
    if theirs is None:
        return DEFAULTS
    if not isinstance(theirs, (list, tuple)) or not all(isinstance(setting, dict) for setting in theirs):
        raise UserError(f'GRID in {file} must be a list of dicts of options, as in [{{"strength": 0.1}}]')
    return list(theirs)


def _theirs(out: Path) -> Theirs:
    file = out / OWN
    read = read_json(file, "restore it, or choose another --out") if file.exists() else {}
    if not all(isinstance(about, (str, dict)) for about in read.values()):
        raise UserError(f"{file} is damaged: restore it, or choose another --out")
    return {name: {"version": about} if isinstance(about, str) else about for name, about in read.items()}


def _version(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:10]


def _unchanged(out: Path, name: str, about: dict[str, object]) -> Path:
    """The file of a method, to be imported."""
    if "file" not in about:
        raise _refusal(out, name, f"{OWN} does not say which file registers it")
    file = Path(str(about["file"]))
    # As we wrote it, the path is absolute. A board from elsewhere must not bring code along that showing it would run.
    if not file.is_absolute() or not file.is_file():
        raise _refusal(out, name, f"{file} that registers it is gone")
    if _version(file) != about["version"]:
        raise _refusal(out, name, f"{file} that registers it was changed")
    return file


def _refusal(out: Path, name: str, why: str) -> UserError:
    return UserError(
        f"{out} has runs of {name}, but {why}: nothing was written; gxd leaderboard add FILE --out {out}, with that "
        "file as it was, makes the board again"
    )
