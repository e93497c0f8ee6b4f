"""A model that changes while it is trained: other heads, other modes, frozen, pruned and parametrized layers."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

import gxd

X = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(32) % 3


class Heads(nn.Module):
    """A body, and a head for each task."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.norm, self.fc2 = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.heads = nn.ModuleList([nn.Linear(16, 3) for _ in range(2)])
        self.task = 0

    def forward(self, x):
        return self.heads[self.task](self.fc2(self.norm(self.fc1(x)).relu()).relu())


def attached(model=None, **options):
    model = Heads() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options = {"replacement_rate": 0.05, "maturity": 5, **options}
    return model, optimizer, gxd.ContinualBackprop(model, optimizer, example_inputs=X[:2], **options)


def train(model, optimizer, cbp, steps):
    """Group -> how many of its units were reset."""
    resets = {group.name: 0 for group in cbp.plan.groups}
    for _ in range(steps):
        logits = model(X)
        cbp.observe(logits, Y)
        F.cross_entropy(logits, Y).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, index in cbp.last_resets.items():
            resets[name] += len(index)
    return resets


def test_units_are_left_alone_while_another_head_reads_them():
    model, optimizer, cbp = attached()
    train(model, optimizer, cbp, 20)
    model.task = 1
    before = model.fc2.weight.detach().clone()
    with pytest.warns(gxd.ObservationWarning, match="'fc2' was due for a reset.*another task's head"):
        resets = train(model, optimizer, cbp, 40)
    assert resets["fc2"] == 0 and resets["fc1"] > 0
    assert torch.equal(model.fc2.weight[:, model.fc1.bias != 0], before[:, model.fc1.bias != 0])
    model.task = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(model, optimizer, cbp, 20)["fc2"] > 0


def test_a_part_in_evaluation_mode_is_left_alone():
    model, optimizer, cbp = attached()
    train(model, optimizer, cbp, 3)
    model.fc2.eval()  # reads the units of fc1
    with pytest.warns(gxd.ObservationWarning, match="'fc1' was due.*evaluation mode"):
        resets = train(model, optimizer, cbp, 40)
    assert resets["fc1"] == 0 and resets["fc2"] > 0
    assert int((cbp.utilities()["fc1"] > 0).sum()) > 0, "what was known of them is kept"


def test_what_was_not_reset_is_as_old_as_it_was_and_is_not_made_up_for():
    model, optimizer, cbp = attached()
    model.fc2.eval()
    with pytest.warns(gxd.ObservationWarning):
        train(model, optimizer, cbp, 100)
    assert bool((cbp.ages()["fc1"] == 100).all())
    assert cbp._parts[0].state.selector.cohorts.eligible[0] == 16
    model.fc2.train()
    assert train(model, optimizer, cbp, 1)["fc1"] <= 1


def test_a_layer_that_is_frozen_in_between_is_left_alone():
    model, optimizer, cbp = attached()
    train(model, optimizer, cbp, 10)
    model.fc1.requires_grad_(False)
    before = copy.deepcopy(model.fc1.state_dict())
    with pytest.warns(gxd.ObservationWarning, match=r"fc1.weight, fc1.bias was frozen"):
        resets = train(model, optimizer, cbp, 40)
    assert resets["fc1"] == 0
    for name, value in model.fc1.state_dict().items():
        assert torch.equal(value, before[name])
    model.fc1.requires_grad_(True)
    assert train(model, optimizer, cbp, 40)["fc1"] > 0


def test_a_plan_does_not_fit_a_model_that_was_frozen_since():
    model = Heads()
    plan = gxd.find_units(model, X[:2])
    model.fc1.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(gxd.PlanError, match=r"frozen after the plan was made .*fc1.weight, fc1.bias"):
        gxd.ContinualBackprop(model, optimizer, plan=plan)


@pytest.mark.parametrize(
    "change",
    [lambda layer: prune.l1_unstructured(layer, "weight", 0.3), parametrizations.spectral_norm],
    ids=["pruned", "parametrized"],
)
def test_nothing_is_reset_in_a_weight_that_is_now_computed(change):
    model, optimizer, cbp = attached()
    train(model, optimizer, cbp, 3)
    change(model.fc2)
    with pytest.raises(gxd.PlanError, match=r"'fc2.weight' was replaced \(or pruned, or parametrized\)"):
        train(model, optimizer, cbp, 40)
    assert cbp.total_resets == 0


@pytest.mark.parametrize("task", [0, 1])
@pytest.mark.parametrize("options", [{"score_every": 10, "replacement_rate": 0.5, "maturity": 1}, {}])
def test_a_resumed_training_leaves_alone_what_the_other_would(options, task):
    first = attached(**options)
    first[0].task = task
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(*first, 6)
    second = attached(**options)
    for new, old in zip(second, first, strict=True):
        new.load_state_dict(copy.deepcopy(old.state_dict()))
    for part in (first, second):
        part[0].task = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert train(*first, 30) == train(*second, 30)
    for one, other in zip(first[0].state_dict().values(), second[0].state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_per_example_gradients_by_torch_func_are_not_observed():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    for utility in ("contribution", "gxd"):
        model, optimizer, cbp = attached(model, utility=utility)
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss(parameters, x, y, model=model):
            return F.cross_entropy(torch.func.functional_call(model, parameters, (x[None],)), y[None])

        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, X, Y)
        assert each["0.weight"].shape == (32, 8, 6)
        train(model, optimizer, cbp, 2)
        assert cbp._parts[0].units.step == 2
        cbp.close()
