"""A run: what it writes, and that nothing that happens to its process changes the numbers."""

import errno
import json
import random
import textwrap
from dataclasses import replace

import pytest
import torch

import gxd
from gxd.lab import metrics, models, run, store, streams
from gxd.lab.errors import UserError
from gxd.lab.experiments.cifar100 import Cifar100
from gxd.lab.experiments.permuted_digits import PermutedDigits
from gxd.lab.progress import Progress
from gxd.lab.run import train
from gxd.lab.steps import eager_step
from gxd.lab.training import Training
from tests.processes import run_script

# Small and fast, with many resets.
SMALL = PermutedDigits(width=16, depth=2, tasks=4, epochs=1, batch_size=32, rate=0.02, maturity=10, compile="no")


def numbers(path):
    return (path / "metrics.jsonl").read_bytes()


def lines(path):
    return [json.loads(line) for line in numbers(path).splitlines()]


def status(path):
    return json.loads((path / "status.json").read_text())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return train(SMALL, tmp_path_factory.mktemp("runs"))


def test_a_run_writes_one_line_per_task_with_every_documented_metric(undisturbed) -> None:
    assert [line["task"] for line in lines(undisturbed)] == [0, 1, 2, 3]
    for line in lines(undisturbed):
        assert set(line) == set(metrics.DEFINITIONS) - {"test_loss"}
    assert all(line["resets"] > 5 for line in lines(undisturbed))
    assert status(undisturbed)["status"] == "done" and status(undisturbed)["task"] == 4
    assert sorted(p.name for p in undisturbed.iterdir()) == [
        ".lock", "checkpoint.pt", "config.json", "metrics.jsonl", "status.json",
    ]  # fmt: skip


def test_the_numbers_are_those_of_the_loop_in_the_readme(undisturbed) -> None:
    stream = streams.permuted_digits(0, 32)
    model = models.mlp(64, 10, width=16, depth=2, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seed = streams.generator(0, "resets").initial_seed()
    method = gxd.method("gxd", replacement_rate=0.02, maturity=10)
    resets = gxd.attach(model, optimizer, method, example_inputs=torch.zeros(2, 64), seed=seed)
    task, losses, hits = stream.task(0), [], 0
    for x, y in task.batches(0):
        logits = model(x)
        loss = torch.nn.functional.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        hits += int((logits.argmax(1) == y).sum())
    x, y = task.probe(10_000)
    line = lines(undisturbed)[0]
    assert line["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert line["online_accuracy"] == hits / 1440
    assert line["test_accuracy"] == float((model(x).argmax(1) == y).sum()) / 357
    assert line["resets"] == resets.total_resets > 0


def test_a_run_reports_its_progress_and_a_complete_one_returns_at_once(tmp_path, undisturbed, monkeypatch) -> None:
    config, seen = replace(SMALL, tasks=2), []
    path = train(config, tmp_path, report=seen.append)
    accuracy = [line["test_accuracy"] for line in lines(path)]
    assert seen == [Progress(0, 2), Progress(1, 2, accuracy[0]), Progress(2, 2, accuracy[1])]
    before, seen = {p.name: p.read_bytes() for p in path.iterdir()}, []
    monkeypatch.setattr(run, "make_stream", lambda config: pytest.fail("a complete run needs no data"))
    assert train(config, tmp_path, report=seen.append) == path
    assert seen == [Progress(2, 2, accuracy[1])]
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before


def test_the_seed_makes_the_run_and_the_global_random_state_has_no_part_in_it(tmp_path, undisturbed) -> None:
    torch.manual_seed(123)
    state = torch.get_rng_state()
    again = train(replace(SMALL, tasks=4), tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert numbers(again) == numbers(undisturbed)
    other = train(replace(SMALL, seed=1, tasks=4), tmp_path)
    assert numbers(other) != numbers(undisturbed)


def test_methods_with_one_seed_see_the_same_tasks_and_first_weights(tmp_path) -> None:
    stream = run.make_stream(SMALL)
    one, two = (Training(replace(SMALL, method=m), stream, torch.device("cpu")) for m in ("backprop", "gxd"))
    for a, b in zip(one.model.parameters(), two.model.parameters()):
        assert torch.equal(a, b)
    assert one.attached is None and two.attached is not None
    fresh = torch.empty_like(one.model.fc1.weight).uniform_(-1, 1, generator=two.attached._parts[0].host.generator)
    assert not torch.allclose(fresh / fresh.max(), one.model.fc1.weight / one.model.fc1.weight.max(), atol=1e-3)


@pytest.mark.parametrize("method", ["backprop", "loss_gradient", "gxd_sketch", "random"])
def test_a_stopped_run_goes_on_bit_for_bit_whatever_the_method(tmp_path, method) -> None:
    config = replace(SMALL, method=method, tasks=3, momentum=0.5)
    whole = train(config, tmp_path / "a")

    def stop(progress):
        if progress.task == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "b", report=stop, checkpoint_every=0)
    path = config.run_directory(tmp_path / "b")
    assert status(path) == {"status": "running", "task": 2, "seconds": status(path)["seconds"]}
    seen = []
    assert numbers(train(config, tmp_path / "b", report=seen.append)) == numbers(whole)
    assert [p.task for p in seen] == [2, 3]  # task 0 and 1 were not done again


@pytest.mark.slow
def test_a_compiled_run_goes_on_bit_for_bit(tmp_path) -> None:
    config = replace(SMALL, compile="yes", tasks=3, epochs=1, batch_size=48)  # 1440 / 48: one shape to compile
    whole = train(config, tmp_path / "a")

    def stop(progress):
        if progress.task == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "b", report=stop, checkpoint_every=0)
    assert numbers(train(config, tmp_path / "b")) == numbers(whole)
    eager = train(replace(config, compile="no"), tmp_path / "c")
    for one, other in zip(lines(whole), lines(eager)):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)
        assert one["resets"] == other["resets"]


# --- killed ---------------------------------------------------------------------------------------------------------


def survive(script, directory, *args) -> None:
    """Run a script that forks runs and kills them: a process of its own, so that it forks from a single thread."""
    head = f"""
        import os, random, shutil, signal, sys, time
        from pathlib import Path
        from gxd.lab import store
        from gxd.lab.experiments.permuted_digits import PermutedDigits
        from gxd.lab.run import train
        import gxd, torch
        config = {SMALL!r}
        root = Path(sys.argv[1])
        gxd.find_units(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), torch.zeros(2, 2))  # warm up

        def attempt(before=None, kill_after=None):
            child = os.fork()
            if not child:
                if before is not None:
                    before()
                train(config, root, checkpoint_every=0)
                os._exit(0)
            if kill_after is not None:
                time.sleep(kill_after)
                os.kill(child, signal.SIGKILL)
            return os.WTERMSIG(code) if os.WIFSIGNALED(code := os.waitpid(child, 0)[1]) else code
    """
    code, said = run_script(textwrap.dedent(head) + textwrap.dedent(script), directory, *args)
    assert code == 0, said


def test_a_run_killed_at_random_moments_goes_on_bit_for_bit(tmp_path, undisturbed) -> None:
    seed = random.randrange(10**6)
    print("seed of the kills:", seed)
    survive(
        """
        chance = random.Random(int(sys.argv[2]))
        started = time.monotonic()
        assert attempt() == 0
        whole = time.monotonic() - started
        root, kills = root / "killed", 0
        while kills < 5:
            if attempt(kill_after=chance.uniform(0, whole)) == signal.SIGKILL:
                kills += 1
            else:  # it got through: begin again, and be quicker
                shutil.rmtree(root)
                whole, kills = whole / 2, 0
        assert attempt() == 0
        """,
        tmp_path,
        seed,
    )
    assert numbers(SMALL.run_directory(tmp_path / "killed")) == numbers(undisturbed)
    assert status(SMALL.run_directory(tmp_path / "killed"))["status"] == "done"


def test_a_run_killed_at_the_worst_moments_goes_on_bit_for_bit(tmp_path, undisturbed) -> None:
    survive(
        """
        def die(*_):
            os.kill(os.getpid(), signal.SIGKILL)

        def at(name, count, owner=store):
            def arrange():
                real, calls = getattr(owner, name), [0]
                def patched(*args):
                    calls[0] += 1
                    return die() if calls[0] == count else real(*args)
                setattr(owner, name, patched)
            return arrange

        def half_a_line():
            def patched(self, line):
                (self.path / store.METRICS).open("ab").write(b'{"task": 1, "test_')
                die()
            store.RunDirectory.append = patched

        run = store.RunDirectory
        for moment in (
            at("write_json", 1),        # before there is a config
            at("set_status", 1, run),   # before the first task
            at("save", 1, run),         # the first line is there, its checkpoint is not
            at("replace", 2, os),       # the first checkpoint lies beside its place
            at("set_status", 2, run),   # the first checkpoint is newer than the status
            half_a_line,
            at("save", 2, run),         # after the second checkpoint; the third line is there
            at("set_status", 4, run),   # all is there, but nobody has said so
        ):
            assert attempt(moment) == signal.SIGKILL
        assert attempt() == 0
        """,
        tmp_path,
    )
    path = SMALL.run_directory(tmp_path)
    assert numbers(path) == numbers(undisturbed)
    assert not list(path.glob("*.part"))


def test_when_checkpoints_happen_does_not_change_the_numbers(tmp_path, undisturbed) -> None:
    assert numbers(train(SMALL, tmp_path, checkpoint_every=0)) == numbers(undisturbed)


def test_a_full_disk_stops_the_run_and_it_goes_on_after(tmp_path, undisturbed, monkeypatch) -> None:
    real, calls = store.os.fsync, []

    def full(handle):
        calls.append(handle)
        if len(calls) == 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(OSError) as error:
        train(SMALL, tmp_path, checkpoint_every=0)
    assert error.value.errno == errno.ENOSPC
    path = SMALL.run_directory(tmp_path)
    assert not list(path.glob("*.part"))
    assert status(path)["status"] == "running"
    assert numbers(train(SMALL, tmp_path)) == numbers(undisturbed)


# --- divergence, protocols, surroundings ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
def test_a_diverged_run_says_so_with_the_task_and_is_not_started_again(tmp_path) -> None:
    config = replace(SMALL, activation="leaky_relu", lr=40.0, tasks=5)
    path = train(config, tmp_path)
    assert status(path)["status"] == "diverged"
    assert status(path)["task"] == (len(lines(path)) if (path / "metrics.jsonl").exists() else 0) < 5
    before, seen = {p.name: p.read_bytes() for p in path.iterdir()}, []
    train(config, tmp_path, report=seen.append)
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before


def test_a_run_that_diverges_later_keeps_the_tasks_before(tmp_path, monkeypatch) -> None:
    real = Training.learn

    def poisoned(self, task):
        if task.number == 2:
            self.model.fc1.weight.data[0, 0] = torch.nan
        return real(self, task)

    monkeypatch.setattr(Training, "learn", poisoned)
    path = train(SMALL, tmp_path)
    assert status(path)["status"] == "diverged" and status(path)["task"] == 2
    assert [line["task"] for line in lines(path)] == [0, 1]


def test_a_lost_data_set_leaves_no_directory_behind(tmp_path) -> None:
    config = Cifar100(data_dir=str(tmp_path / "nowhere"), tasks=1)
    with pytest.raises(UserError, match="CIFAR-100"):
        train(config, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_device_that_is_not_there_is_named(tmp_path) -> None:
    for name in ("cuda:77", "abacus"):
        with pytest.raises(UserError, match=f"device '{name}' cannot be used here"):
            train(replace(SMALL, device=name), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_another_make_is_one_clear_line(tmp_path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(SMALL, tmp_path, checkpoint_every=0, report=lambda p: exec("raise KeyboardInterrupt") if p.task else None)
    path = SMALL.run_directory(tmp_path)
    state = torch.load(path / "checkpoint.pt", weights_only=True)
    del state["training"]["model"]["fc1.bias"]
    torch.save(state, path / "checkpoint.pt")
    with pytest.raises(UserError, match="another version of gxd: delete"):
        train(SMALL, tmp_path)


def test_threads_and_denormals_are_set_for_the_run_and_put_back() -> None:
    before, tiny = torch.get_num_threads(), torch.full((4,), 1e-40)
    with run._surroundings(replace(SMALL, threads=before + 1)):
        assert torch.get_num_threads() == before + 1
        assert not (tiny * 0.5).any() or not torch.set_flush_denormal(True)  # or this processor cannot
    assert torch.get_num_threads() == before
    assert (tiny * 0.5).all()


def test_an_eager_step_returns_what_it_saw_before_the_update() -> None:
    model = models.mlp(64, 10, width=8, depth=1)
    x, y = torch.randn(5, 64), torch.arange(5)
    expected = model(x).detach()
    loss, logits = eager_step(model, torch.optim.SGD(model.parameters(), 0.5), torch.nn.functional.cross_entropy)(x, y)
    assert torch.equal(logits, expected) and not loss.requires_grad and not logits.requires_grad
    assert not torch.equal(model(x), expected)
