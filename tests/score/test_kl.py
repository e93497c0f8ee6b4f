"""gxd_kl: the squared effect on log p_y, with y drawn from the model's own prediction, is twice the KL divergence."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gxd
from gxd.compile import program
from gxd.observe.clamp import clamped
from gxd.observe.direction import direction_of, noise

DRAWS = 4000


class Positions(nn.Module):
    """Logits at each of several positions, the classes on the last axis."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(2, 5), nn.Linear(5, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.up(x)))


def mlp(classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, classes))


def score_of(model: nn.Module, x: Tensor, draws: int, **options: object) -> tuple[Tensor, Tensor]:
    """The scores of the hidden units of one observation of the examples, each repeated, and their references."""
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    example = x[:2]
    with gxd.ContinualBackprop(model, optimizer, example_inputs=example, utility="gxd_kl", seed=5) as cbp:
        logits = model(x.repeat(draws, *[1] * (x.dim() - 1)))
        cbp.observe(logits, **options)  # type: ignore[arg-type]
        logits.sum().backward()
        optimizer.step()
        ((group, utilities),) = cbp.utilities().items()
        return utilities, cbp.references()[group]


def quadratic_form(model: nn.Module, hidden: Tensor, references: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
    """(units,) the mean over the examples of the sum over positions of dz' (diag p - p p') dz, in loops."""
    found = torch.zeros(hidden.shape[-1], dtype=torch.float64)
    for unit in range(hidden.shape[-1]):
        for h, z in zip(hidden.flatten(0, -2), logits.flatten(0, -2)):
            dz = (references[unit] - h[unit]) * weight[:, unit]
            if len(z) == 1:
                p = torch.sigmoid(z[0])
                found[unit] += float(p * (1 - p) * dz[0] ** 2)
            else:
                p = z.softmax(0)
                found[unit] += float((p * dz**2).sum() - (p * dz).sum() ** 2)
    return found / len(hidden)


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize("classes", [1, 2, 6])
def test_the_mean_over_many_labels_is_the_quadratic_form_of_the_change_of_the_logits(classes):
    torch.manual_seed(0)
    model, x = mlp(classes).double(), torch.randn(6, 4, dtype=torch.float64)
    nn.init.normal_(model[2].weight, std=1.5)
    found, references = score_of(model, x, DRAWS)
    expected = quadratic_form(
        model, torch.tanh(model[0](x)).detach(), references, model[2].weight.detach(), model(x).detach()
    )
    close(found, expected, 0.06)


@pytest.mark.parametrize("class_dim", [-1, 1])
def test_every_position_of_dense_outputs_has_a_label_of_its_own(class_dim):
    torch.manual_seed(1)
    if class_dim == -1:
        model, x = Positions(4).double(), torch.randn(5, 3, 2, dtype=torch.float64)
        hidden, weight, logits = torch.tanh(model.up(x)), model.head.weight, model(x)
    else:
        model = nn.Sequential(nn.Conv1d(2, 5, 1), nn.Tanh(), nn.Conv1d(5, 4, 1)).double()
        x = torch.randn(5, 2, 3, dtype=torch.float64)
        hidden, weight, logits = model[1](model[0](x)).mT, model[2].weight.squeeze(-1), model(x).mT
    found, references = score_of(model, x, DRAWS, class_dim=class_dim)
    close(found, quadratic_form(model, hidden.detach(), references, weight.detach(), logits.detach()), 0.06)


def test_of_small_changes_it_is_twice_the_kl_divergence_of_clamping_the_unit():
    torch.manual_seed(2)
    model, x = (
        nn.Sequential(*mlp(6)[:2], nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)).double(),
        torch.randn(6, 4).double(),
    )
    nn.init.normal_(model[2].weight, std=0.05)
    nn.init.normal_(model[4].weight, std=1.5)
    plan = gxd.find_units(model, x[:2])
    cost = gxd.reset_cost(model, (x.repeat(DRAWS, 1), None), x, plan=plan, utilities="gxd_kl", chunk=10**6)
    group = plan.groups[0]
    before = model(x).detach().log_softmax(1)
    for unit in range(group.size):
        with clamped(model, group, torch.tensor([unit]), cost.references[group.name]):
            after = model(x).detach().log_softmax(1)
        kl = sum(float((p.exp() * (p - q)).sum()) for p, q in zip(before, after)) / len(x)
        assert float(cost.scores["gxd_kl"][group.name][unit]) == pytest.approx(2 * kl, rel=0.06)
        assert float(cost.shocks["kl"][group.name][unit]) == pytest.approx(kl, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_labels_are_drawn_as_often_as_the_model_predicts_them(dtype):
    z = torch.tensor([[2.0, -1.0, 0.5, -20.0, 1.0]], dtype=dtype).repeat(20_000, 1).requires_grad_()
    draw = noise("kl", torch.Generator().manual_seed(0))
    (direction,) = direction_of("kl", z, None, None, draw).cotangents()
    assert direction.dtype == dtype
    p = z[0].detach().double().softmax(0)
    label = (direction.double() + p).argmax(1)
    counts = torch.bincount(label, minlength=5).double()
    assert counts[3] == 0
    kept = torch.tensor([0, 1, 2, 4])
    chi_square = ((counts - 20_000 * p).square() / (20_000 * p))[kept].sum()
    assert chi_square < 16.3, "three degrees of freedom, p = 0.001"
    torch.testing.assert_close(direction.double(), F.one_hot(label, 5) - p, atol=1e-2, rtol=0)


def test_the_target_does_not_count():
    torch.manual_seed(0)
    model, x = mlp(3), torch.randn(6, 4)
    scores = [score_of(copy.deepcopy(model), x, 1, target=torch.full((6,), klass))[0] for klass in (0, 2)]
    assert torch.equal(*scores)


def test_of_a_score_of_the_users_own_it_is_the_squared_effect():
    torch.manual_seed(0)
    model, x = mlp(3).double(), torch.randn(6, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    cbp = gxd.ContinualBackprop(model, optimizer, example_inputs=x[:2], utility="gxd_kl")
    logits = model(x)
    cbp.observe(score=logits[:, 1])
    logits.sum().backward()
    optimizer.step()
    hidden = torch.tanh(model[0](x)).detach()
    effects = (hidden - cbp.references()["0"]) * model[2].weight[1].detach()
    torch.testing.assert_close(cbp.utilities()["0"], effects.square().mean(0))


@pytest.mark.parametrize("build", [lambda: mlp(1), lambda: Positions(3)], ids=["binary", "dense"])
def test_a_compiled_step_draws_the_same_labels(build, monkeypatch):
    monkeypatch.setattr(program, "compile_graph", lambda graph, example: graph)
    torch.manual_seed(0)
    first = build()
    second = copy.deepcopy(first)
    dense = isinstance(first, Positions)
    x = torch.randn(8, 6, 4, 2) if dense else torch.randn(8, 6, 4)
    y = torch.randint(0, 3, (8, 6, 4)) if dense else torch.randint(0, 2, (8, 6, 1)).float()
    loss = (lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten())) if dense else F.binary_cross_entropy_with_logits
    found = []
    for model, compiled in ((first, False), (second, True)):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        cbp = gxd.ContinualBackprop(
            model, optimizer, example_inputs=x[0, :2], utility="gxd_kl", replacement_rate=0.1, maturity=2, seed=3
        )
        step = gxd.compiled_step(model, optimizer, loss, cbp)
        if not compiled:
            step.why_eager = "to compare with"
        for one, target in zip(x, y):
            step(one, target)
        assert compiled == (step.why_eager is None)
        assert cbp.total_resets > 0
        found.append((cbp.utilities(), dict(model.state_dict())))
    torch.testing.assert_close(*found)
