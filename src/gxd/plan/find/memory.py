"""What lies in the same memory: after an op in place, every other name of it shows what was written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from gxd.plan.find.labels import FOREIGN, UNKNOWN, Units, Value, compact, filled

MOST = 2**24  # elements of a memory that is followed element by element


class Memory:
    """The nodes that share memory, by storage.

    Args:
        values: what is known of each node; written to here.
    """

    def __init__(self, values: dict[fx.Node, Any], units: Units) -> None:
        self.values, self.units = values, units
        self.nodes: dict[int, list[fx.Node]] = {}

    def add(self, node: fx.Node) -> None:
        self.nodes.setdefault(_storage(node)._cdata, []).append(node)

    def write(self, node: fx.Node, name: str, result: Any) -> None:
        """After ``node``, which has that name and gave that result, if it writes to its operands."""
        if not isinstance(node.target, torch._ops.OpOverload):
            return
        schema = node.target._schema.arguments
        targets = [a for a, s in zip(node.args, schema, strict=False) if s.alias_info and s.alias_info.is_write]
        for target in targets:
            before = self.values.get(target) if isinstance(target, fx.Node) else None
            if isinstance(target, fx.Node) and isinstance(before, Value):
                after = result if isinstance(result, Value) and result.shape == before.shape else None
                self._show(target, before, after, f"written in place ({name}) into memory that other tensors share")

    def _show(self, target: fx.Node, before: Value, after: Value | None, reason: str) -> None:
        aliases = self.nodes.get(_storage(target)._cdata, [])
        others = [alias for alias in aliases if _geometry(alias) != _geometry(target)]
        for alias in aliases:
            if after is not None and alias not in others:
                self.values[alias] = after
        if after is not None and self._is_unchanged(before, after):
            for alias in others:  # no longer the parameter, or the numbers, that it was
                self.values[alias] = Value(self.values[alias].unit, self.values[alias].example)
        elif others and not (after is not None and self._rewrite(target, before, after, others)):
            for value in (after, *(self.values[alias] for alias in others)):
                if value is not None:
                    self.units.block(value.unit, reason)
            for alias in others:
                old = self.values[alias]
                self.values[alias] = filled(old.shape, FOREIGN, old.example)

    def _is_unchanged(self, before: Value, after: Value) -> bool:
        return torch.equal(*compact(self.units.resolve(before.unit), self.units.resolve(after.unit)))

    def _rewrite(self, target: fx.Node, before: Value, after: Value, others: Sequence[fx.Node]) -> bool:
        """Lay the labels out as the elements lie in memory, write, and read them off again."""
        nodes, storage = [target, *others], _storage(target)
        sizes = {node.meta["val"].element_size() for node in nodes}
        if len(sizes) > 1 or storage.nbytes() // min(sizes) > MOST:
            return False
        old = {target: before, **{alias: self.values[alias] for alias in others}}
        count = storage.nbytes() // min(sizes)
        units, examples = torch.full((count,), FOREIGN), torch.full((count,), UNKNOWN)
        for node, value in [*old.items(), (target, after)]:
            for labels, memory in ((value.unit, units), (value.example, examples)):
                shape, stride, offset = _geometry(node)
                once = tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)  # one place, many elements
                memory.as_strided(shape, stride, offset)[once].copy_(labels[once])
        for alias in others:
            unit, example = (memory.as_strided(*_geometry(alias)).clone() for memory in (units, examples))
            self.values[alias] = Value(unit, example)
        return True


def _storage(node: fx.Node) -> Any:
    return node.meta["val"].untyped_storage()


def _geometry(node: fx.Node) -> tuple[Any, ...]:
    fake: Tensor = node.meta["val"]
    return fake.shape, fake.stride(), fake.storage_offset()
