"""The run directory: whole files, one process at a time, and a refusal of what it does not know."""

import errno
import json
import multiprocessing
import os
import resource
import signal
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from gxd.lab import store
from gxd.lab.errors import UserError
from gxd.lab.experiments.permuted_digits import PermutedDigits
from gxd.lab.store import RunDirectory, held, read_config, read_metrics, write_bytes

CONFIG = PermutedDigits(tasks=3, lr=0.1)
CPU = torch.device("cpu")


def opened(path, config=CONFIG):
    return RunDirectory(path / "run", config)


def test_config_json_says_what_ran_and_with_what(tmp_path) -> None:
    with opened(tmp_path):
        record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record["experiment"] == "permuted-digits"
    assert record["config"]["rate"] == 1e-3 and record["config"]["compile"] == "no"  # resolved
    assert "data_dir" not in record["config"] and "threads" not in record["config"]
    assert set(record["versions"]) == {"gxd", "torch", "python", "commit"}
    assert record["versions"]["torch"] == torch.__version__
    assert record["machine"]["device"] == "cpu" and record["machine"]["threads"] == 1
    assert read_config(tmp_path / "run").key() == CONFIG.key()


def test_a_directory_of_another_config_is_refused_and_left_alone(tmp_path) -> None:
    with opened(tmp_path) as directory:
        directory.append({"task": 0})
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    with pytest.raises(UserError, match=r"lr=0\.1, not 0\.2.*choose another --out"):
        opened(tmp_path, replace(CONFIG, lr=0.2))
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before
    opened(tmp_path, replace(CONFIG, threads=2)).close()  # where it runs is another matter


def test_a_directory_with_results_of_unknown_origin_is_refused(tmp_path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("mine\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl but no config\.json"):
        opened(tmp_path)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "mine\n"


def test_a_run_resumed_under_another_version_says_so(tmp_path, monkeypatch) -> None:
    with opened(tmp_path) as directory:
        directory.set_status("running", 1, 1.0)
    now = {**store.versions(), "torch": "99.0"}
    monkeypatch.setattr(store, "versions", lambda: now)
    for _ in range(2):
        opened(tmp_path).close()
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record["versions"]["torch"] == torch.__version__
    assert record["resumed"] == [now]


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path) -> None:
    with opened(tmp_path) as directory:
        directory.append({"task": 0, "loss": 0.5})
        directory.save({"task": 1, "x": torch.arange(3)})
        directory.append({"task": 1, "loss": float("nan")})
        assert directory.lines() == [{"task": 0, "loss": 0.5}, {"task": 1, "loss": None}]
    with opened(tmp_path) as directory:
        state = directory.load(CPU)
        assert state["task"] == 1 and torch.equal(state["x"], torch.arange(3))
        assert directory.lines() == [{"task": 0, "loss": 0.5}]


def test_metrics_without_a_checkpoint_begin_anew(tmp_path) -> None:
    with opened(tmp_path) as directory:
        directory.append({"task": 0})
        assert directory.load(CPU) is None
        assert directory.lines() == []


def test_a_reader_does_not_see_a_line_that_is_being_written(tmp_path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"task": 0}\n{"task": 1, "lo')
    assert read_metrics(tmp_path) == [{"task": 0}]
    for damage in ('{"task": 1, "lo\n', "[1]\n", "null\n"):
        (tmp_path / "metrics.jsonl").write_text('{"task": 0}\n' + damage)
        with pytest.raises(UserError, match=r"damaged \(line 2: "):
            read_metrics(tmp_path)


@pytest.mark.parametrize("damage", [{"config": []}, {"config": None}, {"resumed": 3}])
def test_a_damaged_config_is_one_clear_line(tmp_path, damage) -> None:
    opened(tmp_path).close()
    file = tmp_path / "run" / "config.json"
    store.write_json(file, {**store.read_json(file), **damage})
    for use in (opened, lambda path: read_config(path / "run")):
        with pytest.raises(UserError, match=r"config\.json is damaged: delete"):
            use(tmp_path)


@pytest.mark.parametrize("damage", [b"", b"no checkpoint at all"])
def test_a_damaged_checkpoint_is_one_clear_line(tmp_path, damage) -> None:
    with opened(tmp_path) as directory:
        directory.save({"task": 0})
        (tmp_path / "run" / "checkpoint.pt").write_bytes(damage)
        with pytest.raises(UserError, match="damaged: delete"):
            directory.load(CPU)


def test_a_checkpoint_is_never_unpickled(tmp_path) -> None:
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "pwned"),)

    with opened(tmp_path) as directory:
        torch.save({"metrics_length": 0, "training": Evil()}, tmp_path / "run" / "checkpoint.pt")
        with pytest.raises(UserError, match="damaged"):
            directory.load(CPU)
    assert not (tmp_path / "pwned").exists()


def test_a_checkpoint_ahead_of_the_metrics_is_refused(tmp_path) -> None:
    with opened(tmp_path) as directory:
        directory.append({"task": 0})
        directory.save({"task": 1})
        os.truncate(tmp_path / "run" / "metrics.jsonl", 3)
        with pytest.raises(UserError, match="lost lines"):
            directory.load(CPU)


@contextmanager
def small_files(limit):
    """No file may grow beyond this: what a full disk looks like to a process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)


def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path) -> None:
    file = tmp_path / "checkpoint.pt"
    write_bytes(file, b"old")
    with small_files(1000), pytest.raises(OSError) as error:
        write_bytes(file, b"new" * 1000)
    assert error.value.errno == errno.EFBIG and error.value.filename == str(file)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]
    assert file.read_bytes() == b"old"


def test_a_full_disk_leaves_no_half_line(tmp_path) -> None:
    with opened(tmp_path) as directory:
        directory.append({"task": 0})
        file = tmp_path / "run" / "metrics.jsonl"
        with small_files(file.stat().st_size + 5), pytest.raises(OSError) as error:
            directory.append({"task": 1, "loss": 0.123456})
        assert error.value.filename == str(file)
        assert file.read_text() == '{"task": 0}\n'


def _hold(path, ready) -> None:
    RunDirectory(path, CONFIG)
    ready.set()
    signal.pause()


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    first = context.Process(target=_hold, args=(tmp_path / "run", ready))
    first.start()
    assert ready.wait(60)
    with pytest.raises(UserError, match="another process is at"):
        opened(tmp_path)
    first.kill()
    first.join()
    opened(tmp_path).close()


def test_what_a_killed_process_was_writing_is_swept_up(tmp_path) -> None:
    opened(tmp_path).close()
    (tmp_path / "run" / "checkpoint.pt.123.part").write_bytes(b"half")
    opened(tmp_path).close()
    assert not list((tmp_path / "run").glob("*.part"))


def test_a_place_that_cannot_be_written_to_is_named(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write to .*file.*choose another place"):
        RunDirectory(tmp_path / "file" / "run", CONFIG)


def test_who_changes_a_file_of_a_directory_waits_for_who_is_at_it(tmp_path) -> None:
    came = threading.Event()

    def other() -> None:
        with held(tmp_path):
            came.set()

    with held(tmp_path):
        thread = threading.Thread(target=other)
        thread.start()
        assert not came.wait(0.2)
    thread.join(10)
    assert came.is_set()
