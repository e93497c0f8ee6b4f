"""Processes that start at once: forked from a server that has imported torch and has done nothing else."""

import multiprocessing
import os
import sys
import textwrap
from pathlib import Path

WARM = multiprocessing.get_context("forkserver")
WARM.set_forkserver_preload(["gxd.lab.run"])


def run_script(source: str, directory: Path, *args: object, timeout: float = 240) -> tuple[int | None, str]:
    """Run a script in a process of one thread. Returns the exit code, or minus the signal that ended it, and stderr."""
    said = directory / "stderr"
    process = WARM.Process(target=_script, args=(textwrap.dedent(source), [str(directory), *map(str, args)], said))
    process.start()
    process.join(timeout)
    process.kill()
    return process.exitcode, said.read_text()


def _script(source: str, args: list[str], said: Path) -> None:
    with said.open("w") as file:
        os.dup2(file.fileno(), 2)
    sys.argv[1:] = args
    exec(compile(source, "<script>", "exec"), {"__name__": "__main__"})
