"""The layers of a model by name: its weight matrices, and its head."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import Tensor, nn

from gxd.arguments import near
from gxd.errors import PlanError
from gxd.methods.base import Host
from gxd.methods.scope import is_embedding
from gxd.plan.layouts import LINEAR, Layout, layout_of

Patterns = str | Sequence[str]


class Layer(NamedTuple):
    """A trained weight that is a matrix, or several of them.

    Attributes:
        names: of its module; or of each of the blocks of the weight, where they have names of their own: torch's
            attention keeps ``q_proj``, ``k_proj`` and ``v_proj`` in one.
        layout: by which it is ``(blocks, out, in, *kernel)``.
    """

    names: tuple[str, ...]
    weight: nn.Parameter
    bias: Tensor | None
    layout: Layout


def layers(host: Host, tied: bool = True) -> list[Layer]:
    """All linear layers and convolutions whose weight is trained, in the order of the modules. ``tied``: also those
    whose weight is that of an embedding, as the head of a language model.
    """
    trained, found = {id(one.parameter) for one in host.trained()}, []
    for module in host.model.modules() if not tied else ():
        if is_embedding(module) and layout_of(module) is None:
            trained -= {id(parameter) for parameter in module.parameters(recurse=False)}
    for name, module in host.model.named_modules():
        for layer in _attention(name, module) if isinstance(module, nn.MultiheadAttention) else _plain(name, module):
            if id(layer.weight) in trained:
                trained.remove(id(layer.weight))  # a weight that two modules share is one
                found.append(layer)
    return found


def chosen(host: Host, include: Patterns, exclude: Patterns) -> list[tuple[Layer, list[int]]]:
    """The layers that match a pattern of ``include`` and none of ``exclude``, and which blocks of each do; all, where
    the blocks have no names. A head that has the weight of an embedding is none of them. Raises PlanError for a pattern
    that matches none.
    """
    every = layers(host, tied=False)
    names = [name for layer in every for name in layer.names]
    for option, patterns in (("include", include), ("exclude", exclude)):
        for pattern in _listed(patterns):
            if not any(fnmatchcase(name, pattern) for name in names):
                listed = ", ".join(names) or "none"
                raise PlanError(
                    f"{option}={pattern!r} matches no trained layer{near(pattern, names) or '.'} Layers: {listed}"
                )
    found = []
    for layer in every:
        wanted = [n for n, name in enumerate(layer.names) if _any(name, include) and not _any(name, exclude)]
        if wanted:
            found.append((layer, wanted if len(layer.names) > 1 else list(range(layer.layout.groups))))
    if not found:
        raise PlanError("the optimizer trains no linear layer and no convolution of this model, or all are excluded")
    return found


def checked_patterns(option: str, patterns: Patterns) -> Patterns:
    """One pattern of names, or several, checked."""
    if not isinstance(patterns, (str, list, tuple)) or not all(isinstance(one, str) for one in patterns):
        raise TypeError(f"{option}={patterns!r} must be a pattern of layer names, as 'blocks.*.q', or a list of them")
    return patterns


def head_of(host: Host, name: str | None) -> nn.Module:
    """The module of this name; without one, the last layer, in the order of the modules, whose weight is trained.
    Raises PlanError if there is none, if nothing of it is trained, or if it shares a parameter with another module.
    """
    modules = dict(host.model.named_modules())
    if name is None:
        found = layers(host)
        if not found:
            raise PlanError("the optimizer trains no linear layer and no convolution of this model: name the head")
        name = found[-1].names[0].removesuffix(".q_proj")
    elif name not in modules or name == "":
        raise PlanError(f"head={name!r} is no module of this model{near(name, modules)}")
    own = {id(p) for p in modules[name].parameters()}
    if own.isdisjoint(id(one.parameter) for one in host.trained()):
        raise PlanError(f"head={name!r} has no parameter that the optimizer trains")
    tied = shared(host.model, name)
    if tied:
        raise PlanError(f"head={name!r} shares a parameter with {tied!r}, which a reset of it would change, too")
    return modules[name]


def shared(model: nn.Module, name: str) -> str | None:
    """Another module, outside the one of this name, that has a parameter of it."""
    inside = set(model.get_submodule(name).modules())
    own = {id(p) for p in model.get_submodule(name).parameters()}
    for other, module in model.named_modules():
        if module not in inside and any(id(p) in own for p in module.parameters(recurse=False)):
            return other
    return None


def _plain(name: str, module: nn.Module) -> list[Layer]:
    layout, weight = layout_of(module), module._parameters.get("weight")
    if layout is None or weight is None or weight.dim() < 2:
        return []
    return [Layer((name,), weight, module._parameters.get("bias"), layout)]


def _attention(name: str, module: nn.MultiheadAttention) -> list[Layer]:
    parts = [f"{name}.{part}_proj" if name else f"{part}_proj" for part in "qkv"]
    bias = module.in_proj_bias
    if module.in_proj_weight is not None:
        return [Layer(tuple(parts), module.in_proj_weight, bias, Layout(LINEAR, groups=3))]
    weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (bias, None, None)  # one for all three
    return [
        Layer((part,), weight, one, Layout(LINEAR)) for part, weight, one in zip(parts, weights, biases, strict=True)
    ]


def _listed(patterns: Patterns) -> Sequence[str]:
    return (patterns,) if isinstance(patterns, str) else patterns


def _any(name: str, patterns: Patterns) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _listed(patterns))
