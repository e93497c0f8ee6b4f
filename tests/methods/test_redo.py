"""ReDo against loops over units: which units, when, and what is written to them."""

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd
from tests.rig import same


def net(kind: str) -> nn.Sequential:
    torch.manual_seed(1)
    if kind == "linear":
        layers = OrderedDict(first=nn.Linear(4, 9), act1=nn.ReLU(), second=nn.Linear(9, 7), act2=nn.ReLU())
        return nn.Sequential(OrderedDict(**layers, head=nn.Linear(7, 3)))
    layers = OrderedDict(first=nn.Conv2d(2, 6, 3), act1=nn.ReLU(), second=nn.Conv2d(6, 5, 2), act2=nn.ReLU())
    return nn.Sequential(OrderedDict(**layers, flat=nn.Flatten(), head=nn.Linear(5 * 4, 3)))


SHAPES = {"linear": (4,), "conv": (2, 5, 5)}
OPTIMIZERS: dict[str, Any] = {
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
}


def batches(kind: str, count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(8, *SHAPES[kind], generator=generator), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(count)
    ]


class Run:
    def __init__(self, kind: str, optimizer: str = "adam", **options: Any) -> None:
        self.model = net(kind)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        example = torch.zeros(2, *SHAPES[kind])
        self.redo = gxd.attach(
            self.model, self.optimizer, gxd.method("redo", **options), example_inputs=example, seed=3
        )

    def step(self, x: Tensor, y: Tensor) -> None:
        F.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def dormant(model: nn.Sequential, x: Tensor, threshold: float) -> dict[str, list[int]]:
    """E|h| of each unit, one after the other, over examples and positions, next to the mean of its layer."""
    found = {}
    with torch.no_grad():
        for layer, activation in (("first", "act1"), ("second", "act2")):
            values = x
            for name, module in model.named_children():
                values = module(values)
                if name == activation:
                    break
            activity = [float(values[:, unit].abs().mean()) for unit in range(values.shape[1])]
            mean = sum(activity) / len(activity)
            units = [unit for unit, value in enumerate(activity) if value / (mean + 1e-9) <= threshold]
            if units:
                found[layer] = units
    return found


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("threshold", [0.3, 0.8])
def test_the_dormant_units_of_the_batch_of_every_nth_step_go_and_no_others(kind: str, threshold: float):
    run, resets = Run(kind, threshold=threshold, every=3), 0
    for number, (x, y) in enumerate(batches(kind, 12), 1):
        expected = dormant(run.model, x, threshold) if number % 3 == 0 else {}
        run.step(x, y)
        assert {name: index.tolist() for name, index in run.redo.last_resets.items()} == expected
        resets += sum(map(len, expected.values()))
    assert run.redo.total_resets == resets >= 2


@pytest.mark.parametrize("policy", ["keep", "reset"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_a_reset_writes_fresh_incoming_zero_outgoing_and_empties_the_moments(kind: str, optimizer: str, policy: str):
    """Element by element, against the same steps without the method."""
    run = Run(kind, optimizer, threshold=0.8, every=2, step_policy=policy)
    data = batches(kind, 2)
    run.step(*data[0])
    model = copy.deepcopy(run.model)  # its hooks are inert in the copy
    plain = OPTIMIZERS[optimizer](model.parameters())
    plain.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    run.step(*data[1])
    plain_step(model, plain, *data[1])
    resets = {name: index.tolist() for name, index in run.redo.last_resets.items()}
    assert set(resets) == {"first", "second"}
    for layer, before in (("first", None), ("second", "first"), ("head", "second")):
        ours, theirs = run.model.get_submodule(layer), model.get_submodule(layer)
        units = resets.get(layer, [])
        inputs = columns(kind, layer, resets.get(before, []) if before else [])
        fan_in = ours.weight[0].numel()
        for row in range(ours.weight.shape[0]):
            moments = [moment[row] for moment in kept(run.optimizer, ours.bias)]
            bias_is = 0.0 if row in units else theirs.bias[row]
            assert ours.bias[row] == bias_is  # no compensation, and none into other biases
            assert all(bool(m == 0) for m in moments) == (row in units)
            for column in range(ours.weight.shape[1]):
                entry, old = ours.weight[row, column], theirs.weight[row, column]
                moments = [moment[row, column] for moment in kept(run.optimizer, ours.weight)]
                if column in inputs:
                    assert not entry.any() and not any(m.any() for m in moments)
                elif row in units:
                    assert bool((entry != old).all()) and bool((entry.abs() <= fan_in**-0.5).all())
                    assert not any(m.any() for m in moments)
                else:
                    assert torch.equal(entry, old)
                    theirs_kept = [moment[row, column] for moment in kept(plain, theirs.weight)]
                    assert all(map(torch.equal, moments, theirs_kept))
        if optimizer == "adam":
            touched = policy == "reset" and bool(units or inputs)
            assert float(run.optimizer.state[ours.weight]["step"]) == (0.0 if touched else 2.0)


def columns(kind: str, layer: str, units: list[int]) -> list[int]:
    """The input columns of some units; a channel has four of them after the flattening."""
    if kind == "conv" and layer == "head":
        return [4 * unit + position for unit in units for position in range(4)]
    return units


def kept(optimizer: torch.optim.Optimizer, parameter: Tensor) -> list[Tensor]:
    state = optimizer.state[parameter]
    return [state[name] for name in ("exp_avg", "exp_avg_sq", "momentum_buffer") if name in state]


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("threshold", [0.0, 0.1])
def test_a_dead_unit_comes_alive_and_learns(kind: str, threshold: float):
    run = Run(kind, "momentum", threshold=threshold, every=1)
    (x, y), *rest = batches(kind, 10)
    with torch.no_grad():
        run.model.first.bias[2] = -100.0
    run.step(x, y)
    assert 2 in run.redo.last_resets["first"]
    assert not run.model.second.weight[:, 2].any()
    values = F.relu(run.model.first(torch.cat([x for x, _ in rest])))
    assert bool((values[:, 2] > 0).any())
    for batch in rest:
        run.step(*batch)
    assert run.model.second.weight[:, 2].any()


def test_a_threshold_of_zero_resets_units_that_are_exactly_silent_and_leaves_the_quietest():
    run = Run("linear", threshold=0.0, every=1)
    ((x, y),) = batches("linear", 1)
    with torch.no_grad():
        run.model.first.weight[0], run.model.first.bias[0] = 0.0, 1e-6  # as good as silent
        run.model.first.bias[1] = -100.0
        run.model.second.bias[:] += 5.0
    run.step(x, y)
    assert {name: index.tolist() for name, index in run.redo.last_resets.items()} == {"first": [1]}


def test_a_layer_in_which_all_units_are_dead_is_reset_as_a_whole():
    run = Run("linear", threshold=0.1, every=1)
    ((x, y),) = batches("linear", 1)
    with torch.no_grad():
        run.model.second.bias[:] = -100.0
    run.step(x, y)
    assert run.redo.last_resets["second"].tolist() == list(range(7))
    assert F.relu(run.model[:3](x)).any()


def test_never_is_never_and_no_step_is_observed():
    run = Run("linear", threshold=1e9, every=0)
    for x, y in batches("linear", 5):
        run.step(x, y)
        assert not run.redo.watched()
    assert run.redo.total_resets == 0
    assert run.redo.ages()["first"].tolist() == [5] * 9


def test_steps_between_two_resets_are_not_observed_and_do_not_matter():
    """The activity is that of the batch of the step alone."""
    run, other = Run("linear", "momentum", threshold=0.5, every=3), Run("linear", "momentum", threshold=0.5, every=3)
    data = batches("linear", 6)
    for number, (x, y) in enumerate(data, 1):
        assert bool(run.redo.watched()) == (number % 3 == 0)
        run.step(x, y)
        if number % 3:
            with torch.no_grad():
                other.model(100 * x)
        other.step(x, y)
    assert same(run.model.state_dict(), other.model.state_dict())
    assert run.redo.total_resets > 0


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"threshold": -0.1}, "threshold=-0.1 must be a number, 0 or more"),
        ({"threshold": "0.1"}, "threshold='0.1'"),
        ({"threshold": float("nan")}, "threshold=nan"),
        ({"every": -1}, "every=-1 must be a whole number of steps, 0 or more"),
        ({"every": 2.5}, "every=2.5"),
        ({"step_policy": "kept"}, "step_policy='kept' is not one of 'keep', 'reset'. Did you mean 'keep'"),
    ],
)
def test_a_wrong_option_is_refused_with_its_value(options: dict[str, Any], word: str):
    with pytest.raises(ValueError, match=word):
        gxd.method("redo", **options)
