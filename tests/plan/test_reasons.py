"""What is not reset is refused for a reason that is true, and is told what helps where something does."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import re
import sys
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gxd
from gxd.plan.find import engine as walk
from tests.zoo import CASES, Net, linear, param

ZOO = {case.name: case for case in CASES}
X = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))


def rows_of(entry: Any) -> tuple[str, set[int] | None]:
    """The layer of an entry, and its rows; None: all."""
    name, _, text = entry.name.partition("[")
    if not text:
        return name, None
    spans = [span.split(":") for span in text.rstrip("]").split(",")]
    return name, {row for span in spans if len(span) == 2 for row in range(int(span[0]), int(span[1]))}


@cache
def plans(name: str) -> tuple[gxd.UnitPlan, gxd.UnitPlan, list[str]]:
    """The plan, the one with groups of residual coordinates, and what rules have raised on the way."""
    case, raised = ZOO[name], []

    def unknown(engine, node, args, kwargs, before=walk.unknown):
        if sys.exc_info()[0] is not None:
            raised.append(f"{node.target}: {sys.exc_info()[1]!r}")
        return before(engine, node, args, kwargs)

    torch.manual_seed(0)
    model, inputs = case.build(), case.inputs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk, "unknown", unknown)
        found = [gxd.find_units(model, inputs, batch_dim=case.batch_dim, residual=mode) for mode in ("skip", "group")]
    return found[0], found[1], raised


@pytest.mark.parametrize("name", ZOO)
def test_the_option_that_helps_is_named_where_it_helps_and_only_there(name: str):
    plan, grouped, _ = plans(name)
    covered: dict[str, set[int]] = {}
    for group in grouped.groups:
        for producer in group.producers:
            covered.setdefault(producer.module, set()).update(producer.rows.tolist())
    still = {entry.name for entry in grouped.skipped}
    for entry in plan.skipped:
        layer, rows = rows_of(entry)
        helps = layer in covered and layer not in still if rows is None else rows <= covered.get(layer, set())
        assert ("residual='group'" in entry.reason) == (helps and entry.name not in still), f"{entry}"
    assert not any("residual='group'" in entry.reason for entry in grouped.skipped)


@pytest.mark.parametrize("name", ZOO)
def test_no_rule_fails_on_a_model_of_the_zoo(name: str):
    """A rule that raises refuses the units, which would hide a mistake in it."""
    assert not plans(name)[2]


def reasons(model: nn.Module, *inputs: torch.Tensor, residual: str = "skip") -> dict[str, str]:
    return {entry.name: entry.reason for entry in gxd.find_units(model, inputs, residual=residual).skipped}


def test_a_layer_that_scales_and_shifts_is_not_called_a_rotary_embedding():
    def run(m, x, c):
        scale, shift = m.film(c).chunk(2, -1)
        return m.out(F.relu(m.a(x) * scale + shift))

    model = Net(run, film=linear(5, 8), a=linear(5, 4), out=linear(4, 3))
    found = reasons(model, X, X)
    assert "rotary" not in str(found)
    assert "film" in found["a"] and "added" in found["a"]


def test_each_pair_of_layers_that_are_added_is_named():
    def run(m, x):
        left, right = torch.cat([m.a(x), m.b(x)], -1), torch.cat([m.c(x), m.d(x)], -1)
        return m.out(left + right)

    layers = {name: linear(5, 4) for name in "abcd"}
    found = reasons(Net(run, **layers, out=linear(8, 3)), X)
    for one, other in ("ac", "bd"):
        assert f"'{one}' and '{other}' are added" in found[one] == found[other]


def test_rows_tied_by_sums_are_not_said_to_be_tied_by_products():
    model = Net(lambda m, x: m.out((h := m.a(x)) + h.roll(1, -1)), a=linear(5, 6), out=linear(6, 3))
    assert "'a' are added to one another" in reasons(model, X)["a"]
    assert "sums or products tie" in reasons(model, X, residual="group")["a"]


def test_a_product_with_a_constant_matrix_is_not_called_attention():
    model = Net(lambda m, x: m.out(m.a(x) @ m.mix), a=linear(5, 4), mix=nn.Buffer(torch.randn(4, 4)), out=linear(4, 3))
    assert "constant matrix" in reasons(model, X)["a"]


def test_functional_norms_without_parameters_do_not_stand_in_each_others_way():
    """Norms of different widths in one module: neither has an entry that the other could use."""

    def run(m, x):
        return m.out(F.layer_norm(m.b(F.layer_norm(m.a(x), (4,)).relu()), (6,)).relu())

    model = Net(run, a=linear(5, 4), b=linear(4, 6), out=linear(6, 3))
    plan = gxd.find_units(model, X)
    assert {group.name for group in plan.groups} == {"a", "b"}, str(plan)
    assert gxd.verify_plan(model, X, plan=plan).ok


class Experts(nn.Module):
    """A mixture whose weights are stacks, used in one of the ways that libraries use them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.up, self.down = param(torch.randn(4, 8, 6)), param(torch.randn(4, 6, 8))

    def forward(self, x, chosen):
        up, down = self.up[chosen], self.down[chosen]  # (tokens, out, in)
        if self.how == "bmm":
            return torch.bmm(down, torch.relu(torch.bmm(up, x.unsqueeze(-1)))).squeeze(-1)
        if self.how == "einsum":
            return torch.einsum("toi,ti->to", down, torch.relu(torch.einsum("toi,ti->to", up, x)))
        return F.linear(torch.relu(F.linear(x, self.up[0])), self.down[0])


@pytest.mark.parametrize("how", ["bmm", "einsum", "linear on a slice"])
def test_stacks_of_expert_weights_are_refused_by_name(how: str):
    def run(m, x):
        h = torch.tanh(m.a(x))
        return m.out(m.experts(h, m.router(x).argmax(-1)))

    torch.manual_seed(0)
    model = Net(run, a=linear(5, 6), router=linear(5, 4), experts=Experts(how), out=linear(6, 3))
    found = reasons(model, X)
    assert re.search(r"functional|stack of weights", found["experts"]), found
    assert "a" in found and "functional" in found["a"]


def test_the_experts_of_a_language_model_are_refused_by_name():
    hf = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = hf.MixtralConfig(vocab_size=40, num_key_value_heads=2, num_local_experts=4, **sizes)
    model = hf.MixtralForCausalLM(config)
    model.set_experts_implementation("batched_mm")
    inputs = {"input_ids": torch.randint(40, (2, 6)), "use_cache": False}
    found = {entry.name: entry.reason for entry in gxd.find_units(model, inputs).skipped}
    assert "stack of weights" in found["model.layers.0.mlp.experts"]
