"""Walk the exported graph once, node by node, and let the labels travel."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind

from gxd.find.labels import CONST, FOREIGN, Units, Value, collapse, filled
from gxd.layers import Layout

Rule = Callable[["Engine", fx.Node, list[Any], dict[str, Any]], Any]
_RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for ATen ops, by name without overload (``linear``); the in-place variant comes along."""

    def add(function: Rule) -> Rule:
        for name in names:
            _RULES[name] = function
        return function

    return add


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
    rows: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    bias_rows: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    units: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))  # labels of the rows
    running_mean: str | None = None
    approximate: str | None = None
    taps: float = 1.0


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


class Engine:
    """The state of the walk.

    Attributes:
        model: the traced module.
        units: the union-find of units.
        layers, norms: what the rules noted.
        refused: module name -> why its rows are no units.
    """

    def __init__(self, model: nn.Module, program: Any, residual: str, batch_dim: int) -> None:
        self.model, self.program = model, program
        self.group_residuals = residual == "group"
        self.batch_dim = batch_dim
        self.units = Units()
        self.layers: list[LayerCall] = []
        self.norms: list[NormCall] = []
        self.refused: dict[str, str] = {}
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.aliases: dict[int, list[str]] = {}
        for name, parameter in self.parameters.items():
            self.aliases.setdefault(id(parameter), []).append(name)
        self.values: dict[fx.Node, Any] = {}
        self.specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs if hasattr(spec.arg, "name")}

    # --- the walk -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self.placeholder(node)
            elif node.op == "call_function":
                self.values[node] = self.call(node)
            elif node.op == "output":
                for value in flatten(self.fetch(node.args)):
                    self.units.block(value.unit, "output layer: its values leave the model", override=True)
        self.refuse_repeated_calls()
        self.units.settle()

    def refuse_repeated_calls(self) -> None:
        """A row used twice in one forward makes two units of one weight, and a column reads two: neither can be reset
        alone.
        """
        calls: dict[str, list[LayerCall]] = {}
        for call in self.layers:
            calls.setdefault(call.weight, []).append(call)
        for repeated in calls.values():
            rows = torch.cat([call.rows for call in repeated])
            if len(rows.unique()) == len(rows):  # parts of a packed projection
                continue
            reason = f"called {len(repeated)} times in one forward"
            for call in repeated:
                self.refused[call.module] = reason
                self.units.block(call.units, reason)
                self.units.block(call.columns, f"read by '{call.module}', which is {reason}")

    def placeholder(self, node: fx.Node) -> Any:
        fake = node.meta.get("val")
        if not isinstance(fake, Tensor):
            return None
        spec = self.specs.get(node.name)
        if spec is not None and spec.kind is InputKind.USER_INPUT:
            value = filled(fake.shape, FOREIGN)
            if fake.dim() > self.batch_dim:
                size = fake.shape[self.batch_dim]
                index = torch.arange(size).view([-1 if d == self.batch_dim else 1 for d in range(fake.dim())])
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
        fake = node.meta.get("val")
        if not isinstance(fake, (Tensor, list, tuple)):
            for value in flatten((args, kwargs)):
                if not _is_bookkeeping(node):
                    self.units.block(value.unit, f"read by {op_name(node)}, which is not a layer")
            return None
        folded = self.fold_constants(node, args, kwargs)
        if folded is not None:
            return folded
        name = op_name(node)
        handler = _RULES.get(name) or _RULES.get(name.removesuffix("_"))
        if (
            handler is None
            and isinstance(node.target, torch._ops.OpOverload)
            and torch.Tag.pointwise in node.target.tags
        ):
            handler = _RULES["<pointwise>"]
        result = (handler or unknown)(self, node, args, kwargs)
        if name.endswith("_") and isinstance(result, Value) and args and isinstance(args[0], Value):
            self.check_in_place(node, args[0], result)
        return result

    def check_in_place(self, node: fx.Node, before: Value, after: Value) -> None:
        """The written tensor may be read again under its old name: units that have just entered it would be missed."""
        if before.shape != after.shape:
            return
        old, new = self.units.resolve(before.unit), self.units.resolve(after.unit)
        entered = new[(new != old) & (new >= 0)]
        self.units.block(entered, f"written in place into another tensor by {op_name(node)}")

    def fold_constants(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Compute what does not depend on the input (index tensors), so that indexing by it can be followed."""
        fake = node.meta.get("val")
        values = list(flatten((args, kwargs)))
        if not isinstance(fake, Tensor) or fake.numel() > 100_000 or not all(v.concrete is not None for v in values):
            return None
        if not isinstance(node.target, torch._ops.OpOverload) or op_name(node).endswith("_"):
            return None
        if not values and torch.Tag.nondeterministic_seeded in node.target.tags:
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

    def reduce(self, value: Value, dims: Iterable[int], reason: str) -> Value:
        """The labels common to all elements along ``dims`` (kept, with size 1). Units that are not common are
        blocked.
        """
        rank = value.unit.dim()
        dims = sorted({d % rank for d in dims}) if rank else []
        unit, mixed = collapse(self.units.resolve(value.unit), dims)
        if bool(mixed.any()):
            self.units.block(value.unit[mixed.expand(value.shape)], reason)
            unit = unit.masked_fill(mixed, FOREIGN)
        example, unclear = collapse(value.example, dims, ignore=None)
        return Value(unit, example.masked_fill(unclear, FOREIGN))

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
    for value in values:
        engine.block(value, f"read by {op_name(node)}, which is not a layer")
    return foreign(node, values)


def foreign(node: fx.Node, values: Iterable[Value] = ()) -> Any:
    """Results that carry no unit. The example axis is kept if an operand has one of the same size at the same place."""
    fakes = node.meta["val"]
    if not isinstance(fakes, (list, tuple)):
        return _foreign(fakes, list(values))
    return [_foreign(fake, list(values)) if isinstance(fake, Tensor) else None for fake in fakes]


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


def _is_bookkeeping(node: fx.Node) -> bool:
    name = op_name(node)
    return name.startswith(("_assert", "sym_")) or not isinstance(node.target, torch._ops.OpOverload)


def _small(tensor: Any) -> Tensor | None:
    if isinstance(tensor, Tensor) and tensor.numel() <= 100_000 and not tensor.is_meta:
        return tensor.detach().cpu()
    return None
