"""State of optimizers that is not understood: refused before anything is written, until the user says what it is."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gxd
from tests.optimizers import PLAN, EightBit, Kept, backward, mlp, reset, reset_slices, train
from tests.rig import same


class Coded(Tensor):
    """A tensor subclass, as quantised states are."""

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()


def beside(key: str, value: Any, **more: Any) -> Any:
    """SGD with a value beside its momentum; a function is called with the parameter."""

    def make(p: Any) -> Kept:
        make = value if callable(value) else lambda _: copy.copy(value)
        return Kept(p, lambda one: {"momentum_buffer": torch.ones_like(one), key: make(one), **more})

    return make


class FTRL(Kept):
    def __init__(self, p: Any) -> None:
        super().__init__(p, lambda one: {"z": torch.ones_like(one), "n": torch.ones_like(one)})


def hanging(value: Any) -> Any:
    def make(p: Any) -> Any:
        optimizer = torch.optim.SGD(p, 0.1)
        optimizer.memory = value(optimizer.param_groups[0]["params"])  # type: ignore[attr-defined]
        return optimizer

    return make


def shared(value: Any) -> Any:
    def make(p: Any) -> Any:
        optimizer = torch.optim.SGD(p, 0.1, momentum=0.9)
        optimizer.state["memory"] = value  # type: ignore[index]
        return optimizer

    return make


REFUSED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "8-bit codes": (EightBit, ("EightBit", "momentum_buffer", "uint8", "codes")),
    "an unknown key": (beside("memory", torch.ones_like), ("Kept", "'memory'", "float32", "(6, 4)", "0.weight")),
    "a known key of another shape": (beside("exp_avg", torch.ones(3, 7)), ("exp_avg", "(3, 7)", "shape")),
    "a copy of fewer axes": (beside("slow_param", lambda p: p[:1].clone()), ("slow_param", "shape")),
    "a subclass of tensors": (beside("exp_avg", lambda p: torch.ones_like(p).as_subclass(Coded)), ("Coded", "exp_avg")),
    "8-bit floats": (beside("exp_avg", lambda p: torch.ones_like(p).to(torch.float8_e5m2)), ("exp_avg", "float8")),
    "a sparse tensor": (beside("exp_avg", lambda p: torch.ones_like(p).to_sparse()), ("exp_avg",)),
    "a mask": (beside("mask", lambda p: p > 0), ("mask", "bool")),
    "an object": (beside("projector", object()), ("projector", "object", "basis")),
    "a rotated basis": (beside("Q", [torch.eye(2)], exp_avg_sq=torch.ones(())), ("'Q'", "list", "basis")),
    "a dict of momenta": (beside("momentum_buffer", {0.9: torch.ones(2)}), ("momentum_buffer", "dict")),
    "weights that follow from the state": (FTRL, ("FTRL", "'z'", "undoes")),
    "a key that differs between optimizers": (beside("z", torch.ones_like), ("Kept", "'z'", "gradient", "weights")),
    "something for all parameters": (shared({"weights": torch.ones(9)}), ("SGD", "'memory'", "dict")),
    "L-BFGS": (lambda p: torch.optim.LBFGS(p, 0.1), ("LBFGS",)),
    "a list of unknown tensors": (hanging(lambda ps: [torch.ones_like(p) for p in ps]), ("SGD", "'memory'", "(6, 4)")),
    "tensors by another name": (hanging(lambda ps: {"w": ps[2].detach().clone()}), ("SGD", "'memory'", "which")),
    "all parameters in one": (
        hanging(lambda ps: torch.cat([p.detach().flatten() for p in ps])),
        ("SGD", "'memory'", "which"),
    ),
    "a model": (hanging(lambda ps: mlp()), ("SGD", "'memory'")),
}


def everything(model: nn.Module, optimizer: Any, generator: torch.Generator) -> Any:
    state = {name: dict(optimizer.state.get(p, {})) for name, p in model.named_parameters()}
    return copy.deepcopy((model.state_dict(), state, generator.get_state()))


def stepped(model: nn.Module, optimizer: Any) -> None:
    for _ in range(2):
        backward(model)
        optimizer.step(lambda: model(torch.ones(1, 4)).sum() if isinstance(optimizer, torch.optim.LBFGS) else None)


def equal(left: Any, right: Any) -> bool:
    """Bit for bit, objects aside."""
    if isinstance(left, Tensor) and left.is_sparse:
        return torch.equal(left.to_dense(), right.to_dense())
    if isinstance(left, Tensor) and left.dtype == torch.float8_e5m2:
        return torch.equal(left.float(), right.float())
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(equal, left, right))
    return type(left) is object or same(left, right)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused_by_name_before_anything_is_written(name: str):
    make, words = REFUSED[name]
    model, generator = mlp(), torch.Generator().manual_seed(5)
    optimizer = make(model.parameters())
    stepped(model, optimizer)
    before = everything(model, optimizer, generator)
    with pytest.raises(gxd.PlanError) as caught:
        reset(model, optimizer, generator=generator)
    for word in (*words, "register_optimizer_state", "nothing"):
        assert word.lower() in str(caught.value).lower()
    assert equal(everything(model, optimizer, generator), before)


@pytest.mark.parametrize("name", [name for name in REFUSED if name != "L-BFGS"])
def test_training_is_refused_at_the_first_step_and_not_at_the_first_reset(name: str):
    model = mlp()
    optimizer = REFUSED[name][0](model.parameters())
    attach = lambda: gxd.ContinualBackprop(model, optimizer, plan=PLAN, utility="activation", maturity=1000)
    if name in ("something for all parameters", "a model") or "memory" in vars(optimizer):
        with pytest.raises(gxd.PlanError):
            attach()  # it is there from the beginning
        return
    cbp = attach()
    before = copy.deepcopy({key: value for key, value in cbp.state_dict().items() if key != "tally"})
    for _ in range(2):  # and again, if it goes on
        with pytest.raises(gxd.PlanError, match="Nothing was reset"):
            train(model, optimizer, 1)
        assert same({key: value for key, value in cbp.state_dict().items() if key != "tally"}, before)
    with pytest.raises(gxd.PlanError):
        attach()  # as with a resumed run


def test_state_that_comes_late_is_refused_at_the_reset():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    cbp = gxd.ContinualBackprop(model, optimizer, plan=PLAN, utility="activation", maturity=3, replacement_rate=0.5)
    train(model, optimizer, 3)
    optimizer.state[model[2].weight]["sketch"] = torch.ones(3, 7)
    backward(model)
    with pytest.raises(gxd.PlanError, match="sketch"):
        optimizer.step()
    assert cbp.total_resets == 0
    del optimizer.state[model[2].weight]["sketch"]
    train(model, optimizer, 1)
    assert cbp.total_resets > 0  # it was still due


# --- what users say ---------------------------------------------------------------------------------------------------


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch):
    from gxd.reset import optimizer_state

    monkeypatch.setattr(optimizer_state, "_TABLE", copy.deepcopy(optimizer_state._TABLE))
    optimizer_state.meaning_of.cache_clear()
    yield
    optimizer_state.meaning_of.cache_clear()


@pytest.mark.parametrize("kind", ["gradient", "weights", "keep"])
@pytest.mark.parametrize("optimizer", [None, Kept, "Kept"], ids=str)
def test_a_user_can_say_what_a_key_means(kind: str, optimizer: Any, table: Any):
    gxd.register_optimizer_state("memory", kind, optimizer=optimizer)
    model = mlp()
    kept = Kept(model.parameters(), lambda p: {"memory": torch.full_like(p, 7.0)})
    train(model, kept, 1)
    reset(model, kept)
    for (_, where), p in zip(reset_slices(model), model.parameters()):
        expected = {"gradient": torch.zeros_like(p), "weights": p.detach(), "keep": torch.full_like(p, 7.0)}[kind]
        assert torch.equal(kept.state[p]["memory"][where], expected[where])


def test_what_is_said_of_one_class_holds_for_it_and_its_subclasses_alone(table: Any):
    class Mine(Kept):
        pass

    class Other(Mine):
        pass

    gxd.register_optimizer_state("z", "gradient", optimizer=Mine)
    for kind in (Mine, Other, Kept):
        model = mlp()
        optimizer = kind(model.parameters(), lambda p: {"z": torch.ones_like(p)})
        train(model, optimizer, 1)
        if kind is Kept:
            with pytest.raises(gxd.PlanError):
                reset(model, optimizer)
        else:
            reset(model, optimizer)
            assert not optimizer.state[model[0].weight]["z"][1].any()


def test_an_attribute_that_is_said_to_be_a_copy_is_written(table: Any):
    gxd.register_optimizer_state("memory", "weights")
    model = mlp()
    optimizer = hanging(lambda ps: [torch.ones_like(p) for p in ps])(model.parameters())
    train(model, optimizer, 1)
    reset(model, optimizer)
    assert torch.equal(optimizer.memory[0][[1, 4]], model[0].weight[[1, 4]])


@pytest.mark.parametrize(
    ("arguments", "error", "word"),
    [
        (("key", "gradients"), ValueError, "'gradients'"),
        ((3, "gradient"), TypeError, "3"),
        (("", "gradient"), TypeError, "key"),
        (("key", "keep", 5), TypeError, "5"),
    ],
)
def test_a_wrong_word_is_refused(arguments: Any, error: Any, word: str):
    with pytest.raises(error, match=word):
        gxd.register_optimizer_state(*arguments)


def test_the_documentation_lists_every_key_of_the_table():
    from gxd.reset import optimizer_state

    text = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
    missing = [key for key in optimizer_state._TABLE if f"`{key}`" not in text]
    assert not missing
