"""Weight clipping against loops over weights."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gxd
from tests.methods.naive import OPTIMIZERS, Net, attached, groups, step

# The fan-in of each: that of a bias is its layer's.
FAN_IN = {"conv.weight": 2 * 3 * 3, "fc.weight": 16, "fc.bias": 16, "head.weight": 6, "head.bias": 6}


def clipped(value: float, bound: float) -> float:
    return max(-bound, min(bound, value))


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_every_weight_and_bias_is_clipped_at_its_own_bound(optimizer: str):
    zeta = 0.7
    model, made, _ = attached("weight_clipping", optimizer, zeta=zeta)
    other = Net().double()
    alone = OPTIMIZERS[optimizer](groups(other))
    hit = 0
    for _ in range(5):
        step(model, made)
        step(other, alone)
        with torch.no_grad():
            for name, p in other.named_parameters():
                if name in FAN_IN:
                    bound = zeta / FAN_IN[name] ** 0.5
                    entries = [clipped(value, bound) for value in p.flatten().tolist()]
                    hit += sum(abs(entry) == bound for entry in entries)
                    p.copy_(torch.tensor(entries, dtype=p.dtype).view_as(p))
                    assert p.abs().max() <= bound * (1 + 1e-12)
        torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-12, atol=1e-12)
    assert hit > 100


@pytest.mark.parametrize("bias", [True, False])
def test_a_head_that_is_left_out_is_the_last_layer_and_not_the_last_two_parameters(bias: bool):
    """Also if it has no bias, and if others are in a parameter group of their own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3, bias=bias), nn.Softmax(-1))
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], 0.1)
    gxd.attach(model, optimizer, gxd.method("weight_clipping", zeta=1e-3, exclude="head"))
    head = copy.deepcopy(model[2].state_dict())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    assert model[0].weight.abs().max() <= 1e-3 / 2 and model[0].bias.abs().max() <= 1e-3 / 2
    for name, value in model[2].state_dict().items():
        assert torch.equal(value, head[name])


class Odd(nn.Module):
    """Layers whose biases are called otherwise, a norm, an embedding, a transposed convolution, a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attn, self.norm = nn.Embedding(10, 8), nn.MultiheadAttention(8, 2), nn.LayerNorm(8)
        self.cross = nn.MultiheadAttention(8, 2, kdim=5, vdim=6)
        self.rnn, self.up = nn.GRU(8, 4), nn.ConvTranspose2d(4, 6, 3, groups=2)
        self.token = nn.Parameter(torch.ones(1, 3, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_the_bound_of_any_layer_is_that_of_its_own_weight_and_norms_and_embeddings_have_none():
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = gxd.attach(model, optimizer, gxd.method("weight_clipping"))._parts[0].state
    assert state == {
        "attn.in_proj_weight": 8,
        "attn.in_proj_bias": 8,
        "attn.out_proj.weight": 8,
        "attn.out_proj.bias": 8,
        "cross.q_proj_weight": 8,
        "cross.k_proj_weight": 5,
        "cross.v_proj_weight": 6,
        "cross.in_proj_bias": 8,
        "cross.out_proj.weight": 8,
        "cross.out_proj.bias": 8,
        "rnn.weight_ih_l0": 8,
        "rnn.weight_hh_l0": 4,
        "rnn.bias_ih_l0": 8,
        "rnn.bias_hh_l0": 4,
        "up.weight": 3 * 3 * 3,
        "up.bias": 3 * 3 * 3,
    }


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"zeta": 0}, ValueError, "zeta=0 would set every weight to zero"),
        ({"zeta": -1.0}, ValueError, "zeta=-1.0 must be a number, 0 or more"),
        ({"zeta": None}, ValueError, "zeta=None"),
        ({"zetta": 1.0}, TypeError, "Did you mean 'zeta'"),
    ],
)
def test_a_wrong_option_is_refused_with_its_value(options: dict[str, Any], error: Any, word: str):
    with pytest.raises(error, match=word):
        gxd.method("weight_clipping", **options)
