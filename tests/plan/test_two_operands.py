"""Where two things meet in one op: which units are followed, which are not, and that the check confirms it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gxd
from tests.zoo import Net, linear

X = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
UNITS = 4


def net(combine) -> Net:
    """Units of a and b, the input x itself, and a constant c, combined and read by out."""
    torch.manual_seed(0)

    def run(m, x):
        return m.out(combine(m, m.a(x).tanh(), m.b(x).tanh(), x[:, :UNITS]))

    layers = {"a": linear(5, UNITS), "b": linear(5, UNITS), "out": linear(UNITS, 3)}
    return Net(run, **layers, c=nn.Buffer(torch.rand(UNITS) + 0.5), mask=nn.Buffer(torch.tensor([True, False] * 2)))


A, AB, NONE = [{"a"}], [{"a", "b"}], []  # the producers of each group that is found
ALONE = [{"a"}, {"b"}]

MODULATED = {  # the input scales the unit: where the unit is 0, nothing of it is left
    "unit times input": lambda m, a, b, x: a * x,
    "input times unit": lambda m, a, b, x: torch.multiply(x, a),
    "unit over input": lambda m, a, b, x: torch.divide(a, x),
    "input over unit": lambda m, a, b, x: x / a,
    "unit to the power of the input": lambda m, a, b, x: a.abs() ** x.abs(),
    "unit with the input's sign": lambda m, a, b, x: torch.copysign(a, x),
    "unit times two to the input": lambda m, a, b, x: torch.ldexp(a, x),
    "unit times the logarithm of the input": lambda m, a, b, x: torch.xlogy(a, x.abs()),
    "unit where the input is positive": lambda m, a, b, x: torch.where(x > 0, a, 0.0),
    "unit filled in where the input is positive": lambda m, a, b, x: a.masked_fill(x > 0, 0.3),
    "a constant plus unit times input": lambda m, a, b, x: torch.addcmul(m.c, a, x),
    "between unit and a constant by the input": lambda m, a, b, x: torch.lerp(a, m.c, x),
    "unit and a mask of the input": lambda m, a, b, x: torch.logical_and(a > 0, x > 0).to(a) * a,
}
MIXTURES = {  # the input has its own way through the same column
    "unit plus input": lambda m, a, b, x: a + x,
    "input minus unit": lambda m, a, b, x: torch.rsub(a, x),
    "unit or input, the larger": lambda m, a, b, x: torch.max(a, x),
    "unit or input, by the input": lambda m, a, b, x: torch.where(x > 0, a, x),
    "unit or input, by a constant": lambda m, a, b, x: torch.where(m.mask, a, x),
    "angle of unit and input": lambda m, a, b, x: torch.atan2(a, x),
    "length of unit and input": lambda m, a, b, x: torch.hypot(a, x),
    "input modulo unit": lambda m, a, b, x: torch.remainder(x, a.abs() + 1),
    "unit held below the input": lambda m, a, b, x: a.clamp(max=x),
    "input plus unit times constant": lambda m, a, b, x: torch.addcmul(x, a, m.c),
    "between unit and input": lambda m, a, b, x: torch.lerp(a, x, 0.3),
    "unit plus a sum over a part of the input": lambda m, a, b, x: a + x[x > 0].sum(),
    "unit filled in with the input": lambda m, a, b, x: a.masked_fill(m.mask, x.sum()),
}
TOGETHER = {  # one unit with two producers
    "a times b": lambda m, a, b, x: a * b,
    "a over b": lambda m, a, b, x: torch.true_divide(a, b),
    "a or b, the larger": lambda m, a, b, x: torch.maximum(a, b),
    "a or b, the smaller": lambda m, a, b, x: torch.fmin(a, b),
    "a or b, by themselves": lambda m, a, b, x: torch.where(a > b, a, b),
    "a where b is positive": lambda m, a, b, x: torch.where(b > 0, a, 0.0),
    "a masked by b": lambda m, a, b, x: a * (b > 0),
    "a filled in where b is positive": lambda m, a, b, x: a.masked_fill(b > 0, 0.2),
    "angle of a and b": lambda m, a, b, x: torch.arctan2(a, b),
    "a below b": lambda m, a, b, x: (a < b).to(a),
    "a held below b": lambda m, a, b, x: torch.clip(a, max=b),
}
ADDED = {  # a residual coordinate, reset only on request
    "a plus b": lambda m, a, b, x: a + b,
    "a minus b": lambda m, a, b, x: torch.subtract(a, b),
    "between a and b": lambda m, a, b, x: torch.lerp(a, b, 0.3),
    "a or b, by the input": lambda m, a, b, x: torch.where(x > 0, a, b),
    "a or b, by a constant": lambda m, a, b, x: torch.where(m.mask, a, b),
    "logarithm of the sum": lambda m, a, b, x: torch.logaddexp(a, b),
    "normal around a": lambda m, a, b, x: torch.normal(a, b.exp()),
    "a plus input times b": lambda m, a, b, x: torch.addcmul(a, b, x),
}
ONE = {  # what is done to the units of a alone
    "mask of its own": lambda m, a, b, x: a * (a > 0),
    "branches of its own": lambda m, a, b, x: torch.where(a > 0, a, 0.1 * a),
    "noise on a fresh tensor": lambda m, a, b, x: a + torch.empty_like(a).normal_(),
    "noise of other kinds": lambda m, a, b, x: a * torch.zeros_like(a).uniform_() + torch.empty_like(a).exponential_(),
    "a mask drawn in place": lambda m, a, b, x: a * torch.empty_like(a).bernoulli_(0.5),
    "a mask drawn by the unit": lambda m, a, b, x: torch.bernoulli(a.sigmoid()),
    "negative values written over": lambda m, a, b, x: _written(a, a < 0, 0.0),
    "written over by a mask of the input": lambda m, a, b, x: _written(a, x < 0, 0.0),
    "written over by a constant mask of columns": lambda m, a, b, x: _written(a, (slice(None), ~m.mask), 1.0),
    "written over at some examples": lambda m, a, b, x: _written(a, torch.tensor([0, 2]), m.c),
    "filled at an index": lambda m, a, b, x: a.index_fill(0, torch.tensor([1]), 0.0),
    "scattered constants": lambda m, a, b, x: a.scatter(1, (x[:, :1] > 0).long(), 0.0),
    "in place by other names": lambda m, a, b, x: a.clone().multiply_(2.0).negative_().absolute_().clip_(0.1, 0.9),
    "activations": lambda m, a, b, x: F.mish(F.relu6(F.hardswish(F.logsigmoid(F.threshold(a, -0.9, 0.1)) + 3)), True),
    "fake quantised": lambda m, a, b, x: torch.fake_quantize_per_tensor_affine(a, 0.01, 0, -128, 127),
    "special functions": lambda m, a, b, x: torch.special.expit(torch.special.erf(a)) + torch.special.log1p(a.square()),
    "a slice scaled in place": lambda m, a, b, x: _scaled(a.clone()),
}
FOREIGN_DATA = {  # values that nobody can follow
    "written over by the input": lambda m, a, b, x: _written(a, x < 0, x.sum()),
    "scattered input": lambda m, a, b, x: a.masked_scatter(m.mask, x),
    "overwritten by noise": lambda m, a, b, x: a.clone().normal_(),
}


def _written(value, index, content):
    value = value.clone()
    value[index] = content
    return value


def _scaled(value):
    value[:, 1:].mul_(2)
    value[:, :2].relu_()
    return value


def producers(plan: gxd.UnitPlan) -> list[set[str]]:
    return [{p.module for p in group.producers} for group in plan.groups]


def found(combine, residual: str = "skip") -> list[set[str]]:
    model = net(combine)
    plan = gxd.find_units(model, X, residual=residual)
    report = gxd.verify_plan(model, X, plan=plan, units_per_group=UNITS)
    assert all(group.status in ("passed", "approximate") for group in report.groups), str(report)
    return producers(plan)


@pytest.mark.parametrize("name", MODULATED)
def test_data_that_scales_a_unit_leaves_it_a_unit(name: str):
    assert found(MODULATED[name]) == A


@pytest.mark.parametrize("name", MIXTURES)
def test_a_unit_mixed_with_data_is_left_alone(name: str):
    assert found(MIXTURES[name]) == NONE


@pytest.mark.parametrize("name", TOGETHER)
def test_two_units_in_one_expression_are_one_unit(name: str):
    assert found(TOGETHER[name]) == AB


@pytest.mark.parametrize("name", ADDED)
def test_two_units_that_are_added_are_a_residual_coordinate(name: str):
    assert found(ADDED[name]) == NONE
    assert found(ADDED[name], "group") == AB


@pytest.mark.parametrize("name", ONE)
def test_a_unit_that_meets_only_constants_noise_and_itself_stays_a_unit(name: str):
    assert found(ONE[name]) == A


@pytest.mark.parametrize("name", FOREIGN_DATA)
def test_units_that_are_written_over_are_not_found_behind_it(name: str):
    assert found(FOREIGN_DATA[name]) == NONE


def test_an_index_that_was_changed_in_place_is_not_taken_for_what_it_was():
    def run(m, x):
        order = torch.arange(UNITS)
        order.multiply_(3).remainder_(UNITS)
        return m.out(m.a(x).tanh()[:, order])

    torch.manual_seed(0)
    model = Net(run, a=linear(5, UNITS), out=linear(UNITS, 3))
    assert gxd.verify_plan(model, X, units_per_group=UNITS).ok


def test_units_copied_to_known_places_are_found_there():
    def run(m, x):
        return m.out(x.new_zeros(len(x), 6).index_copy(1, torch.tensor([5, 0, 3, 2]), m.a(x).tanh()))

    torch.manual_seed(0)
    model = Net(run, a=linear(5, UNITS), out=linear(6, 3))
    report = gxd.verify_plan(model, X, units_per_group=UNITS)
    assert report["a"].status == "passed"
    assert report.plan["a"].views[0].columns.flatten().tolist() == [5, 0, 3, 2]


def test_values_written_into_slices_are_found_where_they_were_written():
    def run(m, x):
        out = x.new_zeros(len(x), 2 * UNITS)
        out[:, UNITS:] = m.a(x).tanh()
        out[:, :UNITS] = m.b(x).tanh().flip(-1)
        return m.out(out)

    torch.manual_seed(0)
    model = Net(run, a=linear(5, UNITS), b=linear(5, UNITS), out=linear(2 * UNITS, 3))
    plan = gxd.find_units(model, X)
    assert plan["a"].views[0].columns.flatten().tolist() == [4, 5, 6, 7]
    assert plan["b"].views[0].columns.flatten().tolist() == [3, 2, 1, 0]
    assert all(group.status == "passed" for group in gxd.verify_plan(model, X, plan=plan).groups)
