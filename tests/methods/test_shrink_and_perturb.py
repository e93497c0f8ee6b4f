"""Shrink and perturb against loops over parameters, in each of its published forms."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import gxd
from gxd.methods.shrink_and_perturb import VARIANTS
from gxd.testing import LAWS, case_of
from tests.methods.naive import Net, attached, lr_of, step
from tests.rig import same

# variant: what remains, the noise and its scale, when, decay with the learning rate, new optimizer, new buffers
PUBLISHED: dict[str, tuple[float, str, float, str, float, bool, bool]] = {
    "ash_adams": (0.4, "fresh", 0.1, "boundary", 0.0, True, True),
    "lop": (1.0, "gaussian", 1e-5, "step", 1e-4, False, False),
    "kumar": (1 - 1e-3, "fresh", 1e-2, "step", 0.0, False, False),
    "swr": (1 - 1e-4, "gaussian", 1e-7**0.5, "step", 0.0, False, False),
    "initial": (0.2, "initial", 0.8, "boundary", 0.0, True, False),
    "soft": (1 - 1e-6, "fresh", 1e-6, "step", 0.0, False, False),
}
BOUNDS = {"conv.weight": 18**-0.5, "fc.weight": 16**-0.5, "fc.bias": 16**-0.5, "head.weight": 6**-0.5}
BOUNDS["head.bias"] = 6**-0.5


def test_all_variants_are_tested():
    assert set(PUBLISHED) == set(VARIANTS)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("variant", list(PUBLISHED))
def test_a_variant_does_what_was_published_and_when(variant: str, optimizer: str):
    """What is left when the shrunken old value is taken away is the noise, and that is looked at."""
    retain, noise, scale, when, decay, anew, buffers = PUBLISHED[variant]
    model, made, attachment = attached("shrink_and_perturb", optimizer, variant=variant)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    plain = copy.deepcopy((model, made))
    draws: dict[str, list[torch.Tensor]] = {name: [] for name in start}
    for number in range(4):
        plain[0].load_state_dict(model.state_dict())
        plain[1].load_state_dict(copy.deepcopy(made.state_dict()))
        step(model, made)
        step(*plain)
        if when == "boundary":
            assert same((model.state_dict(), made.state_dict()), (plain[0].state_dict(), plain[1].state_dict()))
            attachment.boundary()
        expected = dict(plain[0].named_parameters())
        for name, p in model.named_parameters():
            kept = (retain - lr_of(made, p) * decay) * expected[name].detach()
            draws[name].append((p.detach() - kept) / scale)
        memory = made.state_dict()["state"][0]
        fresh_memory = not any(value.any() for value in memory.values())
        assert fresh_memory == anew
        assert (model.bn.running_mean == 0).all() == (model.bn.num_batches_tracked == 0) == buffers
        assert not buffers or (model.bn.running_var == 1).all()
        if when == "step":
            assert model.bn.num_batches_tracked == number + 1
            before = copy.deepcopy(model.state_dict())
            attachment.boundary()
            assert same(model.state_dict(), before)
    for name, seen in draws.items():
        values = torch.cat([draw.flatten() for draw in seen])
        # The noise is what is left of a difference: of few digits where its scale is small.
        digits = 1e-14 / scale
        if noise == "initial":
            torch.testing.assert_close(values, start[name].flatten().repeat(4), rtol=0, atol=1e-6)
        elif noise == "fresh" and name in BOUNDS:
            assert values.abs().max() <= BOUNDS[name] + 1e-6 + digits and len(values.unique()) > 1
            assert values.abs().max() > 0.5 * BOUNDS[name]
        elif noise == "fresh":  # a new norm has gains of 1 and shifts of 0
            torch.testing.assert_close(values, torch.full_like(values, float("weight" in name)), rtol=0, atol=1e-6)
        else:
            assert abs(values.mean()) < 5 / math.sqrt(len(values)) and values.abs().max() < 6
            assert len(values) < 100 or 0.8 < values.std() < 1.2


def test_noise_is_never_drawn_twice_and_is_the_same_for_the_same_seed():
    ends = []
    for seed in (0, 0, 1):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        method = gxd.method("shrink_and_perturb", variant="kumar", retain=0.0, scale=1.0)
        gxd.attach(model, optimizer, method, seed=seed)
        for _ in range(2):
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
            ends.append(model.fc.weight.detach().clone())
    same_seed, draws = (
        [torch.equal(a, b) for a, b in zip(ends[:2], ends[2:4], strict=True)],
        {e.sum().item() for e in ends},
    )
    assert all(same_seed) and len(draws) == 4


def test_an_explicit_option_takes_the_place_of_the_variants():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    method = gxd.method("shrink_and_perturb", variant="initial", retain=0.5, scale=0.0, every=2, optimizer="keep")
    attachment = gxd.attach(model, optimizer, method)
    step(model, optimizer)
    for number in range(2, 5):
        plain = copy.deepcopy((model, optimizer))
        step(model, optimizer)
        step(*plain)
        attachment.boundary()
        assert same(optimizer.state_dict(), plain[1].state_dict())
        assert torch.equal(model.fc.weight, plain[0].fc.weight * (0.5 if number % 2 == 0 else 1.0))


def test_what_is_not_trained_or_is_excluded_is_left_alone():
    model, _, attachment = attached("shrink_and_perturb", "sgd", exclude=["head", "ln"])
    model.conv.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    attachment.boundary()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"bn.weight", "fc.weight", "fc.bias"}  # zero shifts, and buffers that are still new, stay


def test_an_optimizer_that_is_not_understood_is_refused_before_anything_is_written():
    model, made, attachment = attached("shrink_and_perturb", "adam")
    step(model, made)
    before = copy.deepcopy((model.state_dict(), made.state_dict()))
    state = made.state[model.head.bias]
    state["strange"] = torch.zeros(3)  # not known, so that it cannot be reset
    with pytest.raises(gxd.PlanError, match="strange"):
        attachment.boundary()
    del state["strange"]
    assert same((model.state_dict(), made.state_dict()), before)


@pytest.mark.parametrize("variant", ["lop", "kumar", "initial"])
def test_the_laws_hold_for_other_variants_too(variant: str):
    case = case_of("shrink_and_perturb", f"shrink_and_perturb {variant}", variant=variant)
    for law in LAWS:
        if law.__name__ != "another_method_that_is_inert_changes_nothing":  # the longest, and nothing of the variant's
            law(case)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"variant": "ash"}, "variant='ash' is not one of 'ash_adams'"),
        ({"variant": "kummar"}, "Did you mean 'kumar'"),
        ({"retain": 1.1}, "retain=1.1 must be a number, from 0 to 1"),
        ({"scale": -1.0}, "scale=-1.0 must be a number, 0 or more"),
        ({"noise": "gausian"}, "noise='gausian' is not one of .* Did you mean 'gaussian'"),
        ({"every": "boundary"}, "every='boundary' must be a whole number of steps, 0 or more"),
        ({"every": -1}, "every=-1 must be a whole number of steps, 0 or more"),
        ({"optimizer": "new"}, "optimizer='new' is not one of 'keep', 'reset'"),
        ({"buffers": "resett"}, "buffers='resett' .* Did you mean 'reset'"),
        ({"every": 1}, "optimizer='reset' contradicts every=1"),
        ({"variant": "soft", "buffers": "reset"}, "buffers='reset' contradicts every=1"),
        ({"decay": 0.1}, "decay=0.1 is per step, and contradicts every=0"),
    ],
)
def test_a_wrong_option_or_a_contradiction_is_refused_with_its_value(options: dict[str, Any], word: str):
    with pytest.raises(ValueError, match=word):
        gxd.method("shrink_and_perturb", **options)


def test_a_parameter_of_one_value_throughout_is_shrunk_towards_that_value():
    """As zero biases are: nothing random is added to what was never random."""
    model = nn.Linear(4, 3)
    nn.init.zeros_(model.bias)
    attachment = gxd.attach(model, torch.optim.SGD(model.parameters(), 0.1), gxd.method("shrink_and_perturb"))
    model.bias.data.fill_(1.0)
    attachment.boundary()
    torch.testing.assert_close(model.bias.detach(), torch.full((3,), 0.4))
