"""FIRE: the nearest weights that are orthogonal, at the end of a task."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gxd import arguments
from gxd.methods.base import Host
from gxd.methods.event import Event, begin_anew
from gxd.methods.layers import Patterns, checked_patterns, chosen
from gxd.methods.registry import register_method
from gxd.plan.layouts import Layout
from gxd.reset.operator import STEP_POLICIES
from gxd.reset.writes import Whole, Write


class Fire(Event):
    """Replaces every matrix by its orthogonal polar factor, scaled. It remembers nothing.

    Attributes:
        rounds: of the Newton-Schulz iteration.
    """

    def __init__(self, rounds: int, every: int | None, include: Patterns, exclude: Patterns, optimizer: str) -> None:
        super().__init__(every)
        self.rounds = arguments.every("rounds", rounds)
        self.include, self.exclude = checked_patterns("include", include), checked_patterns("exclude", exclude)
        self.optimizer = arguments.choice("optimizer", optimizer, STEP_POLICIES)

    def begin(self, host: Host) -> tuple[()]:
        chosen(host, self.include, self.exclude)
        return ()

    def act(self, host: Host, own: tuple[()]) -> tuple[()]:
        writes = []
        for layer, blocks in chosen(host, self.include, self.exclude):
            value = isometric(layer.weight.detach(), layer.layout, blocks, self.rounds)
            writes.append(Write(layer.weight, Whole(), value))
        if self.optimizer == "reset":
            begin_anew(host, writes)
        else:
            host.write(writes)
        return own


def isometric(weight: Tensor, layout: Layout, blocks: list[int], rounds: int) -> Tensor:
    """A copy of a weight in which each matrix of these blocks, one per position of the kernel, is near its orthogonal
    polar factor times ``sqrt(out / in) / positions``. Matrices of one element (depthwise convolutions) stay, as do
    those that are not finite.
    """
    exact = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
    view = layout.canonical(exact)  # (blocks, out, in, *kernel)
    out, into, positions = view.shape[1], view.shape[2], view.shape[3:].numel()
    if out * into > 1:
        picked = view[blocks]
        matrices = picked.flatten(3).permute(0, 3, 1, 2) if picked.dim() > 3 else picked.unsqueeze(1)
        found = polar(matrices, rounds) * (math.sqrt(out / into) / positions)
        found = found.permute(0, 2, 3, 1).reshape(picked.shape)
        view[blocks] = torch.where(found.isfinite(), found, picked)
    return exact.to(weight)


def polar(matrices: Tensor, rounds: int) -> Tensor:
    """``(..., out, in)``: ``X <- 1.5 X - 0.5 X X' X`` from ``X = W / |W|_F``, so often; zeros stay zeros."""
    norms = torch.linalg.matrix_norm(matrices, keepdim=True)
    x = matrices / norms.clamp_min(torch.finfo(matrices.dtype).tiny)
    wide = x.shape[-2] < x.shape[-1]
    x = x.mT if wide else x
    for _ in range(rounds):
        x = 1.5 * x - 0.5 * x @ (x.mT @ x)
    return x.mT if wide else x


@register_method(
    "fire",
    description="when a task ends, make every weight matrix the nearest orthogonal one",
    reference="Han, Park, Oh, Kim, Lee, Kim: FIRE: Frobenius-Isometry Reinitialization for Balancing the "
    "Stability-Plasticity Tradeoff, ICLR 2026",
    inert={"every": None},
    changes="weight matrices, all optimizer state, when a task ends",
)
def fire(
    rounds: int = 10,
    every: int | None = 0,
    include: Patterns = "*",
    exclude: Patterns = (),
    optimizer: str = "reset",
) -> Fire:
    """``W <- sqrt(d_out / d_in) U V'`` for ``W = U S V'``, by ten rounds of Newton and Schulz; for a convolution each
    position of the kernel alone, divided by their number. Biases and norms stay as they are.

    Singular values grow by 1.5 per round at most: those below 1.7 % of ``|W|_F`` have not arrived at 1 after ten. The
    authors' code was read. Deviations: all is computed in 32 bits at least; a matrix of zeros stays as it is (divided
    by its norm it would be NaN); the blocks of grouped convolutions and of torch's attention (q, k, v) are matrices of
    their own, and matrices of one element, those of depthwise convolutions, are left alone, as is an embedding that a
    head shares.

    Args:
        rounds: of the iteration.
        every: 0: when a task ends; else every so many steps instead; None: never.
        include, exclude: shell-style patterns of layer names. The authors treat all layers, heads and shortcuts too,
            but in transformers the queries and keys alone: ``include=["*.q_proj", "*.k_proj"]``.
        optimizer: ``reset``: all that the optimizer remembers begins anew, as in the authors' protocol; ``keep``.
    """
    return Fire(rounds, every, include, exclude, optimizer)
