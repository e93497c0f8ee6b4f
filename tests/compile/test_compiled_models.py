"""``torch.compile`` of a model that is observed: one warning, which names the remedy, and the remedy works."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gxd
from gxd.compile import program

HOWS = ["before", "after", "in place before", "in place after"]


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.c(F.relu(self.b(F.relu(self.a(x)))))


def sequential():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


def batch():
    return torch.randn(5, 4), torch.randint(0, 3, (5,))


@pytest.fixture(autouse=True)
def anew():
    torch.compiler.reset()
    torch.manual_seed(0)


@pytest.fixture
def said():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda: [one for one in caught if issubclass(one.category, gxd.CompileWarning)]


class Counted:
    """A backend that compiles nothing, and counts the graphs it is given."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, example):
        self.graphs += 1
        return graph.forward


def attached(make, how, optimizer=torch.optim.SGD, **options):
    """The model as it is called, and what it is trained with."""
    model = called = make()
    optimizer, backend = optimizer(model.parameters(), 0.01), Counted()
    if how == "before":
        called = torch.compile(model, backend=backend)
    elif how == "in place before":
        model.compile(backend=backend)
    cbp = gxd.ContinualBackprop(called, optimizer, example_inputs=batch()[0], **options)
    if how == "after":
        called = torch.compile(model, backend=backend)
    elif how == "in place after":
        model.compile(backend=backend)
    return called, optimizer, cbp, backend


def train(model, optimizer, cbp, loss=F.cross_entropy, step=None):
    x, y = batch()
    output = model(x)
    value = loss(output, y)
    cbp.observe(output, y)
    value.backward()
    (step or optimizer.step)()
    optimizer.zero_grad()


@pytest.mark.parametrize("make", [Layers, sequential])
@pytest.mark.parametrize("how", HOWS)
def test_a_compiled_model_that_is_observed_is_warned_of_once_at_the_line_that_calls_it(make, how, said):
    model, optimizer, cbp, _ = attached(make, how)
    for _ in range(3):
        train(model, optimizer, cbp)
    assert len(said()) == 1 and "gxd.compiled_step" in str(said()[0].message)
    assert said()[0].filename == __file__


def test_each_attachment_warns_for_itself(said):
    for expected in (1, 2):
        train(*attached(Layers, "before")[:3])
        assert len(said()) == expected


@pytest.mark.parametrize("score_every", [1, 3])
def test_steps_that_are_not_scored_give_no_other_result(score_every, said):
    def run(how):
        torch.compiler.reset()
        torch.manual_seed(0)
        model, optimizer, cbp, _ = attached(Layers, how, score_every=score_every)
        for _ in range(7):
            train(model, optimizer, cbp)
        return cbp.utilities()

    torch.testing.assert_close(run("before"), run(None))


def test_nothing_is_said_of_what_is_not_compiled_or_does_not_run_the_model(said):
    train(*attached(Layers, None)[:3])
    model, optimizer, cbp, backend = attached(Layers, None)
    train(model, optimizer, cbp, loss=torch.compile(F.cross_entropy, backend=backend))
    train(model, optimizer, cbp, step=torch.compile(optimizer.step, backend=backend))
    assert backend.graphs
    torch.export.export(model, (batch()[0],))
    assert not said()


def test_a_copy_that_is_not_observed_keeps_its_graph_whole(said):
    model, *_ = attached(Layers, None)
    backend = Counted()
    torch.compile(copy.deepcopy(model), backend=backend)(batch()[0])
    assert backend.graphs == 1 and not said()


@pytest.mark.parametrize("make", [Layers, sequential])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])  # Adam begins with an eager step
def test_a_compiled_step_takes_a_compiled_model_and_a_compiled_loss(make, how, optimizer, said, monkeypatch):
    monkeypatch.setattr(program, "compile_graph", lambda graph, example: graph)
    model, optimizer, cbp, backend = attached(make, how, optimizer)
    step = gxd.compiled_step(model, optimizer, torch.compile(F.cross_entropy, backend=backend), cbp)
    for _ in range(3):
        step(*batch())
    assert step.why_eager is None and len(step._programs) == 1 and not backend.graphs and not said()
    assert int(next(iter(cbp.ages().values()))[0]) == 3
