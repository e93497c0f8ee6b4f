"""Sixty models of Hugging Face transformers, tiny: class -> options of its configuration and the kind of its inputs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.model_zoo.calls import Factory, Inputs

WORDS, LENGTH, CLASSES, PIXELS = 64, 16, 3, 32

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BASE = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    **SPECIAL,
}
CLASSIFIER = {**BASE, "num_labels": CLASSES}
GROUPED = {**BASE, "num_key_value_heads": 2}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": PIXELS,
    "patch_size": 8,
    "num_labels": CLASSES,
}
BART = {
    "vocab_size": WORDS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
    **SPECIAL,
}
T5 = {
    "vocab_size": WORDS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
GPT = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **SPECIAL}
SPEECH = {
    **CLASSIFIER,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 16,
    "apply_spec_augment": False,
}
TEXT_TOWER = {**BASE, "projection_dim": 16}
VISION_TOWER = {**VISION, "projection_dim": 16}
SERIES = {"context_length": 32, "prediction_length": 8, "patch_length": 8, "num_input_channels": 3}


def text() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, WORDS, (2, LENGTH))}


def masked_text() -> dict[str, Tensor]:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 12:] = 0
    return {**text(), "attention_mask": mask}


def two_texts() -> dict[str, Tensor]:
    return {**text(), "decoder_input_ids": torch.randint(3, WORDS, (2, 10))}


def image() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, PIXELS, PIXELS)}


def text_and_image() -> dict[str, Tensor]:
    return {**text(), **image()}


def sound() -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 800)}


def spectrogram() -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": torch.randint(3, WORDS, (2, 10))}


def series() -> dict[str, Tensor]:
    return {"past_values": torch.randn(2, 32, 3)}


def observed_series() -> dict[str, Tensor]:
    past, future = 32 + 7, 8
    return {
        "past_values": torch.randn(2, past),
        "past_time_features": torch.randn(2, past, 2),
        "past_observed_mask": torch.ones(2, past),
        "future_values": torch.randn(2, future),
        "future_time_features": torch.randn(2, future, 2),
    }


def episode() -> dict[str, Tensor]:
    steps = 6
    return {
        "states": torch.randn(2, steps, 11),
        "actions": torch.randn(2, steps, 4),
        "rewards": torch.randn(2, steps, 1),
        "returns_to_go": torch.randn(2, steps, 1),
        "timesteps": torch.arange(steps).expand(2, steps).contiguous(),
        "attention_mask": torch.ones(2, steps),
    }


MODELS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Tensor]]]] = {
    # encoders of text
    "BertForSequenceClassification": (CLASSIFIER, masked_text),
    "RobertaForMaskedLM": (BASE, masked_text),
    "AlbertForSequenceClassification": ({**CLASSIFIER, "embedding_size": 16}, masked_text),
    "ElectraForPreTraining": ({**BASE, "embedding_size": 16}, masked_text),
    "DistilBertForSequenceClassification": (
        {"vocab_size": WORDS, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "num_labels": CLASSES},
        masked_text,
    ),
    "DebertaV2ForSequenceClassification": (
        {**CLASSIFIER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
        masked_text,
    ),
    "MPNetForSequenceClassification": (CLASSIFIER, masked_text),
    "LongformerForSequenceClassification": ({**CLASSIFIER, "attention_window": 8}, masked_text),
    "BigBirdForSequenceClassification": (
        {**CLASSIFIER, "attention_type": "original_full", "block_size": 4},
        masked_text,
    ),
    "NystromformerForSequenceClassification": (
        {**CLASSIFIER, "num_landmarks": LENGTH, "segment_means_seq_len": LENGTH},
        text,
    ),
    "FNetForSequenceClassification": (CLASSIFIER, text),
    "FunnelForSequenceClassification": (
        {
            "vocab_size": WORDS,
            "block_sizes": [1, 1],
            "d_model": 32,
            "n_head": 4,
            "d_head": 8,
            "d_inner": 48,
            "num_labels": CLASSES,
        },
        masked_text,
    ),
    "XLMForSequenceClassification": (
        {"vocab_size": WORDS, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "num_labels": CLASSES},
        masked_text,
    ),
    "XLNetForSequenceClassification": (
        {"vocab_size": WORDS, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "num_labels": CLASSES},
        masked_text,
    ),
    "ModernBertForSequenceClassification": (CLASSIFIER | {"cls_token_id": 1, "sep_token_id": 2}, masked_text),
    # decoders of text
    "GPT2LMHeadModel": (GPT, text),
    "GPTNeoForCausalLM": (
        {
            "vocab_size": WORDS,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
            "max_position_embeddings": 64,
        },
        text,
    ),
    "GPTJForCausalLM": ({**GPT, "rotary_dim": 4}, text),
    "GPTNeoXForCausalLM": (BASE, text),
    "LlamaForCausalLM": (GROUPED, text),
    "MistralForCausalLM": (GROUPED, text),
    "Qwen2ForCausalLM": (GROUPED, text),
    "Qwen3ForCausalLM": ({**GROUPED, "head_dim": 8}, text),
    "GemmaForCausalLM": ({**GROUPED, "head_dim": 8}, text),
    "Gemma2ForCausalLM": ({**GROUPED, "head_dim": 8}, text),
    "PhiForCausalLM": (GROUPED, text),
    "Phi3ForCausalLM": (GROUPED, text),
    "OPTForCausalLM": (
        {
            "vocab_size": WORDS,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 48,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 32,
        },
        text,
    ),
    "BloomForCausalLM": ({"vocab_size": WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 4}, text),
    "FalconForCausalLM": ({**BASE, "multi_query": True, "parallel_attn": True}, text),
    "MptForCausalLM": ({"vocab_size": WORDS, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}, text),
    "OlmoForCausalLM": (GROUPED, text),
    "StableLmForCausalLM": (GROUPED, text),
    "Starcoder2ForCausalLM": (GROUPED, text),
    "CohereForCausalLM": (GROUPED, text),
    "GraniteForCausalLM": (GROUPED, text),
    "MixtralForCausalLM": ({**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}, text),
    "Qwen2MoeForCausalLM": (
        {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1},
        text,
    ),
    "MambaForCausalLM": ({"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}, text),
    "RwkvForCausalLM": (
        {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32},
        text,
    ),
    "ReformerModelWithLMHead": (
        {
            "vocab_size": WORDS,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "attention_head_size": 8,
            "feed_forward_size": 48,
            "attn_layers": ["local", "local"],
            "local_attn_chunk_length": 8,
            "axial_pos_shape": [4, 4],
            "axial_pos_embds_dim": [16, 16],
            "is_decoder": True,
            "max_position_embeddings": 64,
        },
        text,
    ),
    # encoders and decoders
    "T5ForConditionalGeneration": (T5, two_texts),
    "MT5ForConditionalGeneration": ({**T5, "feed_forward_proj": "gated-gelu"}, two_texts),
    "BartForConditionalGeneration": (BART, two_texts),
    "M2M100ForConditionalGeneration": (BART, two_texts),
    # sound
    "WhisperForConditionalGeneration": (
        {**BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16},
        spectrogram,
    ),
    "Wav2Vec2ForSequenceClassification": (SPEECH, sound),
    "HubertForSequenceClassification": (SPEECH, sound),
    # images
    "ViTForImageClassification": (VISION, image),
    "BeitForImageClassification": (VISION, image),
    "Dinov2ForImageClassification": (VISION, image),
    "SwinForImageClassification": (
        {
            "image_size": PIXELS,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 1],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": CLASSES,
        },
        image,
    ),
    "ConvNextForImageClassification": ({"hidden_sizes": [16, 24, 32, 40], "depths": [1, 1, 1, 1]}, image),
    "SegformerForSemanticSegmentation": (
        {
            "hidden_sizes": [8, 16, 24, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 3, 4],
            "decoder_hidden_size": 32,
        },
        image,
    ),
    "CLIPModel": (
        {"text_config": TEXT_TOWER, "vision_config": VISION_TOWER, "projection_dim": 16},
        text_and_image,
    ),
    "SiglipModel": ({"text_config": TEXT_TOWER, "vision_config": VISION_TOWER}, text_and_image),
    # other data
    "TimeSeriesTransformerForPrediction": (
        {
            "prediction_length": 8,
            "context_length": 32,
            "num_time_features": 2,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
        },
        observed_series,
    ),
    "PatchTSTForPrediction": (
        {**SERIES, "d_model": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48, "stride": 8},
        series,
    ),
    "DecisionTransformerModel": (
        {"state_dim": 11, "act_dim": 4, "hidden_size": 32, "n_layer": 2, "n_head": 4, "max_ep_len": 32},
        episode,
    ),
    "PerceiverForMaskedLM": (
        {
            "vocab_size": WORDS,
            "d_model": 32,
            "d_latents": 32,
            "num_latents": 8,
            "num_blocks": 1,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 4,
            "num_cross_attention_heads": 4,
            "qk_channels": 32,
            "v_channels": 32,
            "max_position_embeddings": LENGTH,
        },
        lambda: {"inputs": torch.randint(3, WORDS, (2, LENGTH))},
    ),
}


def build(name: str) -> tuple[nn.Module, Inputs]:
    """A model with random weights, and a batch of two for it."""
    import transformers

    options, inputs = MODELS[name]
    kind = getattr(transformers, name)
    return kind(kind.config_class(**options)), inputs()


FACTORIES: dict[str, Factory] = {f"huggingface/{name}": (lambda name=name: build(name)) for name in MODELS}
