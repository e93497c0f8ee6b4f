"""What the callbacks of all frameworks share: options, and one attachment after the other to the same model."""

from __future__ import annotations

import importlib
import inspect
import re
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gxd import arguments
from gxd.acting import ON_UNOBSERVED
from gxd.attachment import Attachment, attach
from gxd.errors import PlanError
from gxd.methods.base import Method
from gxd.methods.registry import method, methods
from gxd.plan.layouts import NamedTensors

DEFAULT = "gxd"  # the method of a callback that is given none
_LOOP = ("model", "optimizer", "methods", "scaler")  # arguments of gxd.attach that the training loop has
_SOURCES = ("plan", "example_inputs")  # of which one says what the units are


def required(package: str, least: str, extra: str, module: str | None = None) -> None:
    """Raise ImportError unless a package is installed, in this version or a later one, and can be imported.

    Args:
        module: its name in an import. Default: that of the package, as Python writes it.
    """
    needs, module = f"gxd.integrations.{extra.replace('-', '_')} needs", module or package.replace("-", "_")
    try:
        found = metadata.version(package)
        old = _numbers(found) < _numbers(least)
        if not old:
            importlib.import_module(module)
    except ModuleNotFoundError as error:  # the package, or what it needs itself
        missing = package if error.name in (None, package, module) else error.name
        raise ImportError(f"{needs} {missing}, which is not installed: pip install 'gxd[{extra}]'") from error
    if old:
        raise ImportError(f"{needs} {package} {least} or later, {found} is installed: pip install -U 'gxd[{extra}]'")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def logged(attached: Attachment) -> dict[str, float]:
    """What a callback hands to the framework's logger."""
    return attached.metrics()


class Session:
    """The training of one model: what is attached to it now, or was the last time, and what goes on from there.

    Args:
        given: methods, as for :func:`gxd.attach`; none: the method ``gxd``.
        options: of :func:`gxd.attach`, and of the method ``gxd`` if no other is given. What is wrong with them is said
            here, before any training.

    Attributes:
        attached: the attachment; a closed one still tells what it has seen.
    """

    def __init__(self, given: Sequence[Method | str], options: Mapping[str, Any]) -> None:
        own = () if given else methods()[DEFAULT].options
        known = [*(name for name in inspect.signature(attach).parameters if name not in _LOOP), *own]
        for name in options:
            if name in _LOOP:
                raise TypeError(f"{name!r} is no option here: the training loop has it")
            if name not in known:
                _refuse_option_of_a_method(name, given)
            arguments.choice("option", name, known)
        if options.get("plan") is not None and options.get("example_inputs") is not None:
            raise ValueError("give either example_inputs (the model is traced) or plan (from gxd.find_units), not both")
        made = [method(one) if isinstance(one, str) else one for one in given]
        for one in made:
            arguments.method(one, Method)
        if not made:
            made = [method(DEFAULT, **{name: value for name, value in options.items() if name in own})]
        arguments.seed(options.get("seed", 0))
        arguments.choice("on_unobserved", options.get("on_unobserved", "raise"), ON_UNOBSERVED)
        self.methods = tuple(made)
        self.options = {name: value for name, value in options.items() if name not in own}
        self.attached: Attachment | None = None
        self._state: Mapping[str, Any] | None = None  # that the next attachment begins with
        self._model: weakref.ref[nn.Module] | None = None

    @property
    def is_open(self) -> bool:
        """Whether something is attached."""
        return self.attached is not None and not self.attached.closed

    def needs_inputs(self, model: nn.Module) -> bool:
        """Whether nothing tells yet what the units of the model are."""
        needed = any(one.needs_units for one in self.methods)
        return needed and not self._source(model)

    def _source(self, model: nn.Module) -> dict[str, Any]:
        """The plan of the last time, unless layers were replaced since; or what the user has given."""
        if self.attached is not None:
            with suppress(PlanError):
                self.attached.plan.validate(NamedTensors(model))
                return {"plan": self.attached.plan}
        return {name: self.options[name] for name in _SOURCES if self.options.get(name) is not None}

    @property
    def needs_observe(self) -> bool:
        """Whether a method looks at what the model returns."""
        return any(one.needs_observe for one in self.methods)

    @property
    def needs_target(self) -> bool:
        """Whether a method scores units, or weights, by the target logit."""
        directions = [(one.output_gradient, one.utility and one.utility.gradient) for one in self.methods]
        return any("target" in pair for pair in directions)

    def begin(self, model: nn.Module, optimizer: Any, example_inputs: Any = None, **found: Any) -> Attachment:
        """Attach, and go on from the state that was loaded, or from the end of the last training. If anything fails,
        nothing is attached.

        Args:
            example_inputs: used if the user has given neither a plan nor inputs.
            found: other options that the framework knows, as the scaler. Those of the user come first.
        """
        if self.is_open:
            self.end()
            raise RuntimeError(
                "this callback is attached already: it was given twice, or to two trainings at once. Give it once, and "
                "make another one for another training"
            )
        if self._model is not None and self._model() is not model:
            raise RuntimeError(
                "this callback has trained another model, whose statistics it keeps: make a new one for this model"
            )
        source = self._source(model) or {"example_inputs": example_inputs}
        options = {**found, **self.options, **dict.fromkeys(_SOURCES), **source}
        attached = attach(model, optimizer, *self.methods, **options)
        try:
            if state := self.state_dict():
                attached.load_state_dict(state)
        except BaseException:
            attached.close()
            raise
        self.attached, self._state, self._model = attached, None, weakref.ref(model)
        return attached

    def forget(self) -> None:
        """Begin the next training with fresh statistics, of whatever model."""
        self.attached = self._state = self._model = None

    def end(self) -> None:
        """Nothing is attached any more. What was seen is kept for the next training."""
        if self.attached is not None:
            self.attached.discard()
            self.attached.close()

    def state_dict(self) -> dict[str, Any]:
        """Of the attachment, or what the next one is to begin with; empty if there is neither."""
        if self._state is not None:
            return dict(self._state)
        return {} if self.attached is None else self.attached.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there: now, or when something is attached."""
        if self.is_open and self.attached is not None and state:
            self.attached.load_state_dict(state)
        else:
            self._state = state or None


def _refuse_option_of_a_method(name: str, given: Sequence[Method | str]) -> None:
    """Raise ValueError if the option is one that a method has, and not the callback."""
    names = [one if isinstance(one, str) else one.name for one in given if isinstance(one, (str, Method))]
    for owner in names or ["continual_backprop"]:  # whose options the callbacks took before they had another default
        if owner in methods() and name in methods()[owner].options:
            raise ValueError(
                f"{name!r} is an option of the method {owner!r}, not of the callback: give the method, as "
                f"gxd.method({owner!r}, {name}=...), before the options of the callback"
            )


def on_device(inputs: Any, model: nn.Module) -> Any:
    """Inputs, on the device of a model."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to(device), inputs)
