"""The rewrites of a step's graph: fewer operations, the same numbers, nothing moved that must not be."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from gxd.compile import inductor
from gxd.compile.fuse import FEW_ROWS, Rewrites, add_biases_last, multiply_at_once

aten = torch.ops.aten


def count(graph, *targets):
    return sum(node.target in targets for node in graph.graph.nodes)


def rewritten(function, *rows, rewrite=None):
    """The graph of a function of tensors with so many rows, and a matrix and a bias, before and after."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, 6, generator=generator) for n in (*rows, 6)] + [torch.randn(6, generator=generator)]
    graph = make_fx(function, tracing_mode="fake")(*tensors)
    before = graph(*[t.clone() for t in tensors]), count(graph, aten.mm.default)
    (rewrite or Rewrites())(graph.graph)
    graph.graph.lint()
    graph.recompile()
    given = [t.clone() for t in tensors]
    after = graph(*given), count(graph, aten.mm.default)
    torch.testing.assert_close(after[0], before[0])
    return graph, before[1], after[1], (tensors, given)


def two_chains(x, y, w, b):
    for _ in range(2):
        x = torch.relu(x @ w.t())
    for _ in range(2):
        y = torch.tanh(y @ w.t())
    return x, y


def test_biases_are_added_after_the_product():
    graph, *_ = rewritten(lambda x, w, b: torch.relu(torch.addmm(b, x, w)), 5, rewrite=add_biases_last)
    assert count(graph, aten.addmm.default) == 0


def test_products_with_the_same_matrix_become_one_though_the_first_is_used_before_the_second_is_known():
    def both(x, y, w, b):
        first = torch.relu(x @ w).sum()
        return first, torch.relu(torch.tanh(y * 2) @ w)

    _, before, after, _ = rewritten(both, 5, 7)
    assert (before, after) == (2, 1)


@pytest.mark.parametrize(
    ("name", "function", "rows"),
    [
        ("one needs the other", lambda x, w, b: (x @ w) @ w, (5,)),
        ("one needs the other in each chain", two_chains, (5, 7)),
        ("one matrix is the other, transposed", lambda x, y, w, b: (x @ w, y @ w.t()), (5, 7)),
        ("one is permuted to itself", lambda x, y, w, b: (x @ w.t(), y @ w.permute(0, 1)), (5, 7)),
        ("many rows", lambda x, y, w, b: (x @ w, y @ w), (FEW_ROWS + 1, FEW_ROWS + 2)),
        ("random numbers", lambda x, y, w, b: (torch.bernoulli(x * 0 + 0.5).sum() * 0 + x @ w, y @ w), (5, 7)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_products_that_cannot_be_made_at_once_are_left(name, function, rows):
    _, before, after, _ = rewritten(function, *rows)
    assert before == after >= 2


def test_what_is_written_is_written_after_it_was_read():
    def update(x, y, w, b):
        first = x @ w
        second = y @ w
        new = w - second.sum() * 0 - 1
        third = torch.relu(x @ (w * 2))
        w.copy_(new)
        return first, second, third

    graph, before, after, (tensors, given) = rewritten(update, 5, 7, rewrite=multiply_at_once)
    assert (before, after) == (3, 2)
    torch.testing.assert_close(given[2], tensors[2] - 1)
    assert [node.target for node in graph.graph.nodes][-2] == aten.copy_.default


def sgd(x, y, w, b):
    gradient = x.t() @ torch.relu(y)
    read = y @ w
    w.copy_(w - b[0] * gradient)
    return read


def test_a_step_of_descent_is_written_by_the_product_and_after_the_weights_were_read():
    graph, before, after, (tensors, given) = rewritten(sgd, 6, 6)
    assert (before, after) == (2, 1) and count(graph, aten.addmm_.default) == 1 and not count(graph, aten.copy_.default)
    x, y, w, b = tensors
    torch.testing.assert_close(given[2], w - b[0] * x.t() @ torch.relu(y))


@pytest.mark.parametrize(
    "change",
    [
        lambda x, y, w, b: w.copy_(w - b * (x.t() @ y)),  # a rate of its own for each column
        lambda x, y, w, b: w.copy_(y - b[0] * (x.t() @ y)),
        lambda x, y, w, b: w.copy_(w - b[0] * (x.t() @ y + w)),
        lambda x, y, w, b: w.copy_(w - b[0] * (x.t() @ w)),
        lambda x, y, w, b: w.copy_(w - b[0] * (x.t() @ w.flatten().view(6, 6).t())),
        lambda x, y, w, b: w.copy_((w.bfloat16() - b[0] * (x.t().bfloat16() @ y.bfloat16())).float()),
    ],
)
def test_another_change_of_a_weight_is_left(change):
    graph, *_ = rewritten(change, 6, 6)
    assert not count(graph, aten.addmm_.default)


def test_a_product_of_weights_that_are_both_changed_is_left():
    def penalty(x, y, w, b):
        first, second = x - b[0] * (y.t() @ w.t()), w - b[0] * (x.t() @ y)
        x.copy_(first)
        w.copy_(second)

    graph, _, _, (tensors, given) = rewritten(penalty, 6, 6)
    assert not count(graph, aten.addmm_.default)
    x, y, w, b = tensors
    torch.testing.assert_close(given[0], x - b[0] * (y.t() @ w.t()))
    torch.testing.assert_close(given[2], w - b[0] * (x.t() @ y))


def test_weights_that_are_read_after_the_step_are_left():
    def with_utility(x, y, w, b):
        new = w - b[0] * (x.t() @ y)
        w.copy_(new)
        return new.abs().sum()

    graph, *_ = rewritten(with_utility, 6, 6)
    assert not count(graph, aten.addmm_.default)


def test_a_compiler_that_refuses_the_rewrites_compiles_without_them_and_the_log_says_why(monkeypatch, caplog):
    tried = []

    def refuses(graph, example, options):
        tried.append("post_grad_custom_post_pass" in options)
        return 1 / 0 if tried[-1] else graph

    monkeypatch.setattr("torch._inductor.compile", refuses)
    x = torch.ones(2)
    graph = make_fx(lambda x: x + 1)(x)
    with caplog.at_level("INFO", "gxd.compile"):
        assert inductor.compile_graph(graph, [x]) is graph and tried == [True, False]
    assert [type(record.exc_info[1]) for record in caplog.records] == [ZeroDivisionError]
