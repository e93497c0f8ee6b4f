"""Resets that are carried over to copies of a model: target networks, averages of the weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from gxd import arguments
from gxd.acting import united
from gxd.attachment import Attachment
from gxd.methods.base import UnitsReset
from gxd.plan.layouts import NamedTensors, unwrap
from gxd.reset.units import reset_writes
from gxd.reset.writes import Write, carry_out


def mirror_resets(attached: Attachment, copy: nn.Module) -> RemovableHandle:
    """Reset in a copy of the model, from now on, the units that are reset in the model.

    The copy has weights of its own: those of an earlier time, or an average over time. Its unit gets the incoming
    weights, biases and norm entries that the model's unit has after the reset, its outgoing weights become zero (or
    a share of what they were, where the method leaves one), and what the unit contributed to its consumers on average,
    by the copy's own weights and the model's references, goes into their biases. Nothing else of the copy changes.
    Units that are reset in part (``cpr``, a ``blend`` below 1) are not mirrored.

    Without it a copy keeps what it has learned until it is updated, and an average moves from the old unit to the new
    one at its own pace. Both are sound; mirror where a unit must not be one thing here and another there.

    Args:
        attached: from :func:`gxd.attach`, or a ContinualBackprop.
        copy: a module of the same parameters as the model; an ``AveragedModel`` of it.

    Returns:
        a handle with ``remove()``.

    Example::

        target = copy.deepcopy(q_network)
        cbp = gxd.ContinualBackprop(q_network, optimizer, example_inputs=obs[:2])
        gxd.mirror_resets(cbp, target)
    """
    if not isinstance(attached, Attachment):
        raise TypeError(f"attached must be what gxd.attach returns, got {type(attached).__name__}")
    arguments.module(copy)
    copy = unwrap(copy.module if isinstance(copy, AveragedModel) else copy)
    model = NamedTensors(attached.model, attached.plan.shapes)
    theirs = NamedTensors(copy)
    attached.plan.validate(theirs)
    shared = [name for name in model if theirs[name] is model[name]]
    if shared:
        raise ValueError(
            f"the copy shares {shared[0]!r} with the model, so it is reset already: give a copy.deepcopy(model)"
        )

    @torch.no_grad()
    def mirror(done: Sequence[UnitsReset]) -> None:
        names = {id(theirs[name]): name for name in model}
        writes: list[Write] = []
        moved: dict[str, Tensor] = {}  # what a unit contributed is moved once, however many methods have reset it
        for group, units, operator, references in done:
            if operator.blend < 1:
                continue
            if references is not None:
                left = units[~torch.isin(units, moved.get(group.name, units[:0]))]
                means = {group.name: references}
                found = reset_writes(theirs, [(group, left)], means, torch.Generator(), operator) if len(left) else []
                writes += [write for write in found if write.adds]
                moved = united([*moved.items(), (group.name, units)])
            writes += reset_writes(theirs, [(group, units)], {}, torch.Generator(), operator)
        # What is added first, with the old weights of the copy; then the columns that keep a share of what they were in
        # the copy; then what is set as it is in the model. Neighbours may be reset together.
        writes.sort(key=lambda write: (not write.adds, write.amount is None))
        as_here = [write.adds or write.amount is not None for write in writes]
        carry_out(
            [
                write if here else Write(write.tensor, write.where, write.where.read(model[names[id(write.tensor)]]))
                for write, here in zip(writes, as_here, strict=True)
            ]
        )

    return attached.listen(mirror)
