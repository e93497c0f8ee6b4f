"""Which parameters a method treats."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import gxd
from gxd.methods.scope import BUT_NORMS, kinds, patterns, treated
from tests import models


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc, self.norm = nn.Embedding(10, 8), nn.Linear(8, 8), nn.RMSNorm(8)
        self.head = nn.Linear(8, 10)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(8))


def test_a_parameter_is_known_by_its_layer_and_a_tied_one_once():
    assert kinds(Tied()) == {
        "embed.weight": "other",
        "fc.weight": "weight",
        "fc.bias": "bias",
        "norm.weight": "gain",
        "head.bias": "bias",
        "scale": "other",
    }
    found = kinds(models.ResNet())
    assert found["block2.shortcut.0.weight"] == "weight" and found["block2.shortcut.1.bias"] == "shift"
    assert kinds(models.Transformer())["attn.in_proj_weight"] == "weight"


def test_a_head_that_is_tied_to_an_embedding_first_in_order_is_an_embedding_too():
    model = Tied()
    model = nn.Sequential(OrderedDict(head=model.head, embed=model.embed))
    assert kinds(model) == {"head.weight": "other", "head.bias": "bias"}


class NormedLinear(nn.Linear):
    """The cosine classifier of class-incremental learning: a layer, whatever it is called."""


class NormedConv2d(nn.Conv2d):
    pass


class NormedTable(nn.Embedding):
    pass


def test_a_layer_or_a_table_with_norm_in_its_name_is_no_norm():
    model = nn.Sequential(NormedConv2d(2, 3, 1), NormedLinear(4, 3), NormedTable(5, 2), nn.LayerNorm(3))
    found = kinds(model)
    assert [found[f"{n}.weight"] for n in range(4)] == ["weight", "weight", "other", "gain"]
    assert [found[f"{n}.bias"] for n in (0, 1, 3)] == ["bias", "bias", "shift"]
    assert treated(model[:2], ("head",), ["weight"]) == {"0.weight": "weight"}


@pytest.mark.parametrize(("name", "options"), [("head_reset", {}), ("full_reset", {}), ("swr", {"every": 1})])
def test_a_layer_with_norm_in_its_name_is_drawn_from_the_distribution_of_layers(name: str, options: dict[str, int]):
    """Not from that of gains, which are 1. Half of a uniform draw lies beyond half of its bound."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 25), nn.ReLU(), NormedLinear(25, 40, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    swr = {"factor": 1e9, "score": "magnitude"} if name == "swr" else {}
    attached = gxd.attach(model, optimizer, gxd.method(name, **options, **swr))
    before = model[2].weight.detach().clone()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    attached.boundary()
    after = model[2].weight.detach()
    assert (after != before).all() and after.abs().max() <= 25**-0.5
    assert 0.4 < (after.abs() > 25**-0.5 / 2).float().mean() < 0.6


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        ((), {"0.weight", "0.bias", "2.0.weight", "2.0.bias", "3.weight", "3.bias"}),
        ("2", {"0.weight", "0.bias", "3.weight", "3.bias"}),
        ("2.0.weight", {"0.weight", "0.bias", "2.0.bias", "3.weight", "3.bias"}),
        ("*.bias", {"0.weight", "2.0.weight", "3.weight"}),
        (["head", "0"], {"2.0.weight", "2.0.bias"}),
    ],
)
def test_what_is_excluded_is_named_by_parameters_modules_and_wildcards(exclude: str | list[str], left: set[str]):
    """Without a module called head, that is the last layer with a weight."""
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Sequential(nn.Linear(5, 5)), nn.Linear(5, 2), nn.LayerNorm(2))
    assert set(treated(model, patterns(exclude), BUT_NORMS)) == left


def test_a_module_that_is_called_head_is_the_head_wherever_it_is():
    model = nn.Sequential(OrderedDict(head=nn.Linear(4, 3), aside=nn.Linear(4, 3)))
    assert set(treated(model, ("head",), ["weight"])) == {"aside.weight"}


def test_a_tied_parameter_is_left_out_by_any_of_its_names():
    assert "embed.weight" not in treated(Tied(), ("head",), BUT_NORMS)


@pytest.mark.parametrize("name", [name for name, info in gxd.methods().items() if "exclude" in info.options])
def test_a_name_that_is_not_there_is_refused_with_the_nearest(name: str):
    model = models.Mlp(norm=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match=r"exclude='haed' .*\. Did you mean 'head'"):
        gxd.attach(model, optimizer, gxd.method(name, exclude=["fc1", "haed"]))
    with pytest.raises(ValueError, match=r"is left to treat with exclude=|all are excluded"):
        gxd.attach(model, optimizer, gxd.method(name, exclude="*"))
    assert not optimizer._optimizer_step_post_hooks
