"""What several methods on one model, and steps that go wrong, must not do to each other."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gxd
from gxd.methods.unit_reset import UnitReset
from gxd.select import LowestRate
from tests.rig import same

X, Y = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3


def mlp() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


class TwoReaders(nn.Module):
    """One view with two consumers, and another view."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.f = nn.Linear(4, 8)
        self.a, self.b, self.c = (nn.Linear(8, 3) for _ in "abc")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.f(x)
        r = h.relu()
        return self.a(r) + self.b(r) + self.c(torch.tanh(h))


def train(model, optimizer, attached=None, x=X):
    logits = model(x)
    if attached is not None:
        attached.observe(logits, Y[: len(x)])
    F.cross_entropy(logits, Y[: len(x)]).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("utility", gxd.utilities())
def test_two_methods_that_score_by_the_same_utility_see_the_same(utility):
    if utility in ("random", "gxd_sketch", "gxd_kl", "gxd_second_order"):
        pytest.skip("each draws for itself")
    model = TwoReaders()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pair = [gxd.method("continual_backprop", utility=utility, replacement_rate=0.0) for _ in range(2)]
    attached = gxd.attach(model, optimizer, *pair, example_inputs=X[:2])
    for _ in range(3):
        train(model, optimizer, attached)
    assert same(attached.utilities("0.continual_backprop"), attached.utilities("1.continual_backprop"))
    alone = TwoReaders()
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    cbp = gxd.ContinualBackprop(alone, optimizer, example_inputs=X[:2], utility=utility, replacement_rate=0.0)
    for _ in range(3):
        train(alone, optimizer, cbp)
    assert same(attached.utilities("0.continual_backprop"), cbp.utilities())


def distance_after(steps, optimizers, scaler=None, **options):
    """How far a weight, moved by 1, is from where it began, if nothing but l2_init acts on it."""
    model = mlp()
    made = optimizers(model)
    gxd.attach(model, made, gxd.method("l2_init", strength=1.0, **options), scaler=scaler)
    first = model[2].weight.detach().clone()
    with torch.no_grad():
        model[2].weight.add_(1)
    for _ in range(steps):
        loss = model(X).sum() * 0
        (loss if scaler is None else scaler.scale(loss)).backward()
        for one in made if isinstance(made, list) else [made]:
            one.step() if scaler is None else scaler.step(one)
        if scaler is not None:
            scaler.update()
        model.zero_grad()
    return float((model[2].weight - first).detach().abs().mean())


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("maximize", [True, False])
def test_l2_init_pulls_towards_the_beginning_also_where_the_optimizer_climbs(decoupled, maximize):
    sgd = lambda model: torch.optim.SGD(model.parameters(), 0.1, maximize=maximize)
    assert distance_after(10, sgd, decoupled=decoupled) == pytest.approx(0.9**10, rel=1e-4)


@pytest.mark.parametrize("decoupled", [True, False])
def test_l2_init_acts_on_the_parameters_of_every_optimizer_with_a_scaler(decoupled):
    def two(model):
        return [torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.SGD(model[2:].parameters(), 0.1)]

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert distance_after(10, two, scaler, decoupled=decoupled) == pytest.approx(0.9**10, rel=1e-4)


@pytest.mark.parametrize("name", [name for name in gxd.methods() if name != "plasticity_injection"])
def test_every_method_follows_a_model_that_changes_its_type(name: str):
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    often = {"redo": {"every": 2}, "regrama": {"every": 2}, "cpr": {"every": 2}, "swr": {"every": 2}}
    attached = gxd.attach(model, optimizer, gxd.method(name, **often.get(name, {})), example_inputs=X)
    for x in (X, X, X.double(), X.double(), X, X):
        model.to(x.dtype)
        output = model(x)
        attached.observe(score=output.sum(1))
        output.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with attached.evaluating():
        model(X)
    attached.boundary([(X, X[:, :3])], nn.functional.mse_loss)
    attached.load_state_dict(attached.state_dict())
    assert all(p.isfinite().all() and p.dtype == X.dtype for p in model.parameters())


def test_a_step_while_evaluating_is_refused_before_a_method_has_acted():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    attached = gxd.attach(model, optimizer, gxd.method("upgd"), gxd.method("hare_and_tortoise"))
    model(X).sum().backward()
    before = attached.state_dict(), copy.deepcopy(model.state_dict())
    with attached.evaluating(), pytest.raises(RuntimeError, match="within evaluating"):
        optimizer.step()
    assert same((attached.state_dict(), model.state_dict()), before)


def test_l2_init_follows_the_type_of_the_model_and_what_is_trained_later():
    model = mlp()
    model[0].requires_grad_(False)
    first = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gxd.attach(model, optimizer, gxd.method("l2_init", strength=1.0))
    with torch.no_grad():
        model[0].weight.add_(1)
    model.requires_grad_().double()
    for _ in range(10):
        (model(X.double()).sum() * 0).backward()
        optimizer.step()
    assert float((model[0].weight - first).detach().abs().mean()) == pytest.approx(0.9**10, rel=1e-4)


def test_more_combinations_of_observed_steps_than_programs_make_a_compiled_step_eager(monkeypatch):
    monkeypatch.setattr("gxd.compile.program.compile_graph", lambda graph, example: graph)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    methods = gxd.method("redo", every=2), gxd.method("continual_backprop", score_every=3)
    step = gxd.compiled_step(
        model, optimizer, F.cross_entropy, gxd.attach(model, optimizer, *methods, example_inputs=X[:2])
    )
    with pytest.warns(gxd.CompileWarning, match="combinations"):
        for n in (16, 12, 8):
            for _ in range(6):
                step(X[:n], Y[:n])


def activity(model) -> dict[str, torch.Tensor]:
    h = model[0](X).relu()
    return {"0": h.mean(0).detach(), "2": model[2](h).relu().mean(0).detach()}


@pytest.mark.parametrize("how", ["paused", "refused"])
def test_what_a_step_has_shown_is_not_left_to_the_next(how):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    methods = [gxd.method("continual_backprop", utility="activation", replacement_rate=0.0, decay=0.0)]
    if how == "refused":
        methods.insert(0, gxd.method("continual_backprop", utility="gxd", replacement_rate=0.0))
    attached = gxd.attach(model, optimizer, *methods, example_inputs=X[:2])
    logits = model(X * 100)
    logits.sum().backward()
    if how == "paused":
        with attached.paused():
            optimizer.step()
    else:
        with pytest.raises(gxd.ObservationError):
            optimizer.step()
    train(model, optimizer, attached)
    found = attached.utilities(f"{len(methods) - 1}.continual_backprop")
    assert all(torch.allclose(found[name], mean) for name, mean in activity(model).items())


class AtBoundaries(UnitReset):
    name = "at_boundaries"

    def at_boundary(self, host, state):
        chosen = [(host.plan.groups[0], torch.tensor([0, 1]))]
        host.reset(chosen, {})
        return self.on_reset(host, state, chosen)


class EveryStep(gxd.Method):
    name, needs_units = "every_step", True

    def after_step(self, host, state):
        host.reset([(host.plan.groups[0], torch.tensor([0, 1]))], {})
        return state


def test_units_that_are_reset_at_a_boundary_are_new_to_all_methods_and_stay_so():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    mine = AtBoundaries("activation", LowestRate(0.0, 100))
    attached = gxd.attach(model, optimizer, mine, gxd.method("redo"), example_inputs=X[:2])
    for _ in range(5):
        train(model, optimizer)
    attached.boundary()
    for name in ("at_boundaries", "redo"):
        assert attached.ages(name)["0"].tolist() == [0, 0, 5, 5, 5, 5, 5, 5]
    train(model, optimizer)
    for name in ("at_boundaries", "redo"):
        assert attached.ages(name)["0"].tolist() == [1, 1, 6, 6, 6, 6, 6, 6]


def test_units_that_a_method_of_ones_own_resets_are_new_to_the_others():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    other = gxd.method("continual_backprop", utility="activation", replacement_rate=0.0)
    attached = gxd.attach(model, optimizer, EveryStep(), other, example_inputs=X[:2])
    for _ in range(5):
        train(model, optimizer)
    assert attached.ages()["0"].tolist() == [0, 0, 5, 5, 5, 5, 5, 5]


class Fails(torch.optim.RMSprop):
    fail = False

    def step(self, closure=None):
        if self.fail:
            raise RuntimeError("no step")
        return super().step(closure)


def test_a_compiled_step_whose_optimizer_fails_leaves_nothing_to_the_next(monkeypatch):
    monkeypatch.setattr("gxd.compile.program.compile_graph", lambda graph, example: graph)
    model = mlp()
    optimizer = Fails(model.parameters(), lr=0.0)
    cbp = gxd.ContinualBackprop(
        model, optimizer, example_inputs=X[:2], utility="gxd_all_logit", decay=0.0, replacement_rate=0.0
    )
    step = gxd.compiled_step(model, optimizer, F.cross_entropy, cbp)
    step(X, Y)
    step(X, Y)
    before = cbp.utilities()
    optimizer.fail = True
    with pytest.raises(RuntimeError, match="no step"):
        step(X * 100, Y)
    optimizer.fail = False
    optimizer.zero_grad()
    train(model, optimizer, cbp)
    assert all(torch.allclose(cbp.utilities()[name], value) for name, value in before.items())


class NoHooks:
    """Looks like an optimizer, and has no step hooks."""

    def __init__(self, parameters):
        self.param_groups, self.state = [{"params": list(parameters), "lr": 0.1}], {}

    def step(self): ...

    def zero_grad(self): ...


def test_an_attachment_that_fails_leaves_no_hook():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    methods = gxd.method("redo"), gxd.method("l2_init", decoupled=False)
    with pytest.raises(TypeError, match="no step hooks"):
        gxd.attach(model, [NoHooks(model.parameters()), optimizer], *methods, example_inputs=X[:2])
    assert not optimizer._optimizer_step_post_hooks and not optimizer._optimizer_step_pre_hooks
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_warnings_name_the_users_line():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gxd.ContinualBackprop(model, optimizer, example_inputs=X[:2], on_unobserved="warn")
    with pytest.warns(gxd.ObservationWarning) as caught:
        optimizer.step()
    assert [warning.filename for warning in caught] == [__file__]


def resets_of(attachments: list, optimizer, model) -> int:
    for _ in range(4):
        train(model, optimizer)
    return sum(one.total_resets for one in attachments)


OFTEN = {"replacement_rate": 0.2, "maturity": 1}


@pytest.mark.parametrize("new", ["nothing", "the optimizer", "a rate"])
def test_what_is_attached_twice_replaces_the_first_and_says_so(new):
    """As when a cell of a notebook is run again, which may make the optimizer, too."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = gxd.find_units(model, X[:2])
    first = gxd.attach(model, optimizer, gxd.method("gxd", **OFTEN), plan=plan)
    if new == "the optimizer":
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = {**OFTEN, "maturity": 2} if new == "a rate" else OFTEN
    with pytest.warns(gxd.ObservationWarning, match=r"gxd.*already.*cell of a notebook.*in one call") as warned:
        second = gxd.attach(model, optimizer, gxd.method("gxd", **options), plan=plan)
    assert len(warned) == 1 and warned[0].filename == __file__
    assert first.closed and not second.closed
    found = resets_of([first, second], optimizer, model)
    alone = mlp()
    alone_optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    expected = gxd.attach(alone, alone_optimizer, gxd.method("gxd", **options), plan=plan)
    assert found == resets_of([expected], alone_optimizer, alone) > 0
    assert same(dict(model.state_dict()), dict(alone.state_dict()))
    second.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_second_continual_backprop_replaces_the_first_and_what_fails_replaces_nothing():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    first = gxd.ContinualBackprop(model, optimizer, example_inputs=X[:2])
    with pytest.raises(gxd.PlanError):
        gxd.ContinualBackprop(model, torch.optim.SGD(model[0].parameters(), 0.1), example_inputs=X[:2])
    assert not first.closed
    with pytest.warns(gxd.ObservationWarning, match=r"ContinualBackprop\(.*already"):
        gxd.ContinualBackprop(model, optimizer, example_inputs=X[:2])
    assert first.closed


def test_other_methods_other_units_and_other_parameters_may_be_attached_beside(recwarn):
    model, other = mlp(), mlp()
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], 0.1)
    plan = gxd.find_units(model, X[:2])
    both = gxd.method("continual_backprop", utility="random"), gxd.method("continual_backprop", utility="activation")
    beside = [
        gxd.attach(model, optimizer, "gxd", plan=plan.select(include="0")),
        gxd.attach(model, optimizer, "gxd", plan=plan.select(include="2")),
        gxd.attach(model, optimizer, *both, plan=plan),
        gxd.attach(model, optimizer, "l2"),
        gxd.attach(other, optimizer, "l2"),
        gxd.attach(other, optimizer, "gxd", plan=plan),
    ]
    copied = copy.deepcopy((model, other, optimizer, *beside))
    assert not any(one.closed for one in (*beside, *copied[3:]))
    assert not [w for w in recwarn if issubclass(w.category, gxd.ObservationWarning)]
