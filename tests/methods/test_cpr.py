"""Calibrated partial resets against a loop over units."""

import math
from typing import Any

import pytest
import torch

import gxd
from tests.methods.unit_rig import LAYERS, Run, batches, gradient_of_rows


def test_all_units_are_blended_with_fresh_ones_the_more_the_less_they_learn():
    """Running means of the gradients, next to the mean of the layer; then W_in and W_out, with rows before columns."""
    options: dict[str, Any] = {"blend": 0.2, "sharpness": 3.0, "center": 0.9, "decay": 0.8, "every": 4}
    run = Run("linear", gxd.method("cpr", **options))
    data = batches("linear", 4)
    averages: dict[str, list[float]] = {}
    for number, (x, y) in enumerate(data):
        plain, _ = run.stepped_plainly(x, y)
        gradients = run.step(x, y)
        for layer in LAYERS:
            score = gradient_of_rows(gradients, layer)
            averages[layer] = [0.8 * a + 0.2 * s for a, s in zip(averages.get(layer, [0.0] * 9), score)]
        if number < 3:
            assert all(torch.equal(p, q) for p, q in zip(run.model.parameters(), plain.parameters()))
    amounts = {}
    for layer, average in averages.items():
        u = [value / (1 - 0.8**4) for value in average]
        mean = sum(u) / len(u)
        amounts[layer] = [0.2 * min(1.0, 2 / (1 + math.exp(3.0 * (v / mean - 0.9)))) for v in u]
    generator = torch.Generator()
    generator.set_state(run_generator(run))
    expected = {name: p.detach().double() for name, p in plain.named_parameters()}
    for layer in LAYERS:
        weight, bound = expected[f"{layer}.weight"], 1 / math.sqrt(expected[f"{layer}.weight"].shape[1])
        fresh = torch.empty(weight.shape).uniform_(-bound, bound, generator=generator).double()
        for unit, amount in enumerate(amounts[layer]):
            weight[unit] = (1 - amount) * weight[unit] + amount * fresh[unit]
    for layer, after in (("first", "second"), ("second", "head")):
        for unit, amount in enumerate(amounts[layer]):
            expected[f"{after}.weight"][:, unit] *= 1 - amount
    for name, p in run.model.named_parameters():
        torch.testing.assert_close(p.double(), expected[name], rtol=1e-4, atol=1e-6, msg=name)
        if name.endswith("bias"):
            assert torch.equal(p.double(), expected[name])
    assert run.attached.total_resets == 16
    assert run.attached.ages()["first"].tolist() == [4] * 9


def run_generator(run: Run) -> torch.Tensor:
    """As it was before anything was drawn."""
    return gxd.attach(
        run.model, run.optimizer, gxd.method("cpr"), example_inputs=torch.zeros(2, 4), seed=3
    ).state_dict()["methods"]["0.cpr"]["generator"]


def test_on_gxd_the_units_that_are_cheapest_to_lose_are_blended_most():
    run = Run("linear", gxd.method("cpr", utility="gxd", blend=0.5, every=5))
    with torch.no_grad():
        run.model.second.weight[:, 4] = 0.0  # free to lose
    before = None
    for x, y in batches("linear", 5):
        before = run.model.first.weight.clone()
        run.step(x, y)
    moved = (run.model.first.weight - before).norm(dim=1)
    assert int(moved.argmax()) in moved.topk(3).indices.tolist()
    free, dear = run.attached.utilities()["first"].argmin(), run.attached.utilities()["first"].argmax()
    assert moved[free] > 3 * moved[dear]


def test_a_dead_unit_comes_alive_bit_by_bit():
    run = Run("linear", gxd.method("cpr", blend=0.2, every=1))
    with torch.no_grad():
        run.model.first.weight[2] = -1.0
        run.model.first.bias[2] = 0.0
    x = torch.rand(64, 4)
    alive = []
    for inputs, y in batches("linear", 30):
        run.step(inputs.abs(), y)
        alive.append(bool((run.values(x)["first"][:, 2] > 0).any()))
    assert not alive[0] and any(alive)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"blend": 2}, "blend=2"),
        ({"utility": "gdx"}, "unknown utility 'gdx'.*'gxd'"),
        ({"decay": 1}, "decay"),
    ],
)
def test_a_wrong_option_is_refused_with_its_value(options: dict[str, Any], word: str):
    with pytest.raises(ValueError, match=word):
        gxd.method("cpr", **options)
