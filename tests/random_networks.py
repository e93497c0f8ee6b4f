"""Random networks for the property tests.

`networks()` draws a program: a list of small steps that are applied to the input one after the other. A step that does
not fit the tensor at hand is left out, so that every program is a valid network and shrinks well.
"""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, example, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import gxd

EXAMPLES = 3
CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
nets = settings(deadline=None, max_examples=12, derandomize=True, suppress_health_check=CHECKS)
quick = settings(deadline=None, max_examples=60, derandomize=True, suppress_health_check=CHECKS)


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


def plan_of(net: RandomNet, residual: str = "skip") -> gxd.UnitPlan:
    """The plan of a net that is as it was built. Many tests look at the programs that were once wrong: traced once."""
    return _plan_of(net.program, residual)


@cache
def _plan_of(program: Program, residual: str) -> gxd.UnitPlan:
    net = program.build()
    return gxd.find_units(net, net.inputs(), residual=residual)


def row_of(net: RandomNet, tensors: dict[str, Tensor], producer: Any, row: int) -> Tensor:
    weight, module = tensors[producer.weight], net.get_submodule(producer.module)
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        size, rows = module.in_channels // module.groups, module.out_channels // module.groups
        block = row // rows
        return weight[block * size : (block + 1) * size, row % rows]
    return weight[row]
