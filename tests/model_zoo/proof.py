"""A proof of a plan that trusts nothing of gxd but what the plan says: rows, columns, norm entries.

In a copy of the model the columns of some units are set to zero, and their rows are drawn at random, again and again. If
the plan is right, nothing but the claimed columns of the consumers tells the draws apart, least of all the outputs.
"""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gxd import Group, UnitPlan

UNITS = 3  # of each group
DRAWS = 8  # a unit drawn anew may be silent on these inputs
TOLERANCE = 1e-5  # of the largest value; where no norm couples units, there is not even rounding

Chosen = Sequence[tuple[Group, Tensor]]


def disprove(model: nn.Module, run: Callable[[nn.Module], Any], plan: UnitPlan) -> list[str]:
    """What is wrong with the plan, a line each; nothing if it holds."""
    trial = _Trial(copy.deepcopy(model).eval(), run)
    coupled = [any(norm.couples for norm in group.norms) for group in plan.groups]
    alone = [group for group, is_coupled in zip(plan.groups, coupled) if not is_coupled]
    faults = _claimed_twice(plan)
    if alone and trial.faults(alone):  # all groups at once; one by one only to say which it is
        faults += [fault for group in alone for fault in trial.faults([group])] or ["groups are wrong only together"]
    for group, is_coupled in zip(plan.groups, coupled):  # norms are held still for one group at a time
        faults += trial.faults([group]) if is_coupled else []
    return faults


@dataclass
class _Seen:
    """One run: the outputs, what the consumers read (by group, view, name), what norms that couple units return."""

    outputs: list[Tensor] = field(default_factory=list)
    inputs: dict[tuple[int, int, str], Tensor] = field(default_factory=dict)
    norms: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)


class _Trial:
    def __init__(self, model: nn.Module, run: Callable[[nn.Module], Any]) -> None:
        self.model, self.run = model, run
        self.generator = torch.Generator().manual_seed(0)
        self.tensors = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        for parameter in model.parameters():  # gammas, layer scales and heads that start as constants hide what is behind
            if parameter.is_floating_point() and parameter.numel() > 1 and parameter.min() == parameter.max():
                parameter.data += 0.3 * self.random(parameter.shape).to(parameter)
        self.own = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}

    def faults(self, groups: Sequence[Group]) -> list[str]:
        name = groups[0].name if len(groups) == 1 else f"{len(groups)} groups"
        chosen = [(group, torch.randperm(group.size, generator=self.generator)[:UNITS]) for group in groups]
        if not _differ(self.draw(chosen, zero=False).outputs, self.draw(chosen, zero=False).outputs):
            return [f"{name}: nothing is proven, for drawing the units anew does not change the outputs"]
        first = self.draw(chosen, zero=True)
        found: dict[str, None] = {}
        still = set(first.inputs)
        for _ in range(DRAWS):
            other = self.draw(chosen, zero=True, like=first)
            if _differ(first.outputs, other.outputs):
                found[f"{name}: the outputs depend on the units, though the columns that read them are zero"] = None
            for key, one in first.inputs.items():
                group, index = chosen[key[0]]
                view = group.views[key[1]]
                moved = _moved(one, other.inputs[key], view.axis)
                claimed = view.columns[index].flatten()
                if moved[claimed].any():
                    still.discard(key)
                moved[claimed] = False
                for other_group, other_index in chosen:  # units of several groups may be read side by side
                    for other_view in other_group.views:
                        if any(consumer.module == key[2] for consumer in other_view.consumers):
                            moved[other_view.columns[other_index].flatten()] = False
                if moved.any():
                    found[f"{group.name}: its units move columns of {key[2]} that no unit claims"] = None
            if not still:
                break
        for number, _, consumer in sorted(still):
            found[f"{groups[number].name}: its units never move the columns they claim of {consumer}"] = None
        return list(found)

    def draw(self, chosen: Chosen, zero: bool, like: _Seen | None = None) -> _Seen:
        """Run the model with the rows of the units drawn anew, and their columns zero or as they are. Norms that couple
        units return for all others what they returned in the run ``like``.
        """
        with torch.no_grad():
            for name, tensor in self.own.items():
                self.tensors[name].copy_(tensor)
            for group, index in chosen:
                self.change(group, index, zero)
            seen = _Seen()
            with ExitStack() as stack:
                for number, (group, index) in enumerate(chosen):
                    for hook in self.hooks(number, group, index, seen, like):
                        stack.callback(hook.remove)
                torch.manual_seed(0)
                outputs = tree_leaves(self.run(self.model))
        seen.outputs = [leaf.clone() for leaf in outputs if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        return seen

    def change(self, group: Group, index: Tensor, zero: bool) -> None:
        for producer in group.producers:
            weight, where = producer.layout.row(self.tensors[producer.weight], producer.rows[index])
            scale = 2 * self.own[producer.weight].std() + 0.1
            weight[where] = self.random(weight[where].shape).to(weight) * scale
            if producer.bias is not None:
                bias = self.tensors[producer.bias]
                bias[producer.bias_rows[index]] = self.random(index.shape).to(bias)
        for view in group.views if zero else ():
            for consumer in view.consumers:
                weight, columns = consumer.layout.column(self.tensors[consumer.weight], view.columns[index].flatten())
                weight[columns] = 0.0

    def hooks(self, number: int, group: Group, index: Tensor, seen: _Seen, like: _Seen | None) -> list[Any]:
        hooks = []
        for position, view in enumerate(group.views):
            for consumer in view.consumers:
                if consumer.ports == ("input",):

                    def keep(module: nn.Module, args: Any, key: Any = (number, position, consumer.module)) -> None:
                        seen.inputs[key] = args[0].clone()

                    hooks.append(self.model.get_submodule(consumer.site).register_forward_pre_hook(keep))
        for norm in group.norms:
            if norm.couples and norm.module and norm.entries.numel():

                def hold(
                    module: nn.Module, args: Any, output: Tensor, name: str = norm.module, e: Any = norm.entries[index]
                ) -> Tensor | None:
                    calls = seen.norms.setdefault(name, [])
                    calls.append((output.clone(), _entries(module, args, output, e.flatten())))
                    if like is None:
                        return None
                    before, mine = like.norms[name][len(calls) - 1]
                    return torch.where(mine, output, before)

                hooks.append(self.model.get_submodule(norm.module).register_forward_hook(hold))
        return hooks

    def random(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=self.generator)


def _entries(module: nn.Module, args: Any, output: Tensor, entries: Tensor) -> Tensor:
    """Where the given entries of a norm's parameters stand in its output: what changes with them."""
    mine = torch.zeros_like(output, dtype=torch.bool)
    for parameter in module.parameters(recurse=False):
        before = parameter.clone()
        for change in (-7.0, 7.0):
            parameter.view(-1)[entries] += change
            mine |= type(module).forward(module, *args) != output
            parameter.copy_(before)
    return mine


def _claimed_twice(plan: UnitPlan) -> list[str]:
    rows: Counter[tuple[Any, ...]] = Counter()
    columns: Counter[tuple[Any, ...]] = Counter()
    for group in plan.groups:
        for producer in group.producers:
            rows.update((producer.weight, row) for row in producer.rows.tolist())
        for view in group.views:
            for consumer in view.consumers:
                columns.update((consumer.weight, consumer.ports, column) for column in view.columns.flatten().tolist())
    twice = [f"row {row} of {name}" for (name, row), count in rows.items() if count > 1]
    twice += [f"column {column} of {name}" for (name, _, column), count in columns.items() if count > 1]
    return [f"{what} belongs to several units" for what in twice[:3]]


def _differ(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return any(
        bool((a - b).abs().nan_to_num(0.0).max() > TOLERANCE * (1.0 + a.abs().nan_to_num(0.0, 0.0, 0.0).max()))
        for a, b in zip(one, other, strict=True)
        if a.numel()
    )


def _moved(one: Tensor, other: Tensor, axis: int) -> Tensor:
    """Which columns of a consumer's input differ."""
    change = (one - other).abs().movedim(axis, -1).flatten(0, -2).amax(0)
    return change > TOLERANCE * (1e-9 + one.abs().max())
