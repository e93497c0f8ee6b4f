"""Copies of a training: of the model, the optimizer and the ContinualBackprop together."""

import copy
import io
import itertools
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd
from tests.rig import X, Y, attach, mlp, same

UTILITIES = ["gxd", "gxd_sketch", "random", "loss_gradient"]
Parts = tuple[nn.Module, torch.optim.Optimizer, gxd.ContinualBackprop]


def trained(utility: str = "gxd", steps: int = 5, **options: Any) -> Parts:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    options = {"maturity": 1, "replacement_rate": 0.15, **options}
    rig = attach(utility, model=model, optimizer=optimizer, **options)
    train(rig.model, rig.optimizer, rig.cbp, steps)
    return rig.model, rig.optimizer, rig.cbp


def train(model: nn.Module, optimizer: torch.optim.Optimizer, cbp: gxd.ContinualBackprop, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = X + torch.randn(X.shape, generator=generator)
        logits = model(x)
        cbp.observe(logits, Y)
        F.cross_entropy(logits, Y).backward()
        optimizer.step()
        optimizer.zero_grad()


def state(model: nn.Module, optimizer: torch.optim.Optimizer, cbp: gxd.ContinualBackprop) -> Any:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict(), cbp.state_dict()))


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
@pytest.mark.parametrize("utility", UTILITIES)
def test_a_copy_trains_on_as_the_original_does_and_neither_touches_the_other(utility: str, order: tuple[int, ...]):
    parts = trained(utility)
    copied = copy.deepcopy(tuple(parts[n] for n in order))
    twin: Any = tuple(copied[order.index(n)] for n in range(3))
    assert twin[2].model is twin[0]
    assert twin[2].optimizer is twin[1]
    then = state(*parts)
    assert same(state(*twin), then)
    train(*parts, 8)
    assert same(state(*twin), then), "the copy is left alone"
    now = state(*parts)
    train(*twin, 8)
    assert same(state(*twin), now)
    assert same(state(*parts), now), "the original is left alone"
    assert twin[2].total_resets > then[2]["methods"]["0.continual_backprop"]["state"]["total"]


def test_a_copy_of_the_resetter_alone_brings_the_model_and_the_optimizer_along():
    parts = trained()
    cbp = copy.deepcopy(parts[2])
    assert cbp.model is not parts[0]
    assert cbp.optimizer is not parts[1]
    train(cbp.model, cbp.optimizer, cbp, 6)
    train(*parts, 6)
    assert same(state(cbp.model, cbp.optimizer, cbp), state(*parts))


def test_a_copy_that_is_made_while_observation_is_paused_observes():
    parts = trained()
    with parts[2].paused():
        twin = copy.deepcopy(parts)
    train(*twin, 6)
    train(*parts, 6)
    assert same(state(*twin), state(*parts))


def test_copies_of_copies_do_not_pile_up_hooks():
    parts = trained()

    def hooks(model: nn.Module) -> int:
        return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())

    expected = hooks(parts[0])
    for _ in range(4):
        parts = copy.deepcopy(parts)
        train(*parts, 2)
    assert hooks(parts[0]) == expected
    assert len(parts[1]._optimizer_step_post_hooks) == 1
    parts[2].close()
    assert hooks(parts[0]) == 0
    assert not parts[1]._optimizer_step_post_hooks


def test_a_copy_that_is_closed_leaves_the_original_attached_and_a_closed_one_is_copied_closed():
    parts = trained()
    twin = copy.deepcopy(parts)
    twin[2].close()
    with pytest.raises(gxd.ObservationError, match="close"):
        twin[2].observe(twin[0](X), Y)
    before = parts[2].total_resets
    train(*parts, 6)
    assert parts[2].total_resets > before
    third = copy.deepcopy(twin)
    with pytest.raises(gxd.ObservationError, match="close"):
        third[2].observe(third[0](X), Y)


class Agent(nn.Module):
    """A module that holds its optimizer and its resetter, as modules of some frameworks do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.02)
        self.cbp: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize("of", ["the module itself", "its network"])
def test_a_module_that_holds_its_own_resetter_is_copied_with_it(of: str):
    agent = Agent()
    model = agent if of == "the module itself" else agent.net
    agent.cbp = gxd.ContinualBackprop(model, agent.optimizer, example_inputs=X, maturity=1, replacement_rate=0.15)
    train(agent, agent.optimizer, agent.cbp, 4)
    twin = copy.deepcopy(agent)
    assert twin.cbp.model is (twin if of == "the module itself" else twin.net)
    for one in (agent, twin):
        train(one, one.optimizer, one.cbp, 6)
    assert agent.cbp.total_resets > 4
    assert same(state(twin, twin.optimizer, twin.cbp), state(agent, agent.optimizer, agent.cbp))


@pytest.mark.parametrize("utility", UTILITIES)
def test_a_copy_between_micro_batches_has_what_was_observed(utility: str):
    parts = trained(utility)
    train_a, train_b = X[:4], X[4:]

    def half(model: nn.Module, cbp: gxd.ContinualBackprop, x: Tensor, y: Tensor) -> None:
        logits = model(x)
        cbp.observe(logits, y)
        F.cross_entropy(logits, y).backward()

    half(parts[0], parts[2], train_a, Y[:4])
    twin = copy.deepcopy(parts)
    for p, q in zip(parts[0].parameters(), twin[0].parameters(), strict=True):
        q.grad = p.grad.clone()  # torch copies a parameter without its gradient
    for model, optimizer, cbp in (parts, twin):
        half(model, cbp, train_b, Y[4:])
        optimizer.step()
        optimizer.zero_grad()
    assert same(state(*twin), state(*parts))


@pytest.mark.parametrize("options", [{"score_every": 3}, {"compensate": False, "step_policy": "reset"}])
def test_settings_are_copied(options: dict[str, Any]):
    parts = trained(**options)
    twin = copy.deepcopy(parts)
    for one in (parts, twin):
        train(*one, 7)
    assert same(state(*twin), state(*parts))
    assert repr(twin[2]) == repr(parts[2])


def test_several_optimizers_and_a_scaler_are_copied():
    model = mlp()
    optimizers = [
        torch.optim.SGD([p for p in model.parameters() if p.dim() == dim], lr=0.05, momentum=0.9) for dim in (1, 2)
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    cbp = attach("loss_gradient", model=model, optimizer=optimizers, scaler=scaler, maturity=1).cbp

    def steps(model: nn.Module, optimizers: Any, scaler: Any, cbp: gxd.ContinualBackprop) -> None:
        for _ in range(4):
            scaler.scale(F.cross_entropy(model(X), Y)).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()

    everything = (model, optimizers, scaler, cbp)
    steps(*everything)
    twin = copy.deepcopy(everything)
    assert twin[3].scaler is twin[2]
    steps(*everything)
    steps(*twin)
    assert same(twin[3].state_dict(), cbp.state_dict())
    assert same(twin[0].state_dict(), model.state_dict())


def test_a_copy_of_the_model_alone_is_a_target_network_that_nothing_follows():
    parts = trained()
    target = copy.deepcopy(parts[0])
    before = state(*parts)
    for _ in range(3):
        target(X).sum().backward()
    assert same(state(*parts), before)
    parts[2].observe(parts[0](X), Y)


@pytest.mark.parametrize(
    "how", [copy.copy, pickle.dumps, lambda cbp: torch.save(cbp, io.BytesIO())], ids=["copy", "pickle", "torch.save"]
)
def test_what_would_be_a_dead_copy_is_refused_with_the_remedy(how: Any):
    cbp = trained()[2]
    with pytest.raises(TypeError, match=r"state_dict\(\).*deepcopy"):
        how(cbp)
    train(cbp.model, cbp.optimizer, cbp, 1)


def test_a_compiled_step_cannot_be_copied_and_says_how_to_make_another(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gxd.compile.program.compile_graph", lambda graph, example: graph)
    parts = trained()
    step = gxd.compiled_step(parts[0], parts[1], F.cross_entropy, parts[2])
    step(X, Y)
    for how in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="compiled_step"):
            how(step)
    model, optimizer, cbp = copy.deepcopy(parts)
    another = gxd.compiled_step(model, optimizer, F.cross_entropy, cbp)
    for _ in range(5):
        step(X, Y)
        another(X, Y)
    assert another.why_eager is None
    assert same(state(model, optimizer, cbp), state(*parts))


def test_a_copied_model_is_traced_and_checked_like_any_other():
    model, _, cbp = copy.deepcopy(trained())
    assert gxd.find_units(model, X).fingerprint() == cbp.plan.fingerprint()
    with warnings.catch_warnings():
        warnings.simplefilter("error", gxd.ObservationWarning)
        assert gxd.verify_plan(model, X)


LOAD = """
import sys, torch
sys.modules["gxd"] = None  # as where it is not installed
model, optimizer = torch.load(sys.argv[1], weights_only=False)
x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
compiled = torch.compile(model, backend="eager")
model(x).sum().backward()
optimizer.step()
torch.save((model(x), compiled(x)), sys.argv[1])
"""


@pytest.mark.parametrize("closed", [False, True])
def test_what_torch_saves_while_attached_is_loaded_without_gxd(tmp_path: Path, closed: bool):
    """Of every kind of hook: on the model, on its layers, inside attention, on what the trace did not see."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    methods = gxd.method("redo", every=2), gxd.method("continual_backprop"), gxd.method("upgd")
    attached = gxd.attach(model, optimizer, *methods, example_inputs=torch.randn(2, 5, 8))
    attached.observe_output()
    attached.observe_output("0", defer=True)
    if closed:
        attached.close()
    file = tmp_path / "file.pt"
    torch.save((model, optimizer), file)
    attached.close()
    subprocess.run([sys.executable, "-c", LOAD, str(file)], check=True)
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    model(x).sum().backward()
    optimizer.step()
    assert all(torch.equal(output, model(x)) for output in torch.load(file))


def test_a_model_that_was_saved_while_attached_is_attached_and_compiled_as_a_new_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gxd.compile.program.compile_graph", lambda graph, example: graph)
    model = pickle.loads(pickle.dumps(trained()[0]))
    again = pickle.loads(pickle.dumps(model))
    optimizer = torch.optim.Adam(again.parameters(), lr=0.02)
    cbp = attach("gxd", model=again, optimizer=optimizer).cbp
    step = gxd.compiled_step(again, optimizer, F.cross_entropy, cbp)
    step(X, Y)
    assert step.why_eager is None
