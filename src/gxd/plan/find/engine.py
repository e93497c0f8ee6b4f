"""Walk the exported graph once, node by node, and let the labels travel."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind

from gxd.plan.find.labels import CONST, FOREIGN, STATISTIC, Units, Value, collapse, compact, filled, spread, where_clear
from gxd.plan.find.marks import ARGUMENT, KEPT
from gxd.plan.find.memory import Memory
from gxd.plan.find.parts import is_pointwise, parts_of
from gxd.plan.find.trace import Trace
from gxd.plan.layouts import Layout, aliases

Rule = Callable[["Engine", fx.Node, list[Any], dict[str, Any]], Any]
_RULES: dict[str, tuple[Rule, int | None, bool]] = {}
REGIONS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


def rule(*names: str, carries: int | None = None, statistics: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule for ATen ops, by name without overload (``linear``) or with it (``max.other``); the in-place
    variant and the copying variant of a view come along.

    Args:
        names: one or more names each, separated by blanks.
        carries: how many of the op's leading tensors pass their units on. Units in any other operand (an index, a
            computed norm weight) are blocked: they are read by something that is no layer. None: the rule sees to all.
        statistics: whether the op may read a statistic of units without reading the units (see ``written_norms``).
    """

    def add(function: Rule) -> Rule:
        for name in " ".join(names).split():
            _RULES[name] = function, carries, statistics
        return function

    return add


def _rule_for(node: fx.Node) -> tuple[Rule, int | None, bool]:
    target = node.target
    overload = target._overloadname if isinstance(target, torch._ops.OpOverload) else ""
    names = (op_name(node), base_name(node))
    for name in (f"{names[1]}.{overload}", *names):
        if name in _RULES:
            return _RULES[name]
    return _RULES["<pointwise>"] if is_pointwise(target) else (unknown, None, False)


@dataclass
class LayerCall:
    """One use of a weight in the graph: the rows it produced and the columns it read."""

    module: str
    weight: str
    bias: str | None
    layout: Layout
    site: str
    ports: tuple[str, ...]
    node: fx.Node
    columns: Tensor  # (in,) the label of every column
    axis: int
    batch_axis: int
    fold: str
    source: fx.Node  # the tensor that was read
    trace: int  # the number of the trace
    rows: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    bias_rows: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    units: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))  # labels of the rows
    running_mean: str | None = None
    approximate: str | None = None
    kernel_share: float = 1.0
    without_grad: bool = False


@dataclass
class NormCall:
    """One use of a normalisation: the unit of each of its entries."""

    module: str
    weight: str | None
    bias: str | None
    running_mean: str | None
    running_var: str | None
    entries: Tensor  # (e,) the label of every entry
    members: Tensor  # the units that pass through
    couples: bool
    trace: int  # the number of the trace


class Engine:
    """The state of the walk.

    Attributes:
        model: the traced module.
        traces: the calls of it that were traced; their graphs are walked one after the other.
        units: the union-find of units.
        layers, norms: what the rules noted.
        refused: module name -> why its rows are no units.
    """

    def __init__(self, model: nn.Module, traces: Sequence[Trace], residual: str, batch_dim: int) -> None:
        self.model, self.traces = model, traces
        self.group_residuals = residual == "group"
        self.batch_dim = batch_dim
        self.units = Units()
        self.layers: list[LayerCall] = []
        self.norms: list[NormCall] = []
        self.refused: dict[str, str] = {}
        self.examples_first: set[int] = set()  # the ids of modules that were given examples on the first of three axes
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.aliases = aliases(self.parameters)
        self.values: dict[fx.Node, Any] = {}
        self.memory = Memory(self.values, self.units)
        self.inside: dict[fx.Node, list[fx.Node]] = {}  # node -> the placeholders it is bound to in nested graphs
        self.opened: set[fx.Node] = set()  # nodes whose parts were walked
        self.noted: set[tuple[fx.Node, str]] = set()  # (node, parameter): uses that are part of a layer or norm call

    # --- the walk -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Walk the graphs."""
        for number, trace in enumerate(self.traces):
            self.number, self.program = number, trace.program
            specs = self.program.graph_signature.input_specs
            self.specs = {spec.arg.name: spec for spec in specs if hasattr(spec.arg, "name")}
            batched = [n for n in self.program.graph.nodes if n.op == "placeholder" and self.is_input(n)]
            sizes = [f.shape[self.batch_dim] for n in batched if (f := n.meta["val"]).dim() > self.batch_dim]
            self.batch_size = sizes[0] if sizes else None
            self.walk(self.program.graph, {})

    def without_grad(self, name: str) -> bool:
        """Whether a module was called under ``torch.no_grad()``."""
        return not self.traces[self.number].called.get(id(self.modules[name]), True)

    def walk(self, graph: fx.Graph, bound: dict[Any, Any]) -> Any:
        """Label every node; ``bound`` holds the values of the placeholders of a nested graph."""
        live = self.live(graph)
        for node in graph.nodes:
            if node.op == "placeholder":
                self.note(node, bound[node] if node in bound else self.placeholder(node))
            elif node.op == "call_function" and node in live:
                self.note(node, self.call(node))
                if KEPT in node.meta:
                    substitute(self.values[node], self.without_statistics)
            elif node.op == "output":
                values = self.fetch(node.args[0])
                if not bound:
                    for value in flatten(values):
                        self.units.block(value.unit, "output layer: its values leave the model", override=True)
                return values
        return None

    def live(self, graph: fx.Graph) -> set[fx.Node]:
        """The nodes that something comes of: an output, a write, or a tensor that outlives the forward. What is only
        looked at (by an assertion, a log) is read by nothing.
        """
        live: set[fx.Node] = set()
        pending = [n for n in graph.nodes if n.op == "output" or self.has_effects(n)]
        while pending:
            node = pending.pop()
            if node not in live:
                live.add(node)
                pending += node.all_input_nodes
        return live

    def has_effects(self, node: fx.Node) -> bool:
        """Whether a node does something besides computing its results."""
        if KEPT in node.meta or op_name(node) == "_assert_scalar":  # a number that a branch was taken by
            return True
        if op_name(node) in REGIONS:
            return any(self.has_effects(inner) for inner in self.body(node).nodes)
        if isinstance(node.target, torch._ops.OpOverload):
            return bool(node.target._schema.is_mutable)
        return isinstance(node.target, torch._ops.HigherOrderOperator)

    def body(self, node: fx.Node) -> fx.Graph:
        """The graph inside a region."""
        attribute = next(a for a in node.args if isinstance(a, fx.Node) and a.op == "get_attr")
        return self.program.graph_module.get_submodule(attribute.target).graph

    def note(self, node: fx.Node, value: Any) -> None:
        self.values[node] = value
        if isinstance(value, Value):
            self.memory.add(node)
            for called, place in node.meta.get(ARGUMENT, ()):
                if not place and value.example.dim() == 3 and _varies_along(value.example) == [0]:
                    self.examples_first.add(called)

    def time_first(self) -> list[str]:
        """The layers that count examples on the second axis, and were given them on the first."""
        layers = [name for name, module in self.modules.items() if getattr(module, "batch_first", True) is False]
        return [name for name in layers if id(self.modules[name]) in self.examples_first]

    def is_input(self, node: fx.Node) -> bool:
        spec = self.specs.get(node.name)
        return spec is not None and spec.kind is InputKind.USER_INPUT and isinstance(node.meta.get("val"), Tensor)

    def placeholder(self, node: fx.Node) -> Any:
        fake = node.meta.get("val")
        if not isinstance(fake, Tensor):
            return None
        spec = self.specs.get(node.name)
        if self.is_input(node):
            value = filled(fake.shape, FOREIGN)
            if fake.dim() > self.batch_dim and fake.shape[self.batch_dim] == self.batch_size:
                index = torch.arange(self.batch_size)
                index = index.view([-1 if d == self.batch_dim else 1 for d in range(fake.dim())])
                value = Value(value.unit, index.expand(fake.shape))
            return value
        value = filled(fake.shape, CONST)
        if spec is not None and spec.kind is InputKind.PARAMETER:
            rows = torch.arange(fake.shape[0] if fake.dim() else 1)
            rows = rows.view([-1] + [1] * (fake.dim() - 1)).expand(fake.shape) if fake.dim() else rows[0]
            return Value(value.unit, value.example, parameter=spec.target, rows=rows)
        if spec is not None and spec.kind is InputKind.BUFFER:
            concrete = self.program.state_dict.get(spec.target, self.program.constants.get(spec.target))
            return Value(value.unit, value.example, parameter=spec.target, concrete=_small(concrete))
        concrete = self.program.constants.get(spec.target) if spec is not None else None
        return Value(value.unit, value.example, concrete=_small(concrete))

    def call(self, node: fx.Node) -> Any:
        args, kwargs = self.fetch(node.args), self.fetch(node.kwargs)
        if node.target is operator.getitem:
            return args[0][args[1]] if isinstance(args[0], (list, tuple)) else None
        if op_name(node) in REGIONS:
            return self.region(node)
        fake = node.meta.get("val")
        if not _is_static(fake):
            if not _is_bookkeeping(node):
                self.block_all((args, kwargs), node)
            return None
        if any(self.values.get(n) is None and isinstance(n.meta.get("val"), Tensor) for n in node.all_input_nodes):
            return unknown(self, node, args, kwargs)  # a tensor of unknown length, which has no labels
        folded = self.fold_constants(node, args, kwargs)
        if folded is not None:
            return folded
        handler, carries, statistics = _rule_for(node)
        if handler is unknown:
            parts = parts_of(node)
            if parts is not None:
                return self.open(node, *parts)
        if not statistics:
            args, kwargs = substitute((args, kwargs), self.without_statistics)
        try:
            result = handler(self, node, args, kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError):
            # A rule that does not understand a call of its op must not take the user's program down.
            result = unknown(self, node, args, kwargs)
        if carries is not None:
            self.block_all(list(flatten((args, kwargs)))[carries:], node)
        self.memory.write(node, op_name(node), result)
        return result

    def open(self, node: fx.Node, graph: fx.Graph, given: list[fx.Node]) -> Any:
        """An op that is made of simpler ones: walk these."""
        parts = [part for part in graph.nodes if part.op == "call_function"]
        if len(given) == 1 and all(is_pointwise(part.target) for part in parts):  # a function of one operand
            result = _RULES["<pointwise>"][0](self, node, self.fetch(node.args), self.fetch(node.kwargs))
        else:
            for part in parts:
                part.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
            bound = dict(zip((n for n in graph.nodes if n.op == "placeholder"), given, strict=True))
            for inside, outside in bound.items():
                self.inside.setdefault(outside, []).append(inside)
            self.opened.add(node)
            result = self.walk(graph, {inside: self.fetch(outside) for inside, outside in bound.items()})
        self.memory.write(node, op_name(node), result)
        return result

    def region(self, node: fx.Node) -> Any:
        """A ``with torch.no_grad()`` or ``autocast`` block: walk the graph inside."""
        place = next(i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a.op == "get_attr")
        graph, outer = self.body(node), node.args[place + 1 :]
        inner = [n for n in graph.nodes if n.op == "placeholder"]
        for inside, outside in zip(inner, outer, strict=True):
            if isinstance(outside, fx.Node):
                self.inside.setdefault(outside, []).append(inside)
        values = {inside: self.fetch(outside) for inside, outside in zip(inner, outer, strict=True)}
        return self.walk(graph, values or {None: None})

    def fold_constants(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Compute what does not depend on the input (index tensors), so that indexing by it can be followed."""
        fake = node.meta.get("val")
        values = list(flatten((args, kwargs)))
        if not isinstance(fake, Tensor) or fake.numel() > 100_000 or not all(v.concrete is not None for v in values):
            return None
        if not isinstance(node.target, torch._ops.OpOverload) or op_name(node).endswith("_"):
            return None
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            return None
        real_args, real_kwargs = substitute((args, kwargs), lambda v: v.concrete)
        try:
            concrete = node.target(
                *real_args, **{**real_kwargs, **({"device": "cpu"} if "device" in real_kwargs else {})}
            )
        except (RuntimeError, TypeError, ValueError):
            return None
        value = filled(fake.shape, CONST)
        return Value(value.unit, value.example, concrete=concrete)

    # --- help for the rules ---------------------------------------------------------------------------------------

    def fetch(self, args: Any) -> Any:
        """The arguments of a node, with nodes replaced by what is known of them."""
        if isinstance(args, fx.Node):
            return self.values.get(args)
        if isinstance(args, (list, tuple)):
            return [self.fetch(a) for a in args]
        if isinstance(args, dict):
            return {key: self.fetch(a) for key, a in args.items()}
        return args

    def block(self, value: Value, reason: str) -> None:
        self.units.block(value.unit, reason)

    def without_statistics(self, value: Value) -> Value:
        """What an op that is no part of a norm reads: units of which it sees a statistic cannot be reset."""
        found = self.units.statistics_among(value.unit)
        if not found:
            return value
        self.units.block(torch.tensor(found), "")
        return replace(value, unit=spread(lambda unit: unit.masked_fill(unit <= STATISTIC, FOREIGN), value.unit))

    def block_all(self, args: Any, node: fx.Node) -> None:
        for value in flatten(args):
            self.block(value, f"read by {op_name(node)}, which is not a layer")

    def reduce(self, value: Value, dims: Iterable[int], reason: str) -> Value:
        """The labels common to all elements along ``dims`` (kept, with size 1). Units that are not common are
        blocked.
        """
        rank = value.unit.dim()
        dims = sorted({d % rank for d in dims}) if rank else []
        unit, mixed = collapse(self.units.resolve(value.unit), dims)
        if bool(mixed.any()):
            labels, lost = compact(value.unit, mixed.expand(value.shape))
            self.units.block(labels[lost], reason)
            unit = where_clear(unit, mixed)
        return Value(unit, where_clear(*collapse(value.example, dims, ignore=None)))

    def met_sums(self) -> bool:
        """Whether some units are refused because they are added to something."""
        return any("residual coordinate" in reason or "one another" in reason for reason in self.units.reasons)

    def caller(self, node: fx.Node) -> str:
        """Qualified name of the module whose forward contains the node."""
        stack = node.meta.get("nn_module_stack") or {}
        entries = list(stack.values())
        return entries[-1][0] if entries else ""

    def owner(self, parameter: str) -> str:
        return parameter.rpartition(".")[0]


def unknown(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """An op without a rule: the units that reach it cannot be followed."""
    values = list(flatten((args, kwargs)))
    engine.block_all(values, node)
    result = foreign(node, values)
    # What no tensor has gone into is the same for every input, or noise.
    return result if node.all_input_nodes else substitute(result, lambda value: filled(value.shape, CONST))


def foreign(node: fx.Node, values: Iterable[Value] = ()) -> Any:
    """Results that carry no unit. The example axis is kept if an operand has one of the same size at the same place."""
    fakes, operands = node.meta["val"], list(values)
    if not isinstance(fakes, (list, tuple)):
        return _foreign(fakes, operands)
    return [_foreign(fake, operands) if isinstance(fake, Tensor) else None for fake in fakes]


def _foreign(fake: Tensor, values: Sequence[Value]) -> Value:
    for value in values:
        for dim in range(min(value.example.dim(), fake.dim())):
            others = [d for d in range(value.example.dim()) if d != dim]
            index, unclear = collapse(value.example, others, ignore=None)
            if fake.shape[dim] == index.numel() > 1 and not unclear.any() and len(index.unique()) == index.numel():
                shape = [-1 if d == dim else 1 for d in range(fake.dim())]
                return filled(fake.shape, FOREIGN, index.reshape(shape).expand(fake.shape))
    return filled(fake.shape, FOREIGN)


def op_name(node: fx.Node) -> str:
    """``aten.relu_.default`` as ``relu_``."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[-1]
    return getattr(target, "__name__", str(target))


def base_name(node: fx.Node) -> str:
    """The name without what marks a variant: ``relu`` for ``relu_``, ``view`` for ``view_copy``."""
    name = op_name(node)
    name = name if name.endswith("__") else name.removesuffix("_")
    return name if name in _RULES else name.removesuffix("_copy")


def flatten(args: Any) -> Iterable[Value]:
    if isinstance(args, Value):
        yield args
    elif isinstance(args, (list, tuple)):
        for a in args:
            yield from flatten(a)
    elif isinstance(args, dict):
        for a in args.values():
            yield from flatten(a)


def substitute(args: Any, function: Callable[[Value], Any]) -> Any:
    if isinstance(args, Value):
        return function(args)
    if isinstance(args, (list, tuple)):
        return [substitute(a, function) for a in args]
    if isinstance(args, dict):
        return {key: substitute(a, function) for key, a in args.items()}
    return args


def _is_static(fakes: Any) -> bool:
    """Whether the results are tensors of known shapes; a boolean mask, for instance, gives one of unknown length."""
    tensors = [fakes] if isinstance(fakes, Tensor) else fakes if isinstance(fakes, (list, tuple)) else []
    tensors = [t for t in tensors if isinstance(t, Tensor)]
    return bool(tensors) and all(type(size) is int for t in tensors for size in t.shape)


def _is_bookkeeping(node: fx.Node) -> bool:
    return op_name(node).startswith(("_assert", "sym_"))


def _varies_along(labels: Tensor) -> list[int]:
    """The axes along which not all labels are the same."""
    return [d for d in range(labels.dim()) if bool((labels != labels.narrow(d, 0, 1)).any())]


def _small(tensor: Any) -> Tensor | None:
    if isinstance(tensor, Tensor) and tensor.numel() <= 100_000 and not tensor.is_meta:
        return tensor.detach().cpu()
    return None
