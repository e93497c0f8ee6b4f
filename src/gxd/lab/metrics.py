"""What is logged after every task, one definition each, and a monitor of dormant units.

Hidden units are read where the library reads them: at the inputs of the layers that consume them, as a
:class:`gxd.UnitPlan` names them. Measuring leaves the model, its gradients, its BatchNorm buffers, the random state
and a :class:`gxd.ContinualBackprop` on it as they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd
from gxd.observe.consumers import Site, hooked

DORMANT = 0.025
"""A unit is dormant if its mean |h| is at most this share of its layer's."""

DEFINITIONS: dict[str, str] = {
    "task": "number of the task, from 0",
    "test_accuracy": "share of the task's test set that is classified correctly after training on the task",
    "online_accuracy": "share of the task's training examples classified correctly just before they were trained on",
    "loss": "mean training loss (cross-entropy) over the steps of the task",
    "resets": "units reset during the task",
    "dormant_fraction": f"share of the hidden units whose mean |h| over the probe is at most {DORMANT} of the mean of "
    "their layer (Sokar et al. 2023); a unit that several tensors carry must be dormant in all. Small outputs only: a "
    "saturated tanh unit is not dormant",
    "effective_rank": "exp of the entropy of the normalised singular values of the features (Roy and Vetterli 2007); "
    "features: what the last layer reads, probe examples x features, not centred",
    "stable_rank": "squared Frobenius norm over squared spectral norm of the same features",
    "weight_norm": "L2 norm of all parameters with two or more axes",
    "bias_norm": "L2 norm of all parameters named bias, those of norms included",
    "gradient_norm": "L2 norm of the gradient of the mean loss on the probe, in evaluation mode",
    "largest_reference": "largest |r| over all units and views; 0 for plain backprop",
    "nonfinite": "observations left out so far because they held an infinity or a NaN; 0 for plain backprop",
}
"""Metric -> its definition. The probe is the first examples of the task's test set, after training on the task."""


def measure(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    plan: gxd.UnitPlan,
    cbp: Any = None,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> dict[str, float]:
    """The metrics of ``DEFINITIONS`` that are read off the model, with ``x, y`` as the probe.

    Args:
        plan: the units to look at; may be one made by :func:`gxd.find_units` for a model that is never reset.
        cbp: the :class:`gxd.ContinualBackprop`, or None.

    A model that has diverged gives NaNs, no exception.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    with as_found(model, x), torch.enable_grad(), _Reading(model, plan) as reading:
        value = loss(model(x), y)
        gradients = torch.autograd.grad(value, [parameter for _, parameter in named], allow_unused=True)
    with torch.no_grad():
        references = list(cbp.references().values()) if cbp is not None else []
        effective, stable = ranks(reading.features())
        found = {
            "dormant_fraction": reading.dormant_fraction(),
            "effective_rank": effective,
            "stable_rank": stable,
            "weight_norm": _norm([p for p in model.parameters() if p.dim() > 1]),
            "bias_norm": _norm([p for name, p in model.named_parameters() if name.rpartition(".")[2] == "bias"]),
            "gradient_norm": _norm([gradient for gradient in gradients if gradient is not None]),
            "largest_reference": torch.stack([r.abs().max() for r in references]).max()
            if references
            else x.new_zeros(()),
        }
        values = torch.stack([value.detach().to(x.device, torch.float64) for value in found.values()]).tolist()
    return dict(zip(found, values, strict=True)) | {"nonfinite": cbp.nonfinite_observations if cbp is not None else 0}


def dormant_units(model: nn.Module, x: Tensor, plan: gxd.UnitPlan | None = None) -> dict[str, Tensor]:
    """Group name -> ``(size,)`` which units are dormant on the batch ``x``. Finds the units itself if there is no plan.

    Example: ``{name: dormant.float().mean() for name, dormant in dormant_units(model, x).items()}``.
    """
    plan = plan if plan is not None else gxd.find_units(model, x)
    with as_found(model, x), torch.enable_grad(), _Reading(model, plan) as reading:  # heads are read off the graph
        model(x)
    return reading.dormant()


def ranks(features: Tensor) -> tuple[Tensor, Tensor]:
    """Effective and stable rank of a matrix ``(examples, features)``; 0 if it is zero, NaN if it is not finite."""
    matrix = features.double()
    gram = matrix.mT @ matrix if matrix.shape[0] >= matrix.shape[1] else matrix @ matrix.mT
    if not bool(gram.isfinite().all()):
        return gram.new_tensor(math.nan), gram.new_tensor(math.nan)
    # The squares of the singular values. What the squaring loses is below 1e-8 of the largest.
    squares = torch.linalg.eigvalsh(gram).clamp_min(0)
    largest = squares[-1]
    if not bool(largest > 0):
        return gram.new_zeros(()), gram.new_zeros(())
    share = squares.sqrt() / squares.sqrt().sum()
    return torch.special.entr(share).sum().exp(), squares.sum() / largest


class _Reading:
    """Hooks on the consumers of a plan's units, and on every layer of weights, for one forward pass."""

    def __init__(self, model: nn.Module, plan: gxd.UnitPlan) -> None:
        self.model, self.plan = model, plan
        self.magnitudes: dict[tuple[str, int], Tensor] = {}  # (group, view) -> (size,) mean |h|
        self.last: Tensor | None = None  # what the last layer of weights reads, be it in the plan or not
        self.hooks = ExitStack()

    def __enter__(self) -> _Reading:
        for module in self.model.modules():
            if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
                handle = module.register_forward_pre_hook(self._see, with_kwargs=True)
                self.hooks.callback(handle.remove)
        # The consumers of a view read one tensor, so that it does not matter which is heard last.
        numbers = [(group, n) for group in self.plan.groups for n in range(len(group.views))]

        def read(site: Site, source: Tensor) -> Tensor:
            with torch.no_grad():
                self._read(source.detach(), [numbers[n] for n in site.views], site.inside_attention)
            return source

        self.hooks.enter_context(hooked(self.model, self.plan.views, read))
        return self

    def __exit__(self, *_: object) -> None:
        self.hooks.close()

    def _see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        self.last = tensors[0].detach() if tensors else self.last

    def _read(self, source: Tensor, views: list[tuple[gxd.Group, int]], heads: bool) -> None:
        means: dict[int, Tensor] = {}  # axis -> mean |h| of every column; the groups of a stream share it
        for group, number in views:
            view = group.views[number]
            axis = -1 if heads else view.axis
            if axis not in means:
                means[axis] = source.abs().movedim(axis, -1).flatten(0, -2).mean(0)
            self.magnitudes[group.name, number] = means[axis][view.columns.to(source.device)].mean(1)

    def dormant(self) -> dict[str, Tensor]:
        """Group name -> which units are dormant in all their views."""
        found: dict[str, Tensor] = {}
        for (name, _), magnitude in self.magnitudes.items():
            dormant = magnitude <= DORMANT * magnitude.mean()
            found[name] = found[name] & dormant if name in found else dormant
        return found

    def dormant_fraction(self) -> Tensor:
        """The share of dormant units in all groups; NaN if a unit is not finite."""
        if not self.magnitudes:
            raise gxd.PlanError("the forward pass used no layer of the plan: make the plan from this model")
        fraction = torch.cat(list(self.dormant().values())).double().mean()
        return fraction + 0 * torch.cat(list(self.magnitudes.values())).sum()  # infinity and NaN times 0 are NaN

    def features(self) -> Tensor:
        """What the last layer read, ``(examples, features)``."""
        if self.last is None:
            raise gxd.PlanError("the forward pass used no layer of weights, so there are no features to measure")
        return self.last.flatten(1)


@contextmanager
def as_found(model: nn.Module, x: Tensor) -> Iterator[None]:
    """Evaluation mode, so that nothing is observed, dropped out or tracked; every module's own mode after it."""
    modes = [(module, module.training) for module in model.modules()]
    devices = [x.device] if x.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            model.eval()
            yield
        finally:
            for module, training in modes:
                module.training = training


def _norm(tensors: list[Tensor]) -> Tensor:
    if not tensors:
        return torch.zeros(())
    return torch.stack(torch._foreach_norm([t.detach() for t in tensors])).norm()
