"""gxd_second_order: the curvature of the output along a reset, against Hessians that are written out."""

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.nn.attention import SDPBackend, sdpa_kernel

import gxd
from gxd.observe.clamp import clamped
from gxd.score.utilities import _REGISTRY


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


def observe(model: nn.Module, utility: str, x: Tensor, y: Tensor | None) -> gxd.ContinualBackprop:
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    cbp = gxd.ContinualBackprop(model, optimizer, example_inputs=x[:2], utility=utility, replacement_rate=0.0)
    logits = model(x)
    cbp.observe(logits, y)
    logits.sum().backward()
    optimizer.step()
    return cbp


def test_of_a_quadratic_network_it_is_the_whole_change_of_the_target_logit():
    """With a diagonal layer, no unit meets another one, and no sign is left."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), Square(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        model[2].weight.copy_(torch.diag(torch.randn(5)))
    x, y = torch.randn(7, 4, dtype=torch.float64), torch.arange(7) % 3
    cbp = observe(model, "gxd_second_order", x, y)
    group, before = cbp.plan["0"], model(x).gather(1, y[:, None])
    for unit in range(5):
        with clamped(model, group, torch.tensor([unit]), cbp.references()["0"].unsqueeze(0)):
            change = (model(x).gather(1, y[:, None]) - before).abs().mean()
        assert float(cbp.utilities()["0"][unit]) == pytest.approx(float(change.detach()), rel=1e-10)
    assert not torch.allclose(cbp.utilities()["0"], observe(model, "gxd", x, y).utilities()["0"], rtol=0.01)


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_the_mean_over_many_signs_is_the_curvature_of_the_output_along_the_reset(kind):
    torch.manual_seed(1)
    if kind == "linear":
        model, x = (
            nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)),
            torch.randn(2, 3),
        )
    else:
        conv = nn.Sequential(nn.Conv1d(2, 4, 1), nn.Tanh(), nn.Conv1d(4, 3, 2), nn.SiLU(), nn.Flatten())
        model, x = nn.Sequential(*conv, nn.Linear(6, 2)), torch.randn(2, 2, 3)
    model, x, draws = model.double(), x.double(), 6000
    found: list[Tensor] = []

    @gxd.register_utility("curvature_for_test", gradient="target", curvature=True)
    def curvature(o: gxd.Observation) -> Tensor:
        found.append(o.views[0].c.sum(1))
        return o.views[0].c.sum(1).mean(0)

    try:
        y = torch.tensor([0, 1]).repeat(draws)
        cbp = observe(model, "curvature_for_test", x.repeat(draws, *[1] * (x.dim() - 1)), y)
    finally:
        del _REGISTRY["curvature_for_test"]
    hidden, r = model[1](model[0](x)).detach(), cbp.references()["0"]
    first = torch.cat(found, 1)[:, :4].view(draws, 2, 4)  # the layers stand side by side, this one first
    mean, error = first.mean(0), first.std(0) / draws**0.5
    for example in range(2):
        h = hidden[example]
        second = hessian(lambda v, k=example: model[2:](v.unsqueeze(0))[0, k], h).view(h.numel(), h.numel())
        for unit in range(4):
            d = torch.zeros_like(h)
            d[unit] = h[unit] - r[unit]
            expected = float(d.flatten() @ second @ d.flatten())
            assert abs(float(mean[example, unit]) - expected) < 4.5 * float(error[example, unit]) + 1e-12


def test_of_a_network_without_curvature_it_is_gxd():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    x, y = torch.randn(7, 4), torch.arange(7) % 3
    second, first = observe(model, "gxd_second_order", x, y).utilities(), observe(model, "gxd", x, y).utilities()
    torch.testing.assert_close(second, first)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(torch.relu(self.up(x))).unsqueeze(1)
        return self.head(nn.functional.scaled_dot_product_attention(x, x, x).squeeze(1).mean(1))


def test_a_layer_without_second_derivatives_is_the_reason_for_an_error_with_its_remedy():
    torch.manual_seed(0)
    model, x, y = Attention(), torch.randn(6, 5, 4), torch.zeros(6, dtype=torch.long)
    with pytest.raises(gxd.ObservationError, match=r"needs second derivatives, and a layer .*attention.*'gxd'.*MATH"):
        observe(model, "gxd_second_order", x, y)
    with sdpa_kernel(SDPBackend.MATH):
        assert observe(model, "gxd_second_order", x, y).utilities()["up"].isfinite().all()


def test_second_derivatives_of_a_loss_are_refused():
    with pytest.raises(ValueError, match="curvature=True needs the gradient of an output, not gradient='loss'"):
        gxd.register_utility("never", gradient="loss", curvature=True)
