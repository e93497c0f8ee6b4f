"""The rewrites of a step's graph: fewer operations, the same numbers, nothing moved that must not be."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from gxd.fuse import FEW_ROWS, Rewrites, add_biases_last, multiply_at_once

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
