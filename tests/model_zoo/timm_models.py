"""Sixty models of timm, one of nearly every family: name -> options that make it smaller."""

from typing import Any

import torch
from torch import nn

from tests.model_zoo.calls import Factory, Inputs
from tests.model_zoo.torchvision_stand_in import import_timm

CLASSES = 10
PIXELS = 64

MODELS: dict[str, dict[str, Any]] = {
    # convolutions with batch norm and residual additions
    "resnet18": {},
    "resnet50": {"layers": (1, 1, 1, 1)},
    "resnetv2_50x1_bit": {},
    "skresnet18": {},
    "res2net50_14w_8s": {"layers": (1, 1, 1, 1)},
    "regnety_002": {},
    "densenet121": {"block_config": (2, 2, 2, 2)},
    "dpn48b": {},
    "hrnet_w18_small": {},
    "cspresnet50": {},
    "selecsls42": {},
    "tresnet_m": {"layers": (1, 1, 1, 1)},
    "ese_vovnet19b_slim": {},
    # without residual additions, or without norms
    "vgg11_bn": {"mlp_ratio": 0.0625},
    "repvgg_a0": {},
    "nfnet_l0": {},
    "inception_v3": {"pixels": 96},
    "xception41": {},
    # for phones
    "mobilenetv2_050": {},
    "mobilenetv3_small_050": {},
    "mobilenetv4_conv_small_050": {},
    "efficientnet_b0": {},
    "tf_efficientnet_b0": {},
    "hardcorenas_a": {},
    "ghostnet_050": {},
    "rexnet_100": {},
    "starnet_s050": {},
    # convolutions in the manner of transformers
    "convnext_atto": {},
    "convnextv2_atto": {},
    "poolformer_s12": {},
    "caformer_s18": {},
    "focalnet_tiny_srf": {},
    "fastvit_t8": {},
    # convolutions and attention
    "coatnet_pico_rw_224": {"img_size": 64},
    "maxvit_pico_rw_256": {"img_size": 64},
    "edgenext_xx_small": {},
    "efficientformer_l1": {"pixels": 224},
    "levit_128s": {"pixels": 224},
    "tiny_vit_5m_224": {},
    # attention
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 4},
    "deit3_small_patch16_224": {"img_size": 64, "depth": 4},
    "beit_base_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 192, "num_heads": 3},
    "eva02_tiny_patch14_224": {"img_size": 56, "depth": 4},
    "swin_tiny_patch4_window7_224": {"img_size": 64, "depths": (2, 2, 2, 1), "window_size": 4, "embed_dim": 48},
    "swinv2_tiny_window8_256": {"img_size": 64, "depths": (2, 2, 2, 1), "window_size": 4, "embed_dim": 48},
    "xcit_nano_12_p16_224": {"img_size": 64, "depth": 4},
    "cait_xxs24_224": {"img_size": 64, "depth": 4},
    "pvt_v2_b0": {},
    "twins_svt_small": {"img_size": 64, "depths": (1, 1, 2, 1)},
    "volo_d1_224": {"img_size": 64},
    "mvitv2_tiny": {"img_size": 64},
    "davit_tiny": {"depths": (1, 1, 1, 1)},
    "hiera_tiny_224": {"img_size": 64},
    "crossvit_tiny_240": {"img_size": 240, "pixels": 240, "depth": ([1, 2, 0],)},
    "convit_tiny": {"img_size": 64, "depth": 4, "local_up_to_layer": 3},
    "nest_tiny": {"img_size": 64},
    # neither
    "mixer_s32_224": {"img_size": 64},
    "gmlp_ti16_224": {"img_size": 64},
    "resmlp_12_224": {"img_size": 64},
    "sequencer2d_s": {"layers": (1, 1, 2, 1)},
}


def build(name: str) -> tuple[nn.Module, Inputs]:
    """A model with random weights, and a batch of two for it."""
    timm = import_timm()
    options = dict(MODELS[name])
    pixels = options.pop("pixels", options.get("img_size", PIXELS))
    model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
    return model, (torch.randn(2, 3, pixels, pixels),)


FACTORIES: dict[str, Factory] = {f"timm/{name}": (lambda name=name: build(name)) for name in MODELS}
