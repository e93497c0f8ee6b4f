"""The check on models that return, draw and keep whatever models return, draw and keep."""

from collections import namedtuple
from dataclasses import dataclass
from itertools import count

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal
from torch.nn import functional as F

import gxd
from tests.broken_plans import broken

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([True, False, False])


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class Plain:
    def __init__(self, value):
        self.value, self.myself = value, self


Pair = namedtuple("Pair", ["first", "second"])


class Net(nn.Module):
    """Two layers, and what becomes of their result."""

    def __init__(self, end):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.end = nn.Linear(6, 8), nn.Linear(8, 3), end

    def forward(self, *args, **kwargs):
        (x,) = (*args, *kwargs.values())
        return self.end(self.b(F.relu(self.a(x))))


def sampled(z):
    return torch.distributions.Normal(z, 1.0).sample()


def slope(z):
    return torch.func.vmap(torch.func.grad(lambda row: row.square().sum()))(z)


ENDS = {
    "a tensor": lambda z: z,
    "a dict with None and numbers": lambda z: {"y": [z, None], "n": 3, "names": ("a", "b"), "index": torch.arange(3)},
    "a named tuple": lambda z: Pair(z, z.argmax(-1)),
    "a dataclass": Output,
    "an object": Plain,
    "a distribution": lambda z: Categorical(logits=z),
    "a distribution of a distribution": lambda z: (Independent(Normal(z, 1.0), 1), None),
    "a sample": sampled,
    "an action": lambda z: z.argmax(-1),
    "a drawn action": lambda z: Categorical(logits=z).sample(),
    "a list of numbers": lambda z: z.argmax(-1).tolist(),
    "an array": lambda z: z.detach().numpy(),
    "without a graph": lambda z: z.detach(),
    "complex numbers": lambda z: torch.complex(z, -z),
    "masked by infinity": lambda z: z.masked_fill(MASK, -torch.inf),
    "masked by a large number": lambda z: z.masked_fill(MASK, -1e9),
    "dropout in evaluation": lambda z: F.dropout(z, 0.5, training=True),
    "gradients of functions": slope,
    "noise": lambda z: z + torch.randn_like(z),
}


@pytest.mark.parametrize("name", ENDS)
def test_there_is_a_verdict_on_whatever_a_model_returns(name):
    model = Net(ENDS[name])
    plan = gxd.find_units(model, groups=[gxd.manual_group("a", consumers="b")])
    assert gxd.verify_plan(model, X, plan=plan)["a"].status == "passed"
    for mistake, wrong in broken(plan, "a"):
        assert gxd.verify_plan(model, X, plan=wrong)["a"].status == "wrong", mistake


INPUTS = {"dict": {"x": X}, "tuple": (X,), "half": {"x": X.bfloat16()}, "leaf": {"x": X.clone().requires_grad_()}}


def test_outputs_whose_shape_depends_on_the_units_prove_nothing():
    model = Net(lambda z: z[z > 0])
    report = gxd.verify_plan(model, X, plan=gxd.find_units(model, groups=[gxd.manual_group("a", consumers="b")]))
    assert report["a"].status == "inconclusive" and "shapes" in report["a"].detail


def test_an_output_does_not_hide_behind_a_larger_one():
    """The units leak into an output that is small beside another, which they reach as the plan says."""
    model = Net(lambda z: z)
    model.forward = lambda x: (1e6 * model.b(h := F.relu(model.a(x))), 1e-6 * h.sum(1))
    plan = gxd.find_units(model, groups=[gxd.manual_group("a", consumers="b")])
    assert gxd.verify_plan(model, X, plan=plan)["a"].status == "wrong"


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_come_in_any_form(name):
    model = Net(lambda z: z).to(torch.bfloat16 if name == "half" else torch.float32)
    assert gxd.verify_plan(model, INPUTS[name])["a"].status == "passed"


def test_whole_numbers_go_in_and_out():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.words, self.a, self.b = nn.Embedding(9, 6), nn.Linear(6, 8), nn.Linear(8, 9)

        def forward(self, ids, mask):
            return self.b(F.relu(self.a(self.words(ids) * mask.unsqueeze(-1)))).argmax(-1)

    model = Words()
    plan = gxd.find_units(model, groups=[gxd.manual_group("a", consumers="b")])
    inputs = {"ids": torch.arange(8).view(2, 4), "mask": torch.ones(2, 4, dtype=torch.bool)}
    assert gxd.verify_plan(model, inputs, plan=plan)["a"].status == "passed"


def test_an_expert_that_is_given_nothing_proves_nothing():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = (nn.ModuleList(nn.Linear(*size) for _ in range(2)) for size in ((6, 8), (8, 3)))

        def forward(self, x):
            out = torch.zeros(len(x), 3, dtype=x.dtype)
            for expert, chosen in enumerate((x[:, 0] < 99, x[:, 0] > 99)):
                out[chosen] = self.down[expert](F.relu(self.up[expert](x[chosen])))
            return out

    model = Experts()
    hand = [gxd.manual_group(f"up.{i}", consumers=f"down.{i}") for i in range(2)]
    report = gxd.verify_plan(model, X, plan=gxd.find_units(model, groups=hand))
    assert [g.status for g in report.groups] == ["passed", "inconclusive"]
    assert "'down.1' is not called" in report["up.1"].detail


def test_outputs_that_differ_from_run_to_run_are_not_blamed_on_the_plan():
    numbers = count(1)  # an iterator cannot be put back
    model = Net(lambda z: z * next(numbers))
    report = gxd.verify_plan(model, X, plan=gxd.find_units(model, groups=[gxd.manual_group("a", consumers="b")]))
    assert report["a"].status == "inconclusive" and "from run to run" in report["a"].detail
