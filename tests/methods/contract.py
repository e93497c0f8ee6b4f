"""What every plasticity method has to obey: the laws, each a function of a case, and the cases of a registry.

A method that is registered is a case without a line here: options that are named as those of others are set so that
something happens within a few steps. `tests/methods/test_contract.py` runs every law on every case, and a user's own
method obeys them, too, if `obeys(case_of(name))` returns.
"""

import copy
import inspect
import io
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd
from gxd.checkpoint import mapped
from gxd.compile import program
from gxd.methods.unit_reset import UnitReset
from gxd.select import Selector
from gxd.select.normalise import NORMALISATIONS
from tests.rig import same

STEPS, PARTS = 6, 2
# What makes something happen in so few steps, wherever a method has an option of that name.
LIVELY = {
    "replacement_rate": 0.2,
    "rate": 0.2,
    "maturity": 1,
    "every": 3,
    "threshold": 0.7,
    "strength": 0.5,
    "fraction": 0.3,
    "blend": 0.3,
    "sharpness": 2.0,
    "most": 2,
    "calibrate": 2,
    "zeta": 0.5,
    "at": 4,
    "factor": 0.5,
}
# Of single methods and selectors, where that is not enough, or too much.
ACTS: dict[str, dict[str, Any]] = {
    "unit_reset": {"rate": 0.2, "maturity": 1},
    "redo": {},
    "regrama": {"most": 1.0},
    "snr": {"every": 1},
    "Threshold": {"most": 1.0},
    "SilenceTest": {"every": 1},
}
SELECTIONS = {
    "lowest_set": {"rate": 0.2, "maturity": 1, "score": "gxd_kl"},
    "threshold": {"threshold": 0.7, "every": 3, "normalise": "none"},
    "lowest_fraction": {"fraction": 0.3, "every": 3, "normalise": "age"},
    "silence_test": {"score": "silence", "most": 1, "decay": 0.0},
    "soft": {"every": 3, "incoming": "initial", "outgoing": 0.5, "memories": "reset"},
}


@dataclass(frozen=True)
class Case:
    """A method in two settings: one that acts, and one that changes nothing."""

    label: str
    make: Callable[[], gxd.Method]
    inert: Callable[[], gxd.Method]

    def __str__(self) -> str:
        return self.label


def lively(known: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in LIVELY.items() if name in known}


def case_of(name: str, label: str | None = None, **options: Any) -> Case:
    """Of a registered method."""
    info = gxd.methods()[name]
    known = {option: default for option, default in info.options.items() if default is not None}
    acting = {**lively(known), **ACTS.get(name, {}), **options}
    return Case(
        label or name,
        lambda: gxd.method(name, **acting),
        lambda: gxd.method(name, **{**acting, **info.inert}),
    )


def method_cases() -> Iterator[Case]:
    """Every method that is registered, and once more with each of its switches the other way round."""
    for name, info in gxd.methods().items():
        yield case_of(name)
        for option, default in info.options.items():
            if isinstance(default, bool):
                yield case_of(name, f"{name} {option}={not default}", **{option: not default})
    for selection, options in SELECTIONS.items():
        options = {"rate": None, "maturity": None, "selection": selection, **options}
        yield Case(f"unit_reset {selection}", case_of("unit_reset", **options).make, case_of("unit_reset").inert)


def utility_cases() -> Iterator[Case]:
    for utility in gxd.utilities():
        yield case_of("continual_backprop", f"utility {utility}", utility=utility)


def selector_cases() -> Iterator[Case]:
    """Every selector, and the first with every normalisation."""
    for number, kind in enumerate(selectors()):
        known = {name: p.default for name, p in inspect.signature(kind).parameters.items()}
        options = {**lively(known), **ACTS.get(kind.__name__, {})}
        off = {**options, **{name: 0 for name in ("rate", "every") if name in known}}
        utility = "silence" if kind is gxd.SilenceTest else "gxd_sketch" if kind.pairs else "activation"
        for normalise in (None,) if number else (None, *NORMALISATIONS):
            make = partial(UnitReset, utility, normalise=normalise)
            yield Case(
                " ".join(["selector", kind.__name__, *([normalise] if normalise else [])]),
                lambda kind=kind, make=make, options=options: make(kind(**options)),
                lambda kind=kind, make=make, off=off: make(kind(**off)),
            )


def selectors(kind: type = Selector) -> Iterator[type]:
    """Those of the library. One that another test of this process has defined is its own, and may still live."""
    for each in kind.__subclasses__():
        if each.__module__.startswith("gxd."):
            yield each
            yield from selectors(each)


# --- a small training -------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Convolution and BatchNorm, Linear and LayerNorm, one without a norm; a shortcut that is prepared for an
    injection; a buffer, and a parameter that is frozen.
    """

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn = nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5)
        self.fc1, self.norm, self.fc2 = nn.Linear(20, 10), nn.LayerNorm(10), nn.Linear(10, 8)
        self.dropout, self.shortcut, self.head = nn.Dropout(dropout), nn.Linear(16, 3), nn.Linear(8, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("temperature", torch.tensor(2.0))
        gxd.injectable(self, "shortcut")

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn(self.conv(x))).flatten(1)
        h = self.dropout(torch.tanh(self.norm(self.fc1(h))))
        return (self.head(F.relu(self.fc2(h))) + self.shortcut(x.flatten(1))) * self.temperature + self.frozen


@cache
def plan_of(dtype: torch.dtype) -> gxd.UnitPlan:
    return gxd.find_units(Net().to(dtype), torch.zeros(2, 1, 4, 4, dtype=dtype))


def batch(number: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randn(6, 1, 4, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)


def new_task(rank: int = 0, dtype: torch.dtype = torch.float32) -> tuple[list[tuple[Tensor, Tensor]], Any]:
    """What a method may ask for at a boundary."""
    return [(x.to(dtype), y) for x, y in (batch(number, rank) for number in (51, 52))], F.cross_entropy


class Training:
    """A model in training on accumulated micro-batches; the end of a task comes after the third step."""

    def __init__(
        self,
        *methods: gxd.Method,
        dtype: torch.dtype = torch.float32,
        dropout: float = 0.2,
        wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
        rank: int = 0,
    ) -> None:
        self.model, self.rank, self.dtype, self.wrap = Net(dropout).to(dtype), rank, dtype, wrap
        self.called, self.learns = wrap(self.model), self.what_learns()
        trained = [p for p in self.model.parameters() if p is not self.model.frozen]
        head = len(list(self.model.head.parameters()))
        groups = [{"params": trained[:-head]}, {"params": trained[-head:], "lr": 0.01}]
        self.optimizer = torch.optim.Adam(groups, 0.02)
        self.attached = gxd.attach(self.called, self.optimizer, *methods, plan=plan_of(dtype)) if methods else None

    def what_learns(self) -> list[bool]:
        return [p.requires_grad for p in self.model.parameters()]

    def pass_part(self, step: int, part: int, observe: bool = True) -> None:
        """A micro-batch, forward and backward."""
        x, y = (one.chunk(PARTS)[part] for one in batch(step, self.rank))
        torch.manual_seed(PARTS * step + part)  # of dropout
        logits = self.called(x.to(self.dtype))
        if self.attached is not None and observe:
            self.attached.observe(logits, y)
        (F.cross_entropy(logits, y) / PARTS).backward()

    def finish_step(self, step: int, boundary: bool = True) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        if boundary and self.attached is not None and step == 2:
            self.attached.boundary(*new_task(self.rank, self.dtype))
        if self.what_learns() != self.learns:  # which a wrapper notes when it is made
            self.called, self.learns = self.wrap(self.model), self.what_learns()

    def run(self, start: int = 0, stop: int = STEPS, observe: bool = True, boundary: bool = True) -> "Training":
        with warnings.catch_warnings():
            warnings.simplefilter("error", gxd.ObservationWarning)
            for step in range(start, stop):
                for part in range(PARTS):
                    self.pass_part(step, part, observe)
                self.finish_step(step, boundary)
        return self

    def load(self, other: "Training") -> "Training":
        """Go on from where another one is."""
        self.model.load_state_dict(other.model.state_dict())
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        for parameter, theirs in zip(self.model.parameters(), other.model.parameters(), strict=True):
            parameter.requires_grad_(theirs.requires_grad)
        return self

    @property
    def weights(self) -> Any:
        """Parameters, buffers, and what the optimizer remembers."""
        return self.model.state_dict(), self.optimizer.state_dict()

    def state(self, method: int = -1) -> Any:
        """Of one of the methods, as it is saved."""
        assert self.attached is not None
        return list(self.attached.state_dict()["methods"].values())[method]


@cache
def plain(dtype: torch.dtype = torch.float32) -> Training:
    return Training(dtype=dtype).run()


@cache
def trained(case: Case) -> Training:
    return Training(case.make()).run()


# --- the laws ---------------------------------------------------------------------------------------------------------


def inert_options_leave_training_as_it_is_bit_for_bit(case: Case) -> None:
    assert same(Training(case.inert()).run().weights, plain().weights)


def what_acts_changes_training(case: Case) -> None:
    """Else the other laws say nothing of it."""
    assert not same(trained(case).weights, plain().weights)


def a_run_is_resumed_exactly_also_between_two_micro_batches(case: Case) -> None:
    is_resumed_exactly(lambda: [case.make()])


def is_resumed_exactly(make: Callable[[], list[gxd.Method]]) -> None:
    expected = Training(*make()).run()
    assert expected.attached is not None
    for stop in (2, 3, 4):
        saver = Training(*make()).run(stop=stop)
        saver.pass_part(stop, 0)
        file = io.BytesIO()
        gradients = [p.grad for p in saver.model.parameters()]
        assert saver.attached is not None
        torch.save((saver.weights, gradients, saver.attached.state_dict()), file)
        file.seek(0)
        (model, optimizer), gradients, attached = torch.load(file, weights_only=True)
        resumed = Training(*make())
        resumed.run(stop=2)  # what it has seen is forgotten
        assert resumed.attached is not None
        resumed.model.load_state_dict(model)
        resumed.optimizer.load_state_dict(optimizer)
        resumed.attached.load_state_dict(attached)
        for parameter, gradient in zip(resumed.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        for training in (saver, resumed):  # to save does not disturb the one that goes on
            assert training.attached is not None
            training.pass_part(stop, 1)
            training.finish_step(stop)
            training.run(stop + 1)
            assert same(training.weights, expected.weights)
            assert same(training.attached.state_dict(), expected.attached.state_dict())


def a_compiled_step_does_the_same_or_says_why_it_is_eager(case: Case) -> None:
    why = is_compiled_alike(lambda: [case.make()])
    method = case.make()
    if why is not None:
        rewrites = type(method).before_step is not gxd.Method.before_step
        assert (rewrites or method.output_gradient is not None) and method.name in why


def is_compiled_alike(make: Callable[[], list[gxd.Method]]) -> str | None:
    """Returns why it is eager."""
    eager, compiled = (Training(*make(), dtype=torch.float64, dropout=0.0) for _ in range(2))
    assert eager.attached is not None
    with warnings.catch_warnings(), mock.patch.object(program, "compile_graph", lambda graph, example: graph):
        warnings.simplefilter("ignore", gxd.CompileWarning)
        step = gxd.compiled_step(compiled.model, compiled.optimizer, F.cross_entropy, compiled.attached)
        for number in range(STEPS):
            x, y = batch(number)
            step(x.double(), y)
            logits = eager.model(x.double())
            eager.attached.observe(logits, y)
            F.cross_entropy(logits, y).backward()
            eager.optimizer.step()
            eager.optimizer.zero_grad()
    torch.testing.assert_close(compiled.model.state_dict(), eager.model.state_dict())
    return step.why_eager


def a_reset_writes_to_its_units_and_to_nothing_else(case: Case) -> None:
    """Each step is compared with the same one without the method."""
    training, method = Training(case.make()), case.make()
    assert training.attached is not None
    fixed = ["frozen", "temperature"] + ["bn.num_batches_tracked"] * ("buffers" not in method.also_changes)
    total = 0
    for step in range(STEPS):
        before = Training().load(training)
        training.run(step, step + 1, boundary=False)
        expected = before.run(step, step + 1).model.state_dict()
        resets = training.attached.last_resets
        total += sum(map(len, resets.values()))
        units = elements(training.attached.plan, resets, expected)
        for name, tensor in training.model.state_dict().items():
            changed = tensor != expected[name]
            if name in fixed:
                assert not changed.any(), name
            elif method.needs_units:
                assert not (changed & ~units[name]).any(), f"{name} in step {step}"
    if method.needs_units:
        assert total > 0


def everything_else_is_left_as_it_was_found(case: Case) -> None:
    """Global random states, what is trained, what is in training."""
    training, method = Training(dropout=0.0), case.make()
    training.model.norm.eval()  # as a user may leave a part of it
    before = outside(training.model, method)
    attached = gxd.attach(training.model, training.optimizer, method, plan=plan_of(torch.float32))
    assert same(outside(training.model, method), before)
    for x, y in map(batch, range(STEPS)):
        logits = training.model(x)
        attached.observe(logits, y)
        F.cross_entropy(logits, y).backward()
        training.optimizer.step()
        assert same(outside(training.model, method), before)
    attached.boundary(*new_task())
    attached.load_state_dict(attached.state_dict())
    attached.close()
    assert same(outside(training.model, method), before)


def close_removes_every_hook_and_training_is_plain_again(case: Case) -> None:
    training = Training()
    hooks = hooks_of(training)
    attached = gxd.attach(training.model, training.optimizer, case.make(), plan=plan_of(torch.float32))
    training.attached = attached
    training.run(stop=4)
    attached.close()
    training.attached = None
    assert hooks_of(training) == hooks
    copied = Training().load(training)
    assert same(training.run(4).weights, copied.run(4).weights)


def calls_that_a_method_does_not_need_are_harmless(case: Case) -> None:
    method = case.make()
    expected = trained(case)
    if not method.needs_observe:
        unobserved = Training(case.make()).run(observe=False)
        assert same((unobserved.weights, unobserved.state()), (expected.weights, expected.state()))
        assert unobserved.attached is not None
        unobserved.attached.observe()  # of nothing
    if type(method).at_boundary is gxd.Method.at_boundary:
        unbounded = Training(case.make()).run(boundary=False)
        assert same((unbounded.weights, unbounded.state()), (expected.weights, expected.state()))


def the_state_goes_through_a_map_of_its_tensors(case: Case) -> None:
    """As it does on its way to another device."""
    expected, training = (Training(case.make(), dtype=torch.float64) for _ in range(2))
    training.run(stop=4)
    assert training.attached is not None
    for part in training.attached._parts:
        there = mapped(part.state, lambda tensor: tensor.to("meta"))
        assert {tensor.device.type for tensor in tensors(there)} <= {"meta"}
        before, part.state = part.state, mapped(part.state, torch.clone)
        assert type(part.state) is type(before)
        assert not {id(t) for t in tensors(before)} & {id(t) for t in tensors(part.state)}
        if part.scorer is not None:
            part.scorer.units = part.units
    assert same(training.run(4).weights, expected.run().weights)


def the_state_has_the_precision_of_the_model(case: Case) -> None:
    for dtype in (torch.float32, torch.float64):
        training = Training(case.make(), dtype=dtype).run(stop=4)
        assert training.attached is not None
        kinds = {t.dtype for part in training.attached._parts for t in tensors(part.state) if t.is_floating_point()}
        assert kinds <= {dtype}


OTHERS = ("continual_backprop", "l2_init")  # one that observes and resets units, and one that writes to parameters


def another_method_that_is_inert_changes_nothing(case: Case) -> None:
    expected = trained(case)
    for name in OTHERS:
        other = case_of(name).inert
        for methods, own in (((case.make(), other()), 0), ((other(), case.make()), 1)):
            if own and methods[0].name == methods[1].name:
                continue  # of two of the same name, the second draws other numbers
            both = Training(*methods).run()
            assert same(both.weights, expected.weights), f"{name}, {own}"
            assert same(both.state(own), expected.state()), f"{name}, {own}"


def states_are_replaced_and_not_written_to(case: Case) -> None:
    """So a step that fails leaves the state before it."""
    training = Training(case.make())
    assert training.attached is not None
    (part,) = training.attached._parts
    for step in range(STEPS):
        state, kept = part.state, mapped(part.state, torch.clone)
        training.run(step, step + 1)
        assert all(map(torch.equal, tensors(state), tensors(kept)))


def a_deep_copy_goes_on_as_the_original(case: Case) -> None:
    """And neither has an effect on the other."""
    expected = trained(case)
    first = Training(case.make()).run(stop=4)
    second = copy.deepcopy(first)
    for training in (first, second):
        training.run(4)
        assert same((training.weights, training.state()), (expected.weights, expected.state()))
    assert second.attached is not None
    second.attached.close()
    assert hooks_of(second) == hooks_of(copy.deepcopy(plain()))


def evaluation_between_two_steps_changes_nothing(case: Case) -> None:
    expected, training = trained(case), Training(case.make())
    x = batch(99)[0]
    for step in range(STEPS):
        training.model.eval()
        training.model(x).sum().backward()
        training.optimizer.zero_grad()
        with torch.no_grad():
            training.model(x)
        training.model.train()
        training.run(step, step + 1)
    assert same((training.weights, training.state()), (expected.weights, expected.state()))


def one_value_may_be_attached_to_two_models(case: Case) -> None:
    """Each has a state, a plan, and settings of its own."""
    expected = trained(case)
    method = case.make()
    training = Training(method)
    torch.manual_seed(0)
    other = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 2), nn.Linear(2, 2))
    other = gxd.injectable(other, "4")
    gxd.attach(other, torch.optim.SGD(other.parameters(), 0.1), method, example_inputs=torch.zeros(2, 4))
    assert same(training.run().weights, expected.weights)


LAWS: tuple[Callable[[Case], None], ...] = (
    inert_options_leave_training_as_it_is_bit_for_bit,
    what_acts_changes_training,
    a_run_is_resumed_exactly_also_between_two_micro_batches,
    a_compiled_step_does_the_same_or_says_why_it_is_eager,
    a_reset_writes_to_its_units_and_to_nothing_else,
    everything_else_is_left_as_it_was_found,
    close_removes_every_hook_and_training_is_plain_again,
    calls_that_a_method_does_not_need_are_harmless,
    the_state_goes_through_a_map_of_its_tensors,
    the_state_has_the_precision_of_the_model,
    another_method_that_is_inert_changes_nothing,
    states_are_replaced_and_not_written_to,
    a_deep_copy_goes_on_as_the_original,
    evaluation_between_two_steps_changes_nothing,
    one_value_may_be_attached_to_two_models,
)


def obeys(case: Case) -> None:
    for law in LAWS:
        law(case)


# --- help -------------------------------------------------------------------------------------------------------------


def elements(plan: gxd.UnitPlan, resets: dict[str, Tensor], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Which elements of each tensor are those of the units of these numbers: their rows, their entries in norms, their
    columns, and where their mean goes. One by one.
    """
    found = {name: torch.zeros_like(tensor, dtype=torch.bool) for name, tensor in like.items()}
    for group in plan.groups:
        for unit in resets.get(group.name, torch.zeros(0)).tolist():
            for producer in group.producers:
                found[producer.weight][producer.rows[unit]] = True
                if producer.bias is not None:
                    found[producer.bias][producer.bias_rows[unit]] = True
            for norm in group.norms:
                for name in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
                    if name is not None:
                        found[name][norm.entries[unit]] = True
            for view in group.views:
                for consumer in view.consumers:
                    for column in view.columns[unit].tolist():
                        found[consumer.weight][:, column] = True
                    if consumer.bias is not None:
                        found[consumer.bias][:] = True
    return found


def outside(model: nn.Module, method: gxd.Method) -> Any:
    """What a method has no business with."""
    frozen = {} if "requires_grad" in method.also_changes else {n: p.requires_grad for n, p in model.named_parameters()}
    state = np.random.get_state()
    return (
        torch.get_rng_state(),
        (state[0], state[1].tolist(), state[2:]),
        random.getstate(),
        frozen,
        {name: module.training for name, module in model.named_modules()},
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
    )


def hooks_of(training: Training) -> Any:
    return hooks_on(training.model, training.optimizer)


def hooks_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """How many hooks of each kind hang on each module and on the optimizer, and all attributes by name."""
    things = {**dict(model.named_modules()), "optimizer": optimizer}
    return {
        name: {key: len(value) if "hooks" in key else None for key, value in vars(thing).items()}
        for name, thing in things.items()
    }


def tensors(state: Any) -> list[Tensor]:
    found: list[Tensor] = []
    mapped(state, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found
