"""A user's method, selector and utility, written against the public names alone, obey the contract of all others."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gxd
from gxd.methods.unit_reset import UnitReset
from gxd.select import Selector
from gxd.testing import Case, ContractError, case_of, check_method
from gxd.testing.laws import (
    a_run_is_resumed_exactly_also_between_two_micro_batches,
    everything_else_is_left_as_it_was_found,
    inert_options_leave_training_as_it_is_bit_for_bit,
    states_are_replaced_and_not_written_to,
)


class ShrinkAndPerturb(gxd.Method):
    """Every so many steps, and at the end of a task: theta <- shrink * theta + noise. It counts, in a dict."""

    def __init__(self, shrink: float, sigma: float, every: int) -> None:
        self.shrink, self.sigma, self.every = shrink, sigma, every

    def init(self, host: gxd.Host) -> dict[str, Any]:
        return {"step": 0, "times": 0, "moved": {name: p.new_zeros(()) for name, p, *_ in host.trained()}}

    def after_step(self, host: gxd.Host, state: dict[str, Any]) -> dict[str, Any]:
        state = {**state, "step": state["step"] + 1}
        return self.at_boundary(host, state) if self.every and state["step"] % self.every == 0 else state

    def at_boundary(self, host: gxd.Host, state: dict[str, Any]) -> dict[str, Any]:
        if not self.every:
            return state
        moved = {}
        for name, parameter, *_ in host.trained():
            noise = torch.randn(parameter.shape, generator=host.generator).to(parameter)
            parameter.mul_(self.shrink).add_(noise, alpha=self.sigma)
            moved[name] = noise.norm()
        return {**state, "times": state["times"] + 1, "moved": moved}


def register_shrink_and_perturb() -> None:
    @gxd.register_method(
        "shrink_and_perturb",
        description="shrink all parameters, and add noise",
        reference="Ash, Adams: On Warm-Starting Neural Network Training, NeurIPS 2020",
        inert={"every": 0},
    )
    def shrink_and_perturb(shrink: float = 0.9, sigma: float = 0.01, every: int = 1000) -> gxd.Method:
        return ShrinkAndPerturb(shrink, sigma, every)


class ClippedGradients(gxd.Method):
    """Acts before the step, and remembers the largest norm so far."""

    def __init__(self, most: float) -> None:
        self.most = most

    def init(self, host: gxd.Host) -> tuple[Tensor]:
        return (next(p for _, p, *_ in host.trained()).new_zeros(()),)

    def before_step(self, host: gxd.Host, state: tuple[Tensor]) -> tuple[Tensor]:
        gradients = [p.grad for _, p, *_ in host.trained() if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        if norm > self.most:
            for g in gradients:
                g.mul_(self.most / norm)
        return (torch.maximum(state[0], norm),)


def register_clip() -> None:
    @gxd.register_method("clip", description="keep gradients small", inert={"most": float("inf")})
    def clip(most: float = 0.1) -> gxd.Method:
        return ClippedGradients(most)


@pytest.mark.parametrize(
    ("register", "name"), [(register_shrink_and_perturb, "shrink_and_perturb"), (register_clip, "clip")]
)
def test_a_users_method_obeys_the_contract_without_code_of_its_own(register: Callable[[], None], name: str):
    register()
    check_method(name)


def test_a_users_selector_and_utility_obey_the_contract():
    @gxd.register_utility("variance")
    def variance(o: gxd.Observation) -> Tensor:
        return torch.stack([(v.h - v.r).square().mean((0, 1)) for v in o.views]).sum(0)

    class Turns(Selector):
        """One unit of each group every so many steps, in turn."""

        def __init__(self, every: int) -> None:
            self.every = every

        def init(self, plan: gxd.UnitPlan, units: Any) -> tuple[int]:
            return (0,)

        def advance(self, plan: gxd.UnitPlan, units: Any, state: tuple[int]) -> tuple[tuple[int], bool]:
            return state, self.every > 0 and units.step % self.every == 0

        def select(
            self, plan: gxd.UnitPlan, units: Any, state: tuple[int], allowed: Callable[[int], bool]
        ) -> tuple[dict[int, Tensor], tuple[int]]:
            chosen = {n: torch.tensor([state[0] % g.size]) for n, g in enumerate(plan.groups) if allowed(n)}
            return chosen, (state[0] + 1,)

    check_method(Case("turns", lambda: UnitReset("variance", Turns(2)), lambda: UnitReset("variance", Turns(0))))


def test_the_contract_finds_a_method_that_keeps_its_state_to_itself():
    class Forgetful(gxd.Method):
        """Counts in an attribute, which no checkpoint holds."""

        def __init__(self, every: int) -> None:
            self.every, self.step = every, 0

        def after_step(self, host: gxd.Host, state: Any) -> Any:
            self.step += 1
            if self.every and self.step % self.every == 0:
                for _, parameter, *_ in host.trained():
                    parameter.mul_(0.5)
            return state

    @gxd.register_method("forgetful", description="", inert={"every": 0})
    def forgetful(every: int = 2) -> gxd.Method:
        return Forgetful(every)

    inert_options_leave_training_as_it_is_bit_for_bit(case_of("forgetful"))
    with pytest.raises(ContractError, match=r"^resumed in step 3, model\.conv\.weight differs$"):
        a_run_is_resumed_exactly_also_between_two_micro_batches(case_of("forgetful"))
    with pytest.raises(ContractError, match=r"^forgetful breaks the law 'a run is resumed exactly.* What it remembers"):
        check_method("forgetful")


@pytest.mark.parametrize("when", ["after_step", "at_boundary", "on_reset", "evaluation_weights"])
@pytest.mark.parametrize("entry", ["a number", "a list", "a tensor"])
def test_the_contract_finds_a_method_that_changes_its_state_in_place(entry: str, when: str):
    """Also in a call that comes only with the end of a task, or with the resets of another method."""

    class InPlace(gxd.Method):
        def init(self, host: gxd.Host) -> Any:
            return {"a number": 0, "a list": [0], "a tensor": next(host.model.parameters()).detach().clone()}

    def change(self: Any, host: gxd.Host, state: Any, *given: Any) -> Any:
        if entry == "a number":
            state[entry] += 1
        elif entry == "a list":
            state[entry][0] += 1
        else:
            state[entry].add_(1)
        return {} if when == "evaluation_weights" else state

    setattr(InPlace, when, change)
    case = Case("in place", InPlace, InPlace)
    with pytest.raises(ContractError, match=f"has written to the old state, {entry}.* differs"):
        states_are_replaced_and_not_written_to(case)


def test_the_contract_finds_a_method_that_draws_from_the_global_generator():
    class Global(gxd.Method):
        def __init__(self, sigma: float) -> None:
            self.sigma = sigma

        def after_step(self, host: gxd.Host, state: Any) -> Any:
            for _, parameter, *_ in host.trained():
                parameter.add_(torch.randn_like(parameter), alpha=self.sigma)
            return state

    @gxd.register_method("global", description="", inert={"sigma": 0.0})
    def made(sigma: float = 0.01) -> gxd.Method:
        return Global(sigma)

    a_run_is_resumed_exactly_also_between_two_micro_batches(case_of("global"))
    with pytest.raises(ContractError, match="after a step, the random state of torch differs"):
        everything_else_is_left_as_it_was_found(case_of("global"))


class Meddles(gxd.Method):
    """Does one thing after every step, if it is to."""

    def __init__(self, act: Callable[[gxd.Host], None], every: int) -> None:
        self.act, self.every = act, every

    def after_step(self, host: gxd.Host, state: Any) -> Any:
        if self.every:
            self.act(host)
            for _, parameter, *_ in host.trained():
                parameter.mul_(0.9)
        return state


def lower(host: gxd.Host) -> None:
    for optimizer in host.optimizers:
        optimizer.param_groups[1]["lr"] *= 0.5


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda host: host.model.bn.running_mean.zero_(), "bn.running_mean has changed in step 0"),
        (lower, "the options of the optimizer, group.1.lr differs"),
        (lambda host: host.model.norm.train(), "training.norm differs"),
    ],
    ids=["buffers", "learning rates", "modes"],
)
def test_the_contract_finds_a_method_that_changes_what_is_not_its_own(act: Callable[[gxd.Host], None], words: str):
    case = Case("meddles", lambda: Meddles(act, 1), lambda: Meddles(act, 0))
    with pytest.raises(ContractError, match=words):
        check_method(case)


def test_a_nan_in_a_state_is_no_difference():
    class Unknown(gxd.Method):
        def __init__(self, every: int) -> None:
            self.every = every

        def init(self, host: gxd.Host) -> Any:
            return {"best": next(host.model.parameters()).new_tensor(float("nan")), "worst": float("nan")}

        def after_step(self, host: gxd.Host, state: Any) -> Any:
            for _, parameter, *_ in host.trained() if self.every else ():
                parameter.mul_(0.9)
            return state

    check_method(Case("unknown", lambda: Unknown(1), lambda: Unknown(0)))


@pytest.mark.parametrize("name", gxd.methods())
def test_every_method_goes_to_another_process_and_back(name: str):
    method = gxd.method(name)
    back = pickle.loads(pickle.dumps(method))
    assert type(back) is type(method) and back.name == name
    assert getattr(back, "utility", None) is getattr(method, "utility", None)


def test_a_method_with_a_utility_and_an_output_gradient_is_refused_before_it_is_attached():
    class Both(UnitReset):
        output_gradient = "sketch"

    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(gxd.PlanError, match="make two methods"):
        gxd.attach(model, optimizer, Both("gxd", gxd.LowestRate(0.5, 1)), example_inputs=torch.zeros(2, 4))
    assert not any(module._forward_hooks for module in model) and not optimizer._optimizer_step_post_hooks


def test_a_state_of_dicts_and_numbers_is_saved_and_loaded_with_its_types():
    register_shrink_and_perturb()
    torch.manual_seed(0)
    models = [nn.Linear(3, 2) for _ in range(2)]
    attached = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        attached.append(gxd.attach(model, optimizer, gxd.method("shrink_and_perturb", every=2)))
        for _ in range(3):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    attached[1].boundary()
    state = attached[0].state_dict()
    attached[1].load_state_dict(state)
    loaded = attached[1]._parts[0].state
    assert (loaded["step"], loaded["times"], type(loaded["step"])) == (3, 1, int)
    assert set(loaded["moved"]) == {"weight", "bias"}
    state["methods"]["0.shrink_and_perturb"]["state"]["moved"].pop("bias")
    with pytest.raises(gxd.PlanError, match=r"moved\.bias is missing"):
        attached[1].load_state_dict(state)
