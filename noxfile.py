"""The tests on the oldest and the newest Python and torch that gxd supports, and on this Python: ``make test-matrix``.

An interpreter that is not on this machine is named and skipped. What comes after ``--`` goes to pytest, ``-p 3.11``
runs the rows of one Python, ``--list`` shows them all. pip looks for torch where it looks for everything.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path

import nox

nox.options.error_on_missing_interpreters = False
nox.options.default_venv_backend = "venv"
nox.options.download_python = "never"

# Nothing is written twice: Pythons are the classifiers of pyproject.toml, the oldest torch is its requirement, and the
# newest the one of constraints.txt, with which everything else is tested, too.
PROJECT = nox.project.load_toml("pyproject.toml")
PINS = Path("constraints.txt").read_text(encoding="utf-8")
PYTHONS = nox.project.python_versions(PROJECT)
(OLDEST,) = (need.removeprefix("torch>=") + ".*" for need in PROJECT["project"]["dependencies"])
(NEWEST,) = re.findall(r"^torch==(\S+)$", PINS, flags=re.MULTILINE)
HERE = ".".join(platform.python_version_tuple()[:2])
MATRIX = dict.fromkeys([(PYTHONS[0], OLDEST), (PYTHONS[-1], NEWEST), (HERE, NEWEST)])


@nox.session
@nox.parametrize("python,torch", list(MATRIX))
def tests(session: nox.Session, torch: str) -> None:
    """The tests, against a gxd that is installed as users install it: not in place, without the checkout's src."""
    pins = Path(session.create_tmp()) / "constraints.txt"
    pins.write_text(re.sub(r"(?m)^torch==.*$", f"torch=={torch}", PINS), encoding="utf-8")
    session.install("-c", str(pins), "hatchling")
    session.install("-c", str(pins), "--no-build-isolation", ".[test]")
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    args = session.posargs or ["-n", "2", "--dist", "worksteal", "-m", "not slow"]
    session.run("python", "-m", "pytest", *args, env=environment)
