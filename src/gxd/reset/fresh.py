"""Fresh values for whole parameters: the distribution that each began with, as plain data, and draws from it; and the
rows of them that nothing may be written to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gxd.plan.init import Init, fit
from gxd.plan.layouts import default_bound, layout_of
from gxd.sharded import is_sharded, local, region, whole

Distributions = dict[str, tuple[str, float]]  # parameter name -> kind and scale, as of gxd.plan.init.Init
TABLES = (nn.Embedding, nn.EmbeddingBag)


def distributions(model: nn.Module) -> Distributions:
    """What each parameter of a model was drawn from, by name; a part of a method's state, so that a resume has it.

    One value throughout is that value: zero biases, the gains of norms. Else the layer's default, a uniform or a
    normal, whichever fits; of a norm that was trained already 1 and 0. Rows that are fixed were not drawn.
    """
    found: Distributions = {}
    fixed = fixed_rows(model)
    for name, parameter in model.named_parameters():
        path, _, key = name.rpartition(".")
        drawn = without_rows(whole(parameter.detach()), fixed.get(id(parameter), ()))
        init = _began_with(model.get_submodule(path), key, drawn)
        found[name] = (init.kind, init.scale)
    return found


def fresh(name: str, parameter: Tensor, known: Distributions, generator: torch.Generator) -> Tensor:
    """A new draw of a parameter, of its shape, type and device; all of it, also of one that processes share out."""
    return Init(*known[name]).draw(parameter.shape, generator).to(parameter.device, parameter.dtype)


def fixed_rows(model: nn.Module) -> dict[int, list[int]]:
    """The id of a parameter -> its rows that no step trains: those of padding tokens (``padding_idx``). They get no
    gradient, so whatever is written to them would stay, and padding would change the output. A row that another module
    gives a gradient to, as a head that is tied to the table does, is not fixed.
    """
    found: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            own = _padding(module, parameter)
            found[id(parameter)] = found.get(id(parameter), own) & own
    return {key: sorted(rows) for key, rows in found.items() if rows}


def without_rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """The other rows of a tensor, in their order."""
    if not rows:
        return tensor
    others = torch.ones(len(tensor), dtype=torch.bool, device=tensor.device)
    others[rows] = False
    return tensor[others]


def with_rows_of(parameter: Tensor, rows: Sequence[int], value: Tensor) -> Tensor:
    """A new value of a parameter, in which these rows are made those that it has."""
    if rows:
        value[rows] = parameter.detach()[rows].to(value)
    return value


@contextmanager
def holding(tensor: Tensor, rows: Sequence[int]) -> Iterator[None]:
    """Whatever is written to a tensor within this context, these rows of it are afterwards what they were."""
    here, first = local(tensor), region(tensor)[0].start if rows and is_sharded(tensor) else 0
    mine = [row - first for row in rows if 0 <= row - first < len(here)]
    before = here[mine].clone() if mine else None
    yield
    if before is not None:
        here[mine] = before


def is_norm(module: nn.Module) -> bool:
    """Whether it is a normalisation, by the name of its class: frameworks have their own. A layer or a table is none,
    whatever it is called: a ``NormedLinear`` is linear.
    """
    return "Norm" in type(module).__name__ and layout_of(module) is None and not isinstance(module, TABLES)


def _padding(module: nn.Module, parameter: Tensor | None) -> set[int]:
    """The row of a parameter that a module never gives a gradient to."""
    if parameter is None or not isinstance(module, TABLES) or module.padding_idx is None:
        return set()
    return {module.padding_idx % len(parameter)}


def _began_with(module: nn.Module, key: str, parameter: Tensor) -> Init:
    if parameter.is_meta or not parameter.numel():
        return Init("constant", 0.0)
    first = parameter.flatten()[0]
    if bool((parameter == first).all()):
        return Init("constant", first.item())
    if is_norm(module):
        return Init("constant", 0.0 if "bias" in key else 1.0)
    # A bias is drawn as the weight of its layer is.
    weight = parameter if parameter.dim() > 1 else getattr(module, "weight", None)
    known = isinstance(weight, Tensor) and weight.dim() > 1
    return fit(parameter, default_bound(module, weight) if known else None)  # type: ignore[arg-type]
