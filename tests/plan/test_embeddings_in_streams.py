"""An embedding that writes a residual stream is reset with it, on request; alone, or where it cannot be, it is not."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gxd
from tests.zoo import Net, linear

WORDS, WIDTH = 11, 6
IDS = torch.randint(WORDS, (3, 4), generator=torch.Generator().manual_seed(0))


def stream(**options) -> Net:
    """A block on top of an embedding."""
    torch.manual_seed(0)
    parts = {"embed": nn.Embedding(WORDS, WIDTH, **options), "up": linear(WIDTH, 8), "down": linear(8, WIDTH)}
    parts |= {"norm": nn.LayerNorm(WIDTH), "head": linear(WIDTH, 3)}

    def run(m, ids):
        x = m.embed(ids)
        x = x + m.down(F.gelu(m.up(m.norm(x))))
        return m.head(x).mean(1)

    return Net(run, **parts)


def reason_of(plan: gxd.UnitPlan, name: str) -> str:
    return next(entry.reason for entry in plan.skipped if entry.name == name)


def test_a_stream_that_begins_with_an_embedding_is_reset_as_a_whole():
    model = stream()
    plan = gxd.find_units(model, IDS, residual="group")
    group = plan["embed"]
    assert [p.module for p in group.producers] == ["embed", "down"] and group.size == WIDTH and group.residual
    assert {c.module for c in group.consumers} == {"up", "head"}
    report = gxd.verify_plan(model, IDS, plan=plan)
    assert {g.name: g.status for g in report.groups} == {"embed": "approximate", "up": "passed"}, str(report)


def test_a_reset_draws_the_units_feature_of_every_token_anew_and_nothing_else_of_the_table():
    model = stream()
    table = model.embed.weight.detach().clone()
    plan = gxd.find_units(model, IDS, residual="group")
    assert str(plan["embed"].producers[0].init).startswith("normal(")
    gxd.reset_units(model, plan, {"embed": [2]})
    changed = model.embed.weight != table
    assert changed[:, 2].all() and not changed[:, [0, 1, 3, 4, 5]].any()
    assert (model.up.weight[:, 2] == 0).all() and (model.head.weight[:, 2] == 0).all()


def test_fresh_features_of_a_trained_table_have_the_scale_of_the_others():
    model = stream()
    with torch.no_grad():  # far from any plain distribution
        model.embed.weight.copy_(0.02 * torch.randn(WORDS, WIDTH) ** 3)
    init = gxd.find_units(model, IDS, residual="group")["embed"].producers[0].init
    assert init.kind == "normal" and init.scale == pytest.approx(model.embed.weight.square().mean().sqrt().item())


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_training_with_resets_of_the_stream_runs_and_resets_it(optimizer):
    model = stream()
    opt = optimizer(model.parameters(), lr=0.01)
    plan = gxd.find_units(model, IDS, residual="group", include="embed")
    cbp = gxd.ContinualBackprop(model, opt, plan=plan, replacement_rate=0.1, maturity=2)
    for _ in range(8):
        logits, y = model(IDS), torch.tensor([0, 1, 2])
        cbp.observe(logits, y)
        F.cross_entropy(logits, y).backward()
        opt.step()
        opt.zero_grad()
        if len(index := cbp.last_resets.get("embed", torch.zeros(0))):
            break
    assert len(index), "no unit was reset"
    assert (model.up.weight[:, index] == 0).all() and (model.head.weight[:, index] == 0).all()
    if optimizer is torch.optim.AdamW:
        moments = opt.state[model.embed.weight]["exp_avg"]
        assert (moments[:, index] == 0).all() and (moments != 0).any()


def test_without_the_request_an_embedding_is_refused_as_ever():
    plan = gxd.find_units(stream(), IDS)
    assert reason_of(plan, "embed").startswith("embedding: its output has no incoming weights to draw again")
    assert {group.name for group in plan.groups} == {"up"}


OPTIONS = {"padding_idx": (0, "padding"), "max_norm": (1.0, "max_norm"), "sparse": (True, "sparse")}


@pytest.mark.parametrize("option", OPTIONS)
def test_a_table_that_is_more_than_a_weight_is_refused_with_the_reason(option: str):
    value, words = OPTIONS[option]
    plan = gxd.find_units(stream(**{option: value}), IDS, residual="group")
    assert words in reason_of(plan, "embed") and {group.name for group in plan.groups} == {"up"}


def test_a_frozen_table_is_refused():
    model = stream()
    model.embed.requires_grad_(False)
    assert "frozen" in reason_of(gxd.find_units(model, IDS, residual="group"), "embed")


def test_an_embedding_that_only_layers_read_is_not_reset():
    parts = {"embed": nn.Embedding(WORDS, WIDTH), "a": linear(WIDTH, 8), "head": linear(8, 3)}
    model = Net(lambda m, ids: m.head(m.a(m.embed(ids)).relu()).mean(1), **parts)
    plan = gxd.find_units(model, IDS, residual="group")
    assert {group.name for group in plan.groups} == {"a"}
    assert "no incoming weights" in reason_of(plan, "embed")


def test_an_embedding_that_only_scales_units_does_not_tie_them():
    """As of classes that a layer is conditioned on."""
    parts = {"embed": nn.Embedding(WORDS, 8), "a": linear(5, 8), "head": linear(8, 3)}
    model = Net(lambda m, x, c: m.head(m.a(x) * m.embed(c)), **parts)
    plan = gxd.find_units(model, (torch.randn(3, 5), IDS[:, 0]), residual="group")
    assert [p.module for p in plan["a"].producers] == ["a"]


def test_positions_that_are_the_same_for_every_input_are_constants():
    def run(m, x):
        return m.head(F.relu(m.a(x) + m.positions(torch.arange(x.shape[1]))))

    parts = {"a": linear(5, WIDTH), "positions": nn.Embedding(4, WIDTH), "head": linear(WIDTH, 3)}
    torch.manual_seed(0)
    model, x = Net(run, **parts), torch.randn(2, 4, 5)
    report = gxd.verify_plan(model, x)
    assert report["a"].status == "passed" and report.plan["a"].size == WIDTH


hf = pytest.importorskip("transformers")
BASE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
# name -> the writers and the readers of the stream; a * stands for the layers 0 and 1
MODELS = {
    "Llama": (
        "model.embed_tokens model.layers.*.self_attn.o_proj model.layers.*.mlp.down_proj",
        "model.layers.*.self_attn.[qkv]_proj model.layers.*.mlp.(gate|up)_proj lm_head",
    ),
    "Qwen2": (
        "model.embed_tokens model.layers.*.self_attn.o_proj model.layers.*.mlp.down_proj",
        "model.layers.*.self_attn.[qkv]_proj model.layers.*.mlp.(gate|up)_proj lm_head",
    ),
    "GPTNeoX": (
        "gpt_neox.embed_in gpt_neox.layers.*.attention.dense gpt_neox.layers.*.mlp.dense_4h_to_h",
        "gpt_neox.layers.*.attention.query_key_value gpt_neox.layers.*.mlp.dense_h_to_4h lm_head",
    ),
}


def causal(kind: str, **options) -> nn.Module:
    torch.manual_seed(0)
    options |= {"num_key_value_heads": 4} if kind == "Qwen2" else {}
    config = getattr(hf, f"{kind}Config")(**BASE, **options)
    return getattr(hf, f"{kind}ForCausalLM")(config)


def matches(names: set[str], patterns: str, model: nn.Module) -> bool:
    wanted = "|".join(pattern.replace(".", r"\.").replace("*", r"\d") for pattern in patterns.split())
    return names == {name for name, _ in model.named_modules() if re.fullmatch(wanted, name)}


@pytest.mark.parametrize("kind", MODELS)
def test_the_residual_stream_of_a_language_model_is_covered_end_to_end(kind: str):
    model = causal(kind)
    inputs = {"input_ids": torch.randint(40, (2, 6)), "use_cache": False}
    plan = gxd.find_units(model, inputs, residual="group")
    (group,) = [group for group in plan.groups if group.residual]
    writers, readers = MODELS[kind]
    assert group.size == 16
    assert matches({p.module for p in group.producers}, writers, model)
    assert matches({c.module for c in group.consumers}, readers, model)
    assert all(norm.couples and norm.entries.shape == (16, 1) for norm in group.norms)
    assert len(group.norms) == 5  # two in each layer, one at the end
    report = gxd.verify_plan(model, inputs, plan=plan)
    assert report[group.name].status == "approximate", str(report)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    gxd.reset_units(model, plan, {group.name: [3, 7]})
    for norm in group.norms:
        weight = model.get_parameter(norm.weight)
        assert (weight[[3, 7]] == 1).all() and torch.equal(weight[4:7], before[norm.weight][4:7])


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_a_table_tied_to_the_head_is_refused_with_the_true_reason(kind: str):
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 40, "n_positions": 16}
    model = causal("Llama", tie_word_embeddings=True) if kind == "Llama" else hf.GPT2LMHeadModel(hf.GPT2Config(**sizes))
    plan = gxd.find_units(model, {"input_ids": torch.randint(40, (2, 6))}, residual="group")
    name = "model.embed_tokens" if kind == "Llama" else "transformer.wte"
    assert "tied weights" in reason_of(plan, name) and not any(group.residual for group in plan.groups)
