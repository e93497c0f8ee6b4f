"""How a model of the zoo is built and called."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Inputs = tuple[Tensor, ...] | Mapping[str, Any]
Factory = Callable[[], tuple[nn.Module, Inputs]]


def run(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The floating-point tensors among the outputs of a model, drawn with the same random numbers every time."""
    torch.manual_seed(0)
    outputs = model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
