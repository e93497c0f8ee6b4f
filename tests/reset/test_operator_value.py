"""The operator as a value, element by element: whatever is chosen of its settings, and for units reset in part."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gxd
from gxd.plan.layouts import NamedTensors
from gxd.reset.units import operate


class Net(nn.Module):
    """A convolution with a norm, flattened: two columns per unit; a transposed one, and grouped ones."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(2, 6, 2), nn.BatchNorm2d(6)
        self.grouped = nn.Conv2d(6, 4, 1, groups=2)
        self.up = nn.ConvTranspose2d(4, 3, 1)
        self.fc = nn.Linear(3 * 2, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.conv(x)))
        x = torch.relu(self.up(torch.relu(self.grouped(x))))
        return self.head(torch.relu(self.fc(x.flatten(1))))


def trained() -> tuple[Net, torch.optim.Optimizer, gxd.UnitPlan]:
    torch.manual_seed(0)
    model = Net()
    plan = gxd.find_units(model, torch.zeros(2, 2, 2, 3))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(3):
        model(torch.randn(4, 2, 2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, plan


def rows(model: Net, layer: str, unit: int) -> list[tuple[Any, ...]]:
    """The index of every incoming weight of a unit."""
    shape = getattr(model, layer).weight.shape
    if layer == "up":  # (in, out, 1, 1)
        return [(i, unit, 0, 0) for i in range(shape[0])]
    return [(unit, *rest) for rest in itertools.product(*map(range, shape[1:]))]


def columns(model: Net, layer: str, unit: int) -> list[tuple[Any, ...]]:
    """The index of every weight by which the next layer reads a unit."""
    if layer == "conv":  # the first three channels are read by the first two of the grouped outputs
        return [(out, unit % 3, 0, 0) for out in range(4) if out // 2 == unit // 3]
    if layer == "grouped":
        return [(unit, out, 0, 0) for out in range(3)]
    if layer == "up":  # two pixels each
        return [(out, 2 * unit + pixel) for out in range(5) for pixel in range(2)]
    return [(out, unit) for out in range(2)]


NEXT = {"conv": "grouped", "grouped": "up", "up": "fc", "fc": "head"}
CHOSEN = {"conv": [1, 4], "grouped": [0, 3], "up": [2], "fc": [0, 2, 4]}


@pytest.mark.parametrize("amounts", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"outgoing": 1.0, "memories": "keep"},
        {"outgoing": 0.25, "blend": 0.5},
        {"incoming": "initial", "offset": "keep", "step_policy": "reset"},
        {"blend": 0.015, "offset": "keep", "memories": "keep"},
    ],
    ids=str,
)
def test_every_element_is_what_the_settings_say_and_nothing_else_is_touched(options: dict[str, Any], amounts: bool):
    model, optimizer, plan = trained()
    reset = gxd.Reset(**options)
    generator = torch.Generator().manual_seed(1)
    far = {name: torch.rand(len(units), generator=generator) for name, units in CHOSEN.items()} if amounts else {}
    references = {group.name: torch.randn(len(group.views), group.size, generator=generator) for group in plan.groups}
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = dict(model.named_parameters())
    moments = {key: {name: optimizer.state[p][key].clone() for name, p in names.items()} for key in ("exp_avg", "step")}
    initial = {f"{layer}.weight": torch.randn_like(old[f"{layer}.weight"]) for layer in CHOSEN}
    # What a whole reset with the same seed draws.
    scratch = Net()
    scratch.load_state_dict(old)
    selection = [(plan[name], torch.tensor(units)) for name, units in CHOSEN.items()]
    operate(NamedTensors(scratch), selection, {}, torch.Generator().manual_seed(5), gxd.Reset(outgoing=1.0))
    fresh = initial if reset.incoming == "initial" else scratch.state_dict()

    operate(
        NamedTensors(model),
        selection,
        references,
        torch.Generator().manual_seed(5),
        reset,
        amounts=far,
        initial=initial if reset.incoming == "initial" else {},
        optimizers=[optimizer],
    )

    expected = {name: tensor.double() for name, tensor in old.items()}
    kept = {name: tensor.double() for name, tensor in moments["exp_avg"].items()}

    def move(name: str, index: Any, target: float, amount: float) -> None:
        expected[name][index] += amount * (target - expected[name][index])
        if name in kept and reset.memories == "reset":
            kept[name][index] -= amount * kept[name][index]

    def amount_of(layer: str, position: int) -> float:
        return reset.blend * (float(far[layer][position]) if amounts else 1.0)

    for layer, units in CHOSEN.items():  # with the old weights
        for position, unit in enumerate(units):
            lost = amount_of(layer, position) * (1 - reset.outgoing)
            for index in columns(model, layer, unit):
                out = index[0] if NEXT[layer] != "up" else index[1]
                flow = lost * float(old[f"{NEXT[layer]}.weight"][index]) * float(references[layer][0, unit])
                expected[f"{NEXT[layer]}.bias"][out] += flow
    for layer, units in CHOSEN.items():
        for position, unit in enumerate(units):
            amount = amount_of(layer, position)
            for index in rows(model, layer, unit):
                move(f"{layer}.weight", index, float(fresh[f"{layer}.weight"][index]), amount)
            if reset.offset == "zero":
                move(f"{layer}.bias", unit, 0.0, amount)
                if layer == "conv":
                    for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
                        move(f"bn.{name}", unit, value, amount)
    for layer, units in CHOSEN.items():
        for position, unit in enumerate(units):
            lost = amount_of(layer, position) * (1 - reset.outgoing)
            for index in columns(model, layer, unit) if lost else []:
                move(f"{NEXT[layer]}.weight", index, 0.0, lost)

    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor.double(), expected[name].double(), rtol=1e-5, atol=1e-6, msg=name)
        changed = (expected[name] - old[name].double()).abs() > 0
        assert torch.equal(tensor[~changed], old[name][~changed]), name
    for name, p in names.items():
        torch.testing.assert_close(optimizer.state[p]["exp_avg"].double(), kept[name], rtol=1e-5, atol=1e-7, msg=name)
    counted = {float(optimizer.state[p]["step"]) for name, p in names.items() if name == "fc.weight"}
    assert counted == {0.0 if reset.step_policy == "reset" else 3.0}


def test_a_whole_amount_is_a_whole_reset_bit_for_bit():
    results = []
    for amounts in ({}, {name: torch.ones(len(units)) for name, units in CHOSEN.items()}):
        model, optimizer, plan = trained()
        selection = [(plan[name], torch.tensor(units)) for name, units in CHOSEN.items()]
        generator = torch.Generator().manual_seed(2)
        operate(NamedTensors(model), selection, {}, generator, amounts=amounts, optimizers=[optimizer])
        results.append((model.state_dict(), [s["exp_avg"] for s in optimizer.state.values()]))
    assert all(torch.equal(results[0][0][name], results[1][0][name]) for name in results[0][0])
    assert all(map(torch.equal, results[0][1], results[1][1]))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (
            {"incoming": "frsh"},
            "incoming='frsh' is not one of 'fresh', 'initial', 'he', a length.*Did you mean 'fresh'",
        ),
        ({"offset": "init"}, "offset='init'"),
        ({"outgoing": 1.5}, "outgoing=1.5 must be a number, from 0 to 1"),
        ({"outgoing": "keep"}, "outgoing='keep'"),
        ({"memories": "kept"}, "memories='kept'.*Did you mean 'keep'"),
        ({"blend": -0.1}, "blend=-0.1"),
        ({"step_policy": True}, "step_policy=True"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_value(options: dict[str, Any], word: str):
    with pytest.raises(ValueError, match=word):
        gxd.Reset(**options)


def test_compensate_must_be_yes_or_no():
    with pytest.raises(TypeError, match="compensate='no' must be True or False"):
        gxd.Reset(compensate="no")
