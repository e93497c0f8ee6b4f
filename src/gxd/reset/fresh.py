"""Fresh values for whole parameters: the distribution that each began with, as plain data, and draws from it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gxd.plan.init import Init, fit
from gxd.plan.layouts import default_bound, layout_of
from gxd.sharded import whole

Distributions = dict[str, tuple[str, float]]  # parameter name -> kind and scale, as of gxd.plan.init.Init
TABLES = (nn.Embedding, nn.EmbeddingBag)


def distributions(model: nn.Module) -> Distributions:
    """What each parameter of a model was drawn from, by name; a part of a method's state, so that a resume has it.

    One value throughout is that value: zero biases, the gains of norms. Else the layer's default, a uniform or a
    normal, whichever fits; of a norm that was trained already 1 and 0.
    """
    found: Distributions = {}
    for name, parameter in model.named_parameters():
        path, _, key = name.rpartition(".")
        init = _began_with(model.get_submodule(path), key, whole(parameter.detach()))
        found[name] = (init.kind, init.scale)
    return found


def fresh(name: str, parameter: Tensor, known: Distributions, generator: torch.Generator) -> Tensor:
    """A new draw of a parameter, of its shape, type and device; all of it, also of one that processes share out."""
    return Init(*known[name]).draw(parameter.shape, generator).to(parameter.device, parameter.dtype)


def is_norm(module: nn.Module) -> bool:
    """Whether it is a normalisation, by the name of its class: frameworks have their own. A layer or a table is none,
    whatever it is called: a ``NormedLinear`` is linear.
    """
    return "Norm" in type(module).__name__ and layout_of(module) is None and not isinstance(module, TABLES)


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
