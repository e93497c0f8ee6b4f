"""`gxd assay`: training, checkpoints, resuming, and what it writes."""

import json
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import gxd
import gxd_command as cli
from gxd.lab import assay as lab
from gxd.lab import models, streams
from gxd.lab.assay_config import AssayConfig
from gxd.lab.errors import UserError
from gxd.lab.progress import Board
from gxd.lab.report.digest import read_assay
from tests.command import COMMAND
from tests.lab.test_sweep import alive, free, wait_for
from tests.processes import WARM, run_script

TINY = AssayConfig(
    data="permuted-digits",
    width=12,
    depth=2,
    tasks=2,
    checkpoints=(0, 1, 2),
    batch_size=32,
    lr=0.05,
    calibration=64,
    probe=48,
    utilities=("gxd", "contribution", "gxd_all_logit", "gxd_sketch", "random"),
)
OPTIONS = "--data permuted-digits --width 12 --depth 2 --tasks 2 --calibration 64 --probe 48 --utilities gxd activation"

pytestmark = pytest.mark.usefixtures("warm_workers")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """An assay that was never disturbed."""
    return lab.assay(TINY, tmp_path_factory.mktemp("runs"))


def test_the_lines_are_the_reset_cost_of_a_model_trained_by_hand(done):
    stream = streams.permuted_digits(0, 32)
    model = models.mlp(64, 10, width=12, depth=2, init="default", seed=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    plan = gxd.find_units(model, torch.zeros(2, 64))
    lines = lab.read_lines(done)
    assert [line["checkpoint"] for line in lines] == [0, 1, 2]
    for line in lines:
        n = line["checkpoint"]
        if n:
            for x, y in stream.task(n - 1).batches(0):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        task = stream.task(max(0, n - 1))
        (x, y), (probe, _) = task.draw(64, 48)
        cost = gxd.reset_cost(model, (x, y), probe, plan=plan, utilities=["gxd", "contribution", "gxd_all_logit"])
        for metric in ("l1", "kl"):
            assert line["oracle"][metric] == pytest.approx(cost.oracle_by_group(0.05, metric))
            for name in cost.scores:
                ours = line["utilities"][name]
                assert ours["spearman"][metric] == pytest.approx(cost.spearman_by_group(metric)[name])
                assert ours["shock"][metric] == pytest.approx(cost.shock_by_group(0.05, metric)[name])
        hits = sum(int((model(x).argmax(1) == y).sum()) for x, y in task.test())
        assert line["test_accuracy"] == hits / 357
        assert line["groups"] == {"fc1": 12, "fc2": 12}
        assert (line["fraction"], line["calibration"], line["probe"]) == (0.05, 64, 48)


def test_the_directory_says_what_was_done(done):
    assert done.parent.name == f"mlp_relu_{TINY.key()}" and done.name == "seed0" and done.parent.parent.name == "assay"
    record = json.loads((done / "config.json").read_text())
    assert record["experiment"] == "assay" and record["versions"]["torch"] == torch.__version__
    assert record["config"]["checkpoints"] == [0, 1, 2] and "data_dir" not in record["config"]
    assert json.loads((done / "status.json").read_text())["status"] == "done"
    assert not list(done.glob("*.part"))
    read = read_assay(done)
    assert len(read.checkpoints) == 3 and read.column[1] == "relu" and read.key == TINY.key()


def test_an_assay_that_is_done_is_not_done_again(done, monkeypatch):
    monkeypatch.setattr(lab, "_Assay", None)  # would raise
    assert lab.assay(TINY, done.parents[2]) == done


def test_a_killed_assay_goes_on_and_says_the_same_bit_for_bit(done, tmp_path):
    # The alarm ends the process as a kill does, at once and wherever it is, and cannot come too late on a busy machine.
    code = f"""
import signal
from gxd.lab import assay as lab
import tests.lab.test_assay as t
lab.SAVE_EVERY = 0.0
write = lab.write_lines
def write_lines(*args):
    write(*args)
    lab.write_lines = write  # once: an alarm that is set anew with every line may not come before the last
    signal.setitimer(signal.ITIMER_REAL, {random.uniform(0.001, 0.03)!r})
lab.write_lines = write_lines
lab.assay(t.TINY, {str(tmp_path)!r})
"""
    ended, said = run_script(code, tmp_path)
    assert ended == -signal.SIGALRM, said
    path = TINY.directory(tmp_path)
    assert 1 <= len(lab.read_lines(path)) < 3, "it was to be killed half way"
    assert lab.assay(TINY, tmp_path) == path
    assert (path / "assay.jsonl").read_bytes() == (done / "assay.jsonl").read_bytes()


def test_a_checkpoint_taken_between_two_assays_is_gone_on_from(done, tmp_path, monkeypatch):
    """Interrupted in the middle of the second task."""
    learn = lab._Assay.learn
    monkeypatch.setattr(lab, "SAVE_EVERY", 0.0)

    def interrupted(self):
        if self.done == 1:
            raise KeyboardInterrupt
        return learn(self)

    monkeypatch.setattr(lab._Assay, "learn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lab.assay(TINY, tmp_path)
    trained = []
    monkeypatch.setattr(lab._Assay, "learn", lambda self: trained.append(self.done) or learn(self))
    path = lab.assay(TINY, tmp_path)
    assert trained == [1]
    assert (path / "assay.jsonl").read_bytes() == (done / "assay.jsonl").read_bytes()


def test_the_seed_changes_the_numbers_and_not_the_setting(done, tmp_path):
    other = replace(TINY, seed=1)
    assert other.key() == TINY.key() != replace(TINY, lr=0.1).key()
    assert replace(TINY, data_dir="/elsewhere", device="cpu", threads=2).key() == TINY.key()
    path = lab.assay(other, tmp_path)
    assert (path / "assay.jsonl").read_bytes() != (done / "assay.jsonl").read_bytes()


def test_a_subset_is_the_same_in_every_task_and_bounds_the_test_set():
    work = lab._Assay(replace(TINY, train_size=200).resolved(), lambda progress: None)
    one, two = work.task(0), work.task(1)
    assert len(one.train_labels) == 200 == len(one.test_labels) and torch.equal(one.train_images, two.train_images)
    assert not torch.equal(one.permutation, two.permutation)
    seen = torch.cat([y for _, y in one.batches(0)])
    assert torch.equal(seen.sort().values, one.train_labels.sort().values)


def test_a_diverged_model_is_recorded_as_such(tmp_path):
    path = lab.assay(replace(TINY, lr=1e20, utilities=("gxd",)), tmp_path)
    status = json.loads((path / "status.json").read_text())
    assert status["status"] == "diverged" and status["task"] == 0
    assert [line["checkpoint"] for line in lab.read_lines(path)] == [0]
    assert "1 diverged" in lab.summaries([path])[0]


def test_the_board_says_that_an_assay_diverged_and_how_well_one_did_that_was_complete(tmp_path, capsys):
    for jobs in ("1", "2"):  # the second time all are complete
        args = [*f"assay {OPTIONS} --seeds 0 1 --out {tmp_path} --jobs".split(), jobs]
        assert cli.main([*args, "--lr", "1e20"]) == 0
        assert "mlp relu seed 1: diverged in task 0 (" in capsys.readouterr().err
        assert cli.main(args) == 0
        said = capsys.readouterr().err
        path = next(path for path in tmp_path.glob("assay/*/seed1") if len(lab.read_lines(path)) > 1)
        assert f"mlp relu seed 1: done, accuracy {100 * lab.read_lines(path)[-1]['test_accuracy']:.1f}% (" in said


def test_what_is_drawn_by_default_is_the_papers_or_half_of_what_there_is():
    def drawn(**values):
        full = AssayConfig(**values).resolved()
        return full.calibration, full.probe

    assert drawn() == drawn(model="resnet18") == drawn(train_size=4096) == (2048, 2048)
    assert drawn(data="permuted-digits") == (720, 720)
    assert drawn(train_size=1000) == (500, 500)
    assert drawn(train_size=1000, probe=900) == (100, 900)
    assert drawn(train_size=4000, calibration=1000) == (1000, 2048)
    assert AssayConfig(calibration=2048).key() == AssayConfig().key()


def test_the_defaults_are_the_papers():
    mlp = AssayConfig().resolved()
    assert (mlp.data, mlp.tasks, mlp.epochs, mlp.batch_size, mlp.lr) == ("permuted-mnist", 30, 1, 64, 0.01)
    assert mlp.checkpoints == (0, 5, 10, 20, 30) and mlp.lr_drops == () and (mlp.width, mlp.depth) == (256, 4)
    assert (mlp.calibration, mlp.probe, mlp.units_per_group) == (2048, 2048, None)
    assert mlp.utilities == tuple(name for name in gxd.utilities() if name != "gxd_second_order")
    resnet = AssayConfig(model="resnet18").resolved()
    assert (resnet.data, resnet.tasks, resnet.epochs, resnet.batch_size, resnet.lr) == ("cifar100", 1, 200, 90, 0.1)
    assert (resnet.momentum, resnet.weight_decay) == (0.9, 5e-4)
    assert resnet.checkpoints == (60, 120, 160, 200) and resnet.lr_drops == (60, 120, 160)
    short = AssayConfig(model="resnet18", epochs=10).resolved()
    assert short.checkpoints == (3, 6, 8, 10) and short.lr_drops == (3, 6, 8)
    assert AssayConfig(tasks=6).resolved().checkpoints == (0, 1, 2, 4, 6)


FACTORY = """
import os
import random
import torch.nn as nn

def wide(inputs, classes):
    return nn.Sequential(nn.Linear(inputs, 9), nn.GELU(), nn.Linear(9, classes))

def fragile(inputs, classes, seed):
    if seed == 1:
        os._exit(7)
    return wide(inputs, classes)

def number():
    return 3

def demanding(inputs, depth):
    return wide(inputs, depth)

def failing():
    raise KeyError("no such thing\\nand more")

def narrow(classes):
    return wide(5, classes)

def few(inputs):
    return wide(inputs, 3)

constant = 5
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    """A module of the user's in the directory where the command is started."""
    (tmp_path / "mine_for_assay.py").write_text(FACTORY)
    (tmp_path / "misspelt_for_assay.py").write_text("def f(:")
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("mine_for_assay", None)
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]


def test_any_model_by_module_and_factory(factories, tmp_path, capsys):
    args = f"assay --model mine_for_assay:wide {OPTIONS} --checkpoints 2 --seeds 0 --jobs 1 --out {tmp_path}"
    assert cli.main(args.split()) == 0
    said = capsys.readouterr().out
    assert "mine_for_assay-wide_relu_" in said and "Spearman" in said and "oracle" in said
    (line,) = lab.read_lines(next((tmp_path / "assay").glob("*/seed0")))
    assert line["groups"] == {"0": 9} and line["checkpoint"] == 2


def test_a_reason_that_all_assays_share_is_said_once_and_no_table_is_shown(factories, tmp_path, capsys):
    args = f"assay --model mine_for_assay:failing {OPTIONS} --checkpoints 0 --seeds 0 1 --jobs 2 --out {tmp_path}"
    assert cli.main(args.split()) == 2
    said = capsys.readouterr()
    last = said.err.splitlines()[-1]
    assert last.count("failed with KeyError") == 1 and "seed 0" in last and "seed 1" in last
    assert "Spearman" not in said.out


def test_what_an_assay_counts_is_not_announced_as_tasks(tmp_path, capsys):
    args = f"assay {OPTIONS} --tasks 1 --seeds 0 --jobs 1 --out {tmp_path}"
    assert cli.main(args.split()) == 0
    said = capsys.readouterr().err
    assert "stages" in said and "tasks" not in said


def test_several_run_side_by_side_and_one_that_dies_takes_no_other_with_it(factories, tmp_path, capsys):
    args = f"assay --model mine_for_assay:fragile {OPTIONS} --checkpoints 0 --seeds 0 1 --jobs 2 --out {tmp_path}"
    assert cli.main(args.split()) == 2
    said = capsys.readouterr()
    assert "1 of 2 assays failed" in said.err and "seed 1: its process ended with exit code 7" in said.err
    assert "Traceback" not in said.err
    assert len(lab.read_lines(next((tmp_path / "assay").glob("*/seed0")))) == 1
    assert not list((tmp_path / "assay").glob("*/seed1/assay.jsonl"))


def test_ctrl_c_is_one_line_and_stops_all_processes(tmp_path):
    """`gxd assay` as a process group of its own, as a terminal would start it, with two assays under way."""
    options = f"{OPTIONS} --epochs 10000000 --checkpoints 0 2 --seeds 0 1 --jobs 2 --out {tmp_path}"
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "assay", *options.split()],
        text=True,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        wait_for(lambda: len(list(tmp_path.rglob("assay.jsonl"))) == 2)
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=60)[1]
        assert process.returncode == 130
        assert "Traceback" not in said and said.splitlines()[-1].startswith("gxd: interrupted;")
        wait_for(lambda: not alive(process.pid), 30)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def endless(root):
    """One assay that has nothing to say while it trains, so that it does not find out by that that nobody listens."""
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method: fork
    with Board(live=False) as board:
        lab.assay_all([replace(TINY, epochs=10_000_000, checkpoints=(0, 2))], root, board, 1)


def test_a_killed_command_leaves_no_orphan_that_holds_the_directory(tmp_path):
    command = WARM.Process(target=endless, args=(tmp_path,))
    command.start()
    wait_for(lambda: list(tmp_path.rglob("assay.jsonl")))
    (lock,) = tmp_path.rglob(".lock")
    assert not free(lock)
    command.kill()
    wait_for(lambda: free(lock), 30)


def test_the_table_is_the_mean_and_its_error_over_seeds_and_checkpoints():
    def point(values, shock=1.0):
        by_metric = {"l1": dict(enumerate(values)), "kl": dict(enumerate(values))}
        return {
            "utilities": {"gxd": {"spearman": by_metric, "shock": {"l1": {"a": shock}, "kl": {"a": None}}}},
            "oracle": {"l1": {"a": 0.5}, "kl": {"a": 0.25}},
        }

    text = lab.table([point([0.2, 0.4]), point([0.5, None]), point([None, None])])
    row = next(line for line in text.splitlines() if line.startswith("gxd"))
    se = math.sqrt(((0.3 - 0.4) ** 2 + (0.5 - 0.4) ** 2) / 1 / 2)
    assert f"0.400 ± {se:.3f}" in row and "1.000 ± 0.000" in row and row.endswith("-")
    assert "0.500 ± 0.000" in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--model mpl", "unknown model 'mpl'. Did you mean 'mlp'?"),
        ("--activation relu gelu", "unknown activation 'gelu'"),
        ("--model resnet18 --activation silu", "resnet18 has ReLUs only"),
        ("--utilities gdx", "unknown utility 'gdx'"),
        ("--data mnist", "unknown data 'mnist'"),
        ("--tasks 3 --checkpoints 0 4", "checkpoints=(0, 4) must lie between 0 and the 3 tasks"),
        ("--data cifar100 --tasks 2", "all of cifar100 is one task"),
        ("--probe 0", "probe=0 must be a whole number, 1 or more"),
        ("--lr 0", "lr=0.0 must be a number above 0"),
        ("--jobs 0", "jobs=0 must be 1 or more"),
        (
            "--data permuted-digits --probe 1440 --jobs 1",
            "cannot draw 1441 different examples from 1440: ask for fewer",
        ),
        ("--seeds -1", "seed=-1 must be a whole number from 0 to 2**31 - 1"),
        ("--seeds 3000000000", "seed=3000000000 must be"),
        ("--momentum 5", "momentum=5.0 must be a number in [0, 1)"),
        ("--lr-drops -5", "lr_drops=(-5,) must be whole numbers, 0 or more"),
        ("--lr 1e39", "lr=1e+39 must be a number above 0 and below 3.4e38"),
        ("--weight-decay 1e300", "weight_decay=1e+300 must be a number, 0 or more and below 3.4e38"),
        ("--batch-size 100000000000000000000", "batch_size=100000000000000000000 must be a whole number, 1 or more"),
        ("--data permuted-digits --width 2147483647 --jobs 1", "there is not enough memory"),
        ("--device cuda:99 --data permuted-digits", "device 'cuda:99' cannot be used here"),
        ("--device meta --data permuted-digits", "device 'meta' cannot be used here"),
        ("--data permuted-digits --train-size 9999 --jobs 1", "train_size=9999 is more than the 1440 images"),
        ("--data-dir /nowhere/at/all --jobs 1", "/nowhere/at/all"),
        ("--model no_such_module:f --data permuted-digits --jobs 1", "cannot import 'no_such_module'"),
        ("--model no_such_module:f --data permuted-digits --jobs 2", "cannot import 'no_such_module'"),
        ("--model mine_for_assay:nothing --data permuted-digits --jobs 1", "has no 'nothing'"),
        ("--model mine_for_assay:constant --data permuted-digits --jobs 1", "is a int, not a function"),
        ("--model mine_for_assay:number --data permuted-digits --jobs 1", "returned a int, not a torch.nn.Module"),
        ("--model misspelt_for_assay:f --data permuted-digits --jobs 1", "'misspelt_for_assay' (SyntaxError: "),
        (
            "--model mine_for_assay:demanding --data permuted-digits --jobs 1",
            "failed with TypeError (demanding() missing",
        ),
        ("--model mine_for_assay:failing --data permuted-digits --jobs 1", "failed with KeyError ('no such thing"),
        ("--model mine_for_assay:narrow --data permuted-digits --jobs 1", "does not work on an input of shape (2, 64)"),
        (
            "--model mine_for_assay:few --data permuted-digits --jobs 1",
            "makes (2, 3) of an input of shape (2, 64), not (2",
        ),
        ("--chekpoints 1", "--chekpoints"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_results(args, words, factories, tmp_path, capsys):
    assert cli.main(["assay", *args.split(), "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert words in said and said.startswith("gxd: ") and "Traceback" not in said
    assert said.rstrip("\n").count("\n") == 0
    assert not list(tmp_path.rglob("*seed*"))


def test_damaged_results_are_named(done, tmp_path):
    path = TINY.directory(tmp_path)
    path.mkdir(parents=True)
    for name in ("config.json", "checkpoint.pt"):
        (path / name).write_bytes((done / name).read_bytes())
    for damage in ('{"checkpoint": 0', "[1]\n"):
        (path / "assay.jsonl").write_text(damage)
        with pytest.raises(UserError, match=r"is damaged \(line 1: .*\): delete"):
            lab.assay(TINY, tmp_path)
