"""What `pip install gxd` brings: all that the commands read, and nothing else."""

from __future__ import annotations

import email
import email.message
import shutil
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of the sources, with a leaderboard."""
    builder = pytest.importorskip("hatchling.builders.wheel")
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE", ".gitignore"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "src", tree / "src")
    board = tree / "results" / "leaderboard"
    for name in ("digest.jsonl", "protocol.json", "board.html", "report/run/config.json"):
        (board / name).parent.mkdir(parents=True, exist_ok=True)
        (board / name).write_text("{}")
    (built,) = builder.WheelBuilder(str(tree)).build(directory=str(tree / "dist"), versions=["standard"])
    return Path(built)


@pytest.fixture(scope="module")
def files(wheel):
    """Name -> content."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def metadata(files) -> email.message.Message:
    return email.message_from_bytes(next(text for name, text in files.items() if name.endswith("/METADATA")))


def test_every_file_of_the_sources_is_in_the_wheel_and_the_board_without_its_runs(files):
    sources = [path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    expected = {path.relative_to(ROOT / "src").as_posix(): path.read_bytes() for path in sources}
    board = {f"gxd/lab/leaderboard/board/{name}": b"{}" for name in ("digest.jsonl", "protocol.json")}
    assert {name: text for name, text in files.items() if ".dist-info/" not in name} == {**expected, **board}
    for name in ("gxd/py.typed", "gxd/lab/data/digits.npz", "gxd/lab/sweeps/permuted-digits.toml"):
        assert name in files


def test_the_wheel_is_small_and_brings_the_licences_and_the_command(wheel, files):
    assert wheel.stat().st_size < 1_000_000
    info = {name.partition(".dist-info/")[2]: text for name, text in files.items() if ".dist-info/" in name}
    assert b"Optical Recognition of Handwritten Digits" in info["licenses/NOTICE"] and "licenses/LICENSE" in info
    assert b"gxd = gxd_command:main" in info["entry_points.txt"]


def test_the_library_needs_torch_alone(metadata):
    needs = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert needs == ["torch>=2.10"]


def test_the_lab_needs_nothing_large_besides(metadata):
    """scikit-learn and scipy, 190 MB, were there for 1,797 images and an interval."""
    lab = [need.partition(";") for need in metadata.get_all("Requires-Dist", []) if "extra == 'lab'" in need]
    assert {name.strip() for name, _, _ in lab} == {"jinja2", "matplotlib", "numpy", "rich", "tomli", "tyro"}
