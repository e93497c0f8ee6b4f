"""Hare and tortoise against two networks in a loop; and the weights that a model is evaluated with."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd
from tests.rig import X, Y, mlp, refused, same, sgd, snapshot

DECAY = 0.8


def attached(every: int | None = 0, decay: float = DECAY) -> tuple[nn.Module, Any, gxd.Attachment]:
    model = mlp(norm=True)
    optimizer = sgd(model)
    return model, optimizer, gxd.attach(model, optimizer, gxd.method("hare_and_tortoise", decay=decay, every=every))


def train(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()


def floats(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


def test_the_tortoise_follows_and_the_hare_goes_back_as_two_networks_in_a_loop_do():
    model, optimizer, attachment = attached(every=3)
    hare = mlp(norm=True)
    tortoise, own = copy.deepcopy(hare), sgd(hare)
    for step in range(8):
        train(model, optimizer)
        train(hare, own)
        with torch.no_grad():
            for name, slow in floats(tortoise).items():
                slow.mul_(DECAY).add_((1 - DECAY) * floats(hare)[name])
            if step % 3 == 2:
                for name, fast in floats(hare).items():
                    fast.copy_(floats(tortoise)[name])
        torch.testing.assert_close(model.state_dict(), hare.state_dict(), rtol=1e-5, atol=1e-6)
        with attachment.evaluating():
            torch.testing.assert_close(floats(model), floats(tortoise), rtol=1e-5, atol=1e-6)


def test_after_a_copy_the_next_step_does_not_move_the_tortoise_as_far_as_the_hare():
    """Public code lets both share memory there."""
    model, optimizer, attachment = attached(decay=0.99)
    for _ in range(3):
        train(model, optimizer)
    attachment.boundary()
    slow = attachment._parts[0].state.own["fc1.weight"].clone()
    assert torch.equal(model.fc1.weight, slow) and model.fc1.weight.data_ptr() != slow.data_ptr()
    train(model, optimizer)
    hare = (model.fc1.weight - slow).abs().max()
    tortoise = (attachment._parts[0].state.own["fc1.weight"] - slow).abs().max()
    assert 0 < tortoise < 0.02 * hare


def test_what_the_optimizer_remembers_is_kept():
    model, optimizer, attachment = attached()
    for _ in range(3):
        train(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    attachment.boundary()
    assert same(optimizer.state_dict(), before)


def test_the_average_of_16_bit_weights_does_not_stand_still():
    """A thousandth of the way is lost to rounding there."""
    model = nn.Linear(4, 3, bias=False).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    attachment = gxd.attach(model, optimizer, gxd.method("hare_and_tortoise", decay=0.999))
    with torch.no_grad():
        model.weight.fill_(1.0)
    for _ in range(3000):
        attachment.stepped()
    attachment.boundary()
    assert model.weight.dtype == torch.bfloat16 and (model.weight - 1).abs().max() < 0.1


def test_slow_weights_see_through_noise():
    """Its job: with large steps on noisy targets, the average is nearer to the solution than where the last step is."""
    torch.manual_seed(0)
    model = nn.Linear(5, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    attachment = gxd.attach(model, optimizer, gxd.method("hare_and_tortoise", decay=0.98, every=None))
    truth, generator, errors = torch.ones(1, 5), torch.Generator().manual_seed(0), []
    for step in range(400):
        x = torch.randn(4, 5, generator=generator)
        optimizer.zero_grad()
        (model(x) - x @ truth.T - torch.randn(4, 1, generator=generator)).square().mean().backward()
        optimizer.step()
        if step >= 300:
            fast = (model.weight - truth).norm().item()
            with attachment.evaluating():
                errors.append(((model.weight - truth).norm().item(), fast))
    slow, fast = (sum(column) / len(column) for column in zip(*errors))
    assert slow < 0.5 * fast


# ---- buffers


class Causal(nn.Module):
    """Attention with a mask that is infinite, a cache that grows, and a mean of its own; and a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.norm, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(len(X)))
        self.register_buffer("cache", torch.zeros(0), persistent=False)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if len(self.cache) < len(x):
            self.cache = torch.ones(len(x), 1)
        if self.training:
            self.mean.lerp_(x.mean(0), 0.1)
        q = self.norm(self.q(x - self.mean)) * self.cache[: len(x)]
        return self.head((q @ q.T + self.mask).softmax(-1) @ q)


OWN = ("mask", "cache", "mean")


def causal(every: int | None = 0) -> tuple[Any, Any, gxd.Attachment]:
    model = Causal()
    optimizer = sgd(model)
    return model, optimizer, gxd.attach(model, optimizer, gxd.method("hare_and_tortoise", decay=DECAY, every=every))


def own(model: nn.Module) -> list[Tensor]:
    """The buffers that are the model's own."""
    return [getattr(model, name).clone() for name in OWN]


def test_buffers_that_are_no_statistics_of_norms_are_the_models_own():
    """The average of minus infinity would be NaN, and one of a cache that grows has no size."""
    (model, optimizer, attachment), other = causal(), Causal()
    plainly = sgd(other)
    for _ in range(4):
        train(model, optimizer)
        train(other, plainly)
        with attachment.evaluating():
            assert same(own(model), own(other))
            assert model.eval()(X).isfinite().all()
        model.train()
    attachment.boundary()
    assert same(own(model), own(other)) and model(X).isfinite().all()
    assert not torch.equal(model.norm.running_mean, other.norm.running_mean)


def test_running_statistics_of_norms_are_averaged():
    model, optimizer, attachment = causal()
    slow = {name: model.get_buffer(f"norm.{name}").clone() for name in ("running_mean", "running_var")}
    for _ in range(3):
        train(model, optimizer)
        for name, value in slow.items():
            value.mul_(DECAY).add_((1 - DECAY) * model.get_buffer(f"norm.{name}"))
    with attachment.evaluating():
        for name, value in slow.items():
            torch.testing.assert_close(model.get_buffer(f"norm.{name}"), value)


def test_a_checkpoint_of_a_model_whose_cache_has_grown_is_loaded_into_one_that_has_none():
    model, optimizer, attachment = causal()
    for _ in range(3):
        train(model, optimizer)
    fresh, _, resumed = causal()
    resumed.load_state_dict(attachment.state_dict())
    assert same(resumed.state_dict(), attachment.state_dict())
    assert len(model.cache) == len(X) and len(fresh.cache) == 0


# ---- evaluating()


def test_evaluating_leaves_training_bit_for_bit_as_without_it():
    found = []
    for evaluates in (True, False):
        model, optimizer, attachment = attached(every=3)
        for _ in range(7):
            if evaluates:
                before = snapshot(model, optimizer)
                with attachment.evaluating(), torch.no_grad():
                    model.eval()(X)
                    model.train()(X)  # which counts batches, and moves statistics
                assert same(snapshot(model, optimizer), before)
            train(model, optimizer)
        found.append((snapshot(model, optimizer), attachment.state_dict()))
    assert same(*found)


def test_an_exception_within_evaluating_puts_the_weights_back():
    model, optimizer, attachment = attached()
    train(model, optimizer)
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match="mine"), attachment.evaluating():
        assert not torch.equal(model.fc1.weight, before[0]["fc1.weight"])
        raise RuntimeError("mine")
    assert same(snapshot(model, optimizer), before)
    train(model, optimizer)  # and it may step again


def test_evaluating_twice_is_evaluating_once():
    model, optimizer, attachment = attached()
    train(model, optimizer)
    before = snapshot(model, optimizer)
    with attachment.evaluating():
        slow = snapshot(model, optimizer)
        with attachment.evaluating():
            assert same(snapshot(model, optimizer), slow)
        assert same(snapshot(model, optimizer), slow) and not same(slow, before)
    assert same(snapshot(model, optimizer), before)


def test_a_backward_pass_may_wait_while_the_model_is_evaluated():
    gradients = []
    for evaluates in (True, False):
        model, optimizer, attachment = attached()
        train(model, optimizer)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        if evaluates:
            with attachment.evaluating(), torch.no_grad():
                model(X + 1)
        loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert same(*gradients)


def test_evaluating_within_autocast_does_not_see_weights_that_were_cast_before():
    model, optimizer, attachment = attached()
    for _ in range(5):
        train(model, optimizer)
    model.eval()

    def logits(slow: bool) -> Tensor:
        with attachment.evaluating() if slow else nullcontext():
            return model(X)

    def autocast() -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    with torch.no_grad():
        expected = []
        for slow in (False, True):
            with autocast():
                expected.append(logits(slow))
        with autocast():
            found = [logits(False), logits(True), logits(False)]
    assert not torch.equal(*expected)
    assert all(map(torch.equal, found, [expected[0], expected[1], expected[0]]))


def test_training_within_evaluating_is_refused():
    model, optimizer, attachment = attached()
    train(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    state = attachment.state_dict()
    for call, word in (
        (optimizer.step, "optimizer.step()"),
        (attachment.boundary, "boundary()"),
        (lambda: attachment.load_state_dict(state), "load_state_dict()"),
        (lambda: copy.deepcopy((model, optimizer, attachment)), "copy.deepcopy()"),
    ):
        with attachment.evaluating():
            refused(call, RuntimeError, (f"{word} within evaluating()", "Leave it first"))
    assert same(model.state_dict(), before)
    assert same(attachment.state_dict(), state)


def test_evaluating_changes_nothing_where_no_method_has_weights_for_it_and_is_not_observed():
    model = mlp()
    optimizer = sgd(model)
    attachment = gxd.attach(model, optimizer, gxd.method("redo", every=1), example_inputs=X)
    version = model.fc1.weight._version
    with attachment.evaluating():
        assert not attachment.watched()
        model(X + 1)
    assert attachment.watched() and model.fc1.weight._version == version
    assert not attachment._parts[0].scorer.observer.passes
