"""Every method on every stream that it can treat, and an exact resume on every one."""

import contextlib
import json
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import gxd
from gxd.lab import metrics, models
from gxd.lab.errors import UserError
from gxd.lab.experiments import EXPERIMENTS
from gxd.lab.run import make_stream, train
from gxd.lab.training import Training
from gxd.methods import registry
from tests.lab.tiny import equal, small_data, small_run, whole

STREAMS = list(EXPERIMENTS)


@pytest.fixture(autouse=True)
def data(monkeypatch) -> None:
    small_data(monkeypatch)


def lines(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", STREAMS)
def test_a_stopped_run_of_every_experiment_goes_on_bit_for_bit(tmp_path, name) -> None:
    config = small_run(name)
    whole_run = train(config, tmp_path / "a")

    def stop(progress):
        if progress.task == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "b", report=stop, checkpoint_every=0)
    stopped = train(config, tmp_path / "b")
    assert (stopped / "metrics.jsonl").read_bytes() == (whole_run / "metrics.jsonl").read_bytes()
    found = lines(whole_run)
    assert len(found) == 3 and sum(line["resets"] for line in found) > 0
    kept = {"test_loss"} if config.classifies else {"test_accuracy", "online_accuracy"}
    assert all(set(line) == set(metrics.DEFINITIONS) - kept for line in found)


REFUSED = re.compile(r"(\w+) (?:cannot treat the network of|acts between tasks, and) (\S+?)(?:: | has none)")


def remedied(said, config):
    """The run with what a refusal says to do, or None if that is to choose another method."""
    found = REFUSED.match(said)
    assert found and found.groups() == (config.method, config.name), said
    clock = re.search(r"--options (\w+)=1000$", said)
    if clock:
        return replace(config, options=(f"{clock[1]}=20",))
    return replace(config, layer_norm=True) if "Put a LayerNorm" in said else None


@pytest.mark.parametrize("method", gxd.methods())
@pytest.mark.parametrize("name", STREAMS)
def test_every_method_trains_on_every_stream_or_says_what_to_do(tmp_path, name, method) -> None:
    config = small_run(name, method=method, tasks=2, lr=0.01)
    seen = []
    try:
        path = train(config, tmp_path, report=seen.append)
    except UserError as refused:
        assert not list(tmp_path.iterdir()) and not seen
        config = remedied(str(refused), config)
        if config is None:
            assert (name, method) == ("slow-regression", "dash")  # it needs the data of a task that begins
            return
        path = train(config, tmp_path, report=seen.append)
    assert json.loads((path / "status.json").read_text())["status"] == "done"
    assert [line["task"] for line in lines(path)] == [0, 1] == [progress.task - 1 for progress in seen[1:]]
    assert all(line["loss"] < 10 for line in lines(path))


@pytest.mark.parametrize("name", [name for name in STREAMS if name != "cifar100"])
@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "tanh"}, {"activation": "silu"}, {"activation": "leaky_relu"}, {"activation": "crelu"},
        {"layer_norm": True}, {"input_norm": "ema", "init": "glorot"}, {"network": "linear", "method": "l2_init"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)  # fmt: skip
def test_every_network_takes_every_activation_and_control(name, changes) -> None:
    config = small_run(name, **changes)
    stream = make_stream(config)
    training = Training(config, stream, torch.device("cpu"))
    training.new_task(stream.task(0))
    assert training.learn(stream.task(0)) is not None
    assert (training.plan.size == 0) == (changes.get("network") == "linear")
    assert all(value == value for value in training.measure(stream.task(0)).values())


def test_what_is_learned_is_what_counts(tmp_path) -> None:
    """Accuracy grows where there is something to learn, and the loss of a regression falls."""
    path = train(small_run("permuted-mnist", method="backprop", tasks=1, epochs=40, width=32, lr=0.1), tmp_path)
    assert lines(path)[0]["test_accuracy"] > 0.9
    path = train(small_run("random-label-mnist", method="backprop", tasks=1, epochs=200, width=64, lr=3e-3), tmp_path)
    assert lines(path)[0]["test_accuracy"] > 0.9
    first, last = (
        lines(train(small_run("slow-regression", method="backprop", tasks=1, epochs=n), tmp_path))[0] for n in (1, 40)
    )
    assert last["test_loss"] < first["test_loss"] and last["loss"] < first["loss"]


def test_the_test_loss_of_a_regression_is_the_mean_squared_error(tmp_path) -> None:
    config = small_run("slow-regression", method="backprop", tasks=1)
    line = lines(train(config, tmp_path))[0]
    task = config.stream().task(0)
    model = models.mlp(20, 1, width=5, depth=1, init="default", seed=0)
    losses = []
    for x, y in zip(task.train_images.split(2), task.train_labels.split(2)):
        loss = ((model(x) - y) ** 2).mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients):
                parameter -= 0.01 * gradient
        losses.append(loss.item())
    assert line["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    error = ((model(task.test_images) - task.test_labels) ** 2).mean().item()
    assert line["test_loss"] == pytest.approx(error, rel=1e-4)


# --- between tasks ----------------------------------------------------------------------------------------------------


class AtEnd(gxd.Method):
    """Counts boundaries."""

    def __init__(self, calls, every):
        self.calls, self.every = calls, every

    def at_boundary(self, host, state, *more):
        self.calls.append(more)
        return state


@pytest.fixture
def calls(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    calls = []

    @gxd.register_method("at_end", description="of this test", inert={})
    def at_end(every: int = 0) -> AtEnd:
        return AtEnd(calls, every)

    return calls


def test_a_method_is_told_of_the_end_of_every_task_but_the_last(tmp_path, calls) -> None:
    train(small_run("permuted-digits", method="at_end", tasks=3), tmp_path)
    assert len(calls) == 2


def test_a_stream_without_boundaries_refuses_what_acts_at_them(tmp_path, calls) -> None:
    with pytest.raises(UserError, match="at_end acts between tasks, and slow-regression has none"):
        train(small_run("slow-regression", method="at_end"), tmp_path)
    assert not calls and not list(tmp_path.iterdir())
    train(small_run("slow-regression", method="at_end", options=("every=50",), tasks=2), tmp_path)  # by the clock


def test_a_boundary_brings_the_data_of_the_new_task_and_the_loss(monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(gxd.Attachment, "boundary", lambda self, data=None, loss=None: seen.append((data, loss)))
    config = small_run("permuted-mnist", method="l2_init")
    stream = make_stream(config)
    training = Training(config, stream, torch.device("cpu"))
    for number in (0, 1):
        training.new_task(stream.task(number))
    ((given, loss),) = seen
    assert loss is F.cross_entropy
    for _ in range(2):  # as often as a method needs
        assert equal(whole(given), whole(stream.task(1).batches(0)))


def test_a_task_is_judged_with_the_weights_that_the_method_evaluates(tmp_path, monkeypatch) -> None:
    @contextlib.contextmanager
    def evaluating(self):
        before = {name: value.clone() for name, value in self.model.state_dict().items()}
        torch.nn.init.zeros_(self.model.head.weight)
        try:
            yield
        finally:
            self.model.load_state_dict(before)

    config = small_run("permuted-mnist", method="l2_init", tasks=2)
    plain = lines(train(config, tmp_path / "a"))
    monkeypatch.setattr(gxd.Attachment, "evaluating", evaluating, raising=False)
    zeroed = lines(train(config, tmp_path / "b"))
    assert [line["loss"] for line in plain] == [line["loss"] for line in zeroed]  # training goes on as before
    assert all(one["weight_norm"] > other["weight_norm"] for one, other in zip(plain, zeroed))


# --- refused ----------------------------------------------------------------------------------------------------------


def test_a_network_that_a_method_cannot_treat_is_one_line_and_nothing_is_written(tmp_path) -> None:
    for method in ("gxd", "redo"):
        with pytest.raises(UserError) as error:
            train(small_run("permuted-mnist", network="linear", method=method), tmp_path)
        assert f"{method} cannot treat the network of permuted-mnist: the plan has no unit" in str(error.value)
        assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "most"), [("cifar-5+1", 32), ("cifar100", 4950)])
def test_tasks_that_do_not_exist_are_refused(tmp_path, name, most) -> None:
    with pytest.raises(UserError, match=rf"tasks={most + 1} must be at most {most}: {re.escape(name)} has no more"):
        train(small_run(name, tasks=most + 1), tmp_path)
    assert not list(tmp_path.iterdir())
