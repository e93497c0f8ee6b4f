"""Hold units at a value: what a compensated reset amounts to, done to the activations instead of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from gxd.observe.captures import Capture, Pass
from gxd.observe.consumers import Site, hooked
from gxd.plan.units import Group, UnitPlan

See = Callable[[int, str, Tensor], None]  # view number within the group, module, what it would have read


def clamped(
    model: nn.Module, group: Group, index: Tensor, value: float | Tensor, see: See | None = None
) -> AbstractContextManager[None]:
    """Within this context, all views of the given units are held at a value.

    Args:
        model: the model the plan was made from.
        group: one of the plan's groups.
        index: the units.
        value: a number, or ``(views, size)``.
        see: called with what each consumer would have read otherwise.
    """
    values = torch.as_tensor(value, dtype=torch.float64).expand(len(group.views), group.size)

    def clamp(site: Site, source: Tensor) -> Tensor:
        result = source
        for number in site.views:
            view = group.views[number]
            if see is not None:
                see(number, site.module, source.detach())
            axis = -1 if site.inside_attention else view.axis
            columns = view.columns[index].flatten().to(source.device)
            levels = values[number][index].repeat_interleave(view.columns.shape[1]).to(source)
            shape = [-1 if d == axis % source.dim() else 1 for d in range(source.dim())]
            sizes = [len(columns) if s == -1 else n for s, n in zip(shape, source.shape, strict=True)]
            result = result.index_copy(axis, columns, levels.view(shape).expand(sizes))
        return result

    return hooked(model, group.views, clamp)


def blurred(model: nn.Module, group: Group, eps: float, generator: torch.Generator) -> AbstractContextManager[None]:
    """Within this context, all that the consumers of a group read is off by a relative ``eps``, up or down: what a sum
    that is rounded in another order does to the outputs.
    """

    def blur(site: Site, tensor: Tensor) -> Tensor:
        signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor) * 2 - 1
        return tensor * (1 + eps * signs)

    return hooked(model, group.views, blur)


def watched(model: nn.Module, plan: UnitPlan, one: Pass) -> AbstractContextManager[None]:
    """Within this context, a forward pass is captured in ``one``: all views of the plan, in whatever mode the model is.

    :class:`gxd.observe.captures.Observer` sees only training passes, on purpose; this is for looking on request.
    """

    def see(site: Site, source: Tensor) -> Tensor:
        if site.inside_attention:
            alias = source
        else:
            alias = source.view_as(source) if source.requires_grad else source.detach().requires_grad_()
        for number in site.views:
            one.setdefault(number, Capture(source)).aliases.append(alias)
        return alias

    return hooked(model, plan.views, see)
