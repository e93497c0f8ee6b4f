"""How much of a model a plan covers, counted without gxd's idea of what a layer is.

*Weights* are the parameters of two or more axes that are called a weight or a projection, belong to no embedding, and get a
gradient from the first output. Their *rows* are the features they compute. Weights after which no other weight comes on the
way to the first output make the output itself: they can never be reset, and are left out. *Coverage* is the share of the
remaining rows that are in some group of the plan. Rows that no reset can be defined for (queries and keys of attention) stay
in: the number says how much of the network is kept plastic.
"""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gxd import UnitPlan


@dataclass(frozen=True)
class Weight:
    """A weight matrix of a model: the name of its module, its own, and how many features it computes."""

    module: str
    name: str
    rows: int


def weights(model: nn.Module, outputs: Any) -> dict[int, Weight]:
    """The weights of a model by the id of the parameter, output layers left out. ``outputs`` carry a graph."""
    first = next(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.grad_fn is not None)
    found: dict[int, Weight] = {}
    embeddings: set[int] = set()
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                embeddings.add(id(parameter))
            if parameter.dim() >= 2 and re.search("weight|proj|original1", key):
                found.setdefault(id(parameter), Weight(name.split(".parametrizations")[0], key, _rows(module, parameter)))
    used, last = _in_graph(first, set(found))
    return {key: weight for key, weight in found.items() if key in used - last - embeddings}


def covered_rows(model: nn.Module, plan: UnitPlan) -> dict[int, set[int]]:
    """Id of a parameter -> the rows of it that are units of the plan."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    covered: dict[int, set[int]] = {}
    for group in plan.groups:
        for producer in group.producers:
            covered.setdefault(id(parameters[producer.weight]), set()).update(producer.rows.tolist())
    return covered


def share(found: dict[int, Weight], covered: dict[int, set[int]]) -> float:
    """Coverage: rows in some group, of all rows."""
    total = sum(weight.rows for weight in found.values())
    return sum(len(covered.get(key, ())) for key in found) / max(1, total)


def reasons(found: dict[int, Weight], covered: dict[int, set[int]], plan: UnitPlan) -> Counter[tuple[str, str]]:
    """(reason, module) -> the rows of that module that it costs."""
    cost: Counter[tuple[str, str]] = Counter()
    for key, weight in found.items():
        missing = weight.rows - len(covered.get(key, ()))
        entries = [e for e in plan.skipped if e.name == weight.module or e.name.startswith(weight.module + "[")]
        sizes = [_size(entry.name, weight.rows) for entry in entries]
        for entry, size in zip(entries, sizes, strict=True):
            cost[entry.reason, weight.module] += min(missing, size)
        if missing and not entries:
            cost["(the plan says nothing)", f"{weight.module}.{weight.name}"] += missing
    return cost


def _rows(module: nn.Module, parameter: Tensor) -> int:
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return parameter.shape[1] * module.groups
    if type(module).__name__ == "Conv1D":  # of Hugging Face's GPT models: (in, out)
        return parameter.shape[1]
    if parameter.dim() == 3 and not isinstance(module, nn.modules.conv._ConvNd):  # experts: (experts, out, in)
        return parameter.shape[0] * parameter.shape[1]
    return parameter.shape[0]


def _size(name: str, rows: int) -> int:
    """How many rows ``layer[0:4,8:12]`` or ``layer[7 rows]`` are."""
    inside = re.search(r"\[(.*)\]", name)
    if inside is None:
        return rows
    several = re.fullmatch(r"(\d+) rows", inside[1])
    return int(several[1]) if several else sum(int(b) - int(a) for a, b in re.findall(r"(\d+):(\d+)", inside[1]))


def _in_graph(output: Tensor, candidates: set[int]) -> tuple[set[int], set[int]]:
    """The candidates that ``output`` depends on, and those from which the way to it meets no other candidate.

    Autograd's graph is walked backwards. A node that a candidate enters (through transpositions and casts only) applies it.
    """
    direct: dict[Any, set[int]] = {}

    def applied(node: Any) -> set[int]:
        """The candidates that reach ``node`` from nothing but themselves."""
        if node not in direct:
            direct[node] = set()
            inputs = [child for child, _ in node.next_functions if child is not None]
            if hasattr(node, "variable"):
                direct[node] = {id(node.variable)} & candidates
            elif len(inputs) == 1:
                direct[node] = applied(inputs[0])
        return direct[node]

    used: set[int] = set()
    last: set[int] = set()
    seen: dict[Any, bool] = {}  # node -> whether it was reached without meeting a weight
    pending = [(output.grad_fn, True)]
    while pending:
        node, free = pending.pop()
        if seen.get(node, None) in (True, free):
            continue
        seen[node] = free
        children = [child for child, _ in node.next_functions if child is not None]
        here: set[int] = set()
        if len(children) > 1:
            for child in children:
                here |= applied(child)
        elif hasattr(node, "variable"):
            here = {id(node.variable)} & candidates
        used |= here
        if free:
            last |= here
        pending += [(child, free and not here) for child in children]
    return used, last
