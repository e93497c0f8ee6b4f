"""check and reset_cost run a model on other tensors, and leave it its own: every object, in its place."""

import copy
from collections import OrderedDict
from itertools import count

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gxd
from gxd.plan.layouts import NamedTensors
from gxd.sandbox.substitute import copies, substituted

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2])
HAND = [gxd.manual_group("a", consumers="b")]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(F.relu(self.a(x)))


class TwoNames(Net):
    def __init__(self):
        super().__init__()
        self.c, self.blocks = self.a, nn.ModuleList([self.b])


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.c, self.d = nn.Linear(3, 3), nn.Linear(3, 3)
        self.d.weight = self.c.weight

    def forward(self, x):
        assert self.d.weight is self.c.weight, "no longer tied"
        return self.d(F.relu(self.c(super().forward(x))))


class Buffers(Net):
    """Registers, replaces and deletes buffers in forward; some are not persistent, some are None."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("gone", torch.ones(3))
        self.register_parameter("none", None)

    def forward(self, x):
        self.scale.add_(1)
        out = super().forward(x) * self.scale * self.mask
        self.register_buffer("cache", out.detach(), persistent=False)
        self.nothing, self.mask = out.detach(), self.mask * 1
        if "gone" in self._buffers:
            del self.gone
        return out


class InPlace(Net):
    """Writes to its weights, as layers with a constraint on their norm do, and to its input."""

    def forward(self, x):
        self.a.weight.data.clamp_(-0.1, 0.1)
        with torch.no_grad():
            self.b.bias.add_(1.0)
        return super().forward(x.mul_(2))


class Merging(Net):
    """Folds something into its weights when it is switched to evaluation, as layers with adapters do."""

    def train(self, mode=True):
        with torch.no_grad():
            self.a.weight.add_(1.0 if not mode else 0.0)
        return super().train(mode)


class Recurrent(Net):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 3, batch_first=True)

    def forward(self, x):
        return self.rnn(super().forward(x)[:, None])[0][:, 0]


class Scripted(Net):
    def __init__(self):
        super().__init__()
        self.c = torch.jit.script(nn.Linear(3, 3))

    def forward(self, x):
        return self.c(super().forward(x))


MODELS = [TwoNames, Tied, Buffers, InPlace, Merging, Recurrent, Scripted]


def found(model):
    """Every object in its place, the order, the values, and what is saved."""
    places = [
        (path, kind, key, tensor)
        for path, module in model.named_modules(remove_duplicate=False)
        for kind in ("_parameters", "_buffers")
        for key, tensor in getattr(module, kind).items()
    ]
    values = [None if t is None else (t.dtype, t.requires_grad, t.detach().clone()) for *_, t in places]
    return places, values, list(model.state_dict())


def assert_as_found(model, before):
    places, values, saved = found(model)
    assert [place[:3] for place in places] == [place[:3] for place in before[0]]
    assert [place[3] for place in places if place[3] is not before[0][places.index(place)][3]] == []
    for now, then in zip(values, before[1], strict=True):
        assert now is then is None or (now[:2] == then[:2] and torch.equal(now[2], then[2]))
    assert saved == before[2]


def checked(model):
    gxd.verify_plan(model, X, plan=gxd.find_units(model, groups=HAND))


def cost(model):
    gxd.reset_cost(model, (X, Y), X, plan=gxd.find_units(model, groups=HAND))


@pytest.mark.filterwarnings("ignore:.*clamped one by one", "ignore:.*jit")
@pytest.mark.parametrize("use", [checked, cost])
@pytest.mark.parametrize("kind", MODELS)
def test_parameters_and_buffers_are_the_same_objects_afterwards(kind, use):
    model, x = kind(), X.clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = found(model)
    use(model)
    assert_as_found(model, before)
    assert torch.equal(X, x)
    F.cross_entropy(model(X.clone()), Y).backward()
    optimizer.step()
    weight = dict(zip([place[:3] for place in before[0]], before[1], strict=True))["b", "_parameters", "weight"][2]
    assert not torch.equal(model.b.weight, weight), "the optimizer trains another parameter"
    if kind is not Scripted:
        copy.deepcopy(model.zero_grad() or model)


@pytest.mark.filterwarnings("ignore:.*clamped one by one")
@pytest.mark.parametrize("use", [checked, cost])
@pytest.mark.parametrize("kind", [TwoNames, Tied, Buffers])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_they_are_so_after_an_exception_in_any_run(kind, use, number):
    model, calls = kind(), count(1)  # which, other than a list, is not put back between two runs

    def fail(module, args):
        if next(calls) >= number:
            raise KeyboardInterrupt  # not even this

    model.b.register_forward_pre_hook(fail)
    before = found(model)
    with pytest.raises(KeyboardInterrupt):
        use(model)
    assert_as_found(model, before)


def test_a_substitute_stands_in_for_all_places_of_a_tensor():
    model = TwoNames()
    model.b.weight = nn.Parameter(torch.randn(5, 8))
    model.e = nn.Linear(8, 5)
    model.e.weight = model.b.weight
    before, other = found(model), torch.zeros(5, 8)
    with substituted(model, {"e.weight": other}):
        assert model.b.weight is other and model.e.weight is other and model.blocks[0].weight is other
        assert model.a.weight is model.c.weight and isinstance(model.a.weight, nn.Parameter)
    assert_as_found(model, before)


def test_copies_are_tied_as_the_tensors_are_by_name_or_by_memory():
    model = Tied()
    memory = torch.randn(30)
    model.a.weight.data, model.b.bias.data = memory[:20].view(4, 5), memory[17:20]
    for dtype in (None, torch.float64):
        made = copies(NamedTensors(model), dtype)
        assert made["c.weight"] is made["d.weight"]
        with torch.no_grad():
            made["b.bias"].fill_(7.0)
        assert made["a.weight"][-1, -3:].tolist() == [7.0, 7.0, 7.0]
        assert made["a.weight"].dtype == (dtype or torch.float32)
    assert not (memory == 7.0).any()


def test_weights_in_the_same_memory_are_reset_together_so_that_the_check_sees_it():
    model = Net()
    plan = gxd.find_units(model, groups=HAND)
    model.c = nn.Linear(5, 8)
    model.c.weight.data = model.a.weight.data
    model.forward = lambda x: model.b(F.relu(model.a(x))) + model.c(x).sum(1, keepdim=True)
    assert gxd.verify_plan(model, X, plan=plan)["a"].status == "wrong"


def test_modes_are_not_switched_by_the_models_own_train():
    model = Merging()
    model.a.eval()
    checked(model)
    assert model.training and model.b.training and not model.a.training


def test_substitutes_may_be_nested():
    model = nn.Sequential(OrderedDict(a=nn.Linear(2, 2), n=nn.LayerNorm(2)))
    one, two = torch.zeros(2), torch.ones(2)
    with substituted(model, {"n.weight": one}):
        with substituted(model.n, {"weight": two}):
            assert model.n.weight is two
        assert model.n.weight is one
    assert isinstance(model.n.weight, nn.Parameter)
