"""Models made to mislead the tracer: a unit that is also read, written or shared where one would not look."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gxd

X = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Layers by name, and a forward given as a function."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.run = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *args):
        return self.run(self, *args)


def linears(**sizes):
    torch.manual_seed(1)
    return {name: nn.Linear(a, b) for name, (a, b) in sizes.items()}


TWO = {"f1": (5, 4), "f2": (4, 3)}


def interleaved(m, x):
    order = torch.zeros(4, dtype=torch.long)
    order[::2] = torch.arange(2)
    order[1::2] = torch.arange(2) + 2
    return m.f2(F.relu(m.f1(x))[:, order])


def written_into_slices(m, x):
    out = torch.zeros(len(x), 4)
    out[:, :2] = x[:, :2]
    return m.f2(F.relu(m.f1(x)) + out)


def added_into_slices(m, x):
    out = torch.zeros(len(x), 4)
    out[:, :2].add_(m.g(x)[:, :2])
    return m.f2(F.relu(m.f1(x)) + out)


def under_no_grad(m, x):
    with torch.no_grad():
        target = m.f1(2 * x)
    return m.f2(F.relu(m.f1(x))), target


def within_autocast(m, x):
    with torch.autocast("cpu", enabled=False):
        h = F.relu(m.f1(x))
    return m.f2(h)


def shared_norm(m, x):
    return m.f3(F.relu(m.norm(m.f2(F.relu(m.norm(m.f1(x)))))))


def patched():
    layers = linears(**TWO)
    layers["f2"].forward = lambda z: F.linear(z.flip(-1), layers["f2"].weight, layers["f2"].bias)
    return Net(lambda m, x: m.f2(F.relu(m.f1(x))), **layers)


# name -> (model, the groups it has; None for "whatever the check confirms")
MODELS = {
    "zeros beside the units": (
        lambda: Net(
            lambda m, x: m.f2(torch.cat([F.relu(m.f1(x)), torch.zeros(len(x), 2)], 1)), **linears(f1=(5, 4), f2=(6, 3))
        ),
        {"f1"},
    ),
    "ones beside the units": (
        lambda: Net(
            lambda m, x: m.f2(torch.cat([torch.ones(len(x), 2), F.relu(m.f1(x))], 1)), **linears(f1=(5, 4), f2=(6, 3))
        ),
        {"f1"},
    ),
    "an index written in place": (lambda: Net(interleaved, **linears(**TWO)), None),
    "input written into slices and added": (lambda: Net(written_into_slices, **linears(**TWO)), {"f1"}),
    "a layer added into slices and added": (lambda: Net(added_into_slices, **linears(**TWO, g=(5, 4))), {"f1"}),
    "a weight returned through another product": (
        lambda: Net(lambda m, x: (m.f2(F.relu(m.f1(x))), F.linear(x, m.f1.weight)), **linears(**TWO)),
        set(),
    ),
    "a weight regularised in the forward": (
        lambda: Net(lambda m, x: (m.f2(F.relu(m.f1(x))), m.f1.weight.norm()), **linears(**TWO)),
        set(),
    ),
    "a second call under no_grad": (lambda: Net(under_no_grad, **linears(**TWO)), set()),
    "a layer within autocast": (lambda: Net(within_autocast, **linears(**TWO)), {"f1"}),
    "a BatchNorm shared by two layers": (
        lambda: Net(shared_norm, norm=nn.BatchNorm1d(4), **linears(f1=(5, 4), f2=(4, 4), f3=(4, 3))),
        set(),
    ),
    "a LayerNorm shared by two layers": (
        lambda: Net(shared_norm, norm=nn.LayerNorm(4), **linears(f1=(5, 4), f2=(4, 4), f3=(4, 3))),
        set(),
    ),
    "units as an index": (
        lambda: Net(
            lambda m, x: torch.gather(m.g(x), 1, F.relu(m.f1(x)).argmax(1, keepdim=True)) + m.f2(F.relu(m.f1(x))),
            **linears(**TWO, g=(5, 4)),
        ),
        set(),
    ),
    "units as the weight of a norm": (
        lambda: Net(
            lambda m, x: m.f2(F.layer_norm(m.g(x), (4,), weight=(h := F.relu(m.f1(x))).mean(0))) + m.f2.bias * h.mean(),
            **linears(**TWO, g=(5, 4)),
        ),
        {"g"},
    ),
    "a random order": (
        lambda: Net(
            lambda m, x: m.f2(F.relu(m.f1(x))[:, torch.rand_like(m.noise).argsort()]),
            noise=nn.Buffer(torch.ones(4)),
            **linears(**TWO),
        ),
        set(),
    ),
    "a layer times itself rolled over": (
        lambda: Net(lambda m, x: m.f2((h := m.f1(x)) * h.roll(1, -1)), **linears(f1=(5, 6), f2=(6, 3))),
        set(),
    ),
    "a forward patched on the instance": (patched, set()),
    "noise in the shape of the units": (
        lambda: Net(lambda m, x: m.f2((h := F.relu(m.f1(x))) + 0.1 * torch.randn_like(h)), **linears(**TWO)),
        {"f1"},
    ),
    "dropout by hand": (
        lambda: Net(lambda m, x: m.f2((h := F.relu(m.f1(x))) * (torch.rand_like(h) > 0.2)), **linears(**TWO)),
        {"f1"},
    ),
    "one module under two names": (
        lambda: Net(lambda m, x: m.f2(F.relu(m.f1(x))), **(layers := linears(**TWO)), again=layers["f1"]),
        {"f1"},
    ),
    "one module under two names, called twice": (
        lambda: nn.Sequential(shared := nn.Linear(5, 5), nn.ReLU(), shared, nn.ReLU(), nn.Linear(5, 2)),
        set(),
    ),
    "GroupNorm on vectors": (
        lambda: Net(lambda m, x: m.f2(m.norm(m.f1(x))), norm=nn.GroupNorm(2, 4), **linears(**TWO)),
        {"f1"},
    ),
    "a mask of unknown length": (
        lambda: Net(lambda m, x: m.f2(h := F.relu(m.f1(x)))[:, 0] + h[h > 0].sum(), **linears(**TWO)),
        set(),
    ),
    "a cumulative BatchNorm": (
        lambda: Net(
            lambda m, x: m.f2(F.relu(m.norm(m.f1(x)))), norm=nn.BatchNorm1d(4, momentum=None), **linears(**TWO)
        ),
        {"f1"},
    ),
    "a stack that is summed": (
        lambda: Net(lambda m, x: m.f2(torch.stack([m.f1(x), m.g(x)]).sum(0)), **linears(**TWO, g=(5, 4))),
        set(),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_made_to_mislead_gets_a_plan_that_the_check_confirms(name):
    build, groups = MODELS[name]
    model = build()
    plan = gxd.find_units(model, X)
    if groups is not None:
        assert {g.name for g in plan.groups} == groups, str(plan)
    report = gxd.verify_plan(model, X, plan=plan)
    assert all(g.status in ("passed", "approximate") for g in report.groups), str(report)
    named = {s.name.partition("[")[0] for s in plan.skipped} | {p.module for g in plan.groups for p in g.producers}
    assert {n for n, m in model.named_modules() if isinstance(m, nn.Linear)} <= named, "a layer is not accounted for"


def test_a_bias_that_something_else_reads_takes_no_compensation():
    """The textbook sparse autoencoder subtracts the decoder's bias from its input: moving it would move the input."""
    model = Net(lambda m, x: m.d(F.relu(m.e(x - m.d.bias))), **linears(e=(5, 8), d=(8, 5)))
    plan = gxd.find_units(model, X)
    (consumer,) = plan["e"].consumers
    assert consumer.compensation == "none"
    assert "also read" in str(plan)
    assert gxd.verify_plan(model, X, plan=plan)["e"].status == "approximate"


def test_a_bias_tied_to_another_layers_is_not_written():
    layers = linears(f1=(5, 4), f2=(4, 4), f3=(4, 3))
    layers["f2"].bias = layers["f1"].bias
    model = Net(lambda m, x: m.f3(F.relu(m.f2(F.relu(m.f1(x))))), **layers)
    plan = gxd.find_units(model, X)
    assert not plan.groups or gxd.verify_plan(model, X, plan=plan).ok
    assert "f1.bias" not in plan.shapes and "f2.bias" not in plan.shapes


@pytest.mark.parametrize("name", ["mask first", "mask last"])
def test_an_input_without_a_batch_axis_is_not_taken_for_the_batch(name):
    def run(m, x, mask):
        scores = mask + x @ x.mT if name == "mask first" else x @ x.mT + mask
        return m.o(F.relu(m.f(scores.softmax(-1) @ x))).mean(1)

    model = Net(run, **linears(f=(5, 6), o=(6, 3)))
    plan = gxd.find_units(model, (torch.randn(3, 7, 5), torch.randn(7, 7)))
    (view,) = plan["f"].views
    assert (view.batch_axis, view.fold) == (0, "none")


def test_windows_folded_into_the_batch_are_unfolded_again():
    def run(m, x):
        x = x * x.mean(-1, keepdim=True)
        windows = x.view(2, 2, 4, 2, 4, 5).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 16, 5)
        return m.o(F.relu(m.f(windows))).view(2, -1, 3).mean(1)

    model = Net(run, **linears(f=(5, 6), o=(6, 3)))
    plan = gxd.find_units(model, torch.randn(2, 8, 8, 5))
    (view,) = plan["f"].views
    assert (view.batch_axis, view.fold) == (0, "major")


def test_the_check_catches_an_example_axis_that_is_not_the_plans():
    from dataclasses import replace

    model = Net(lambda m, x: m.o(F.relu(m.f(x))).mean(1), **linears(f=(5, 6), o=(6, 3)))
    x = torch.randn(3, 3, 5)
    plan = gxd.find_units(model, x)
    assert gxd.verify_plan(model, x, plan=plan)["f"].status == "passed"
    group = plan["f"]
    wrong = replace(plan, groups=(replace(group, views=(replace(group.views[0], batch_axis=1),)),))
    assert gxd.verify_plan(model, x, plan=wrong)["f"].status == "wrong"


def test_a_reader_missed_behind_a_layer_norm_is_caught_by_the_check():
    def run(m, x):
        h = m.n(m.a(x))
        return m.c(h) + m.d(h)

    model = Net(run, n=nn.LayerNorm(6), **linears(a=(5, 6), c=(6, 3), d=(6, 3)))
    right = gxd.find_units(model, X)
    assert gxd.verify_plan(model, X, plan=right)["a"].status == "approximate"
    wrong = gxd.find_units(model, groups=[gxd.manual_group("a", consumers="c", norms="n")])
    assert gxd.verify_plan(model, X, plan=wrong)["a"].status == "wrong"


def test_a_norm_that_the_plan_has_missed_is_caught_by_the_check():
    model = Net(lambda m, x: m.f2(F.relu(m.n(m.f1(x)))), n=nn.BatchNorm1d(4), **linears(**TWO))
    plan = gxd.find_units(model, groups=[gxd.manual_group("f1", consumers="f2")])
    report = gxd.verify_plan(model, X, plan=plan)
    assert report["f1"].status == "passed"  # the entry is the unit's own: a reset that leaves it is still a reset
    wrong = gxd.find_units(model, groups=[gxd.manual_group("f1", consumers="f2", norms="n")])
    assert gxd.verify_plan(model, X, plan=wrong)["f1"].status == "passed"


def test_units_without_effect_are_not_reported_as_passed():
    model = Net(lambda m, x: 0 * m.f2(F.relu(m.f1(x))), **linears(**TWO))
    assert gxd.verify_plan(model, X)["f1"].status == "inconclusive"


def test_a_bfloat16_model_and_a_random_forward_can_be_checked():
    model = Net(lambda m, x: m.f2(F.dropout(F.relu(m.f1(x)), 0.3)), **linears(**TWO))
    assert gxd.verify_plan(model, X)["f1"].status == "passed"
    assert gxd.verify_plan(model.bfloat16(), X.bfloat16())["f1"].status == "passed"
    assert model.f1.weight.dtype == torch.bfloat16


def test_unobserved_passes_do_not_pile_up_without_end():
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    cbp = gxd.ContinualBackprop(model, torch.optim.SGD(model.parameters(), 0.1), example_inputs=X)
    with pytest.warns(gxd.ObservationWarning, match="no_grad"):
        for _ in range(300):
            model(X)
    assert len(cbp._parts[0].scorer.observer.passes) == 256


def test_a_forward_that_raised_does_not_count():
    class Fuse(nn.Module):
        blown = False

        def forward(self, x):
            if self.blown:
                raise ArithmeticError("blown")
            return x

    def utilities(fail):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 4), Fuse(), nn.ReLU(), nn.Linear(4, 3))
        opt = torch.optim.SGD(model.parameters(), 0.1)
        cbp = gxd.ContinualBackprop(model, opt, example_inputs=X, utility="activation")
        if fail:
            model[3].blown = True
            with pytest.raises(ArithmeticError):
                model(100 * X)
            model[3].blown = False
        model(X).sum().backward()
        opt.step()
        return cbp.utilities()

    clean, dirty = utilities(False), utilities(True)
    assert all(torch.equal(clean[name], dirty[name]) for name in clean)


def test_a_value_changed_in_place_after_it_was_read_is_reported():
    def run(m, x):
        h = F.relu(m.f1(x))
        y = m.f2(h)
        with torch.no_grad():
            h.zero_()
        return y

    model = Net(run, **linears(**TWO))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    cbp = gxd.ContinualBackprop(model, opt, plan=gxd.find_units(model, groups=[gxd.manual_group("f1", "f2")]))
    logits = model(X)
    with pytest.raises(gxd.ObservationError, match="in place"):
        cbp.observe(logits, torch.tensor([0, 1, 2]))
