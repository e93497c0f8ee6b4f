"""The laws that every plasticity method obeys, each a function of a case.

A law raises :class:`ContractError` and names what differs. All compare trainings of the network of
:mod:`gxd.testing.training`, bit for bit, but for compiled steps.
"""

from __future__ import annotations

import copy
import io
import random
import sys
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd
from gxd.checkpoint import mapped, saved
from gxd.compile import program
from gxd.testing.case import Case, case_of
from gxd.testing.training import STEPS, Training, batch, new_task, plain, plan_of

Law = Callable[[Case], None]


class ContractError(AssertionError):
    """A method breaks a law. The message says which, and where it was seen."""


def check_method(method: str | Case, **options: Any) -> None:
    """Raise :class:`ContractError` unless a method obeys every law.

    Args:
        method: the name it is registered under, or a case of your own: of a selector, say, or of two utilities.
        options: of a registered method, as for :func:`case_of`: that make it act within six steps.

    Example::

        gxd.testing.check_method("clip", bound=0.01)
    """
    case = case_of(method, **options) if isinstance(method, str) else method
    for law in LAWS:
        try:
            with torch.random.fork_rng():
                law(case)
        except Exception as error:
            sentence = law.__name__.replace("_", " ")
            hint = f" {' '.join(law.__doc__.split())}" if law.__doc__ else ""
            raise ContractError(f"{case} breaks the law '{sentence}': {error}.{hint}") from error


@cache
def trained(case: Case) -> Training:
    """With the method as it acts."""
    return Training(case.make()).run()


# --- the laws ---------------------------------------------------------------------------------------------------------


def inert_options_leave_training_as_it_is_bit_for_bit(case: Case) -> None:
    """`inert`, as it was registered, names the options under which the method changes nothing."""
    agree(Training(case.inert()).run().weights, plain().weights)


def what_acts_changes_training(case: Case) -> None:
    """Else the other laws say nothing of it."""
    require(
        first_difference(trained(case).weights, plain().weights) is not None,
        "it changes nothing within six steps; give options with which it does",
    )


def a_run_is_resumed_exactly_also_between_two_micro_batches(case: Case) -> None:
    """What it remembers is all in the state that its functions return, and its random numbers are the host's."""
    is_resumed_exactly(lambda: [case.make()])


def is_resumed_exactly(make: Callable[[], list[gxd.Method]]) -> None:
    """The same, of several methods at once."""
    expected = Training(*make()).run()
    for stop in (2, 3, 4):
        saver = Training(*make()).run(stop=stop)
        saver.pass_part(stop, 0)
        file = io.BytesIO()
        gradients = [p.grad for p in saver.model.parameters()]
        torch.save((saver.weights, gradients, saver.attached.state_dict()), file)
        file.seek(0)
        weights, gradients, attached = torch.load(file, weights_only=True)
        resumed = Training(*make())
        resumed.run(stop=2)  # what it has seen is forgotten
        resumed.model.load_state_dict(weights["model"])
        resumed.optimizer.load_state_dict(weights["optimizer"])
        resumed.attached.load_state_dict(attached)
        for parameter, gradient in zip(resumed.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        for training in (saver, resumed):  # to save does not disturb the one that goes on
            training.pass_part(stop, 1)
            training.finish_step(stop)
            training.run(stop + 1)
            who = f"{'resumed' if training is resumed else 'saved'} in step {stop}"
            agree(training.weights, expected.weights, who)
            agree(training.attached.state_dict(), expected.attached.state_dict(), who)


def a_compiled_step_does_the_same_or_says_why_it_is_eager(case: Case) -> None:
    """Only gradients that it rewrites, or reads of the output, are a reason."""
    why = is_compiled_alike(lambda: [case.make()])
    method = case.make()
    if why is not None:
        rewrites = type(method).before_step is not gxd.Method.before_step
        stated = (rewrites or method.output_gradient is not None) and method.name in why
        require(stated, f"the step is eager, and only says: {why}")


def is_compiled_alike(make: Callable[[], list[gxd.Method]]) -> str | None:
    """The same, of several methods at once. Returns why it is eager."""
    eager, compiled = (Training(*make(), dtype=torch.float64, dropout=0.0) for _ in range(2))
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
    """Each step is compared with the same one without the method. Frozen parameters are no method's, and buffers only
    of one whose `also_changes` says so.
    """
    training, method = Training(case.make()), case.make()
    fixed = {"frozen", "temperature"}
    if "buffers" not in method.also_changes:
        fixed |= {"bn.num_batches_tracked"} if method.needs_units else set(dict(training.model.named_buffers()))
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
                require(not changed.any(), f"{name} has changed in step {step}")
            elif method.needs_units:
                require(not (changed & ~units[name]).any(), f"{name} has changed beyond the units, in step {step}")
    require(total > 0 or not method.needs_units, "no unit was reset")


def everything_else_is_left_as_it_was_found(case: Case) -> None:
    """Random numbers come from `host.generator`; what is trained, and what is in training mode, is the user's."""
    training, method = Training(dropout=0.0), case.make()
    training.model.norm.eval()  # as a user may leave a part of it
    before = outside(training, method)
    attached = gxd.attach(training.model, training.optimizer, method, plan=plan_of(torch.float32))
    agree(outside(training, method), before, "when it was attached")
    for x, y in map(batch, range(STEPS)):
        logits = training.model(x)
        attached.observe(logits, y)
        F.cross_entropy(logits, y).backward()
        training.optimizer.step()
        agree(outside(training, method), before, "after a step")
    attached.boundary(*new_task())
    attached.load_state_dict(attached.state_dict())
    attached.close()
    agree(outside(training, method), before, "after boundary(), load_state_dict() and close()")


def close_removes_every_hook_and_training_is_plain_again(case: Case) -> None:
    """And every attribute."""
    training = Training()
    hooks = hooks_of(training)
    attached = gxd.attach(training.model, training.optimizer, case.make(), plan=plan_of(torch.float32))
    training.attached = attached
    training.run(stop=4)
    attached.close()
    training.attached = None
    agree(hooks_of(training), hooks, "after close()")
    copied = Training().load(training)
    agree(training.run(4).weights, copied.run(4).weights, "after close()")


def calls_that_a_method_does_not_need_are_harmless(case: Case) -> None:
    """Such as `observe()`, of one that scores no units, and `boundary()`, of one that does nothing there."""
    method = case.make()
    expected = trained(case)
    if not method.needs_observe:
        unobserved = Training(case.make()).run(observe=False)
        agree(everything(unobserved), everything(expected), "without observe()")
        unobserved.attached.observe()  # of nothing
    if type(method).at_boundary is gxd.Method.at_boundary:
        unbounded = Training(case.make()).run(boundary=False)
        agree(everything(unbounded), everything(expected), "without boundary()")


def the_state_goes_through_a_map_of_its_tensors(case: Case) -> None:
    """As it does on its way to another device."""
    expected, training = (Training(case.make(), dtype=torch.float64) for _ in range(2))
    training.run(stop=4)
    for part in training.attached._parts:
        there = mapped(part.state, lambda tensor: tensor.to("meta"))
        require({tensor.device.type for tensor in tensors(there)} <= {"meta"}, "a tensor stayed on its device")
        before, part.state = part.state, mapped(part.state, torch.clone)
        require(type(part.state) is type(before), "its state is of another type afterwards")
        both = {id(t) for t in tensors(before)} & {id(t) for t in tensors(part.state)}
        require(not both, "a tensor of its state was not mapped")
        if part.scorer is not None:
            part.scorer.units = part.units
    agree(training.run(4).weights, expected.run().weights)


def the_state_has_the_precision_of_the_model(case: Case) -> None:
    """As `torch.zeros_like(parameter)` has."""
    for dtype in (torch.float32, torch.float64):
        training = Training(case.make(), dtype=dtype).run(stop=4)
        kinds = {t.dtype for part in training.attached._parts for t in tensors(part.state) if t.is_floating_point()}
        require(kinds <= {dtype}, f"its state has {kinds} where the model has {dtype}")


OTHERS = ("continual_backprop", "l2_init")  # one that observes and resets units, and one that writes to parameters


def another_method_that_is_inert_changes_nothing(case: Case) -> None:
    """Whether it comes before or after."""
    expected = trained(case)
    for name in OTHERS:
        other = case_of(name).inert
        for methods, own in (((case.make(), other()), 0), ((other(), case.make()), 1)):
            if own and methods[0].name == methods[1].name:
                continue  # of two of the same name, the second draws other numbers
            both = Training(*methods).run()
            agree(everything(both, own), everything(expected), f"{'after' if own else 'before'} {name}")


def states_are_replaced_and_not_written_to(case: Case) -> None:
    """So that a step that fails leaves the state as it was: its tensors, its numbers, and what it is made of."""
    for others in ([], [case_of("continual_backprop").make()]):  # which tells of the units that it has reset
        training = Training(case.make(), *others)
        part = training.attached._parts[0]
        for step in range(STEPS):
            state, kept = part.state, saved(part.state)
            training.run(step, step + 1)
            with training.attached.evaluating():
                agree(saved(state), kept, f"step {step} has written to the old state")


def a_deep_copy_goes_on_as_the_original(case: Case) -> None:
    """And neither has an effect on the other."""
    expected = trained(case)
    first = Training(case.make()).run(stop=4)
    second = copy.deepcopy(first)
    for training in (first, second):
        training.run(4)
        agree(everything(training), everything(expected), "the original" if training is first else "the copy")
    second.attached.close()
    agree(hooks_of(second), hooks_of(copy.deepcopy(plain())), "a copy that was closed")


def evaluation_between_two_steps_changes_nothing(case: Case) -> None:
    """With and without gradients."""
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
    agree(everything(training), everything(expected))


def one_value_may_be_attached_to_two_models(case: Case) -> None:
    """Each has a state, a plan, and settings of its own."""
    expected = trained(case)
    method = case.make()
    training = Training(method)
    torch.manual_seed(0)
    other = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 2), nn.Linear(2, 2))
    other = gxd.injectable(other, "4")
    gxd.attach(other, torch.optim.SGD(other.parameters(), 0.1), method, example_inputs=torch.zeros(2, 4))
    agree(training.run().weights, expected.weights)


LAWS: tuple[Law, ...] = (
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


# --- what they compare ------------------------------------------------------------------------------------------------


def require(condition: bool | Tensor, message: str) -> None:
    """Raise unless it holds."""
    if not condition:
        raise ContractError(message)


def agree(left: Any, right: Any, where: str = "") -> None:
    """Raise unless two values are the same bit for bit, through dicts and lists; say what differs first."""
    found = first_difference(left, right)
    require(found is None, f"{where}{', ' * bool(where)}{found} differs")


def first_difference(left: Any, right: Any, name: str = "") -> str | None:
    """The name of what differs first, or None."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in [*left, *right]:
            path = f"{name}.{key}" if name else str(key)
            if key not in left or key not in right:
                return path
            if (found := first_difference(left[key], right[key], path)) is not None:
                return found
        return None
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)) and len(left) == len(right):
        return first_difference(dict(enumerate(left)), dict(enumerate(right)), name)
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return None if left.dtype == right.dtype and equal(left, right) else name
    both_nan = left != left and right != right
    return None if type(left) is type(right) and (left == right or both_nan) else name


def equal(left: Tensor, right: Tensor) -> bool:
    """Element by element; a NaN equals a NaN."""
    if left.shape != right.shape or not left.is_floating_point():
        return torch.equal(left, right)
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def everything(training: Training, method: int = -1) -> dict[str, Any]:
    """Weights, what the optimizer remembers, and what one of the methods does."""
    return {**training.weights, "state": training.state(method)}


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


def outside(training: Training, method: gxd.Method) -> Any:
    """What a method has no business with."""
    model = training.model
    options = [{k: v for k, v in group.items() if k != "params"} for group in training.optimizer.param_groups]
    frozen = {} if "requires_grad" in method.also_changes else {n: p.requires_grad for n, p in model.named_parameters()}
    numpy = sys.modules.get("numpy")
    return {
        "the random state of torch": torch.get_rng_state(),
        "the random state of numpy": None if numpy is None else _plain(numpy.random.get_state()),
        "the random state of Python": random.getstate(),
        "requires_grad": frozen,
        "the options of the optimizer, group": options,
        "training": {name: module.training for name, module in model.named_modules()},
        "whether gradients are enabled": torch.is_grad_enabled(),
        "the default dtype": torch.get_default_dtype(),
    }


def _plain(state: Any) -> tuple[Any, ...]:
    return (state[0], state[1].tolist(), *state[2:])


def hooks_of(training: Training) -> Any:
    """Of its model and optimizer."""
    return hooks_on(training.model, training.optimizer)


def hooks_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """How many hooks of each kind hang on each module and on the optimizer, and all attributes by name."""
    things = {**dict(model.named_modules()), "optimizer": optimizer}
    return {
        name: {key: len(value) if "hooks" in key else None for key, value in vars(thing).items()}
        for name, thing in things.items()
    }


def tensors(state: Any) -> list[Tensor]:
    """All that a state is made of."""
    found: list[Tensor] = []
    mapped(state, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found
