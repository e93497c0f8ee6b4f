"""Random numbers come from outside the graph: those of the eager loop, in its order and its layouts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from gxd.compile.check import draws
from gxd.compile.noise import noise_as_inputs
from tests.compile.test_compiled import OPTIMIZERS, Loop


def hoisted(function, *tensors):
    """What a function returns eagerly, and what its graph returns with the numbers drawn outside."""
    graph = make_fx(function, tracing_mode="fake")(*tensors)
    torch.manual_seed(5)
    expected = function(*[t.clone() for t in tensors])
    drawn = noise_as_inputs(graph)
    graph.graph.lint()
    torch.manual_seed(5)
    given = graph(*[t.clone() for t in tensors], *[draw() for draw in drawn])
    return graph, len(drawn), expected, given


@pytest.mark.parametrize(
    ("function", "number"),
    [
        (lambda x: F.dropout(x.t(), 0.3), 1),  # a mask that is laid out as its input
        (lambda x: F.dropout(F.dropout(x, 0.1) + torch.randn_like(x), 0.3), 3),
        (lambda x: F.alpha_dropout(x, 0.2, training=True), 1),
        (lambda x: F.dropout2d(x[:, :, None, None].expand(6, 4, 2, 2), 0.5), 1),
        (lambda x: x + torch.empty_like(x).uniform_(-1, 1) + torch.empty_like(x).normal_(1.0, 2.0), 2),
        (lambda x: x.sigmoid(), 0),
    ],
)
def test_numbers_that_depend_on_nothing_are_drawn_outside_and_are_those_of_the_eager_loop(function, number):
    graph, count, expected, given = hoisted(function, torch.arange(24.0).view(6, 4))
    assert count == number and not any(map(draws, graph.graph.nodes))
    torch.testing.assert_close(given, expected, rtol=0, atol=0)


def test_numbers_that_depend_on_values_or_have_a_generator_of_their_own_stay_in_the_graph():
    generator = torch.Generator().manual_seed(1)

    def function(x):
        kept = torch.bernoulli(x.sigmoid()) + x.clone().uniform_(generator=generator)
        return kept + x.clone().add_(1).bernoulli_(0.5)

    graph = make_fx(function, tracing_mode="fake")(torch.ones(3))
    assert noise_as_inputs(graph) == [] and sum(map(draws, graph.graph.nodes)) == 3


def test_numbers_of_both_kinds_are_drawn_in_the_order_of_the_eager_loop():
    _, count, expected, given = hoisted(lambda x: F.dropout(torch.bernoulli(x.sigmoid()) + 1, 0.5), torch.zeros(50))
    assert count == 0
    torch.testing.assert_close(given, expected, rtol=0, atol=0)


class Attention(nn.Module):
    """Its masks of dropout are not contiguous."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2)
        self.layers, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.layers(x.transpose(0, 1)).mean(0))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "momentum"])  # Adam makes steps of the rounding in a key's bias
def test_a_compiled_transformer_drops_out_what_the_eager_loop_does(name):
    generator = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(8, 6, 16, generator=generator), torch.randint(5, (8,), generator=generator)) for _ in range(20)
    ]
    Loop(Attention(), data, OPTIMIZERS[name], maturity=5).compare(rtol=1e-3, atol=1e-4)
