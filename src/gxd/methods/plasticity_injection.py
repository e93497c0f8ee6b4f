"""Plasticity injection: freeze a head, and let a fresh one learn what is to be added to it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gxd import arguments
from gxd.arguments import near
from gxd.errors import PlanError
from gxd.methods.base import Host
from gxd.methods.event import Event, EventState
from gxd.methods.layers import shared
from gxd.methods.registry import register_method
from gxd.plan.layouts import unwrap
from gxd.reset.fresh import distributions, fixed_rows, fresh, holding
from gxd.reset.optimizers import trained_by

Model = TypeVar("Model", bound=nn.Module)


class Injectable(nn.Module):
    """``h(x) + new(x) - copy(x)``, where ``copy`` is what ``new`` began with; see :func:`gxd.injectable`."""

    def __init__(self, head: nn.Module, generator: torch.Generator) -> None:
        super().__init__()
        self.h, self.new = head, copy.deepcopy(head)
        known, fixed = distributions(head), fixed_rows(self.new)
        with torch.no_grad():
            for name, parameter in self.new.named_parameters():
                with holding(parameter, fixed.get(id(parameter), ())):
                    parameter.copy_(fresh(name, parameter, known, generator))
        self.copy = copy.deepcopy(self.new)
        for part in (self.new, self.copy):
            part.requires_grad_(False)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = self.h(*args, **kwargs) + (self.new(*args, **kwargs) - self.copy(*args, **kwargs))
        return out


def injectable(model: Model, head: str, *, seed: int = 0) -> Model:
    """Prepare a model for ``plasticity_injection``: replace a module by ``h(x) + new(x) - copy(x)``, which has the same
    output. ``new`` and ``copy`` are one fresh draw, and frozen.

    Call it before the optimizer, a wrapper or a plan is made, and give the optimizer all parameters,
    ``model.parameters()``: it skips those that are frozen. The module's parameters are then named ``head.h.weight``
    and so on, and other code that asks for ``model.head.weight`` must be changed. Units that the module reads are not
    in a plan, for its columns are partly frozen.

    Args:
        model: changed in place, and returned.
        head: the name of the module; it returns a tensor, and draws no random numbers. Name one with a hidden layer,
            as in the paper: of a single linear layer the sum is linear, too, and trains like the layer itself.
        seed: of the fresh weights.

    Example::

        model = gxd.injectable(model, "head")
        optimizer = torch.optim.Adam(model.parameters())
        attached = gxd.attach(model, optimizer, gxd.method("plasticity_injection"))
    """
    arguments.module(model)
    arguments.seed(seed)
    if unwrap(model) is not model:
        raise ValueError(f"model is wrapped already ({type(model).__name__}): prepare the one inside, then wrap it")
    modules = dict(model.named_modules())
    if not isinstance(head, str) or head not in modules or head == "":
        raise ValueError(f"head={head!r} is no module inside this model{near(head, modules)}")
    found = modules[head]
    prepared = [f"{name}." for name, module in modules.items() if isinstance(module, Injectable)]
    if any(f"{head}.".startswith(name) or name.startswith(f"{head}.") for name in prepared):
        raise ValueError(f"head={head!r} is prepared already")
    if not list(found.parameters()):
        raise ValueError(f"head={head!r} has no parameter that could be trained")
    noisy = [name for name, module in found.named_modules() if "Dropout" in type(module).__name__]
    if noisy:
        raise ValueError(
            f"head={head!r} drops at random ({noisy[0] or type(found).__name__}), so that new(x) - copy(x) would not "
            "be zero: name a module behind the dropout"
        )
    tied = shared(model, head)
    if tied is not None:
        raise ValueError(f"head={head!r} shares a parameter with {tied!r}, which would be frozen, too")
    parent, _, name = head.rpartition(".")
    made = Injectable(found, torch.Generator().manual_seed(seed)).train(found.training)
    setattr(model.get_submodule(parent), name, made)
    return model


NOT_YET, INJECTED, CHECKED = range(3)


class PlasticityInjection(Event):
    """Freezes ``h`` and trains ``new`` from the event on. It remembers whether that has been."""

    also_changes = ("requires_grad",)
    writes = False

    def begin(self, host: Host) -> int:
        trained, names = {id(p) for p in trained_by(host.optimizers)}, dict(host.model.named_parameters())
        if not list(_prepared(host)):
            raise PlanError(
                "plasticity_injection: this model has no module that was prepared for it. Call "
                "gxd.injectable(model, 'head') before the optimizer is made"
            )
        new = {id(p) for module in _prepared(host) for p in module.new.parameters()}
        missing = [name for name, p in names.items() if id(p) in new - trained]
        if missing:
            raise PlanError(
                f"plasticity_injection: not in the optimizer: {', '.join(missing)}, so it would never be trained. Make "
                "the optimizer after gxd.injectable, with all of model.parameters(), also those that are frozen now"
            )
        return NOT_YET

    def advance(self, host: Host, own: int) -> int:
        if own == INJECTED:
            _check_processes(host)
        return CHECKED if own else NOT_YET

    def act(self, host: Host, own: int) -> int:
        if own:
            return own
        for module in _prepared(host):
            _train(module.new, instead_of=module.h)
        return INJECTED

    def on_load(self, host: Host, state: EventState) -> EventState:
        for module in _prepared(host):
            if state.own:
                _train(module.new, instead_of=module.h)
            elif any(p.requires_grad for p in module.new.parameters()):  # injected since
                _train(module.h, instead_of=module.new)
        return state._replace(own=INJECTED if state.own else NOT_YET)


def _prepared(host: Host) -> Iterator[Injectable]:
    return (module for module in host.model.modules() if isinstance(module, Injectable))


def _check_processes(host: Host) -> None:
    """After the first step of the fresh head: raise RuntimeError unless all processes have made the same."""
    own = [p.detach() for module in _prepared(host) for p in module.new.parameters()]
    apart = torch.tensor(float(not all(map(torch.equal, own, host.processes.agreed(own)))), device=host.device)
    if host.processes.sum(apart):
        raise RuntimeError(
            "plasticity_injection: the processes train different heads. DistributedDataParallel notes what is trained "
            "when it is made: make it anew after the event, and after a checkpoint was loaded"
        )


def _train(module: nn.Module, instead_of: nn.Module) -> None:
    module.requires_grad_(True)
    instead_of.requires_grad_(False)
    for parameter in instead_of.parameters():
        parameter.grad = None  # a gradient of zero would let momentum go on


@register_method(
    "plasticity_injection",
    description="when the first task ends, freeze a head and train a fresh one that is added to it",
    reference="Nikishin, Oh, Ostrovski, Lyle, Pascanu, Dabney, Barreto: Deep Reinforcement Learning with Plasticity "
    "Injection, NeurIPS 2023",
    inert={"at": None},
    changes="which copy of the head is trained, once",
    needs="a head that `gxd.injectable` has prepared",
)
def plasticity_injection(at: int | None = 0) -> PlasticityInjection:
    """From ``h(x)`` to ``h(x) + new(x) - copy(x)`` with ``h`` and ``copy`` frozen, once: the output and the number of
    trained parameters stay the same, and what is trained is fresh, with fresh optimizer state.

    The model is prepared by :func:`gxd.injectable` before the optimizer is made, so that the optimizer has ``new``:
    public code that puts modules in place later trains nothing. Before the event the gradients of ``new`` and ``copy``
    cancel to rounding. A resume needs a model that is prepared alike, and takes what is frozen from the checkpoint.
    ``DistributedDataParallel`` notes what is trained when it is made: make it anew after the event, and after such a
    checkpoint was loaded; the first step thereafter checks it.

    Read in a port, not in the authors' own code. Deviation: ``at`` counts steps of the optimizer.

    Args:
        at: 0: when the first task ends; else after so many steps; None: never.
    """
    return PlasticityInjection(None if at is None else arguments.every("at", at, least=0))
