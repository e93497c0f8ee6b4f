"""FIRE against singular values: each of them, divided by the root of the sum of their squares, goes ten times through
1.5 s - 0.5 s^3, and a matrix of well-behaved ones becomes the exact polar factor.
"""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd
from gxd.methods.fire import polar
from tests import models
from tests.rig import X, Y, mlp, same


def naive(matrix: Tensor, rounds: int = 10) -> Tensor:
    """One matrix ``(out, in)``, by its singular values, in 64 bits."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(rounds):
        s = 1.5 * s - 0.5 * s**3
    return u @ torch.diag(s) @ vh * math.sqrt(matrix.shape[0] / matrix.shape[1])


def expected_weight(module: nn.Module) -> Tensor:
    """Matrix by matrix: each block and each position of a kernel alone."""
    weight = module.weight.detach().double().clone()
    if isinstance(module, nn.Linear):
        return naive(weight)
    transposed, groups = isinstance(module, nn.ConvTranspose2d), module.groups
    rows, area = weight.shape[0] // groups, weight.shape[2] * weight.shape[3]
    for block in range(groups):
        of = slice(block * rows, (block + 1) * rows)
        for i in range(weight.shape[2]):
            for j in range(weight.shape[3]):
                matrix = weight[of, :, i, j]
                weight[of, :, i, j] = (naive(matrix.T).T if transposed else naive(matrix)) / area
    return weight


def fired(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    gxd.attach(model, optimizer, gxd.method("fire", **options)).boundary()
    return optimizer


def layers() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "tall": nn.Linear(5, 9),
        "wide": nn.Linear(9, 5),
        "square": nn.Linear(6, 6),
        "one row": nn.Linear(7, 1),
        "convolution": nn.Conv2d(3, 8, 3),
        "wide convolution": nn.Conv2d(8, 3, (2, 3)),
        "1x1": nn.Conv2d(4, 6, 1),
        "grouped": nn.Conv2d(6, 8, 3, groups=2),
        "transposed": nn.ConvTranspose2d(6, 4, 3, groups=2),
    }


@pytest.mark.parametrize("kind", list(layers()))
def test_every_matrix_goes_where_its_singular_values_say(kind: str):
    layer = layers()[kind]
    expected, bias = expected_weight(layer), layer.bias.detach().clone()
    fired(layer)
    torch.testing.assert_close(layer.weight.detach().double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(layer.bias, bias)


@pytest.mark.parametrize("shape", [(20, 20), (30, 10), (10, 30)])
def test_ten_rounds_reach_the_polar_factor_but_for_singular_values_below_two_percent(shape: tuple[int, int]):
    """What is stated: values of at least 1.7 % of the norm grow to 1, those of at least 10 % are there to rounding."""
    least = min(shape)
    u, _, vh = torch.linalg.svd(torch.randn(shape, generator=torch.Generator().manual_seed(1)), full_matrices=False)
    s = torch.linspace(0.5, 1.5, least)
    found = polar(u @ torch.diag(s / s.norm()) @ vh, 10)
    torch.testing.assert_close(found, u @ vh, rtol=0, atol=1e-4)
    s[-1] = 0.005 * s.norm()
    late = torch.linalg.svdvals(polar(u @ torch.diag(s) @ vh, 10))
    assert late[-1] < 0.35 and late[-2] > 0.999


def test_what_has_one_size_of_singular_values_already_stays_in_place():
    layer = nn.Linear(6, 12, bias=False)
    nn.init.orthogonal_(layer.weight, gain=math.sqrt(12 / 6), generator=torch.Generator().manual_seed(0))
    before = layer.weight.detach().clone()
    fired(layer)
    torch.testing.assert_close(layer.weight.detach(), before)


def test_a_collapsed_layer_carries_all_directions_again():
    """Its job: rank 1 and a little noise, and afterwards the singular values are within a factor of two."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    with torch.no_grad():
        layer.weight.copy_(torch.ones(8, 8) + 0.2 * torch.randn(8, 8))
    before = torch.linalg.svdvals(layer.weight)
    fired(layer, rounds=15)
    after = torch.linalg.svdvals(layer.weight)
    assert before[0] / before[-1] > 20 and after[0] / after[-1] < 2


def test_zeros_stay_zeros_and_are_not_divided_by():
    layer = nn.Conv2d(3, 4, 2)
    with torch.no_grad():
        layer.weight[:, :, 0, 0] = 0.0
    fired(layer)
    assert layer.weight.isfinite().all() and not layer.weight[:, :, 0, 0].any() and layer.weight[:, :, 1, 1].any()


def test_half_precision_weights_are_computed_in_single():
    layers = [nn.Linear(40, 40, bias=False) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    half = layers[0].bfloat16()
    layers[1].weight.data = half.weight.data.float()
    for layer in layers:
        fired(layer)
    assert half.weight.dtype == torch.bfloat16
    assert torch.equal(half.weight, layers[1].weight.bfloat16())


def test_matrices_of_one_element_are_left_alone():
    layer = nn.Conv2d(6, 6, 3, groups=6)
    before = layer.weight.detach().clone()
    fired(layer)
    assert torch.equal(layer.weight, before)


def test_queries_and_keys_alone_are_treated_where_only_they_are_named():
    model, _, _ = models.make("transformer")
    before = copy.deepcopy(model)
    fired(model, include=["*.q_proj", "*.k_proj"])
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before.get_parameter(name))}
    assert changed == {"attn.in_proj_weight"}
    for part, old in zip(model.attn.in_proj_weight[:16].chunk(2), before.attn.in_proj_weight[:16].chunk(2)):
        torch.testing.assert_close(part.detach().double(), naive(old.detach()), rtol=1e-5, atol=1e-6)
    assert torch.equal(model.attn.in_proj_weight[16:], before.attn.in_proj_weight[16:])


def test_all_layers_are_treated_but_those_that_are_excluded_and_nothing_else():
    model, _, _ = models.make("resnet")
    before = copy.deepcopy(model)
    fired(model, exclude=["head", "*.shortcut.*"])
    for name, module in before.named_modules():
        now = model.get_submodule(name)
        if isinstance(module, (nn.Conv2d, nn.Linear)) and name != "head" and "shortcut" not in name:
            torch.testing.assert_close(now.weight.detach().double(), expected_weight(module), rtol=1e-5, atol=1e-6)
        else:
            assert same(dict(now.named_parameters(recurse=False)), dict(module.named_parameters(recurse=False)))
    assert same(dict(model.named_buffers()), dict(before.named_buffers()))


@pytest.mark.parametrize("word", ["reset", "keep"])
def test_the_optimizer_begins_anew_or_is_kept(word: str):
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    attached = gxd.attach(model, optimizer, gxd.method("fire", optimizer=word))
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    attached.boundary()
    after = optimizer.state_dict()["state"]
    if word == "keep":
        assert same(after, before)
    else:
        assert len(after) == 6 and not any(value.any() for state in after.values() for value in state.values())
