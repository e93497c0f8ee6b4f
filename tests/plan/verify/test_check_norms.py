"""Norms that couple units, of any class and any layout: a right plan holds behind them, and a wrong one is found."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gxd
from gxd.plan.units import Norm

WIDTH = 8


class ChannelsFirst(nn.LayerNorm):
    """Over the channels of images, by permuting them."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class WrittenOut(nn.Module):
    """The same in operations, with parameters shaped for broadcasting."""

    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width, 1, 1)), nn.Parameter(torch.zeros(width, 1, 1))
        self.eps = eps

    def forward(self, x):
        centred = x - x.mean(1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(1, keepdim=True) + self.eps) * self.weight + self.bias


class Rms(nn.Module):
    """Of the mean square, in single precision, as in language models."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class AboutZero(Rms):
    """The weight counts from 1."""

    def forward(self, x):
        return (1 + self.weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class WithItsInput(nn.LayerNorm):
    """Returns what it was given, too."""

    def forward(self, x):
        return super().forward(x), x


class InPlace(nn.LayerNorm):
    """Writes to its input."""

    def forward(self, x):
        return super().forward(x.mul_(2.0))


class Images(nn.Module):
    layer = staticmethod(lambda a, b: nn.Conv2d(a, b, 1))

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.n, self.b, self.c = self.layer(3, WIDTH), norm, self.layer(WIDTH, 4), self.layer(WIDTH, 4)

    def read(self, x):
        h = self.n(self.a(x))
        return F.gelu(h[0] if isinstance(h, tuple) else h)

    def forward(self, x):
        return self.b(self.read(x))


class Tokens(Images):
    layer = nn.Linear


class ReadTwice(Images):
    def forward(self, x):
        h = self.read(x)
        return self.b(h) + self.c(h)


class TokensReadTwice(ReadTwice):
    layer = nn.Linear


# As many rows and pixels in a row as channels: the sizes do not tell the axes apart.
SQUARE, LONG, TOKENS = torch.randn(3, 3, WIDTH, WIDTH), torch.randn(3, 3, 5, WIDTH), torch.randn(3, WIDTH, 3)
NORMS = {
    "channels first, square": (Images, lambda: ChannelsFirst(WIDTH), SQUARE),
    "channels first, long": (Images, lambda: ChannelsFirst(WIDTH), LONG),
    "channels first, small": (Images, lambda: ChannelsFirst(WIDTH), torch.randn(3, 3, 2, 2)),
    "channels first, written out": (Images, lambda: WrittenOut(WIDTH), SQUARE),
    "one group": (Images, lambda: nn.GroupNorm(1, WIDTH), SQUARE),
    "two groups": (Images, lambda: nn.GroupNorm(2, WIDTH), SQUARE),
    "tokens": (Tokens, lambda: nn.LayerNorm(WIDTH), TOKENS),
    "no bias": (Tokens, lambda: nn.LayerNorm(WIDTH, bias=False), TOKENS),
    "frozen": (Tokens, lambda: nn.LayerNorm(WIDTH).requires_grad_(False), TOKENS),
    "mean square": (Tokens, lambda: Rms(WIDTH), TOKENS),
    "mean square, about zero": (Tokens, lambda: AboutZero(WIDTH), TOKENS),
    "a tuple": (Tokens, lambda: WithItsInput(WIDTH), TOKENS),
    "in place": (Tokens, lambda: InPlace(WIDTH), TOKENS),
}
every_norm = pytest.mark.parametrize("name", NORMS)


def plan_of(model, entries=None):
    """The plan as a tracer that knows the norm makes it."""
    plan = gxd.find_units(model, groups=[gxd.manual_group("a", consumers="b")])
    trained = [name for name, parameter in model.n.named_parameters() if parameter.requires_grad]
    own = [f"n.{name}" if name in trained else None for name in ("weight", "bias")]
    entries = torch.arange(WIDTH).unsqueeze(1) if entries is None else entries
    norm = Norm("n", *own, None, None, entries, couples=True)
    return replace(plan, groups=(replace(plan["a"], norms=(norm,)),))


@every_norm
def test_a_right_plan_behind_a_norm_is_not_called_wrong(name):
    kind, norm, x = NORMS[name]
    model = kind(norm())
    report = gxd.verify_plan(model, x, plan=plan_of(model))
    assert report["a"].status == "approximate", report


@every_norm
def test_a_reader_missed_behind_a_norm_is_found(name):
    kind, norm, x = NORMS[name]
    model = (ReadTwice if kind is Images else TokensReadTwice)(norm())
    report = gxd.verify_plan(model, x, plan=plan_of(model))
    assert report["a"].status == "wrong" and "past the claimed consumers" in report["a"].detail


@every_norm
def test_the_entries_of_other_units_are_found(name):
    kind, norm, x = NORMS[name]
    model = kind(norm())
    rolled = plan_of(model, torch.arange(WIDTH).roll(1).unsqueeze(1))
    assert gxd.verify_plan(model, x, plan=rolled)["a"].status == "wrong"


@pytest.mark.parametrize("x", [SQUARE, LONG], ids=["square", "long"])
def test_the_traced_plan_of_a_norm_over_channels_holds(x):
    model = Images(ChannelsFirst(WIDTH))
    assert gxd.verify_plan(model, x)["a"].status == "approximate"


def test_a_norm_that_is_called_twice_is_frozen_call_by_call():
    class Twice(Tokens):
        def forward(self, x):
            return self.b(F.gelu(self.n(self.a(x)) + self.n(2 * self.a(x).square())))

    model = Twice(nn.LayerNorm(WIDTH))
    assert gxd.verify_plan(model, TOKENS, plan=plan_of(model))["a"].status == "approximate"


@pytest.mark.parametrize("kind", ["weight used without the module", "weight of a larger module"])
def test_a_norm_that_cannot_be_told_apart_proves_nothing_against_a_plan(kind):
    class Owner(nn.Module):
        """A norm and the layers around it in one."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.ones(WIDTH))
            self.a, self.b = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 4)

        def forward(self, x):
            return self.b(F.gelu(F.rms_norm(self.a(x), (WIDTH,), self.weight)))

    class Functional(Tokens):
        def forward(self, x):
            return self.b(F.gelu(F.layer_norm(self.a(x), (WIDTH,), self.n.weight, self.n.bias)))

    if kind == "weight used without the module":
        model = Functional(nn.LayerNorm(WIDTH))
        plan = plan_of(model)
    else:
        model = nn.Sequential(Owner())
        plan = gxd.find_units(model, groups=[gxd.manual_group("0.a", consumers="0.b")])
        norm = Norm("0", "0.weight", None, None, None, torch.arange(WIDTH).unsqueeze(1), couples=True)
        plan = replace(plan, groups=(replace(plan["0.a"], norms=(norm,)),))
    report = gxd.verify_plan(model, TOKENS, plan=plan)
    assert report.groups[0].status == "approximate", report
