"""Targets of an observation: of a single logit, and such as are no probabilities."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd
from tests.rig import X, Y, attach, refused, same


class Binary(nn.Module):
    """One logit: per example, or at every position."""

    def __init__(self, shape: str = "(B, 1)") -> None:
        super().__init__()
        torch.manual_seed(0)
        if shape == "(B, 1, H, W)":
            self.layers = nn.Sequential(nn.Conv2d(1, 6, 1), nn.Tanh(), nn.Conv2d(6, 1, 1))
        else:
            self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


SHAPES = {"(B, 1)": (12, 4), "(B, T, 1)": (12, 5, 4), "(B, 1, H, W)": (12, 1, 3, 4)}


@cache
def plan_of(shape: str) -> gxd.UnitPlan:
    return gxd.find_units(Binary(shape), torch.zeros(SHAPES[shape]))


def binary(shape: str, utility: str = "gxd", **options: Any) -> tuple[Any, ...]:
    x = torch.randn(SHAPES[shape], generator=torch.Generator().manual_seed(2))
    model = Binary(shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options = {"maturity": 100, "plan": plan_of(shape), **options}
    cbp = gxd.ContinualBackprop(model, optimizer, utility=utility, **options)
    t = torch.randint(0, 2, model(x).shape, generator=torch.Generator().manual_seed(3))
    return model, optimizer, cbp, x, t


def scores(shape: str, utility: str, observe: Callable[[gxd.ContinualBackprop, Tensor, Tensor], None]) -> Tensor:
    model, optimizer, cbp, x, t = binary(shape, utility)
    z = model(x)
    observe(cbp, z, t)
    z.sum().backward()
    optimizer.step()
    return cbp.utilities()["layers.0"]


@pytest.mark.parametrize("utility", ["gxd", "gxi"])
@pytest.mark.parametrize("kind", [torch.int64, torch.uint8, torch.bool, torch.float32, torch.float64])
@pytest.mark.parametrize("squeezed", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_single_logit_of_a_binary_problem_counts_up_for_class_1_and_down_for_class_0(
    shape: str, squeezed: bool, kind: torch.dtype, utility: str
):
    dim = {"(B, 1)": 1, "(B, T, 1)": -1, "(B, 1, H, W)": 1}[shape]
    expected = scores(shape, utility, lambda cbp, z, t: cbp.observe(score=z * (2 * t - 1)))
    given = dim if shape == "(B, T, 1)" and not squeezed else None  # (batch, classes, 1) has the same shape
    found = scores(
        shape, utility, lambda cbp, z, t: cbp.observe(z, (t.squeeze(dim) if squeezed else t).to(kind), class_dim=given)
    )
    torch.testing.assert_close(found, expected)
    assert bool((found > 0).all())


def test_the_single_logit_is_the_two_class_problem_with_half_of_it_on_either_side():
    one = scores("(B, 1, H, W)", "gxd", lambda cbp, z, t: cbp.observe(z, t))
    two = scores("(B, 1, H, W)", "gxd", lambda cbp, z, t: cbp.observe(torch.cat([-z / 2, z / 2], 1), t.squeeze(1)))
    torch.testing.assert_close(one, 2 * two)


def test_a_soft_target_of_a_single_logit_counts_by_how_far_it_is_from_a_half():
    half = scores("(B, 1)", "gxd", lambda cbp, z, t: cbp.observe(z, torch.full_like(z, 0.5)))
    most = scores("(B, 1)", "gxd", lambda cbp, z, t: cbp.observe(z, t.float()))
    some = scores("(B, 1)", "gxd", lambda cbp, z, t: cbp.observe(z, 0.25 + t / 2))
    assert not half.any()
    torch.testing.assert_close(some, most / 2)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_ignored_target_of_a_single_logit_does_not_count(shape: str):
    dim = -1 if shape == "(B, T, 1)" else 1
    found = scores(
        shape, "gxi", lambda cbp, z, t: cbp.observe(z, t.where(t == 1, -100), class_dim=None if dim == 1 else dim)
    )
    expected = scores(shape, "gxi", lambda cbp, z, t: cbp.observe(score=z * t))
    torch.testing.assert_close(found, expected)


REGRESSION = [
    (torch.tensor([-1.5, 0.25]), ("-1.5", "0.25", "[0, 1]", "regression", "score=")),
    (torch.tensor([0.5, 37.0]), ("0.5", "37", "[0, 1]", "regression", "score=")),
    (torch.tensor([0.5, torch.nan]), ("nan", "[0, 1]", "score=")),
    (torch.tensor([0, 2]), ("0 to 2", "0 and 1", "-100")),
    (torch.tensor([-1, 1]), ("-1 to 1", "0 and 1", "-100")),
    (torch.tensor([-100.0, 1.0]), ("-100", "[0, 1]")),
]


@pytest.mark.parametrize(("values", "words"), REGRESSION)
def test_targets_that_are_no_probabilities_are_refused_with_their_range(values: Tensor, words: tuple[str, ...]):
    model, _, cbp, x, t = binary("(B, 1)")
    refused(lambda: cbp.observe(model(x), values[t]), ValueError, words)
    refused(lambda: cbp.observe(model(x), values[t.squeeze(1)]), ValueError, words)
    if values.is_floating_point():
        rig = attach()
        targets = values[torch.arange(18).view(6, 3) % 2]
        refused(lambda: rig.cbp.observe(rig.model(X), targets), ValueError, words)
        rig.train()


def test_probabilities_that_rounding_has_moved_a_little_over_one_are_taken():
    for dtype in (torch.float32, torch.bfloat16):
        rig = attach()
        target = F.one_hot(Y, 3).to(dtype) * (1 + torch.finfo(dtype).eps)
        assert float(target.max()) > 1
        rig.cbp.observe(rig.model(X), target)


@pytest.mark.parametrize("shape", [(4, 5, 1), (4, 1, 5), (4, 5, 3, 1)])
def test_a_target_that_may_be_of_one_logit_or_of_several_classes_needs_the_axis_to_be_named(shape: tuple[int, ...]):
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, torch.Size(shape[1:]).numel()), nn.Unflatten(1, shape[1:])
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cbp = gxd.ContinualBackprop(model, optimizer, example_inputs=x)
    target = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    refused(lambda: cbp.observe(model(x), target), ValueError, ("class_dim=1", "class_dim=-1", str(shape)))
    cbp.observe(model(x), target, class_dim=-1)


@pytest.mark.parametrize("utility", ["gxd", "gxd_all_logit", "gxd_sketch"])
@pytest.mark.parametrize("kind", [torch.int64, torch.float32])
def test_a_compiled_step_counts_the_single_logit_as_the_eager_one(
    utility: str, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gxd.compile.program.compile_graph", lambda graph, example: graph)
    runs = []
    loss = lambda z, t: F.binary_cross_entropy_with_logits(z, t.to(z.dtype).clamp(0, 1))
    for compiled in (False, True):
        model, optimizer, cbp, x, t = binary("(B, 1)", utility, maturity=3, replacement_rate=0.1)
        optimizer.param_groups[0]["lr"] = 0.1
        step = gxd.compiled_step(model, optimizer, loss, cbp)
        for number in range(12):
            target = t.to(kind)
            if kind == torch.int64:
                target[number] = -100
            step(x, target) if compiled else step._eager(x, target)
        assert step.why_eager is None and cbp.total_resets > 0
        runs.append((dict(model.state_dict()), cbp.utilities()))
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrong", [torch.tensor([0.5, 3.0]), torch.tensor([0, 2])])
def test_a_compiled_step_refuses_targets_that_are_no_probabilities_and_nothing_is_done(
    wrong: Tensor, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gxd.compile.program.compile_graph", lambda graph, example: graph)
    model, optimizer, cbp, x, t = binary("(B, 1)")
    step = gxd.compiled_step(model, optimizer, lambda z, t: (z - t).square().mean(), cbp)
    step(x, t.to(wrong.dtype))
    before = copy.deepcopy((model.state_dict(), cbp.state_dict()))
    refused(lambda: step(x, wrong[t]), ValueError, ("[0, 1]", "score="))
    assert same((model.state_dict(), cbp.state_dict()), before)


def test_where_values_cannot_be_looked_at_a_wrong_target_is_a_non_finite_observation(monkeypatch: pytest.MonkeyPatch):
    """As in the graph of a compiled step on a device that must not be waited for."""
    monkeypatch.setattr("gxd.compile.program.compile_graph", lambda graph, example: graph)
    monkeypatch.setattr("gxd.compile.program.check_probabilities", lambda target: None)
    model, optimizer, cbp, x, t = binary("(B, 1)")
    step = gxd.compiled_step(model, optimizer, lambda z, t: (z - t).square().mean(), cbp)
    step(x, t.float())
    before = cbp.utilities()
    with pytest.warns(gxd.NonFiniteWarning):
        step(x, 3.0 * t)
    assert cbp.nonfinite_observations == 1
    assert same(cbp.utilities(), before)


@pytest.mark.parametrize("kind", [torch.int64, torch.float32])
@pytest.mark.parametrize("shape", ["(B, 1)", "(B, 1, H, W)"])
def test_reset_cost_of_a_single_logit_is_that_of_the_two_class_problem(shape: str, kind: torch.dtype):
    model, _, cbp, x, t = binary(shape)
    cbp.close()
    names, plan = ["gxd", "loss_gradient", "contribution"], plan_of(shape)
    one = gxd.reset_cost(model, (x, t.to(kind)), x, utilities=names, plan=plan)
    two = gxd.reset_cost(
        model, (x, t.squeeze(1)), x, utilities=names, plan=plan, output=lambda z: torch.cat([-z / 2, z / 2], 1)
    )
    scale = {"gxd": 2.0, "loss_gradient": 1.0, "contribution": 1.0}
    for name in names:
        torch.testing.assert_close(one.scores[name]["layers.0"], scale[name] * two.scores[name]["layers.0"])
    torch.testing.assert_close(one.shocks["kl"]["layers.0"], two.shocks["kl"]["layers.0"], rtol=1e-4, atol=1e-9)
    assert bool((one.shocks["kl"]["layers.0"] > 0).all())


# ---- padding and masks


def of_classes(observe: Callable[..., None], utility: str = "gxd") -> Any:
    """The scores of an observation of (batch, time, classes)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))
    x = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    cbp = gxd.ContinualBackprop(model, optimizer, example_inputs=x, utility=utility, maturity=100)
    logits = model(x)
    observe(cbp, logits)
    logits.sum().backward()
    optimizer.step()
    return cbp.utilities()


PADDED = torch.tensor([[3, 1, 0, 0], [2, 4, 1, 0], [1, 2, 3, 4]])  # 0 is padding


@pytest.mark.parametrize("padding", [-1, 0, 4, 7, 255])
def test_padding_may_have_any_index(padding: int):
    target = PADDED.where(PADDED != 0, padding)
    expected = of_classes(lambda cbp, z: cbp.observe(z, target.where(target != padding, -100)))
    assert same(of_classes(lambda cbp, z: cbp.observe(z, target, ignore_index=padding)), expected)
    flat = of_classes(lambda cbp, z: cbp.observe(z.flatten(0, 1), target.flatten(), ignore_index=padding))
    assert same(
        flat, of_classes(lambda cbp, z: cbp.observe(z.flatten(0, 1), target.where(target != padding, -100).flatten()))
    )


@pytest.mark.parametrize("padding", [-1, 5])
def test_padding_that_is_not_named_is_refused_with_the_option(padding: int):
    target = PADDED.where(PADDED != 0, padding)
    with pytest.raises(ValueError, match=f"ignore_index={padding}"):
        of_classes(lambda cbp, z: cbp.observe(z, target))
    with pytest.raises(TypeError, match="ignore_index=None"):
        of_classes(lambda cbp, z: cbp.observe(z, target, ignore_index=None))


def test_a_soft_target_is_masked_by_zeros():
    hard = PADDED.where(PADDED != 0, -100)
    soft = F.one_hot(PADDED, 5).float() * (PADDED != 0).unsqueeze(-1)
    expected = of_classes(lambda cbp, z: cbp.observe(z, hard))
    assert same(of_classes(lambda cbp, z: cbp.observe(z, soft)), expected)
    with pytest.raises(ValueError, match="all 0 where a position is masked"):
        of_classes(lambda cbp, z: cbp.observe(z, soft.where(soft.any(-1, keepdim=True), -100.0)))


def test_the_index_of_padding_of_a_single_logit():
    expected = scores("(B, 1)", "gxi", lambda cbp, z, t: cbp.observe(z, t.where(t == 1, -100)))
    found = scores("(B, 1)", "gxi", lambda cbp, z, t: cbp.observe(z, t.where(t == 1, -1), ignore_index=-1))
    torch.testing.assert_close(found, expected)
