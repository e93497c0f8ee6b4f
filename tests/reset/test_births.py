"""The incoming weights of newborn units: their length, their direction, and what may be given as `incoming`."""

import math

import pytest
import torch
from torch import nn

import gxd
from gxd.plan.layouts import NamedTensors
from gxd.reset.units import operate


class Residual(nn.Module):
    """Two layers write the same units."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.relu(self.one(x) + self.two(x)))


class Recurrent(nn.Module):
    """A recurrent layer reads the units."""

    def __init__(self):
        super().__init__()
        self.encoder, self.lstm, self.head = nn.Linear(5, 8), nn.LSTM(8, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.lstm(torch.relu(self.encoder(x)))[0])


class Words(nn.Module):
    """A residual stream that an embedding and a layer write."""

    def __init__(self):
        super().__init__()
        self.table, self.hidden, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.table(x)
        return self.head(x + self.hidden(x))


def convolutions(kind, **options):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), kind(8, 8, 3, **options), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)
    )


IMAGES = torch.randn(2, 3, 8, 8)
NETWORKS = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(2, 6)),
    "convolution": (lambda: convolutions(nn.Conv2d), IMAGES),
    "groups": (lambda: convolutions(nn.Conv2d, groups=4), IMAGES),
    "transposed": (lambda: convolutions(nn.ConvTranspose2d), IMAGES),
    "transposed, groups": (lambda: convolutions(nn.ConvTranspose2d, groups=2), IMAGES),
    "one dimension": (
        lambda: nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Conv1d(8, 4, 3), nn.Flatten(), nn.LazyLinear(2)),
        torch.randn(2, 3, 9),
    ),
    "several producers": (Residual, torch.randn(2, 6)),
    "recurrent": (Recurrent, torch.randn(2, 4, 5)),
    "embedding": (Words, torch.randint(11, (2, 4))),
}


def made(name):
    torch.manual_seed(0)
    build, x = NETWORKS[name]
    model = build()
    model(x)  # lazy layers
    return model, gxd.find_units(model, x, residual="group")


def reset_all(model, plan, incoming, units=(1, 2), seed=0):
    """Reset some units of all groups."""
    selection = [(group, torch.tensor(units)) for group in plan.groups]
    operate(
        NamedTensors(model),
        selection,
        {},
        torch.Generator().manual_seed(seed),
        gxd.Reset(incoming=incoming, outgoing=1.0),
    )


def rows_of(model, producer, units):
    """``(n, fan_in)`` the incoming weights of units, written out for each kind of layer."""
    weight, layer = model.get_parameter(producer.weight), model.get_submodule(producer.module)
    rows = producer.rows_of(torch.tensor(units))[0]
    if isinstance(layer, nn.ConvTranspose2d):
        each = weight.shape[1]  # outputs of a group of channels
        inputs = weight.shape[0] // layer.groups
        return torch.stack([weight[r // each * inputs : (r // each + 1) * inputs, r % each].flatten() for r in rows])
    if isinstance(layer, nn.Embedding):
        return weight[:, rows].T
    return weight[rows].flatten(1)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("incoming", "length"), [("he", math.sqrt(2)), (0.5, 0.5), (3, 3.0)])
def test_a_newborn_unit_has_incoming_weights_of_the_length_that_was_asked_for(name, incoming, length):
    model, plan = made(name)
    reset_all(model, plan, incoming)
    seen = 0
    for group in plan.groups:
        for producer in group.producers:
            if producer.has_fan_in:
                rows = rows_of(model, producer, (1, 2))
                torch.testing.assert_close(rows.norm(dim=1), torch.full((2,), float(length)))
                seen += 1
    assert seen


@pytest.mark.parametrize("name", NETWORKS)
def test_the_other_units_keep_their_weights(name):
    model, plan = made(name)
    kept = {
        (group.name, number): rows_of(model, producer, (0, 3)).clone()
        for group in plan.groups
        for number, producer in enumerate(group.producers)
    }
    # One group at a time, for a unit's row crosses the columns of the group before.
    for group in plan.groups:
        operate(
            NamedTensors(model),
            [(group, torch.tensor([1, 2]))],
            {},
            torch.Generator(),
            gxd.Reset(incoming="he", outgoing=1.0),
        )
    for group in plan.groups:
        for number, producer in enumerate(group.producers):
            torch.testing.assert_close(rows_of(model, producer, (0, 3)), kept[group.name, number], rtol=0, atol=0)


def test_what_has_no_fan_in_is_drawn_as_it_began_and_the_plan_says_so():
    model, plan = made("embedding")
    (group,) = [group for group in plan.groups if any(not p.has_fan_in for p in group.producers)]
    assert "no fan-in" in str(plan)
    other, _ = made("embedding")
    reset_all(model, plan, "he", seed=3)
    reset_all(other, plan, "fresh", seed=3)
    (producer,) = [p for p in group.producers if not p.has_fan_in]
    drawn = rows_of(model, producer, (1, 2))
    assert drawn.shape == (2, 11)
    assert not torch.allclose(drawn.norm(dim=1), torch.full((2,), math.sqrt(2)))


def test_directions_are_spread_evenly():
    """The mean of n unit vectors is of length 1 / sqrt(n), and each coordinate has variance 1 / fan_in."""
    model = nn.Sequential(nn.Linear(20, 4000), nn.ReLU(), nn.Linear(4000, 2))
    plan = gxd.find_units(model, torch.randn(2, 20))
    reset_all(model, plan, 1.0, units=tuple(range(4000)))
    rows = model[0].weight.detach()
    assert rows.mean(0).norm() < 3 / math.sqrt(4000)
    torch.testing.assert_close(rows.var(0), torch.full((20,), 1 / 20), rtol=0.15, atol=0)


def test_a_function_sees_fresh_rows_and_those_of_the_living_and_returns_the_rows():
    model, plan = made("convolution")
    before, seen = rows_of(model, plan.groups[0].producers[0], (0, *range(3, 8))).clone(), []

    def born(fresh, living, generator):
        seen.append((fresh.shape, living.clone()))
        return torch.full_like(fresh, 0.25)

    operate(
        NamedTensors(model), [(plan.groups[0], torch.tensor([1, 2]))], {}, torch.Generator(), gxd.Reset(incoming=born)
    )
    ((shape, living),) = seen
    assert shape == (2, 27)
    torch.testing.assert_close(living, before, rtol=0, atol=0)
    assert bool((rows_of(model, plan.groups[0].producers[0], (1, 2)) == 0.25).all())


@pytest.mark.parametrize(
    ("incoming", "error", "words"),
    [
        (-1, ValueError, r"incoming=-1 is not one of 'fresh', 'initial', 'he', a length above 0"),
        (0.0, ValueError, r"incoming=0.0"),
        (math.nan, ValueError, r"incoming=nan"),
        (math.inf, ValueError, r"incoming=inf"),
        (True, TypeError, r"incoming=True"),
        (None, TypeError, r"incoming=None"),
        ("hee", ValueError, r"incoming='hee'.*Did you mean 'he'"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(incoming, error, words):
    with pytest.raises(error, match=words):
        gxd.Reset(incoming=incoming)
    with pytest.raises(error, match=words):
        gxd.method("gxd", incoming=incoming)


def _fails(fresh, living, generator):
    raise RuntimeError("no idea")


@pytest.mark.parametrize(
    ("incoming", "words"),
    [
        (_fails, r"'_fails' failed on \(2, 6\) fresh rows beside \(6, 6\) living ones: RuntimeError: no idea"),
        (lambda fresh, living, generator: fresh[:1], r"must return rows of shape \(2, 6\), got \(1, 6\)"),
        (lambda fresh, living, generator: None, r"must return rows of shape \(2, 6\), got NoneType"),
        (lambda fresh, living, generator: fresh * math.nan, "not finite"),
    ],
    ids=["raises", "another shape", "nothing", "NaN"],
)
def test_a_function_that_fails_is_named_and_nothing_is_written(incoming, words):
    model, plan = made("linear")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.Generator().manual_seed(4)
    state = generator.get_state()
    with pytest.raises(ValueError, match=words):
        operate(
            NamedTensors(model), [(plan.groups[0], torch.tensor([1, 2]))], {}, generator, gxd.Reset(incoming=incoming)
        )
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
    assert torch.equal(generator.get_state(), state)


# --- the optimizer's averages of squared gradients


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adamax])
def test_with_peers_a_newborn_unit_begins_with_the_mean_of_the_layers_squared_averages(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = kind(model.parameters(), 0.01)
    for _ in range(5):
        model(torch.randn(16, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    (key,) = {"exp_avg_sq", "square_avg", "exp_inf"} & set(optimizer.state[model[0].weight])
    before = {p: optimizer.state[p][key].clone() for p in model.parameters()}
    plan = gxd.find_units(model, torch.randn(2, 6))
    reset = gxd.Reset(memories="peers", compensate=False)
    chosen = [(plan.groups[0], torch.tensor([1, 2]))]
    operate(NamedTensors(model), chosen, {}, torch.Generator(), reset, optimizers=[optimizer])
    after = {p: optimizer.state[p][key] for p in model.parameters()}
    layer, head = model[0].weight, model[2].weight
    for unit in (1, 2):
        torch.testing.assert_close(after[layer][unit], before[layer].mean(0))
        torch.testing.assert_close(after[head][:, unit], before[head].mean(1))
        torch.testing.assert_close(after[model[0].bias][unit], before[model[0].bias].mean())
    for unit in (0, *range(3, 8)):
        assert torch.equal(after[layer][unit], before[layer][unit])
        assert torch.equal(after[head][:, unit], before[head][:, unit])
    if "exp_avg" in optimizer.state[layer]:
        assert not optimizer.state[layer]["exp_avg"][1].any()
