"""``gxd demo``: five methods side by side, a table, a picture, a page."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

import gxd_command as cli
from gxd.lab import demo, run, workers
from gxd.lab.demo import Result
from gxd.lab.report import demo_page
from gxd.lab.workers import Failure, Job, Outcome, settled

pytestmark = pytest.mark.usefixtures("warm_workers")


def test_a_quick_demo_ends_with_a_table_a_picture_and_a_page_and_a_second_one_is_instant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "demo"
    argv = ["demo", "--quick", "--out", str(out), "--jobs", "1"]
    assert cli.main(argv) == 0
    said = capsys.readouterr()
    for method in demo.METHODS:
        assert f"\n{method}  " in said.out
        assert f"{method}, seed 0" in said.err  # its bar
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "index.html").read_text()
    assert (out / "index.html").resolve().as_uri() in said.out
    assert not [word for word in ('src="http', "src='http", 'href="http', "@import", "<link") if word in page]

    trained: list[str] = []

    def pretend(jobs: list[Job], root: Path, board: Any, **options: Any) -> list[Outcome]:
        trained.extend(job.name for job in jobs)
        return [Outcome(job, "failed", Failure("pretended")) for job in jobs]

    monkeypatch.setattr(workers, "run_all", pretend)
    assert cli.main(argv) == 0
    again = capsys.readouterr().out
    assert trained == []
    assert "results of an earlier demo" in again
    assert said.out.partition("\nmethod")[2] == again.partition("\nmethod")[2]

    # --fresh forgets the runs of the demo, and nothing else; a run that fails is a line and an exit code.
    (out / "runs" / "mine.txt").write_text("keep")
    assert cli.main([*argv, "--fresh"]) == 1
    assert trained == [f"{method}, seed 0" for method in demo.METHODS]
    assert "gxd: gxd, seed 0 failed: pretended" in capsys.readouterr().err
    assert (out / "runs" / "mine.txt").read_text() == "keep"
    assert not any(settled(config, out / "runs") for config in demo.configs(quick=True))


def test_a_place_that_cannot_be_written_to_is_named_before_anything_is_promised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    assert cli.main(["demo", "--quick", "--out", str(tmp_path / "file")]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"gxd: cannot write to {tmp_path / 'file'}")


def test_a_full_disk_leaves_the_page_of_an_earlier_demo_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = demo.configs(quick=True)[0]
    run.train(config, tmp_path / "runs", checkpoint_every=60)
    directory = config.run_directory(tmp_path / "runs")
    demo_page([directory], tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    assert set(before) == {"demo.png", "demo.svg", "index.html"}
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        write(path, data[:9])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        demo_page([directory], tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()} == before
    assert [file.name for file in tmp_path.iterdir() if file.is_dir()] == ["runs"]


def test_the_table_averages_the_runs_that_lived(tmp_path: Path) -> None:
    runs = [c for c in demo.configs() if c.method in ("backprop", "gxd")]
    for config in runs:
        directory = config.run_directory(tmp_path)
        directory.mkdir(parents=True)
        dead = config.method == "gxd" and config.seed == runs[0].seed
        end = {"backprop": 0.4, "gxd": 0.8}[config.method]
        curve = [0.8] * 5 if dead else [0.8] * (config.tasks - 15) + [end] * 15
        lines = [json.dumps({"task": task, "test_accuracy": value}) + "\n" for task, value in enumerate(curve)]
        (directory / "metrics.jsonl").write_text("".join(lines))
        status = {"status": "diverged" if dead else "done", "task": len(curve), "seconds": 1.0}
        (directory / "status.json").write_text(json.dumps(status))
    backprop, gxd = demo.results(runs, tmp_path)
    assert (backprop.first, backprop.diverged) == (pytest.approx(0.8), 0)
    assert backprop.last == pytest.approx(0.4)
    assert (gxd.last, gxd.diverged, gxd.runs) == (pytest.approx(0.8), 1, len(demo.SEEDS))
    assert f"1/{len(demo.SEEDS)}" in demo.results_table([gxd], 15)


def told(plain: float, resets: float, other: float | None = None) -> str:
    last = None if other is None else 0.8 + other
    return demo.explanation(
        [
            Result("backprop", 0.8, 0.8 + plain, 0, 2),
            Result("gxd", 0.8, 0.8 + resets, 0, 2),
            Result("contribution", None if other is None else 0.8, last, 2 if other is None else 0, 2),
        ]
    )


def test_the_explanation_follows_from_the_numbers() -> None:
    every = told(-0.2, 0.0, 0.01)
    assert "Plain backprop does not: it loses 20 points." in every
    assert "as they go with gxd and contribution keep learning. The best in the end is contribution, at 81.0%" in every
    some = told(-0.2, 0.0, -0.3)
    assert "do not help by themselves: contribution loses 30. Those with gxd keep learning." in some
    assert "The best in the end is gxd, at 80.0%" in some
    assert "as they go with gxd keep learning" in told(-0.2, 0.0, None)
    assert "gxd loses 20 and contribution loses 30. No method keeps learning" in told(-0.2, -0.2, -0.3)
    assert "too short" in told(-0.01, 0.0, 0.0)


def test_all_methods_of_the_demo_see_the_same_tasks() -> None:
    runs = demo.configs()
    assert {c.method for c in runs} == set(demo.METHODS)
    own = ("method", "options", "rate", "seed")
    shared = [{k: v for k, v in c.settings().items() if k not in own} for c in runs]
    assert all(settings == shared[0] for settings in shared)
    assert len({c.seed for c in runs}) == len(demo.SEEDS) > 1
