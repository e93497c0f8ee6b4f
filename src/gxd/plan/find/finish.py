"""What is only known at the end of the walk: calls that repeat, norms and parameters that are shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx, nn

from gxd.plan.find.engine import REGIONS, Engine, LayerCall, NormCall, op_name
from gxd.plan.find.labels import Value
from gxd.plan.find.rules.embeddings import ALONE

MOST_ROWS = 4  # of one layer in one unit: two for a GLU, a few for a maxout


def finish(engine: Engine) -> None:
    """Refuse what turned out to be shared, and settle which units are blocked."""
    _refuse_repeated_calls(engine)
    _join_traces(engine)
    _refuse_shared_norms(engine)
    _refuse_other_readers(engine)
    _refuse_lone_embeddings(engine)
    _refuse_large_components(engine)
    engine.units.settle()


def _refuse_repeated_calls(engine: Engine) -> None:
    """A row used twice makes two units of one weight, and a column reads two: neither can be reset alone."""
    calls: dict[tuple[int, int], list[LayerCall]] = {}
    for call in engine.layers:
        calls.setdefault((call.trace, id(engine.parameters[call.weight])), []).append(call)
    for repeated in calls.values():
        rows = torch.cat([call.rows for call in repeated])
        if len(rows.unique()) < len(rows):  # else: parts of a packed projection
            for call in repeated:
                _refuse_call(engine, call, f"called {len(repeated)} times in one forward")


def _join_traces(engine: Engine) -> None:
    """A layer that several calls of the model run is one layer: its rows are the same units in all of them, and its
    columns must read the same units, or they cannot be zeroed for one. One of its calls is kept.
    """
    first: dict[tuple[int, int], LayerCall] = {}
    again: list[tuple[LayerCall, LayerCall]] = []
    for call in engine.layers:
        key = id(engine.parameters[call.weight]), int(call.rows[0]) if len(call.rows) else -1
        if first.setdefault(key, call).trace != call.trace:
            again.append((first[key], call))
    for one, other in again:
        if len(one.units) == len(other.units):
            engine.units.merge(one.units, other.units)
    same: dict[fx.Node, fx.Node] = {}  # the tensor that a layer reads in one trace, and in another
    for one, other in again:
        engine.layers = [call for call in engine.layers if call is not other]
        if torch.equal(engine.units.resolve(one.columns), engine.units.resolve(other.columns)):
            same[other.source] = one.source
        else:
            for call in (one, other):
                _refuse_call(engine, call, "it reads other units in another of the traced calls")
        if one.running_mean != other.running_mean:
            one.running_mean, one.approximate = None, "no bias to take the mean"
    for call in engine.layers:
        call.source = same.get(call.source, call.source)
    norms: dict[str, NormCall] = {}
    for norm in list(engine.norms):
        before = norms.setdefault(norm.module, norm)
        entries = [engine.units.resolve(one.entries) for one in (before, norm)]
        if before.trace != norm.trace and torch.equal(*entries):
            engine.norms = [one for one in engine.norms if one is not norm]


def _refuse_shared_norms(engine: Engine) -> None:
    """A norm that serves different units at different calls cannot forget one of them."""
    calls: dict[str, list[NormCall]] = {}
    for norm in engine.norms:
        calls.setdefault(norm.module, []).append(norm)
    for module, several in calls.items():
        several = [norm for norm in several if norm.entries.numel()]  # else it has no entry to serve with
        if len(several) < 2 or not module:
            continue
        entries = [engine.units.resolve(norm.entries) for norm in several]
        if not all(torch.equal(entries[0], other) for other in entries[1:]):
            for norm in several:
                engine.units.block(norm.members, f"its norm '{module}' serves other units too")
    shared = {norm.running_mean for several in calls.values() if len(several) > 1 for norm in several}
    for call in engine.layers:
        if call.running_mean is not None and call.running_mean in shared:
            call.running_mean, call.approximate = None, "no bias to take the mean"


def _refuse_other_readers(engine: Engine) -> None:
    """A parameter that something else reads too cannot be written as if it were the layer's alone."""
    inputs: dict[str, list[fx.Node]] = {}  # the nodes that stand for a parameter or buffer
    for node, value in engine.values.items():
        if node.op == "placeholder" and isinstance(value, Value) and value.parameter is not None:
            inputs.setdefault(value.parameter, []).append(node)
    for call in engine.layers:
        reader = _other_reader(engine, inputs, call.weight)
        if reader is not None:
            _refuse_call(engine, call, f"its weight is also read by {reader}")
        if call.bias is None:
            continue
        reader = _other_reader(engine, inputs, call.bias)
        if reader is not None:
            reason = f"its bias is also read by {reader}"
            engine.units.block(call.units, reason)
            call.bias, call.approximate = None, reason
    for norm in engine.norms:
        names = filter(None, (norm.weight, norm.bias, norm.running_mean, norm.running_var))
        reader = next((r for r in (_other_reader(engine, inputs, name) for name in names) if r is not None), None)
        if reader is not None:
            engine.units.block(norm.members, f"a parameter of its norm '{norm.module}' is also read by {reader}")


def _refuse_call(engine: Engine, call: LayerCall, reason: str) -> None:
    engine.refused.setdefault(call.module, reason)
    engine.units.block(call.units, reason)
    engine.units.block(call.columns, f"read by '{call.module}', which cannot be written ({reason})")


def _refuse_lone_embeddings(engine: Engine) -> None:
    """An embedding is reset only together with the layers that write to the same stream."""
    added = torch.zeros(len(engine.units), dtype=torch.bool)
    added[engine.units.root[engine.units.residual]] = True
    for call in engine.layers:
        if isinstance(engine.modules[call.module], nn.Embedding):
            engine.units.block(call.units[~added[engine.units.root[call.units]]], ALONE)


def _refuse_large_components(engine: Engine) -> None:
    """Products, or sums, can tie a whole layer into one unit (``h * h.roll(1, -1)``); that is no unit to be reset."""
    for call in engine.layers:
        roots, counts = engine.units.resolve(call.units).unique(return_counts=True)
        tied = roots[counts > MOST_ROWS]
        members = call.units[torch.isin(engine.units.resolve(call.units), tied)]
        engine.units.block(members, f"sums or products tie more than {MOST_ROWS} of its rows to one another")


def _other_reader(engine: Engine, inputs: Mapping[str, Sequence[fx.Node]], name: str) -> str | None:
    """What reads a parameter or buffer, besides the layer and norm calls that were noted; None if nothing does."""
    tensor = engine.parameters.get(name)
    names = engine.aliases[id(tensor)] if tensor is not None else [name]
    if len({id(engine.modules[engine.owner(n)]) for n in names}) > 1:
        return "the layer it is tied to"
    pending = [node for one in names for node in inputs.get(one, [])]
    while pending:
        node = pending.pop()
        pending += engine.inside.get(node, [])
        for user in node.users:
            if user.op == "call_function" and user not in engine.values:  # nothing comes of it
                continue
            value = engine.values.get(user)
            moved = value if isinstance(value, list) else [value]
            if (user, name) in engine.noted or any((user, n) in engine.noted for n in names):
                continue
            if all(isinstance(v, Value) and v.parameter in names for v in moved):
                pending.append(user)
            elif user not in engine.opened and op_name(user) not in (*REGIONS, "output"):
                return op_name(user)
    return None
