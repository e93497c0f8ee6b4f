"""Optimizers as they come, wrapped and nested: what they keep, and how a reset carries over to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, nn

from gxd.errors import PlanError
from gxd.reset.optimizer_state import (
    COUNTER,
    GRADIENT,
    KEEP,
    WEIGHTS,
    Memory,
    NotUnderstood,
    is_plain,
    meaning_of,
    understand,
)
from gxd.reset.writes import SetEntry, Whole, Write, usual
from gxd.sharded import local

_DEPTH = 3  # of lists and dicts that are looked into


# --- optimizers inside optimizers -------------------------------------------------------------------------------------


def is_optimizer(value: Any) -> bool:
    """Whether it has parameters, state and a step as optimizers have them."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in ("param_groups", "state", "step"))


def all_inside(optimizers: Iterable[Any]) -> list[Any]:
    """These optimizers and those inside them (attributes, also in lists and dicts), the outer ones first."""
    found: dict[int, Any] = {}
    waiting = list(optimizers)
    while waiting:
        one = waiting.pop(0)
        if id(one) not in found:
            found[id(one)] = one
            waiting += directly_inside(one)
    return list(found.values())


def directly_inside(optimizer: Any) -> list[Any]:
    """The optimizers that an optimizer holds."""
    return [part for _, value in _attributes(optimizer) for part in _parts(value) if is_optimizer(part)]


def trained_by(optimizers: Iterable[Any]) -> list[Tensor]:
    """All parameters of these optimizers, and of those inside them."""
    groups = (group for one in all_inside(optimizers) for group in getattr(one, "param_groups", ()))
    return list({id(p): p for group in groups for p in group["params"]}.values())


def _attributes(optimizer: Any) -> list[tuple[str, Any]]:
    """What hangs on an optimizer, but for its state, its parameter groups and its hooks."""
    return [
        (name, value)
        for name, value in getattr(optimizer, "__dict__", {}).items()
        if name not in ("state", "param_groups", "defaults")
        and value is not None
        and not isinstance(value, (bool, int, float, str))
        and not name.endswith("_hooks")
    ]


def _parts(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """What is in a value: itself, or the entries of lists and dicts."""
    if isinstance(value, (list, tuple, deque, set)):
        plain = isinstance(next(iter(value), 0), (bool, int, float, str))  # a history of losses may be long
        values: Iterable[Any] = () if plain else value
    elif isinstance(value, Mapping):
        values = value.values()
    else:
        yield value
        return
    if depth:
        for one in values:
            yield from _parts(one, depth - 1)


# --- what they keep ---------------------------------------------------------------------------------------------------


@dataclass
class Keeper:
    """A dict in which an optimizer keeps values: parameter -> key -> value.

    Attributes:
        classes: of the optimizers that share it, the most derived first: what a key means may depend on them.
    """

    values: Mapping[Any, Any]
    classes: tuple[str, ...]

    def of(self, parameter: Tensor) -> Any:
        """What is kept of a parameter, by key."""
        state = self.values.get(parameter)
        return {} if state is None else state if isinstance(state, Mapping) else {"state": state}

    def understood(self, parameter: Tensor, names: Mapping[str, Tensor]) -> list[tuple[Any, Memory]]:
        """What is kept of a parameter, and what it is. Raises PlanError where a reset would have to guess."""
        found = []
        for key, value in self.of(parameter).items():
            try:
                found.append((key, understand(key, value, parameter, self.classes)))
            except NotUnderstood as error:
                of = next((f" of {name!r}" for name, tensor in names.items() if tensor is parameter), "")
                _refuse(self.classes[0], key, value, of, str(error))
        return found


def keepers(optimizers: Iterable[Any]) -> list[Keeper]:
    """Everything these optimizers, and those inside them, keep by parameter. Raises PlanError for what else they keep
    that may be a copy of weights.
    """
    found: dict[int, Keeper] = {}
    for one in all_inside(optimizers):
        classes = tuple(kind.__name__ for kind in type(one).__mro__)
        state = getattr(one, "state", None)
        kept = [state] if isinstance(state, Mapping) else []
        for name, value, around in _hanging(one):
            if isinstance(value, Mapping) and value and all(isinstance(key, Tensor) for key in value):
                nested = all(isinstance(entry, Mapping) for entry in value.values())
                kept.append(value if nested else {p: {name: entry} for p, entry in value.items()})
                continue
            tensors = [part for part in _parts(value) if isinstance(part, Tensor)]
            foreign = [tensor for tensor in tensors if not _is_own(tensor, around)]
            if len(foreign) == len(tensors) and _is_aligned(value, around):
                kept.append({p: {name: t} for p, t in zip(_parts(around), tensors, strict=True)})
            elif foreign:
                _refuse_loose(classes, name, foreign, around)
        for values in kept:
            _refuse_shared(values, classes)
            if id(values) in found:  # a wrapper that shows the state of the optimizer inside
                found[id(values)].classes = classes + found[id(values)].classes
            else:
                found[id(values)] = Keeper(values, classes)
    return list(found.values())


def check_state(optimizers: Iterable[Any], names: Mapping[str, Tensor]) -> None:
    """Raise PlanError if these optimizers keep anything that a reset could not be carried over to.

    Args:
        names: the model's parameters by name, for the message.
    """
    for keeper in keepers(optimizers):
        for parameter in keeper.values:
            if isinstance(parameter, Tensor):
                keeper.understood(parameter, names)


class NewState:
    """Checks the state of optimizers whenever it has new entries: what cannot be reset is refused as soon as it is
    there, not hours later.
    """

    def __init__(self, optimizers: Sequence[Any], names: Mapping[str, Tensor]) -> None:
        self.optimizers, self.names, self.entries = optimizers, names, -1

    def __call__(self) -> None:
        entries = sum([len(getattr(one, "state", ())) for one in self.optimizers])
        if entries != self.entries:
            check_state(self.optimizers, self.names)
            self.entries = entries


def follow(
    writes: Iterable[Write],
    optimizers: Sequence[Any],
    step_policy: str,
    names: Mapping[str, Tensor],
    memories: str = "reset",
) -> list[Write | SetEntry]:
    """The writes to the state of optimizers that follow from writes to their parameters.

    Memories of gradients begin anew where the parameter is set, copies of the weights are written as the weights are.

    Args:
        step_policy: whether counters ``keep`` their value or ``reset`` to what they begin with.
        names: the model's parameters by name, for messages.
        memories: see :attr:`gxd.Reset.memories`.
    """
    kept = keepers(optimizers)
    if not any(keeper.values for keeper in kept):  # as with SGD without momentum
        return []
    by_parameter: dict[int, list[Write]] = {}
    for write in writes:
        by_parameter.setdefault(id(write.tensor), []).append(write)
    following: list[Write | SetEntry] = []
    for keeper in kept:
        for own in by_parameter.values():
            parameter = own[0].tensor
            for key, (known, tensor) in keeper.understood(parameter, names):
                if known.kind == GRADIENT and tensor is not None and memories != "keep":
                    begin, shape = _begin(known.begin, optimizers, parameter), parameter.shape
                    for one in own:
                        if one.times is None and one.where.belong_to(tensor, shape):
                            of_peers = known.squared and memories == "peers"
                            value = usual(one.where, tensor) if of_peers else begin
                            following.append(Write(tensor, one.where, value, amount=one.amount))
                elif known.kind == WEIGHTS:
                    following += _copies(tensor, own, keeper.of(parameter), key)
                elif known.kind == COUNTER and step_policy == "reset" and not all(one.adds for one in own):
                    begin = _begin(known.begin, optimizers, parameter)
                    following.append(_restarted(keeper.of(parameter), key, begin))
    return _without_repeats(following, by_parameter)


def _copies(
    tensor: Tensor | None, own: list[Write], state: MutableMapping[Any, Any], key: Any
) -> Iterator[Write | SetEntry]:
    """A copy of the weights is written as they are."""
    if tensor is None:  # one number in place of many that were equal
        parameter = own[0].tensor
        full = state[key].expand(parameter.numel()).clone()
        yield SetEntry(state, key, full)
        tensor = full.view(parameter.shape)
    for one in own:
        yield one.on(tensor)


def _restarted(state: MutableMapping[Any, Any], key: Any, begin: float) -> Write | SetEntry:
    """A counter begins anew."""
    value = state[key]
    return Write(value, Whole(), begin) if isinstance(value, Tensor) else SetEntry(state, key, type(value)(begin))


def _begin(begin: float | str, optimizers: Sequence[Any], parameter: Tensor) -> float:
    if not isinstance(begin, str):
        return begin
    groups = (group for one in all_inside(optimizers) for group in getattr(one, "param_groups", ()))
    return float(next((g[begin] for g in groups if begin in g and any(p is parameter for p in g["params"])), 0.0))


def _without_repeats(
    following: list[Write | SetEntry], by_parameter: Mapping[int, list[Write]]
) -> list[Write | SetEntry]:
    """An addition may reach the same memory on two ways (the parameter itself, a wrapper's list, the state inside) and
    is made once.
    """
    done = {(_place(one.tensor), id(one.value)) for own in by_parameter.values() for one in own if one.adds}
    kept: list[Write | SetEntry] = []
    for write in following:
        if isinstance(write, Write) and write.adds:
            place = (_place(write.tensor), id(write.value))
            if place in done:
                continue
            done.add(place)
        kept.append(write)
    return kept


# --- what is kept elsewhere -------------------------------------------------------------------------------------------


def _hanging(optimizer: Any) -> Iterator[tuple[str, Any, list[list[Tensor]]]]:
    """What hangs on an optimizer, and on its parameter groups, outside its state: name, value, and the parameters that
    it may be about, group by group.
    """
    groups = getattr(optimizer, "param_groups", ())
    for name, value in _attributes(optimizer):
        around = [group["params"] for group in groups]
        if isinstance(value, nn.Module):  # a copy of the model, or a list of copies; or the model itself
            value = list(value.parameters())
            if any(_is_own(p, around) for p in value):
                continue
        yield name, value, around
    for group in groups:
        for name, value in group.items():
            if name != "params" and isinstance(value, (Tensor, list, tuple, dict)):
                yield name, value, [group["params"]]


def _is_own(tensor: Tensor, around: list[list[Tensor]]) -> bool:
    """Whether this is one of the parameters, or the gradient of one, and no copy."""
    place = _place(tensor)
    return any(t is not None and _place(t) == place for params in around for p in params for t in (p, p.grad))


def _place(tensor: Tensor) -> int:
    """Where in memory it lies; a sharded tensor has no address of its own."""
    address: int = local(tensor).data_ptr()
    return address


def _is_aligned(value: Any, around: list[list[Tensor]]) -> bool:
    """Whether these are tensors in the order and the shapes of the parameters, flat or in the same lists."""
    tensors, parameters = list(_parts(value)), [p for params in around for p in params]
    return (
        isinstance(value, (list, tuple))
        and len(tensors) == len(parameters)
        and all(isinstance(t, Tensor) and t.shape == p.shape for t, p in zip(tensors, parameters, strict=True))
    )


def _refuse_loose(classes: tuple[str, ...], name: str, tensors: list[Tensor], around: list[list[Tensor]]) -> None:
    """Raise PlanError for tensors that look like copies of parameters, if one cannot tell of which."""
    known = meaning_of(name, classes)
    if known is not None and known.kind == KEEP:
        return
    shapes = {p.shape for params in around for p in params}
    sizes = [sum(p.numel() for p in params) for params in around]
    sizes.append(sum(sizes))  # all parameters of a group, or of all, in one
    for tensor in tensors:
        if tensor.numel() > 1 and (tensor.shape in shapes or tensor.numel() in sizes):
            why = "it may be a copy of parameters, and one cannot tell which part belongs to which"
            _refuse(classes[0], name, tensor, "", why)


def _refuse_shared(values: Mapping[Any, Any], classes: tuple[str, ...]) -> None:
    """Raise PlanError for entries of a state that belong to no parameter, unless they are numbers."""
    for key, value in values.items():
        if not isinstance(key, Tensor) and not is_plain(value):
            known = meaning_of(key, classes) if isinstance(key, str) else None
            one = isinstance(value, Tensor) and value.numel() == 1
            if not one and (known is None or known.kind != KEEP):
                _refuse(classes[0], key, value, "", "it belongs to no single parameter, and may hold copies of them")


def _refuse(optimizer: str, key: Any, value: Any, of: str, why: str) -> NoReturn:
    if isinstance(value, Tensor):
        what = f"{type(value).__name__}, {str(value.dtype).removeprefix('torch.')}, shape {tuple(value.shape)}"
    else:
        what = type(value).__name__
    raise PlanError(
        f"the optimizer {optimizer} keeps {key!r}{of} ({what}), and a reset cannot be carried over to it: {why}. "
        "Nothing was reset. Train with another optimizer (docs/optimizers.md lists those that are known) or, if you "
        f"know what it is, say so: gxd.register_optimizer_state({key!r}, 'gradient' or 'weights' or 'keep', "
        f"optimizer={optimizer!r})"
    )
