"""The board of running sweeps: what it counts, that it only reads, and what it says of bad input."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

pytest.importorskip("rich")

import gxd_command as cli
from gxd.lab import watch
from gxd.lab.grid import load
from gxd.lab.seen import Scanner
from gxd.lab.watch import Summary

from .test_study import write

GRID = """
experiment = "permuted-digits"
seeds = [0, 1]
[fixed]
tasks = 30
[grid]
method = ["backprop", "redo", "l2_init"]
"""


def old(directory: Path, seconds: float) -> None:
    """As if nothing had been written for so long."""
    for file in directory.iterdir():
        os.utime(file, (time.time() - seconds,) * 2)


def sweep_under_way(root: Path) -> None:
    """Of six runs one is done, one has diverged, one runs, one was stopped, and two were not begun."""
    write(root / "mine", method="backprop", seed=0)
    write(root / "mine", method="redo", seed=0, dies=4)
    write(root / "mine", method="l2_init", seed=0, stops=20, level=0.625)
    old(write(root / "mine", method="backprop", seed=1, stops=10), 3600)


def once(capsys, *argv: object) -> str:
    assert cli.main(["watch", *map(str, argv), "--once"]) == 0
    return capsys.readouterr().out


def row_of(said: str, begins: str) -> list[str]:
    (line,) = [line for line in said.splitlines() if line.startswith(begins)]
    return line.replace("━", "").replace("╸", "").replace("╺", "").split()


def test_a_snapshot_counts_what_is_done_runs_diverged_stopped_and_is_missing(tmp_path, capsys):
    sweep_under_way(tmp_path)
    (tmp_path / "mine.toml").write_text(GRID)
    said = once(capsys, tmp_path, "--sweep", tmp_path / "mine.toml")
    heads = said.splitlines()[0].split()
    assert heads == ["study", "done", "running", "silent", "diverged", "failed", "missing", "ETA"]
    study = row_of(said, "mine/permuted-digits")
    assert study[1:7] == ["1", "1", "1", "1", "·", "2"]
    assert study[7] == "50%"  # 30 + 30 + 20 + 10 of 180 tasks: what diverged has nothing more to do
    run = row_of(said, "l2_init_relu")
    assert "20/30" in run and "accuracy" in run and "3" in run
    assert "silent: no line for long" in said


def test_what_is_left_takes_as_long_as_its_method_has_taken_so_far(tmp_path):
    sweep_under_way(tmp_path)
    (tmp_path / "mine.toml").write_text(GRID)
    sweep = load(tmp_path / "mine.toml")
    planned = {run.run_directory(tmp_path / "mine").resolve(): run.tasks for run in sweep.runs()}
    one = Summary.of("mine", Scanner([tmp_path]).look(), planned)
    # One run at a time: 10 tasks of l2_init at 3 s, 20 of backprop at 2 s, 60 at the mean pace of the four runs.
    assert one.eta == pytest.approx(10 * 3.0 + 20 * 2.0 + 60 * (2 + 3 + 3 + 2) / 4)


def test_without_the_file_what_is_missing_is_of_the_settings_and_seeds_begun(tmp_path, capsys):
    sweep_under_way(tmp_path)
    said = once(capsys, tmp_path)
    assert row_of(said, "mine/permuted-digits")[6] == "2" and "--sweep FILE" in said


def test_a_leaderboard_has_a_row_per_stage_and_its_failures_are_told(tmp_path, capsys):
    write(tmp_path / "tuning", method="redo", seed=100)
    write(tmp_path / "report", method="redo", seed=0, stops=3)
    lost = write(tmp_path / "tuning", method="redo", seed=101, stops=3)
    key = lost.parent.name.rpartition("_")[2]
    (tmp_path / "failures.json").write_text(json.dumps({f"tuning/{key}/101": "it raises"}))
    (tmp_path / "protocol.json").write_text(json.dumps({"fingerprint": "of another version"}))
    said = once(capsys, tmp_path)
    assert row_of(said, "tuning/permuted-digits")[1:7] == ["1", "·", "·", "·", "1", "·"]
    assert row_of(said, "report/permuted-digits")[1:7] == ["·", "1", "·", "·", "·", "·"]


def test_looking_writes_nothing(tmp_path, capsys):
    sweep_under_way(tmp_path)

    def state() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")}

    before = state()
    once(capsys, tmp_path)
    assert state() == before


def test_a_line_that_is_being_written_and_a_run_that_has_just_begun_are_no_trouble(tmp_path, capsys):
    running = write(tmp_path / "mine", method="redo", stops=7)
    with (running / "metrics.jsonl").open("a") as file:
        file.write('{"task": 7, "test_acc')
    begun = write(tmp_path / "mine", method="l2_init", stops=0)
    (begun / "metrics.jsonl").unlink()
    (begun / "status.json").unlink()
    said = once(capsys, tmp_path)
    assert "7/30" in row_of(said, "redo") and "0/30" in row_of(said, "l2_init")
    assert row_of(said, "mine")[2] == "2"


def test_a_damaged_run_is_named_and_the_others_are_shown(tmp_path, capsys):
    write(tmp_path / "mine", method="redo")
    broken = write(tmp_path / "mine", method="redo", seed=1)
    (broken / "status.json").write_text('{"status"')
    said = once(capsys, tmp_path)
    assert row_of(said, "mine")[1] == "1" and "cannot be read" in said and "seed1" in said.replace("\n", "")


def test_a_run_that_is_over_is_read_once(tmp_path):
    directory = write(tmp_path / "mine", method="redo")
    scanner = Scanner([tmp_path])
    first = scanner.look()
    (directory / "metrics.jsonl").write_text("damaged since, and never looked at again\n")
    assert scanner.look() == first and not scanner.unreadable


def test_of_a_regression_the_loss_is_shown(tmp_path, capsys):
    write(tmp_path / "mine", "slow-regression", method="l2", stops=5, level=0.5)
    assert "loss" in row_of(once(capsys, tmp_path), "l2_relu")


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda path: path / "absent", "absent does not exist"),
        (lambda path: (path / "empty").mkdir() or path / "empty", "holds no run of gxd"),
        (lambda path: (path / "file").touch() or path / "file", "is a file"),
    ],
)
def test_what_cannot_be_watched_is_one_line(tmp_path, capsys, make, says):
    assert cli.main(["watch", str(make(tmp_path)), "--once"]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_a_directory_of_another_program_or_with_a_digest_alone_is_told(tmp_path, capsys):
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    assert cli.main(["watch", str(tmp_path)]) == 2
    assert "holds no run of gxd" in capsys.readouterr().err
    (tmp_path / "digest.jsonl").write_text("")
    assert cli.main(["watch", str(tmp_path)]) == 2
    assert "gxd report shows it" in capsys.readouterr().err
    assert cli.main(["watch"]) == 2 and cli.main(["watch", str(tmp_path), "--every", "0"]) == 2


def test_ctrl_c_leaves_quietly(tmp_path, monkeypatch, capsys):
    sweep_under_way(tmp_path)
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", sleep)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert cli.main(["watch", str(tmp_path), "--every", "2"]) == 0
    said = capsys.readouterr()
    assert looks == [2.0, 2.0] and "interrupted" not in said.err and "l2_init" in said.out
