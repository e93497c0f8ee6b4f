"""Optimizers inside optimizers, and wrappers as training frameworks make them."""

import copy
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gxd
from tests.optimizers import (
    PLAN,
    Accelerated,
    Bare,
    Delegating,
    Lookahead,
    LookaheadInLists,
    backward,
    mlp,
    reset,
    reset_slices,
    train,
)


class WithDicts(Lookahead):
    """Makes the dicts of the hooks, but torch has not put them around its step."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()

    def step(self, closure: Any = None) -> None:
        super().step(closure)


WRAPPERS = {
    "delegating": Delegating,
    "accelerated": Accelerated,
    "bare": Bare,
    "lookahead": Lookahead,
    "with dicts": WithDicts,
    "lookahead in lists": LookaheadInLists,
    "accelerated lookahead": lambda optimizer: Accelerated(Lookahead(optimizer)),
    "bare around accelerated": lambda optimizer: Bare(Accelerated(optimizer)),
}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.01)


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_optimizer_just_works(name: str):
    model = mlp()
    inside = adam(model)
    optimizer = WRAPPERS[name](inside)
    attributes = set(vars(optimizer))
    cbp = gxd.ContinualBackprop(model, optimizer, plan=PLAN, utility="activation", maturity=4, replacement_rate=0.4)
    train(model, optimizer, 5)
    assert {int(age) for ages in cbp.ages().values() for age in ages} == {0, 5}
    assert {name: len(index) for name, index in cbp.last_resets.items()} == {"0": 2, "2": 2}
    for layer, reader in ((0, 2), (2, 4)):
        units = cbp.last_resets[str(layer)]
        assert not model[reader].weight[:, units].any()
        for key in ("exp_avg", "exp_avg_sq"):
            assert not inside.state[model[layer].weight][key][units].any()
            assert not inside.state[model[reader].weight][key][:, units].any()
    another = mlp()
    train(another, WRAPPERS[name](adam(another)), 2)  # others of the class are as they were
    cbp.close()
    assert vars(optimizer).keys() == attributes
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer, 3)
    assert cbp.total_resets == 4 and not torch.equal(model[0].weight, before["0.weight"])


@pytest.mark.parametrize("wrapper", [Delegating, Accelerated])
def test_a_call_that_makes_no_step_does_not_count(wrapper: Any):
    model = mlp()
    optimizer = wrapper(adam(model))
    cbp = gxd.ContinualBackprop(model, optimizer, plan=PLAN, utility="activation", maturity=100)
    for number in range(6):
        optimizer.accumulating = number % 3 != 2
        train(model, optimizer, 1)
    assert {int(age) for ages in cbp.ages().values() for age in ages} == {2}


@pytest.mark.parametrize("wrapper", [Lookahead, WithDicts, LookaheadInLists])
def test_a_wrapper_that_takes_part_in_the_step_has_finished_before_the_reset(wrapper: Any):
    model = mlp()
    optimizer = wrapper(adam(model))
    cbp = gxd.ContinualBackprop(model, optimizer, plan=PLAN, utility="activation", maturity=3, replacement_rate=0.4)
    seen = []
    host = cbp._parts[0].host

    def noted(chosen: Any, *_: Any, **__: Any) -> Any:
        seen.append(copy.deepcopy(model.state_dict()))
        return chosen

    host.reset = noted  # type: ignore[method-assign]
    train(model, optimizer, 4)
    assert len(seen) == 1 and torch.equal(seen[0]["0.weight"], model[0].weight)


@pytest.mark.parametrize("first", ["scheduler", "gxd"])
@pytest.mark.parametrize("wrapper", [Lookahead, WithDicts])
def test_a_learning_rate_scheduler_and_gxd_share_the_step_of_a_wrapper(first: str, wrapper: Any):
    model = mlp()
    optimizer = wrapper(adam(model))
    attach = lambda: gxd.ContinualBackprop(model, optimizer, plan=PLAN, utility="activation", maturity=100)
    schedule = lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1)
    cbp, scheduler = (attach(), schedule()) if first == "gxd" else (schedule(), attach())[::-1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            train(model, optimizer, 1)
            scheduler.step()
    assert cbp._parts[0].units.step == 3 and optimizer.param_groups[0]["lr"] == pytest.approx(1e-5)
    cbp.close()
    train(model, optimizer, 1)
    scheduler.step()


def test_a_class_that_torch_has_hooked_by_another_of_its_instances_takes_one_step():
    class Fresh(Lookahead):
        def step(self, closure: Any = None) -> None:
            super().step(closure)

        zero_grad = torch.optim.Optimizer.zero_grad  # type: ignore[assignment]

    Fresh(adam(mlp())).zero_grad()  # from here on, step asks for hooks that an instance may not have
    model = mlp()
    optimizer = Fresh(adam(model))
    calls = []
    cbp = gxd.ContinualBackprop(model, optimizer, plan=PLAN, utility="activation", maturity=100)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    train(model, optimizer, 3)
    assert cbp._parts[0].units.step == len(calls) == 3


@pytest.mark.parametrize("place", ["attribute", "list", "dict", "deep", "cycle"])
def test_optimizers_are_found_wherever_they_hang(place: str):
    model = mlp()
    inside = adam(model)
    outer = torch.optim.SGD(model.parameters(), 0.0)
    outer.part = {"attribute": inside, "list": [inside], "dict": {"a": inside}, "deep": Bare(inside)}.get(  # type: ignore[attr-defined]
        place, [{"x": (inside,)}]
    )
    if place == "deep":
        outer.part = {"b": [Accelerated(inside)]}  # type: ignore[attr-defined]
    if place == "cycle":
        inside.outer = outer  # type: ignore[attr-defined]
    train(model, inside, 2)
    before = {p: s["exp_avg"].clone() for p, s in inside.state.items()}
    reset(model, outer)
    for (_, where), p in zip(reset_slices(model), model.parameters()):
        assert torch.equal(inside.state[p]["exp_avg"], before[p].masked_fill(where, 0.0))


def test_two_optimizers_for_parts_of_a_model_in_one_wrapper_take_one_step():
    class Both(Bare):
        def step(self) -> None:
            for one in self.inside["the"]:
                one.step()

    model = mlp()
    weights = [p for p in model.parameters() if p.dim() == 2]
    biases = [p for p in model.parameters() if p.dim() == 1]
    optimizer = Both(torch.optim.SGD(weights, 0.1, momentum=0.9))
    optimizer.inside["the"].append(torch.optim.Adam(biases, 0.01))
    cbp = gxd.ContinualBackprop(model, optimizer, plan=PLAN, utility="activation", maturity=4, replacement_rate=0.4)
    train(model, optimizer, 5)
    assert cbp._parts[0].units.step == 5 and cbp.total_resets == 4
    sgd, moments = optimizer.inside["the"]
    assert not sgd.state[model[0].weight]["momentum_buffer"][cbp.last_resets["0"]].any()
    assert not moments.state[model[0].bias]["exp_avg"][cbp.last_resets["0"]].any()


def test_what_cannot_be_hooked_is_refused_with_a_word():
    class Own:
        """An optimizer from scratch."""

        def __init__(self, params: Any) -> None:
            self.param_groups, self.state = [{"params": list(params)}], {}

        def step(self) -> None: ...

        def zero_grad(self) -> None: ...

    model = mlp()
    with pytest.raises(TypeError, match="Own has no step hooks"):
        gxd.ContinualBackprop(model, Own(model.parameters()), plan=PLAN)
    with pytest.raises(TypeError, match=r"must be a .*Optimizer, got StepLR"):
        scheduler = torch.optim.lr_scheduler.StepLR(adam(model), 1)
        gxd.ContinualBackprop(model, scheduler, plan=PLAN)


def test_an_optimizer_of_copies_is_told_apart_from_one_of_too_few_parameters():
    model = mlp()
    with pytest.raises(gxd.PlanError, match="same shapes: copies"):
        gxd.ContinualBackprop(model, adam(copy.deepcopy(model)), plan=PLAN)
    with pytest.raises(gxd.PlanError) as caught:
        gxd.ContinualBackprop(model, torch.optim.SGD([model[0].weight], 0.1), plan=PLAN)
    assert "same shapes" not in str(caught.value)


@pytest.mark.parametrize("wrapper", [Delegating, Accelerated, Lookahead])
def test_a_wrapped_optimizer_can_be_given_to_a_compiled_step(wrapper: Any):
    model = mlp()
    optimizer = wrapper(adam(model))
    cbp = gxd.ContinualBackprop(model, optimizer, plan=PLAN, utility="activation", maturity=2, replacement_rate=0.4)
    with pytest.warns(gxd.CompileWarning, match="steps by itself"):  # local utilities are scored after the step
        step = gxd.compiled_step(model, optimizer, F.mse_loss, cbp, score=lambda output, _: output.sum(1))
    for _ in range(3):
        step(torch.randn(8, 4), torch.randn(8, 3))
    assert cbp.total_resets == 4
    with pytest.raises(TypeError, match="give the optimizer inside"):
        gxd.compiled_step(model, Bare(adam(model)), F.mse_loss)  # type: ignore[arg-type]


def test_state_that_is_shown_by_a_wrapper_and_kept_inside_is_written_once():
    model = mlp()
    inside = torch.optim.ASGD(model.parameters(), 0.1, lambd=0.0)
    optimizer = Delegating(inside)
    train(model, optimizer, 3)
    average, bias = inside.state[model[4].bias]["ax"].clone(), model[4].bias.detach().clone()
    reset(model, optimizer)
    shift = model[4].bias.detach() - bias
    assert shift.abs().max() > 1e-3
    torch.testing.assert_close(inside.state[model[4].bias]["ax"], average + shift)
    backward(model)
