"""Outputs that are observed in a hook on a module, for loops that hide them. Ground truth is an explicit observe()."""

import copy
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gxd
from tests.rig import X, Y, mlp, plan_of, same, sgd

UTILITIES = ["gxd", "gxd_sketch", "gxd_all_logit", "loss_gradient", "contribution"]
BATCHES = [X + torch.randn(X.shape, generator=torch.Generator().manual_seed(n)) for n in range(8)]


class WithLabels(nn.Module):
    """Returns an object with logits and computes its loss itself, as models of transformers do."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.net, self.loss_fn, self.checkpointed = mlp(), nn.CrossEntropyLoss(), checkpointed

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = checkpoint(self.net, x, use_reentrant=False) if self.checkpointed else self.net(x)
        return SimpleNamespace(logits=logits, loss=None if labels is None else self.loss_fn(logits, labels))


OPTIONS: dict[str, Any] = {"maturity": 1, "replacement_rate": 0.15}


PLAN = gxd.find_units(WithLabels(), X, call=lambda model, x: model(x).logits)


def train(
    observe: Any, utility: str = "gxd", micro: int = 1, autocast: bool = False, checkpointed: bool = False
) -> Any:
    """Eight steps. ``observe``: how, which is said to the attachment at first; or ``explicit``."""
    model = WithLabels(checkpointed)
    optimizer = sgd(model)
    cbp = gxd.ContinualBackprop(model, optimizer, plan=PLAN, utility=utility, **OPTIONS)
    explicit = observe == "explicit"
    if not explicit:
        observe(cbp)
    for x in BATCHES:
        optimizer.zero_grad()
        for part, labels in zip(x.chunk(micro), Y.chunk(micro), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                output = model(part, labels=labels)
            if explicit:
                cbp.observe(output.logits, labels)
            output.loss.backward()
        optimizer.step()
    assert cbp.total_resets > 5
    return model.state_dict(), optimizer.state_dict(), cbp.state_dict()


HOOKS = {
    "the model": lambda cbp: cbp.observe_output(),
    "a part by name": lambda cbp: cbp.observe_output("loss_fn", lambda a, k, o: a[0], lambda a, k, o: a[1]),
    "a module": lambda cbp: cbp.observe_output(cbp.model.loss_fn, lambda a, k, o: {"logits": a[0], "target": a[1]}),
}


@pytest.mark.parametrize("utility", UTILITIES)
@pytest.mark.parametrize("where", HOOKS)
def test_a_hook_observes_what_an_explicit_call_would_bit_for_bit(where: str, utility: str):
    assert same(train(HOOKS[where], utility), train("explicit", utility))


@pytest.mark.parametrize("options", [{"micro": 3}, {"autocast": True}, {"checkpointed": True}])
@pytest.mark.parametrize("where", HOOKS)
def test_so_it_is_with_accumulation_autocast_and_checkpointing(where: str, options: dict[str, Any]):
    assert same(train(HOOKS[where], **options), train("explicit", **options))


class FullPrecisionHead(nn.Sequential):
    """Whose backward pass would be in half precision, if that were run under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.act2(self.fc2(self.act1(self.fc1(x))))
        with torch.autocast("cpu", enabled=False):
            return self.head(h.float())


def test_a_hook_inside_autocast_differentiates_outside_of_it_as_an_explicit_call_does():
    def run(hooked: bool) -> Any:
        model = FullPrecisionHead(OrderedDict(mlp().named_children()))
        optimizer = sgd(model)
        cbp = gxd.ContinualBackprop(model, optimizer, plan=plan_of(), **OPTIONS)
        if hooked:
            cbp.observe_output(target=lambda *_: Y)
        for x in BATCHES:
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(x)
            if not hooked:
                cbp.observe(logits, Y)
            F.cross_entropy(logits, Y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict(), cbp.state_dict()

    assert same(run(True), run(False))


def attached(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, gxd.ContinualBackprop]:
    model = mlp()
    optimizer = sgd(model)
    return model, optimizer, gxd.ContinualBackprop(model, optimizer, plan=plan_of(), **{**OPTIONS, **options})


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 4) -> None:
    for x in BATCHES[:number]:
        optimizer.zero_grad()
        F.cross_entropy(model(x), Y).backward()
        optimizer.step()


@pytest.mark.parametrize("where", [None, "net"])
@pytest.mark.parametrize("score", ["attribution", "attribution_sketch"])
def test_methods_that_read_gradients_of_the_output_are_shown_it_alone_or_beside_others(where: str | None, score: str):
    def trained(hooked: bool, *others: gxd.Method) -> Any:
        model = WithLabels()
        optimizer = sgd(model)
        swr = gxd.method("swr", score=score, every=2, factor=0.5)
        attached = gxd.attach(model, optimizer, swr, *others, plan=PLAN)
        if hooked:
            attached.observe_output(where, target=lambda *_: Y)
        for x in BATCHES:
            output = model(x, labels=Y)
            if not hooked:
                attached.observe(output.logits, Y)
            optimizer.zero_grad()
            output.loss.backward()
            optimizer.step()
        assert attached._parts[0].state.total > 10
        return model.state_dict()

    assert same(trained(True), trained(False))
    others = gxd.method("continual_backprop", score_every=3), gxd.method("redo", every=3)
    assert same(trained(True, *others), trained(False, *others))


def test_passes_without_gradients_in_evaluation_or_paused_are_not_observed():
    model, optimizer, cbp = attached()
    cbp.observe_output(target=lambda *_: Y)
    steps(model, optimizer)
    before = copy.deepcopy(cbp.state_dict())
    with torch.no_grad():
        model(X)
    model.eval()(X)
    with cbp.paused():
        model.train()(X)
    assert same(cbp.state_dict(), before)
    model(X)
    assert not same(cbp.state_dict(), before)


@pytest.mark.parametrize("how", ["remove", "close"])
def test_removed_or_closed_it_leaves_no_hook(how: str):
    model, _, cbp = attached()
    hooks = lambda: sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    before = hooks()
    handle = cbp.observe_output("head", target=lambda *_: Y)
    assert hooks() == before + 2
    handle.remove() if how == "remove" else cbp.close()
    assert hooks() == (before if how == "remove" else 0)
    model(X)
    assert all(part.scorer.sums.empty for part in cbp._parts)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_copies_of_all_three_observe_for_themselves(order: tuple[int, ...]):
    parts = attached()
    parts[2].observe_output("head", target=lambda *_: Y)
    steps(*parts[:2])
    copied = copy.deepcopy(tuple(parts[n] for n in order))
    twin: Any = tuple(copied[order.index(n)] for n in range(3))
    before = copy.deepcopy(twin[2].state_dict())
    steps(*parts[:2])
    assert same(twin[2].state_dict(), before)
    steps(*twin[:2])
    assert same(twin[2].state_dict(), parts[2].state_dict())
    assert same(twin[0].state_dict(), parts[0].state_dict())
    assert twin[2].total_resets > 5


def test_a_copy_of_the_model_alone_is_not_observed():
    model, optimizer, cbp = attached()
    cbp.observe_output(target=lambda *_: Y)
    target = copy.deepcopy(model)
    target(X).sum().backward()
    steps(model, optimizer)
    assert cbp.ages()["fc1"].max() <= 4


def test_a_call_for_which_nothing_is_selected_is_not_observed():
    model, optimizer, cbp = attached(on_unobserved="skip")
    cbp.observe_output(select=lambda args, kwargs, output: None)
    steps(model, optimizer)
    assert cbp.total_resets == 0


def test_deferred_outputs_are_observed_when_that_is_asked_for_and_dropped_when_it_is_not():
    model, optimizer, cbp = attached(on_unobserved="skip")
    handle = cbp.observe_output(target=lambda *_: Y, defer=True)
    loss = F.cross_entropy(model(X), Y)
    assert cbp._parts[0].scorer.sums.empty
    assert handle.observe() == 1 and not cbp._parts[0].scorer.sums.empty
    assert handle.observe() == 0
    loss.backward()
    optimizer.step()
    model(X)
    handle.clear()
    assert handle.observe() == 0


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.log = mlp(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        z = self.net(x)
        return self.log(z) + self.log(z * 2)


def test_a_module_that_is_called_twice_in_a_pass_is_refused_by_name():
    model = Twice()
    cbp = gxd.ContinualBackprop(model, sgd(model), example_inputs=X)
    cbp.observe_output("log", target=lambda *_: Y)
    with pytest.raises(gxd.ObservationError, match="'log' was called several times"):
        model(X)


def test_a_pass_that_raised_leaves_nothing_to_the_next():
    class Breaks(nn.Sequential):
        fail = True

        def forward(self, x: Tensor) -> Tensor:
            z = super().forward(x)
            if self.fail:
                raise RuntimeError("broken data")
            return z

    model = Breaks(OrderedDict(mlp().named_children()))
    optimizer = sgd(model)
    cbp = gxd.ContinualBackprop(model, optimizer, plan=plan_of(), **OPTIONS)
    cbp.observe_output("head", target=lambda *_: Y)
    with pytest.raises(RuntimeError, match="broken"):
        model(X)
    model.fail = False
    steps(model, optimizer)
    assert cbp.total_resets > 2


@pytest.mark.parametrize(
    ("arguments", "exception", "words"),
    [
        ({"module": "hed"}, ValueError, "Did you mean 'head'"),
        ({"module": "zzz"}, ValueError, "Its parts are 'fc1'"),
        ({"module": 3}, TypeError, "module must be"),
        ({"select": "logits"}, TypeError, "select must be a function"),
        ({"target": Y}, TypeError, "target must be a function"),
        ({"defer": "no"}, TypeError, "True or False"),
    ],
)
def test_bad_input_is_refused_and_leaves_no_hook(arguments: dict[str, Any], exception: Any, words: str):
    model, _, cbp = attached()
    before = {name: list(m._forward_hooks) for name, m in model.named_modules()}
    with pytest.raises(exception, match=words):
        cbp.observe_output(**arguments)
    assert {name: list(m._forward_hooks) for name, m in model.named_modules()} == before


def test_an_output_that_is_no_tensor_needs_to_be_selected_from():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.net(x), x

    model = Pair()
    cbp = gxd.ContinualBackprop(model, sgd(model), example_inputs=X)
    cbp.observe_output()
    with pytest.raises(TypeError, match=r"returns a tuple without logits: say which tensor counts, select="):
        model(X)


def test_nothing_is_observed_after_close():
    _, _, cbp = attached()
    cbp.close()
    with pytest.raises(gxd.ObservationError, match="close"):
        cbp.observe_output()
