"""What gxd makes of one model: the plan, how much it covers, and whether the model survives."""

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

import gxd
from tests.model_zoo import coverage, damage
from tests.model_zoo.calls import Factory, Inputs, run
from tests.model_zoo.proof import disprove, is_provable

CHECKED = 6  # groups of a model: `check` runs the whole model several times for each


@dataclass
class Measured:
    """What was found out about one model.

    Attributes:
        seconds: of one call of ``find_units``.
        layers, rows: of all weights but those of the output layers (see :mod:`tests.model_zoo.coverage`).
        skip, group: the share of the rows that a plan with this setting of ``residual`` covers.
        groups: of the plan with ``residual="skip"``.
        error: why there is no plan.
        damage: what ``find_units`` or ``check`` has changed about the model.
        disproof: what is wrong with the plans.
        unproved: groups of both plans behind a norm without a module, which cannot be held still for the proof.
        check: the verdicts of ``gxd.verify_plan`` on some groups, counted, or how it crashed.
        verdicts: of these groups, in words.
        reasons: (reason, module) -> the rows that it costs, with ``residual="skip"``.
        group_reasons: the same with ``residual="group"``.
    """

    name: str
    seconds: float = 0.0
    layers: int = 0
    rows: int = 0
    skip: float = 0.0
    group: float = 0.0
    groups: int = 0
    error: str = ""
    damage: list[str] = field(default_factory=list)
    disproof: list[str] = field(default_factory=list)
    unproved: int = 0
    check: str = ""
    verdicts: dict[str, str] = field(default_factory=dict)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    group_reasons: Counter[tuple[str, str]] = field(default_factory=Counter)


def evaluated(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The outputs in evaluation mode; the modes are given back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.no_grad():
        outputs = [tensor.clone() for tensor in run(model, inputs)]
    for module, mode in modes:
        module.training = mode
    return outputs


def measure(name: str, factory: Factory) -> Measured:
    """Build a model, find its units both ways, prove and check the plans, and see what has changed meanwhile."""
    torch.manual_seed(0)
    model, inputs = factory()
    model.train()
    found = Measured(name)
    outputs = evaluated(model, inputs)  # also fills what a model keeps from its first pass
    weights = coverage.weights(model, inputs)
    found.layers, found.rows = len(weights), sum(weight.rows for weight in weights.values())
    before = damage.record(model)
    start = time.perf_counter()
    try:
        plan = gxd.find_units(model, inputs)
        found.seconds = time.perf_counter() - start
        grouped = gxd.find_units(model, inputs, residual="group")
        if isinstance(inputs, Mapping):  # Hugging Face models put hooks on themselves when first asked for these
            with suppress(gxd.TraceError):
                gxd.find_units(model, {**inputs, "output_hidden_states": True})
    except gxd.TraceError as error:
        found.error = str(error).splitlines()[0]
        found.damage = damage.changes(before, damage.record(model))
        return found
    found.damage = damage.changes(before, damage.record(model))
    found.damage += [f"a fake tensor in {place}" for place in damage.fake_tensors(model)]
    again = evaluated(model, inputs)
    if len(again) != len(outputs) or not all(map(torch.equal, outputs, again)):
        found.damage.append("the outputs are not what they were")
    covered, both = coverage.covered_rows(model, plan), coverage.covered_rows(model, grouped)
    found.skip, found.group = coverage.share(weights, covered), coverage.share(weights, both)
    found.groups = len(plan.groups)
    found.reasons = coverage.reasons(weights, covered, plan)
    found.group_reasons = coverage.reasons(weights, both, grouped)
    for either in (plan, grouped):
        found.disproof += disprove(model, inputs, either)
        found.unproved += sum(not is_provable(group) for group in either.groups)
    before = damage.record(model)
    try:
        verdicts = gxd.verify_plan(model, inputs, plan=_sample(plan)).groups
        found.verdicts = {verdict.name: f"{verdict.status}: {verdict.detail}" for verdict in verdicts}
        found.check = ", ".join(f"{n} {status}" for status, n in sorted(Counter(v.status for v in verdicts).items()))
    except Exception as error:  # whatever it is, it is what is to be known
        found.check = f"crashed: {type(error).__name__}: {str(error).split(chr(10))[0]}"
    found.damage += [f"by check: {change}" for change in damage.changes(before, damage.record(model))]
    return found


def _sample(plan: gxd.UnitPlan) -> gxd.UnitPlan:
    """The plan with some of its groups only, from all over the model."""
    every = max(1, -(-len(plan.groups) // CHECKED))
    return replace(plan, groups=plan.groups[::every])
