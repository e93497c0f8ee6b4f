"""Normalize-and-Project against loops over parameters."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd
from tests.methods.naive import OPTIMIZERS, Net, X, Y, attached, groups, lr_of, step
from tests.rig import same

WEIGHTS = ("conv.weight", "fc.weight", "head.weight")
NORMS = ("bn", "ln")


def length(*tensors: Tensor) -> float:
    return math.sqrt(sum(entry**2 for tensor in tensors for entry in tensor.flatten().tolist()))


def scattered(model: Net) -> None:
    """Gains and shifts that are not 1 and 0."""
    with torch.no_grad():
        for norm in (model.bn, model.ln):
            norm.weight += torch.linspace(-0.5, 0.8, len(norm.weight))
            norm.bias += torch.linspace(1.0, -0.3, len(norm.bias))


@pytest.mark.parametrize("affine", ["decay", "project", "keep"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("every", [1, 2])
def test_parameters_go_where_the_equations_say(every: int, optimizer: str, affine: str):
    strength = 0.5 if affine == "decay" else 1e-2
    model, made, _ = attached("nap", optimizer, scattered, every=every, affine=affine, strength=strength)
    other = Net().double()
    scattered(other)
    alone = OPTIMIZERS[optimizer](groups(other))
    named = dict(other.named_parameters())
    start = {name: length(named[name]) for name in WEIGHTS}
    for number in range(1, 6):
        step(model, made)
        step(other, alone)
        with torch.no_grad():
            for name in WEIGHTS if number % every == 0 else ():
                named[name] *= start[name] / length(named[name])
            for name in NORMS if number % every == 0 else ():
                gain, shift = named[f"{name}.weight"], named[f"{name}.bias"]
                if affine == "decay":
                    gain -= lr_of(alone, gain) * strength * (gain - 1)
                    shift -= lr_of(alone, shift) * strength * shift
                elif affine == "project":
                    factor = math.sqrt(len(gain)) / length(gain, shift)
                    gain *= factor
                    shift *= factor
        torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-9, atol=1e-9)


def test_weights_keep_their_length_while_they_would_grow():
    """Under norms, a gradient is orthogonal to its weight, so that every step of SGD makes it longer."""
    lengths = {}
    for name in ("nap", "none"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        if name == "nap":
            gxd.attach(model, optimizer, gxd.method("nap"))
        before = model[0].weight.norm().item()
        for _ in range(100):
            optimizer.zero_grad()
            F.cross_entropy(model(X.flatten(1)[:, :8]), Y).backward()
            optimizer.step()
        lengths[name] = model[0].weight.norm().item() / before
    assert abs(lengths["nap"] - 1) < 1e-5 and lengths["none"] > 1.05


def test_the_projection_leaves_the_function_as_it_is_where_a_norm_follows():
    """Weights by their norms; gains and shifts by the homogeneity of ReLU, but for the scale of what comes out."""
    torch.manual_seed(0)
    layers = nn.Linear(8, 16, bias=False), nn.LayerNorm(16, eps=0.0), nn.ReLU()
    model = nn.Sequential(*layers, nn.Linear(16, 12, bias=False), nn.LayerNorm(12, eps=0.0), nn.Linear(12, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gxd.attach(model, optimizer, gxd.method("nap", affine="project", exclude=["head", "4"]))
    with torch.no_grad():
        for p in model[:4].parameters():
            p.mul_(3.0).add_(0.1)
        before = model(X.double().flatten(1)[:, :8])
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        torch.testing.assert_close(model(X.double().flatten(1)[:, :8]), before)
    torch.testing.assert_close(length(model[1].weight, model[1].bias), 4.0)  # sqrt(16), not sqrt(2)


def test_a_model_without_norms_is_refused_with_the_reason_and_left_as_it_was():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with pytest.raises(gxd.PlanError, match=r"nap: Sequential has no normalisation .* Put a LayerNorm"):
        gxd.attach(model, optimizer, gxd.method("nap"))
    assert same(model.state_dict(), before) and not optimizer._optimizer_step_post_hooks


def test_zeros_stay_zeros_and_a_norm_without_shift_is_projected_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4), nn.ReLU(), nn.Linear(4, 2))
    nn.init.zeros_(model[3].weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gxd.attach(model, optimizer, gxd.method("nap", affine="project"))
    model[1].weight.data.fill_(3.0)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert not model[3].weight.any()
    torch.testing.assert_close(model[1].weight, torch.ones(4), check_dtype=False)


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"every": -1}, ValueError, "every=-1 must be a whole number of steps, 0 or more"),
        ({"affine": "keep", "strength": 0.1}, ValueError, "strength=0.1 .* no effect with affine='keep'"),
        ({"affine": "projekt"}, ValueError, "affine='projekt' is not one of .* Did you mean 'project'"),
        ({"strength": -1.0}, ValueError, "strength=-1.0"),
        ({"exclude": {}}, TypeError, "exclude={} must be a name"),
    ],
)
def test_a_wrong_option_is_refused_with_its_value(options: dict[str, Any], error: Any, word: str):
    with pytest.raises(error, match=word):
        gxd.method("nap", **options)
