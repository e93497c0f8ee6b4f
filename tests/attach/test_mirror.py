"""Who is told of a reset, and resets that are carried over to target networks and averages of the weights."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gxd
from tests.rig import X, Y, attach, mlp, plan_of, same, sgd

OFTEN: dict[str, Any] = {"maturity": 1, "replacement_rate": 0.15}


def test_every_step_that_resets_units_tells_which():
    told: list[Any] = []
    rig = attach(on_reset=told.append, **OFTEN)
    also: list[Any] = []
    handle = rig.cbp.on_reset(also.append)
    expected = []
    for _ in range(9):
        rig.train()
        expected += [rig.cbp.last_resets] if rig.cbp.last_resets else []
    assert same(told, expected) and same(also, expected) and len(told) > 3
    handle.remove()
    for _ in range(4):
        rig.train()
    assert len(also) == len(expected) < len(told)
    assert sum(len(index) for resets in told for index in resets.values()) == rig.cbp.total_resets


def test_what_is_told_is_in_the_weights_already():
    rig = attach(**OFTEN)
    columns: list[Tensor] = []
    rig.cbp.on_reset(lambda units: columns.append(rig.model.fc2.weight[:, units.get("fc1", [])].abs().sum().detach()))
    for _ in range(6):
        rig.train()
    assert columns and not any(columns)


def test_several_methods_are_told_of_as_one_and_each_unit_once():
    class Fixed(gxd.Method):
        needs_units = True

        def __init__(self, name: str, units: list[int]) -> None:
            self.name, self.units = name, torch.tensor(units)

        def after_step(self, host: gxd.Host, state: Any) -> Any:
            host.reset([(host.plan["fc1"], self.units)], {})
            return state

        def at_boundary(self, host: gxd.Host, state: Any) -> Any:
            return self.after_step(host, state)

    told: list[Any] = []
    model = mlp()
    optimizer = sgd(model)
    both = [Fixed("one", [0, 2]), Fixed("two", [2, 4])]
    attached = gxd.attach(model, optimizer, *both, plan=plan_of(), on_reset=told.append)
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    attached.boundary()
    assert [units["fc1"].tolist() for units in told] == [[0, 2, 4]] * 2


def test_a_function_that_raises_does_not_keep_the_others_from_being_told():
    told: list[Any] = []

    def fails(units: Any) -> None:
        told.append("first")
        raise KeyError("mine")

    rig = attach(on_reset=fails, **OFTEN)
    rig.cbp.on_reset(lambda units: told.append("second"))
    with pytest.raises(KeyError, match="mine"):
        for _ in range(8):
            rig.train()
    assert told == ["first", "second"]


def test_what_was_reset_before_a_boundary_failed_is_told_of_at_once():
    class Fails(gxd.Method):
        def at_boundary(self, host: gxd.Host, state: Any) -> Any:
            raise RuntimeError("no")

    told: list[Any] = []
    model = mlp()
    optimizer = sgd(model)
    methods = gxd.method("full_reset"), gxd.method("redo"), Fails()
    attached = gxd.attach(model, optimizer, *methods, plan=plan_of(), on_reset=told.append)
    with pytest.raises(RuntimeError, match="no"):
        attached.boundary()
    assert [sorted(units) for units in told] == [["fc1", "fc2"]]
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    assert len(told) == 1


def test_a_copy_of_the_training_does_not_call_the_functions_of_the_original():
    told: list[Any] = []
    rig = attach(on_reset=told.append, **OFTEN)
    model, optimizer, cbp = copy.deepcopy((rig.model, rig.optimizer, rig.cbp))
    for _ in range(5):
        logits = model(X)
        cbp.observe(logits, Y)
        F.cross_entropy(logits, Y).backward()
        optimizer.step()
    assert cbp.total_resets and not told


@pytest.mark.parametrize("given", [3, "print"])
def test_what_cannot_be_called_is_refused(given: Any):
    with pytest.raises(TypeError, match="on_reset must be a function"):
        attach(on_reset=given)


# --- copies of the model ----------------------------------------------------------------------------------------------


def by_hand(target: nn.Module, online: nn.Module, units: dict[str, Tensor], references: dict[str, Tensor]) -> None:
    """The reset of the layers of an MLP, in the weights of a copy: as a plain loop."""
    readers = {"fc1": "fc2", "fc2": "head"}
    with torch.no_grad():
        for name, index in units.items():
            reader = target.get_submodule(readers[name])
            for unit in index:
                reader.bias += reader.weight[:, unit] * references[name][unit]
        for name, index in units.items():
            layer, fresh = target.get_submodule(name), online.get_submodule(name)
            for unit in index:
                layer.weight[unit], layer.bias[unit] = fresh.weight[unit], fresh.bias[unit]
        for name, index in units.items():
            for unit in index:
                target.get_submodule(readers[name]).weight[:, unit] = 0


def test_a_mirrored_reset_is_the_reset_by_the_copys_own_weights():
    rig = attach(**OFTEN)
    torch.manual_seed(5)
    target = mlp()
    for parameter in target.parameters():  # a copy of another time
        nn.init.normal_(parameter)
    expected = copy.deepcopy(target)
    means: dict[str, Tensor] = {}
    host = rig.cbp._parts[0].host
    reset = host.reset

    def noted(chosen: Any, references: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        means.update({n: r[0] for n, r in references.items()})
        return reset(chosen, references, *args, **kwargs)

    host.reset = noted  # type: ignore[method-assign]
    gxd.mirror_resets(rig.cbp, target)
    rig.cbp.on_reset(lambda units: by_hand(expected, rig.model, dict(units), means))
    for _ in range(8):
        rig.train()
    assert rig.cbp.total_resets > 4
    for name, tensor in target.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name])
    assert not torch.equal(target.fc1.weight, rig.model.fc1.weight)


def test_each_of_several_methods_is_mirrored_by_what_it_has_done():
    """The first keeps outgoing weights, the second zeroes them and moves means, the third keeps them again."""

    class Fixed(gxd.Method):
        needs_units = True

        def __init__(self, name: str, units: list[int], reset: gxd.Reset, mean: float | None) -> None:
            self.name, self.units, self.what, self.mean = name, torch.tensor(units), reset, mean

        def after_step(self, host: gxd.Host, state: Any) -> Any:
            group = host.plan["fc2"]
            means = {} if self.mean is None else {"fc2": torch.full((1, group.size), self.mean)}
            host.reset([(group, self.units)], means, self.what)
            return state

    keeps = gxd.Reset(outgoing=1.0, compensate=False)
    model = mlp()
    optimizer = sgd(model)
    methods = [
        Fixed("one", [0, 1], keeps, None),
        Fixed("two", [1, 2], gxd.Reset(), 2.0),
        Fixed("three", [2, 3], gxd.Reset(), 5.0),
        Fixed("four", [3, 4], keeps, None),
    ]
    attached = gxd.attach(model, optimizer, *methods, plan=plan_of())
    target = copy.deepcopy(model)
    nn.init.normal_(target.head.weight)
    before = copy.deepcopy(target)
    gxd.mirror_resets(attached, target)
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    assert torch.equal(target.fc2.weight[:5], model.fc2.weight[:5])
    assert torch.equal(target.fc2.weight[5:], before.fc2.weight[5:])
    assert not target.head.weight[:, 1:4].any()
    assert torch.equal(target.head.weight[:, [0, 4]], before.head.weight[:, [0, 4]])
    moved = before.head.weight[:, 1:4] @ torch.tensor([2.0, 2.0, 5.0])
    torch.testing.assert_close(target.head.bias, before.head.bias + moved)


def test_a_share_of_the_outgoing_weights_that_stays_is_of_the_copys_own():
    rig = attach(**OFTEN)
    rig.cbp.close()
    method = gxd.method("redo", threshold=1e9, every=1, outgoing=0.25)
    attached = gxd.attach(rig.model, rig.optimizer, method, plan=plan_of())
    target = mlp()
    nn.init.normal_(target.head.weight)
    before = target.head.weight.clone()
    gxd.mirror_resets(attached, target)
    F.cross_entropy(rig.model(X), Y).backward()
    rig.optimizer.step()
    assert len(attached.last_resets["fc2"]) == before.shape[1]
    torch.testing.assert_close(target.head.weight, 0.25 * before)
    assert torch.equal(target.fc1.weight, rig.model.fc1.weight)


def test_what_is_reset_in_part_is_not_mirrored():
    model = mlp()
    optimizer = sgd(model)
    half = gxd.UnitReset("activation", gxd.Threshold(1e9, every=1), reset=gxd.Reset(blend=0.5))
    attached = gxd.attach(model, optimizer, half, plan=plan_of())
    target = copy.deepcopy(model)
    before = copy.deepcopy(target.state_dict())
    gxd.mirror_resets(attached, target)
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    assert all(map(torch.equal, before.values(), target.state_dict().values()))


def test_without_compensation_the_copys_biases_stay():
    rig = attach(compensate=False, **OFTEN)
    target = copy.deepcopy(rig.model)
    gxd.mirror_resets(rig.cbp, target)
    before = target.head.bias.clone()
    for _ in range(8):
        rig.train()
    assert torch.equal(target.head.bias, before) and rig.cbp.total_resets


def test_a_target_network_of_dqn_and_its_online_network_forget_the_same_units():
    model, generator = mlp(), torch.Generator().manual_seed(0)
    target = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    cbp = gxd.ContinualBackprop(model, optimizer, plan=plan_of(), utility="gxd_sketch", **OFTEN)
    handle = gxd.mirror_resets(cbp, target)

    def step() -> None:
        obs, then = torch.randn(2, 6, 4, generator=generator)
        q = model(obs)
        cbp.observe(q)
        with torch.no_grad():
            goal = 0.9 * target(then).max(1).values
        F.mse_loss(q.gather(1, Y[:, None])[:, 0], goal).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(10):
        step()
        for name, reader in (("fc1", "fc2"), ("fc2", "head")):
            units = cbp.last_resets.get(name, torch.tensor([], dtype=torch.long))
            assert not target.get_submodule(reader).weight[:, units].any()
            assert torch.equal(target.get_submodule(name).weight[units], model.get_submodule(name).weight[units])
    assert cbp.total_resets > 4
    handle.remove()
    before = copy.deepcopy(target.state_dict())
    for _ in range(4):
        step()
    assert same(target.state_dict(), before)


def test_an_average_of_the_weights_is_reset_with_them():
    rig = attach(**OFTEN)
    average = AveragedModel(rig.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    gxd.mirror_resets(rig.cbp, average)
    for _ in range(9):
        rig.train()
        units = rig.cbp.last_resets.get("fc1", torch.tensor([], dtype=torch.long))
        assert not average.module.fc2.weight[:, units].any()
        average.update_parameters(rig.model)
    assert rig.cbp.total_resets > 4


def test_batch_norm_entries_are_mirrored_too():
    model = mlp(norm=True)
    target, optimizer = copy.deepcopy(model), sgd(model)
    nn.init.constant_(target.norm.running_mean, 3.0)
    cbp = gxd.ContinualBackprop(model, optimizer, plan=plan_of(norm=True), **OFTEN)
    gxd.mirror_resets(cbp, target)
    told: list[Any] = []
    cbp.on_reset(told.append)
    while not any("fc1" in units for units in told):
        logits = model(X)
        cbp.observe(logits, Y)
        F.cross_entropy(logits, Y).backward()
        optimizer.step()
    (units,) = [units["fc1"] for units in told if "fc1" in units]
    assert target.norm.running_mean[units].eq(0).all() and target.norm.running_mean.eq(3).sum() == 5 - len(units)


@pytest.mark.parametrize(
    ("copied", "exception", "words"),
    [
        (lambda rig: rig.model, ValueError, "shares 'fc1.weight' with the model"),
        (lambda rig: mlp(hidden=7), gxd.PlanError, "has shape"),
        (lambda rig: nn.Linear(3, 3), gxd.PlanError, "which this model does not have"),
        (lambda rig: rig.model.state_dict(), TypeError, "Module"),
    ],
)
def test_what_is_no_copy_is_refused(copied: Any, exception: Any, words: str):
    rig = attach()
    with pytest.raises(exception, match=words):
        gxd.mirror_resets(rig.cbp, copied(rig))
    assert not rig.cbp._listeners
