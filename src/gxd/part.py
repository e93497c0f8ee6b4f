"""One of the methods that are attached to a model: what it sees, what it remembers, and what observes for it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gxd.checkpoint import check_observed, loaded, mapped, saved
from gxd.errors import PlanError
from gxd.methods.base import Host, Method
from gxd.notices import Notices
from gxd.observe.output_gradients import OutputGradients, Pulled
from gxd.plan.units import UnitPlan
from gxd.score.scorer import Scorer
from gxd.score.state import UnitState


class Resumed(NamedTuple):
    """What a checkpoint holds of a method, checked."""

    state: Any
    generator: Tensor
    noise: Tensor | None
    observed: Mapping[str, Any] | None
    pulled: Pulled


@dataclass
class Part:
    """One attached method: what it sees, what it remembers, and what observes for it."""

    method: Method
    host: Host
    state: Any
    scorer: Scorer | None
    outputs: OutputGradients | None
    key: str
    device: torch.device
    told: bool = False  # of a step without an observation
    observed: UnitState | None = None  # what a compiled step has made of the units

    @classmethod
    def new(cls, method: Method, shared: Host, key: str, twins: int, seed: int, scaler: Any) -> Part:
        """Before the first step.

        Args:
            shared: what all methods see.
            twins: how many of this name were attached before.
        """
        if method.utility is not None and method.output_gradient is not None:
            raise PlanError(
                f"{method.name} has a utility and an output_gradient, but one of them is observed: make two methods"
            )
        # Each has generators of its own, by its name, so that one more method does not change what another one draws.
        # Those of ContinualBackprop are the seed's own.
        apart = zlib.crc32(method.name.encode()) - zlib.crc32(b"continual_backprop") + 1_000_003 * twins
        seed, processes = (seed + apart) % 2**63, shared.processes
        generator = torch.Generator().manual_seed(seed)
        noise = torch.Generator().manual_seed((seed + 1 + 7919 * processes.rank) % 2**63)
        host = replace(shared, generator=generator, notices=Notices(method.utility), done=[])
        with torch.no_grad():
            state = processes.agreed(method.init(host))
        scorer = None
        if method.utility is not None:
            scorer = Scorer(
                host.model,
                host.plan,
                host.tensors,
                method.utility,
                method.positions,
                method.decay,
                state.units,
                noise,
                processes=processes,
                notices=host.notices,
                scaler=scaler,
            )
            scorer.observer.active = method.observes(state)
        outputs = OutputGradients(method.output_gradient, noise, processes) if method.output_gradient else None
        return cls(method, host, state, scorer, outputs, key, host.device)

    @property
    def units(self) -> UnitState:
        units: UnitState = self.state.units
        return units

    @property
    def observes(self) -> bool:
        """Whether the coming step has to be observed for it."""
        return self.method.observes(self.state)

    def keep(self, state: Any) -> None:
        """This is its state now."""
        self.state = state
        if self.scorer is not None:
            self.scorer.units = self.units

    def follow_device(self) -> None:
        """Move what the method remembers to where the model is."""
        device = self.host.device
        if device != self.device:
            self.device = device
            self.keep(mapped(self.state, lambda tensor: tensor.to(device)))
            if self.scorer is not None:
                self.scorer.to(device)

    def forget(self) -> None:
        """Drop what was observed since the last step."""
        self.observed = None
        if self.scorer is not None:
            self.scorer.forget()
        if self.outputs is not None:
            self.outputs.forget()

    def saved(self) -> dict[str, Any]:
        """All that a bit-exact resume needs."""
        observing = self.scorer or self.outputs
        return {
            "utility": None if self.method.utility is None else self.method.utility.name,
            "observed": None if observing is None else observing.state_dict(),
            "generator": self.host.generator.get_state(),
            "noise": None if observing is None else observing.noise.get_state(),
            "state": saved(self.state),
        }

    def checked(self, given: Mapping[str, Any], own: Mapping[str, Any]) -> Resumed:
        """What :meth:`saved` has returned; ``own``: the same of now. Raises PlanError if it does not fit."""
        path, plan = f"methods.{self.key}", self.host.plan
        state = loaded(given["state"], self.state, f"{path}.state")
        generator = loaded(given["generator"], own["generator"], f"{path}.generator")
        noise = loaded(given["noise"], own["noise"], f"{path}.noise", own["noise"] is None)
        observed, pulled = None, Pulled()
        if self.scorer is not None:
            observed, units = given["observed"], self.units
            sizes = len(plan.views), len(plan.groups)
            check_observed(observed, units.mean, units.utility, units.gram, *sizes, f"{path}.observed")
        if self.outputs is not None:
            pulled = self.outputs.checked(given["observed"], self.host.parameters(), f"{path}.observed")
        return Resumed(state, generator, noise, observed, pulled)

    def resume(self, found: Resumed, plan: UnitPlan) -> None:
        """Go on from there."""
        self.host.plan = plan
        self.keep(found.state)
        self.host.generator.set_state(found.generator)
        if self.scorer is not None and found.noise is not None and found.observed is not None:
            self.scorer.noise.set_state(found.noise)
            self.scorer.load_state_dict(found.observed)
            self.host.notices.nonfinite = int(self.units.nonfinite)
        self.keep(self.method.on_load(self.host, self.state))
        if self.outputs is not None and found.noise is not None:
            self.outputs.noise.set_state(found.noise)
            self.outputs.pulled = found.pulled
