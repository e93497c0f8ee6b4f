"""The plan: which slices of which tensors belong to which unit. Plain data, by name; no module and no parameter is
held.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from gxd.errors import PlanError
from gxd.plan.init import Init
from gxd.plan.layouts import Layout
from gxd.tables import html_table, text_table

_HEADER = ("group", "units", "producers", "path", "consumers", "compensation")


@dataclass(frozen=True)
class Producer:
    """A layer that computes the units of a group.

    Attributes:
        module: qualified name of the module.
        weight: qualified name of the weight; row ``rows[i]`` is the incoming weight of unit ``i``.
        bias: qualified name of the bias, or None.
        rows: ``(n,)`` row of each unit in the weight.
        bias_rows: ``(n,)`` entry of each unit in the bias.
        init: distribution of fresh incoming weights.
        has_fan_in: whether an input of the layer is many numbers, so that a length of its rows means something. An
            embedding reads one row of its table.
    """

    module: str
    weight: str
    bias: str | None
    layout: Layout
    rows: Tensor
    bias_rows: Tensor
    init: Init
    has_fan_in: bool = True

    @cached_property
    def in_order(self) -> bool:
        """Whether unit ``i`` is row ``i``, as in most layers."""
        order = torch.arange(len(self.rows))
        return torch.equal(self.rows, order) and torch.equal(self.bias_rows, order)

    def rows_of(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of some units in the weight, and in the bias."""
        return (index, index) if self.in_order else (self.rows[index], self.bias_rows[index])

    def __str__(self) -> str:
        return self.module


@dataclass(frozen=True)
class Consumer:
    """A layer that reads the units of a group.

    Attributes:
        module: qualified name of the module.
        weight: qualified name of the weight; the columns of a unit are given by the :class:`View`.
        bias: where the compensation goes; None if the layer has none (or a frozen one).
        running_mean: where the compensation goes if there is no bias but a BatchNorm follows.
        site: the module whose call shows the input.
        ports: where it shows there: ``input``, the argument of an ordinary layer; ``query``, ``key`` and ``value``,
            the arguments of an attention module; or ``heads``, what its output projection reads.
        kernel_share: the share of the kernel that one output sees, 1 except for strided transposed convolutions.
        approximate: why the compensated reset only approximates the clamp, or None.
    """

    module: str
    weight: str
    bias: str | None
    running_mean: str | None
    layout: Layout
    site: str
    ports: tuple[str, ...] = ("input",)
    kernel_share: float = 1.0
    approximate: str | None = None

    def __str__(self) -> str:
        return self.module

    @property
    def compensation(self) -> str:
        """Where the removed mean goes: ``bias``, ``running_mean`` or ``none``."""
        return "bias" if self.bias else "running_mean" if self.running_mean else "none"


@dataclass(frozen=True)
class View:
    """The units of a group as the consumers of one tensor see them: a slice of the consumers' input.

    Attributes:
        consumers: the layers that read this tensor.
        columns: ``(n, k)`` the k input columns of each unit (k > 1 after a flatten, or when a unit is repeated).
        axis: the axis of the columns in the consumers' input, negative.
        batch_axis: the axis of the examples, counted without the column axis.
        fold: how examples lie on that axis: ``none`` (one entry each), ``major`` (consecutive entries) or ``minor``
            (strided).
    """

    consumers: tuple[Consumer, ...]
    columns: Tensor
    axis: int
    batch_axis: int = 0
    fold: str = "none"

    @cached_property
    def in_order(self) -> bool:
        """Whether unit ``i`` is column ``i``, as in most layers."""
        return torch.equal(self.columns, torch.arange(len(self.columns)).unsqueeze(1))

    @property
    def shown(self) -> tuple[Consumer, ...]:
        """One consumer for each place where the tensor can be seen; several weights of one module read it there."""
        return tuple({(consumer.site, consumer.ports): consumer for consumer in self.consumers}.values())

    def columns_of(self, index: Tensor) -> Tensor:
        """The columns of some units, flat."""
        return index if self.in_order else self.columns.index_select(0, index).flatten()


@dataclass(frozen=True)
class Norm:
    """A normalisation on the path of the units.

    Attributes:
        entries: ``(n, e)`` flat indices of each unit's entries in the norm's parameters and buffers; ``(n, 0)`` if it
            has none.
        couples: whether the norm's statistics mix several units (LayerNorm, GroupNorm, RMSNorm).
    """

    module: str
    weight: str | None
    bias: str | None
    running_mean: str | None
    running_var: str | None
    entries: Tensor
    couples: bool


@dataclass(frozen=True, repr=False)
class Group:
    """Units that are ranked together: same producers, same consumers.

    Attributes:
        name: qualified module name of the first producer, with the row range where a layer's rows form several groups.
        size: the number of units.
        rate: replacement rate of this group, or None for the common one.
        residual: whether several producers are summed into the units (a coordinate of a residual stream).
    """

    name: str
    size: int
    producers: tuple[Producer, ...]
    views: tuple[View, ...]
    norms: tuple[Norm, ...] = ()
    rate: float | None = None
    residual: bool = False

    @property
    def consumers(self) -> tuple[Consumer, ...]:
        """All layers that read the units."""
        return tuple(consumer for view in self.views for consumer in view.consumers)

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """The names of all parameters and buffers that resets write to."""
        names: dict[str | None, None] = {}
        for p in self.producers:
            names.update(dict.fromkeys((p.weight, p.bias)))
        for c in self.consumers:
            names.update(dict.fromkeys((c.weight, c.bias, c.running_mean)))
        for n in self.norms:
            names.update(dict.fromkeys((n.weight, n.bias, n.running_mean, n.running_var)))
        return tuple(name for name in names if name is not None)

    @property
    def approximate(self) -> tuple[str, ...]:
        """Why a compensated reset of these units only approximates the clamp. Empty: it is exact."""
        reasons = [f"{c.module}: {c.approximate}" for c in self.consumers if c.approximate]
        reasons += [f"{n.module or 'a functional norm'} couples units" for n in self.norms if n.couples]
        return tuple(dict.fromkeys(reasons))

    def __repr__(self) -> str:
        consumers = ", ".join(dict.fromkeys(map(str, self.consumers)))
        return f"Group({self.name!r}, {self.size} units, read by {_shortened(consumers, 60)})"


@dataclass(frozen=True)
class Skipped:
    """A layer, or some of its rows, that will not be reset, and why."""

    name: str
    reason: str


@dataclass(frozen=True, repr=False)
class UnitPlan:
    """What will be reset, what will not, and why. ``print`` it.

    Attributes:
        groups: the groups of units that can be reset.
        skipped: the layers that will not be, each with its reason.
        shapes: name and shape of every tensor the plan touches, for checks against a model.
        batch_dim: the axis of the model's inputs that counts examples.
        unseen: the modules with parameters of their own that the traced forward did not use: what they read is unknown.
    """

    groups: tuple[Group, ...]
    skipped: tuple[Skipped, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    batch_dim: int = 0
    unseen: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Group:
        for group in self.groups:
            if group.name == name:
                return group
        reason = next((f"; it is not reset: {entry.reason}" for entry in self.skipped if entry.name == name), "")
        names = ", ".join(group.name for group in self.groups) or "none"
        raise KeyError(f"no group {name!r} in the plan{reason}; it has {names}")

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def size(self) -> int:
        """The number of units of all groups."""
        return sum(group.size for group in self.groups)

    @cached_property
    def views(self) -> tuple[View, ...]:
        """The views of all groups, in order. Their numbers count through the whole plan."""
        return tuple(view for group in self.groups for view in group.views)

    @cached_property
    def views_of(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the views of each group."""
        return tuple(tuple(range(s.start, s.stop)) for s in _slices(len(group.views) for group in self.groups))

    @cached_property
    def unit_slices(self) -> tuple[slice, ...]:
        """Where the units of each group stand in a flat tensor of all units."""
        return _slices(group.size for group in self.groups)

    @cached_property
    def view_slices(self) -> tuple[slice, ...]:
        """Where the units of each view stand in a flat tensor of all views."""
        return _slices(group.size for group in self.groups for _ in group.views)

    def select(
        self,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        rates: Mapping[str, float] | None = None,
        init: Mapping[str, Callable[..., object]] | None = None,
    ) -> UnitPlan:
        """A plan with only the groups whose name matches, and a rate or initialiser for those that match a pattern.

        Patterns are shell-style (``layers.*.fc1``). A pattern that matches no group is an error: it is a misspelling.
        """
        names = [group.name for group in self.groups]
        kept, skipped = list(self.groups), list(self.skipped)
        if include is not None:
            wanted = _matches(names, include, "include")
            skipped += [Skipped(g.name, "not included by name") for g in kept if g.name not in wanted]
            kept = [g for g in kept if g.name in wanted]
        if exclude is not None:
            unwanted = _matches(names, exclude, "exclude")
            skipped += [Skipped(g.name, "excluded by name") for g in kept if g.name in unwanted]
            kept = [g for g in kept if g.name not in unwanted]
        if rates is not None and not isinstance(rates, Mapping):
            raise TypeError(
                f"rates={rates!r} must be a dict, group name or pattern -> rate; the common rate is replacement_rate"
            )
        for pattern, rate in (rates or {}).items():
            if not isinstance(rate, (int, float)) or isinstance(rate, bool) or not 0 <= rate <= 1:
                raise ValueError(f"rates: {rate!r} for {pattern!r} is not a number in [0, 1]")
            hit = _matches([g.name for g in kept], pattern, "rates")
            kept = [replace(g, rate=float(rate)) if g.name in hit else g for g in kept]
        if init is not None and not isinstance(init, Mapping):
            raise TypeError(
                f"init={init!r} must be a dict, group name or pattern -> function, such as {{'*': function}}"
            )
        for pattern, function in (init or {}).items():
            hit = _matches(names, pattern, "init")
            kept = [_with_init(g, function, self.shapes) if g.name in hit else g for g in kept]
        shapes = {name: self.shapes[name] for name in tensor_names(kept) if name in self.shapes}
        return replace(self, groups=tuple(kept), skipped=tuple(skipped), shapes=shapes)

    def fingerprint(self) -> str:
        """A digest of names, sizes and index tensors: two plans with the same one reset the same slices."""
        digest = hashlib.sha256()
        for group in self.groups:
            digest.update(f"{group.name}|{group.size}".encode())
            for producer in group.producers:
                digest.update(producer.weight.encode() + _bytes(producer.rows))
            for view in group.views:
                digest.update("|".join(c.weight for c in view.consumers).encode() + _bytes(view.columns))
            for norm in group.norms:
                digest.update(norm.module.encode() + _bytes(norm.entries))
        return digest.hexdigest()

    def inits(self) -> list[list[list[str | float]]]:
        """The distributions of fresh weights, as plain values."""
        return [[[p.init.kind, p.init.scale] for p in group.producers] for group in self.groups]

    def with_inits(self, inits: Sequence[Sequence[Sequence[str | float]]]) -> UnitPlan:
        """The plan with distributions that were found when the model was new."""
        groups = []
        for group, saved in zip(self.groups, inits, strict=True):
            producers = tuple(
                p if p.init.function is not None else replace(p, init=Init(str(kind), float(scale)))
                for p, (kind, scale) in zip(group.producers, saved, strict=True)
            )
            groups.append(replace(group, producers=producers))
        return replace(self, groups=tuple(groups))

    def validate(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise :class:`PlanError` unless the model has all tensors the plan names, in the shapes it was made for."""
        for name, shape in self.shapes.items():
            if name not in tensors:
                raise PlanError(
                    f"the plan names {name!r}, which this model does not have: make the plan from this model"
                )
            if tuple(tensors[name].shape) != shape:
                raise PlanError(
                    f"{name!r} has shape {tuple(tensors[name].shape)}, the plan was made for {shape}: make "
                    "the plan from this model"
                )

    def __str__(self) -> str:
        lines = text_table(_HEADER, [_describe(group) for group in self.groups])
        lines.append(f"{len(self.groups)} groups, {self.size} units")
        if self.skipped:
            width = max(len(entry.name) for entry in self.skipped)
            lines += ["", "not reset:"] + [f"  {e.name.ljust(width)}  {e.reason}" for e in self.skipped]
        return "\n".join(lines)

    def __repr__(self) -> str:
        sizes = _shortened(", ".join(f"{group.name} {group.size}" for group in self.groups), 200)
        skipped = f"; {len(self.skipped)} not reset" if self.skipped else ""
        return f"UnitPlan({len(self.groups)} groups, {self.size} units: {sizes}{skipped}; print it)"

    def _repr_html_(self) -> str:
        title = f"{len(self.groups)} groups, {self.size} units"
        table = html_table(_HEADER, [_describe(group) for group in self.groups], title)
        rest = [(entry.name, entry.reason) for entry in self.skipped]
        return table + (html_table(("not reset", "why"), rest) if rest else "")


def tensor_names(groups: Iterable[Group]) -> list[str]:
    """The names of all parameters and buffers that resets of these groups write to."""
    return list(dict.fromkeys(name for group in groups for name in group.tensors))


def ranges(rows: Tensor) -> str:
    """``tensor([4, 5, 6, 9])`` as ``4:7,9:10``: the way a person writes row ranges."""
    rows = rows.sort().values
    breaks = (rows.diff() != 1).nonzero().flatten() + 1
    parts = torch.tensor_split(rows, breaks.tolist())
    text = [f"{int(part[0])}:{int(part[-1]) + 1}" for part in parts]
    return ",".join(text) if len(text) <= 4 else f"{len(rows)} rows"


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 4] + " ..."


def _describe(group: Group) -> tuple[str, ...]:
    own = " (no fan-in: always drawn as it began)"
    producers = " & ".join(dict.fromkeys(p.module + ("" if p.has_fan_in else own) for p in group.producers))
    consumers = []
    for view in group.views:
        k = view.columns.shape[1]
        consumers += [c.module + (f" (x{k})" if k > 1 else "") for c in view.consumers]
    kinds = sorted({c.compensation for c in group.consumers})
    approximate = f" ({'; '.join(group.approximate)})" if group.approximate else ""
    return (
        group.name,
        str(group.size) + ("" if group.rate is None else f" @ {group.rate:g}"),
        producers,
        ", ".join(n.module or "norm" for n in group.norms) or "-",
        ", ".join(dict.fromkeys(consumers)),
        "+".join(kinds) + approximate,
    )


def _with_init(group: Group, function: Callable[..., object], shapes: Mapping[str, tuple[int, ...]]) -> Group:
    if not callable(function):
        raise TypeError(
            f"init[{group.name!r}] must be a function such as torch.nn.init.kaiming_normal_, got {function!r}"
        )
    for producer in group.producers:  # a function that fails shall not do so in the middle of a reset
        try:
            function(torch.empty(shapes[producer.weight]), generator=torch.Generator().manual_seed(0))
        except Exception as error:
            raise TypeError(
                f"init[{group.name!r}] failed when called as f(tensor, generator=...) on a weight of shape "
                f"{shapes[producer.weight]}: {type(error).__name__}: {error}"
            ) from error
    init = Init("function", 0.0, function)
    return replace(group, producers=tuple(replace(p, init=init) for p in group.producers))


def _matches(names: Sequence[str], patterns: str | Sequence[str], argument: str) -> set[str]:
    found: set[str] = set()
    several = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(several, Iterable) or not all(isinstance(pattern, str) for pattern in several):
        raise TypeError(f"{argument}={patterns!r} must be a pattern of group names, or a list of them")
    for pattern in several:
        hits = fnmatch.filter(names, pattern) or [name for name in names if name == pattern]
        if not hits:
            raise PlanError(f"{argument}={pattern!r} matches no group; the groups are {', '.join(names) or 'none'}")
        found.update(hits)
    return found


def _slices(sizes: Iterable[int]) -> tuple[slice, ...]:
    ends = [0, *accumulate(sizes)]
    return tuple(slice(start, stop) for start, stop in pairwise(ends))


def _bytes(index: Tensor) -> bytes:
    return repr(index.tolist()).encode()
