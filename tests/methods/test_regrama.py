"""ReGraMa against loops over units: the gradient of the incoming weights decides, and outgoing weights stay."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import gxd
from tests.methods.unit_rig import LAYERS, Run, batches, gradient_of_rows


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize(("threshold", "most"), [(0.7, 1.0), (0.9, 0.2)])
def test_the_units_whose_weights_hardly_learn_go_at_every_nth_step_and_no_others(
    kind: str, threshold: float, most: float
):
    run, total = Run(kind, gxd.method("regrama", threshold=threshold, every=3, most=most)), 0
    for number, (x, y) in enumerate(batches(kind, 12), 1):
        gradients, expected = run.step(x, y), {}
        for layer in LAYERS if number % 3 == 0 else ():
            score = gradient_of_rows(gradients, layer)
            mean = sum(score) / len(score)
            low = [unit for unit, value in enumerate(score) if value / (mean + 1e-9) <= threshold]
            low = sorted(sorted(low, key=score.__getitem__)[: math.ceil(most * len(score))])
            if low:
                expected[layer] = low
        assert run.resets == expected
        total += sum(map(len, expected.values()))
    assert run.attached.total_resets == total >= 3


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_incoming_weights_are_redrawn_outgoing_weights_and_moments_stay(kind: str):
    run = Run(kind, gxd.method("regrama", threshold=0.95, every=2))
    first, second = batches(kind, 2)
    run.step(*first)
    run.optimizer.zero_grad()
    plain, moments = run.stepped_plainly(*second)
    run.step(*second)
    assert set(run.resets) == set(LAYERS)
    for layer in (*LAYERS, "head"):
        ours, theirs, units = run.model.get_submodule(layer), plain.get_submodule(layer), run.resets.get(layer, [])
        bound = 1 / math.sqrt(ours.weight[0].numel())
        for row in range(len(ours.weight)):
            if row in units:
                assert bool((ours.weight[row] != theirs.weight[row]).all()) and ours.bias[row].item() == 0
                assert float(ours.weight[row].abs().max()) <= bound
            else:
                assert torch.equal(ours.weight[row], theirs.weight[row]) and ours.bias[row] == theirs.bias[row]
        for p, q in ((ours.weight, theirs.weight), (ours.bias, theirs.bias)):
            assert torch.equal(run.optimizer.state[p]["exp_avg"], moments[q])


def test_a_dead_unit_comes_alive_and_learns():
    run = Run("linear", gxd.method("regrama", threshold=0.0, every=1))
    (x, y), *rest = batches("linear", 6)
    with torch.no_grad():
        run.model.first.bias[2] = -100.0
    run.step(x, y)
    assert run.resets["first"] == [2]
    before = run.model.first.weight[2].clone()
    assert bool((run.values(rest[0][0])["first"][:, 2] > 0).any())
    run.step(*rest[0])
    assert not torch.equal(run.model.first.weight[2], before)


def test_gradients_of_accumulated_micro_batches_count_as_one():
    whole = Run("linear", gxd.method("regrama", threshold=0.6, every=1))
    parts = Run("linear", gxd.method("regrama", threshold=0.6, every=1))
    ((x, y),) = batches("linear", 1)
    whole.step(x, y)
    for some in (slice(0, 4), slice(4, 8)):
        (nn.functional.cross_entropy(parts.model(x[some]), y[some]) / 2).backward()
    parts.optimizer.step()
    assert whole.resets == parts.resets != {}
    for layer, scores in whole.attached.utilities().items():
        torch.testing.assert_close(parts.attached.utilities()[layer], scores)


def test_a_layer_that_got_no_gradient_is_not_scored_and_not_reset():
    """The second half is not in the loss: nothing is known of it, and 0 would say that all of it is dead."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head_a, self.head_b = (nn.Linear(3, 3) for _ in range(4))

        def forward(self, x):
            return self.head_a(torch.relu(self.a(x))), self.head_b(torch.relu(self.b(x)))

    torch.manual_seed(0)
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    method = gxd.method("regrama", threshold=1e9, every=1)
    attached = gxd.attach(model, optimizer, method, example_inputs=torch.zeros(2, 3))
    model(torch.randn(4, 3))[0].sum().backward()
    with pytest.warns(gxd.ObservationWarning, match="the loss does not depend on the group 'b'"):
        optimizer.step()
    assert set(attached.last_resets) == {"a"}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"threshold": -1}, "threshold=-1"),
        ({"most": 2}, "most=2"),
        ({"outgoing": "zero"}, "outgoing='zero'"),
        ({"memories": "rest"}, "memories='rest'.*Did you mean 'reset'"),
    ],
)
def test_a_wrong_option_is_refused_with_its_value(options: dict[str, Any], word: str):
    with pytest.raises(ValueError, match=word):
        gxd.method("regrama", **options)
