"""What is logged after every task, and a monitor of dormant units. What the metrics are is in :mod:`gxd.diagnose`.

Hidden units are read where the library reads them: at the inputs of the layers that consume them, as a
:class:`gxd.UnitPlan` names them. Measuring leaves the model, its gradients, its BatchNorm buffers, the random state
and what is attached to it as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd
from gxd.diagnose.definitions import DORMANT, norm, ranks
from gxd.diagnose.reading import Reading

DEFINITIONS: dict[str, str] = {
    "task": "number of the task, from 0",
    "test_loss": "of regression: mean squared error over the task's test set after training on the task",
    "test_accuracy": "share of the task's test set that is classified correctly after training on the task",
    "online_accuracy": "share of the task's training examples classified correctly just before they were trained on",
    "loss": "mean training loss (cross-entropy; of regression the squared error) over the steps of the task",
    "resets": "units reset during the task",
    "churn": "share of the task's resets, or of the last 1000 of them, that hit a unit younger than 1.5 times the "
    "maturity, or than 1.5 times its age at the first reset after that, if that is later; null without resets",
    "median_age_at_reset": "median age, in steps, of the units of the same resets; null without resets",
    "reach": "share of all units that were reset in the second half of the steps so far; null where none are scored",
    "dormant_fraction": f"share of the hidden units whose mean |h| over the probe is at most {DORMANT} of the mean of "
    "their layer (Sokar et al. 2023); a unit that several tensors carry must be dormant in all. Small outputs only: a "
    "saturated tanh unit is not dormant",
    "effective_rank": "exp of the entropy of the normalised singular values of the features (Roy and Vetterli 2007); "
    "features: what the last layer reads, probe examples x features, not centred",
    "stable_rank": "squared Frobenius norm over squared spectral norm of the same features",
    "weight_norm": "L2 norm of all parameters with two or more axes",
    "bias_norm": "L2 norm of all parameters named bias, those of norms included",
    "gradient_norm": "L2 norm of the gradient of the mean loss on the probe, in evaluation mode",
    "largest_reference": "largest |r| over all units and views; 0 where no units are scored",
    "nonfinite": "observations left out so far because they held an infinity or a NaN; 0 where no units are scored",
}
"""Metric -> its definition. The probe is the first examples of the task's test set, after training on the task."""


def measure(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    plan: gxd.UnitPlan,
    attached: gxd.Attachment | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> dict[str, float]:
    """The metrics of ``DEFINITIONS`` that are read off the model, with ``x, y`` as the probe.

    Args:
        plan: the units to look at; may be one made by :func:`gxd.find_units` for a model that is never reset.
        attached: what :func:`gxd.attach` returned, or None.

    A model that has diverged gives NaNs, no exception.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    with as_found(model, x), torch.enable_grad(), Reading(model, plan) as reading:
        value = loss(model(x), y)
        gradients = torch.autograd.grad(value, [parameter for _, parameter in named], allow_unused=True)
    with torch.no_grad():
        references = _references(attached)
        effective, stable = ranks(reading.features())
        found = {
            "dormant_fraction": reading.dormant_fraction(),
            "effective_rank": effective,
            "stable_rank": stable,
            "weight_norm": norm([p for p in model.parameters() if p.dim() > 1]),
            "bias_norm": norm([p for name, p in model.named_parameters() if name.rpartition(".")[2] == "bias"]),
            "gradient_norm": norm([gradient for gradient in gradients if gradient is not None]),
            "largest_reference": torch.stack([r.abs().max() for r in references]).max()
            if references
            else x.new_zeros(()),
        }
        values = torch.stack([value.detach().to(x.device, torch.float64) for value in found.values()]).tolist()
    return dict(zip(found, values, strict=True)) | {
        "nonfinite": attached.nonfinite_observations if attached is not None else 0
    }


def _references(attached: gxd.Attachment | None) -> list[Tensor]:
    try:
        return list(attached.references().values()) if attached is not None else []
    except KeyError:  # no method of it scores units
        return []


def dormant_units(model: nn.Module, x: Tensor, plan: gxd.UnitPlan | None = None) -> dict[str, Tensor]:
    """Group name -> ``(size,)`` which units are dormant on the batch ``x``. Finds the units itself if there is no plan.

    Example: ``{name: dormant.float().mean() for name, dormant in dormant_units(model, x).items()}``.
    """
    plan = plan if plan is not None else gxd.find_units(model, x)
    with as_found(model, x), torch.enable_grad(), Reading(model, plan) as reading:  # heads are read off the graph
        model(x)
    return reading.dormant()


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
