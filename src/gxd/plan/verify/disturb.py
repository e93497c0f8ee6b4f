"""Move a model away from the special values it was initialised with, so that a check on it proves something.

A zero head, a zero-initialised gamma or a layer scale of 1e-6 hides the units before it. A norm's weight of 1 and a
bias of 0 are what a reset writes, so that an entry which is wrongly reset would not show. Noise is added, as 0 times
anything hides as much as before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_VANISHING = 1e-2  # the size of a vector, or the gain of a matrix, below which it hides what lies behind it


@torch.no_grad()
def disturb(tensors: Mapping[str, Tensor], generator: torch.Generator) -> None:
    """Write to copies of a model's tensors: all biases, scales and norms, running statistics, and weights that are
    constant or next to nothing. The sizes of activations stay what they were, or become those of a usual network.

    Args:
        tensors: by qualified name; a tensor that has several is written once.
        generator: of the noise.
    """
    done: set[int] = set()
    for name, tensor in tensors.items():
        if id(tensor) in done or not tensor.is_floating_point() or not tensor.numel():
            continue
        done.add(id(tensor))
        if isinstance(tensor, nn.Parameter):
            if sum(size > 1 for size in tensor.shape) <= 1:  # also as (1, channels, 1, 1)
                _move_vector(tensor, generator)
            else:
                _fill_matrix(tensor, generator)
        elif name.endswith("running_var"):
            tensor.mul_((1.0 + _offsets(tensor, generator)).to(tensor))  # stays positive
        elif name.endswith("running_mean"):
            deviation = tensors.get(f"{name.removesuffix('mean')}var", torch.ones(())).sqrt()
            tensor.add_(deviation.to(tensor) * _offsets(tensor, generator).to(tensor))


def with_fresh_statistics(model: nn.Module) -> list[nn.Module]:
    """The norms whose running statistics are still 0 and 1."""
    found = []
    for module in model.modules():
        mean, var = module._buffers.get("running_mean"), module._buffers.get("running_var")
        if mean is not None and var is not None and not bool(mean.any()) and bool((var == 1).all()):
            found.append(module)
    return found


@contextmanager
def measured(norms: Sequence[nn.Module]) -> Iterator[None]:
    """Within this context, norms measure their running statistics on what they are given, and write them to the tensors
    that they run on. With statistics of 0 and 1 nothing is normalised in evaluation, and a deep network that relies on
    it lets next to nothing through.
    """

    def measure(module: nn.Module, args: tuple[Any, ...]) -> None:
        mean, var = module._buffers["running_mean"], module._buffers["running_var"]
        if mean is None or var is None or not args or args[0].dim() < 2 or args[0].shape[1] != len(var):
            return
        x = args[0].detach()
        own_var, own_mean = torch.var_mean(x, [d for d in range(x.dim()) if d != 1], correction=0)
        own_var = own_var.clamp(min=0.1 * float(own_var.mean()))  # a channel may be silent on these inputs
        if bool((own_var > 0).all()):  # what was disturbed stays so, in the units of the data
            mean.copy_(own_mean + own_var.sqrt() * mean)
            var.mul_(own_var)

    handles = [norm.register_forward_pre_hook(measure) for norm in norms]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _move_vector(tensor: Tensor, generator: torch.Generator) -> None:
    """Biases, affine parameters of norms, layer scales: relative to their size, unless that is next to nothing."""
    size = _size(tensor)
    tensor.add_(((size if size > _VANISHING else 1.0) * _offsets(tensor, generator)).to(tensor))


def _fill_matrix(tensor: Tensor, generator: torch.Generator) -> None:
    """Weights that let nothing through, or the same from every row: noise as of a fresh layer."""
    fan_in = tensor.numel() // tensor.shape[0]
    if _size(tensor) * math.sqrt(fan_in) < _VANISHING or bool(tensor.min() == tensor.max()):
        tensor.add_((torch.randn(tensor.shape, generator=generator) / math.sqrt(fan_in)).to(tensor))


def _offsets(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """From 0.1 to 0.3, of both signs: away from 0, and small enough for a hundred layers in a row."""
    sizes = 0.1 + 0.2 * torch.rand(tensor.shape, generator=generator)
    return torch.where(torch.rand(tensor.shape, generator=generator) < 0.5, sizes, -sizes)


def _size(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())
