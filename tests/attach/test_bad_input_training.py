"""A wrong observation, step or state is refused and leaves no trace: parameters, buffers, optimizer state and
statistics are compared bit for bit. What is not finite is left out.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd
from tests.rig import (
    FIVE,
    INF,
    LOCAL,
    NAN,
    OBSERVED,
    Rig,
    X,
    Y,
    attach,
    look,
    mlp,
    named,
    plan_of,
    refused,
    same,
    sgd,
    snapshot,
)

# --- observe() --------------------------------------------------------------------------------------------------------


@dataclass
class CausalLMOutput:
    """Like the outputs of a model of transformers."""

    logits: Tensor


def see(*arguments: Any, **keywords: Any) -> Callable[[Rig], None]:
    """observe() after a forward pass; a function among the arguments is applied to the logits."""

    def call(rig: Rig) -> None:
        logits = rig.model(X)
        given = [a(logits) if callable(a) else a for a in arguments]
        rig.cbp.observe(*given, **{key: a(logits) if callable(a) else a for key, a in keywords.items()})

    return call


def itself(logits: Tensor) -> Tensor:
    return logits


def without_graph(rig: Rig) -> None:
    with torch.no_grad():
        rig.cbp.observe(rig.model(X), Y)


def in_evaluation(rig: Rig) -> None:
    rig.model.eval()
    try:
        rig.cbp.observe(rig.model(X), Y)
    finally:
        rig.model.train()


def in_evaluation_after_training(rig: Rig) -> None:
    rig.model(X)
    in_evaluation(rig)


def after_backward(rig: Rig) -> None:
    logits = rig.model(X)
    F.cross_entropy(logits, Y).backward()
    rig.cbp.observe(logits, Y)


def another_model(rig: Rig) -> None:
    rig.model(X)
    rig.cbp.observe(mlp()(X), Y)


def another_model_alone(rig: Rig) -> None:
    rig.cbp.observe(mlp()(X), Y)


def an_empty_batch(rig: Rig) -> None:
    rig.cbp.observe(rig.model(X[:0]), Y[:0])


TARGETS = [
    ("too short", Y[:3], ValueError, ("target", "(3,)", "(6, 3)", "expected", "(6,)")),
    ("too long", torch.cat([Y, Y]), ValueError, ("target", "(12,)", "(6, 3)", "expected", "(6,)")),
    ("a column", Y[:, None], ValueError, ("target", "(6, 1)", "(6, 3)", "expected", "(6,)")),
    ("a scalar", Y[0], ValueError, ("target", "()", "(6, 3)", "expected", "(6,)")),
    ("one-hot integers", F.one_hot(Y), (ValueError, TypeError), ("target", "(6, 3)", "(6,)|float|prob")),
    ("a class too large", Y + 1, ValueError, ("target", "3", "0 to 2", "-100")),
    ("a negative class", Y - 1, ValueError, ("target", "-1", "0 to 2", "-100")),
    ("a class too large among ignored", Y.where(Y != 0, -100) + (Y == 2), ValueError, ("target", "3", "0 to 2")),
    ("floats", Y.float(), TypeError, ("target", "float32", "integer", "score=")),
    ("bools", Y.bool(), TypeError, ("target", "bool", "integer")),
    ("complex", Y.to(torch.complex64), TypeError, ("target", "complex64", "integer")),
    ("a list", Y.tolist(), TypeError, ("target", "tensor", "list")),
    ("an array", Y.numpy(), TypeError, ("target", "tensor", "ndarray")),
    ("missing", None, ValueError, ("target", "score=")),
]

OBSERVATIONS = [(f"target is {name}", see(itself, target), *rest) for name, target, *rest in TARGETS]
OBSERVATIONS += [
    ("logits are an output object", see(CausalLMOutput, Y), TypeError, ("logits", "CausalLMOutput", ".logits")),
    ("logits are a tuple", see(lambda z: (z,), Y), TypeError, ("logits", "tensor", "tuple")),
    ("logits are an array", see(lambda z: z.detach().numpy(), Y), TypeError, ("logits", "tensor", "ndarray")),
    ("logits are a vector", see(lambda z: z[:, 0], Y), ValueError, ("logits", "(6,)", "(batch, classes)", "score=")),
    ("logits are a loss", see(lambda z: z.sum(), Y), ValueError, ("logits", "()", "(batch, classes)", "score=")),
    ("logits are integers", see(lambda z: z.long(), Y), TypeError, ("logits", "int64", "floating point")),
    ("logits are predictions", see(lambda z: z.argmax(1), Y), TypeError, ("logits", "int64", "floating point")),
    ("logits are detached", see(Tensor.detach, Y), gxd.ObservationError, ("logits", "no graph", "detached")),
    ("logits without gradients", without_graph, gxd.ObservationError, ("logits", "no graph", "no_grad")),
    ("nothing is given", see(), ValueError, ("logits", "target", "score=")),
    ("only a target", see(None, Y), ValueError, ("logits", "score=")),
    ("score and logits", see(itself, score=lambda z: z.sum(1)), ValueError, ("score=", "logits", "one or the other")),
    ("score and target", see(None, Y, score=itself), ValueError, ("score=", "target", "one or the other")),
    ("score is a number", see(score=1.5), TypeError, ("score", "tensor", "float")),
    ("score is integers", see(score=lambda z: z.long()), TypeError, ("score", "int64", "floating point")),
    ("score is detached", see(score=Tensor.detach), gxd.ObservationError, ("score", "no graph", "detached")),
    ("no training pass", in_evaluation, gxd.ObservationError, ("training mode", "model.train()")),
    ("an evaluation pass", in_evaluation_after_training, gxd.ObservationError, ("model.train()|evaluation|eval()",)),
    ("after backward", after_backward, gxd.ObservationError, ("before loss.backward()", "freed")),
    ("another model", another_model, gxd.ObservationError, ("depends on no unit", "output", "model")),
    ("another model alone", another_model_alone, gxd.ObservationError, ("no training forward pass", "model.train()")),
    ("an empty batch", an_empty_batch, (gxd.ObservationError, ValueError), ("empty|no example",)),
]


@pytest.mark.parametrize(("call", "exception", "words"), named(OBSERVATIONS))
def test_a_wrong_observation_is_refused_and_a_right_one_is_then_taken(call, exception, words):
    rig, other = attach(), attach()
    before, weights = rig.cbp.state_dict(), snapshot(rig.model, rig.optimizer)
    refused(lambda: call(rig), exception, words)
    assert same(rig.cbp.state_dict(), before)
    assert same(snapshot(rig.model, rig.optimizer), weights)
    rig.train()
    other.train()
    assert same(rig.cbp.utilities(), other.cbp.utilities())
    assert same(rig.cbp.references(), other.cbp.references())


@pytest.mark.parametrize("utility", ["gxi", "gxd_sketch", "gxd_all_logit"])
@pytest.mark.parametrize(
    "name", ["logits are a tuple", "logits are a vector", "logits are detached", "nothing is given"]
)
def test_every_utility_that_is_observed_checks_its_logits(utility, name):
    _, call, exception, words = next(row for row in OBSERVATIONS if row[0] == name)
    refused(lambda: call(attach(utility)), exception, words)


def test_the_target_of_gxd_all_logit_must_be_a_tensor():
    call = see(itself, Y.tolist())
    refused(lambda: call(attach("gxd_all_logit")), TypeError, ("target", "tensor", "list"))


def test_gxd_all_logit_does_not_guess_which_of_several_axes_holds_the_classes():
    rig = attach("gxd_all_logit")
    logits = rig.model(X.view(2, 3, 4))  # (batch, tokens, classes), or (batch, classes, positions)?
    refused(lambda: rig.cbp.observe(logits), ValueError, ("target", "class"))


def test_an_observation_after_close_is_refused():
    for utility in ("gxd", "activation"):
        rig = attach(utility)
        logits = rig.model(X)
        rig.cbp.close()
        rig.cbp.close()  # twice is fine
        refused(lambda rig=rig, z=logits: rig.cbp.observe(z, Y), gxd.ObservationError, ("close()", "make a new one"))


@pytest.mark.parametrize("utility", OBSERVED)
def test_a_second_observation_of_a_forward_pass_is_refused_and_not_counted(utility):
    rig, once = attach(utility), attach(utility)
    logits = rig.model(X)
    rig.cbp.observe(logits, Y)
    before = without_noise(rig.cbp.state_dict())
    with pytest.raises(gxd.ObservationError):
        rig.cbp.observe(logits, Y)
    assert same(without_noise(rig.cbp.state_dict()), before)
    F.cross_entropy(logits, Y).backward()
    rig.optimizer.step()
    once.train()
    assert same(rig.cbp.utilities(), once.cbp.utilities())
    assert same(rig.cbp.references(), once.cbp.references())


@pytest.mark.parametrize("passes", [1, 2])
def test_the_error_of_a_second_observation_says_that_there_was_a_first(passes):
    rig = attach()
    logits, *_ = [rig.model(X) for _ in range(passes)]
    rig.cbp.observe(logits, Y)
    refused(lambda: rig.cbp.observe(logits, Y), gxd.ObservationError, ("once|already|twice",))


@pytest.mark.parametrize("utility", LOCAL)
def test_a_local_utility_does_not_mind_being_observed_twice(utility):
    rig, never = attach(utility), attach(utility)
    logits = rig.model(X)
    rig.cbp.observe(logits, Y)
    rig.cbp.observe(logits, Y)
    F.cross_entropy(logits, Y).backward()
    rig.optimizer.step()
    never.train(observe=False)
    assert same(rig.cbp.utilities(), never.cbp.utilities())


# --- optimizer.step() -------------------------------------------------------------------------------------------------


def step_alone(rig: Rig) -> None:
    rig.optimizer.step()


def step_without_observe(rig: Rig) -> None:
    rig.train(observe=False)


def step_in_evaluation(rig: Rig) -> None:
    rig.model.eval()
    try:
        rig.train(observe=False)
    finally:
        rig.model.train()


def step_without_backward(rig: Rig) -> None:
    rig.model(X)
    rig.optimizer.step()


def step_with_an_empty_batch(rig: Rig) -> None:
    rig.train(X[:0], Y[:0], observe=False)


UPDATED = "parameters were updated"
STEPS = [
    (f"{u}, not observed", u, step_without_observe, (f"'{u}'", "observe(logits, target)", UPDATED)) for u in OBSERVED
]
STEPS += [(f"{u}, no forward pass", u, step_alone, ("training forward pass", "model.train()", UPDATED)) for u in LOCAL]
STEPS += [
    (f"{u}, evaluation", u, step_in_evaluation, ("training forward pass", "model.train()", UPDATED)) for u in LOCAL
]
STEPS += [
    ("loss_gradient, no forward pass", "loss_gradient", step_alone, ("training forward pass", "model.train()")),
    ("loss_gradient, no backward pass", "loss_gradient", step_without_backward, ("backward",)),
    ("activation, an empty batch", "activation", step_with_an_empty_batch, ("empty|no example",)),
    ("loss_gradient, an empty batch", "loss_gradient", step_with_an_empty_batch, ("empty|no example",)),
]


@pytest.mark.parametrize(("utility", "call", "words"), named(STEPS))
def test_a_step_without_an_observation_is_an_error_and_no_unit_ages_or_is_reset(utility, call, words):
    rig = attach(utility, replacement_rate=1.0, maturity=0)
    message = refused(lambda: call(rig), gxd.ObservationError, ())
    assert all(not ages.any() for ages in rig.cbp.ages().values())
    assert rig.cbp.total_resets == 0
    rig.train()
    assert rig.cbp.total_resets == 11
    for word in words:
        assert any(one in message for one in word.split("|")), f"{message!r} does not say {word!r}"


def test_a_step_that_was_refused_leaves_no_value_of_its_batch_in_the_statistics():
    rig, other = attach(), attach()
    with pytest.raises(gxd.ObservationError):
        rig.model(X * 100)
        rig.optimizer.step()
    rig.train()
    other.train()
    assert same(rig.cbp.references(), other.cbp.references())


class OutOfMemory(RuntimeError):
    """What a forward pass may raise and a training loop may catch."""


def forward_that_raises(rig: Rig, layer: str) -> None:
    def fail(*_: Any) -> None:
        raise OutOfMemory

    handle = getattr(rig.model, layer).register_forward_hook(fail)
    with pytest.raises(OutOfMemory):
        rig.model(X * 100)
    handle.remove()


@pytest.mark.parametrize("layer", ["fc1", "fc2", "head"])
@pytest.mark.parametrize("when", ["before", "after", "twice"])
@pytest.mark.parametrize("utility", ["gxd", "gxd_all_logit", "activation", "loss_gradient"])
def test_a_forward_pass_that_raises_leaves_no_trace(utility, when, layer):
    rig, clean = attach(utility), attach(utility)
    if when != "after":
        forward_that_raises(rig, layer)
    logits = rig.model(X)
    if when != "before":
        forward_that_raises(rig, layer)
    rig.cbp.observe(logits, Y)
    F.cross_entropy(logits, Y).backward()
    rig.optimizer.step()
    clean.train()
    assert same(rig.cbp.utilities(), clean.cbp.utilities())
    assert same(rig.cbp.references(), clean.cbp.references())
    assert same(rig.cbp.ages(), clean.cbp.ages())


@pytest.mark.parametrize("layer", ["fc1", "head"])
@pytest.mark.parametrize("utility", ["gxd", "activation"])
def test_a_step_after_nothing_but_a_forward_pass_that_raised_is_an_error(utility, layer):
    rig = attach(utility)
    forward_that_raises(rig, layer)
    refused(rig.optimizer.step, gxd.ObservationError, ("optimizer.step() without",))
    rig.train()
    assert rig.cbp.ages()["fc1"].tolist() == [1] * 5


@pytest.mark.parametrize("utility", ["gxd", "activation"])
def test_a_consumer_that_was_replaced_is_noticed_and_no_unit_is_half_reset(utility):
    rig = attach(utility, replacement_rate=0.5, maturity=0)
    rig.model.head = nn.Linear(6, 3)  # a new head for a new task
    rig.optimizer.add_param_group({"params": list(rig.model.head.parameters())})
    try:
        rig.train()
    except (gxd.PlanError, gxd.ObservationError) as error:
        assert "head" in str(error)
    else:
        for unit in rig.cbp.last_resets.get("fc2", ()):
            assert not rig.model.head.weight[:, unit].any(), "fresh incoming weights, but the old outgoing ones"


# --- load_state_dict() ------------------------------------------------------------------------------------------------


@cache
def saved(utility: str = "gxd") -> dict[str, Any]:
    """The state of a run in full swing: units were reset, one micro-batch of the next step has been seen."""
    rig = attach(utility, replacement_rate=0.1, maturity=1)
    for _ in range(5):
        rig.train()
    rig.cbp.observe(rig.model(X), Y)
    assert rig.cbp.last_resets
    return rig.cbp.state_dict()


def without_noise(state: dict[str, Any]) -> dict[str, Any]:
    """A state but for the random numbers that were drawn for an observation."""
    for part in state["methods"].values():
        del part["noise"]
    return state


def paths(state: Any, depth: int = 6) -> Iterator[tuple[Any, ...]]:
    """The way to every part of a state, but not into ``last``, whose keys vary, nor to what follows from the rest."""
    keys = list(state) if isinstance(state, dict) else range(len(state)) if isinstance(state, list) else ()
    for key in keys if depth else ():
        yield (key,)
        if key != "last":
            yield from ((key, *rest) for rest in paths(state[key], depth - 1))


def damaged(path: tuple[Any, ...], *value: Any) -> dict[str, Any]:
    """The saved state without one of its parts, or with another value in its place."""
    state = copy.deepcopy(saved())
    part = state
    for key in path[:-1]:
        part = part[key]
    if value:
        part[path[-1]] = value[0]
    else:
        del part[path[-1]]
    return state


def refused_state(rig: Rig, state: Any, *words: str) -> None:
    """The state is refused with a PlanError, and the run goes on as if it had not been tried."""
    rig.train()
    before = rig.cbp.state_dict()
    refused(lambda: rig.cbp.load_state_dict(state), gxd.PlanError, words)
    assert same(rig.cbp.state_dict(), before)


@pytest.mark.parametrize("path", list(paths(saved())), ids=lambda path: ".".join(map(str, path)))
def test_a_truncated_state_is_refused_and_nothing_of_it_is_loaded(path):
    names = [str(key) for key in path if isinstance(key, str)]
    refused_state(attach(replacement_rate=0.1), damaged(path), f"{names[-1]}|not whole")


@pytest.mark.parametrize("key", [key for key in saved() if key != "version"])
@pytest.mark.parametrize("value", [None, "x", torch.zeros(2)], ids=["None", "a string", "a short tensor"])
def test_a_state_with_a_part_of_the_wrong_kind_is_refused_and_nothing_of_it_is_loaded(key, value):
    refused_state(attach(replacement_rate=0.1), damaged((key,), value), key if key != "fingerprint" else "another plan")


PART = ("methods", "0.continual_backprop")
WRONG_VALUES = [
    ("a generator of another type", (*PART, "generator"), lambda old: old.double() / 3),
    ("a step that is no number", (*PART, "state", "units", "step"), lambda old: float("nan")),
    ("half a step", (*PART, "state", "units", "step"), lambda old: old + 0.5),
    ("a count that is a string", (*PART, "observed", "mean_count", 0), lambda old: "8"),
    ("a count that is no number", (*PART, "observed", "score_count", 1), lambda old: float("nan")),
]


@pytest.mark.parametrize(("path", "wrong"), named(WRONG_VALUES))
def test_a_state_with_a_wrong_value_is_refused_and_nothing_of_it_is_loaded(path, wrong):
    old = saved()
    for key in path:
        old = old[key]
    state = damaged(path, wrong(old))
    refused_state(attach(replacement_rate=0.1), state, path[-1] if isinstance(path[-1], str) else path[-2])


OTHER_OBJECTS = [
    ("None", None, ("ContinualBackprop",)),
    ("a number", 3, ("ContinualBackprop",)),
    ("a path", "checkpoint.pt", ("ContinualBackprop", "lacks|str")),
    ("a list", [1, 2], ("ContinualBackprop", "lacks|list")),
    ("an empty dict", {}, ("ContinualBackprop", "lacks", "methods")),
    ("the model's state", mlp().state_dict(), ("ContinualBackprop", "lacks", "methods")),
    ("the optimizer's state", sgd(mlp()).state_dict(), ("ContinualBackprop", "lacks", "methods")),
    ("the whole checkpoint", {"model": {}, "cbp": {}}, ("ContinualBackprop", "lacks", "methods")),
    ("a newer version", damaged(("version",), 99), ("version 99", "gxd")),
]


@pytest.mark.parametrize(("state", "words"), named(OTHER_OBJECTS))
def test_what_is_not_a_state_of_ours_is_refused(state, words):
    refused_state(attach(), state, *words)


def test_the_state_of_another_model_is_refused_with_the_group_that_differs():
    other = attach(model=mlp(hidden=7), plan=plan_of(hidden=7))
    refused_state(attach(), other.cbp.state_dict(), "another model", "'fc1'", "7", "5")


def test_the_state_of_a_plan_with_other_groups_is_refused_with_the_group_that_is_missing():
    other = attach(plan=plan_of().select(exclude="fc2"))
    refused_state(attach(), other.cbp.state_dict(), "another", "plan", "'fc2'", "6")


def test_the_state_of_another_plan_with_the_same_names_is_refused():
    plans = [
        gxd.find_units(mlp(), groups=[gxd.manual_group("fc1", "fc2", columns=columns)])
        for columns in (FIVE, FIVE.flip(0))
    ]
    refused_state(attach(plan=plans[0]), attach(plan=plans[1]).cbp.state_dict(), "another plan", "same group names")


def test_the_state_of_another_utility_is_refused_with_both_names():
    refused_state(attach(), saved("gxi"), "'gxi'", "'gxd'")


def test_the_undamaged_state_is_loaded():
    rig = attach()
    rig.cbp.load_state_dict(saved())
    assert same(rig.cbp.state_dict(), saved())


# --- infinities and NaN -----------------------------------------------------------------------------------------------


def spoiled(value: float) -> Tensor:
    x = X.clone()
    x[2, 1] = value
    return x


@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("utility", [*LOCAL, *OBSERVED, "loss_gradient"])
def test_a_non_finite_batch_is_counted_and_leaves_no_trace_in_the_statistics(utility, value):
    rig, clean = attach(utility), attach(utility)
    rig.train()
    clean.train()
    utilities, references, ages = rig.cbp.utilities(), rig.cbp.references(), rig.cbp.ages()
    look(rig, spoiled(value))
    with pytest.warns(gxd.NonFiniteWarning, match=r"non-finite.*only counted.*lower the learning rate"):
        rig.optimizer.step()
    assert rig.cbp.nonfinite_observations == 1
    assert same(rig.cbp.utilities(), utilities)
    assert same(rig.cbp.references(), references)
    assert same(rig.cbp.ages(), {name: age + 1 for name, age in ages.items()})
    if utility in ("random", "gxd_sketch"):
        return  # the directions drawn for the spoiled batch are gone
    rig.optimizer.load_state_dict(copy.deepcopy(clean.optimizer.state_dict()))
    rig.model.load_state_dict(clean.model.state_dict())
    for _ in range(3):
        rig.train()
        clean.train()
    assert same(rig.cbp.utilities(), clean.cbp.utilities())
    assert same(rig.cbp.references(), clean.cbp.references())
    assert rig.cbp.nonfinite_observations == 1


def test_an_infinite_gradient_alone_is_a_non_finite_observation():
    rig = attach()
    rig.cbp.observe(score=rig.model(X).sum(1) * INF)
    with pytest.warns(gxd.NonFiniteWarning):
        rig.optimizer.step()
    assert rig.cbp.nonfinite_observations == 1
    assert not any(reference.any() for reference in rig.cbp.references().values())


def test_a_spoiled_micro_batch_spoils_its_step_and_no_other():
    rig, clean = attach(), attach()
    look(rig, X)
    look(rig, spoiled(NAN))
    with pytest.warns(gxd.NonFiniteWarning):
        rig.optimizer.step()
    rig.train()
    clean.train()
    assert rig.cbp.nonfinite_observations == 1
    assert same(rig.cbp.utilities(), clean.cbp.utilities())
    assert same(rig.cbp.references(), clean.cbp.references())


def test_non_finite_observations_warn_once_and_are_counted(recwarn):
    rig = attach()
    warned = []
    for x in (X, spoiled(NAN), X, spoiled(INF), spoiled(NAN)):
        look(rig, x)
        rig.optimizer.step()
        warned.append(sum(issubclass(w.category, gxd.NonFiniteWarning) for w in recwarn))
    assert warned == [0, 1, 1, 1, 1]
    assert rig.cbp.metrics()["gxd/nonfinite_observations"] == 3


@pytest.mark.parametrize("method", ["gxd", "continual_backprop"])
def test_a_training_that_diverges_says_so_once(method, recwarn):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
    attached = gxd.attach(model, optimizer, method, plan=plan_of())
    for _ in range(50):
        logits = model(X)
        attached.observe(logits, Y)
        F.cross_entropy(logits, Y).backward()
        optimizer.step()
    assert len(recwarn) == 1


@pytest.mark.filterwarnings("ignore::gxd.NonFiniteWarning")
def test_a_reset_on_a_non_finite_step_moves_no_nan_into_the_model():
    rig = attach(replacement_rate=0.5, maturity=0)
    look(rig, X)
    rig.optimizer.step()
    look(rig, spoiled(NAN))
    rig.optimizer.step()
    assert rig.cbp.last_resets
    assert all(p.isfinite().all() for p in rig.model.parameters())


@pytest.mark.parametrize("attach_to", [gxd.ContinualBackprop, lambda *a, **o: gxd.attach(*a, "gxd", **o)])
def test_without_example_inputs_the_message_says_what_to_pass(attach_to):
    model = mlp()
    optimizer = sgd(model)
    with pytest.raises(ValueError, match=r"pass example_inputs=x\[:2\]"):
        attach_to(model, optimizer)
    with pytest.raises(ValueError, match="not both"):
        attach_to(model, optimizer, example_inputs=X, plan=plan_of())
