"""Copies of a network for a probe: one as it is, and one as if it had just been made."""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Callable
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from gxd.errors import ObservationWarning, warn
from gxd.reset.fresh import distributions, fresh
from gxd.sandbox.substitute import seed_all

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_PARTS = ("_parameters", "_buffers", "_modules", *_HOOKS)
_LARGEST = 200_000  # objects that are looked at for kept outputs
Make = Callable[[], nn.Module]


def copied(model: nn.Module, make: Make | None) -> nn.Module:
    """A copy with the same weights and without hooks, in training mode.

    Modules that are in evaluation mode within a model in training mode (a frozen BatchNorm) stay so.
    """
    # An output that is kept somewhere, such as the distribution of a policy's last action, is copied without its graph:
    # torch does not copy graphs.
    memo: dict[int, Any] = {id(t): t.detach().clone() for t in _outputs(model)}
    try:
        made = _deep_copy(model, memo)
    except Exception as error:
        if make is None:
            raise TypeError(
                f"the model cannot be copied ({type(error).__name__}: {error}): give fresh=, a function that makes a "
                "new network; the weights are then loaded into one"
            ) from error
        made = _made(make, model)
        made.load_state_dict(model.state_dict())
    return _ready(made, model)


def _deep_copy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy. Attributes of modules that cannot be copied are shared with it, and named in a warning."""
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception:
        shared: dict[str, Any] = {}
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                if name not in _PARTS and not _can_be_copied(value, memo):
                    shared[f"{path}.{name}" if path else name] = value
        if not shared:
            raise
        made = copy.deepcopy(model, {**memo, **{id(value): value for value in shared.values()}})
    warn(
        f"{', '.join(map(repr, shared))} of the model cannot be copied, so the copies that are trained use the "
        "same object as the model. If that changes what a copy learns, remove the attribute for the probe",
        ObservationWarning,
    )
    return made


def _can_be_copied(value: Any, memo: dict[int, Any]) -> bool:
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:  # whatever a __deepcopy__ raises
        return False
    return True


def _outputs(model: nn.Module) -> list[Tensor]:
    """The tensors with a graph that hang on a model, also inside of objects that are no modules."""
    found: list[Tensor] = []
    seen: dict[int, Any] = {}
    pending: deque[Any] = deque(vars(module) for module in model.modules())
    while pending and len(seen) < _LARGEST:
        one = pending.popleft()
        if id(one) in seen:
            continue
        seen[id(one)] = one  # held, so that no id is used twice
        if isinstance(one, Tensor):
            found += [] if one.is_leaf else [one]
        elif isinstance(one, dict):
            pending.extend(one.values())
        elif isinstance(one, (list, tuple, set, frozenset, deque)):
            pending.extend(one)
        elif not isinstance(one, (type, ModuleType, FunctionType)) and isinstance(getattr(one, "__dict__", None), dict):
            pending.append(vars(one))
    return found


def renewed(model: nn.Module, make: Make | None, seed: int) -> nn.Module:
    """A network like this one, freshly initialised. The global random state is seeded, and used.

    Without ``make``, every module is initialised by its own ``reset_parameters`` (those of Hugging Face by
    ``_init_weights``), inner ones first; parameters of modules that have none are drawn from the distribution that fits
    them. Frozen parameters, with either, stay as they are: they are no part of what learns.
    """
    seed_all(seed)
    if make is not None:
        return _with_frozen(_ready(_made(make, model), model), model)
    made = copied(model, None)
    with torch.no_grad():
        _initialise(made)
        generator, known = torch.Generator().manual_seed(seed), distributions(model)
        for (name, old), new in zip(model.named_parameters(), made.parameters(), strict=True):
            if not old.requires_grad:
                new.copy_(old)
            elif torch.equal(old, new):  # nobody has initialised it
                new.copy_(fresh(name, new, known, generator))
    return made


def _initialise(model: nn.Module) -> None:
    """In place, by the modules' own means."""
    for tensor in (*model.parameters(), *model.buffers()):
        vars(tensor).pop("_is_hf_initialized", None)
    inner_first = list(model.modules())[::-1]
    for module in inner_first:
        vars(module).pop("_is_hf_initialized", None)
        for name in ("reset_parameters", "_reset_parameters"):
            reset = getattr(module, name, None)
            if callable(reset) and not _required(reset) and not _is_frozen(module):
                reset()
    initialisers = _initialisers(model)
    for module in inner_first:
        own = initialisers.get(module)
        if own is not None and not _is_frozen(module):
            own()


def _initialisers(model: nn.Module) -> dict[nn.Module, Callable[[], object]]:
    """Module -> what ``_init_weights`` does to it: that of the innermost model around it that has one for any module,
    as those of Hugging Face, or its own, if that takes no module.
    """
    found: dict[nn.Module, Callable[[], object]] = {}
    around: dict[str, Callable[[nn.Module], object]] = {}  # by the path of a module
    for path, module in model.named_modules():  # outer ones first
        own: Any = getattr(module, "_init_weights", None)
        takes = _required(own) if callable(own) else -1
        if takes == 1:
            around[path] = own
        elif path and path.rpartition(".")[0] in around:
            around[path] = around[path.rpartition(".")[0]]
        if takes == 0:
            found[module] = own
        elif path in around:
            found[module] = partial(around[path], module)
    return found


def _required(function: Callable[..., object]) -> int:
    """How many arguments it has to be given."""
    given = inspect.signature(function).parameters.values()
    return sum(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in given)


def _is_frozen(module: nn.Module) -> bool:
    """Whether it has parameters of its own and none of them is trained: then its buffers stay, too."""
    own = list(module.parameters(recurse=False))
    return bool(own) and not any(p.requires_grad for p in own)


def _made(make: Make, model: nn.Module) -> nn.Module:
    made: Any = make()
    if not isinstance(made, nn.Module):
        raise TypeError(f"fresh must return a torch.nn.Module, got {type(made).__name__}")
    theirs = {id(p) for p in model.parameters()}
    if made is model or any(id(p) in theirs for p in made.parameters()):
        raise ValueError("fresh must make a new network, but what it returned has parameters of the model itself")
    shapes = [{name: tuple(p.shape) for name, p in one.named_parameters()} for one in (model, made)]
    differing = [name for name in {**shapes[0], **shapes[1]} if shapes[0].get(name) != shapes[1].get(name)]
    if differing:
        there, here = (one.get(differing[0], "missing") for one in shapes)
        raise ValueError(
            f"fresh must make a network like the model, but {differing[0]!r} is {there} in the model and {here} in it"
        )
    reference = next(model.parameters(), None)
    made = made if reference is None else made.to(reference.device)
    known = _tensors(model)
    for name, tensor in _tensors(made).items():  # a model in 16 bits is compared with one in 16 bits
        if name in known:
            tensor.data = tensor.data.to(known[name].dtype)
    return made


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@torch.no_grad()
def _with_frozen(made: nn.Module, model: nn.Module) -> nn.Module:
    """With what is frozen in the model as it is there."""
    fresh_ones = dict(made.named_parameters())
    for name, old in model.named_parameters():
        if not old.requires_grad:
            fresh_ones[name].copy_(old)
    for name, module in model.named_modules():
        for buffer, old in module.named_buffers(recurse=False) if _is_frozen(module) else ():
            made.get_submodule(name).get_buffer(buffer).data = old.clone()
    return made


def _ready(made: nn.Module, model: nn.Module) -> nn.Module:
    modes = {name: module.training for name, module in model.named_modules()} if model.training else {}
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    for name, module in made.named_modules():
        module.training = modes.get(name, True)
        for kind in _HOOKS:
            _strip(getattr(module, kind, {}))
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(name not in frozen)
        parameter.grad = None
    return made


def _strip(hooks: dict[int, Any]) -> None:
    """Take out the hooks of the user and of gxd, which may write to what is not copied. Those of torch are a part of
    the model: weight normalisation, pruning.
    """
    for key, hook in list(hooks.items()):
        home = getattr(hook, "__module__", None) or type(hook).__module__
        if not str(home).startswith("torch."):
            del hooks[key]


def parameters_of(model: nn.Module) -> list[Tensor]:
    """Those that are trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
