"""From a model to graphs: one call of the model, written down by torch.export. The model is left as it was found."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.modules import transformer
from torch.utils._pytree import tree_map_only

from gxd.errors import TraceError
from gxd.observe.captures import batch_size
from gxd.plan.find.assertions import values_known
from gxd.plan.find.marks import marked

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of the model


@dataclass(frozen=True)
class Trace:
    """What one call of a model does.

    Attributes:
        program: the exported program.
        called: the id of each module that was called -> whether every call of it had gradients enabled.
    """

    program: Any
    called: Mapping[int, bool]


def calls(example_inputs: Any) -> list[Call]:
    """The calls of the model that ``example_inputs`` stand for: one, or a list of them."""
    return [call_arguments(one) for one in (example_inputs if isinstance(example_inputs, list) else [example_inputs])]


def call_arguments(example_inputs: Any) -> Call:
    """Positional and keyword arguments of the call that ``example_inputs`` stand for."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return (example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)), {}


def trace_call(model: nn.Module, call: Call, batch_dim: int) -> Trace:
    """Trace one call. Raises :class:`gxd.TraceError`, with one message, if that cannot be done.

    A batch is cut to two examples: one could not be told from other axes of size one, and more say nothing new.
    """
    if all(parameter.is_meta for parameter in model.parameters()):  # not made yet: shapes are all it has
        call = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), call)
    size = batch_size(*call, batch_dim)
    if size is not None and size != 2:
        with suppress(TraceError):  # an axis that is no batch, or one that other arguments depend on: as it was given
            return _trace(model, tree_map_only(Tensor, lambda tensor: _two(tensor, batch_dim, size), call))
    return _trace(model, call)


def _two(tensor: Tensor, dim: int, size: int) -> Tensor:
    if tensor.dim() <= dim or tensor.shape[dim] != size:
        return tensor
    return torch.cat([tensor, tensor], dim) if size == 1 else tensor.narrow(dim, 0, 2)


def _trace(model: nn.Module, call: Call) -> Trace:
    errors: list[Exception] = []
    # In training mode first, as evaluation takes fused paths; but layers that are dropped at random cannot be traced.
    # A forward that looks at values needs them, which takes a real forward pass.
    for looking in (nullcontext, values_known):
        for training in (True, False):
            try:
                with _quiet(), _prepared(model, training), marked(model) as called, looking(model):
                    program = torch.export.export(model, *call, strict=False)
                return Trace(program, called)
            except Exception as error:  # torch.export raises many kinds; all of them mean the same to the user
                traceback.clear_frames(error.__traceback__)  # they hold tensors of the trace
                errors.append(error)
        if not _looks_at_values(errors[0]):
            break
    first = next((line for line in str(errors[0]).splitlines() if line.strip()), "")
    raise TraceError(
        f"{type(model).__name__} could not be traced by torch.export: {type(errors[0]).__name__}: {first[:300]}\n"
        "If the message is about the inputs, fix example_inputs (a tensor, a tuple, or a dict of keyword arguments; a "
        "batch of two; or a list of such calls). If training does not call model(inputs), say what it calls: "
        "gxd.find_units(model, inputs, call=lambda model, x: ...). If the forward pass depends on the values of its "
        "inputs, trace a part of the model (gxd.find_units(model.backbone, ...)), or describe the units by hand: "
        "gxd.find_units(model, groups=[gxd.manual_group('fc1', consumers=['fc2'])])."
    ) from None


def _looks_at_values(error: Exception) -> bool:
    words = ("data-dependent", "item()", "SymFloat", "SymInt", "SymBool")
    return "DataDependent" in type(error).__name__ or any(word in str(error) for word in words)


@contextmanager
def _quiet() -> Iterator[None]:
    """What torch has to say about its trace is not for the user of a plan, and distributions cannot check arguments
    that have no values.
    """
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith("torch")]
    silenced = [logger for logger in loggers if not logger.disabled]
    validates = Distribution._validate_args
    try:
        for logger in silenced:
            logger.disabled = True
        Distribution.set_default_validate_args(False)
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        Distribution.set_default_validate_args(validates)
        for logger in silenced:
            logger.disabled = False


@contextmanager
def _prepared(model: nn.Module, training: bool) -> Iterator[None]:
    """Everything in one mode, and without what a trace must not meet: a cumulative BatchNorm reads its counter, a
    cache is no tensor, and torch's own Transformer looks whether a mask is causal.
    """
    changed: list[tuple[Any, str, Any]] = []

    def change(owner: Any, name: str, value: Any) -> None:
        changed.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    try:
        # No is the answer that is right for every mask: a causal one is then read like any other.
        change(transformer, "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: is_causal is True)
        for module in model.modules():
            change(module, "training", training)
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.momentum is None:
                change(module, "momentum", 0.1)
            if getattr(getattr(module, "config", None), "use_cache", False) is True:
                change(module.config, "use_cache", False)
        with torch.enable_grad():  # a plan is for training, wherever it is made
            yield
    finally:
        for owner, name, value in reversed(changed):
            setattr(owner, name, value)
