"""DASH against loops over rows and kernels, with gradients by plain autograd on a copy; and what it needs."""

import copy
import random
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd
from tests.rig import X, Y, mlp, refused, same, snapshot

ALPHA, MINIMUM = 0.3, 0.2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn, self.point = nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 1)
        self.up = nn.ConvTranspose2d(3, 4, 2, groups=1)
        self.fc, self.norm, self.head = nn.Linear(36, 7), nn.LayerNorm(7), nn.Linear(7, 3)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(F.relu(self.point(F.relu(self.bn(self.conv(x))))))
        return self.head(self.dropout(F.relu(self.norm(self.fc(x.flatten(1))))))


def batches(count: int = 3, size: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(size, 2, 4, 4, generator=generator)
    return [(draw(), torch.randint(0, 3, (size,), generator=generator)) for _ in range(count)]


def cosine(w: Tensor, g: Tensor) -> float:
    size = float(w.norm() * g.norm())
    return float((w * g).sum()) / size if size else 0.0


def clipped(w: Tensor, g: Tensor) -> Tensor:
    return w * min(max(cosine(w, g), MINIMUM), 1.0)


def naive(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The parameters after the event."""
    model = copy.deepcopy(model)
    averages = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for x, y in data:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for name, p in model.named_parameters():
            averages[name] = (1 - ALPHA) * averages[name] + ALPHA * -p.grad
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, w in found.items():
        g, layer = averages[name], name.split(".")[0]
        if layer in ("bn", "norm"):
            continue
        if w.dim() == 1:
            found[name] = clipped(w, g)
        else:
            for a in range(w.shape[0]):
                if w.dim() == 2:
                    w[a] = clipped(w[a].clone(), g[a])
                else:
                    for b in range(w.shape[1]):
                        w[a, b] = clipped(w[a, b].clone(), g[a, b])
    return found


def attached(model: nn.Module, **options: Any) -> tuple[torch.optim.Optimizer, gxd.Attachment]:
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    options = {"alpha": ALPHA, "minimum": MINIMUM, **options}
    return optimizer, gxd.attach(model, optimizer, gxd.method("dash", **options))


def test_rows_kernels_and_biases_are_shrunk_as_the_equation_says():
    model = Net()
    model.dropout.p = 0.0
    expected = naive(model, batches())
    before = copy.deepcopy(model.state_dict())
    _, attachment = attached(model)
    attachment.boundary(batches(), F.cross_entropy)
    torch.testing.assert_close({n: p.detach() for n, p in model.named_parameters()}, expected, rtol=1e-4, atol=1e-6)
    smaller = [float(p.detach().norm() / before[n].norm()) for n, p in model.named_parameters() if "norm" not in n]
    assert min(smaller) < 0.5  # it does something


def test_the_scale_of_the_loss_does_not_matter():
    found = []
    for scale in (1.0, 1e-12):
        model = mlp()
        _, attachment = attached(model)
        attachment.boundary([(X, Y)], lambda output, y, scale=scale: scale * F.cross_entropy(output, y))
        found.append(model.state_dict())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_weights_that_point_where_the_data_pulls_are_kept_and_the_others_shrunk_to_the_minimum():
    """Its job, on a case that can be seen: gradients of a linear loss are the inputs."""
    model = nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 1.0, 0.0, 0.0], [-1.0, -1.0, 0.0, 0.0]]))
    before = model.weight.detach().clone()
    _, attachment = attached(model)
    attachment.boundary([(torch.tensor([[2.0, 2.0, 0.0, 0.0]]), None)], lambda output, y: -output.sum())
    torch.testing.assert_close(model.weight.detach(), before * torch.tensor([[1.0], [MINIMUM]]))


class Drawn(torch.utils.data.Dataset):
    """Examples that are drawn when they are asked for, as augmented ones are."""

    seen: ClassVar[list[float]] = []

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.seen.append(random.random())
        return torch.randn(2, 4, 4), index % 3


def test_the_pass_over_the_data_leaves_no_trace():
    """A factor of 1 changes no weight, so nothing at all may have changed: buffers, modes, gradients, random states."""
    model, calls = Net(), []
    model.head.register_forward_hook(lambda *_: calls.append(1))
    model.norm.eval()
    optimizer, attachment = attached(model, minimum=1.0, optimizer="keep")
    x, y = batches(1)[0]
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    calls.clear()
    before = snapshot(model, optimizer)
    gradients = [p.grad.clone() for p in model.parameters()]
    modes = [module.training for module in model.modules()]
    state, python = torch.get_rng_state(), random.getstate()
    loader = torch.utils.data.DataLoader(Drawn(), batch_size=2, shuffle=True)
    attachment.boundary(loader, F.cross_entropy)
    assert same(snapshot(model, optimizer), before)
    assert same([p.grad for p in model.parameters()], gradients)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == python and torch.is_grad_enabled()
    assert len(set(Drawn.seen)) == 6  # each batch has random numbers of its own
    assert calls == []  # what a hook of the user's has noted is taken back, too


def test_the_pass_over_the_data_is_not_observed_by_others():
    rigs = []
    for with_data in (True, False):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        methods = [gxd.method("continual_backprop", utility="activation", maturity=1, replacement_rate=0.2)]
        methods += [gxd.method("dash", minimum=1.0, optimizer="keep")] if with_data else []
        attachment = gxd.attach(model, optimizer, *methods, example_inputs=X)
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(model(X), Y).backward()
            attachment.boundary(*([(X + 1, Y)] * 120, F.cross_entropy) if with_data else ())  # before it is counted
            optimizer.step()
        rigs.append((model.state_dict(), attachment.state_dict()["methods"]["0.continual_backprop"]))
        assert attachment.total_resets > 0
    assert same(*rigs)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((), ValueError, ("dash needs data", "boundary(data, loss)", "Nothing was changed")),
        (([(X, Y)],), TypeError, ("loss", "NoneType")),
        ((None, F.cross_entropy), TypeError, ("data", "NoneType")),
        ((X, F.cross_entropy), TypeError, ("data", "Tensor")),
        (([], F.cross_entropy), ValueError, ("no batch",)),
        (([X], F.cross_entropy), TypeError, ("pairs (x, y)", "Tensor")),
        (([(X, Y)], lambda z, y: z), ValueError, ("one number", "(6, 3)")),
        (([(X, Y)], lambda z, y: z.sum().item()), ValueError, ("one number", "float")),
        (([(X * torch.inf, Y)], F.cross_entropy), ValueError, ("fc1.weight", "not finite")),
    ],
)
def test_wrong_data_is_refused_before_any_method_has_acted(arguments: Any, error: Any, words: tuple):
    model = mlp()
    optimizer, _ = attached(model)
    attachment = gxd.attach(model, optimizer, gxd.method("dash"))
    before = snapshot(model, optimizer)
    refused(lambda: attachment.boundary(*arguments), error, words)
    assert same(snapshot(model, optimizer), before)


def test_a_method_that_lacks_data_stops_the_others_before_they_act():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    attachment = gxd.attach(model, optimizer, gxd.method("full_reset"), gxd.method("dash"))
    before = copy.deepcopy(model.state_dict())
    refused(attachment.boundary, ValueError, ("dash needs data",))
    assert same(model.state_dict(), before)


def test_an_iterator_serves_one_method_and_is_refused_for_two():
    model, other = mlp(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    attachment = gxd.attach(model, optimizer, gxd.method("dash"))
    attachment.boundary(iter([(X, Y)]), F.cross_entropy)
    assert not same(model.state_dict(), other.state_dict())
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    two = gxd.attach(other, optimizer, gxd.method("dash"), gxd.method("dash"))
    refused(lambda: two.boundary(iter([(X, Y)]), F.cross_entropy), ValueError, ("iterator", "list or a DataLoader"))
    two.boundary([(X, Y)], F.cross_entropy)


def test_inputs_may_be_several_arguments_or_named_ones():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.fc = nn.Linear(4, 3)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.fc(a - b)

    found = []
    for x in ((X, X.flip(0)), {"b": X.flip(0), "a": X}):
        model = Two()
        _, attachment = attached(model)
        attachment.boundary([(x, Y)], F.cross_entropy)
        found.append(model.state_dict())
    assert same(*found) and not same(found[0], Two().state_dict())
