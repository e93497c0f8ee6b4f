"""The convolutional part of the zoo; see tests.zoo."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo import ANY, Net, case, chain, linear, param, unit, x

CONV = {"conv1": unit(4, "conv1", "conv2"), "conv2": unit(6, "conv2", "fc")}
PADDED = {"conv1": unit(4, "conv1", "conv2", exact=False), "conv2": unit(6, "conv2", "fc")}
OUT = {"fc": "output"}


@case(x(2, 3, 9), CONV, OUT)
def conv1d_with_circular_padding():
    def run(m, x):
        return m.fc(F.relu(m.conv2(F.relu(m.conv1(x)))).mean(-1))

    conv2 = nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular")
    return Net(run, conv1=nn.Conv1d(3, 4, 3), conv2=conv2, fc=linear(6, 3))


@case(x(2, 3, 6, 6), PADDED, OUT)
def conv2d_flatten_linear():
    """Each unit of conv2 has nine neighbouring columns in fc."""
    parts = {
        "conv1": nn.Conv2d(3, 4, 3, padding=1),
        "act1": nn.ReLU(),
        "conv2": nn.Conv2d(4, 6, 3, 2, padding=1),
    }
    return chain(**parts, act2=nn.ReLU(inplace=True), flat=nn.Flatten(), fc=linear(54, 3))


@case(x(2, 2, 4, 5, 6), CONV, OUT)
def conv3d():
    def run(m, x):
        return m.fc(torch.flatten(F.relu(m.conv2(F.relu(m.conv1(x)))), 1))

    return Net(run, conv1=nn.Conv3d(2, 4, 2), conv2=nn.Conv3d(4, 6, (2, 3, 3)), fc=linear(6 * 2 * 2 * 3, 3))


@case(x(2, 3, 5, 4), CONV, OUT)
def conv_permute_flatten_linear():
    """Channels last before the flatten: the columns of a unit are strided."""

    def run(m, x):
        h = F.relu(m.conv2(F.relu(m.conv1(x))))
        return m.fc(h.permute(0, 2, 3, 1).reshape(h.shape[0], -1))

    return Net(run, conv1=nn.Conv2d(3, 4, 2), conv2=nn.Conv2d(4, 6, 2), fc=linear(6 * 3 * 2, 3))


@case(x(2, 3, 6, 6), CONV, OUT)
def explicit_zero_padding_and_dropout2d():
    """F.pad stands before the consumer's input: the clamp covers the border, so the reset is exact."""

    def run(m, x):
        h = m.drop(F.relu(m.conv1(x)))
        return m.fc(F.relu(m.conv2(F.pad(h, (1, 1, 1, 1)))).amax((2, 3)))

    return Net(run, drop=nn.Dropout2d(0.3), conv1=nn.Conv2d(3, 4, 3), conv2=nn.Conv2d(4, 6, 3), fc=linear(6, 3))


@case(x(2, 3, 12, 12), {**CONV, "conv2": unit(6, "conv2", "conv3"), "conv3": unit(5, "conv3", "fc")}, OUT)
def pooling():
    parts = {"conv1": nn.Conv2d(3, 4, 3), "act1": nn.ReLU(), "pool1": nn.MaxPool2d(2)}
    parts |= {"conv2": nn.Conv2d(4, 6, 2), "act2": nn.ReLU(), "pool2": nn.AvgPool2d(2, padding=1)}
    parts |= {"conv3": nn.Conv2d(6, 5, 2), "act3": nn.ReLU(), "pool3": nn.AdaptiveAvgPool2d((2, 1))}
    return chain(**parts, flat=nn.Flatten(), fc=linear(10, 3))


@case(x(2, 3, 11), CONV, OUT)
def adaptive_max_and_average_pooling():
    def run(m, x):
        h = F.adaptive_max_pool1d(torch.tanh(m.conv1(x)), 5)
        return m.fc(F.adaptive_max_pool1d(F.avg_pool1d(m.conv2(h), 2), 1).squeeze(-1))

    return Net(run, conv1=nn.Conv1d(3, 4, 3), conv2=nn.Conv1d(4, 6, 2), fc=linear(6, 3))


@case(
    x(2, 3, 8, 8),
    {"conv": unit(6, "conv", "up", exact=False), "up": unit(4, "up", "out")},
    {"out": "output"},
)
def conv_transpose():
    parts = {
        "conv": nn.Conv2d(3, 6, 3, stride=2),
        "act1": nn.ReLU(),
        "up": nn.ConvTranspose2d(6, 4, 2, stride=2),
    }
    return chain(**parts, act2=nn.ReLU(), out=nn.Conv2d(4, 2, 1))


@case(x(2, 3, 6), {"conv": unit(6, "conv", "up", exact=False), "up": unit(8, "up", "fc")}, OUT)
def grouped_conv_transpose():
    def run(m, x):
        return m.fc(F.relu(m.up(F.relu(m.conv(x)))).mean(-1))

    up = nn.ConvTranspose1d(6, 8, 3, stride=2, groups=2)
    return Net(run, conv=nn.Conv1d(3, 6, 3), up=up, fc=linear(8, 3))


@case(x(2, 5), {"up1": unit(6, "up1", "up2", exact=False)}, {"fc": ANY, "up2": "output"}, extra={})
def decoder_unflattens_a_linear():
    """A column of up1 reads a different unit of fc at each pixel: fc's units have no column of their own."""

    def run(m, z):
        h = F.relu(m.fc(z)).view(-1, 4, 2, 3)
        return m.up2(F.relu(m.up1(h)))

    up1, up2 = nn.ConvTranspose2d(4, 6, 2, stride=2), nn.ConvTranspose2d(6, 1, 3, padding=1)
    return Net(run, fc=linear(5, 24), up1=up1, up2=up2)


@case(x(2, 3, 6, 6), {"conv1": unit(8, "conv1", "conv2"), "conv2": unit(6, "conv2", "fc")}, OUT)
def grouped_conv():
    def run(m, x):
        return m.fc(F.relu(m.conv2(F.relu(m.conv1(x)))).mean((2, 3)))

    return Net(run, conv1=nn.Conv2d(3, 8, 3), conv2=nn.Conv2d(8, 6, 3, groups=2), fc=linear(6, 3))


@case(
    x(2, 3, 8, 8),
    {"stem": unit(6, "stem", "depth"), "depth": unit(6, "depth", "point"), "point": unit(10, "point", "fc")},
    OUT,
)
def depthwise_separable():
    def run(m, x):
        h = F.relu(m.point(F.relu(m.depth(F.relu(m.stem(x))))))
        return m.fc(F.adaptive_avg_pool2d(h, 1).flatten(1))

    depth = nn.Conv2d(6, 6, 3, groups=6)
    return Net(run, stem=nn.Conv2d(3, 6, 3), depth=depth, point=nn.Conv2d(6, 10, 1), fc=linear(10, 3))


@case(x(2, 3, 7), {"stem": unit(5, "stem", "depth"), "depth": unit(10, "depth", "fc")}, OUT)
def depthwise_with_multiplier():
    def run(m, x):
        return m.fc(F.relu(m.depth(F.relu(m.stem(x)))).mean(-1))

    return Net(run, stem=nn.Conv1d(3, 5, 3), depth=nn.Conv1d(5, 10, 3, groups=5), fc=linear(10, 3))


@case(
    x(2, 3, 6, 6),
    {
        "conv1": unit(8, "conv1", "conv2"),
        "conv2": unit(12, "conv2", "conv3"),
        "conv3": unit(4, "conv3", "fc"),
    },
    OUT,
)
def channel_shuffle_between_grouped_convs():
    def run(m, x):
        h = F.relu(m.conv2(F.relu(m.conv1(x))))
        b, c, height, width = h.shape
        h = h.view(b, 3, c // 3, height, width).transpose(1, 2).reshape(b, c, height, width)
        return m.fc(F.relu(m.conv3(h)).mean((2, 3)))

    conv2, conv3 = nn.Conv2d(8, 12, 1, groups=2), nn.Conv2d(12, 4, 3, groups=2)
    return Net(run, conv1=nn.Conv2d(3, 8, 3), conv2=conv2, conv3=conv3, fc=linear(4, 3))


@case(x(2, 2, 8, 8), {"conv1": unit(3, "conv1", "conv2")}, {"conv2": ANY, "conv3": "output"})
def pixel_unshuffle_and_shuffle():
    """A unit of conv1 has four columns. Four units of conv2 share one column, at different pixels."""

    def run(m, x):
        h = F.pixel_unshuffle(F.relu(m.conv1(x)), 2)
        return m.conv3(F.pixel_shuffle(F.relu(m.conv2(h)), 2))

    return Net(run, conv1=nn.Conv2d(2, 3, 1), conv2=nn.Conv2d(12, 8, 1), conv3=nn.Conv2d(2, 4, 1))


@case(x(2, 3, 6, 6), {"conv1": unit(4, "conv1", "conv2"), "conv2": unit(6, "conv2", "out")}, {"out": "output"})
def interpolation():
    def run(m, x):
        h = F.interpolate(F.relu(m.conv1(x)), scale_factor=2, mode="nearest")
        h = F.interpolate(F.relu(m.conv2(h)), size=(5, 5), mode="bilinear", align_corners=False)
        return m.out(h)

    return Net(run, conv1=nn.Conv2d(3, 4, 3), conv2=nn.Conv2d(4, 6, 3), out=nn.Conv2d(6, 2, 1))


@case(x(2, 3, 8, 8), {"conv1": unit(4, "conv1", "conv2", "bn1"), "conv2": unit(6, "conv2", "fc", "bn2")}, OUT)
def batchnorm_after_conv_without_bias():
    def run(m, x):
        h = F.relu(m.bn1(m.conv1(x)))
        return m.fc(F.relu(m.bn2(m.conv2(h))).mean((2, 3)))

    convs = {"conv1": nn.Conv2d(3, 4, 3, bias=False), "conv2": nn.Conv2d(4, 6, 3, bias=False)}
    return Net(run, bn1=nn.BatchNorm2d(4), bn2=nn.BatchNorm2d(6), fc=linear(6, 3), **convs)


@case(
    x(2, 3, 8, 8),
    {"conv1": unit(8, "conv1", "conv2", "norm", exact=False), "conv2": unit(6, "conv2", "fc")},
    OUT,
)
def groupnorm_on_the_path():
    def run(m, x):
        return m.fc(F.relu(m.conv2(F.relu(m.norm(m.conv1(x))))).mean((2, 3)))

    return Net(run, conv1=nn.Conv2d(3, 8, 3), norm=nn.GroupNorm(2, 8), conv2=nn.Conv2d(8, 6, 3), fc=linear(6, 3))


@case(x(2, 3, 8, 8), {"conv1": unit(4, "conv1", "conv2", "norm"), "conv2": unit(6, "conv2", "fc")}, OUT)
def instancenorm_on_the_path():
    def run(m, x):
        return m.fc(F.relu(m.conv2(F.relu(m.norm(m.conv1(x))))).mean((2, 3)))

    norm = nn.InstanceNorm2d(4, affine=True)
    return Net(run, conv1=nn.Conv2d(3, 4, 3), norm=norm, conv2=nn.Conv2d(4, 6, 3), fc=linear(6, 3))


@case(
    x(2, 3, 8, 8),
    {
        "stem": unit(4, "stem", "conv1 conv2 fc", "bn1 bn2 bn3"),
        "conv1": unit(5, "conv1", "conv2 fc", "bn2 bn3"),
        "conv2": unit(6, "conv2", "fc", "bn3"),
    },
    OUT,
    extra={},
)
def densenet():
    def run(m, x):
        h = m.stem(x)
        h = torch.cat([h, m.conv1(F.relu(m.bn1(h)))], 1)
        h = torch.cat([h, m.conv2(F.relu(m.bn2(h)))], 1)
        return m.fc(F.relu(m.bn3(h)).mean((2, 3)))

    convs = {"stem": nn.Conv2d(3, 4, 3), "conv1": nn.Conv2d(4, 5, 1), "conv2": nn.Conv2d(9, 6, 1)}
    return Net(run, bn1=nn.BatchNorm2d(4), bn2=nn.BatchNorm2d(9), bn3=nn.BatchNorm2d(15), **convs, fc=linear(15, 3))


@case(
    x(2, 2, 8, 8),
    {
        "enc": unit(4, "enc", "mid dec", exact=False),
        "mid": unit(6, "mid", "up", exact=False),
        "up": unit(5, "up", "dec", exact=False),
        "dec": unit(7, "dec", "out"),
    },
    {"out": "output"},
)
def unet():
    def run(m, x):
        skip = F.relu(m.enc(x))
        low = F.relu(m.mid(F.max_pool2d(skip, 2)))
        return m.out(F.relu(m.dec(torch.cat([m.up(low), skip], 1))))

    down = {"enc": nn.Conv2d(2, 4, 3, padding=1), "mid": nn.Conv2d(4, 6, 3, padding=1)}
    up = {"up": nn.ConvTranspose2d(6, 5, 2, stride=2), "dec": nn.Conv2d(9, 7, 3, padding=1)}
    return Net(run, **down, **up, out=nn.Conv2d(7, 2, 1))


# residual convolutional networks


def conv3x3(n: int, m: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(n, m, 3, stride, padding=1, bias=False)


class BasicBlock(nn.Module):
    def __init__(self, n: int, inner: int, m: int, stride: int = 1):
        super().__init__()
        self.conv1, self.bn1 = conv3x3(n, inner, stride), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = conv3x3(inner, m), nn.BatchNorm2d(m)
        self.relu = nn.ReLU(inplace=True)
        self.short = None
        if n != m:
            self.short = nn.Sequential(nn.Conv2d(n, m, 1, stride, bias=False), nn.BatchNorm2d(m))

    def forward(self, x):
        h = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        h += x if self.short is None else self.short(x)
        return self.relu(h)


@case(
    x(2, 3, 8, 8),
    {
        "b1.conv1": unit(5, "b1.conv1", "b1.conv2", "b1.bn1", exact=False),
        "b2.conv1": unit(7, "b2.conv1", "b2.conv2", "b2.bn1", exact=False),
    },
    {"conv": "residual", "b2.conv2": "residual", "fc": "output"},
    extra={
        "conv": unit(4, "conv b1.conv2", "b1.conv1 b2.conv1 b2.short.0", "bn b1.bn2", exact=False),
        "b2.conv2": unit(6, "b2.conv2 b2.short.0", "fc", "b2.bn2 b2.short.1"),
    },
)
def resnet_basic_blocks():
    def run(m, x):
        return m.fc(m.b2(m.b1(F.relu(m.bn(m.conv(x))))).mean((2, 3)))

    blocks = {"b1": BasicBlock(4, 5, 4), "b2": BasicBlock(4, 7, 6, stride=2)}
    return Net(run, fc=linear(6, 3), **blocks, conv=conv3x3(3, 4), bn=nn.BatchNorm2d(4))


class PreActivationBlock(nn.Module):
    def __init__(self, n: int, inner: int):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(n), conv3x3(n, inner)
        self.bn2, self.conv2 = nn.BatchNorm2d(inner), conv3x3(inner, n)

    def forward(self, x):
        return x + self.conv2(F.relu(self.bn2(self.conv1(F.relu(self.bn1(x))))))


@case(
    x(2, 3, 6, 6),
    {
        "b1.conv1": unit(5, "b1.conv1", "b1.conv2", "b1.bn2", exact=False),
        "b2.conv1": unit(7, "b2.conv1", "b2.conv2", "b2.bn2", exact=False),
    },
    {"conv": "residual", "fc": "output"},
    extra={
        "conv": unit(4, "conv b1.conv2 b2.conv2", "b1.conv1 b2.conv1 fc", "b1.bn1 b2.bn1 bn", exact=False),
    },
)
def resnet_pre_activation():
    def run(m, x):
        return m.fc(F.relu(m.bn(m.b2(m.b1(m.conv(x))))).mean((2, 3)))

    blocks = {"b1": PreActivationBlock(4, 5), "b2": PreActivationBlock(4, 7)}
    return Net(run, conv=conv3x3(3, 4), **blocks, bn=nn.BatchNorm2d(4), fc=linear(4, 3))


@case(
    x(2, 3, 6, 6),
    {
        "conv1": unit(4, "conv1", "conv2", "bn1", exact=False),
        "conv2": unit(6, "conv2", "conv3", "bn2"),
    },
    {"stem": "residual", "fc": "output"},
    extra={"stem": unit(8, "stem conv3", "conv1 fc", "bn0 bn3")},
)
def resnet_bottleneck():
    def run(m, x):
        x = F.relu(m.bn0(m.stem(x)))
        h = F.relu(m.bn1(m.conv1(x)))
        h = F.relu(m.bn2(m.conv2(h)))
        return m.fc(F.relu(m.bn3(m.conv3(h)) + x).mean((2, 3)))

    convs = {"stem": conv3x3(3, 8), "conv1": nn.Conv2d(8, 4, 1, bias=False), "conv2": conv3x3(4, 6)}
    norms = {f"bn{i}": nn.BatchNorm2d(n) for i, n in enumerate((8, 4, 6, 8))}
    return Net(run, **convs, conv3=nn.Conv2d(6, 8, 1, bias=False), **norms, fc=linear(8, 3))


@case(
    x(2, 3, 6, 6),
    {
        "expand": unit(12, "expand", "depth", "bn1", exact=False),
        "depth": unit(12, "depth", "project", "bn2"),
    },
    {"stem": "residual", "fc": "output"},
    extra={"stem": unit(4, "stem project", "expand fc", "bn0 bn3")},
)
def mobilenet_inverted_residual():
    def run(m, x):
        x = m.bn0(m.stem(x))
        h = F.relu6(m.bn1(m.expand(x)))
        h = F.relu6(m.bn2(m.depth(h)))
        return m.fc((x + m.bn3(m.project(h))).mean((2, 3)))

    convs = {"stem": conv3x3(3, 4), "expand": nn.Conv2d(4, 12, 1, bias=False)}
    convs |= {"depth": nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False)}
    convs |= {"project": nn.Conv2d(12, 4, 1, bias=False)}
    norms = {f"bn{i}": nn.BatchNorm2d(n) for i, n in enumerate((4, 12, 12, 4))}
    return Net(run, **convs, **norms, fc=linear(4, 3))


@case(
    x(2, 3, 6, 6),
    {"depth": unit(6, "depth", "fc1", "norm", exact=False), "fc1": unit(10, "fc1", "fc2")},
    {"stem": "residual", "head": "output"},
    extra={"stem": unit(6, "stem fc2", "depth head", exact=False)},
)
def convnext_block():
    def run(m, x):
        x = m.stem(x)
        h = m.norm(m.depth(x).permute(0, 2, 3, 1))
        h = m.gamma * m.fc2(F.gelu(m.fc1(h)))
        return m.head((x + h.permute(0, 3, 1, 2)).mean((2, 3)))

    parts = {"stem": nn.Conv2d(3, 6, 2, stride=2), "depth": nn.Conv2d(6, 6, 3, padding=1, groups=6)}
    parts |= {"norm": nn.LayerNorm(6), "fc1": linear(6, 10), "fc2": linear(10, 6), "head": linear(6, 3)}
    return Net(run, **parts, gamma=param(torch.full((6,), 0.5)))
