"""Avalanche cannot be installed without torchvision: a stand-in has the documented interface of its strategies."""

import copy
import sys
from importlib import metadata
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd
import gxd.integrations
from tests.rig import same

OFTEN: dict[str, Any] = {"maturity": 2, "replacement_rate": 0.1}


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class, imported beside a stand-in of the package."""
    core = ModuleType("avalanche.core")
    core.SupervisedPlugin = type("SupervisedPlugin", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "avalanche", ModuleType("avalanche"))
    monkeypatch.setitem(sys.modules, "avalanche.core", core)
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.6.0" if name == "avalanche-lib" else version(name))
    monkeypatch.delitem(sys.modules, "gxd.integrations.avalanche", raising=False)
    from gxd.integrations.avalanche import GxdPlugin

    yield GxdPlugin
    sys.modules.pop("gxd.integrations.avalanche", None)
    vars(gxd.integrations).pop("avalanche", None)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU()), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def grown(layer: nn.Linear, classes: int) -> nn.Linear:
    """A head for more classes, which knows the old ones."""
    new = nn.Linear(layer.in_features, classes)
    with torch.no_grad():
        new.weight[: layer.out_features], new.bias[: layer.out_features] = layer.weight, layer.bias
    return new


class Strategy:
    """The loop of a supervised strategy, with its calls of plugins and the names that they read."""

    def __init__(self, model: nn.Module, plugins: Any) -> None:
        self.model, self.plugins = model, plugins
        self.optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def call(self, name: str) -> None:
        for one in self.plugins:
            if hasattr(one, name):
                getattr(one, name)(self)

    def train(self, number: int, classes: int, adapt: Any = None) -> None:
        if adapt is not None:
            adapt(self.model)
            self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05)
        self.call("before_training_exp")
        generator = torch.Generator().manual_seed(number)
        self.model.train()
        for _ in range(6):
            self.mb_x = torch.randn(6, 4, generator=generator)
            self.mb_y = torch.randint(0, classes, (6,), generator=generator)
            self.optimizer.zero_grad()
            self.call("before_forward")
            self.mb_output = self.model(self.mb_x)
            self.call("after_forward")
            self.loss = F.cross_entropy(self.mb_output, self.mb_y)
            self.call("before_backward")
            self.loss.backward()
            self.call("before_update")
            self.optimizer.step()
            self.call("after_update")
        self.call("after_training_exp")
        self.model.eval()(self.mb_x)


def widen_head(model: nn.Module) -> None:
    model.head = grown(model.head, model.head.out_features + 2)


def test_units_behind_a_head_that_grows_keep_their_statistics(plugin: Any):
    made = plugin(replacement_rate=0.0)
    strategy = Strategy(Net(), [made])
    strategy.train(0, 2)
    first, before = made.cbp, copy.deepcopy(made.cbp.utilities())
    assert first.closed and int(first.ages()["body.0"].min()) == 6
    strategy.train(1, 4, widen_head)
    assert made.cbp is not first and int(made.cbp.ages()["body.0"].min()) == 12
    assert made.cbp.model.head.out_features == 4
    anew = plugin(replacement_rate=0.0)
    Strategy(copy.deepcopy(strategy.model), [anew]).train(1, 4)
    assert not torch.equal(made.cbp.utilities()["body.0"], anew.cbp.utilities()["body.0"])
    assert before["body.0"].shape == made.cbp.utilities()["body.0"].shape


def methods_of(utility: str | None) -> list[gxd.Method]:
    """That the plugin is given: ContinualBackprop with a utility, or none, and then it is the method ``gxd``."""
    return [] if utility is None else [gxd.method("continual_backprop", utility=utility, **OFTEN)]


@pytest.mark.parametrize("utility", [None, "gxd"])
def test_a_strategy_trains_as_a_loop(plugin: Any, utility: str | None):
    methods = methods_of(utility)
    made, model, twin = plugin(*methods, **({} if methods else OFTEN)), Net(), Net()
    Strategy(model, [made]).train(0, 2)
    optimizer, generator = torch.optim.SGD(twin.parameters(), 0.05), torch.Generator().manual_seed(0)
    cbp = gxd.attach(twin, optimizer, *(methods or [gxd.method("gxd", **OFTEN)]), example_inputs=torch.zeros(2, 4))
    for _ in range(6):
        x, y = torch.randn(6, 4, generator=generator), torch.randint(0, 2, (6,), generator=generator)
        optimizer.zero_grad()
        logits = twin(x)
        if methods:
            cbp.observe(logits, y)
        F.cross_entropy(logits, y).backward()
        optimizer.step()
    assert same(dict(model.state_dict()), dict(twin.state_dict())) and made.cbp.total_resets > 2
    assert same(made.state_dict(), cbp.state_dict())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("utility", [None, "gxd", "gxd_sketch"])
def test_a_state_goes_on_in_another_process(plugin: Any, utility: str | None):
    made, again = (plugin(*methods_of(utility), **({} if utility else OFTEN)) for _ in range(2))
    strategy = Strategy(Net(), [made])
    strategy.train(0, 2)
    other = Strategy(copy.deepcopy(strategy.model), [again])
    again.load_state_dict(made.state_dict())
    for one in (strategy, other):
        torch.manual_seed(1)
        one.train(1, 4, widen_head)
    assert same(again.state_dict(), made.state_dict()) and again.cbp._parts[0].units.step == 12
    assert same(dict(other.model.state_dict()), dict(strategy.model.state_dict()))


def test_hidden_layers_that_were_replaced_begin_anew_with_a_warning(plugin: Any):
    made = plugin(replacement_rate=0.0)
    strategy = Strategy(Net(), [made])
    strategy.train(0, 2)

    def replace(model: nn.Module) -> None:
        model.body = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 8), nn.ReLU())

    with pytest.warns(gxd.ObservationWarning, match="layers were replaced"):
        strategy.train(1, 2, replace)
    assert made.cbp.ages()["body.0"].tolist() == [6] * 9


def test_methods_that_wait_for_the_end_of_a_task_act_when_the_next_experience_begins(plugin: Any):
    """Else what is evaluated in between would be the network after a reset."""
    ended = []

    class Boundary(gxd.Method):
        name = "boundary"

        def at_boundary(self, host: gxd.Host, state: Any, *given: Any) -> Any:
            ended.append(host.model)
            return state

    strategy, made = Strategy(Net(), [plugin(Boundary())]), plugin(Boundary())
    strategy.train(0, 2)
    assert not ended
    made.load_state_dict(strategy.plugins[0].state_dict())
    Strategy(Net(), [made]).train(1, 2)  # resumed elsewhere
    assert len(ended) == 1
    strategy.train(1, 2)
    strategy.train(2, 2)
    assert len(ended) == 3


def test_a_method_that_needs_the_data_of_the_next_task_is_refused_before_anything_is_trained(plugin: Any):
    with pytest.raises(ValueError, match=r"dash needs the data .* boundary\(batches, loss\)"):
        plugin(gxd.method("dash"))
