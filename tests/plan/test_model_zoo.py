"""The instruments of the suite over real models (``make test-zoo``), tried on models where the answer is known."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import gxd
from tests.model_zoo import coverage, damage, proof


class Network(nn.Module):
    """Two hidden layers, the second read twice; a list and a cache on the side."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.first, self.norm, self.second = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 7)
        self.left, self.right = nn.Linear(7, 2), nn.Linear(7, 2)
        self.settings = {"sizes": [1, 2]}

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.second(torch.tanh(self.norm(self.first(self.words(x))))))
        return self.left(h) + self.right(h)


@pytest.fixture
def network() -> Network:
    torch.manual_seed(0)
    return Network()


WORDS = torch.tensor([[0, 1, 2], [3, 4, 0]])


def faults(model: nn.Module, plan: gxd.UnitPlan) -> list[str]:
    return proof.disprove(model, (WORDS,), plan)


def altered(plan: gxd.UnitPlan, name: str, **changes: object) -> gxd.UnitPlan:
    return replace(plan, groups=tuple(replace(g, **changes) if g.name == name else g for g in plan.groups))


def test_a_right_plan_is_not_disproved(network: Network):
    plan = gxd.find_units(network, WORDS)
    assert {group.name for group in plan.groups} == {"first", "second"}
    before = damage.record(network)
    assert faults(network, plan) == []
    assert damage.changes(before, damage.record(network)) == []


def test_a_plan_that_misses_a_consumer_is_disproved(network: Network):
    plan = gxd.find_units(network, WORDS)
    view = plan["second"].views[0]
    wrong = altered(plan, "second", views=(replace(view, consumers=view.consumers[:1]),))
    assert any("outputs depend on the units" in fault for fault in faults(network, wrong))


def test_a_plan_with_the_wrong_columns_is_disproved(network: Network):
    plan = gxd.find_units(network, WORDS)
    view = plan["first"].views[0]
    wrong = altered(plan, "first", views=(replace(view, columns=view.columns.flip(0)),))
    assert any("that no unit claims" in fault for fault in faults(network, wrong))


def test_a_plan_that_claims_a_column_twice_is_disproved(network: Network):
    plan = gxd.find_units(network, WORDS)
    view = plan["second"].views[0]
    columns = view.columns.clone()
    columns[1] = columns[0]
    wrong = altered(plan, "second", views=(replace(view, columns=columns),))
    assert any("belongs to several units" in fault for fault in faults(network, wrong))


def test_units_without_effect_prove_nothing():
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Hardtanh(1.0, 1.0 + 1e-9))
    x = torch.randn(2, 4)
    plan = gxd.find_units(model, x)
    assert any("nothing is proven" in fault for fault in proof.disprove(model, (x,), plan))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.first.weight.data.__setitem__((0, 0), 1.0),
        lambda m: setattr(m.first, "weight", nn.Parameter(m.first.weight.data)),
        lambda m: m.first.requires_grad_(False),
        lambda m: m.second.eval(),
        lambda m: m.settings["sizes"].append(3),
        lambda m: setattr(m.norm, "last", torch.zeros(1)),
        lambda m: m.left.register_forward_hook(print),
        lambda m: m.register_buffer("seen", torch.zeros(1)),
    ],
)
def test_whatever_is_changed_on_a_model_is_seen(network: Network, change):
    before = damage.record(network)
    assert damage.changes(before, damage.record(network)) == []
    change(network)
    assert damage.changes(before, damage.record(network))


def test_fake_tensors_are_found_on_the_model_and_in_cached_functions(network: Network):
    assert damage.fake_tensors(network) == []
    with torch._subclasses.FakeTensorMode() as mode:
        network.settings["kept"] = [torch.zeros(2)]
    assert any("kept" in place for place in damage.fake_tensors(network))
    del network.settings["kept"]

    @functools.lru_cache
    def table(size: int) -> Tensor:
        with mode:
            return torch.zeros(size)

    table(3)
    assert any("table" in place for place in damage.fake_tensors(network))


def test_coverage_counts_all_rows_but_those_of_embeddings_and_output_layers(network: Network):
    found = coverage.weights(network, (WORDS,))
    assert {weight.module: weight.rows for weight in found.values()} == {"first": 6, "second": 7}
    plan = gxd.find_units(network, WORDS, exclude="second")
    covered = coverage.covered_rows(network, plan)
    assert coverage.share(found, covered) == 6 / 13
    assert coverage.reasons(found, covered, plan) == {("excluded by name", "second"): 7}
