"""A proof of a plan that trusts nothing of gxd but what the plan says: rows, columns, norm entries.

In a copy of the model the columns of some units are set to zero, and their rows are drawn at random, again and again.
If the plan is right, nothing but the claimed columns of the consumers tells the draws apart, least of all the outputs.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gxd import Group, UnitPlan
from tests.model_zoo.calls import Inputs, run

UNITS = 3  # of each group
DRAWS = 8  # a unit drawn anew may be silent on these inputs

Chosen = Sequence[tuple[Group, Tensor]]


def disprove(model: nn.Module, inputs: Inputs, plan: UnitPlan) -> list[str]:
    """What is wrong with the plan, a line each; nothing if it holds."""
    try:
        trial = _Trial(model, inputs, torch.float64)
    except (RuntimeError, TypeError):  # some models insist on float32
        trial = _Trial(model, inputs, torch.float32)
    coupled = [any(norm.couples for norm in group.norms) for group in plan.groups]
    alone = [group for group, is_coupled in zip(plan.groups, coupled) if not is_coupled]
    faults = _claimed_twice(plan)
    together = trial.faults(alone) if alone else []
    if together:  # one by one only to say which it is
        faults += [fault for group in alone for fault in trial.faults([group])] or together
    for group, is_coupled in zip(plan.groups, coupled):  # norms are held still for one group at a time
        faults += trial.faults([group]) if is_coupled and is_provable(group) else []
    return faults


def is_provable(group: Group) -> bool:
    """Whether every norm that couples the units of a group is a module, which can be held still."""
    return all(norm.module for norm in group.norms if norm.couples)


@dataclass
class _Seen:
    """One run: the outputs, what the consumers read (by group, view, name), what coupling norms read and return."""

    outputs: list[Tensor] = field(default_factory=list)
    inputs: dict[tuple[int, int, str], Tensor] = field(default_factory=dict)
    norms: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)


class _Trial:
    """A copy of a model in which units are drawn anew.

    What hides units is out of the way: parameters that start as constants (gammas, layer scales, heads) are disturbed,
    and batch norms have the statistics of the inputs, so that the signal does not fade on its way.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, dtype: torch.dtype) -> None:
        self.model = model = copy.deepcopy(model).to(dtype)
        self.inputs = tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)
        self.tolerance = 1e-9 if dtype == torch.float64 else 1e-5  # of the largest value: what is more than rounding
        self.generator = torch.Generator().manual_seed(0)
        self.tensors = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.numel() > 1 and parameter.min() == parameter.max():
                parameter.data += 0.3 * self.random(parameter.shape).to(parameter)
        norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
        for norm in norms:
            norm.momentum = 1.0
        with torch.no_grad():
            if norms:
                run(model.train(), self.inputs)
            run(model.eval(), self.inputs)
        self.own = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}

    def faults(self, groups: Sequence[Group]) -> list[str]:
        name = groups[0].name if len(groups) == 1 else f"{len(groups)} groups"
        chosen = [(group, torch.randperm(group.size, generator=self.generator)[:UNITS]) for group in groups]
        if not self.differ(self.draw(chosen, zero=False), self.draw(chosen, zero=False)):
            return [f"{name}: nothing is proven, for drawing the units anew does not change the outputs"]
        first = self.draw(chosen, zero=True)
        found: dict[str, None] = {}
        still = set(first.inputs)
        for _ in range(DRAWS):
            other = self.draw(chosen, zero=True, like=first)
            if self.differ(first, other):
                found[f"{name}: the outputs depend on the units, though the columns that read them are zero"] = None
            for key, one in first.inputs.items():
                group, index = chosen[key[0]]
                view = group.views[key[1]]
                moved = self.apart(one, other.inputs[key]).movedim(view.axis, -1).flatten(0, -2).any(0)
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
        units return what they returned in the run ``like`` wherever they read the same values.
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
                seen.outputs = [output.clone() for output in run(self.model, self.inputs)]
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
            if norm.couples:

                def hold(module: nn.Module, args: Any, output: Tensor, name: str = norm.module) -> Tensor | None:
                    calls = seen.norms.setdefault(name, [])
                    calls.append((args[0].clone(), output.clone()))
                    if like is None:
                        return None
                    before, result = like.norms[name][len(calls) - 1]
                    return torch.where(self.apart(args[0], before), output, result)

                hooks.append(self.model.get_submodule(norm.module).register_forward_hook(hold))
        return hooks

    def apart(self, one: Tensor, other: Tensor) -> Tensor:
        """Which elements differ by more than rounding."""
        scale = one.abs().nan_to_num(0.0, 0.0, 0.0).max() if one.numel() else 0.0
        return (one - other).abs().nan_to_num(0.0) > self.tolerance * scale

    def differ(self, one: _Seen, other: _Seen) -> bool:
        return any(bool(self.apart(a, b).any()) for a, b in zip(one.outputs, other.outputs, strict=True))

    def random(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=self.generator)


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
