"""The command line: what ``gxd run`` prints, its help, and one line for every mistake."""

import errno
import importlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest

import gxd
import gxd_command
from gxd.lab import run, store
from gxd.lab.arguments import parse
from gxd.lab.errors import UserError
from gxd.lab.experiments import EXPERIMENTS
from gxd.lab.experiments.permuted_digits import PermutedDigits
from gxd.lab.progress import Board, Progress, clock
from gxd_command import COMMANDS, main
from tests.command import COMMAND
from tests.lab.tiny import small_data

SMALL = ["--width", "16", "--depth", "2", "--epochs", "1", "--batch-size", "32", "--compile", "no"]


def complaint(capsys, *argv):
    """The exit code and the one line on stderr."""
    code = main(list(argv))
    said = capsys.readouterr()
    assert not said.out
    assert said.err.startswith("gxd: ") and said.err.count("\n") == 1, said.err
    return code, said.err


def test_run_trains_every_seed_and_says_where_and_how_well(tmp_path, capsys) -> None:
    argv = ["run", "permuted-digits", *SMALL, "--tasks", "2", "--seeds", "3", "4", "--out", str(tmp_path)]
    assert main(argv) == 0
    said = capsys.readouterr()
    *paths, last = said.out.splitlines()
    assert [path.rpartition("/")[2] for path in paths] == ["seed3", "seed4"]
    final = [store.read_metrics(store.Path(path))[-1]["test_accuracy"] for path in paths]
    assert last == f"final test accuracy: seed 3 {final[0]:.4f}, seed 4 {final[1]:.4f}"
    assert "gxd relu seed 3: 2 tasks" in said.err and "gxd relu seed 4: done, accuracy" in said.err
    assert main(argv) == 0  # and again: nothing is left to do
    assert capsys.readouterr().out == said.out


def test_a_run_says_what_its_experiment_counts(tmp_path, capsys, monkeypatch) -> None:
    small_data(monkeypatch)
    argv = ["run", "slow-regression", "--tasks", "2", "--method", "redo", "--options", "every=7", "threshold=0.5"]
    assert main([*argv, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    path, last = said.out.splitlines()
    assert last == f"final loss: seed 0 {store.read_metrics(store.Path(path))[-1]['loss']:.4f}"
    assert re.search(r"redo relu seed 0: done, loss \d", said.err)
    assert store.read_json(store.Path(path) / "config.json")["config"]["options"] == {"every": 7, "threshold": 0.5}
    assert main(["run", "cifar-5+1", "--tasks", "2", "--batch-size", "2", "--out", str(tmp_path)]) == 0
    path, last = capsys.readouterr().out.splitlines()
    hard, easy = store.read_metrics(store.Path(path))
    assert last == f"final online accuracy: seed 0 {hard['online_accuracy']:.4f}" and easy["task"] == 1


def test_run_says_where_a_seed_diverged(tmp_path, capsys) -> None:
    argv = ["run", "permuted-digits", *SMALL, "--tasks", "2", "--seed", "0", "--lr", "1e9", "--out", str(tmp_path)]
    assert main(argv) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "final test accuracy: seed 0 diverged in task 0"


def test_every_setting_is_an_option_whose_help_says_the_papers_value(capsys) -> None:
    for name in EXPERIMENTS:
        with pytest.raises(SystemExit) as end:
            main(["run", name, "--help"])
        assert end.value.code == 0
        words = re.sub(r"\s+", " ", capsys.readouterr().out.replace("│", " "))
        for field in fields(EXPERIMENTS[name]):
            assert f"--{field.name.replace('_', '-')} " in words.replace(",", " ")
        assert words.count("Paper:") >= 14
        assert "the paper that the experiment comes from" in words
        assert ("--paper" in words) == (name == "permuted-mnist")


def test_overviews_list_what_there_is(capsys) -> None:
    for argv, names in (([], COMMANDS), (["run"], [*EXPERIMENTS, *gxd.methods(), *gxd.utilities()])):
        assert main(argv) == 0
        said = capsys.readouterr().out
        assert all(name in said for name in names)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["rnu"], ["unknown command 'rnu'", "'run'"]),
        (["run", "permuted-digit"], ["unknown experiment", "'permuted-digits'"]),
        (["run", "permuted-digits", "--lrr", "1"], ["--lrr", "Did you mean --lr?", "gxd run permuted-digits --help"]),
        (["run", "permuted-digits", "--lr", "abc"], ["gxd: --lr abc must be a number. See"]),
        (["run", "permuted-digits", "--maturity", "1.5"], ["gxd: --maturity 1.5 must be a whole number. See"]),
        (["run", "permuted-digits", "--seeds", "x"], ["does not take x. See"]),
        (["assay", "--checkpoints", "1", "a"], ["gxd: --checkpoints 1 a must be whole numbers. See"]),
        (["run", "permuted-digits", "--activation", "rellu"], ["'rellu'", "leaky_relu"]),
        (["run", "permuted-digits", "--method", "gdx"], ["'gdx'", "'gxd'"]),
        (["run", "permuted-digits", "--method", "rdeo"], ["'rdeo'", "'redo'"]),
        (["run", "permuted-digits", "--method", "redo", "--options", "evry=5"], ["'evry'", "Did you mean 'every'?"]),
        (["run", "permuted-digits", "--method", "redo", "--options", "every=x"], ["every='x'", "a whole number"]),
        (["run", "permuted-digits", "--network", "linear"], ["gxd cannot treat the network", "no unit to reset"]),
        (["run", "permuted-digits", "--network", "linear", "--layer-norm"], ["layer_norm", "linear"]),
        (["run", "permuted-digits", "--optimizer", "adam", "--momentum", "0.5"], ["momentum=0.5", "Adam"]),
        (["run", "permuted-digits", "--rate", "3"], ["rate=3.0", "[0, 1]"]),
        (["run", "permuted-digits", "--method", "redo", "--rate", "0.1"], ["--rate", "continual_backprop", "redo"]),
        (["run", "permuted-digits", "--method", "l2", "--no-compensate"], ["--compensate", "l2 has --options"]),
        (["run", "permuted-digits", "--method", "backprop", "--score-every", "2"], ["--score-every", "no resets"]),
        (["run", "permuted-digits", "--device", "abacus"], ["device 'abacus'", "--device cpu"]),
        (["run", "permuted-digits", "--device", "meta"], ["device 'meta'", "--device cpu", 'device = "cpu"']),
        (["run", "permuted-digits", "--seeds"], ["--seeds"]),
        (["run", "permuted-mnist", "--data-dir", "/nowhere"], ["MNIST", "/nowhere", "gxd data fetch mnist"]),
        (["run", "permuted-digits", "--out", "/dev/null/x"], ["cannot write to /dev/null/x", "--out"]),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(capsys, monkeypatch, tmp_path, argv, words) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = complaint(capsys, *argv)
    assert code == 2
    assert all(word in said for word in words), said
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_line(capsys, monkeypatch, tmp_path) -> None:
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", full)
    code, said = complaint(capsys, "run", "permuted-digits", "--out", str(tmp_path))
    assert code == 1 and "the disk is full" in said and "config.json" in said
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.name != ".lock"]


def test_a_network_that_no_memory_holds_is_one_line(capsys, tmp_path) -> None:
    code, said = complaint(capsys, "run", "permuted-digits", "--width", "2147483647", "--out", str(tmp_path))
    assert code == 2 and "not enough memory" in said and "choose a smaller network" in said


def test_a_missing_extra_is_named(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    code, said = complaint(capsys, "run", "permuted-digits", "--tensorboard", "--out", str(tmp_path))
    assert code == 2 and "gxd[tensorboard]" in said


def test_tensorboard_events_hold_the_metrics_also_of_a_run_that_is_complete(tmp_path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    argv = ["run", "permuted-digits", *SMALL, "--tasks", "2", "--out", str(tmp_path)]
    assert main(argv) == 0
    assert main([*argv, "--tensorboard"]) == 0
    path = next(tmp_path.rglob("metrics.jsonl")).parent
    events = EventAccumulator(str(path / "tensorboard")).Reload()
    expected = [line["test_accuracy"] for line in store.read_metrics(path)]
    assert [e.value for e in events.Scalars("test_accuracy")] == pytest.approx(expected)
    assert [e.step for e in events.Scalars("loss")] == [0, 1]


def test_control_c_ends_with_one_line_and_the_run_can_go_on(tmp_path, capsys) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = ["run", "permuted-digits", *SMALL, "--tasks", "3000", "--out", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *argv], env=environment, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.rglob("metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert said.splitlines()[-1].startswith("gxd: interrupted") and "Traceback" not in said
    path = next(tmp_path.rglob("metrics.jsonl")).parent
    assert store.read_json(path / "status.json")["status"] == "running"
    assert store.read_metrics(path) and not list(path.glob("*.part"))


def test_control_c_is_one_line_while_torch_is_imported(tmp_path) -> None:
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    ended = subprocess.run([sys.executable, "-c", COMMAND, "bench"], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr.startswith("gxd: interrupted") and ended.stderr.count("\n") == 1


# --- without torch ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The command on a Python that has its own library and gxd, and nothing else."""
    alone = tmp_path_factory.mktemp("alone")
    for package in (gxd, gxd_command):  # where they are installed, torch may lie beside them
        (alone / package.__name__).symlink_to(Path(package.__file__).parent)
    environment = {**os.environ, "PYTHONPATH": str(alone)}
    return lambda *argv: subprocess.run(
        [sys.executable, "-S", "-c", COMMAND, *argv], env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_the_overview_lists_every_command_and_needs_no_torch(argv, bare) -> None:
    ended = bare(*argv)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [line.split()[0] for line in ended.stdout.splitlines() if line.startswith("  ")] == list(COMMANDS)


def test_the_version_and_a_wrong_command_need_no_torch(bare) -> None:
    ended = bare("--version")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"gxd {gxd.__version__}\n", "")
    ended = bare("benhc")
    assert (ended.returncode, ended.stdout) == (2, "") and "Did you mean 'bench'?" in ended.stderr


def test_a_command_that_needs_torch_says_so_where_there_is_none(bare) -> None:
    ended = bare("bench")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"gxd: no module named 'torch': {gxd_command.EXTRA}\n"


def test_every_command_is_there() -> None:
    for name in COMMANDS:
        assert callable(importlib.import_module(f"gxd.lab.{name}").command), name


def test_the_version_of_the_package_is_the_one_in_the_code() -> None:
    metadata = pytest.importorskip("hatchling.metadata.core")
    manager = pytest.importorskip("hatchling.plugin.manager")
    root = Path(__file__).parents[2]
    assert metadata.ProjectMetadata(str(root), manager.PluginManager()).version == gxd.__version__
    files = (root / "pyproject.toml", *(root / "src").rglob("*.py"))
    written = [file.name for file in files if f'"{gxd.__version__}"' in file.read_text(encoding="utf-8")]
    assert written == ["version.py"]


@pytest.mark.parametrize(
    ("command", "unbuffered", "codes", "said"),
    [
        ("--help >/dev/full", "", [1], "gxd: the output cannot be written (No space left on device)\n"),
        ("--version >&-", "", [0], ""),
        ("nonsense 2>&-", "", [2], ""),
        ("--help | true", "1", [1], ""),
        ("data verify --help | true", "", [1], ""),
        ("data verify mnist --data-dir /nowhere | true", "", [1, 2], None),
    ],
)
def test_output_that_nobody_reads_is_no_traceback(tmp_path, command, unbuffered, codes, said) -> None:
    """A full disk, closed streams, a pipe whose reader is gone."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": unbuffered}
    words, _, reader = command.partition(" | ")
    line = f'{{ "$0" -c "$1" {words}; echo $? >code; }}' + (f" | {reader}" if reader else "")
    ended = subprocess.run(
        ["bash", "-c", line, sys.executable, COMMAND], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert "Traceback" not in ended.stderr and "Exception ignored" not in ended.stderr
    assert said is None or ended.stderr == said
    assert int((tmp_path / "code").read_text()) in codes


def test_a_board_needs_no_stderr_and_the_output_no_unicode(tmp_path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "ascii"}
    options = "--data permuted-digits --width 8 --depth 1 --tasks 2 --calibration 64 --probe 48 --utilities gxd"
    argv = ["assay", *options.split(), "--seeds", "0", "--out", str(tmp_path)]
    ended = subprocess.run(
        ["bash", "-c", '"$0" -c "$@" 2>&-', sys.executable, COMMAND, *argv], env=environment, stdout=subprocess.PIPE
    )
    assert ended.returncode == 0 and b" ? 0." in ended.stdout


# --- arguments and bars -----------------------------------------------------------------------------------------------


def test_options_are_parsed_whole(capsys) -> None:
    options = parse(run.Options[PermutedDigits], ["--seed", "5", "--no-compensate", "--threads", "None"], "gxd run")
    assert options.seeds == (5,)
    assert options.experiment == PermutedDigits(compensate=False, threads=None)
    with pytest.raises(UserError) as error:
        parse(run.Options[PermutedDigits], ["--lr"], "gxd run")
    assert "--lr" in str(error.value) and "\n" not in str(error.value)
    assert capsys.readouterr() == ("", "")


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def test_without_a_terminal_a_board_writes_a_line_now_and_then() -> None:
    out, now = io.StringIO(), Clock()
    with Board(out=out, now=now) as board:
        board.update("one", Progress(10, 110, 0.5))  # a resumed run: the ten tasks took no time of ours
        for task in range(11, 111):
            now.time += 1.0
            board.update("one", Progress(task, 110, task / 200))
        board.finish("one")
        board.finish("two", "was done before")
    said = out.getvalue().splitlines()
    assert said[0] == "one: 110 tasks, 10 of them done before"
    assert said[1] == "one: task 25/110, accuracy 12.5%, ETA 1:25"
    assert len(said) == 1 + 6 + 2
    assert said[-2:] == ["one: done, accuracy 55.0% (1:40)", "two: was done before (0:00)"]


def test_a_board_shows_a_loss_as_a_number() -> None:
    assert Progress(3, 9, 0.51239, "loss").words == "loss 0.512" and Progress(3, 9, None, "loss").words == "loss -"
    assert Progress(3, 9, 0.51239, "online_accuracy").words == "accuracy 51.2%"


def test_on_a_terminal_a_board_draws_a_bar_per_run(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    out, now = io.StringIO(), Clock()
    with Board(out=out, live=True, now=now) as board:
        for name in ("gxd [relu] seed 0", "backprop relu seed 0"):
            board.update(name, Progress(0, 40))
        now.time = 30.0
        board.update("gxd [relu] seed 0", Progress(10, 40, 0.875))
        board.finish("backprop relu seed 0", "diverged in task 3")
    said = out.getvalue().splitlines()
    assert any(re.search(r"gxd \[relu\] seed 0 .*10/40 +87\.5% ETA 1:30", line) for line in said)
    assert any("diverged in task 3" in line for line in said)


def test_a_board_of_many_runs_counts_them_and_keeps_the_finished_as_lines(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    out = io.StringIO()
    with Board(20, out=out, live=True, now=Clock()) as board:
        board.update("first", Progress(3, 3, 0.9))
        board.finish("first")
        board.update("second", Progress(1, 3, 0.9))
    said = out.getvalue()
    assert "[1/20] first: done, accuracy 90.0% (0:00)" in said
    last = said.splitlines()[-2:]
    assert "1/20" in last[0] and "second" in last[1]


def test_clock_reads_as_people_write_it() -> None:
    assert [clock(s) for s in (0, 59.6, 3661)] == ["0:00", "1:00", "1:01:01"]
