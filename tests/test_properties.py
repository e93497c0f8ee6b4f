"""Properties that must hold for any network, any budget and any optimizer, on random ones.

`networks()` draws a program: a list of small steps that are applied to the input one after the other. A step that does
not fit the tensor at hand is left out, so that every program is a valid network and shrinks well.
"""

import copy
import json
import math
import random
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, example, given, note, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import gxd
from gxd.clamp import clamped
from gxd.select import Schedule, lowest

EXAMPLES = 3
CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
nets = settings(deadline=None, max_examples=12, derandomize=True, suppress_health_check=CHECKS)
quick = settings(deadline=None, max_examples=60, derandomize=True, suppress_health_check=CHECKS)


# ---------------------------------------------------------------- random networks


@dataclass(frozen=True)
class Program:
    domain: str
    steps: tuple[tuple, ...]
    heads: tuple[int, ...]
    feature_leaves: bool
    shuffle: int

    def build(self) -> "RandomNet":
        return RandomNet(self)


SHAPES = {"vector": (5,), "tokens": (4, 5), "signal": (3, 8), "image": (3, 7, 6)}
ACTIVATIONS: dict[str, Callable[[], nn.Module] | Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu_": lambda x: F.relu_(x),
    "tanh_": lambda x: x.tanh_(),
    "silu": lambda x: x * x.sigmoid(),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "square": lambda x: x.square() + 0.5,
}
ACTIVATION_MODULES: dict[str, Callable[[], nn.Module]] = {
    "ReLU": nn.ReLU,
    "ReLU inplace": lambda: nn.ReLU(inplace=True),
    "SiLU inplace": lambda: nn.SiLU(inplace=True),
    "LeakyReLU inplace": lambda: nn.LeakyReLU(0.1, inplace=True),
    "GELU": nn.GELU,
    "PReLU": nn.PReLU,
}
NORMS = (
    *("batch", "batch plain", "layer", "layer plain", "group", "group each", "instance", "instance affine", "rms"),
    *("functional", "batch across", "instance across"),
)
COMBINE = ("add", "sub", "mul", "max", "cat")
CONSTANTS = ("scale", "shift", "times two", "cat ones", "cat zeros", "cat parameter", "pad")
MOVES = ("flip", "roll", "split and swap", "permute and view", "transpose twice", "unfold")
MIXTURES: dict[str, Callable[[Tensor, int], Tensor]] = {  # of a tensor and the axis of its features
    "every other": lambda x, axis: x.index_select(axis, torch.arange(0, x.shape[axis], 2)),
    "index": lambda x, axis: x.movedim(axis, 0)[torch.arange(x.shape[axis]).flip(0)].movedim(0, axis),
    "repeat": lambda x, axis: x.repeat_interleave(2, axis),
    "cat with itself": lambda x, axis: torch.cat([x, x.tanh()], axis),
    "detach": lambda x, axis: x.detach(),
    "divide by the sum": lambda x, axis: x / (1 + x.abs().sum(axis, keepdim=True)),
    "softmax": lambda x, axis: x.softmax(axis),
    "add the mean": lambda x, axis: x + x.mean(axis, keepdim=True),
    "subtract from positions": lambda x, axis: x - 0.3 * x.mean(-1 if axis == 1 else 1, keepdim=True),
    "cumsum over positions": lambda x, axis: x.cumsum(-1 if axis == 1 else 1),
    "roll over positions": lambda x, axis: x.roll(1, -1 if axis == 1 else 1),
    "stack and sum": lambda x, axis: torch.stack([x, 2 * x]).sum(0),
    "stack and sum unlike": lambda x, axis: torch.stack([x, x.flip(axis)]).sum(0),
    "add its flip": lambda x, axis: x + x.flip(axis),
    "times its flip": lambda x, axis: x * x.flip(axis),
    "einsum": lambda x, axis: torch.einsum("b...,b...->b...", x, x.sigmoid()),
    "clamp": lambda x, axis: x.clamp(-1, 2) ** 2,
    "masked fill": lambda x, axis: x.masked_fill(x < -0.5, 0.25),
    "write a feature": lambda x, axis: _written(x, axis, 0.5),
    "scale features in place": lambda x, axis: _written(x, axis, None),
    "no_grad": lambda x, axis: x * _without_grad(x),
    "strides": lambda x, axis: _by_strides(x),
}


def _written(x: Tensor, axis: int, value: float | None) -> Tensor:
    x = x.clone()
    part = x.narrow(axis, 0, 1)
    _ = part.mul_(2.0) if value is None else part.fill_(value)
    return x


def _by_strides(x: Tensor) -> Tensor:
    """The same tensor, read from a memory in which its first two axes are swapped."""
    swapped = x.transpose(0, 1).contiguous()
    strides = swapped.stride()
    return swapped.as_strided(x.shape, (strides[1], strides[0], *strides[2:]))


def _without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.abs() + 0.1


POSITIONS = ("max pool", "average pool", "adaptive pool", "flatten", "mean", "amax", "last", "to tokens")


class Doubled(nn.Linear):
    """A subclass that does something to its input first."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


LAYERS = (nn.Linear, nn.modules.conv._ConvNd)


class RandomNet(nn.Module):
    """A network made by running a program on an example, and recording what was done."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.parts: dict[str, nn.Module | nn.Parameter] = {}
        self.ops: list[Callable[[Tensor], Tensor]] = []
        self.heads: list[str] = []
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(program.shuffle)
            self._build(program)
            for name in self._registration_order(program.shuffle):
                setattr(self, name, self.parts[name])
            del self.parts
            self.double()
            self._away_from_defaults()

    def forward(self, x: Tensor) -> Any:
        for op in self.ops:
            x = op(x)
        outputs = [getattr(self, name)(x) for name in self.heads]
        if self.program.feature_leaves:
            outputs.append(x.mean(-1))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def inputs(self, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(EXAMPLES, *SHAPES[self.program.domain], dtype=torch.float64, generator=generator)

    # --- building

    def _build(self, program: Program) -> None:
        x = torch.randn(EXAMPLES, *SHAPES[program.domain])
        for step in program.steps:
            x = self._take(step, x)
        x = self._take(("position", "flatten" if program.shuffle % 2 else "mean"), x)
        for width in program.heads:
            self.heads.append(self._add("head", nn.Linear(x.shape[-1], width)))

    def _registration_order(self, seed: int) -> list[str]:
        names = list(self.parts)
        random.Random(seed).shuffle(names)
        return names

    def _away_from_defaults(self) -> None:
        """Norm parameters and statistics that differ from those of a reset, so that a wrong entry shows."""
        for module in self.modules():
            if isinstance(module, (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)):
                for parameter in module.parameters():
                    parameter.uniform_(0.5, 1.5)
                for buffer in module.buffers():
                    if buffer.is_floating_point():
                        buffer.uniform_(0.5, 1.5)

    def _add(self, name: str, part: nn.Module | nn.Parameter) -> str:
        name = f"{name}{len(self.parts)}"
        self.parts[name] = part
        return name

    def _take(self, step: tuple, x: Tensor) -> Tensor:
        op = getattr(self, "_step_" + step[0])(x, *step[1:])
        if op is None:
            return x
        before = {name: self.parts[name] for name in self.parts}
        for name, part in before.items():
            if not hasattr(self, name):
                object.__setattr__(self, name, part)  # callable already, registered later
        self.ops.append(op)
        with torch.no_grad():
            return op(x.clone())

    def _chain(self, x: Tensor, steps: Sequence[tuple], width: int | None) -> Callable[[Tensor], Tensor]:
        """Some steps as one op; with a last layer of the given width."""
        outer, self.ops = self.ops, []
        writes = _writes_its_input(steps)
        for step in steps:
            x = self._take(step, x)
        if width is not None:
            self._take(("layer", width, True, "same"), x)
        inner, self.ops = self.ops, outer

        def run(x: Tensor) -> Tensor:
            x = x.clone() if writes else x
            for op in inner:
                x = op(x)
            return x

        return run

    # --- steps: each returns an op, or None if it does not fit

    def _step_layer(self, x: Tensor, width: int, bias: bool, kind: str) -> Callable[[Tensor], Tensor] | None:
        if x.dim() == 2 or self._is_tokens(x):
            module: nn.Module = nn.Linear(x.shape[-1], width, bias)
        else:
            rank, channels = x.dim() - 2, x.shape[1]
            conv = (nn.Conv1d, nn.Conv2d)[rank - 1]
            transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d)[rank - 1]
            groups = next(g for g in (3, 2, 1) if channels % g == 0 and width % g == 0)
            options = {
                "same": lambda: conv(channels, width, 1, bias=bias),
                "padded": lambda: conv(channels, width, 3, padding=1, bias=bias),
                "reflect": lambda: conv(channels, width, 3, padding=1, padding_mode="reflect", bias=bias),
                "grouped": lambda: conv(channels, width, 1, groups=groups, bias=bias),
                "strided": lambda: conv(channels, width, 2, stride=2, bias=bias),
                "transposed": lambda: transposed(channels, width, 2, groups=groups, bias=bias),
            }
            if min(x.shape[2:]) < 3 and kind != "grouped":
                kind = "same"
            module = options[kind]()
        name = self._add("layer", module)
        return lambda x: getattr(self, name)(x)

    def _step_frozen(self, x: Tensor, width: int, what: str) -> Callable[[Tensor], Tensor] | None:
        op = self._step_layer(x, width, True, "same")
        module = list(self.parts.values())[-1]
        (module if what == "all" else module.bias).requires_grad_(False)
        return op

    def _step_act(self, x: Tensor, kind: str) -> Callable[[Tensor], Tensor] | None:
        if kind in ACTIVATIONS:
            return ACTIVATIONS[kind]
        name = self._add("act", ACTIVATION_MODULES[kind]())
        return lambda x: getattr(self, name)(x)

    def _step_norm(self, x: Tensor, kind: str) -> Callable[[Tensor], Tensor] | None:
        tokens = self._is_tokens(x)
        channels = x.shape[-1] if tokens else x.shape[1]
        positions = x[0].numel() // channels if not tokens else x.shape[1]
        rank = x.dim() - 2 if not tokens else 1
        batch = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d)[rank]
        instance = (None, nn.InstanceNorm1d, nn.InstanceNorm2d)[rank]
        last = x.dim() == 2 or tokens
        if kind == "functional":
            return (lambda x: F.layer_norm(x, x.shape[-1:])) if last else None
        if kind.endswith("across"):  # statistics of each token, over its features
            if not tokens:
                return None
            name = self._add("norm", (nn.BatchNorm1d if kind == "batch across" else nn.InstanceNorm1d)(x.shape[1]))
            return lambda x: getattr(self, name)(x)
        if kind.startswith("batch"):
            module: nn.Module = batch(channels, affine=kind == "batch")
        elif kind.startswith("layer"):
            shape = [x.shape[-1]] if last else list(x.shape[1:])
            module = nn.LayerNorm(shape, elementwise_affine=kind == "layer")
        elif kind == "rms":
            module = nn.RMSNorm(x.shape[-1] if last else list(x.shape[1:]))
        elif kind.startswith("group"):
            if channels % 2 or (kind == "group each" and positions < 2):
                return None
            module = nn.GroupNorm(channels if kind == "group each" else channels // 2, channels)
        elif instance is not None and positions > 1:
            module = instance(channels, affine=kind == "instance affine")
        else:
            return None
        name = self._add("norm", module)
        if tokens and not isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            return lambda x: getattr(self, name)(x.transpose(1, 2)).transpose(1, 2)
        return lambda x: getattr(self, name)(x)

    def _step_drop(self, x: Tensor, kind: str) -> Callable[[Tensor], Tensor] | None:
        if kind == "functional":
            return lambda x: F.dropout(x, 0.3, self.training)
        channels = kind == "channels" and x.dim() == 4
        name = self._add("drop", nn.Dropout2d(0.3) if channels else nn.Dropout(0.3, inplace=kind == "inplace"))
        return lambda x: getattr(self, name)(x)

    def _step_position(self, x: Tensor, kind: str) -> Callable[[Tensor], Tensor] | None:
        """Pooling, flattening, and other ways to deal with positions."""
        if x.dim() == 2:
            return None
        tokens, rank = self._is_tokens(x), x.dim() - 2
        dims = [1] if tokens else list(range(2, x.dim()))
        if kind == "flatten":
            return lambda x: x.flatten(1)
        if kind == "mean":
            return lambda x: x.mean(dims)
        if kind == "amax":
            return lambda x: x.amax(dims)
        if kind == "last":
            return lambda x: x[:, -1] if tokens else x[..., -1].flatten(1)
        if tokens or min(x.shape[2:]) < 2:
            return None
        if kind == "to tokens":
            return lambda x: x.flatten(2).transpose(1, 2)
        pools = {"max pool": "MaxPool", "average pool": "AvgPool", "adaptive pool": "AdaptiveAvgPool"}
        name = self._add("pool", getattr(nn, f"{pools[kind]}{rank}d")(2))
        return lambda x: getattr(self, name)(x)

    def _step_move(self, x: Tensor, kind: str) -> Callable[[Tensor], Tensor] | None:
        """The same values in other places."""
        axis = -1 if x.dim() == 2 or self._is_tokens(x) else 1
        width = x.shape[axis]
        if kind == "flip":
            return lambda x: x.flip(axis)
        if kind == "roll":
            return lambda x: x.roll(1, axis)
        if kind == "split and swap":
            return lambda x: torch.cat([x.narrow(axis, 1, width - 1), x.narrow(axis, 0, 1)], axis)
        if kind == "transpose twice":
            return lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)
        if kind == "permute and view":
            if width % 2:
                return None
            shape = list(x.shape)
            if axis == 1:
                return lambda x: x.unflatten(1, (2, -1)).transpose(1, 2).contiguous().view(-1, *shape[1:])
            return lambda x: x.unflatten(-1, (2, -1)).transpose(-1, -2).contiguous().view(-1, *shape[1:])
        if x.dim() == 4 and min(x.shape[2:]) > 2:
            return lambda x: F.unfold(x, 2, padding=1).transpose(1, 2)
        return None

    def _step_const(self, x: Tensor, kind: str) -> Callable[[Tensor], Tensor] | None:
        """Meet something that does not depend on the input."""
        axis = -1 if x.dim() == 2 or self._is_tokens(x) else 1
        shape = [1] * x.dim()
        shape[axis] = x.shape[axis]
        rest = [n for d, n in enumerate(x.shape) if d not in (0, axis % x.dim())]
        if kind == "times two":
            return lambda x: 2 * x
        if kind == "pad":
            widths = [0, 2] if axis == -1 else [0, 0] * (x.dim() - 2) + [1, 0]
            return lambda x: F.pad(x, widths)
        if kind in ("scale", "shift"):
            name = self._add("const", nn.Parameter(torch.rand(shape) + 0.5))
            return lambda x: x * getattr(self, name) if kind == "scale" else x + getattr(self, name)
        shape[axis] = 2
        if kind == "cat parameter":
            name = self._add("const", nn.Parameter(torch.rand(shape) + 0.5))

        def cat(x: Tensor) -> Tensor:
            if kind == "cat parameter":
                part = getattr(self, name)
            else:
                part = (torch.ones if kind == "cat ones" else torch.zeros)(shape, dtype=x.dtype)
            sizes = [x.shape[0], *rest]
            sizes.insert(axis % x.dim(), 2)
            return torch.cat([x, part.expand(sizes)], axis)

        return cat

    def _step_branch(
        self, x: Tensor, left: Sequence[tuple], right: Sequence[tuple], how: str, width: int
    ) -> Callable[[Tensor], Tensor] | None:
        axis = -1 if x.dim() == 2 or self._is_tokens(x) else 1
        one, two = self._chain(x, left, width), self._chain(x, right, width)

        def run(x: Tensor) -> Tensor:
            a, b = one(x), two(x)
            return {
                "add": lambda: a + b,
                "sub": lambda: a - b,
                "mul": lambda: a * b,
                "max": lambda: torch.maximum(a, b),
                "cat": lambda: torch.cat([a, b], axis),
            }[how]()

        return run

    def _step_residual(
        self, x: Tensor, steps: Sequence[tuple], projection: bool, in_place: bool
    ) -> Callable[[Tensor], Tensor]:
        axis = -1 if x.dim() == 2 or self._is_tokens(x) else 1
        inner = self._chain(x, steps, x.shape[axis])
        shortcut = self._chain(x, (), x.shape[axis]) if projection else lambda x: x

        def run(x: Tensor) -> Tensor:
            inside = inner(x)
            if in_place:
                inside += shortcut(x)
                return inside
            return shortcut(x) + inside

        return run

    def _step_gate(self, x: Tensor, kind: str, width: int) -> Callable[[Tensor], Tensor]:
        tokens = self._is_tokens(x)
        axis = -1 if x.dim() == 2 or tokens else 1
        if kind == "two layers":
            one, two = self._chain(x, (), width), self._chain(x, (), width)
            return lambda x: one(x) * two(x).sigmoid()
        if kind == "excite":  # a gate per channel from the mean over positions
            dims = [d for d in range(1, x.dim()) if d != axis % x.dim()]
            gate = self._chain(
                x.mean(dims) if dims else x, [("layer", width, True, "same"), ("act", "relu")], x.shape[axis]
            )

            def run(x: Tensor) -> Tensor:
                g = gate(x.mean(dims) if dims else x).sigmoid()
                return x * (g.unsqueeze(1) if tokens else g.view(*g.shape, *[1] * (x.dim() - 2)))

            return run
        both = self._chain(x, (), 2 * width)
        if kind == "glu":
            return lambda x: F.glu(both(x), axis)

        def halves(x: Tensor) -> Tensor:
            a, b = both(x).chunk(2, axis)
            return F.silu(a) * b

        return halves

    def _step_twice(self, x: Tensor, width: int) -> Callable[[Tensor], Tensor]:
        """One layer called two times."""
        into = self._chain(x, (), width)
        y = into(x)
        again = self._chain(y, (), width)
        return lambda x: again(F.relu(again(into(x))))

    def _step_block(self, x: Tensor, width: int) -> Callable[[Tensor], Tensor]:
        """A layer without bias, a BatchNorm, an activation."""
        steps = [("layer", width, False, "same"), ("norm", "batch"), ("act", "ReLU inplace")]
        return self._chain(x, steps, None)

    def _step_dense(self, x: Tensor, steps: Sequence[tuple], width: int) -> Callable[[Tensor], Tensor]:
        axis = -1 if x.dim() == 2 or self._is_tokens(x) else 1
        inner = self._chain(x, steps, width)
        return lambda x: torch.cat([x, inner(x)], axis)

    def _step_mixture(self, x: Tensor, kind: str) -> Callable[[Tensor], Tensor] | None:
        axis = -1 if x.dim() == 2 or self._is_tokens(x) else 1
        if "positions" in kind and x.dim() == 2:
            return None
        return lambda x: MIXTURES[kind](x, axis)

    def _step_score(self, x: Tensor, kind: str) -> Callable[[Tensor], Tensor] | None:
        """One number per example or position, which scales all features."""
        axis = -1 if x.dim() == 2 or self._is_tokens(x) else 1
        gate = self._chain(x, (), 1)
        if kind == "gate":
            return lambda x: x * gate(x).sigmoid()
        if x.dim() == 2:
            return None
        place = -1 if axis == 1 else 1
        return lambda x: x * gate(x).softmax(place)

    def _step_again(self, x: Tensor, width: int) -> Callable[[Tensor], Tensor] | None:
        """A norm that has been used before, on the same features or others."""
        for name in reversed(self.parts):
            module = self.parts[name]
            if isinstance(module, (nn.LayerNorm, nn.modules.batchnorm._BatchNorm)):
                try:
                    copy.deepcopy(module)(x)
                except (RuntimeError, ValueError):
                    continue
                layer = self._chain(x, (), width)
                other = self._chain(x, (), width)
                return lambda x, name=name: layer(x) + other(getattr(self, name)(x).tanh())
        return None

    def _step_borrow(self, x: Tensor, what: str) -> Callable[[Tensor], Tensor] | None:
        """A parameter of a layer or norm, used by something else too."""
        for name in reversed(self.parts):
            module = self.parts[name]
            if isinstance(module, (*LAYERS, nn.LayerNorm, nn.BatchNorm1d)) and getattr(module, what) is not None:
                return lambda x, name=name: x * (1 + getattr(getattr(self, name), what).abs().mean())
        return None

    def _step_tie(self, x: Tensor, width: int) -> Callable[[Tensor], Tensor] | None:
        """Two layers with one bias."""
        one, two = self._step_layer(x, width, True, "same"), self._step_layer(x, width, True, "same")
        first, second = list(self.parts.values())[-2:]
        second.bias = first.bias
        return lambda x: torch.cat([one(x), two(x)], -1 if x.dim() == 2 or self._is_tokens(x) else 1)

    def _step_odd(self, x: Tensor, kind: str, width: int) -> Callable[[Tensor], Tensor] | None:
        """Layers whose weight is computed, or that do more than apply it, or that feed back into themselves."""
        if x.dim() != 2 and not self._is_tokens(x):
            return None
        features = x.shape[-1]
        if kind == "recurrent" and x.dim() == 3:
            name = self._add("odd", nn.GRU(features, width, batch_first=True))
            return lambda x: getattr(self, name)(x)[0]
        part = Doubled(features, width) if kind == "subclass" else weight_norm(nn.Linear(features, width))
        name = self._add("odd", part)
        return lambda x: getattr(self, name)(x)

    def _step_unused(self, x: Tensor, width: int) -> None:
        self._add("spare", nn.Linear(width, width))

    def _step_attend(self, x: Tensor, width: int) -> Callable[[Tensor], Tensor] | None:
        if not self._is_tokens(x):
            return None
        q, k, v = (self._chain(x, (), 2 * width) for _ in range(3))
        out = self._chain(v(x), (), x.shape[-1])

        def run(x: Tensor) -> Tensor:
            heads = [p(x).view(x.shape[0], x.shape[1], 2, width).transpose(1, 2) for p in (q, k, v)]
            mixed = F.scaled_dot_product_attention(*heads).transpose(1, 2).contiguous()
            return x + out(mixed.view(x.shape[0], x.shape[1], -1))

        return run

    def _is_tokens(self, x: Tensor) -> bool:
        """Three axes are (batch, tokens, features) in a net of tokens, and (batch, channels, length) otherwise."""
        return x.dim() == 3 and self.program.domain != "signal"


def _writes_its_input(steps: Sequence[tuple]) -> bool:
    before = [step[1] for step in steps[: next((i for i, s in enumerate(steps) if s[0] == "layer"), len(steps))]]
    return any(str(kind).endswith(("_", "inplace")) for kind in before)


def _draw_step(rng: random.Random, inside: bool = False) -> tuple:
    """A random step; inside a branch only steps that keep the positions."""
    width = rng.choice([2, 3, 4, 6])
    chain = tuple(_draw_step(rng, True) for _ in range(rng.randrange(4))) if not inside else ()
    other = tuple(_draw_step(rng, True) for _ in range(rng.randrange(4))) if not inside else ()
    kinds = ["same", "grouped", "padded", "reflect", "strided", "transposed"]
    kind = rng.choice(kinds[:2] if inside else kinds)
    simple = [
        *[("layer", width, rng.random() < 0.7, kind)] * 3,
        *[("act", rng.choice([*ACTIVATIONS, *ACTIVATION_MODULES]))] * 3,
        *[("norm", rng.choice(NORMS))] * 2,
        ("drop", rng.choice(["functional", "module", "inplace", "channels"])),
        ("move", rng.choice(MOVES[:-1])),
        ("const", rng.choice(CONSTANTS[:3])),
    ]
    if inside:
        return rng.choice(simple)
    return rng.choice(
        [
            *simple,
            *[("branch", chain, other, rng.choice(COMBINE), width)] * 3,
            *[("residual", chain, rng.random() < 0.5, rng.random() < 0.3)] * 3,
            *[("gate", rng.choice(["two layers", "glu", "halves", "excite"]), width)] * 2,
            *[("position", rng.choice(POSITIONS))] * 2,
            ("const", rng.choice(CONSTANTS[3:])),
            ("move", "unfold"),
            ("frozen", width, rng.choice(["all", "bias"])),
            ("twice", width),
            ("unused", width),
            *[("block", width)] * 2,
            ("dense", chain, width),
            *[("mixture", rng.choice(list(MIXTURES)))] * 3,
            ("score", rng.choice(["gate", "softmax"])),
            ("again", width),
            ("borrow", rng.choice(["weight", "bias"])),
            ("tie", width),
            ("odd", rng.choice(["recurrent", "subclass", "parametrized"]), width),
            ("attend", width),
        ]
    )


@st.composite
def networks(draw: st.DrawFn) -> Program:
    """Each number stands for a step, so that a failing net shrinks by losing steps."""
    numbers = draw(st.lists(st.integers(0, 99_999), min_size=2, max_size=7))
    rng = random.Random(draw(st.integers(0, 99_999)))
    steps = [("layer", rng.choice([3, 4, 6]), True, "same"), ("act", "relu")]
    steps += [_draw_step(random.Random(number)) for number in numbers]
    heads = tuple(rng.choice([1, 2, 3]) for _ in range(rng.choice([1, 1, 2, 3])))
    return Program(rng.choice(list(SHAPES)), tuple(steps), heads, rng.random() < 0.2, rng.randrange(1000))


residuals = st.sampled_from(["skip", "group"])


def _layers(*steps: tuple, domain: str = "vector") -> Program:
    """A short program: widths stand for layers."""
    written = tuple(("layer", step, True, "same") if isinstance(step, int) else step for step in steps)
    return Program(domain, written, (2,), False, 0)


ONCE_WRONG = [
    _layers(4, ("act", "relu"), ("const", "cat ones"), 3),  # a constant column was taken for a unit's
    _layers(4, ("mixture", "strides"), 3, domain="tokens"),  # as_strided was followed on labels of another layout
    _layers(4, ("norm", "instance across"), 3, domain="tokens"),  # a norm over units, said not to couple them
    _layers(4, ("norm", "layer plain"), 3),  # the check took a norm that couples units for a way past the consumers
    _layers(4, ("norm", "layer"), ("again", 3)),  # and so a norm that is called twice
    _layers(("norm", "layer"), 5, ("act", "where"), ("again", 3)),  # a norm that serves both the input and units
    _layers(("norm", "batch"), 5, ("act", "where"), ("again", 3)),
    _layers(4, ("norm", "functional"), 4, ("norm", "functional"), 3),  # biases that were said to be missing
    _layers(1, ("const", "cat ones"), ("norm", "layer"), 3),  # a norm that lets a lone unit into constant columns
    _layers(4, ("borrow", "weight"), 3),  # a parameter that something else reads too
    _layers(4, ("borrow", "bias"), 3),
    _layers(4, ("tie", 3), 3),
]


def once_wrong(*rest: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The programs that found a mistake, as examples; ``rest``: the other arguments of the test."""

    def add(test: Callable[..., None]) -> Callable[..., None]:
        for program in ONCE_WRONG:
            test = example(program, "group", *rest)(example(program, "skip", *rest)(test))
        return test

    return add


# ---------------------------------------------------------------- the plan


def plan_of(net: RandomNet, residual: str = "skip") -> gxd.UnitPlan:
    return gxd.find_units(net, net.inputs(), residual=residual)


@nets
@given(networks(), residuals)
@once_wrong()
def test_the_check_finds_nothing_wrong_and_passes_every_group_that_is_not_called_approximate(
    program: Program, residual: str
):
    net = program.build()
    report = gxd.check(net, net.inputs(), plan=plan_of(net, residual))
    note(f"{report.plan}\n{report}")
    for group in report.groups:
        assert group.status != "wrong", group
        if not report.plan[group.name].approximate:  # inconclusive: what comes after the units is silent
            assert group.status in ("passed", "inconclusive"), group


def _claimed(group: gxd.Group, unit: int) -> set[tuple[str, int]]:
    return {(c.module, column) for v in group.views for c in v.consumers for column in v.columns[unit].tolist()}


@nets
@given(networks(), residuals)
def test_in_single_precision_the_check_finds_nothing_wrong_either(program: Program, residual: str):
    net = program.build().float()
    x = net.inputs().float()
    report = gxd.check(net, x, plan=gxd.find_units(net, x, residual=residual))
    note(f"{report.plan}\n{report}")
    assert report.ok


@nets
@given(networks(), residuals, st.integers(0, 99))
@once_wrong(0)
def test_the_columns_of_a_unit_are_those_that_answer_when_it_is_disturbed(program: Program, residual: str, seed: int):
    """Once its outgoing weights are 0, what a unit does shows in its own columns, in all of them, and nowhere else."""
    net = program.build().eval()
    plan = plan_of(net, residual)
    note(str(plan))
    rng = random.Random(seed)
    for group in plan.groups:
        unit = rng.randrange(group.size)
        cut = program.build().eval()
        gxd.reset_units(cut, plan, {group.name: [unit]}, compensate=False)
        answers = _columns_that_answer(cut, group, unit)
        claimed = _claimed(group, unit)
        if any(norm.couples for norm in group.norms):
            assert claimed <= answers
        else:
            assert claimed == answers


@nets
@given(networks(), residuals, st.integers(0, 99))
@once_wrong(0)
def test_the_norm_entries_of_a_unit_move_its_own_columns_and_nothing_else(program: Program, residual: str, seed: int):
    plan = plan_of(program.build(), residual)
    note(str(plan))
    rng = random.Random(seed)
    for group in plan.groups:
        unit = rng.randrange(group.size)
        net = program.build().eval()
        if _norm_calls(net, group) > 1 and any(norm.couples for norm in group.norms):
            continue  # what one norm does to the unit, the next one does to others
        gxd.reset_units(net, plan, {group.name: [unit]}, compensate=False)
        before = _layer_inputs(net)
        with torch.no_grad():
            for norm in group.norms:
                for name in filter(None, (norm.weight, norm.bias, norm.running_mean, norm.running_var)):
                    net.state_dict()[name].view(-1)[norm.entries[unit]] += rng.random() + 0.5
        moved = {
            (name, int(column))
            for name, value in _layer_inputs(net).items()
            for column in ((value - before[name]).abs() > 1e-9).any(0).nonzero().flatten()
        }
        assert moved <= _claimed(group, unit)


def _norm_calls(net: RandomNet, group: gxd.Group) -> int:
    """How often the norms of a group are called, on its units or on something else."""
    calls: list[int] = []
    handles = [net.get_submodule(n.module).register_forward_hook(lambda *a: calls.append(1)) for n in group.norms]
    net(net.inputs())
    for handle in handles:
        handle.remove()
    return len(calls)


def _columns_that_answer(net: RandomNet, group: gxd.Group, unit: int) -> set[tuple[str, int]]:
    """(layer, column) of every layer input that changes when the unit does, and the outputs that change."""
    found = set()
    before = _layer_inputs(net)
    for scale in (4.0, -4.0, 40.0, -40.0):  # up and down by the same noise, so that no rectifier hides it
        handles = []
        generator = torch.Generator().manual_seed(unit + int(abs(scale)))
        for producer in group.producers:

            def disturb(module: nn.Module, args: tuple, output: Tensor, row: int = int(producer.rows[unit])) -> Tensor:
                part = output.select(-1 if isinstance(module, nn.Linear) else 1, row)
                noise = torch.randn(part.shape, dtype=part.dtype, generator=generator)  # noqa: B023
                output = output.clone()
                output.select(-1 if isinstance(module, nn.Linear) else 1, row).add_(scale * noise)  # noqa: B023
                return output

            handles.append(net.get_submodule(producer.module).register_forward_hook(disturb))
        after = _layer_inputs(net)
        for handle in handles:
            handle.remove()
        for name, value in before.items():
            changed = (value - after[name]).abs() > 1e-9 * value.abs().clamp(min=1)
            found |= {(name, int(column)) for column in changed.any(0).nonzero().flatten()}
    return found


def _row(net: RandomNet, tensors: dict[str, Tensor], producer: Any, row: int) -> Tensor:
    weight, module = tensors[producer.weight], net.get_submodule(producer.module)
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        size, rows = module.in_channels // module.groups, module.out_channels // module.groups
        block = row // rows
        return weight[block * size : (block + 1) * size, row % rows]
    return weight[row]


def _layer_inputs(net: RandomNet) -> dict[str, Tensor]:
    """The input of every layer, (rows, columns), and the outputs of the net."""
    seen: dict[str, Tensor] = {}
    handles = []
    for name, module in net.named_modules():
        if isinstance(module, LAYERS):
            axis = -1 if isinstance(module, nn.Linear) else 1

            def hook(module: nn.Module, args: tuple, name: str = name, axis: int = axis) -> None:
                value = args[0].detach().movedim(axis, -1).flatten(0, -2).clone()
                seen[name] = torch.cat([seen[name], value]) if name in seen else value

            handles.append(module.register_forward_pre_hook(hook))
    with torch.no_grad():
        output = net(net.inputs())
    for handle in handles:
        handle.remove()
    outputs = output if isinstance(output, tuple) else (output,)
    return {
        **seen,
        **{
            f"output {i}": o.detach().flatten(1) if o.dim() > 1 else o.detach().unsqueeze(1)
            for i, o in enumerate(outputs)
        },
    }


@nets
@given(networks(), residuals, st.booleans())
def test_finding_units_leaves_the_model_and_the_random_state_as_they_were(
    program: Program, residual: str, training: bool
):
    net = program.build()
    rng = random.Random(program.shuffle)
    net.train(training)
    for module in net.modules():
        module.training = rng.random() < 0.5
    for parameter in net.parameters():
        if rng.random() < 0.5:
            parameter.grad = torch.ones_like(parameter)
    before = _everything(net)
    plan_of(net, residual)
    after = _everything(net)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]) if isinstance(value, Tensor) else value == after[name], name


def _everything(net: nn.Module) -> dict[str, Any]:
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "grad": torch.is_grad_enabled(),
    }
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        state[name] = tensor.detach().clone()
        state[name + " id"] = (id(tensor), tensor.data_ptr(), tensor._version, tensor.requires_grad)
        state[name + " grad"] = None if tensor.grad is None else tensor.grad.clone()
    for name, module in net.named_modules():
        state[name + " mode"] = module.training
        state[name + " hooks"] = (
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            len(module._backward_hooks),
        )
        state[name + " attributes"] = sorted(vars(module))
    return state


@nets
@given(networks(), residuals)
@once_wrong()
def test_every_layer_is_reset_or_named_with_a_reason_and_no_row_is_lost(program: Program, residual: str):
    net = program.build()
    plan = plan_of(net, residual)
    note(str(plan))
    rows: dict[str, list[int]] = {}
    for group in plan.groups:
        for producer in group.producers:
            rows.setdefault(producer.module, []).extend(producer.rows.tolist())
    reasons = {entry.name: entry.reason for entry in plan.skipped}
    assert all(reasons.values())
    for name, module in net.named_modules():
        if isinstance(module, LAYERS):
            out = module.out_features if isinstance(module, nn.Linear) else module.out_channels
            own = rows.get(name, [])
            assert len(own) == len(set(own)), f"a row of {name} is in two groups"
            partly = [entry for entry in reasons if entry.partition("[")[0] == name]
            assert len(own) == out if not partly else len(own) < out, f"{name}: {len(own)} of {out} rows, {partly}"
    for head in net.heads:
        assert head not in rows, "a layer that makes the output was taken for hidden"


@nets
@given(networks(), residuals)
@once_wrong()
def test_a_group_is_called_approximate_only_for_a_reason_that_is_there(program: Program, residual: str):
    net = program.build()
    plan = plan_of(net, residual)
    note(str(plan))
    for group in plan.groups:
        for consumer in group.consumers:
            module = net.get_submodule(consumer.module)
            zeros = getattr(module, "padding_mode", "") == "zeros" and any(module.padding)
            shared = module.bias is not None and sum(p is module.bias for p in _registered(net)) > 1
            if consumer.approximate is None:
                assert module.bias is not None or consumer.running_mean is not None
                assert not zeros and not isinstance(module, nn.modules.conv._ConvTransposeNd)
            elif consumer.approximate == "no bias to take the mean":
                assert module.bias is None
            elif consumer.approximate == "its bias is frozen":
                assert not module.bias.requires_grad
            elif "bias is also read" in consumer.approximate:
                assert shared or any(step[0] == "borrow" for step in program.steps)
            elif consumer.approximate == "padding":
                assert zeros
            else:
                assert "transposed" in consumer.approximate
                assert isinstance(module, nn.modules.conv._ConvTransposeNd)


def _registered(net: nn.Module) -> list[nn.Parameter]:
    return [parameter for module in net.modules() for parameter in module._parameters.values() if parameter is not None]


@nets
@given(networks(), residuals)
def test_the_order_of_registration_does_not_change_the_plan(program: Program, residual: str):
    net, other = program.build(), replace(program, shuffle=program.shuffle + 2).build()
    assert plan_of(net, residual).fingerprint() == plan_of(other, residual).fingerprint()


def test_memory_that_is_read_by_other_strides_is_not_mistaken_for_the_same_units():
    """The labels of a tensor do not lie in memory as the tensor does: here every column mixes units and examples."""

    class Restrided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).t().contiguous().as_strided((2, 4), (4, 1)))

    torch.manual_seed(0)
    assert gxd.check(Restrided(), torch.randn(2, 5)).ok


# ---------------------------------------------------------------- the scores


@nets
@given(networks(), residuals, st.sampled_from(["gxd", "gxi", "activation", "contribution"]))
def test_the_scores_and_references_are_those_of_a_plain_loop(program: Program, residual: str, utility: str):
    net, plain = program.build(), program.build()
    plan = plan_of(net, residual)
    note(str(plan))
    assume(plan.groups)
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.0)
    seen: dict[str, Tensor] = {}
    for name, module in plain.named_modules():
        if isinstance(module, LAYERS):
            module.register_forward_pre_hook(lambda m, args, name=name: _keep(seen, name, args[0]))
    torch.manual_seed(0)
    score = _as_one(plain(plain.inputs()))
    try:
        score.sum().backward()
    except RuntimeError:  # an op has changed in place what another one needs for its gradient
        reject()
    with gxd.ContinualBackprop(net, optimizer, plan=plan, utility=utility, replacement_rate=0.0) as cbp:
        torch.manual_seed(0)
        score = _as_one(net(net.inputs()))
        cbp.observe(score=score)
        optimizer.step()
        found, references = cbp.utilities(), cbp.references()
    parameters = {name: p.detach() for name, p in plain.named_parameters(remove_duplicate=False)}
    for group in plan.groups:
        for unit in range(group.size):
            effect, local = torch.zeros(EXAMPLES, dtype=torch.float64), 0.0
            for number, view in enumerate(group.views):
                columns = view.columns[unit]
                h, r, size = None, 0.0, 0.0
                for consumer in view.consumers:
                    tensor = seen[consumer.module]
                    h = tensor.detach().movedim(view.axis, -1)[..., columns].flatten(1)
                    r = float(h.mean()) if utility == "gxd" else 0.0
                    if tensor.grad is not None:
                        effect += ((h - r) * tensor.grad.movedim(view.axis, -1)[..., columns].flatten(1)).sum(1)
                    weights = (_column(plain, parameters, consumer, int(column))[0] for column in columns)
                    size += sum(float(weight.abs().sum()) for weight in weights)
                reference = references[group.name].view(len(group.views), -1)[number, unit]
                assert float(reference) == pytest.approx(float(h.mean()), rel=1e-9, abs=1e-12)
                local += float(h.abs().mean()) * (size if utility == "contribution" else 1.0)
            expected = float(effect.abs().mean()) if utility.startswith("gx") else local
            assert float(found[group.name][unit]) == pytest.approx(expected, rel=1e-7, abs=1e-10), (group.name, unit)


def _keep(seen: dict[str, Tensor], name: str, source: Tensor) -> tuple[Tensor]:
    """Let a layer read a copy of its input, whose gradient is the one through this layer alone."""
    seen[name] = source.clone() if source.requires_grad else source.clone().requires_grad_()
    seen[name].retain_grad()
    return (seen[name],)


def _as_one(output: Any) -> Tensor:
    outputs = output if isinstance(output, tuple) else (output,)
    return torch.cat([o.flatten(1) if o.dim() > 1 else o.unsqueeze(1) for o in outputs], 1)


# ---------------------------------------------------------------- the reset operator


@st.composite
def selections(draw: st.DrawFn, plan: gxd.UnitPlan, exact: bool = False) -> dict[str, list[int]]:
    """Random units of random groups; neighbours are often reset together."""
    chosen = {}
    for group in plan.groups:
        if not (exact and group.approximate) and draw(st.booleans()):
            units = st.integers(0, group.size - 1)
            chosen[group.name] = sorted(draw(st.sets(units, min_size=1, max_size=group.size)))
    return chosen


def random_references(plan: gxd.UnitPlan, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {g.name: torch.randn(len(g.views), g.size, dtype=torch.float64, generator=generator) for g in plan.groups}


@nets
@given(st.data(), networks(), residuals)
def test_a_reset_writes_the_slices_of_its_units_and_not_one_element_more(data: Any, program: Program, residual: str):
    net = program.build()
    plan = plan_of(net, residual)
    note(str(plan))
    units = data.draw(selections(plan))
    before = {name: t.detach().clone() for name, t in net.state_dict().items()}
    gxd.reset_units(net, plan, units, references=random_references(plan, program.shuffle))
    after = net.state_dict()
    written = {name: torch.zeros_like(t, dtype=torch.bool) for name, t in before.items()}
    exactly = {name: torch.full_like(t, math.nan, dtype=torch.float64) for name, t in before.items()}
    for name, index in units.items():
        for producer in plan[name].producers:
            for row in producer.rows[index].tolist():
                _row(net, written, producer, row).fill_(True)
            if producer.bias is not None:
                written[producer.bias][producer.bias_rows[index]] = True
                exactly[producer.bias][producer.bias_rows[index]] = 0.0
    for name, index in units.items():
        for norm in plan[name].norms:
            for tensor, value in ((norm.weight, 1), (norm.bias, 0), (norm.running_mean, 0), (norm.running_var, 1)):
                if tensor is not None:
                    entries = norm.entries[index].flatten()
                    written[tensor].view(-1)[entries] = True
                    exactly[tensor].view(-1)[entries] = value
    for name, index in units.items():
        for view in plan[name].views:
            for consumer in view.consumers:
                for column in view.columns[index].flatten().tolist():
                    _column(net, written, consumer, column)[0].fill_(True)
                    block, outputs = _column(net, exactly, consumer, column)
                    block.fill_(0.0)
                    for target in filter(None, (consumer.bias or consumer.running_mean,)):
                        written[target][outputs] = True
    for name, old in before.items():
        new = after[name]
        assert torch.equal(old[~written[name]], new[~written[name]]), f"{name} changed where it is no reset unit's"
        known = ~exactly[name].isnan()
        assert torch.equal(new[known].double(), exactly[name][known]), f"{name} is not what a reset makes it"
    for name, index in units.items():
        for producer in plan[name].producers:
            for row in producer.rows[index].tolist():
                drawn = _row(net, exactly, producer, row).isnan()
                new, old = _row(net, after, producer, row), _row(net, before, producer, row)
                assert (new != old)[drawn].all(), f"{producer.module}: row {row} was not drawn again"


def _column(net: RandomNet, tensors: dict[str, Tensor], consumer: Any, column: int) -> tuple[Tensor, slice]:
    """The slice of a weight that reads a column, and the outputs that it feeds."""
    weight, module = tensors[consumer.weight], net.get_submodule(consumer.module)
    if isinstance(module, nn.Linear):
        return weight[:, column], slice(None)
    size, rows = module.in_channels // module.groups, module.out_channels // module.groups
    outputs = slice(column // size * rows, (column // size + 1) * rows)
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return weight[column], outputs
    return weight[outputs, column % size], outputs


def assert_same_outputs(left: Any, right: Any) -> None:
    for a, b in zip(*(o if isinstance(o, tuple) else (o,) for o in (left, right))):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-9 * max(1.0, float(a.abs().max())))


@nets
@given(st.data(), networks(), residuals)
def test_after_a_reset_the_net_computes_what_it_computes_with_the_units_held_at_their_references(
    data: Any, program: Program, residual: str
):
    net = program.build().eval()
    plan = plan_of(net, residual)
    note(str(plan))
    units = data.draw(selections(plan, exact=True))
    references = random_references(plan, program.shuffle)
    with ExitStack() as stack, torch.no_grad():
        for name, index in units.items():
            stack.enter_context(clamped(net, plan[name], torch.tensor(index), references[name]))
        held = net(net.inputs())
    gxd.reset_units(net, plan, units, references=references)
    with torch.no_grad():
        reset = net(net.inputs())
    assert_same_outputs(held, reset)


@nets
@given(st.data(), networks(), residuals)
def test_without_coupling_norms_a_unit_held_at_zero_is_a_unit_reset_without_compensation(
    data: Any, program: Program, residual: str
):
    """Padding, transposed kernels and missing biases make a compensation inexact; without one nothing is inexact."""
    net = program.build().eval()
    plan = plan_of(net, residual)
    note(str(plan))
    loose = [g for g in plan.groups if any(n.couples for n in g.norms)]
    units = data.draw(selections(replace(plan, groups=tuple(g for g in plan.groups if g not in loose))))
    with ExitStack() as stack, torch.no_grad():
        for name, index in units.items():
            stack.enter_context(clamped(net, plan[name], torch.tensor(index), 0.0))
        held = net(net.inputs())
    gxd.reset_units(net, plan, units, compensate=False)
    with torch.no_grad():
        reset = net(net.inputs())
    assert_same_outputs(held, reset)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 0.1),
}


@nets
@given(st.data(), networks(), residuals, st.sampled_from(list(OPTIMIZERS)), st.sampled_from(["keep", "reset"]))
def test_the_optimizer_forgets_the_slices_of_reset_units_and_nothing_else(
    data: Any, program: Program, residual: str, optimizer_name: str, policy: str
):
    net = program.build()
    plan = plan_of(net, residual)
    note(str(plan))
    units = data.draw(selections(plan))
    optimizer = OPTIMIZERS[optimizer_name]([p for p in net.parameters() if p.requires_grad])
    generator = torch.Generator().manual_seed(program.shuffle)
    for _ in range(2):
        for parameter in net.parameters():
            parameter.grad = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        optimizer.step()
    before = {
        (name, key): value.clone() if isinstance(value, Tensor) else value
        for name, parameter in net.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    gxd.reset_units(net, plan, units, optimizer=optimizer, step_policy=policy)
    forgotten = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in net.named_parameters()}
    for name, index in units.items():
        for producer in plan[name].producers:
            for row in producer.rows[index].tolist():
                _row(net, forgotten, producer, row).fill_(True)
            if producer.bias is not None:
                forgotten[producer.bias][producer.bias_rows[index]] = True
        for norm in plan[name].norms:
            for tensor in filter(None, (norm.weight, norm.bias)):
                forgotten[tensor].view(-1)[norm.entries[index].flatten()] = True
        for view in plan[name].views:
            for consumer in view.consumers:
                for column in view.columns[index].flatten().tolist():
                    _column(net, forgotten, consumer, column)[0].fill_(True)
    for name, parameter in net.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            old = before[name, key]
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
                assert torch.equal(value, old.masked_fill(forgotten[name], 0.0)), f"{name}: {key}"
            elif key == "step" and policy == "reset" and forgotten[name].any():
                assert float(value) == 0
            else:
                assert torch.equal(value, old) if isinstance(value, Tensor) else value == old, f"{name}: {key}"


@quick
@given(st.data())
def test_optimizer_state_of_any_shape_is_cleared_where_it_has_the_slices_and_left_alone_where_it_has_not(data: Any):
    shape = data.draw(st.lists(st.integers(2, 5), min_size=1, max_size=4))
    parameter = nn.Parameter(torch.randn(shape))
    optimizer = torch.optim.SGD([parameter], 0.1)
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    index = data.draw(st.lists(st.integers(0, shape[dim] - 1), max_size=4))
    policy = data.draw(st.sampled_from(["keep", "reset"]))
    states = data.draw(
        st.lists(
            st.one_of(
                st.just(tuple(shape)),
                st.tuples(*(st.sampled_from([1, n]) for n in shape)),  # a factored moment
                st.just(()),
                st.sampled_from([(7,), (3, 9), (1, 1, 1, 1, 1)]),
            ),
            max_size=4,
        )
    )
    optimizer.state[parameter] = {f"state {i}": torch.randn(size) for i, size in enumerate(states)}
    optimizer.state[parameter] |= {"step": torch.tensor(5.0), "count": 7, "name": "x", "none": None}
    expected = {k: v.clone() if isinstance(v, Tensor) else v for k, v in optimizer.state[parameter].items()}
    for value in expected.values():
        fits = isinstance(value, Tensor) and value.dim() == len(shape)
        if fits and all(a in (1, b) for a, b in zip(value.shape, shape)) and value.shape[dim] == shape[dim]:
            for i in index:
                value.select(dim, i).fill_(0.0)
    if policy == "reset" and index:
        expected["step"] = torch.tensor(0.0)
    with _any_warning():
        gxd.reset_optimizer_state(optimizer, parameter, index, dim, step_policy=policy)
    for key, value in optimizer.state[parameter].items():
        other = expected[key]
        assert torch.equal(value, other) if isinstance(value, Tensor) else value == other, key


def _any_warning() -> Any:
    stack = ExitStack()
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore", gxd.ResetWarning)
    return stack


# ---------------------------------------------------------------- the budget


rates = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1e-4, 0.01, 0.1, 1 / 3, 0.5, 1.0]))


@quick
@given(st.integers(1, 30), rates, st.integers(0, 12), st.integers(1, 80), st.data())
def test_the_schedule_is_that_of_a_simulation_of_every_unit(
    size: int, rate: float, maturity: int, steps: int, data: Any
):
    """Also across a checkpoint: a budget of half a unit survives it."""
    schedule = Schedule(size, rate, maturity)
    saved_at = data.draw(st.integers(0, steps))
    rng = random.Random(steps)
    ages, budget, earned, spent = [0] * size, 0.0, [], 0
    for step in range(1, steps + 1):
        if step == saved_at:
            state = json.loads(json.dumps(schedule.state_dict()))
            schedule = Schedule(size, rate, maturity)
            schedule.load_state_dict(state)
        ages = [age + 1 for age in ages]
        eligible = [unit for unit, age in enumerate(ages) if age > maturity]
        earned.append(rate * len(eligible))
        budget += earned[-1]
        count = min(math.floor(budget), len(eligible))
        budget -= count
        for unit in rng.sample(eligible, count):
            ages[unit] = 0
        due = schedule.advance(step)
        assert due == count <= len(eligible)
        spent += due
        assert schedule.eligible == len(eligible) - count
    assert 0 <= math.fsum(earned) - spent < 1 + 1e-9, "what is owed is less than a unit"


@quick
@given(st.integers(1, 1000), st.fractions(0, 1, max_denominator=10_000), st.integers(1, 200))
def test_without_maturity_the_resets_are_the_floor_of_rate_times_units_times_steps(
    size: int, rate: Fraction, steps: int
):
    schedule = Schedule(size, float(rate), 0)
    total = sum(schedule.advance(step) for step in range(1, steps + 1))
    exact = rate * size * steps
    assert total in (math.floor(exact), math.floor(exact - Fraction(1, 10**6))), "one less only by rounding"


utilities = st.lists(st.sampled_from([0.0, -0.0, 1.0, 1.0, 2.5, 1e-30, 1e30, math.inf]), min_size=1, max_size=12)


@quick
@given(st.one_of(utilities, st.lists(st.floats(0, 1e6), min_size=1, max_size=12)), st.data())
def test_the_lowest_are_those_of_a_naive_sort_with_ties_to_the_lower_index(utility: list[float], data: Any):
    eligible = data.draw(st.lists(st.booleans(), min_size=len(utility), max_size=len(utility)))
    count = data.draw(st.integers(0, sum(eligible)))
    candidates = sorted((value, unit) for unit, value in enumerate(utility) if eligible[unit])
    naive = sorted(unit for _, unit in candidates[:count])
    for dtype in (torch.float32, torch.float64):
        values = torch.tensor(utility, dtype=torch.float64).to(dtype)
        if torch.equal(values.double(), torch.tensor(utility, dtype=torch.float64)):
            assert lowest(values, torch.tensor(eligible), count).tolist() == naive


# ---------------------------------------------------------------- running averages


class TwoBranches(nn.Module):
    """Two hidden layers; a forward pass runs one of them, or both."""

    def __init__(self, sizes: tuple[int, int]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, sizes[0]), nn.Linear(3, sizes[1])
        self.c, self.d = nn.Linear(sizes[0], 2), nn.Linear(sizes[1], 2)

    def forward(self, x: Tensor, which: str = "ab") -> Tensor:
        out = x.new_zeros(len(x), 2)
        if "a" in which:
            out = out + self.c(self.a(x).tanh())
        if "b" in which:
            out = out + self.d(self.b(x).tanh())
        return out

    @staticmethod
    def traced(sizes: tuple[int, int]) -> "tuple[TwoBranches, gxd.UnitPlan]":
        torch.manual_seed(0)
        net = TwoBranches(sizes).double()
        if sizes not in PLANS:
            PLANS[sizes] = gxd.find_units(net, torch.zeros(2, 3, dtype=torch.float64))
        return net, PLANS[sizes]


PLANS: dict[tuple[int, int], gxd.UnitPlan] = {}


@quick
@given(
    st.sampled_from([(1, 1), (1, 4), (5, 2), (6, 6)]),
    st.lists(st.sampled_from(["a", "b", "ab", "ab", "nan"]), min_size=1, max_size=25),
    st.floats(0, 0.99),
    rates,
    st.integers(0, 6),
    st.integers(1, 3),
)
def test_the_average_of_a_constant_is_the_constant_at_every_age_and_the_lowest_mature_units_are_reset(
    sizes: tuple[int, int], pattern: list[str], decay: float, rate: float, maturity: int, score_every: int
):
    """Whatever steps were not observed: other branches, infinite batches, steps between scores, resets."""
    net, plan = TwoBranches.traced(sizes)
    x = torch.tensor([[0.7, -1.2, 0.4]], dtype=torch.float64).expand(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    cbp = gxd.ContinualBackprop(
        net,
        optimizer,
        plan=plan,
        utility="activation",
        replacement_rate=rate,
        maturity=maturity,
        decay=decay,
        score_every=score_every,
    )
    assert [g.name for g in cbp.plan.groups] == ["a", "b"]
    seen = {"a": torch.zeros(sizes[0], dtype=torch.bool), "b": torch.zeros(sizes[1], dtype=torch.bool)}
    ages = {name: torch.zeros(len(mask), dtype=torch.long) for name, mask in seen.items()}
    for step, which in enumerate(pattern):
        true = {name: getattr(net, name)(x[0]).tanh().detach() for name in seen}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gxd.NonFiniteWarning)
            warnings.simplefilter("ignore", gxd.ObservationWarning)  # a branch that has never run
            net(x * math.nan if which == "nan" else x, "ab" if which == "nan" else which)
            optimizer.step()
        for name, mask in seen.items():
            mask |= which != "nan" and name in which and step % score_every == 0
            ages[name] += 1
            expected = torch.where(mask, true[name].abs(), math.inf)
            if name in cbp.last_resets:
                index = cbp.last_resets[name]
                assert torch.equal(index, lowest(expected, ages[name] > maturity, len(index)))
                mask[index], ages[name][index] = False, 0
            assert torch.equal(cbp.ages()[name], ages[name])
            assert torch.allclose(cbp.utilities()[name], torch.where(mask, true[name].abs(), 0.0), rtol=1e-9)
            assert torch.allclose(cbp.references()[name], torch.where(mask, true[name], 0.0), rtol=1e-9)
    assert cbp.nonfinite_observations == sum(w == "nan" for i, w in enumerate(pattern) if i % score_every == 0)
    cbp.close()


@quick
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=20), st.floats(0, 0.999), st.integers(1, 4))
def test_an_average_is_the_weighted_mean_of_what_was_seen_since_the_last_reset(
    values: list[float], decay: float, score_every: int
):
    """With weights decay ** (steps ago), whether or not the steps in between were scored."""
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).double()
    with torch.no_grad():
        net[0].weight.fill_(1.0)
        net[0].bias.fill_(0.0)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    cbp = gxd.ContinualBackprop(
        net,
        optimizer,
        plan=gxd.find_units(net, groups=[gxd.hand_group("0", consumers=["1"])]),
        utility="activation",
        replacement_rate=0.0,
        decay=decay,
        score_every=score_every,
    )
    for value in values:
        net(torch.full((2, 1), value, dtype=torch.float64))
        optimizer.step()
    scored = [(i, v) for i, v in enumerate(values) if i % score_every == 0]
    weights = [decay ** (scored[-1][0] - i) for i, _ in scored]
    expected = math.fsum(w * v for w, (_, v) in zip(weights, scored)) / math.fsum(weights)
    assert cbp.references()["0"].item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    size = math.fsum(w * abs(v) for w, (_, v) in zip(weights, scored)) / math.fsum(weights)
    assert cbp.utilities()["0"].item() == pytest.approx(size, rel=1e-9, abs=1e-9)
    cbp.close()
