"""How much of a model a plan covers, counted without gxd's idea of what a layer is.

*Weights* are the parameters of two or more axes that are called a weight or a projection, belong to no embedding, and
get a gradient from the first output. Their *rows* are the features they compute. Weights after which no other weight
comes on the way to the first output make the output itself: they can never be reset, and are left out. *Coverage* is
the share of the remaining rows that are in some group of the plan. Rows that no reset is defined for (queries and keys
of attention) stay in: the number says how much of the network is kept plastic.
"""

import copy
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gxd import UnitPlan
from tests.model_zoo.calls import Inputs, run


@dataclass(frozen=True)
class Weight:
    """A weight matrix of a model: the name of its module, its own, and how many features it computes."""

    module: str
    name: str
    rows: int


def weights(model: nn.Module, inputs: Inputs) -> dict[int, Weight]:
    """The weights of a model by the id of the parameter, output layers left out."""
    found: dict[int, Weight] = {}
    embeddings: set[int] = set()
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                embeddings.add(id(parameter))
            if parameter.dim() >= 2 and re.search("weight|proj|original1", key):
                found.setdefault(
                    id(parameter), Weight(name.split(".parametrizations")[0], key, _rows(module, parameter))
                )
    try:  # in evaluation no layer is dropped at random
        used, last = _used_and_last(model, inputs, set(found), training=False)
    except (AssertionError, RuntimeError):  # but some can be differentiated in training only
        used, last = _used_and_last(model, inputs, set(found), training=True)
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


def _used_and_last(model: nn.Module, inputs: Inputs, candidates: set[int], training: bool) -> tuple[set[int], set[int]]:
    """The parameters that the first output depends on, and the candidates that make it."""
    copied = copy.deepcopy(model).train(training)
    original = {id(mine): id(own) for mine, own in zip(copied.parameters(), model.parameters(), strict=True)}
    first = next(output for output in run(copied, inputs) if output.grad_fn is not None)
    last = _last(first, {mine for mine, own in original.items() if own in candidates})
    first.sum().backward()  # the graph alone does not show what a custom backward reads
    used = {id(parameter) for parameter in copied.parameters() if parameter.grad is not None}
    return {original[key] for key in used}, {original[key] for key in last}


def _last(output: Tensor, candidates: set[int]) -> set[int]:
    """The candidates from which the way to ``output`` meets no other candidate.

    Autograd's graph is walked backwards, as far as to the nodes that apply a candidate: a candidate comes in there,
    through nothing but transpositions and casts.
    """
    found: set[int] = set()
    seen = set()
    pending: list[Any] = [output.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        children = [child for child, _ in node.next_functions]
        applied = {id(_leaf(child)) for child in children} & candidates if len(children) > 1 else set()
        found |= applied
        pending += [] if applied else children
    return found


def _leaf(node: Any) -> Tensor | None:
    """The parameter that a node of the graph passes on as it is, moved or cast."""
    while node is not None and not hasattr(node, "variable"):
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    return None if node is None else node.variable
