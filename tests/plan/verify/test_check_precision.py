"""A check in another precision than float64, where the model leaves no choice."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gxd
from tests.broken_plans import broken
from tests.models import MODELS, make

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Two(nn.Module):
    """Two layers, and a forward given as a function."""

    def __init__(self, forward, second=nn.Linear):
        super().__init__()
        torch.manual_seed(1)
        self.run = forward
        self.a, self.b = nn.Linear(6, 8), second(8, 3)

    def forward(self, x):
        return self.run(self, x)


def plan_of(model):
    return gxd.find_units(model, groups=[gxd.manual_group("a", consumers="b")])


def insist_on_single_precision(model, error):
    def look(module, args):
        if args[0].dtype == torch.float64:
            raise error

    model.register_forward_pre_hook(look)
    return model


def typed_tables(m, x):
    return m.b(F.relu(m.a(x))) * {torch.float32: 2.0}[x.dtype]


def asserted(m, x):
    assert x.dtype == torch.float32
    return m.b(F.relu(m.a(x)))


INSISTENT = {
    "a float() at the entrance": lambda m, x: m.b(F.relu(m.a(x.float()))),
    "a float() within": lambda m, x: m.b(F.relu(m.a(x)).float()),
    "a table of types": typed_tables,
    "an assertion": asserted,
}


@pytest.mark.parametrize("name", INSISTENT)
def test_a_model_that_insists_on_single_precision_is_checked_in_it(name):
    model = Two(INSISTENT[name])
    report = gxd.verify_plan(model, X, plan=plan_of(model))
    assert report["a"].status == "passed"
    assert "float32" in str(report)
    for mistake, plan in broken(plan_of(model), "a"):
        assert gxd.verify_plan(model, X, plan=plan)["a"].status == "wrong", mistake


@pytest.mark.parametrize("error", [KeyError("float64"), NotImplementedError("kernel"), TypeError("float64")], ids=repr)
@pytest.mark.parametrize("name", MODELS)
def test_single_precision_gives_the_verdicts_of_double_precision(name, error):
    model, batch, options = make(name)
    x = batch(4)[0]
    plan = gxd.find_units(model, x, **options)
    double = gxd.verify_plan(model, x, plan=plan)
    single = gxd.verify_plan(insist_on_single_precision(model, error), x, plan=plan)
    assert [g.status for g in single.groups] == [g.status for g in double.groups]
    assert "float32" in str(single) and "float32" not in str(double)


@pytest.mark.parametrize("name", MODELS)
def test_a_wrong_plan_is_found_in_single_precision_too(name):
    model, batch, options = make(name)
    x = batch(8)[0]
    plan = gxd.find_units(model, x, **options)
    insist_on_single_precision(model, RuntimeError("expected float"))
    for group in plan.groups:
        for mistake, wrong in broken(plan, group.name):
            report = gxd.verify_plan(model, x, plan=wrong)
            # What is approximate anyway may stay so; nothing that is wrong is passed.
            allowed = ("wrong", "approximate") if group.approximate else ("wrong",)
            assert report.groups[0].status in allowed, f"{mistake}: {report}"


def test_a_model_that_fails_in_double_precision_only_with_its_units_clamped_is_checked_in_single_precision():
    class Picky(nn.Linear):
        """As a kernel whose path depends on the values."""

        def forward(self, x):
            if x.dtype == torch.float64 and bool((x == x[:1]).all(0).any() & (x != 0).all(0).any()):
                raise NotImplementedError("no kernel for float64")
            return super().forward(x)

    model = Two(lambda m, x: m.b(m.a(x)), Picky)
    report = gxd.verify_plan(model, X, plan=plan_of(model))
    assert report["a"].status == "passed" and "float32" in report["a"].detail


def test_a_model_that_runs_in_its_own_types_only_is_checked_in_them():
    model = Two(lambda m, x: m.b(F.relu(m.a(x.to(torch.bfloat16))))).to(torch.bfloat16)
    report = gxd.verify_plan(model, X, plan=plan_of(model))
    assert report["a"].status == "passed" and "bfloat16" in report["a"].detail
    statuses = [gxd.verify_plan(model, X, plan=plan)["a"].status for _, plan in broken(plan_of(model), "a")]
    assert statuses == ["wrong", "wrong"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_outputs_of_low_precision_do_not_blur_the_verdict(dtype):
    model = Two(lambda m, x: m.b(F.relu(m.a(x))).to(dtype))
    assert gxd.verify_plan(model, X, plan=plan_of(model))["a"].status == "passed"
    for mistake, plan in broken(plan_of(model), "a"):
        assert gxd.verify_plan(model, X, plan=plan)["a"].status == "wrong", mistake


def test_sums_in_single_precision_inside_a_double_model_are_no_errors():
    """The effect of the units is small beside what they are added to, and rounded with it."""

    class Single(nn.Linear):
        def forward(self, x):
            return F.linear(x.float(), self.weight.float(), self.bias.float()).to(x.dtype)

    model = Two(lambda m, x: m.b(1e-4 * torch.tanh(m.a(x))) + 1.0, Single)
    report = gxd.verify_plan(model, X, plan=plan_of(model), tolerance=1e-9)
    assert report["a"].status == "passed" and "float32" in report["a"].detail


def test_a_model_that_runs_in_no_precision_raises_its_own_error():
    model = Two(lambda m, x: m.b(m.a(x)).view(7, 7))
    with pytest.raises(RuntimeError, match="shape '\\[7, 7\\]' is invalid"):
        gxd.verify_plan(model, X, plan=plan_of(model))


def test_a_group_that_cannot_be_clamped_does_not_stop_the_others():
    class Refuses(nn.Linear):
        def forward(self, x):
            if bool((x == x[:1]).all(0).any()):
                raise ArithmeticError("a constant column")
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Refuses(8, 8), nn.Tanh(), nn.Linear(8, 3))
    groups = [gxd.manual_group("0", consumers="2"), gxd.manual_group("2", consumers="4")]
    report = gxd.verify_plan(model, X, plan=gxd.find_units(model, groups=groups))
    assert [g.status for g in report.groups] == ["inconclusive", "passed"]
    assert "a constant column" in report["0"].detail


class MeanOfANorm(nn.Module):
    """Its second output is zero, but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 6), nn.Linear(6, 6), nn.LayerNorm(6, elementwise_affine=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.norm(self.b(self.a(x).relu()))
        return normed, normed.mean(-1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_output_that_is_nothing_but_rounding_is_not_held_against_a_plan(dtype):
    torch.manual_seed(0)
    assert gxd.verify_plan(MeanOfANorm().to(dtype), torch.randn(3, 4, dtype=dtype))["a"].status == "passed"
