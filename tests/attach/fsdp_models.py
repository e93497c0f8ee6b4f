"""Models to share out among two processes: layers whose rows cannot be shared evenly, and some with fewer rows than
processes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Plain(nn.Sequential):
    shape: tuple[int, ...] = (4,)

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))


class Convs(nn.Module):
    """Blocks of a grouped and of a transposed convolution, a norm, a layer without bias."""

    shape = (2, 5, 5)

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, 6, 3), nn.Conv2d(6, 9, 2, groups=3, bias=False)
        self.norm, self.up = nn.GroupNorm(3, 9), nn.ConvTranspose2d(9, 6, 2, groups=3)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv2(F.relu(self.conv1(x)))))
        return self.head(F.relu(self.up(x)).mean((2, 3)))


class Transformer(nn.Module):
    """Under FSDP, query, key and value are three tensors to nn.MultiheadAttention, and projected in another way than
    one. The gradient by the bias of the keys is 0 but for rounding, which Adam would make steps of.
    """

    shape = (5, 4)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.up, self.bottleneck, self.down = nn.Linear(6, 9), nn.Linear(9, 1), nn.Linear(1, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head((x + self.down(F.gelu(self.bottleneck(F.gelu(self.up(self.norm(x))))))).mean(1))


class Turned(nn.Module):
    """Stands for the layer of GPT-2, which is known by its name: its first axis counts inputs."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(n_in, n_out)), nn.Parameter(torch.randn(n_out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


Conv1D = type("Conv1D", (Turned,), {"__module__": "transformers.pytorch_utils"})


class Odd(nn.Module):
    """The rest of what a reset writes: BatchNorm after a layer without bias, a norm with two axes, turned layers."""

    shape = (3, 4, 4)

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.conv2, self.bn = nn.Conv2d(3, 5, 1), nn.Conv2d(5, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.norm, self.up, self.down = nn.LayerNorm((4, 4)), Conv1D(16, 7), Conv1D(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.relu(self.bn(self.conv2(F.relu(self.conv(x))))).mean(3))
        return self.down(F.relu(self.up(x.flatten(1))))
