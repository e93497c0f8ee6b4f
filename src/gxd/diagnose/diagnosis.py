"""``gxd.diagnose``: how the units of a network are, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gxd import arguments
from gxd.cost.lesion import Data, Lesion, cross_entropy
from gxd.cost.reset_cost import logits_of
from gxd.diagnose import plots
from gxd.diagnose.definitions import DORMANT, norm, quantiles, ranks, saturation
from gxd.diagnose.reading import Reading
from gxd.observe.direction import class_axis
from gxd.plan.find import find_units
from gxd.plan.layouts import NamedTensors, unwrap
from gxd.plan.units import Group, UnitPlan
from gxd.sandbox.substitute import copied_arguments, copies, evaluation, run
from gxd.score.utilities import Utility, get_utility
from gxd.tables import html_table, percent, shown, text_table

Metrics = dict[str, float]
Loss = Callable[[Tensor, Tensor], Tensor]
_ROWS, _NAME = 24, 20  # groups in the table on a screen, and characters of their names
_QUANTILES = ("utility_05", "utility_50", "utility_95")


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What :func:`gxd.diagnose` has found. ``print`` it. ``gxd/diagnose/definitions.py`` says what each metric is.

    Attributes:
        overall: metric -> its value for the whole network.
        groups: group name -> metric -> its value.
        dormant: group name -> ``(size,)`` which units are dormant.
        utilities: group name -> ``(size,)`` the utility of each unit; NaN where the inputs do not show it.
        utility: which one.
        examples: how many were looked at.
    """

    overall: Metrics
    groups: Mapping[str, Metrics]
    dormant: Mapping[str, Tensor]
    utilities: Mapping[str, Tensor]
    utility: str
    examples: int

    def to_dict(self) -> dict[str, float]:
        """All numbers, flat: ``dormant`` of the network, ``fc1/dormant`` of a group."""
        flat = dict(self.overall)
        for name, metrics in self.groups.items():
            flat |= {f"{name}/{metric}": value for metric, value in metrics.items()}
        return flat

    def plot(self) -> Any:
        """A figure: dormant and saturated units, ranks and utilities by group. Needs matplotlib."""
        return plots.diagnosis(self)

    def _table(self, most: int | None) -> tuple[list[str], list[list[str]], list[str]]:
        header = ["group", "units", "dormant", "flat", "never on", "always on", "rank", "stable", "|w|", "|b|"]
        header += ["|grad|", "utility 5, 50, 95 %"]
        names = list(self.groups)[:most]
        rows = [_row(name, self.groups[name]) for name in names] + [_row("all", self.overall)]
        notes = [f"{self.examples} examples; utility: {self.utility}"]
        if len(names) < len(self.groups):
            notes.insert(0, f"and {len(self.groups) - len(names)} more groups, in .groups")
        return header, rows, notes

    def __str__(self) -> str:
        header, rows, notes = self._table(_ROWS)
        for row in rows:
            row[0] = row[0] if len(row[0]) <= _NAME else "..." + row[0][3 - _NAME :]
        return "\n".join([*text_table(header, rows), *notes])

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name}={shown(self.overall[name])}" for name in ("dormant", "saturation"))
        return f"Diagnosis({len(self.groups)} groups, {numbers}; print it)"

    def _repr_html_(self) -> str:
        header, rows, notes = self._table(None)
        return html_table(header, rows, "Diagnosis", notes)


def diagnose(
    model: nn.Module,
    inputs: Any,
    target: Tensor | None = None,
    *,
    loss: Loss | None = None,
    plan: UnitPlan | None = None,
    threshold: float = DORMANT,
    utility: str = "contribution",
    output: Callable[[Any], Tensor] | None = None,
    class_dim: int | None = None,
    seed: int = 0,
) -> Diagnosis:
    """Dormant and saturated units, ranks of the features, norms and utilities, by group and overall.

    Measured in evaluation mode on one batch; a few hundred examples are enough. The model is left exactly as it was
    found. Whether the network learns worse than a new one is another question: :func:`gxd.probe` answers it.

    Args:
        model: a model that a plan can be made from.
        inputs: as for :func:`gxd.find_units`: a tensor, a tuple of arguments, or a dict.
        target: for the norms of gradients, and for utilities that need one.
        loss: ``(logits, target) -> scalar``. Default: the cross entropy, if the target holds classes.
        plan: default: ``find_units(model, inputs)``.
        threshold: a unit is dormant if its mean |h| is at most this share of its group's.
        utility: one of :func:`gxd.utilities`.
        output: takes the logits from what the model returns. Default: the tensor itself, or its ``logits``.
        class_dim: the axis of the classes, 1 or -1, where the shapes of the logits and of the target leave it open.
        seed: of models and utilities that draw random numbers.

    Example::

        print(gxd.diagnose(model, x, y))
    """
    arguments.module(model)
    arguments.number("threshold", threshold, 0.0)
    chosen = get_utility(utility)
    if target is not None and not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor or None, got {type(target).__name__}")
    if target is None and (loss is not None or chosen.gradient in ("target", "loss")):
        what = "loss=" if loss is not None else f"the utility {utility!r}"
        raise ValueError(f"{what} needs a target: gxd.diagnose(model, x, y)")
    if target is not None and loss is None and target.is_floating_point():
        raise ValueError("the target holds no classes: give loss=, such as torch.nn.functional.mse_loss")
    model = unwrap(model)
    if plan is None:
        plan = find_units(model, inputs)
    arguments.plan(plan)
    plan.validate(NamedTensors(model))
    if not plan.groups:
        raise ValueError("the plan has no group, so there are no units to look at: print(plan) says why")
    data = Data(inputs, target, plan.batch_dim, "inputs")
    with evaluation(model):
        return _Look(model, plan, data, output or logits_of, class_dim, seed).diagnosis(loss, threshold, chosen)


class _Look:
    """One forward pass, on copies of all tensors, and what is read off it."""

    def __init__(
        self,
        model: nn.Module,
        plan: UnitPlan,
        data: Data,
        output: Callable[[Any], Tensor],
        class_dim: int | None,
        seed: int,
    ) -> None:
        self.model, self.plan, self.data, self.output, self.seed = model, plan, data, output, seed
        self.class_dim = class_dim
        self.tensors = copies(NamedTensors(model))
        self.reading = Reading(model, plan, keep=True)
        self.outputs: dict[str, Tensor] = {}  # of the producers
        self.returned = run(model, self.tensors, copied_arguments(data.call), seed, [self.reading, _Outputs(self)])

    def diagnosis(self, loss: Loss | None, threshold: float, utility: Utility) -> Diagnosis:
        gradients = self._gradients(loss)
        scores = self._scores(utility, loss)
        dormant = self.reading.dormant(threshold)
        groups = self.plan.groups
        found = {
            group.name: self._group(number, group, dormant.get(group.name), gradients, scores[number])
            for number, group in enumerate(groups)
        }
        return Diagnosis(
            overall=self._overall(found, threshold, gradients, torch.cat(scores)),
            groups=found,
            dormant={name: mask.cpu() for name, mask in dormant.items()},
            utilities={group.name: score for group, score in zip(groups, scores, strict=True)},
            utility=utility.name,
            examples=self.data.size,
        )

    def _group(
        self, number: int, group: Group, dormant: Tensor | None, gradients: dict[str, Tensor], utilities: Tensor
    ) -> Metrics:
        values = self.reading.values(number, self.data.size)
        slopes = self.reading.slopes(number, self.outputs)
        effective, stable = ranks(values) if values is not None else (math.nan, math.nan)
        weights, biases = _incoming(group, self.tensors)
        incoming = [part for parts in _incoming(group, gradients) for part in parts]
        broken = 0.0 if values is None else float(0 * values.sum())
        return {
            "units": float(group.size),
            "dormant": math.nan if dormant is None else float(dormant.double().mean()) + broken,
            **{name: value + broken for name, value in _saturation(slopes).items()},  # the slope of ReLU at NaN is 1
            "effective_rank": float(effective),
            "stable_rank": float(stable),
            "weight_norm": float(norm(weights)),
            "bias_norm": float(norm(biases)) if biases else math.nan,
            "gradient_norm": float(norm(incoming)) if incoming else math.nan,
            **dict(zip(_QUANTILES, quantiles(utilities).tolist(), strict=True)),
        }

    def _overall(
        self, groups: Mapping[str, Metrics], threshold: float, gradients: dict[str, Tensor], utilities: Tensor
    ) -> Metrics:
        effective, stable = ranks(self.reading.features())
        parameters = dict(self.model.named_parameters())
        biases = [p for name, p in parameters.items() if name.rpartition(".")[2] == "bias"]
        return {
            "units": float(self.plan.size),
            "dormant": float(self.reading.dormant_fraction(threshold)),
            **{name: _mean(groups, name) for name in _saturation(None)},
            "effective_rank": float(effective),
            "stable_rank": float(stable),
            "weight_norm": float(norm([p for p in parameters.values() if p.dim() > 1])),
            "bias_norm": float(norm(biases)) if biases else math.nan,
            "gradient_norm": float(norm(list(gradients.values()))) if gradients else math.nan,
            **dict(zip(_QUANTILES, quantiles(utilities).tolist(), strict=True)),
        }

    def _gradients(self, loss: Loss | None) -> dict[str, Tensor]:
        """Name -> the gradient of the loss by each parameter that is trained; empty without a target."""
        target = self.data.target
        if target is None:
            return {}
        logits = self.output(self.returned)
        value = loss(logits, target) if loss is not None else cross_entropy(logits, target, self._class_dim())
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ValueError(f"loss must return a scalar tensor, as .mean() makes it, got {shape}")
        trained = {name: self.tensors[name] for name, p in self.model.named_parameters() if p.requires_grad}
        found = torch.autograd.grad(value, list(trained.values()), allow_unused=True, retain_graph=True)
        return {n: g.to_dense() if g.is_sparse else g for n, g in zip(trained, found, strict=True) if g is not None}

    def _scores(self, utility: Utility, loss: Loss | None) -> list[Tensor]:
        needed, size = utility.gradient is not None, self.data.size
        lesion = Lesion(self.model, self.plan, self.output if needed else _any_tensor, "signed", self.seed)
        references = lesion.references(self.data, size)
        classes = self._class_dim() if needed and (utility.gradient != "loss" or loss is None) else 1
        return lesion.scores(self.data, [utility], references, loss, classes, size, None)[0][utility.name]

    def _class_dim(self) -> int:
        return class_axis(self.output(self.returned), self.data.target, self.class_dim)


class _Outputs:
    """Within this context, what producers return is kept, for its shape."""

    def __init__(self, look: _Look) -> None:
        self.look = look
        self.handles: list[Any] = []

    def __enter__(self) -> None:
        for name in {group.producers[0].module for group in self.look.plan.groups}:

            def keep(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                if isinstance(output, Tensor):
                    self.look.outputs[name] = output.detach()

            self.handles.append(self.look.model.get_submodule(name).register_forward_hook(keep))

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


def _incoming(group: Group, tensors: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The rows of a group's units in some tensors by name: of weights, and of biases."""
    weights, biases = [], []
    for producer in group.producers:
        if producer.weight in tensors:
            view, where = producer.layout.row(tensors[producer.weight], producer.rows)
            weights.append(view[where])
        if producer.bias is not None and producer.bias in tensors:
            bias = tensors[producer.bias]
            biases.append(bias[producer.bias_rows.to(bias.device)])
    return weights, biases


def _saturation(slopes: Tensor | None) -> Metrics:
    values = (math.nan,) * 3 if slopes is None else saturation(slopes)
    return dict(zip(("saturation", "never_active", "always_active"), map(float, values), strict=True))


def _mean(groups: Mapping[str, Metrics], name: str) -> float:
    """Over all units of the groups in which it is defined."""
    defined = [(group["units"], group[name]) for group in groups.values() if not math.isnan(group[name])]
    return sum(n * value for n, value in defined) / sum(n for n, _ in defined) if defined else math.nan


def _any_tensor(output: Any) -> Tensor:
    return next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), torch.zeros(()))


def _row(name: str, m: Metrics) -> list[str]:
    shares = [percent(m[k]) for k in ("dormant", "saturation", "never_active", "always_active")]
    others = ("effective_rank", "stable_rank", "weight_norm", "bias_norm", "gradient_norm")
    utility = ", ".join(shown(m[k], 2) for k in _QUANTILES)
    return [name, f"{m['units']:.0f}", *shares, *(shown(m[k]) for k in others), utility]
