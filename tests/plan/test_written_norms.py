"""Norms written out in operations are norms: they couple their units, and their weight's entries are the units'."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd
from tests.zoo import Net, linear, param

WIDTH = 6
X = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))


class Norm(nn.Module):
    """A function of the values, the weight and the bias."""

    def __init__(self, function, weight: tuple[int, ...] = (WIDTH,), bias: bool = False) -> None:
        super().__init__()
        self.function = function
        self.weight = param(torch.rand(weight) + 0.5)
        self.bias = param(torch.rand(weight)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight) if self.bias is None else self.function(x, self.weight, self.bias)


def llama(x, w):
    dtype = x.dtype
    x = x.to(torch.float32) if dtype != torch.float64 else x
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)


def in_place(x, w):
    scale = x.square().mean(-1, keepdim=True).add_(1e-6).rsqrt_()
    return x.clone().mul_(scale).mul_(w)


def centred(x, w, b):
    x = x - x.mean(-1, keepdim=True)
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w + b


def by_moments(x, w, b):
    mean, square = x.mean(-1, keepdim=True), (x * x).mean(-1, keepdim=True)
    return b + w * ((x - mean) * (square - mean * mean + 1e-5).rsqrt())


def by_variance(x, w, b):
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return torch.addcmul(b, w, (x - mean) / (variance + 1e-5).sqrt())


# name -> the norm, and torch's own that gives the same numbers, if there is one
RMS = {
    "as in Llama": lambda: Norm(llama),
    "in place": lambda: Norm(in_place),
    "a vector of length one": lambda: Norm(lambda x, w: F.normalize(x, dim=-1) * WIDTH**0.5 * w),
    "over its length": lambda: Norm(lambda x, w: w * (x / x.norm(dim=-1, keepdim=True)) * WIDTH**0.5),
    "the square root of the mean square": lambda: Norm(lambda x, w: x / (x**2).mean(-1, keepdim=True).sqrt() * w),
    "a weight of one row": lambda: Norm(lambda x, w: F.normalize(x, dim=-1) * WIDTH**0.5 * w, (1, WIDTH)),
}
LAYER = {
    "mean, then mean square": lambda: Norm(centred, bias=True),
    "from both moments": lambda: Norm(by_moments, bias=True),
    "from var_mean": lambda: Norm(by_variance, bias=True),
    "by standard deviation": lambda: Norm(
        lambda x, w, b: (x - x.mean(-1, keepdim=True)) / x.std(-1, correction=0, keepdim=True) * w + b, bias=True
    ),
}


def net(norm: nn.Module) -> Net:
    torch.manual_seed(0)
    parts = {"a": linear(5, WIDTH), "norm": norm, "b": linear(WIDTH, 7), "out": linear(7, 3)}
    return Net(lambda m, x: m.out(F.gelu(m.b(F.silu(m.norm(m.a(x)))))).mean(1), **parts)


@pytest.mark.parametrize("name", [*RMS, *LAYER])
def test_a_written_norm_has_the_plan_of_the_module_it_spells_out(name: str):
    model = net({**RMS, **LAYER}[name]())
    own = nn.RMSNorm(WIDTH, eps=1e-6) if name in RMS else nn.LayerNorm(WIDTH)
    reference = net(own)
    reference.load_state_dict({k: v.reshape(reference.state_dict()[k].shape) for k, v in model.state_dict().items()})
    torch.testing.assert_close(model(X), reference(X), rtol=1e-3, atol=1e-4)
    plan, expected = gxd.find_units(model, X), gxd.find_units(reference, X)
    assert plan.fingerprint() == expected.fingerprint()
    (norm,), (known,) = plan["a"].norms, expected["a"].norms
    assert (norm.module, norm.weight, norm.bias, norm.couples) == (
        known.module,
        known.weight,
        known.bias,
        known.couples,
    )
    assert str(plan) == str(expected)


@pytest.mark.parametrize("name", [*RMS, *LAYER])
def test_the_check_confirms_a_written_norm(name: str):
    model = net({**RMS, **LAYER}[name]())
    report = gxd.verify_plan(model, X)
    assert report["a"].status == "approximate" and report["b"].status == "passed", str(report)


def test_a_reset_sets_the_entries_of_its_units_to_one_and_zero():
    model = net(LAYER["from both moments"]())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gxd.reset_units(model, gxd.find_units(model, X), {"a": [1, 4]})
    touched = torch.tensor([False, True, False, False, True, False])
    assert (model.norm.weight[touched] == 1).all() and (model.norm.bias[touched] == 0).all()
    for key in ("norm.weight", "norm.bias"):
        assert torch.equal(model.state_dict()[key][~touched], before[key][~touched])


FURTHER = {  # other norms: the layers whose units are found, and the names of the parameters that are the norm's
    "channels of images": (
        lambda m, x: m.out((m.w * ((h := m.conv(x)) * (h.pow(2).mean(1, keepdim=True) + 1e-6).rsqrt())).mean((2, 3))),
        {"conv": nn.Conv2d(2, WIDTH, 1), "w": param(torch.ones(WIDTH, 1, 1)), "out": linear(WIDTH, 3)},
        (2, 2, 4, 4),
        {"conv": "w"},
    ),
    "heads of their own": (
        lambda m, x: m.out((m.w * F.normalize(m.a(x).unflatten(-1, (2, 3)), dim=-1)).flatten(-2)),
        {"a": linear(5, WIDTH), "w": param(torch.ones(2, 3)), "out": linear(WIDTH, 3)},
        (2, 5),
        {"a": "w"},
    ),
    "one weight for all heads": (
        lambda m, x: m.out((m.w * F.normalize(m.a(x).unflatten(-1, (2, 3)), dim=-1)).flatten(-2)),
        {"a": linear(5, WIDTH), "w": param(torch.ones(3)), "out": linear(WIDTH, 3)},
        (2, 5),
        {"a": None},
    ),
    "no weight": (
        lambda m, x: m.out(F.normalize(m.a(x), dim=-1)),
        {"a": linear(5, WIDTH), "out": linear(WIDTH, 3)},
        (2, 5),
        {"a": None},
    ),
    "scaled by the largest": (
        lambda m, x: m.out((h := m.a(x)) / h.abs().amax(-1, keepdim=True)),
        {"a": linear(5, WIDTH), "out": linear(WIDTH, 3)},
        (2, 5),
        {"a": None},
    ),
    "global response": (
        lambda m, x: m.out((h := m.a(x)) + h * (g := h.norm(dim=1, keepdim=True)) / (g.mean(-1, keepdim=True) + 1e-6)),
        {"a": linear(5, WIDTH), "out": linear(WIDTH, 3)},
        (2, 4, 5),
        {"a": None},
    ),
    "a weight that is one more than its parameter": (
        lambda m, x: m.out(F.normalize(m.a(x), dim=-1) * (1 + m.w)),
        {"a": linear(5, WIDTH), "w": param(torch.zeros(WIDTH)), "out": linear(WIDTH, 3)},
        (2, 5),
        {"a": None},
    ),
    "a scale that follows an activation": (
        lambda m, x: m.out(m.w * F.relu(F.normalize(m.a(x), dim=-1))),
        {"a": linear(5, WIDTH), "w": param(torch.ones(WIDTH)), "out": linear(WIDTH, 3)},
        (2, 5),
        {"a": None},
    ),
    "two weights of one norm": (
        lambda m, x: m.out(m.w * (h := F.normalize(m.a(x), dim=-1))) + m.out2(m.v * h),
        {
            "a": linear(5, WIDTH),
            "w": param(torch.ones(WIDTH)),
            "v": param(torch.ones(WIDTH)),
            "out": linear(WIDTH, 3),
            "out2": linear(WIDTH, 3),
        },
        (2, 5),
        {"a": "w v"},
    ),
}


@pytest.mark.parametrize("name", FURTHER)
def test_other_norms_are_found_by_what_they_do(name: str):
    run, parts, shape, expected = FURTHER[name]
    torch.manual_seed(0)
    model, x = Net(run, **parts), torch.randn(shape)
    plan = gxd.find_units(model, x)
    assert {group.name for group in plan.groups} == expected.keys(), str(plan)
    for group in plan.groups:
        assert group.size == WIDTH and any(norm.couples for norm in group.norms)
        assert {norm.weight for norm in group.norms} - {None} == set((expected[group.name] or "").split())
    assert gxd.verify_plan(model, x, plan=plan).ok


def test_a_scale_without_a_norm_is_no_part_of_the_unit():
    model = Net(lambda m, x: m.out(m.w * m.a(x)), a=linear(5, WIDTH), w=param(torch.ones(WIDTH)), out=linear(WIDTH, 3))
    plan = gxd.find_units(model, X)
    assert not plan["a"].norms and "w" not in plan.shapes


def half(h):
    return h[..., :3], h[..., 3:]


LEAKS = {  # a statistic that is read by something else, too
    "returned": lambda m, h, g, x: (m.out(F.normalize(h, dim=-1)), h.norm(dim=-1)),
    "read by a layer": lambda m, h, g, x: m.out(torch.cat([h[..., 1:], h.mean(-1, keepdim=True)], -1)),
    "of other units": lambda m, h, g, x: m.out(g * h.norm(dim=-1, keepdim=True)),
    "of half of them, for the other half": lambda m, h, g, x: m.out(
        torch.cat([half(h)[0], half(h)[1] / half(h)[0].norm(dim=-1, keepdim=True)], -1)
    ),
    "times the input": lambda m, h, g, x: m.out(h * (h.norm(dim=-1, keepdim=True) * x[..., :1])),
    "with the input among them": lambda m, h, g, x: m.out(
        (c := torch.cat([h[..., 1:], x[..., :1]], -1)) / c.norm(dim=-1, keepdim=True)
    ),
    "shares of the whole": lambda m, h, g, x: m.out(
        (e := (h - h.amax(-1, keepdim=True)).exp()) / e.sum(-1, keepdim=True)
    ),
    "a mask of the largest": lambda m, h, g, x: m.out(h * (h >= h.amax(-1, keepdim=True))),
    "statistic over unit": lambda m, h, g, x: m.out(h.norm(dim=-1, keepdim=True) / h),
    "to the power of": lambda m, h, g, x: m.out(h.abs() ** h.norm(dim=-1, keepdim=True)),
    "as a weight of tokens": lambda m, h, g, x: m.out((h.norm(dim=-1, keepdim=True).softmax(1) * h).sum(1)),
    "over the examples, too": lambda m, h, g, x: m.out(h - h.mean()),
    "as an index": lambda m, h, g, x: m.out(h) + m.table[h.mean(-1).long().clamp(0, 2)],
    "added to the outputs": lambda m, h, g, x: m.out(h) + h.mean(-1, keepdim=True),
    "the mean of two layers for one": lambda m, h, g, x: m.out(
        h / (h.mean(-1, keepdim=True) + g.mean(-1, keepdim=True))
    ),
    "written into a tensor that is returned": lambda m, h, g, x: (
        m.out(F.normalize(h, dim=-1)),
        torch.zeros_like(x).copy_(h.mean(-1, keepdim=True)),
    ),
}


@pytest.mark.parametrize("name", LEAKS)
@pytest.mark.parametrize("residual", ["skip", "group"])
def test_units_whose_statistic_goes_elsewhere_are_left_alone(name: str, residual: str):
    torch.manual_seed(0)
    parts = {"a": linear(5, WIDTH), "g": linear(5, WIDTH), "out": linear(WIDTH, 3)}
    model = Net(lambda m, x: LEAKS[name](m, m.a(x), m.g(x), x), table=nn.Buffer(torch.zeros(3, 3)), **parts)
    plan = gxd.find_units(model, X, residual=residual)
    rows = [row for g in plan.groups for p in g.producers if p.module == "a" for row in p.rows.tolist()]
    assert rows == ([3, 4, 5] if "half" in name else []), str(plan)  # the other half is only scaled
    reasons = [entry.reason for entry in plan.skipped if entry.name.partition("[")[0] == "a"]
    assert any(words in reason for reason in reasons for words in ("over several units", "softmax")), reasons
