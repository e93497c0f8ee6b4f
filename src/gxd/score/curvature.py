"""The second-order part of the effect of a reset, from one more backward pass through the first one.

Moving a unit by -d changes the output by ``-d'g + d'Hd / 2``, g and H being the first and second derivatives by all
its positions and views, and d = h - r. H is never made: with a random sign s for every unit and example, ``s d' H s d``
over all units has the expectation ``d'Hd`` of each (Hutchinson), for products of the signs of two units average out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gxd.errors import ObservationError
from gxd.observe.captures import Gradients
from gxd.score.sums import Block

Read = Callable[[list[int], Tensor, Mapping[int, Tensor], int | None], Tensor]
PullBack = Callable[[Tensor], Gradients]  # the gradients of a number by all views


def curvatures(
    blocks: Sequence[Block],
    gradients: Gradients,
    again: PullBack,
    references: Callable[[list[int]], Tensor],
    read: Read,
    generator: torch.Generator,
) -> list[list[Tensor]]:
    """For each block and slot ``(examples, positions, units)``, which sum over slots and positions to an estimate of
    ``d'Hd``.

    Args:
        gradients: with a graph of their own.
        again: pulls a number back through that graph.
        references: of the views of these numbers, side by side.
        read: the gradients by some views, side by side.
    """
    moved: list[list[Tensor]] = []
    total: Tensor | None = None
    with torch.enable_grad():
        for block in blocks:
            examples, _, units = block.h[0].shape
            signs = torch.randint(0, 2, (examples, 1, units), generator=generator).to(block.h[0]) * 2 - 1
            moved.append([])
            for slot, h in zip(block.slots, block.h, strict=True):
                moved[-1].append(signs * (h - references(slot).to(h.device)))
                part = (read(slot, h, gradients.get(block.number, {}), block.examples) * moved[-1][-1]).sum()
                total = part if total is None else total + part.to(total.device)
    assert total is not None
    # What is linear all the way has no second derivatives, and no graph.
    found: Gradients = again(total) if total.requires_grad else {}
    return [
        [
            d * read(slot, h, found.get(block.number, {}), block.examples)
            for slot, h, d in zip(block.slots, block.h, each, strict=True)
        ]
        for block, each in zip(blocks, moved, strict=True)
    ]


@contextmanager
def needing_second_derivatives(utility: str) -> Iterator[None]:
    """Within this context, a layer that cannot be differentiated twice is the reason for an error in words."""
    try:
        yield
    except RuntimeError as error:
        why = str(error).strip().splitlines()[0]
        raise ObservationError(
            f"the utility {utility!r} needs second derivatives, and a layer of the model has none ({why}): use another "
            "utility, as 'gxd'; attention has them within torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        ) from error
