"""Compiled code is used only if it gives the numbers of its graph."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import gxd
from gxd.compile.check import Check


def step(weight, x):
    """Writes to an argument, and returns something."""
    loss = (x @ weight).square().mean()
    weight.sub_(0.1 * x.t() @ (x @ weight))
    return [loss]


def arguments(kind=torch.float):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 6, generator=generator).to(kind), torch.randn(16, 8, generator=generator).to(kind)]


def check(function=step, example=None):
    example = example or arguments()
    return Check(make_fx(function, tracing_mode="fake")(*example), example)


@pytest.mark.parametrize("kind", [torch.float, torch.double, torch.bfloat16, torch.half])
def test_the_same_in_another_order_of_sums_agrees(kind):
    def backwards(weight, x):
        wide = weight.double()
        (loss,) = step(wide, x.flip(0).double())
        weight.copy_(wide)
        return [loss.to(kind)]

    example = arguments(kind)
    held = [tensor.clone() for tensor in example]
    assert check(example=example).agrees(backwards)
    assert all(torch.equal(a, b) for a, b in zip(example, held))  # not written to


@pytest.mark.parametrize("share", [0.01, 1.0, torch.nan])
def test_an_update_or_a_result_that_is_off_does_not(share):
    def one_weight(weight, x):
        before = weight.clone()
        result = step(weight, x)
        weight[2, 3] += share * (weight - before).abs().max()
        return result

    def the_loss(weight, x):
        return [step(weight, x)[0] * (1 + share)]

    checked = check()
    assert checked.agrees(step) and not checked.agrees(one_weight) and not checked.agrees(the_loss)


def test_complex_numbers_are_compared():
    def descend(weight, x):
        weight.sub_(0.1 * x.conj().t() @ (x @ weight))
        return [x @ weight]

    def one_weight(weight, x):
        before = weight.clone()
        result = descend(weight, x)
        weight[2, 3] += 0.01j * (weight - before).abs().max()
        return result

    def the_result(weight, x):
        return [1.01 * descend(weight, x)[0]]

    def backwards(weight, x):
        wide = weight.to(torch.cdouble)
        (result,) = descend(wide, x.to(torch.cdouble))
        weight.copy_(wide)
        return [result.to(torch.cfloat)]

    checked = check(descend, arguments(torch.cfloat))
    assert checked.agrees(descend) and checked.agrees(backwards)
    assert not checked.agrees(one_weight) and not checked.agrees(the_result)


def test_an_argument_that_is_not_to_be_written_to_does_not():
    def writes(weight, x):
        result = step(weight, x)
        x[0, 0] += 1e-3
        return result

    assert not check().agrees(writes)


def test_a_number_that_rounding_decides_is_not_judged():
    def as_adam(x):
        gradient = x.sum(0) - x.flip(0).sum(0)  # zero, but for rounding
        return [gradient / (gradient.abs() + 1e-12), x.mean()]

    def in_double(x):
        return [value.float() for value in as_adam(x.double())]

    example = [1e3 + torch.randn(1000, 8, generator=torch.Generator().manual_seed(1))]
    checked = check(as_adam, example)
    assert checked.agrees(in_double)
    assert not checked.agrees(lambda x: [as_adam(x)[0], x.mean() + 1])  # the other result is


@pytest.mark.parametrize("kind", [torch.float, torch.bfloat16])
def test_an_update_within_the_last_digit_of_a_weight_is_rounding(kind):
    """The bias of a layer before a norm has a gradient that is zero but for rounding, and SGD moves it by nothing."""

    def still(weight, x):
        weight.sub_(1e-12 * x.sum())
        return [x.mean()]

    def one_digit(weight, x):
        result = still(weight, x)
        weight[2, 3] = torch.nextafter(weight[2, 3], torch.tensor(9.0, dtype=kind))
        return result

    def moved(weight, x):
        result = still(weight, x)
        weight[2, 3] += 100 * torch.finfo(kind).eps
        return result

    checked = check(still, arguments(kind))
    assert checked.agrees(one_digit) and not checked.agrees(moved)


@pytest.mark.parametrize("rest", [lambda x: x[:, :5], lambda x: x[:1].expand(7, 8), lambda x: x.t()[::2]])
def test_arguments_are_given_with_their_own_strides(rest):
    tensor = rest(arguments()[1])
    seen = []

    def note(x):
        seen.append((x.stride(), x.tolist()))
        return [x.sum()]

    checked = check(lambda x: [x.sum()], [tensor])
    assert checked.agrees(note) and seen == [(tensor.stride(), tensor.tolist())]
    assert not checked.agrees(lambda x: [x.sum() + 1])  # nudged, they are, too


def test_whole_numbers_are_compared():
    def count(steps, x):
        steps.add_(1)
        return [x.argmax()]

    checked = check(count, [torch.tensor([7, 9]), torch.arange(5.0)])
    assert checked.agrees(count)
    assert not checked.agrees(lambda steps, x: [x.argmax()])
    assert not checked.agrees(lambda steps, x: [count(steps, x)[0] - 1])


def test_the_run_that_measures_rounding_is_made_only_in_doubt():
    checked = check()
    assert checked.agrees(step) and "allowed" not in vars(checked)
    assert not checked.agrees(lambda weight, x: [step(weight, x)[0] * 2]) and "allowed" in vars(checked)


def test_what_is_left_of_terms_that_cancel_is_as_uncertain_as_they_are():
    """In a large network some gradients are nearly zero, and Adam divides them by themselves."""
    terms = torch.randint(-10_000, 10_000, (64, 4096), generator=torch.Generator().manual_seed(2))
    terms[1:, 0] += 7 - terms[1:].sum(1)  # of whole numbers, so that a nudge is of all of them alike
    terms[0].abs_()  # not all sums are small
    example = [terms, torch.tensor([0.1])]

    def as_adam(terms, scale):
        gradient = (terms * scale).sum(1)
        return [gradient / (gradient.abs() + 1), (terms * scale).abs().sum(1)]

    def one_by_one(terms, scale):
        return [
            (terms * scale).cumsum(1)[:, -1] / ((terms * scale).cumsum(1)[:, -1].abs() + 1),
            as_adam(terms, scale)[1],
        ]

    checked = check(as_adam, example)
    assert not torch.allclose(as_adam(*example)[0], one_by_one(*example)[0], rtol=1e-3)
    assert checked.agrees(one_by_one)
    assert not checked.agrees(lambda *given: [one_by_one(*given)[0], 1.01 * as_adam(*given)[1]])


def test_what_is_not_finite_in_the_graph_is_not_judged():
    def logarithm(x):
        return [x.log()]

    assert check(logarithm, [torch.tensor([0.0, 1.0, -1.0])]).agrees(lambda x: [torch.tensor([1.0, 0.0, 5.0])])


def test_a_graph_that_draws_random_numbers_is_run_but_not_compared_and_generators_are_left_as_they_were():
    generator = torch.Generator().manual_seed(3)

    def noisy(x):
        return [x + torch.randn_like(x), torch.rand(4, generator=generator)]

    state, default = generator.get_state(), torch.get_rng_state()
    checked = check(noisy, [torch.ones(4)])
    assert checked.agrees(lambda x: noisy(x.flip(0)))
    assert torch.equal(generator.get_state(), state) and torch.equal(torch.get_rng_state(), default)
    with pytest.raises(ZeroDivisionError):
        checked.agrees(lambda x: 1 / 0)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_draws_random_numbers_only_with_dropout(dropout):
    def attention(x):
        return [F.scaled_dot_product_attention(x, x, x, dropout_p=dropout)]

    checked = check(attention, [torch.randn(2, 2, 5, 8, generator=torch.Generator().manual_seed(0))])
    assert checked.random == (dropout > 0)
    assert checked.agrees(lambda x: [x]) == (dropout > 0)


def test_a_small_learning_rate_hides_nothing():
    def slow(weight, x):
        weight.sub_(1e-6 * x.t() @ (x @ weight))
        return []

    def slower(weight, x):
        weight.sub_(0.5e-6 * x.t() @ (x @ weight))
        return []

    assert check(slow).agrees(slow) and not check(slow).agrees(slower)


def test_autocast_around_a_step_that_has_its_casts_in_the_graph_changes_nothing():
    with torch.autocast("cpu", torch.bfloat16):
        assert check().agrees(step)


@pytest.mark.parametrize("errs", ["with the rewrites", "always"])
def test_a_compiler_that_errs_is_not_believed(monkeypatch, errs):
    def compile_wrongly(graph, example, options):
        if errs == "with the rewrites" and "post_grad_custom_post_pass" not in options:
            return graph

        def wrong(*tensors):
            results = graph(*tensors)
            tensors[1].mul_(1.01)  # a bias
            return results

        return wrong

    monkeypatch.setattr("torch._inductor.compile", compile_wrongly)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(one.parameters(), 0.1) for one in (model, twin))
    step = gxd.compiled_step(model, optimizer, F.cross_entropy)
    x, y = torch.randn(16, 4), torch.randint(3, (16,))
    if errs == "always":
        with pytest.warns(gxd.CompileWarning, match="the compiler's code computes something else than the model"):
            step(x, y)
    else:
        step(x, y)
    assert (step.why_eager is None) == (errs == "with the rewrites")
    F.cross_entropy(twin(x), y).backward()
    other.step()
    assert all(torch.allclose(a, b, rtol=0, atol=1e-7) for a, b in zip(model.parameters(), twin.parameters()))
