"""The paper's networks: the MLP, the small ResNet, ResNet-18. Weights come from a seed; the global random state is
left alone.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gxd.lab.errors import UserError

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "leaky_relu": lambda: nn.LeakyReLU(0.01),
    "tanh": nn.Tanh,
}

# The paper's table says "momentum=0.9" beside SGD's, in the sense of the running average that keeps 0.9 of the old
# value. PyTorch counts the weight of the new value, so that is its 0.1 (and its default). Read the other way, the
# running statistics would be those of the last batch, and the accuracy in evaluation mode would be noise.
BATCH_NORM_MOMENTUM = 0.1


def mlp(
    inputs: int,
    classes: int,
    *,
    width: int = 256,
    depth: int = 4,
    activation: str = "relu",
    layer_norm: bool = False,
    init: str = "glorot",
    seed: int = 0,
) -> nn.Sequential:
    """A multilayer perceptron, ``(batch, inputs) -> (batch, classes)``.

    Args:
        width, depth: units per hidden layer, and hidden layers.
        activation: one of ``ACTIVATIONS``.
        layer_norm: normalise before every activation.
        init: ``glorot``, uniform weights and zero biases (the online experiments), or ``default``, nn.Linear's own
            (the reset-cost assay).
    """
    if activation not in ACTIVATIONS:
        raise UserError(f"unknown activation {activation!r}: the activations are {', '.join(ACTIVATIONS)}")
    if init not in ("glorot", "default"):
        raise UserError(f"unknown init {init!r}: it is glorot or default")
    if width < 1 or depth < 1:
        raise UserError(f"an MLP needs at least one hidden layer of one unit, not {depth} of {width}")
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    with torch.random.fork_rng(devices=[]):  # the constructors draw weights, which are overwritten below
        for number in range(1, depth + 1):
            layers[f"fc{number}"] = nn.Linear(inputs if number == 1 else width, width)
            if layer_norm:
                layers[f"norm{number}"] = nn.LayerNorm(width)
            layers[f"act{number}"] = ACTIVATIONS[activation]()
        layers["head"] = nn.Linear(width, classes)
    model = nn.Sequential(layers)
    generator = torch.Generator().manual_seed(seed)
    for layer in model:
        if isinstance(layer, nn.Linear) and init == "glorot":
            nn.init.xavier_uniform_(layer.weight, generator=generator)
            nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.Linear):
            bound = 1 / math.sqrt(layer.in_features)
            nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
            nn.init.uniform_(layer.bias, -bound, bound, generator=generator)
    return model


class BasicBlock(nn.Module):
    """Two 3x3 conv-BatchNorm layers around a ReLU, plus a shortcut, then a ReLU.

    The shortcut is a 1x1 conv-BatchNorm where the channels or the resolution change, else the identity.
    """

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels, momentum=BATCH_NORM_MOMENTUM)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels, momentum=BATCH_NORM_MOMENTUM)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != channels:
            projection = nn.Conv2d(inputs, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(
                OrderedDict(conv=projection, bn=nn.BatchNorm2d(channels, momentum=BATCH_NORM_MOMENTUM))
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem (3x3 conv-BatchNorm-ReLU), basic blocks, global average pooling, a linear head; for 32x32 images.

    Args:
        stem: channels of the stem.
        blocks: ``(channels, stride)`` of each block.
    """

    def __init__(self, stem: int, blocks: list[tuple[int, int]], classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, stem, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(stem, momentum=BATCH_NORM_MOMENTUM)
        widths = [stem, *(channels for channels, _ in blocks)]
        self.blocks = nn.Sequential(
            *(BasicBlock(inputs, *block) for inputs, block in zip(widths[:-1], blocks, strict=True))
        )
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.bn(self.conv(x))))
        return self.head(x.mean((2, 3)))


def small_resnet(classes: int = 2, *, seed: int = 0) -> ResNet:
    """The network of Continuous CIFAR-100: conv 16, BasicBlock 32, BasicBlock 64, pooling, head; He normal.

    Both blocks halve the resolution, as the stages of these widths do in He et al.'s CIFAR networks.
    """
    return _he_normal(lambda: ResNet(16, [(32, 2), (64, 2)], classes), seed)


def resnet18(classes: int = 100, *, seed: int = 0) -> ResNet:
    """ResNet-18 for 32x32 images: a 3x3 stem of stride 1 without max-pooling, stages [2, 2, 2, 2] of 64 to 512
    channels; He normal.
    """
    blocks = [(64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)]
    return _he_normal(lambda: ResNet(64, blocks, classes), seed)


@torch.no_grad()
def zero_head(model: nn.Module) -> None:
    """Set the weight and the bias of ``model.head`` to zero, as at the start of a task of Continuous CIFAR-100."""
    for parameter in model.get_submodule("head").parameters():
        parameter.zero_()


def _he_normal(build: Callable[[], ResNet], seed: int) -> ResNet:
    with torch.random.fork_rng(devices=[]):
        model = build()
    generator = torch.Generator().manual_seed(seed)
    for layer in model.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return model


MODELS: dict[str, Callable[..., nn.Module]] = {"mlp": mlp, "small_resnet": small_resnet, "resnet18": resnet18}
"""Name -> factory; each takes ``seed``."""
