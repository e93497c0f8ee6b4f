"""The networks: MLP, linear model, conv net, the small ResNet, ResNet-18. Weights come from a seed; the global random
state is left alone.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gxd.lab.errors import UserError


class CReLU(nn.Module):
    """Concatenated ReLU, ``[relu(x), relu(-x)]`` along the axis of the units, 1 (Shang et al. 2016)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.relu(x), F.relu(-x)], 1)


class InputNorm(nn.Module):
    """Normalise inputs by their running mean and variance, ``(x - mu) / sqrt(v + eps)``, per element.

    A batch with mean m and variance s moves them in training mode, before it is normalised itself:
    ``v <- d v + (1 - d) s + d (1 - d) (m - mu)^2`` and ``mu <- d mu + (1 - d) m``, the moments of the mixture. They
    begin at 0 and 1. An element that was constant for long may vary again in the next task: eps bounds what comes out.
    """

    def __init__(self, shape: tuple[int, ...], decay: float = 0.99, eps: float = 1e-2) -> None:
        super().__init__()
        self.decay, self.eps = decay, eps
        self.mean: Tensor
        self.variance: Tensor
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("variance", torch.ones(shape))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                mean = x.mean(0)
                spread = (x - mean).square().mean(0) + self.decay * (mean - self.mean).square()
                self.variance.lerp_(spread, 1 - self.decay)
                self.mean.lerp_(mean, 1 - self.decay)
        return (x - self.mean) / (self.variance + self.eps).sqrt()


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "leaky_relu": lambda: nn.LeakyReLU(0.01),
    "tanh": nn.Tanh,
    "crelu": CReLU,
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
    input_norm: bool = False,
    seed: int = 0,
) -> nn.Sequential:
    """A multilayer perceptron, ``(batch, inputs) -> (batch, classes)``.

    Args:
        width, depth: units per hidden layer, and hidden layers.
        activation: one of ``ACTIVATIONS``. With ``crelu`` the layers are narrower: as wide as they can be with no more
            parameters than the network has without (784-100-100-10 becomes 784-90-90-10).
        layer_norm: normalise before every activation.
        init: ``glorot``, uniform weights and zero biases (the paper's online experiments), or ``default``, the layers'
            own: uniform in +-1/sqrt(inputs), biases too.
        input_norm: normalise the inputs by :class:`InputNorm`.
    """
    if width < 1 or depth < 1:
        raise UserError(f"an MLP needs at least one hidden layer of one unit, not {depth} of {width}")

    def parameters(units: int, features: int) -> int:
        return (inputs + 1) * units + (depth - 1) * (features + 1) * units + features * classes

    width = _narrowed(width, activation, parameters)
    features = width * (2 if activation == "crelu" else 1)
    layers = _first_layers((inputs,), input_norm)
    with torch.random.fork_rng(devices=[]):  # the constructors draw weights, which are overwritten below
        for number in range(1, depth + 1):
            layers[f"fc{number}"] = nn.Linear(inputs if number == 1 else features, width)
            if layer_norm:
                layers[f"norm{number}"] = nn.LayerNorm(width)
            layers[f"act{number}"] = _activation(activation)
        layers["head"] = nn.Linear(features, classes)
    return _initialised(nn.Sequential(layers), init, seed)


def linear(
    input_shape: tuple[int, ...], classes: int, *, init: str = "default", input_norm: bool = False, seed: int = 0
) -> nn.Sequential:
    """The linear model, ``(batch, *input_shape) -> (batch, classes)``: the control without hidden layers."""
    layers = _first_layers(input_shape, input_norm)
    if len(input_shape) > 1:
        layers["flat"] = nn.Flatten()
    with torch.random.fork_rng(devices=[]):
        layers["head"] = nn.Linear(math.prod(input_shape), classes)
    return _initialised(nn.Sequential(layers), init, seed)


def conv_net(
    classes: int = 100,
    *,
    activation: str = "relu",
    layer_norm: bool = False,
    init: str = "default",
    input_norm: bool = False,
    seed: int = 0,
) -> nn.Sequential:
    """Kumar et al.'s network for 32x32 images: twice a 5x5 convolution of 16 channels, an activation and 2x2 max
    pooling, then a layer of 100 units, and the head. Arguments as for :func:`mlp`; the LayerNorm of a convolution is
    over channels and positions, with a gain per channel. With ``crelu`` all widths shrink alike.
    """
    doubled = 2 if activation == "crelu" else 1

    def sizes(width: int) -> tuple[int, int]:
        return max(1, round(0.16 * width)), width  # channels, units

    def parameters(width: int, features: int) -> int:
        (channels, units), more = sizes(width), features // width
        convolutions = (75 + 1) * channels + (25 * more * channels + 1) * channels
        return convolutions + (25 * more * channels + 1) * units + more * units * classes

    channels, units = sizes(_narrowed(100, activation, parameters))
    layers = _first_layers((3, 32, 32), input_norm)
    with torch.random.fork_rng(devices=[]):
        for number in (1, 2):
            layers[f"conv{number}"] = nn.Conv2d(3 if number == 1 else doubled * channels, channels, 5)
            if layer_norm:
                layers[f"norm{number}"] = nn.GroupNorm(1, channels)
            layers[f"act{number}"] = _activation(activation)
            layers[f"pool{number}"] = nn.MaxPool2d(2)
        layers["flat"] = nn.Flatten()
        layers["fc"] = nn.Linear(25 * doubled * channels, units)
        if layer_norm:
            layers["norm3"] = nn.LayerNorm(units)
        layers["act3"] = _activation(activation)
        layers["head"] = nn.Linear(doubled * units, classes)
    return _initialised(nn.Sequential(layers), init, seed)


def _activation(name: str) -> nn.Module:
    if name not in ACTIVATIONS:
        raise UserError(f"unknown activation {name!r}: the activations are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]()


def _narrowed(width: int, activation: str, parameters: Callable[[int, int], int]) -> int:
    """The width with which CReLU's network, whose layers have twice as many features as units, has no more parameters.

    Args:
        parameters: of the network with so many units and so many features per layer.
    """
    if activation != "crelu":
        return width
    most = parameters(width, width)
    return max(1, bisect_right(range(1, width + 1), most, key=lambda units: parameters(units, 2 * units)))


def _first_layers(input_shape: tuple[int, ...], input_norm: bool) -> OrderedDict[str, nn.Module]:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if input_norm:
        layers["input_norm"] = InputNorm(input_shape)
    return layers


def _initialised(model: nn.Sequential, init: str, seed: int) -> nn.Sequential:
    if init not in ("glorot", "default"):
        raise UserError(f"unknown init {init!r}: it is glorot or default")
    generator = torch.Generator().manual_seed(seed)
    for layer in model:
        if not isinstance(layer, (nn.Linear, nn.Conv2d)):
            continue
        assert layer.bias is not None
        if init == "glorot":
            nn.init.xavier_uniform_(layer.weight, generator=generator)
            nn.init.zeros_(layer.bias)
        else:
            bound = 1 / math.sqrt(layer.weight[0].numel())
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
