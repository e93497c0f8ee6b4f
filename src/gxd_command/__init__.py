"""The command ``gxd``: an overview, and a subcommand for each experiment, imported when it is called.

Outside the package ``gxd``, whose import brings torch: ``gxd --help`` answers at once, and Ctrl-C is one line from the
start. It cannot be inside: a ``gxd`` that imports lazily would lose its functions ``gxd.methods`` and ``gxd.diagnose``
as soon as anything imports from the packages of the same name, for Python then binds these in their place.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

# The subcommand NAME is the function `command` of the module `gxd.lab.NAME`.
COMMANDS = {
    "demo": "watch backprop lose plasticity and the right resets keep it, in about 90 seconds",
    "run": "train one method on one stream of tasks; without arguments it lists both",
    "sweep": "a grid of runs from a TOML file, on this machine or on a Ray cluster",
    "watch": "a live board of the runs that are being made",
    "assay": "how well each utility predicts the true cost of a reset",
    "report": "one HTML page about your runs, beside the paper where they are of it",
    "data": "fetch or verify MNIST and CIFAR-100",
    "leaderboard": "every method on five streams under one protocol; add a method of your own",
    "bench": "what a step costs, relative to plain backprop",
}
EXTRA = "the command gxd needs the lab's packages: pip install 'gxd[lab]'"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    _prepare_streams()
    code = _guarded(list(sys.argv[1:] if argv is None else argv))
    try:
        sys.stdout.flush()  # here, for at the end of Python nobody could say what went wrong
    except BrokenPipeError:
        return _silenced(code)
    except OSError as error:
        return _silenced(code or _complain(f"the output cannot be written ({error.strerror})", 1))
    return code


def _guarded(args: list[str]) -> int:
    """Run one command. What goes wrong becomes one line and an exit code."""
    try:
        return _route(args)
    except KeyboardInterrupt:
        return _complain("interrupted; what was complete is kept, and the same command goes on from there", 130)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "gxd":
            raise
        return _complain(f"no module named {error.name!r}: {EXTRA}", 2)
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        return _silenced(1)
    except OSError as error:
        return _complain(_in_words(error), 1)


def _route(args: list[str]) -> int:
    """Answer what needs no torch, or hand over to the subcommand."""
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if args[0] in ("-V", "--version"):
        print(f"gxd {version()}")
        return 0
    name, rest = args[0], args[1:]
    if name not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return _complain(f"unknown command {name!r}.{hint} The commands are {', '.join(COMMANDS)}", 2)
    return _call(name, rest)


def _call(name: str, args: list[str]) -> int:
    from gxd.lab.errors import UserError  # here, for from now on there is torch

    try:
        code: int = importlib.import_module(f"gxd.lab.{name}").command(args)
    except UserError as error:
        return _complain(str(error), 2)
    except SystemExit:  # --help
        sys.stdout.flush()
        raise
    return code


def usage() -> str:
    """The overview that ``gxd --help`` prints."""
    lines = [f"  {name:11s} {text}" for name, text in COMMANDS.items()]
    last = "gxd COMMAND --help says what each takes, gxd --version which version this is."
    return "\n".join(["usage: gxd COMMAND ...", "", *lines, "", last])


def version() -> str:
    """``gxd.__version__``, without the import of gxd."""
    import importlib.util
    import runpy

    package = importlib.util.find_spec("gxd")
    assert package is not None and package.origin is not None
    return str(runpy.run_path(os.path.join(os.path.dirname(package.origin), "version.py"))["__version__"])


def _prepare_streams() -> None:
    """What is said to a stream that was closed is lost, and what a stream has no letter for is a question mark: no
    reason to lose the work that came before.
    """
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def _silenced(code: int) -> int:
    """Throw away what stdout still holds: Python would try to write it once more at the end, and complain."""
    with suppress(io.UnsupportedOperation), open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())
    return code or 1


def _complain(message: str, code: int) -> int:
    with suppress(OSError):  # nobody hears it, but the exit code tells
        print(f"gxd: {message}", file=sys.stderr)
    return code


def _in_words(error: OSError) -> str:
    what = f" ({error.filename})" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"the disk is full{what}: free some space, and the same command goes on from the last complete task"
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return f"no permission{what}: choose a directory that can be written to"
    return f"{error.strerror or error}{what}"
