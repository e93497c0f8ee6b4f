"""What one forward pass shows of the units: what their consumers read, and what the last layer reads."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.conv import _ConvNd

from gxd.diagnose.definitions import DORMANT, dormant
from gxd.errors import PlanError
from gxd.observe.consumers import Site, hooked
from gxd.observe.reading import Reader
from gxd.plan.units import Group, UnitPlan

# Activations by the name of their node in the graph -> their slope where they are steepest, or linear.
_STEEP = dict.fromkeys(
    ("Relu", "Threshold", "LeakyRelu", "PreluKernel", "Elu", "Celu", "Hardtanh", "Tanh", "Softplus"), 1.0
)
_STEEP |= {"Silu": 1.0, "Gelu": 1.0, "Mish": 1.0, "Hardswish": 1.0, "Sigmoid": 1 / 4, "Hardsigmoid": 1 / 6}
_PASSED = 16  # operations between an activation and its consumer that are looked through: a pool, a flatten


class Reading:
    """Hooks on the consumers of a plan's units, and on every layer of weights, for one forward pass: a context.

    Attributes:
        magnitudes: (group, view) -> ``(size,)`` mean |h|.
        sources: number of the view -> what its consumers have read, if it is kept.
    """

    def __init__(self, model: nn.Module, plan: UnitPlan, keep: bool = False) -> None:
        self.model, self.plan, self.keep = model, plan, keep
        self.magnitudes: dict[tuple[str, int], Tensor] = {}
        self.sources: dict[int, Tensor] = {}
        self._last: tuple[nn.Module, Tensor] | None = None  # the last layer of weights, be it in the plan or not
        self._hooks = ExitStack()

    def __enter__(self) -> Reading:
        for module in self.model.modules():
            if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
                handle = module.register_forward_pre_hook(self._see, with_kwargs=True)
                self._hooks.callback(handle.remove)
        # The consumers of a view read one tensor, so that it does not matter which is heard last.
        numbers = [(group, n) for group in self.plan.groups for n in range(len(group.views))]

        def read(site: Site, source: Tensor) -> Tensor:
            with torch.no_grad():
                self._read(source.detach(), [numbers[n] for n in site.views], site.inside_attention)
            if self.keep:
                self.sources.update(dict.fromkeys(site.views, source))
            return source

        self._hooks.enter_context(hooked(self.model, self.plan.views, read))
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        self._last = (module, tensors[0].detach()) if tensors else self._last

    def _read(self, source: Tensor, views: list[tuple[Group, int]], heads: bool) -> None:
        means: dict[int, Tensor] = {}  # axis -> mean |h| of every column; the groups of a stream share it
        for group, number in views:
            view = group.views[number]
            axis = -1 if heads else view.axis
            if axis not in means:
                means[axis] = source.abs().movedim(axis, -1).flatten(0, -2).mean(0)
            self.magnitudes[group.name, number] = means[axis][view.columns.to(source.device)].mean(1)

    def dormant(self, threshold: float = DORMANT) -> dict[str, Tensor]:
        """Group name -> which units are dormant in all their views."""
        found: dict[str, Tensor] = {}
        for (name, _), magnitude in self.magnitudes.items():
            low = dormant(magnitude, threshold)
            found[name] = found[name] & low if name in found else low
        return found

    def dormant_fraction(self, threshold: float = DORMANT) -> Tensor:
        """The share of dormant units in all groups; NaN if a unit is not finite, 0 if there is none."""
        if not self.plan.groups:
            return torch.zeros((), dtype=torch.float64)
        if not self.magnitudes:
            raise PlanError("the forward pass used no layer of the plan: make the plan from this model")
        fraction = torch.cat(list(self.dormant(threshold).values())).double().mean()
        return fraction + 0 * torch.cat(list(self.magnitudes.values())).sum()  # infinity and NaN times 0 are NaN

    def features(self) -> Tensor:
        """What the last layer of weights has read, ``(examples and positions, features)``."""
        if self._last is None:
            raise PlanError("the forward pass used no layer of weights, so there are no features to measure")
        module, read = self._last
        return _rows(read, -len(module.kernel_size) - 1 if isinstance(module, _ConvNd) else -1)

    def values(self, number: int, examples: int) -> Tensor | None:
        """``(examples and positions, units)`` the values of a group in its first view; None if it did not run."""
        view = self.plan.views_of[number][0]
        if view not in self.sources:
            return None
        return Reader(self.plan.views[view], "signed")(self.sources[view].detach(), examples).flatten(0, 1)

    def slopes(self, number: int, outputs: dict[str, Tensor]) -> Tensor | None:
        """``(values, units)`` the slope of a group's activation at each of its values, as a share of its steepest; None
        if the units have no activation of their own, or one that is not known.

        The activation is found in the graph, right before the consumer, and its node says what its slopes are.

        Args:
            outputs: module name -> what the producers have returned, in whose shape the activations are.
        """
        source = self.sources.get(self.plan.views_of[number][0])
        producer = self.plan.groups[number].producers[0]
        found = _activation(source.grad_fn if source is not None else None)
        if found is None or producer.module not in outputs:
            return None
        node, steepest = found
        shape = torch.Size(node._input_metadata[0].shape)
        if shape != outputs[producer.module].shape:  # a gate, or a part of what the producer has computed
            return None
        slopes = node(torch.ones(shape, dtype=node._input_metadata[0].dtype, device=outputs[producer.module].device))
        slopes = slopes[0] if isinstance(slopes, tuple) else slopes
        axis = 1 - len(self.plan.shapes[producer.weight]) if "conv" in producer.layout.family else -1
        return _rows(slopes.detach(), axis)[:, producer.rows.to(slopes.device)] / steepest


def _activation(node: Node | None) -> tuple[Any, float] | None:
    """The activation that a tensor comes from, through operations that only move or pool its elements."""
    for _ in range(_PASSED):
        if node is None:
            return None
        kind = node.name().partition("Backward")[0]
        if kind in _STEEP:
            return node, _STEEP[kind]
        before = [one for one, _ in node.next_functions if one is not None]
        if len(before) != 1:  # a sum, or a layer
            return None
        node = before[0]
    return None


def _rows(tensor: Tensor, axis: int) -> Tensor:
    return tensor.movedim(axis, -1).reshape(-1, tensor.shape[axis])
