"""From labels to a plan: gather the slices of every unit, group like units, and account for every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from gxd.plan.find.engine import Engine, LayerCall, NormCall
from gxd.plan.find.labels import Value
from gxd.plan.find.rules.embeddings import ALONE
from gxd.plan.init import Init, fit
from gxd.plan.layouts import default_bound, layout_of
from gxd.plan.units import Consumer, Group, Norm, Producer, Skipped, UnitPlan, View, ranges, tensor_names

_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_EMBEDDING = (nn.Embedding, nn.EmbeddingBag)


def assemble(engine: Engine, grouped: Mapping[str, Tensor] | None = None) -> UnitPlan:
    """The plan of a finished walk.

    Args:
        grouped: what ``residual="group"`` would reset (:func:`covered`); said where it would help.
    """
    groups = _groups(engine)
    tensors = {**engine.parameters, **dict(engine.model.named_buffers(remove_duplicate=False))}
    shapes = {name: tuple(tensors[name].shape) for name in tensor_names(groups)}
    skipped = tuple(_skipped(engine, groups, grouped or {}))
    return UnitPlan(tuple(groups), skipped, shapes, engine.batch_dim, tuple(_unseen(engine)))


def covered(engine: Engine) -> dict[str, Tensor]:
    """The rows of each weight that are units which can be reset."""
    live = (engine.units.code == 0) & _has_consumer(engine)
    rows: dict[str, Tensor] = {}
    for call in engine.layers:
        own = call.rows[: len(call.units)][live[engine.units.root[call.units]]]
        rows[call.weight] = torch.cat([rows.get(call.weight, own[:0]), own])
    return rows


def _groups(engine: Engine) -> list[Group]:
    units = engine.units
    live = units.code == 0
    live &= _has_consumer(engine)
    signature = _signatures(engine)
    roots = units.root.unique()
    roots = roots[live[roots]]
    order: dict[int, list[int]] = {}
    for root, key in zip(roots.tolist(), signature[roots].tolist(), strict=True):
        order.setdefault(key, []).append(root)
    member = torch.full((len(units),), -1, dtype=torch.int64)  # root -> group
    place = torch.zeros(len(units), dtype=torch.int64)  # root -> index in the group
    sizes = []
    for number, ids in enumerate(order.values()):
        index = torch.tensor(ids)
        member[index], place[index] = number, torch.arange(len(ids))
        sizes.append(len(ids))
    drafts = [_Draft(size) for size in sizes]
    for call in engine.layers:
        for number, slots in _slots(call.units, engine, member, place, sizes):
            drafts[number].producers += _producers(engine, call, slots)
        for number, slots in _slots(call.columns, engine, member, place, sizes):
            drafts[number].add_consumer(call, slots)
    for norm in engine.norms:
        drafts_by_entries = dict(_slots(norm.entries, engine, member, place, sizes))
        for number in {int(n) for n in member[units.root[norm.members]].unique() if n >= 0}:
            drafts[number].add_norm(norm, drafts_by_entries.get(number))
    for draft, ids in zip(drafts, order.values(), strict=True):
        draft.residual = bool(units.residual[ids[0]])
    return _named(drafts)


class _Draft:
    """A group in the making."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.producers: list[Producer] = []
        self.views: dict[tuple[object, ...], tuple[LayerCall, Tensor, list[Consumer]]] = {}
        self.norms: dict[tuple[str, str | None], Norm] = {}
        self.residual = False

    def add_consumer(self, call: LayerCall, columns: Tensor) -> None:
        consumer = Consumer(
            call.module,
            call.weight,
            call.bias,
            call.running_mean,
            call.layout,
            call.site,
            call.ports,
            call.kernel_share,
            call.approximate,
        )
        key = (call.source, call.axis, tuple(columns.flatten().tolist()))
        self.views.setdefault(key, (call, columns, []))[2].append(consumer)

    def add_norm(self, call: NormCall, entries: Tensor | None) -> None:
        if entries is None:
            entries = torch.zeros(self.size, 0, dtype=torch.int64)
        norm = Norm(call.module, call.weight, call.bias, call.running_mean, call.running_var, entries, call.couples)
        self.norms[call.module, call.weight] = norm

    def group(self, name: str) -> Group:
        views = tuple(
            View(tuple(consumers), columns, call.axis, call.batch_axis, call.fold)
            for call, columns, consumers in self.views.values()
        )
        return Group(name, self.size, tuple(self.producers), views, tuple(self.norms.values()), residual=self.residual)


def _slots(
    labels: Tensor, engine: Engine, member: Tensor, place: Tensor, sizes: Sequence[int]
) -> list[tuple[int, Tensor]]:
    """For each group that ``labels`` mentions: ``(n, k)`` the positions at which each of its units stands."""
    positions = (labels >= 0).nonzero().flatten()
    roots = engine.units.root[labels[positions]]
    groups = member[roots]
    found = []
    for number in groups.unique().tolist():
        if number < 0:
            continue
        chosen = groups == number
        where, index = positions[chosen], place[roots[chosen]]
        # A stable sort keeps repeated positions of a unit in order; like signatures make the counts equal.
        found.append((number, where[index.argsort(stable=True)].view(sizes[number], -1)))
    return found


def _producers(engine: Engine, call: LayerCall, slots: Tensor) -> list[Producer]:
    module = engine.modules[call.module]
    weight = engine.parameters[call.weight]
    init: Init = fit(weight, default_bound(module, weight))
    places = [(call.rows[column], call.bias_rows[column]) for column in slots.unbind(1)]
    fan_in = not isinstance(module, nn.Embedding)
    return [Producer(call.module, call.weight, call.bias, call.layout, *place, init, fan_in) for place in places]


def _has_consumer(engine: Engine) -> Tensor:
    read = torch.zeros(len(engine.units), dtype=torch.bool)
    for call in engine.layers:
        read[engine.units.root[call.columns[call.columns >= 0]]] = True
    return read[engine.units.root] if len(engine.units) else read


def _signatures(engine: Engine) -> Tensor:
    """A hash of the layers, views and norms of each unit, with multiplicities: like units get the same one."""
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(len(engine.units), dtype=torch.int64)

    def add(labels: Tensor) -> None:
        code = torch.randint(1, 2**62, (), generator=generator)
        roots = engine.units.root[labels[labels >= 0]]
        total.scatter_add_(0, roots, code.expand(len(roots)))

    for call in engine.layers:
        add(call.units)
        add(call.columns)
    for norm in engine.norms:
        add(norm.entries)
        add(engine.units.root[norm.members].unique())
    return total


def _named(drafts: Sequence[_Draft]) -> list[Group]:
    """Name each group after its first producer, with the rows where one layer's rows form several groups."""
    firsts = [draft.producers[0].module for draft in drafts]
    groups = []
    for draft, first in zip(drafts, firsts, strict=True):
        rows = draft.producers[0].rows
        groups.append(draft.group(first if firsts.count(first) == 1 else f"{first}[{ranges(rows)}]"))
    names = [group.name for group in groups]
    for index, group in enumerate(groups):  # interleaved rows can read alike
        if names.count(group.name) > 1:
            groups[index] = drafts[index].group(f"{group.name}#{names[:index].count(group.name)}")
    return groups


_ADVICE = "; residual='group' resets them together"


def _skipped(engine: Engine, groups: Sequence[Group], grouped: Mapping[str, Tensor]) -> list[Skipped]:
    """Every layer whose rows are not all units, with the reason, in the order of execution."""
    producing = {p.module for g in groups for p in g.producers}
    units, has_consumer = engine.units, _has_consumer(engine)
    skipped: dict[str, str] = {}
    seen = set()
    for call in engine.layers:
        seen.add(call.module)
        if call.module in engine.refused:
            skipped[call.module] = engine.refused[call.module]
            continue
        codes = units.code[units.root[call.units]]
        own = units.code[call.units]
        read = has_consumer[call.units]
        reasons: dict[str, list[int]] = {}
        for row, (code, own_code, is_read) in enumerate(zip(codes.tolist(), own.tolist(), read.tolist(), strict=True)):
            code = own_code or code
            if code:
                reasons.setdefault(units.reasons[code - 1], []).append(row)
            elif not is_read:
                reasons.setdefault("no layer reads it", []).append(row)
        for reason, rows in reasons.items():
            own = call.rows[torch.tensor(rows)]
            helps = call.weight in grouped and bool(torch.isin(own, grouped[call.weight]).all())
            whole = len(rows) == len(call.units) and call.module not in producing
            skipped[call.module if whole else f"{call.module}[{ranges(own)}]"] = reason + _ADVICE * helps
    helped = {engine.owner(weight) for weight, rows in grouped.items() if len(rows)}
    for name, reason in engine.refused.items():
        skipped.setdefault(name, reason + _ADVICE * (name in helped))
        seen.add(name)
    for name, module in engine.modules.items():
        if name in seen or any(name == s for s in skipped):
            continue
        if isinstance(module, _RECURRENT):
            skipped[name] = "recurrent layer: its units feed back into themselves"
        elif isinstance(module, _EMBEDDING):
            skipped[name] = ALONE
        elif layout_of(module) is not None and not _is_part_of(name, seen):
            skipped[name] = "not called in the traced forward: example_inputs may be a list of calls, one of which does"
    return [Skipped(name, reason) for name, reason in skipped.items()]


def _unseen(engine: Engine) -> list[str]:
    """The modules with parameters of their own that no traced call has called, and whose parameters none has used."""
    used = {
        id(engine.parameters[value.parameter])
        for node, value in engine.values.items()
        if node.op == "placeholder" and node.users and isinstance(value, Value) and value.parameter in engine.parameters
    }
    called = {key for trace in engine.traces for key in trace.called}
    return [
        name
        for name, module in engine.model.named_modules()
        if id(module) not in called
        and (own := list(module.parameters(recurse=False)))
        and not any(id(parameter) in used for parameter in own)
    ]


def _is_part_of(name: str, seen: set[str]) -> bool:
    """Whether another name of the same place was seen: ``attn.out_proj`` inside ``attn``, a parametrized layer."""
    return any(other.startswith(name + ".") for other in seen)
