"""Which backward passes a utility of the loss learns from: those whose gradients the optimizer uses."""

import copy
import warnings
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gxd

X = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
OTHER = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
Y = torch.arange(8) % 3


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def attached(model, utility="gxd_loss", **options):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    method = gxd.UnitReset(utility, gxd.LowestRate(0.0))
    return optimizer, gxd.attach(model, optimizer, method, example_inputs=X[:2], **options)


def plain_step(model, optimizer, x=X, y=Y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def seen(resets):
    """All that is known of the units."""
    return {**resets.utilities(), **{f"r {name}": r for name, r in resets.references().items()}}


def assert_seen_alike(one, other):
    torch.testing.assert_close(seen(one), seen(other))


@pytest.fixture
def alone():
    """After one plain step."""
    model = network()
    optimizer, resets = attached(model)
    plain_step(model, optimizer)
    return resets


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_loss_whose_gradients_are_zeroed_before_the_step_does_not_count(alone, set_to_none):
    model = network()
    optimizer, resets = attached(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    model(OTHER).square().sum().backward()  # an actor's loss, through its critic
    optimizer.zero_grad(set_to_none=set_to_none)
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    assert_seen_alike(resets, alone)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_pass_may_come_before_zero_grad(alone, set_to_none):
    model = network()
    optimizer, resets = attached(model)
    model(OTHER).square().sum().backward()
    loss = F.cross_entropy(model(X), Y)
    optimizer.zero_grad(set_to_none=set_to_none)
    loss.backward()
    optimizer.step()
    assert_seen_alike(resets, alone)


def test_a_frozen_network_learns_nothing_from_the_loss_of_another(alone):
    model = network()
    optimizer, resets = attached(model)
    model.requires_grad_(False)
    model(OTHER.clone().requires_grad_()).square().sum().backward()
    model.requires_grad_(True)
    plain_step(model, optimizer)
    assert_seen_alike(resets, alone)


def test_gradients_that_autograd_grad_takes_are_not_the_losses(alone):
    model = network()
    optimizer, resets = attached(model)
    inputs = OTHER.clone().requires_grad_()
    torch.autograd.grad(model(inputs).sum(), inputs)  # as in a gradient penalty, or for saliency
    plain_step(model, optimizer)
    assert_seen_alike(resets, alone)


@pytest.mark.parametrize("written", [None, lambda p: p.grad.mul_(0.5)])
def test_passes_whose_gradients_are_accumulated_all_count(written):
    whole, parts = network(), network()
    optimizer, expected = attached(whole)
    plain_step(whole, optimizer)
    optimizer, resets = attached(parts)
    for rows in (slice(0, 4), slice(4, 8)):
        (F.cross_entropy(parts(X[rows]), Y[rows]) / 2).backward()
        for parameter in parts.parameters() if written else ():
            written(parameter)  # as when each micro-batch is clipped: nothing is zeroed
    optimizer.step()
    torch.testing.assert_close(resets.references(), expected.references())


def test_two_losses_with_a_backward_pass_each_count_as_their_sum():
    together, apart = network(), network()
    optimizer, expected = attached(together)
    out = together(X)
    (F.cross_entropy(out, Y) + out.square().mean()).backward()
    optimizer.step()
    optimizer, resets = attached(apart)
    out = apart(X)
    F.cross_entropy(out, Y).backward(retain_graph=True)
    out.square().mean().backward()
    optimizer.step()
    assert_seen_alike(resets, expected)


def test_what_the_first_of_two_optimizers_has_used_counts_though_it_is_zeroed_before_the_second_steps():
    model = nn.ModuleDict({"policy": network(), "value": network()})
    model.forward = lambda x: (model["policy"](x), model["value"](x))
    optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in model.values()]
    method = gxd.UnitReset("gxd_loss", gxd.LowestRate(0.0))
    resets = gxd.attach(model, optimizers, method, example_inputs=X[:2])
    for part, optimizer in zip(model.values(), optimizers):
        model.zero_grad()
        F.cross_entropy(part(X), Y).backward()
        optimizer.step()
    assert all(bool((utility > 0).any()) for utility in resets.utilities().values())


def test_a_batch_that_the_scaler_skips_does_not_count(alone):
    model = network()
    optimizer, resets = attached(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for x in (X * float("inf"), X):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), Y)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert resets.nonfinite_observations == 0
    assert_seen_alike(resets, alone)


# --- scale


def trained(scale, steps=30, micro=1):
    """Utilities and resets of a network whose loss is multiplied by ``scale(step)``, in so many micro-batches."""
    model = network().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)  # or the weights would differ
    method = gxd.method("gxd", replacement_rate=0.05, maturity=3, decay=0.9)
    resets = gxd.attach(model, optimizer, method, example_inputs=X[:2].double())
    chosen = []
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.roll(X, step, 0).double() + 0.1 * step
        for rows in torch.arange(8).chunk(micro):
            (F.cross_entropy(model(x[rows]), Y[rows], reduction="sum") * scale(step)).backward()
        optimizer.step()
        chosen.append({name: units.tolist() for name, units in resets.last_resets.items()})
    return resets, chosen


@pytest.mark.parametrize(
    "scale",
    [
        lambda step: 1 / 8,
        lambda step: 65536.0,
        lambda step: 2.0 ** (step // 3),
        lambda step: 10.0 ** (-step / 5),
        lambda step: -1.0,
    ],
    ids=["mean", "scaler", "a scaler that grows", "a loss that falls by six orders of magnitude", "ascent"],
)
def test_utilities_and_resets_do_not_depend_on_the_scale_of_the_loss(scale):
    (one, chosen), (other, expected) = trained(scale), trained(lambda step: 1.0)
    assert chosen == expected
    assert any(chosen)
    torch.testing.assert_close(one.utilities(), other.utilities())


def test_utilities_and_resets_do_not_depend_on_the_number_of_micro_batches():
    """The reference includes the batch, so the first micro-batches see a slightly older one: nearly equal."""
    (one, _), (other, _) = trained(lambda step: 1.0, 12, micro=4), trained(lambda step: 1.0, 12)
    for name, utility in one.utilities().items():
        torch.testing.assert_close(utility, other.utilities()[name], rtol=0.1, atol=0.05)


def test_the_utilities_of_a_layer_are_shares_of_it():
    model = network()
    optimizer, resets = attached(model)
    for _ in range(5):
        plain_step(model, optimizer)
    for utility in resets.utilities().values():
        torch.testing.assert_close(utility.mean(), torch.tensor(1.0))


def test_a_step_without_any_gradient_says_nothing():
    model = network()
    optimizer, resets = attached(model)
    plain_step(model, optimizer)
    before = resets.utilities()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.zero_grad()
        F.cross_entropy(model(OTHER), torch.full((8,), -100), reduction="sum").backward()  # all examples are masked
        optimizer.step()
    torch.testing.assert_close(resets.utilities(), before)


# --- mistakes


def test_a_loop_that_trains_with_autograd_grad_is_told_what_to_do():
    model = network()
    optimizer, _ = attached(model)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(F.cross_entropy(model(X), Y), parameters)
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient
    with pytest.raises(gxd.ObservationError, match=r"autograd\.grad.*Call loss\.backward\(\)"):
        optimizer.step()


def test_a_loss_that_never_reaches_the_model_is_told_what_to_do():
    model = network()
    optimizer, _ = attached(model)
    free = torch.zeros(3, requires_grad=True)
    with torch.no_grad():
        out = model(X)
    F.cross_entropy(out + free, Y).backward()
    with pytest.raises(gxd.ObservationError, match=r"without a training forward pass.*model\.train\(\)"):
        optimizer.step()


def by_hand(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def after_a_pass(model):
    model(X)
    by_hand(model)


def without_gradients(model):
    with torch.no_grad():
        after_a_pass(model)


def in_inference_mode(model):
    with torch.inference_mode():
        model(X)
    by_hand(model)


def in_evaluation_mode(model):
    F.cross_entropy(model.eval()(X), Y).backward()
    model.train()


def by_torch_func(model):
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    call = torch.func.functional_call
    gradients = torch.func.grad(lambda given: F.cross_entropy(call(model, given, (X,)), Y))(parameters)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]


def of_a_copy(model):
    copied = copy.deepcopy(model)
    F.cross_entropy(copied(X), Y).backward()
    for parameter, other in zip(model.parameters(), copied.parameters()):
        parameter.grad = other.grad


def of_the_weights_alone(model):
    sum(p.square().sum() for p in model.parameters()).backward()


def of_a_branch_that_is_cut_off(model):
    (model(X).detach() * model[4].bias).sum().backward()


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (by_hand, "call the model"),
        (after_a_pass, r"Call loss\.backward\(\)"),
        (without_gradients, r"with gradients enabled.*torch\.no_grad\(\)"),
        (in_inference_mode, "with gradients enabled"),
        (in_evaluation_mode, r"call model\.train\(\)"),
        (by_torch_func, r"torch\.func"),
        (of_a_copy, "not a copy of it"),
        (of_the_weights_alone, "call the model that gxd is attached to"),
        (of_a_branch_that_is_cut_off, r"Call loss\.backward\(\)"),
    ],
)
def test_gradients_that_are_made_in_another_way_are_told_with_the_remedy_and_the_next_step_is_as_ever(
    make, remedy, alone
):
    model = network()
    optimizer, resets = attached(model)
    before = copy.deepcopy(model.state_dict())
    make(model)
    with pytest.raises(gxd.ObservationError, match=remedy):
        optimizer.step()
    model.load_state_dict(before)
    plain_step(model, optimizer)
    assert_seen_alike(resets, alone)


# --- layers without any score


def resets_of(model, steps=30, loss=lambda out: F.cross_entropy(out, Y)):
    """Group -> how many units were reset."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    resets = gxd.attach(model, optimizer, gxd.method("gxd", replacement_rate=0.1, maturity=2), example_inputs=X[:2])
    counts = Counter()
    resets.on_reset(lambda units: counts.update({name: len(index) for name, index in units.items()}))
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(X)).backward()
        optimizer.step()
    return counts


@pytest.mark.parametrize("dead", [0, 2])
def test_a_layer_that_was_dead_when_gxd_was_attached_comes_to_life(dead):
    model = network()
    model[1], model[3] = nn.ReLU(), nn.ReLU()
    with torch.no_grad():
        model[dead].bias.fill_(-100.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gxd.ObservationWarning)  # the layer before it has no gradient at first
        assert resets_of(model)[str(dead)] > 3
    assert model[: dead + 2](X).any()


def test_a_layer_whose_gradients_are_all_zero_is_left_alone_with_a_warning():
    """The loss of another task, by a mask: its units may be needed again."""
    model = network()
    with pytest.warns(gxd.ObservationWarning, match="gradients that are all 0"):
        assert not resets_of(model, loss=lambda out: out.sum() * 0)


def test_observe_does_no_harm(alone):
    model = network()
    optimizer, resets = attached(model)
    optimizer.zero_grad()
    logits = model(X)
    resets.observe(logits, Y)
    F.cross_entropy(logits, Y).backward()
    optimizer.step()
    assert_seen_alike(resets, alone)
