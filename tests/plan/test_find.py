"""The plan of every architecture in the zoo, against the one derived by hand."""

import re

import pytest
import torch
from torch import nn

import gxd
from tests.zoo import CASES, Case


def build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.build()


def as_dict(plan: gxd.UnitPlan) -> dict[str, tuple]:
    return {
        g.name: (g.size, {p.module for p in g.producers}, {c.module for c in g.consumers}, {n.module for n in g.norms})
        for g in plan.groups
    }


def expected(groups) -> dict[str, tuple]:
    return {name: (e.size, set(e.producers), set(e.consumers), set(e.norms)) for name, e in groups.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_plan_is_the_one_a_person_derives_by_hand(case: Case):
    plan = gxd.find_units(build(case), case.inputs(), batch_dim=case.batch_dim)
    assert as_dict(plan) == expected(case.groups)


@pytest.mark.parametrize("case", [c for c in CASES if c.skipped], ids=lambda case: case.name)
def test_what_is_not_reset_is_named_with_a_reason_a_person_understands(case: Case):
    plan = gxd.find_units(build(case), case.inputs(), batch_dim=case.batch_dim)
    reasons = {entry.name: entry.reason for entry in plan.skipped}
    for name, words in case.skipped.items():
        assert name in reasons, f"{name} is not accounted for: {reasons}"
        assert re.search(words, reasons[name].lower()), f"{name}: {reasons[name]!r} does not say {words!r}"


@pytest.mark.parametrize("case", [c for c in CASES if c.residual_groups is not None], ids=lambda case: case.name)
def test_residual_coordinates_are_grouped_on_request(case: Case):
    plan = gxd.find_units(build(case), case.inputs(), residual="group", batch_dim=case.batch_dim)
    assert as_dict(plan) == expected(case.residual_groups)


@pytest.mark.parametrize("residual", ["skip", "group"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_check_on_the_model_itself_confirms_the_plan(case: Case, residual: str):
    model = build(case)
    for module in model.modules():  # statistics away from 0 and 1, so that a wrong norm entry shows
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
    plan = gxd.find_units(model, case.inputs(), residual=residual, batch_dim=case.batch_dim)
    report = gxd.verify_plan(model, case.inputs(), plan=plan)
    statuses = {group.name: group.status for group in report.groups}
    groups = case.groups if residual == "skip" else case.residual_groups or {}
    for name, status in statuses.items():
        allowed = {"passed"} if name in groups and groups[name].exact else {"passed", "approximate"}
        assert status in allowed, f"{name}: {report[name]}"


class Remembers(nn.Module):
    """Keeps what it has computed, as many models do for a look at it later."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.calls, self.kept = nn.Linear(4, 8), nn.Linear(8, 2), 0, None

    def forward(self, x):
        self.calls += 1
        self.kept = self.a(x).relu()
        self.new = self.kept
        return self.b(self.kept)


def test_what_a_forward_pass_keeps_is_not_kept_of_the_trace():
    model = Remembers().eval()
    before = dict(vars(model))
    assert gxd.find_units(model, torch.zeros(2, 4)).size == 8
    assert vars(model) == before
    assert not any(module.training for module in model.modules())
