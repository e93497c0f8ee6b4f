"""Units that a recurrent layer reads are in the columns of its input weights; its own units feed back."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gxd
from tests.zoo import Net, linear

UNITS = 6
KINDS = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}
CELLS = {"rnn": nn.RNNCell, "lstm": nn.LSTMCell, "gru": nn.GRUCell}


def net(layer: nn.Module, batch_first: bool = True) -> Net:
    torch.manual_seed(0)

    def run(m, x):
        h, _ = m.layer(torch.tanh(m.a(x)))
        return m.head(h[:, -1] if batch_first else h[-1])

    width = layer.hidden_size * (2 if layer.bidirectional else 1)
    return Net(run, a=linear(5, UNITS), layer=layer, head=linear(width, 3))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_units_read_by_a_recurrent_layer_are_reset_exactly(kind: str, both_ways: bool, batch_first: bool):
    model = net(KINDS[kind](UNITS, 4, 2, batch_first=batch_first, bidirectional=both_ways), batch_first)
    x = torch.randn(3, 7, 5) if batch_first else torch.randn(7, 3, 5)
    plan = gxd.find_units(model, x, batch_dim=0 if batch_first else 1)
    (group,) = plan.groups
    assert group.name == "a" and group.size == UNITS and not group.approximate
    weights = ["layer.weight_ih_l0", "layer.weight_ih_l0_reverse"][: 1 + both_ways]
    assert [c.weight for c in group.consumers] == weights
    assert [c.bias for c in group.consumers] == [w.replace("weight", "bias") for w in weights]
    assert group.views[0].batch_axis == (0 if batch_first else 1)
    report = gxd.verify_plan(model, x, plan=plan, units_per_group=UNITS)
    assert report["a"].status == "passed", str(report)


@pytest.mark.parametrize("kind", CELLS)
def test_units_read_by_a_single_cell_are_reset_exactly(kind: str):
    def run(m, x):
        h = m.cell(torch.tanh(m.a(x)))
        return m.head(h[0] if isinstance(h, tuple) else h)

    torch.manual_seed(0)
    model, x = Net(run, a=linear(5, UNITS), cell=CELLS[kind](UNITS, 4), head=linear(4, 3)), torch.randn(3, 5)
    report = gxd.verify_plan(model, x, units_per_group=UNITS)
    assert report["a"].status == "passed", str(report)
    assert report.plan["a"].consumers[0].weight == "cell.weight_ih"


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("utility", ["gxd", "contribution", "loss_gradient"])
def test_training_with_resets_runs_and_clears_what_it_should(utility: str, optimizer):
    model, x = net(nn.LSTM(UNITS, 4, batch_first=True, bidirectional=True)), torch.randn(3, 7, 5)
    opt = optimizer(model.parameters(), lr=0.01)
    settings = {"utility": utility, "replacement_rate": 0.1, "maturity": 2}
    cbp = gxd.ContinualBackprop(model, opt, example_inputs=x, **settings)
    for _ in range(8):
        logits, y = model(x), torch.tensor([0, 1, 2])
        if utility == "gxd":
            cbp.observe(logits, y)
        F.cross_entropy(logits, y).backward()
        opt.step()
        opt.zero_grad()
        if len(index := cbp.last_resets.get("a", torch.zeros(0))):
            break
    assert len(index), "no unit was reset"
    for name in ("weight_ih_l0", "weight_ih_l0_reverse"):
        weight = model.layer.get_parameter(name)
        assert (weight[:, index] == 0).all() and (weight == 0).sum() == weight.shape[0] * len(index)
        if optimizer is torch.optim.Adam:
            moments = opt.state[weight]["exp_avg"]
            assert (moments[:, index] == 0).all()


def test_the_cost_of_a_reset_is_measured_behind_a_recurrent_layer():
    model, x = net(nn.GRU(UNITS, 4, batch_first=True)), torch.randn(8, 7, 5)
    with pytest.warns(UserWarning, match="one by one"):
        cost = gxd.reset_cost(model, (x, torch.randint(3, (8,))), x, utilities=["gxd"])
    assert (cost.shocks["l1"]["a"] > 0).all() and len(cost.units["a"]) == UNITS


def without_bias():
    return net(nn.LSTM(UNITS, 4, batch_first=True, bias=False))


def frozen():
    model = net(nn.LSTM(UNITS, 4, batch_first=True))
    model.layer.requires_grad_(False)
    return model


def unrolled():
    def run(m, x):
        h = torch.tanh(m.a(x))
        state = m.cell(h[:, 0])
        return m.head(m.cell(h[:, 1], state))

    return Net(run, a=linear(5, UNITS), cell=nn.GRUCell(UNITS, 4), head=linear(4, 3))


def as_state():
    def run(m, x):
        first = torch.tanh(m.a(x[:, 0])).unsqueeze(0)
        return m.head(m.layer(x, first)[0][:, -1])

    return Net(run, a=linear(5, UNITS), layer=nn.GRU(5, UNITS, batch_first=True), head=linear(UNITS, 3))


class Own(nn.GRU):
    def forward(self, x, state=None):
        return super().forward(x.flip(-1), state)


def test_a_layer_without_biases_says_that_nothing_takes_the_mean():
    (group,) = gxd.find_units(without_bias(), torch.randn(3, 7, 5)).groups
    assert group.approximate == ("layer: no bias to take the mean",)


REFUSED = {
    "frozen": (frozen, "frozen"),
    "called step by step": (unrolled, "called 2 times"),
    "units as the first state": (as_state, "as its state"),
    "a forward of its own": (lambda: net(Own(UNITS, 4, batch_first=True)), "forward of its own"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_reset_there_is_refused_with_the_reason(name: str):
    build, words = REFUSED[name]
    torch.manual_seed(0)
    plan = gxd.find_units(build(), torch.randn(3, 7, 5))
    assert not plan.groups
    assert words in next(entry.reason for entry in plan.skipped if entry.name == "a")
    assert "recurrent" in str(plan)


class TimeFirst(nn.Module):
    """A layer of torch's that counts examples on the second axis, as most do if nothing is said."""

    def __init__(self, kind: str, batch_first: bool, transposes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        if kind == "attention":
            self.body: nn.Module = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=batch_first)
        else:
            self.body = nn.LSTM(8, 8, batch_first=batch_first)
        self.embed, self.hidden, self.head, self.transposes = (
            nn.Linear(4, 8),
            nn.Linear(8, 6),
            nn.Linear(6, 3),
            transposes,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        h = self.body(h.transpose(0, 1) if self.transposes else h)
        h = h[0] if isinstance(h, tuple) else h
        return self.head(self.hidden(h.transpose(0, 1) if self.transposes else h).relu())


def scores_of(model: nn.Module, x: torch.Tensor, **options) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    attached = gxd.attach(model, optimizer, "gxd", **options)
    model(x).square().mean().backward()
    optimizer.step()
    return attached.utilities()


@pytest.mark.parametrize("kind", ["attention", "lstm"])
def test_examples_on_the_axis_of_time_are_noticed_and_with_the_remedy_the_scores_are_right(kind: str, recwarn):
    x = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))  # (batch, time, ...)
    expected = scores_of(TimeFirst(kind, batch_first=True), x, example_inputs=x)
    inside = TimeFirst(kind, batch_first=False, transposes=True)
    assert same_scores(scores_of(inside, x, example_inputs=x), expected)
    model = TimeFirst(kind, batch_first=False)
    plan = gxd.find_units(model, x.transpose(0, 1), batch_dim=1)
    assert same_scores(scores_of(model, x.transpose(0, 1), plan=plan), expected)
    assert not [w for w in recwarn if issubclass(w.category, gxd.ObservationWarning)]
    with pytest.warns(gxd.ObservationWarning, match=r"'body.*' has batch_first=False.*batch_dim=1\).*batch_first=True"):
        gxd.find_units(model, x.transpose(0, 1))


def same_scores(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.allclose(one[n], two[n], rtol=1e-4, atol=1e-7) for n in two)
