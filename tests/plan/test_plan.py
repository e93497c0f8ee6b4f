"""The plan as a user handles it: printed, narrowed, written by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gxd
from tests.models import Conv, ResNet, make


def plan_of(model, shape):
    return gxd.find_units(model, torch.randn(2, *shape))


def test_the_printed_plan_accounts_for_every_layer():
    model = ResNet()
    text = str(plan_of(model, (2, 8, 8)))
    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            assert any(word.strip(",") == name for word in text.split()), f"{name} is not in the plan:\n{text}"
    assert "residual='group'" in text
    assert "output layer" in text
    assert "running_mean" in text
    assert "padding" in text


def test_groups_are_kept_and_left_out_by_pattern():
    model = ResNet()
    plan = gxd.find_units(model, torch.randn(2, 2, 8, 8), include="block*", exclude=["block2.*"])
    assert [g.name for g in plan.groups] == ["block1.conv1"]
    reasons = {s.name: s.reason for s in plan.skipped}
    assert "excluded" in reasons["block2.conv1"]


def test_a_group_can_have_a_rate_of_its_own():
    model, batch, _ = make("mlp")
    plan = gxd.find_units(model, batch(2)[0], rates={"fc1": 0.0, "fc2": 0.5})
    assert (plan["fc1"].rate, plan["fc2"].rate) == (0.0, 0.5)
    assert "@ 0.5" in str(plan)
    opt = torch.optim.SGD(model.parameters(), 0.01)
    cbp = gxd.ContinualBackprop(model, opt, plan=plan, replacement_rate=1e-4, maturity=1)
    resets = set()
    for _ in range(5):
        x, y = batch()
        logits = model(x)
        cbp.observe(logits, y)
        F.cross_entropy(logits, y).backward()
        opt.step()
        opt.zero_grad()
        resets |= set(cbp.last_resets)
    assert resets == {"fc2"}


def test_a_hand_written_plan_equals_the_traced_one():
    model = Conv()
    traced = plan_of(model, (2, 8, 8))
    written = gxd.find_units(
        model,
        groups=[
            gxd.manual_group("conv1", consumers=["conv2"], norms=["bn1"]),
            gxd.manual_group("conv2", consumers=["fc"], norms=["bn2"]),
            gxd.manual_group("fc", consumers="head"),
        ],
    )
    assert [g.name for g in written.groups] == [g.name for g in traced.groups]
    assert written.fingerprint() == traced.fingerprint()
    assert gxd.verify_plan(model, torch.randn(4, 2, 8, 8), plan=written.select(exclude="conv1")).ok


def test_a_hand_written_group_replaces_the_traced_one():
    model, batch, _ = make("branches")
    plan = gxd.find_units(model, batch(2)[0], groups=[gxd.manual_group("trunk", consumers=["left"])])
    assert [c.module for c in plan["trunk"].consumers] == ["left"]
    assert {g.name for g in plan.groups} == {"trunk", "left", "right"}


def test_the_check_finds_a_reader_that_the_plan_has_missed():
    model, batch, _ = make("branches")
    plan = gxd.find_units(model, batch(2)[0], groups=[gxd.manual_group("trunk", consumers=["left"])])
    report = gxd.verify_plan(model, batch(4)[0], plan=plan)
    assert report["trunk"].status == "wrong"
    assert not report.ok
    assert "past the claimed consumers" in str(report)


def test_the_check_finds_columns_that_are_not_the_units():
    model = Conv()
    wrong = torch.arange(12 * 4).view(4, 12).t()  # as if the flatten had been channels-last
    plan = gxd.find_units(model, groups=[gxd.manual_group("conv2", consumers=["fc"], norms=["bn2"], columns=wrong)])
    assert gxd.verify_plan(model, torch.randn(4, 2, 8, 8), plan=plan)["conv2"].status == "wrong"


def test_the_check_leaves_the_model_as_it_was():
    model, batch, _ = make("conv")
    model.bn1.eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    gxd.verify_plan(model, batch(4)[0])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and not model.bn1.training
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in model.modules())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_a_plan_knows_its_groups_by_name():
    plan = plan_of(make("mlp")[0], (6,))
    assert plan["fc1"].size == 16
    assert len(plan) == 2
    assert plan.size == 28
    with pytest.raises(KeyError, match="fc1, fc2"):
        plan["fc9"]


def test_the_order_of_execution_counts_not_the_order_of_registration():
    class Scrambled(nn.Module):
        def __init__(self):
            super().__init__()
            self.out, self.second, self.first = nn.Linear(5, 2), nn.Linear(4, 5), nn.Linear(3, 4)

        def forward(self, x):
            return self.out(torch.relu(self.second(torch.relu(self.first(x)))))

    plan = plan_of(Scrambled(), (3,))
    assert {g.name: [c.module for c in g.consumers] for g in plan.groups} == {"first": ["second"], "second": ["out"]}
