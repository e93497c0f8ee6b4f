"""Models of Hugging Face transformers, built small from random configurations: nothing is downloaded."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import copy
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd

transformers = pytest.importorskip("transformers")
hf: Any = transformers
from transformers.pytorch_utils import Conv1D  # noqa: E402

VOCABULARY, LENGTH, CLASSES = 40, 6, 3  # more words than positions: the axes of the logits cannot be mistaken
LAYERS = (nn.Linear, nn.modules.conv._ConvNd, Conv1D)


@dataclass(frozen=True)
class Model:
    """A model and the groups that must be found in it."""

    build: Callable[[str], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    groups: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]]
    """Name -> size, producers, consumers. A * in a name stands for the layers 0 and 1."""
    labels: str = "class"
    implementations: tuple[str, ...] = ("sdpa",)
    exact: bool = True

    def expected(self) -> dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]]:
        found = {}
        for name, (size, producers, consumers) in self.groups.items():
            for layer in "01" if "*" in name else "0":
                fill = functools.partial(re.sub, r"\*", layer)
                found[fill(name)] = (size, tuple(map(fill, producers)), tuple(map(fill, consumers)))
        return found


def words(length: int = LENGTH) -> Tensor:
    return torch.randint(VOCABULARY, (2, length))


def text() -> dict[str, Tensor]:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 4:] = 0
    return {"input_ids": words(), "attention_mask": mask}


def bare_text() -> dict[str, Tensor]:
    return {"input_ids": words()}


def two_texts() -> dict[str, Tensor]:
    return {"input_ids": words(), "decoder_input_ids": words(5)}


def image(size: int = 8) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"pixel_values": torch.randn(2, 3, size, size)}


BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CLASSIFIER = {**BASE, "num_labels": CLASSES}
GROUPED = {**BASE, "num_key_value_heads": 2}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": CLASSES,
}


def make(model: str, config: str, **options: Any) -> Callable[[str], nn.Module]:
    def build(implementation: str) -> nn.Module:
        return getattr(hf, model)(getattr(hf, config)(**options, attn_implementation=implementation))

    return build


def encoder(prefix: str, value: str, out: str, inner: str, outer: str) -> dict[str, Any]:
    return {
        f"{prefix}.*.{value}": (16, (f"{prefix}.*.{value}",), (f"{prefix}.*.{out}",)),
        f"{prefix}.*.{inner}": (24, (f"{prefix}.*.{inner}",), (f"{prefix}.*.{outer}",)),
    }


def bert_like(prefix: str) -> dict[str, Any]:
    names = ("attention.self.value", "attention.output.dense", "intermediate.dense", "output.dense")
    return encoder(f"{prefix}.encoder.layer", *names)


def llama_like(values: int = 8) -> dict[str, Any]:
    """Gate and up projection make one unit together."""
    mlp, attention = "model.layers.*.mlp.", "model.layers.*.self_attn."
    return {
        attention + "v_proj": (values, (attention + "v_proj",), (attention + "o_proj",)),
        mlp + "gate_proj": (24, (mlp + "gate_proj", mlp + "up_proj"), (mlp + "down_proj",)),
    }


LM = {"inputs": bare_text, "labels": "next word", "exact": False}
VIT = encoder("layers", "attention.v_proj", "attention.o_proj", "mlp.fc1", "mlp.fc2")


def prefixed(prefix: str, groups: dict[str, Any]) -> dict[str, Any]:
    return {
        prefix + name: (size, tuple(prefix + p for p in producers), tuple(prefix + c for c in consumers))
        for name, (size, producers, consumers) in groups.items()
    }


T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def t5_groups() -> dict[str, Any]:
    groups = {}
    for attention in ("encoder.block.*.layer.0.SelfAttention", "decoder.block.*.layer.0.SelfAttention"):
        groups[f"{attention}.v"] = (16, (f"{attention}.v",), (f"{attention}.o",))
    cross = "decoder.block.*.layer.1.EncDecAttention"
    groups[f"{cross}.v"] = (16, (f"{cross}.v",), (f"{cross}.o",))
    for mlp in ("encoder.block.*.layer.1.DenseReluDense", "decoder.block.*.layer.2.DenseReluDense"):
        groups[f"{mlp}.wi"] = (24, (f"{mlp}.wi",), (f"{mlp}.wo",))
    return groups


BERT = Model(
    make("BertForSequenceClassification", "BertConfig", **CLASSIFIER),
    text,
    {**bert_like("bert"), "bert.pooler.dense": (16, ("bert.pooler.dense",), ("classifier",))},
)
LLAMA = Model(make("LlamaForCausalLM", "LlamaConfig", **GROUPED), groups=llama_like(), **LM)
TIED = Model(make("LlamaForCausalLM", "LlamaConfig", **GROUPED, tie_word_embeddings=True), groups=llama_like(), **LM)
VIT_MODEL = Model(make("ViTForImageClassification", "ViTConfig", **VISION), image(), prefixed("vit.", VIT))

BOTH = ("eager", "sdpa")
REQUIRED = {
    name: replace(model, implementations=BOTH)
    for name, model in (("bert", BERT), ("llama", LLAMA), ("llama with tied embeddings", TIED), ("vit", VIT_MODEL))
}
OTHERS = {
    "bert for masked words": Model(
        make("BertForMaskedLM", "BertConfig", **BASE), text, bert_like("bert"), labels="same word"
    ),
    "distilbert": Model(
        make(
            "DistilBertForSequenceClassification",
            "DistilBertConfig",
            vocab_size=VOCABULARY,
            dim=16,
            n_layers=2,
            n_heads=4,
            hidden_dim=24,
            num_labels=CLASSES,
            max_position_embeddings=16,
            pad_token_id=0,
        ),
        text,
        {
            **encoder("distilbert.transformer.layer", "attention.v_lin", "attention.out_lin", "ffn.lin1", "ffn.lin2"),
            "pre_classifier": (16, ("pre_classifier",), ("classifier",)),
        },
    ),
    "roberta": Model(
        make("RobertaForSequenceClassification", "RobertaConfig", **CLASSIFIER),
        text,
        {**bert_like("roberta"), "classifier.dense": (16, ("classifier.dense",), ("classifier.out_proj",))},
    ),
    "deberta": Model(
        make(
            "DebertaV2ForSequenceClassification",
            "DebertaV2Config",
            **CLASSIFIER,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_buckets=8,
        ),
        text,
        {
            **encoder(
                "deberta.encoder.layer",
                *("attention.self.value_proj", "attention.output.dense", "intermediate.dense", "output.dense"),
            ),
            "pooler.dense": (16, ("pooler.dense",), ("classifier",)),
        },
        implementations=("eager",),
    ),
    "gpt2": Model(
        make(
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=VOCABULARY,
            n_embd=16,
            n_layer=2,
            n_head=4,
            n_inner=24,
            n_positions=16,
            bos_token_id=1,
            eos_token_id=2,
        ),
        bare_text,
        encoder("transformer.h", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
        labels="next word",
    ),
    "mistral": Model(make("MistralForCausalLM", "MistralConfig", **GROUPED), groups=llama_like(), **LM),
    "qwen2": Model(make("Qwen2ForCausalLM", "Qwen2Config", **GROUPED), groups=llama_like(), **LM),
    "qwen3": Model(make("Qwen3ForCausalLM", "Qwen3Config", **GROUPED, head_dim=4), groups=llama_like(), **LM),
    "gemma2": Model(make("Gemma2ForCausalLM", "Gemma2Config", **GROUPED, head_dim=4), groups=llama_like(), **LM),
    "phi3, all projections fused": Model(
        make("Phi3ForCausalLM", "Phi3Config", **GROUPED),
        groups={
            "model.layers.*.self_attn.qkv_proj": (
                *(8, ("model.layers.*.self_attn.qkv_proj",)),
                ("model.layers.*.self_attn.o_proj",),
            ),
            "model.layers.*.mlp.gate_up_proj": (
                *(24, ("model.layers.*.mlp.gate_up_proj",)),
                ("model.layers.*.mlp.down_proj",),
            ),
        },
        **LM,
    ),
    "gpt-neox, heads interleaved": Model(
        make("GPTNeoXForCausalLM", "GPTNeoXConfig", **BASE),
        bare_text,
        encoder(
            "gpt_neox.layers",
            *("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        ),
        labels="next word",
    ),
    "t5": Model(
        make("T5ForConditionalGeneration", "T5Config", **T5),
        two_texts,
        t5_groups(),
        labels="decoder",
        implementations=("eager",),
        exact=False,
    ),
    "deit": Model(make("DeiTForImageClassification", "DeiTConfig", **VISION), image(), prefixed("deit.", VIT)),
    "swin": Model(
        make(
            "SwinForImageClassification",
            "SwinConfig",
            image_size=16,
            patch_size=2,
            embed_dim=8,
            depths=[2, 1],
            num_heads=[2, 4],
            window_size=4,
            num_labels=CLASSES,
        ),
        image(16),
        {
            f"{block}.{inner}": (size, (f"{block}.{inner}",), (f"{block}.{outer}",))
            for block, width in (
                ("swin.encoder.layers.0.blocks.0", 8),
                ("swin.encoder.layers.0.blocks.1", 8),
                ("swin.encoder.layers.1.blocks.0", 16),
            )
            for inner, outer, size in (
                ("attention.v_proj", "attention.o_proj", width),
                ("mlp.fc1", "mlp.fc2", 4 * width),
            )
        },
    ),
    "convnext": Model(
        make(
            "ConvNextForImageClassification",
            "ConvNextConfig",
            hidden_sizes=[8, 12],
            depths=[1, 1],
            num_stages=2,
            layer_scale_init_value=0.1,  # by default 1e-6: a fresh block does nothing that shows
            num_labels=CLASSES,
        ),
        image(32),
        {
            f"convnext.encoder.stages.{stage}.layers.0.{inner}": (
                *(size, (f"convnext.encoder.stages.{stage}.layers.0.{inner}",)),
                (f"convnext.encoder.stages.{stage}.layers.0.{outer}",),
            )
            for stage, width in (("0", 8), ("1", 12))
            for inner, outer, size in (("dwconv", "pwconv1", width), ("pwconv1", "pwconv2", 4 * width))
        },
        implementations=("eager",),
        exact=False,
    ),
    "resnet": Model(
        make(
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=8,
            hidden_sizes=[8, 12],
            depths=[1, 2],
            layer_type="basic",
            num_labels=CLASSES,
        ),
        image(32),
        {
            f"resnet.encoder.stages.{block}.layer.0.convolution": (
                *(size, (f"resnet.encoder.stages.{block}.layer.0.convolution",)),
                (f"resnet.encoder.stages.{block}.layer.1.convolution",),
            )
            for block, size in (("0.layers.0", 8), ("1.layers.0", 12), ("1.layers.1", 12))
        },
        implementations=("eager",),
        exact=False,
    ),
}
LAYER_DROP = {  # models that draw a random number in Python to decide whether a layer runs
    "whisper": Model(
        make(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            vocab_size=VOCABULARY,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            num_mel_bins=8,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_source_positions=10,
            max_target_positions=10,
            decoder_start_token_id=1,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        lambda: {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": words(5)},
        {
            f"model.{part}": (size, (f"model.{part}",), (f"model.{reader}",))
            for side in ("encoder", "decoder")
            for part, reader, size in (
                (f"{side}.layers.0.self_attn.v_proj", f"{side}.layers.0.self_attn.out_proj", 16),
                (f"{side}.layers.0.fc1", f"{side}.layers.0.fc2", 24),
            )
        }
        | {
            "model.decoder.layers.0.encoder_attn.v_proj": (
                *(16, ("model.decoder.layers.0.encoder_attn.v_proj",)),
                ("model.decoder.layers.0.encoder_attn.out_proj",),
            ),
            "model.encoder.conv1": (16, ("model.encoder.conv1",), ("model.encoder.conv2",)),
        },
        labels="decoder",
        exact=False,
    ),
    "opt": Model(
        make(
            "OPTForCausalLM",
            "OPTConfig",
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=24,
            max_position_embeddings=16,
            word_embed_proj_dim=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        bare_text,
        encoder("model.decoder.layers", "self_attn.v_proj", "self_attn.out_proj", "fc1", "fc2"),
        labels="next word",
    ),
}
ALL = {**REQUIRED, **OTHERS, **LAYER_DROP}


@functools.cache
def traced(name: str, implementation: str) -> tuple[nn.Module, dict[str, Tensor], gxd.UnitPlan]:
    torch.manual_seed(0)
    model, inputs = ALL[name].build(implementation), ALL[name].inputs()
    return model, inputs, gxd.find_units(model, inputs)


def with_implementations(names: Any) -> list[Any]:
    return [pytest.param(n, i, id=f"{n}, {i}") for n in names for i in ALL[n].implementations]


everything = pytest.mark.parametrize(("name", "implementation"), with_implementations(ALL))
required = pytest.mark.parametrize(("name", "implementation"), with_implementations(REQUIRED))


# ---------------------------------------------------------------- the plan


@everything
def test_the_hidden_units_of_every_layer_are_found(name: str, implementation: str):
    _, _, plan = traced(name, implementation)
    found = {
        g.name: (g.size, tuple(dict.fromkeys(p.module for p in g.producers)), tuple(c.module for c in g.consumers))
        for g in plan.groups
    }
    assert found == ALL[name].expected()


@everything
def test_whatever_is_not_reset_is_named_with_a_reason(name: str, implementation: str):
    model, _, plan = traced(name, implementation)
    reset = {p.module for g in plan.groups for p in g.producers}
    reasons = {entry.name.partition("[")[0]: entry.reason for entry in plan.skipped}
    assert all(reasons.values())
    for module, part in model.named_modules():
        if isinstance(part, (*LAYERS, nn.Embedding)):
            assert module in reset or module in reasons, f"{module} is not accounted for"
            assert module not in reset or isinstance(part, LAYERS)


@everything
def test_the_check_finds_nothing_wrong(name: str, implementation: str):
    model, inputs, plan = traced(name, implementation)
    report = gxd.verify_plan(model, inputs, plan=plan)
    for group in report.groups:
        allowed = {"passed"} if ALL[name].exact else {"passed", "approximate"}
        assert group.status in allowed, f"{group}"


@pytest.mark.parametrize("name", REQUIRED)
def test_the_kind_of_attention_makes_no_difference_to_the_plan(name: str):
    assert traced(name, "eager")[2].fingerprint() == traced(name, "sdpa")[2].fingerprint()


def test_a_value_unit_that_serves_several_heads_has_a_column_for_each():
    _, _, plan = traced("llama", "sdpa")
    group = plan["model.layers.0.self_attn.v_proj"]
    # Two key-value heads of width 4, each read by two of the four query heads.
    assert group.views[0].columns.tolist() == [[8 * (u // 4) + u % 4, 8 * (u // 4) + u % 4 + 4] for u in range(8)]


def test_fused_projections_are_told_apart_by_their_rows():
    _, _, plan = traced("phi3, all projections fused", "sdpa")
    assert plan["model.layers.0.self_attn.qkv_proj"].producers[0].rows.tolist() == list(range(24, 32))
    gate, up = plan["model.layers.0.mlp.gate_up_proj"].producers
    assert (gate.rows.tolist(), up.rows.tolist()) == (list(range(24)), list(range(24, 48)))
    _, _, plan = traced("gpt2", "sdpa")
    assert plan["transformer.h.0.attn.c_attn"].producers[0].rows.tolist() == list(range(32, 48))


def test_a_tied_output_layer_is_neither_reset_nor_resets_what_it_reads():
    for name in ("llama with tied embeddings", "bert for masked words", "t5", "gpt2"):
        model, _, plan = traced(name, ALL[name].implementations[0])
        shared = model.get_input_embeddings().weight
        assert model.get_output_embeddings().weight is shared
        names = {n for n, p in model.named_parameters(remove_duplicate=False) if p is shared}
        assert not names & set(plan.shapes)


@pytest.mark.parametrize("name", REQUIRED)
def test_residual_groups_are_right_too(name: str):
    model, inputs, skipped = traced(name, "sdpa")
    plan = gxd.find_units(model, inputs, residual="group")
    assert {g.name for g in skipped.groups} <= {g.name for g in plan.groups}
    assert gxd.verify_plan(model, inputs, plan=plan).ok
    if name == "vit":  # the stream starts at a convolution; the others' start at an embedding, which cannot be reset
        stream = plan["vit.embeddings.patch_embeddings.projection"]
        assert stream.residual and stream.size == 16 and len(stream.producers) == 5


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_model_that_returns_a_cache_is_traced_as_it_is_used(name: str):
    """`use_cache` is on by default; the trace must not depend on the caller having switched it off."""
    model, inputs, plan = traced(name, "eager")
    assert model.config.use_cache
    explicit = gxd.find_units(model, {**inputs, "use_cache": False})
    assert explicit.fingerprint() == plan.fingerprint()
    assert model.config.use_cache


def test_labels_may_be_among_the_example_inputs():
    model, inputs, plan = traced("bert", "sdpa")
    labelled = gxd.find_units(model, {**inputs, "labels": torch.tensor([0, 2])})
    assert labelled.fingerprint() == plan.fingerprint()


def test_the_body_alone_can_be_traced():
    model, inputs, _ = traced("bert", "sdpa")
    plan = gxd.find_units(model.bert, inputs)
    assert "encoder.layer.0.intermediate.dense" in {g.name for g in plan.groups}
    assert "pooler.dense" not in {g.name for g in plan.groups}, "there the pooler makes an output"


# ---------------------------------------------------------------- training


def batch(name: str, model: nn.Module, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs with labels: classes, or words of which some are not scored (-100)."""
    torch.manual_seed(seed)
    inputs = ALL[name].inputs()
    kind = ALL[name].labels
    if kind == "class":
        return inputs, torch.randint(CLASSES, (2,))
    labels = inputs["decoder_input_ids" if kind == "decoder" else "input_ids"].clone()
    labels[0, :2] = -100
    return inputs, labels


def fresh(name: str, implementation: str) -> tuple[nn.Module, gxd.UnitPlan]:
    model, _, plan = traced(name, implementation)
    return copy.deepcopy(model).train(), plan


def train(name: str, model: nn.Module, plan: gxd.UnitPlan, utility: str, steps: int = 5, **options: Any) -> Any:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    options = {"replacement_rate": 0.2, "maturity": 1, **options}
    cbp = gxd.ContinualBackprop(model, optimizer, plan=plan, utility=utility, **options)
    for step in range(steps):
        inputs, labels = batch(name, model, step)
        output = model(**inputs, labels=labels)
        cbp.observe(output.logits, labels)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert output.loss.isfinite()
    return cbp


@required
@pytest.mark.parametrize("utility", ["gxd", "gxd_sketch", "contribution"])
def test_training_resets_units_of_every_group_and_adds_no_key_to_the_model(
    name: str, implementation: str, utility: str
):
    model, plan = fresh(name, implementation)
    keys = list(model.state_dict())
    cbp = train(name, model, plan, utility)
    for group in plan.groups:
        mature = [age for age in cbp.ages()[group.name].tolist() if age == 5]
        assert 0 < len(mature) < group.size, f"{group.name}: some were reset, and some were not"
        assert cbp.utilities()[group.name].isfinite().all()
    assert cbp.total_resets > 0
    assert list(model.state_dict()) == keys
    cbp.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", [n for n in ALL if n not in REQUIRED])
def test_every_model_trains_with_resets(name: str):
    model, plan = fresh(name, ALL[name].implementations[-1])
    cbp = train(name, model, plan, "gxd", steps=4)
    assert cbp.total_resets > 0
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("utility", ["gxd", "gxi", "gxd_sketch", "gxd_all_logit", "loss_gradient", "activation"])
def test_the_kind_of_attention_makes_no_difference_to_the_scores(utility: str):
    scores = []
    for implementation in ("eager", "sdpa"):
        model, plan = fresh("llama", implementation)
        scores.append(train("llama", model, plan, utility, steps=2, replacement_rate=0.0).utilities())
    for name, expected in scores[0].items():
        assert torch.allclose(scores[1][name], expected, rtol=1e-3, atol=1e-6 * float(expected.max()))


@pytest.mark.parametrize("name", ["bert", "llama", "vit"])
def test_observing_does_not_change_the_training(name: str):
    runs = []
    for utility in ("gxd", None):
        model, plan = fresh(name, "sdpa")
        if utility is not None:
            train(name, model, plan, utility, replacement_rate=0.0)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
            for step in range(5):
                inputs, labels = batch(name, model, step)
                model(**inputs, labels=labels).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        runs.append(model.state_dict())
    assert all(torch.equal(value, runs[1][key]) for key, value in runs[0].items())


def test_words_labelled_minus_100_do_not_count_and_logits_may_be_shifted_like_the_loss():
    """A causal model predicts the next word: observe(logits[:, :-1], labels[:, 1:]) is what its loss compares."""
    model, plan = fresh("llama", "sdpa")
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    inputs, labels = batch("llama", model, 0)
    targets = labels[:, 1:]
    cbp = gxd.ContinualBackprop(model, optimizer, plan=plan, utility="gxd", replacement_rate=0.0)
    output = model(**inputs, labels=labels)
    cbp.observe(output.logits[:, :-1], targets)
    output.loss.backward()
    optimizer.step()
    found = cbp.utilities()
    cbp.close()

    seen = {}
    for group in plan.groups:
        module = model.get_submodule(group.consumers[0].module)
        module.register_forward_pre_hook(lambda m, args, key=group.name: seen.update({key: args[0]}))
    logits = model(**inputs).logits[:, :-1]
    kept = targets != -100
    score = logits.gather(2, targets.where(kept, 0).unsqueeze(2)).squeeze(2).mul(kept).sum()
    gradients = torch.autograd.grad(score, list(seen.values()))
    for (name, h), gradient in zip(seen.items(), gradients):
        columns = plan[name].views[0].columns
        h, gradient = (t.detach()[..., columns].movedim(2, -1) for t in (h, gradient))  # (examples, tokens, k, units)
        effect = ((h - h.mean((0, 1, 2))) * gradient).sum((1, 2)).abs().mean(0)
        assert torch.allclose(found[name], effect, rtol=1e-3, atol=1e-6 * float(effect.max()))


def test_the_logits_of_a_model_may_be_observed_with_a_loss_of_ones_own():
    model, plan = fresh("vit", "sdpa")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with gxd.ContinualBackprop(model, optimizer, plan=plan, replacement_rate=0.3, maturity=0) as cbp:
        for step in range(3):
            inputs, labels = batch("vit", model, step)
            logits = model(**inputs).logits
            cbp.observe(logits, labels)
            F.cross_entropy(logits, labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert cbp.total_resets > 0


@pytest.mark.parametrize("utility", ["gxd", "loss_gradient", "contribution"])
def test_gradient_checkpointing_changes_no_score(utility: str):
    scores = []
    for checkpointing in (False, True):
        model, plan = fresh("llama", "sdpa")
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        scores.append(train("llama", model, plan, utility, steps=3, replacement_rate=0.0).utilities())
    assert all(torch.equal(scores[0][name], scores[1][name]) for name in scores[0])


def test_a_reset_keeps_the_function_where_the_consumers_have_biases():
    """On BERT: units held at their running means, and the same units reset, give the same logits."""
    model, plan = fresh("bert", "sdpa")
    model = model.double()
    cbp = train("bert", model, plan, "gxd", steps=3, replacement_rate=0.0)
    cbp.close()
    references = {name: r.double() for name, r in cbp.references().items()}
    units = {group.name: list(range(0, group.size, 3)) for group in plan.groups}
    model.eval()
    inputs, _ = batch("bert", model, 0)
    with torch.no_grad():
        handles = []
        for name, index in units.items():
            group = plan[name]
            level = references[name].expand(1, -1)[0]

            def hold(module, args, group=group, index=index, level=level):
                columns = group.views[0].columns[index].flatten()
                return (args[0].index_copy(-1, columns, _levels(args[0], level[index])),)

            handles.append(model.get_submodule(group.consumers[0].module).register_forward_pre_hook(hold))
        held = model(**inputs).logits
        for handle in handles:
            handle.remove()
        gxd.reset_units(model, plan, units, references=references)
        assert torch.allclose(model(**inputs).logits, held, rtol=1e-9, atol=1e-12)


def _levels(like: Tensor, level: Tensor) -> Tensor:
    return level.to(like).expand(*like.shape[:-1], len(level))
