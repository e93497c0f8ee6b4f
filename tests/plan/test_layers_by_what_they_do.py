"""A layer is what the graph does with a weight, whatever the class is called and whatever else its forward does."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class OwnForward(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias) * 1.0


class Foreign(nn.Module):
    """No subclass of anything, as in graph libraries."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) * 0.4)
        self.bias = nn.Parameter(torch.zeros(rows))

    def forward(self, features: Tensor, edges: Tensor | None = None) -> Tensor:
        return F.linear(features, self.weight, self.bias)


class Casting(Foreign):
    def forward(self, features: Tensor, edges: Tensor | None = None) -> Tensor:
        return F.linear(features.to(self.weight.dtype), self.weight.to(features.dtype), self.bias)


class Matmul(nn.Module):
    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(columns, rows) * 0.4)
        self.shift = nn.Parameter(torch.zeros(rows))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel + self.shift


class Turned(Foreign):
    def forward(self, features: Tensor, edges: Tensor | None = None) -> Tensor:
        return features @ self.weight.T + self.bias


class Addmm(Matmul):
    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.shift, x.reshape(-1, x.shape[-1]), self.kernel).view(*x.shape[:-1], -1)


class SameConv(nn.Conv2d):
    """Pads by itself, as ports of TensorFlow's networks do."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (0, 1, 0, 1)), self.weight, self.bias, self.stride)


LAYERS = [nn.Linear, OwnForward, Foreign, Casting, Turned, Matmul, Addmm]


def two(kind: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(kind(4, 8), nn.Tanh(), kind(8, 6), nn.Tanh(), nn.Linear(6, 3))


@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_a_class_that_multiplies_its_argument_by_its_weight_is_a_layer(kind):
    plan = gxd.find_units(two(kind), X)
    assert [(g.name, g.size, [c.module for c in g.consumers]) for g in plan.groups] == [
        ("0", 8, ["2"]),
        ("2", 6, ["4"]),
    ]


@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_the_numbers_confirm_it(kind):
    model = two(kind)
    assert {g.name: g.status for g in gxd.verify_plan(model, X).groups} == {"0": "passed", "2": "passed"}


def test_a_convolution_that_pads_by_itself_is_a_layer_and_its_compensation_is_approximate_at_the_border():
    torch.manual_seed(0)
    model = nn.Sequential(SameConv(3, 5, 2), nn.ReLU(), SameConv(5, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3))
    plan = gxd.find_units(model, IMAGES)
    assert [g.name for g in plan.groups] == ["0", "2"]
    assert plan["0"].approximate == ("2: padding",)
    assert [g.status for g in gxd.verify_plan(model, IMAGES, plan=plan).groups] == ["approximate", "passed"]


class TwoWeights(nn.Module):
    """The second weight reads what is computed inside: no call of a module shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.first).relu(), self.second)


class AlsoAdds(Foreign):
    """Its argument goes two ways, of which its weight is one."""

    def forward(self, features: Tensor, edges: Tensor | None = None) -> Tensor:
        return features + F.linear(features, self.weight, self.bias)


class ActsFirst(Foreign):
    """What it is called with is not what it multiplies."""

    def forward(self, features: Tensor, edges: Tensor | None = None) -> Tensor:
        return F.linear(features.relu(), self.weight, self.bias)


class SecondArgument(Foreign):
    def forward(self, edges: Tensor, features: Tensor) -> Tensor:  # type: ignore[override]
        return F.linear(features, self.weight, self.bias) + 0 * edges.sum()


class Part(Foreign):
    def forward(self, features: Tensor, edges: Tensor | None = None) -> Tensor:
        return F.linear(features, self.weight.flip(1), self.bias)


@pytest.mark.parametrize("kind", [AlsoAdds, ActsFirst, Part], ids=lambda kind: kind.__name__)
def test_units_that_cannot_be_seen_where_they_are_multiplied_are_refused(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), kind(8, 8), nn.Tanh(), nn.Linear(8, 3))
    plan = gxd.find_units(model, X)
    assert [g.name for g in plan.groups] == []
    assert "not by a layer that can be observed" in next(s.reason for s in plan.skipped if s.name == "2")


class Packed(nn.Module):
    """Multiplies its argument by the weight of a part of it, with a bias that it puts together."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.bias = nn.Linear(8, 16, bias=False), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        left, right = F.linear(x, self.both.weight, torch.cat([self.bias, self.bias])).chunk(2, -1)
        return left * right


def test_a_weight_that_is_used_by_another_module_than_its_own_is_read_where_that_one_is_called():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Packed(), nn.Linear(8, 3))
    plan = gxd.find_units(model, X)
    assert [(g.name, [(c.module, c.site) for c in g.consumers]) for g in plan.groups] == [("0", [("2.both", "2")])]
    assert plan["0"].approximate == ("2.both: its bias is computed",)
    assert next(s.reason for s in plan.skipped if s.name == "2.both").startswith("its bias is computed")
    assert gxd.verify_plan(model, X, plan=plan)["0"].status == "approximate"


def test_a_second_weight_inside_a_module_is_refused():
    plan = gxd.find_units(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), TwoWeights()), X)
    assert [g.name for g in plan.groups] == ["0"]  # read by the first weight, which is what the module is called with
    assert "not by a layer that can be observed" in next(s.reason for s in plan.skipped if s.name == "2")


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = Foreign(4, 8), Foreign(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(features=x).tanh()
        h = self.second(features=h, edges=x).tanh()
        return self.head(input=h)


def test_arguments_given_by_keyword_are_observed_in_training():
    model = ByKeyword()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cbp = gxd.ContinualBackprop(model, optimizer, example_inputs=X, replacement_rate=0.2, maturity=1)
    for _ in range(6):
        logits = model(X)
        cbp.observe(logits, torch.arange(6) % 3)
        logits.sum().backward()
        optimizer.step()
    assert cbp.total_resets > 0
    assert all(u.gt(0).any() for u in cbp.utilities().values())


def test_the_argument_that_counts_must_be_the_first_tensor_or_nothing_is_observed():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), SecondArgument(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(x, self.first(x).tanh())

    assert not gxd.find_units(Net(), X).groups
