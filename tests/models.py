"""A few small models that together have every kind of path between a producer and a consumer."""

import torch
from torch import nn
from torch.nn import functional as F


class Mlp(nn.Module):
    """Linear layers, optionally with LayerNorm before the activation."""

    def __init__(self, norm=False, bias=True):
        super().__init__()
        self.fc1, self.fc2, self.head = nn.Linear(6, 16, bias), nn.Linear(16, 12, bias), nn.Linear(12, 4, bias)
        self.norm1 = nn.LayerNorm(16) if norm else nn.Identity()
        self.norm2 = nn.LayerNorm(12) if norm else nn.Identity()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.head(self.act(self.norm2(self.fc2(self.act(self.norm1(self.fc1(x)))))))


class Conv(nn.Module):
    """conv -> BatchNorm -> grouped conv -> flatten -> linear, without padding."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 12, 3, groups=2, bias=False), nn.BatchNorm2d(12)
        self.fc, self.head = nn.Linear(12 * 4, 10), nn.Linear(10, 4)

    def forward(self, x):
        x = F.relu_(self.bn1(self.conv1(x)))
        x = F.silu(self.bn2(self.conv2(x)))
        return self.head(torch.tanh(self.fc(F.max_pool2d(x, 2).flatten(1))))


class ResNet(nn.Module):
    """A stem and two BasicBlocks, one with a projection shortcut."""

    class Block(nn.Module):
        def __init__(self, fan_in, width, stride):
            super().__init__()
            self.conv1 = nn.Conv2d(fan_in, width, 3, stride, 1, bias=False)
            self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
            self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
            self.shortcut = nn.Identity()
            if stride != 1 or fan_in != width:
                self.shortcut = nn.Sequential(nn.Conv2d(fan_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

        def forward(self, x):
            y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
            y += self.shortcut(x)
            return F.relu(y, inplace=True)

    def __init__(self):
        super().__init__()
        self.stem, self.bn = nn.Conv2d(2, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.block1, self.block2 = self.Block(8, 8, 1), self.Block(8, 12, 2)
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        return self.head(self.block2(self.block1(F.relu(self.bn(self.stem(x))))).mean((2, 3)))


class Transformer(nn.Module):
    """nn.MultiheadAttention and a SwiGLU block on a residual stream, mean-pooled."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.embed(x)
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        y = self.norm2(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return self.head(x.mean(1))


class Branches(nn.Module):
    """One layer read by two branches whose outputs are concatenated, and two parallel heads."""

    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(6, 16), nn.Linear(16, 5), nn.Linear(16, 7)
        self.head, self.value = nn.Linear(12, 4), nn.Linear(12, 1)

    def forward(self, x):
        h = F.leaky_relu(self.trunk(x))
        h = torch.cat([torch.tanh(self.left(h)), F.gelu(self.right(h))], -1)
        return self.head(h) + self.value(h)


class Attention(nn.Module):
    """A transformer block with its attention written out."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm1, self.norm2 = nn.Linear(6, 8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.embed(x)
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.head((x + self.down(F.gelu(self.up(self.norm2(x))))).mean(1))


class TwoViews(nn.Module):
    """Two branches read the same units through different activations: the units have two views."""

    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(6, 16), nn.Linear(16, 7), nn.Linear(16, 9)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        h = self.trunk(x)
        return self.head(torch.cat([self.left(F.relu(h)).tanh(), F.leaky_relu(self.right(h.sigmoid()))], -1))


class Tasks(nn.Module):
    """A head for each of two tasks: no pass shows the units of both."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(6, 12)
        self.first, self.second = (nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2))

    def forward(self, x, task=0):
        return (self.second if task else self.first)(self.trunk(x).relu())


VECTOR, TOKENS, IMAGE = (6,), (3, 6), (2, 8, 8)
MODELS = {
    "mlp": (Mlp, VECTOR, {}),
    "mlp_layer_norm": (lambda: Mlp(norm=True), VECTOR, {}),
    "mlp_without_bias": (lambda: Mlp(bias=False), VECTOR, {}),
    "conv": (Conv, IMAGE, {}),
    "resnet": (ResNet, IMAGE, {}),
    "resnet_coordinates": (ResNet, IMAGE, {"residual": "group"}),
    "transformer": (Transformer, TOKENS, {}),
    "branches": (Branches, VECTOR, {}),
}


def make(name, seed=0):
    """The model, a function that draws a batch, and the options of its plan."""
    torch.manual_seed(seed)
    build, shape, options = MODELS[name]
    model = build()
    generator = torch.Generator().manual_seed(seed)

    def batch(size=8):
        return torch.randn(size, *shape, generator=generator), torch.randint(0, 4, (size,), generator=generator)

    return model, batch, options
