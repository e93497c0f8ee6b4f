"""Which parameters a method treats: what they are to their layers, and what the user leaves out by name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from gxd.arguments import near
from gxd.reset.fresh import TABLES, is_norm

WEIGHT, BIAS, GAIN, SHIFT, OTHER = "weight", "bias", "gain", "shift", "other"
BUT_NORMS = (WEIGHT, BIAS, OTHER)
KINDS = (*BUT_NORMS, GAIN, SHIFT)

Exclude = str | Sequence[str]


def kinds(model: nn.Module) -> dict[str, str]:
    """Parameter name -> what it is: ``weight`` of a layer (a matrix, a kernel), ``bias`` of a layer, ``gain`` or
    ``shift`` of a norm, or ``other``: embeddings, tokens, scales. A tied parameter has its first name, and is an
    embedding if one of its layers is.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, str] = {}
    for _, module, key, parameter in _owned(model):
        kind, name = _kind(module, key, parameter), names[id(parameter)]
        found[name] = kind if name not in found or is_embedding(module) else found[name]
    return found


def treated(model: nn.Module, exclude: Sequence[str], wanted: Collection[str]) -> dict[str, str]:
    """Name -> kind of the parameters of the wanted kinds that are not left out; also of what is frozen now, for it may
    be trained later. Raises ValueError if a pattern leaves nothing out, or if nothing remains.
    """
    left_out = _left_out(model, exclude)
    named = dict(model.named_parameters())
    found = {name: kind for name, kind in kinds(model).items() if kind in wanted and id(named[name]) not in left_out}
    if not found:
        raise ValueError(
            f"of {type(model).__name__}, no {' or '.join(wanted)} is left to treat"
            + (f" with exclude={list(exclude)!r}; exclude=() leaves nothing out" if exclude else "")
        )
    return found


def patterns(exclude: Exclude) -> tuple[str, ...]:
    """What ``exclude=`` says, checked: names, with wildcards, of parameters or of modules, whose parameters are all
    meant; ``"head"`` is the module of that name, or else the last layer with a weight, in the order of the modules.
    """
    found = (exclude,) if isinstance(exclude, str) else tuple(exclude) if isinstance(exclude, (list, tuple)) else None
    if found is None or not all(isinstance(one, str) and one for one in found):
        raise TypeError(
            f"exclude={exclude!r} must be a name of parameters or modules, as 'head' or 'blocks.*.bias', or a list"
        )
    return found


def wide(tensor: Tensor) -> Tensor:
    """At least in float32, for sums and products."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def is_embedding(module: nn.Module) -> bool:
    """Whether it is a table of vectors: one of torch's, or by the name of its class."""
    return isinstance(module, TABLES) or "Embedding" in type(module).__name__


def _kind(module: nn.Module, key: str, parameter: Tensor) -> str:
    if is_norm(module):
        return SHIFT if "bias" in key else GAIN
    if is_embedding(module):
        return OTHER
    if "bias" in key:
        return BIAS
    return WEIGHT if "weight" in key and parameter.dim() > 1 else OTHER


def _owned(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Each parameter with its module: path, module, its name in it, and itself."""
    for path, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            yield path, module, key, parameter


def _left_out(model: nn.Module, exclude: Sequence[str]) -> set[int]:
    """The parameters that the patterns name, by id."""
    places = [(_paths(name), id(p)) for name, p in model.named_parameters(remove_duplicate=False)]
    left_out: set[int] = set()
    for pattern in exclude:
        found = {key for paths, key in places if any(fnmatchcase(path, pattern) for path in paths)}
        if not found and pattern == "head":
            found = _head(model)
        if not found:
            names = dict.fromkeys(path for paths, _ in places for path in paths)
            raise ValueError(f"exclude={pattern!r} names no parameter and no module of the model{near(pattern, names)}")
        left_out |= found
    return left_out


def _head(model: nn.Module) -> set[int]:
    """The parameters of the last layer with a weight."""
    layers = [module for _, module, key, p in _owned(model) if _kind(module, key, p) == WEIGHT]
    return {id(p) for p in layers[-1].parameters()} if layers else set()


def _paths(name: str) -> list[str]:
    """A parameter's name, and those of the modules that it is in."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
