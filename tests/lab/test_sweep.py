"""Grids of runs: the file, the selection, local processes that may die, Ray."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import gxd_command as cli
from gxd.lab import cluster, run, workers
from gxd.lab.errors import UserError
from gxd.lab.experiments import Experiment
from gxd.lab.experiments.permuted_digits import PermutedDigits
from gxd.lab.grid import SWEEPS, find, load, sweeps
from gxd.lab.progress import Board, Progress
from gxd.lab.selection import final_runs, final_value, select, selection_table, write_selection
from gxd.lab.sweep import command_line
from gxd.lab.workers import Job, settled, status_of
from tests.command import COMMAND
from tests.processes import WARM

pytestmark = pytest.mark.usefixtures("warm_workers")

SMALL = {"tasks": 3, "epochs": 1, "width": 8, "depth": 1}
FILE = """
experiment = "permuted-digits"
seeds = [100, 101]
[fixed]
tasks = 3
epochs = 1
width = 8
depth = 1
[grid]
method = ["backprop", "gxd"]
rate = [1e-3, 1e-2]
[final]
per = ["method"]
seeds = [0]
fixed = { tasks = 2 }
"""


def written(directory: Path, text: str = FILE) -> Path:
    file = directory / "small.toml"
    file.write_text(text)
    return file


# --- the file ---------------------------------------------------------------------------------------------------------


def test_cells_that_are_one_run_are_run_once(tmp_path: Path) -> None:
    sweep = load(written(tmp_path))
    runs = [(c.method, c.resolved().rate, c.seed) for c in sweep.runs()]
    assert runs == [(m, r, s) for s in (100, 101) for m, r in (("backprop", 0), ("gxd", 1e-3), ("gxd", 1e-2))]
    names = [sweep.job(c).name for c in sweep.runs()]
    assert len(set(names)) == len(names)
    assert names[:2] == ["backprop relu seed 100", "gxd relu rate 0.001 seed 100"]


def test_several_grids_are_run_one_after_another(tmp_path: Path) -> None:
    grids = '[[grid]]\nactivation = ["relu", "silu"]\n[[grid]]\nactivation = ["relu"]\nlayer_norm = [true, false]'
    sweep = load(written(tmp_path, f'experiment = "permuted-mnist"\nseeds = [0]\n{grids}'))
    runs: list[Any] = list(sweep.runs())
    assert [(c.activation, c.layer_norm) for c in runs] == [("relu", False), ("silu", False), ("relu", True)]


@pytest.mark.parametrize("file", sorted(SWEEPS.glob("*.toml")), ids=lambda file: file.stem)
def test_the_sweep_files_that_come_along_are_sound(file: Path) -> None:
    sweep = load(file)
    said = {int(number) for number in re.findall(r"(\d+)(?= runs| in the end)", file.read_text())}
    final = 0
    if sweep.final is not None:
        final = len({tuple(c.get(n) for n in sweep.final.per) for c in sweep.cells}) * len(sweep.final.seeds)
    assert said == {len(sweep.cells) * len(sweep.seeds), final} - {0}, "the numbers in the comment"


def test_a_sweep_that_comes_with_gxd_is_found_by_its_name_but_a_file_of_that_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sweep", "questions", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("runs: 320 runs, 0 done, 320 missing, in runs/questions\n")
    assert not list(tmp_path.iterdir())
    (tmp_path / "questions").mkdir()
    assert all(find(name) == SWEEPS / f"{name}.toml" for name in sweeps())
    (tmp_path / "cifar100").write_text(FILE)
    assert find("cifar100") == Path("cifar100")


def test_the_paper_s_grid_is_the_paper_s() -> None:
    sweep = load(SWEEPS / "permuted-mnist-paper.toml")
    assert sweep.final is not None
    assert (len(sweep.seeds), len(sweep.final.seeds)) == (5, 15)
    runs: list[Any] = [sweep.config(cell, 0).resolved() for cell in sweep.cells if cell["method"] != "backprop"]
    assert {(c.lr, c.rate) for c in runs} == {(lr, rate) for lr in (0.1, 0.3) for rate in (1e-5, 1e-4, 1e-3)}
    assert {(c.tasks, c.epochs, c.batch_size, c.maturity, c.width, c.depth) for c in runs} == {
        (800, 1, 16, 100, 256, 4)
    }


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lr =", "", "unknown setting 'learning_rate' in [grid]"),
        ("rate = [1e-3, 1e-2]", "raet = [1e-3]", "unknown setting 'raet' in [grid]. Did you mean 'rate'?"),
        ("tasks = 3", "task = 3", "unknown setting 'task' in [fixed]. Did you mean 'tasks'?"),
        ("[fixed]", "[fixd]", "unknown key 'fixd'. Did you mean 'fixed'?"),
        ("permuted-digits", "permuted-digit", "unknown experiment 'permuted-digit'. Did you mean 'permuted-digits'?"),
        ("rate = [1e-3, 1e-2]", "rate = 1e-3", "rate = 0.001 in [grid] must be a list"),
        ("rate = [1e-3, 1e-2]", "rate = [2.0]", "rate=2.0 must be a number in [0, 1]"),
        ('"gxd"]', '"gdx"]', "unknown method 'gdx'. Did you mean 'gxd'?"),
        ("tasks = 3", "tasks = 0", "tasks=0 must be a whole number, 1 or more"),
        ("tasks = 3", "rate = 1e-3", "rate is in [fixed] and in [grid]"),
        ("tasks = 3", "seed = 3", "seed in [fixed]: the seeds are a list of their own"),
        ("seeds = [100, 101]", "seeds = []", "seeds = [] must be a list of whole numbers"),
        ("seeds = [100, 101]", "seeds = [1, 1]", "has a seed twice"),
        ("seeds = [0]", "seeds = [3000000000]", "seed=3000000000 must be a whole number from 0 to 2**31 - 1"),
        ("tasks = 3", "lr = 1e300", "lr=1e+300 must be a number above 0 and below 3.4e38"),
        ("seeds = [100, 101]", "seeds = [0, 1]", "seed 0 is in both stages"),
        ('per = ["method"]', 'per = ["metod"]', "unknown setting 'metod' in per of [final]. Did you mean 'method'?"),
        ('per = ["method"]', "", "[final] needs per"),
        ("{ tasks = 2 }", "{ rate = 2e-3 }", "rate is in fixed of [final] and in [grid]"),
        ("{ tasks = 2 }", "{ tasks = -2 }", "tasks=-2 must be"),
        ("[grid]", "[grid", "is not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named_in_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = FILE.replace(old, new) if old in FILE else FILE.replace("rate =", "learning_rate =")
    with pytest.raises(UserError) as error:
        load(written(tmp_path, text))
    assert message in str(error.value)
    assert "small.toml" in str(error.value)
    assert "\n" not in str(error.value)


def test_an_empty_grid_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"grid = \[\] leaves nothing to run"):
        load(written(tmp_path, 'experiment = "permuted-digits"\nseeds = [0]\ngrid = []'))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere.toml"], "nowhere.toml is not a file: give a sweep file, or one that comes with gxd: cifar100"),
        (["sweeps/permuted-digits"], "sweeps/permuted-digits is not a file"),
        (["permuted-digit"], "unknown sweep 'permuted-digit'. Did you mean 'permuted-digits'?"),
        (["{file}", "--jobs", "0"], "--jobs 0 must be 1 or more"),
        (["{file}", "--retries", "-1"], "--retries -1 must be 0 or more"),
        (["{file}", "--gpus", "1"], "goes with --ray"),
    ],
)
def test_a_wrong_option_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    file = written(tmp_path)
    assert cli.main(["sweep", *(word.format(file=file) for word in argv), "--out", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "runs").exists()


# --- the selection ----------------------------------------------------------------------------------------------------


def pretend(
    config: Experiment, root: Path, values: list[float], status: str = "done", metric: str = "test_accuracy"
) -> None:
    """A run directory as a run would leave it."""
    directory = config.run_directory(root)
    directory.mkdir(parents=True)
    lines = [json.dumps({"task": task, metric: value}) for task, value in enumerate(values)]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "status.json").write_text(json.dumps({"status": status, "task": len(lines), "seconds": 2.0}))


def grid_of(tmp_path: Path) -> Any:
    return load(written(tmp_path, FILE.replace("tasks = 3", "tasks = 20").replace('"backprop", ', "")))


def test_the_best_setting_is_that_of_the_last_tenth_of_the_tasks(tmp_path: Path) -> None:
    sweep = grid_of(tmp_path)
    low, high, low2, high2 = sweep.runs()
    root = sweep.grid_root(tmp_path)
    for config in (low, low2):
        pretend(config, root, [0.2] * 18 + [0.8, 0.6])
    for config, end in ((high, 0.7), (high2, 0.5)):
        pretend(config, root, [0.9] * 18 + [end, end])
    assert final_value(low, root) == pytest.approx(0.7)
    [choice] = select(sweep, tmp_path)
    assert choice.per == {"method": "gxd"}
    assert [(c.cell["rate"], round(c.value, 6)) for c in choice.candidates] == [(1e-3, 0.7), (1e-2, 0.6)]
    [final] = final_runs(sweep, [choice])
    assert (final.rate, final.seed, final.tasks) == (1e-3, 0, 2)


def test_a_diverged_run_counts_as_guessing(tmp_path: Path) -> None:
    sweep = grid_of(tmp_path)
    low, high, low2, high2 = sweep.runs()
    root = sweep.grid_root(tmp_path)
    for config in (low, low2):
        pretend(config, root, [0.6] * 20)
    pretend(high, root, [0.95] * 20)
    pretend(high2, root, [0.95] * 7, "diverged")
    [choice] = select(sweep, tmp_path)
    assert [(c.cell["rate"], c.diverged) for c in choice.candidates] == [(1e-3, 0), (1e-2, 1)]
    assert choice.candidates[1].value == pytest.approx((0.95 + 0.1) / 2)


def test_where_lower_is_better_the_lowest_loss_is_chosen_and_a_diverged_run_is_worse_than_any(tmp_path: Path) -> None:
    text = 'experiment = "slow-regression"\nseeds = [1, 2]\n[fixed]\ntasks = 4\n[grid]\nlr = [0.1, 0.01, 0.001]\n'
    sweep = load(written(tmp_path, text + '[final]\nper = ["method"]\nseeds = [0]\n'))
    for config, loss in zip(sweep.runs(), (0.1, 1.5, 2.0, 0.1, 1.5, 2.5)):
        status = "diverged" if (config.lr, config.seed) == (0.1, 2) else "done"
        pretend(config, sweep.grid_root(tmp_path), [9.0, 9.0, 9.0, loss], status, "loss")
    choices = select(sweep, tmp_path)
    assert [c.cell["lr"] for c in choices[0].candidates] == [0.01, 0.001, 0.1]
    assert "final loss" in selection_table(sweep, choices) and "1.5" in selection_table(sweep, choices)
    record = json.loads(write_selection(sweep, choices, tmp_path).read_text())
    assert [c["final"] for c in record["choices"][0]["candidates"]] == [1.5, 2.25, None]
    assert record["criterion"].startswith("lowest mean loss")


def test_only_the_tasks_that_count_are_compared(tmp_path: Path) -> None:
    text = 'experiment = "cifar-5+1"\nseeds = [1]\n[fixed]\ntasks = 30\n'
    sweep = load(written(tmp_path, text))
    [config] = sweep.runs()
    accuracies = [0.5 if task % 2 == 0 else 1.0 for task in range(26)] + [0.7, 1.0, 0.9, 1.0]
    pretend(config, tmp_path, accuracies, "done", "online_accuracy")
    assert final_value(config, tmp_path) == pytest.approx((0.7 + 0.9) / 2)  # a tenth of fifteen


def test_a_sweep_varies_methods_and_their_options(tmp_path: Path) -> None:
    text = """
        experiment = "permuted-digits"
        seeds = [0]
        [[grid]]
        method = ["redo"]
        options = [{ every = 10 }, { every = 10, threshold = 0.5 }, { threshold = 0.1, every = 10 }]
        [[grid]]
        method = ["backprop", "l2_init"]
    """
    sweep = load(written(tmp_path, text))
    runs = sweep.runs()
    redo = [("redo", ("every=10",)), ("redo", ("every=10", "threshold=0.5"))]
    assert [(run.method, run.options) for run in runs] == [*redo, ("backprop", ()), ("l2_init", ())]
    assert len({sweep.job(run).name for run in runs}) == 4
    assert "options every=10 threshold=0.5" in sweep.job(runs[1]).name
    said = command_line(runs[1], tmp_path)
    assert "--method redo --options every=10 threshold=0.5" in said
    with pytest.raises(UserError, match="redo has no option 'evry'"):
        load(written(tmp_path, text.replace("{ every = 10 }", "{ evry = 10 }")))


def test_nothing_is_chosen_while_runs_are_missing(tmp_path: Path) -> None:
    sweep = grid_of(tmp_path)
    for config in sweep.runs()[:3]:
        pretend(config, sweep.grid_root(tmp_path), [0.6] * 20)
    [choice] = select(sweep, tmp_path)
    assert choice.best is None
    assert final_runs(sweep, [choice]) == []


def test_a_dry_run_says_what_is_missing_and_how_long_it_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = grid_of(tmp_path)
    pretend(sweep.runs()[0], sweep.grid_root(tmp_path), [0.6] * 20)  # in 2 seconds
    assert cli.main(["sweep", str(tmp_path / "small.toml"), "--out", str(tmp_path), "--dry-run", "--jobs", "2"]) == 0
    said = capsys.readouterr().out
    assert "grid: 4 runs, 1 done, 3 missing" in said
    assert "final: 1 runs, of settings that the grid will choose" in said
    assert "about 0:03 with 2 at a time" in said
    assert not settled(sweep.runs()[1], sweep.grid_root(tmp_path))


# --- the whole thing --------------------------------------------------------------------------------------------------


def test_a_listed_command_makes_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = FILE.replace("[grid]", "[grid]\ncompensate = [false]\nlayer_norm = [true]").replace("100, 101", "100")
    file, out = written(tmp_path, text), tmp_path / "a place"
    assert cli.main(["sweep", str(file), "--out", str(out), "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    sweep = load(file)
    assert len(lines) == len(sweep.runs()) == 3
    for line, config in zip(lines, sweep.runs(), strict=True):
        words = shlex.split(line)
        assert words[0] == "gxd"
        assert not settled(config, sweep.grid_root(out))
        assert cli.main(words[1:]) == 0
        assert settled(config, sweep.grid_root(out))
    capsys.readouterr()
    assert cli.main(["sweep", str(file), "--out", str(out), "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2  # now the final runs


def test_a_sweep_runs_both_stages_and_then_only_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = written(tmp_path), tmp_path / "runs"
    argv = ["sweep", str(file), "--out", str(out), "--jobs", "1"]
    assert cli.main(argv) == 0
    assert "grid: 6 runs, 0 of them done before" in capsys.readouterr().out
    sweep = load(file)
    final = final_runs(sweep, select(sweep, out))
    assert [(c.method, c.seed, c.tasks) for c in final] == [("backprop", 0, 2), ("gxd", 0, 2)]
    assert all(settled(c, sweep.root(out)) for c in final)
    selection = json.loads((out / "small" / "selection.json").read_text())
    assert [choice["per"] for choice in selection["choices"]] == [{"method": "backprop"}, {"method": "gxd"}]
    # One thread each, whatever this process was given.
    record = json.loads((final[1].run_directory(sweep.root(out)) / "config.json").read_text())
    assert record["machine"]["threads"] == 1

    lost = final[1].run_directory(sweep.root(out))
    before = (lost / "metrics.jsonl").read_text()
    for item in lost.iterdir():
        item.unlink()
    assert cli.main(argv) == 0
    said = capsys.readouterr()
    assert "grid: 6 runs, 6 of them done before" in said.out
    assert "final: 2 runs, 1 of them done before" in said.out
    assert "1 run done, 0 of them diverged" in said.out
    assert (lost / "metrics.jsonl").read_text() == before


class Killer(Board):
    """Kills the worker that is at a run when the run has reached a task; ``often`` says how many times."""

    def __init__(self, often: dict[str, int]) -> None:
        super().__init__(live=False)
        self.often, self.notes = often, dict[str, str]()

    def update(self, name: str, progress: Progress) -> None:
        if self.often.get(name, 0) and progress.task == 2:
            self.often[name] -= 1
            [worker] = multiprocessing.active_children()
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)

    def finish(self, name: str, note: str = "") -> None:
        self.notes[name] = note


def test_a_killed_worker_costs_only_its_own_run_and_only_if_killed_again_and_again(tmp_path: Path) -> None:
    longer = SMALL | {"tasks": 30}  # so that none is over before it can be killed
    jobs = [Job(f"seed {seed}", PermutedDigits(seed=seed, **longer)) for seed in range(2)]
    killer = Killer({"seed 0": 9, "seed 1": 1})
    outcomes = workers.run_all(jobs, tmp_path / "killed", killer, processes=1, retries=1)
    assert [o.status for o in outcomes] == ["failed", "done"]
    reason = "its process was killed by SIGKILL (out of memory?), 2 times"
    assert killer.notes == {"seed 0": f"failed: {reason}", "seed 1": ""}
    assert killer.often == {"seed 0": 7, "seed 1": 0}
    assert multiprocessing.active_children() == []
    undisturbed = run.train(jobs[1].config, tmp_path / "undisturbed")
    killed = jobs[1].config.run_directory(tmp_path / "killed")
    assert (killed / "metrics.jsonl").read_bytes() == (undisturbed / "metrics.jsonl").read_bytes()


def test_a_run_that_cannot_be_done_fails_alone_and_the_exit_code_tells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, FILE[: FILE.index("[final]")].replace("100, 101", "0"))
    sweep, out = load(file), tmp_path / "my runs"
    blocked = sweep.runs()[0].run_directory(sweep.root(out))
    blocked.parent.mkdir(parents=True)
    blocked.write_text("a file where a directory should be")
    assert cli.main(["sweep", str(file), "--out", str(out), "--jobs", "1"]) == 1
    said = capsys.readouterr()
    assert f"2 runs done, 0 of them diverged. `gxd report '{out}/small'` shows them" in said.out
    assert "gxd: backprop relu seed 0 failed: cannot write to" in said.err
    assert "Traceback" not in said.err


def test_a_full_disk_ends_the_sweep_for_all_have_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job("a run", PermutedDigits(**SMALL))

    def full(*_: Any, **__: Any) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")

    monkeypatch.setattr(run, "train", full)
    failure = workers.train_one(job.config, tmp_path)
    assert failure == workers.Failure("No space left on device (metrics.jsonl)", errno=errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        workers.failed(job, failure)
    assert workers.failed(job, workers.Failure("only mine", errno=errno.EACCES)).status == "failed"


def test_a_bug_in_a_run_is_one_line_and_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Path:
        raise ZeroDivisionError("in line one\nand in line two")

    monkeypatch.setattr(run, "train", broken)
    failure = workers.train_one(PermutedDigits(**SMALL), tmp_path)
    assert failure is not None
    assert failure.reason == "ZeroDivisionError: in line one"
    assert "Traceback" in failure.trace


def test_a_place_that_cannot_be_written_to_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs").write_text("a file")
    assert cli.main(["sweep", str(written(tmp_path)), "--out", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("gxd: cannot write to ")
    assert said.count("\n") == 1


# --- signals ----------------------------------------------------------------------------------------------------------


def wait_for(condition: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def alive(group: int) -> list[str]:
    """The processes of a group that still do something."""
    listed = subprocess.run(["ps", "-eo", "pgid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=2) for line in listed.splitlines()]
    return [row[2] for row in rows if row[0] == str(group) and not row[1].startswith("Z")]


ENDLESS = FILE[: FILE.index("[final]")].replace("tasks = 3", "tasks = 100000\ncompile = 'no'").replace("100, 101", "0")


def test_ctrl_c_stops_all_processes_and_the_runs_can_go_on(tmp_path: Path) -> None:
    """`gxd sweep` as a process group of its own, as a terminal would start it, with two runs under way."""
    file, out = written(tmp_path, ENDLESS), tmp_path / "runs"
    sweep = load(file)
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "sweep", str(file), "--out", str(out), "--jobs", "2"],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(run.__file__).parents[2])},
    )

    def under_way() -> list[str]:
        found = (status_of(config, sweep.root(out)) for config in sweep.runs())
        return [status["status"] for status in found if status]

    try:
        wait_for(lambda: len(under_way()) == 2)
        assert len(alive(process.pid)) >= 3  # the command and two workers
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=60)[1]
        assert process.returncode == 130
        assert said.splitlines()[-1].startswith("gxd: interrupted;")
        assert "Traceback" not in said
        wait_for(lambda: not alive(process.pid), 30)
        assert under_way() == ["running", "running"]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def endless(file: Path, out: Path) -> None:
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment]
    sweep = load(file)
    jobs = [sweep.job(config) for config in sweep.runs()]
    workers.run_all(jobs, out, Board(live=False), processes=1)


def test_the_workers_of_a_killed_command_end(tmp_path: Path) -> None:
    """A parent that is killed cannot stop anybody: they notice, and let go of their run directories."""
    command = WARM.Process(target=endless, args=(written(tmp_path, ENDLESS), tmp_path / "runs"))
    command.start()
    wait_for(lambda: list(tmp_path.rglob("metrics.jsonl")))
    (lock,) = tmp_path.rglob(".lock")
    assert not free(lock)
    command.kill()
    wait_for(lambda: free(lock), 30)


def free(lock: Path) -> bool:
    """Whether no process holds this file."""
    with lock.open() as file, suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


# --- Ray --------------------------------------------------------------------------------------------------------------


def test_without_ray_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["sweep", str(written(tmp_path)), "--out", str(tmp_path / "runs"), "--ray", "auto"]) == 2
    assert capsys.readouterr().err.endswith("gxd: --ray needs Ray: pip install 'gxd[cluster]'\n")


class RayKiller(Board):
    """Kills a Ray worker that is at a run, once, when one has reached a task."""

    def __init__(self) -> None:
        super().__init__(live=False)
        self.killed, self.notes = 0, dict[str, str]()

    def update(self, name: str, progress: Progress) -> None:
        if name != workers.ALL and not self.killed:
            self.killed = ray_worker()
            os.kill(self.killed, signal.SIGKILL)

    def finish(self, name: str, note: str = "") -> None:
        self.notes[name] = note


def ray_worker() -> int:
    """A descendant of this process that Ray calls after our function, which it does while it runs it."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = {int(pid): (int(parent), args) for pid, parent, args in (r.split(maxsplit=2) for r in listed.splitlines())}

    def ours(pid: int) -> bool:
        return pid == os.getpid() or (pid in rows and ours(rows[pid][0]))

    return next(pid for pid, (_, args) in rows.items() if args.startswith("ray::_train") and ours(pid))


@pytest.mark.slow
def test_a_ray_cluster_runs_a_sweep_and_retries_what_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr(cluster, "LOOK", 0.1)
    monkeypatch.setenv("RAY_worker_niceness", "0")  # Ray's 15 would wait for all that the machine does besides
    configs = [PermutedDigits(seed=seed, **{**SMALL, "tasks": 3 if seed else 40}) for seed in range(2)]
    jobs = [Job(f"seed {c.seed}", c) for c in configs]
    killer = RayKiller()
    outcomes = cluster.run_all(jobs, tmp_path / "ray", killer, address="local", processes=1)
    assert killer.killed
    assert [o.status for o in outcomes] == ["done"] * 2
    assert killer.notes == {job.name: "" for job in jobs}
    alone = run.train(configs[0], tmp_path / "alone")
    theirs = configs[0].run_directory(tmp_path / "ray")
    assert (theirs / "metrics.jsonl").read_bytes() == (alone / "metrics.jsonl").read_bytes()
