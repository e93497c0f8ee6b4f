"""What a compiled step would get wrong it leaves to an eager one, and says why; what it can do it does.

Each training is made by a compiled step and by the eager loop. The graph is run without the compiler, but in the last.
"""

import collections
import copy
import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gxd
from gxd.compile import inductor

STEPS = 5


@pytest.fixture
def traced_only(monkeypatch):
    monkeypatch.setattr(inductor, "ways", lambda graph, example: [lambda: graph])


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))


def batches(rows=8, count=STEPS):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator))
        for _ in range(count)
    ]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def train(model, data, compiled, loss=F.cross_entropy, optimizer=sgd, before=lambda *_: None):
    """``before(number, model, optimizer)`` comes before each step. Returns the losses and the step."""
    optimizer = optimizer(model.parameters())
    step = gxd.compiled_step(model, optimizer, loss)
    if not compiled:
        step.why_eager = "asked for"
    torch.manual_seed(3)
    losses = []
    for number, (x, y) in enumerate(data):
        before(number, model, optimizer)
        losses.append(float(step(x, y)[0].detach()))
    return losses, step


def both(make, data, **options):
    """Train in both ways; they agree. Returns the compiled step and what it has said."""
    models = [make(), make()]
    expected, _ = train(models[0], data, False, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, step = train(models[1], data, True, **options)
    assert found == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(dict(models[1].state_dict()), dict(models[0].state_dict()), rtol=1e-4, atol=1e-5)
    return step, [str(one.message) for one in caught if issubclass(one.category, gxd.CompileWarning)]


class Checkpointed(nn.Module):
    """A segment without parameters, which is computed again with the mask of the first time."""

    def __init__(self, reentrant=False):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.reentrant = nn.Linear(6, 12), nn.Linear(12, 3), reentrant

    def forward(self, x):
        segment = checkpoint(lambda h: F.dropout(F.gelu(h), 0.5), self.body(x), use_reentrant=self.reentrant)
        return self.head(segment)


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_is_left_to_the_eager_step(reentrant):
    step, said = both(functools.partial(Checkpointed, reentrant), batches())
    assert len(said) == 1 and "checkpoint" in step.why_eager
    with torch.autograd.graph.save_on_cpu():  # hooks work as before
        torch.ones(1, requires_grad=True).exp()


class Data:
    """As graphs are batched: its repr has shapes alone."""

    def __init__(self, x):
        self.x = x

    def __repr__(self):
        return f"Data(x={list(self.x.shape)})"


class OfData(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, data):
        return self.net(data.x)


class OfKeywords(OfData):
    def forward(self, *, x, mask=None):
        return self.net(x)


@pytest.mark.usefixtures("traced_only")
def test_an_object_whose_tensors_cannot_be_found_is_no_constant():
    step, said = both(OfData, [((Data(x),), y) for x, y in batches()])
    assert len(said) == 1 and "the batch has a Data in it" in step.why_eager


@pytest.mark.usefixtures("traced_only")
def test_a_mapping_of_any_class_is_keyword_arguments():
    data = [(collections.UserDict(x=x, mask=None), y) for x, y in batches(rows=200)]  # the repr of these is abbreviated
    step, said = both(OfKeywords, data)
    assert step.why_eager is None and not said and len(step._programs) == 1


@pytest.mark.usefixtures("traced_only")
def test_a_batch_that_requires_a_gradient_gets_it():
    encoders, moved = [], []
    for compiled in (False, True):
        torch.manual_seed(5)
        encoder = nn.Linear(6, 6)
        before, other = encoder.weight.detach().clone(), torch.optim.SGD(encoder.parameters(), 0.1)
        model = mlp()
        optimizer = sgd(model.parameters())
        step = gxd.compiled_step(model, optimizer, F.cross_entropy)
        if compiled:
            with pytest.warns(gxd.CompileWarning, match="the batch requires a gradient"):
                step(encoder(batches()[0][0]), batches()[0][1])
        else:
            F.cross_entropy(model(encoder(batches()[0][0])), batches()[0][1]).backward()
        other.step()
        encoders.append(encoder.weight.detach())
        moved.append(not torch.equal(encoders[-1], before))
    assert all(moved)
    torch.testing.assert_close(*encoders)


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, output, target):
        return F.cross_entropy(output / self.temperature, target)


@pytest.mark.usefixtures("traced_only")
def test_a_parameter_of_the_loss_gets_its_gradient():
    found = []
    for why in ("asked for", None):
        model, loss = mlp(), Tempered()
        step = gxd.compiled_step(model, sgd(model.parameters()), loss)
        step.why_eager = why
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gxd.CompileWarning)
            step(*batches()[0])
        found.append(loss.temperature.grad)
    assert found[0] is not None and torch.equal(*found)
    assert "not the model's" in step.why_eager


@pytest.mark.usefixtures("traced_only")
def test_another_network_that_the_loss_only_reads_is_compiled():
    torch.manual_seed(4)
    teacher = nn.Linear(6, 3)  # it requires gradients, as target networks do, and gets none

    class Distilled(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            return self.net(x), x

    def loss(output, target):
        with torch.no_grad():
            wanted = teacher(output[1])
        return F.mse_loss(output[0], wanted) + F.mse_loss(output[0], teacher(output[1]).detach())

    def change(number, *_):
        with torch.no_grad():
            teacher.weight.fill_(number)

    step, said = both(Distilled, batches(), loss=loss, before=change)
    assert step.why_eager is None and not said


@pytest.mark.usefixtures("traced_only")
def test_gradients_that_wait_are_added_and_it_is_said_once():
    def penalty(number, model, optimizer):
        if number in (1, 3):
            model[0].weight.square().sum().backward()

    step, said = both(mlp, batches(), before=penalty)
    assert step.why_eager is None and len(step._programs) == 1
    assert len(said) == 1 and "'0.weight'" in said[0] and "wait to be added" in said[0]


@pytest.mark.usefixtures("traced_only")
def test_an_optimizer_that_leaves_zeros_behind_does_not_make_steps_wait():
    class Zeroing(torch.optim.RMSprop):
        def zero_grad(self, set_to_none=True):
            super().zero_grad(set_to_none=False)

    step, said = both(mlp, batches(), optimizer=functools.partial(Zeroing, lr=1e-3))
    assert step.why_eager is None and not said and len(step._programs) == 1


@pytest.mark.usefixtures("traced_only")
def test_a_batch_that_the_model_refuses_says_nothing_about_compiling():
    model = mlp()
    step = gxd.compiled_step(model, sgd(model.parameters()), F.cross_entropy)
    (x, y), *_ = batches()
    with warnings.catch_warnings():
        warnings.simplefilter("error", gxd.CompileWarning)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            step(torch.randn(8, 7), y)
        step(x, y)
    assert step.why_eager is None and len(step._programs) == 1


@pytest.mark.usefixtures("traced_only")
def test_noise_of_a_shape_alone_and_permutations_are_compared_and_are_those_of_the_eager_loop(monkeypatch):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            x = x + 0.1 * torch.randn(x.shape) + 0.1 * torch.rand(6)
            return self.net(torch.lerp(x, x[torch.randperm(len(x))], 0.3))

    checks = []
    agrees = inductor.Check.agrees
    monkeypatch.setattr(inductor.Check, "agrees", lambda check, f: (checks.append(check.random), agrees(check, f))[1])
    step, said = both(Noisy, batches())
    assert step.why_eager is None and not said and checks == [False]


@pytest.mark.usefixtures("traced_only")
def test_gradients_of_what_another_optimizer_trains_are_added_to_grad_as_backward_does():
    for optimizer in (sgd, functools.partial(torch.optim.RMSprop, lr=1e-3)):
        found = []
        for why in ("asked for", None):
            model = mlp()
            body, head = optimizer(model[0].parameters()), torch.optim.SGD(model[2].parameters(), 0.1)
            step = gxd.compiled_step(model, body, F.cross_entropy)
            step.why_eager = why
            for number, (x, y) in enumerate(batches()):
                step(x, y)
                if number % 2:  # two steps are added up
                    head.step()
                    head.zero_grad()
            found.append({**model.state_dict(), "grad": model[2].weight.grad})
        assert step.why_eager is None and step._programs and model[0].weight.grad is None
        torch.testing.assert_close(found[1], found[0])


@pytest.mark.usefixtures("traced_only")
def test_gradients_that_an_optimizer_is_given_may_be_written_to():
    class Clipping(torch.optim.RMSprop):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                parameter.grad.mul_(0.5)
            return super().step(closure)

    class Shares(nn.Module):
        """Gradients that autograd makes once, or does not spread out."""

        def __init__(self):
            super().__init__()
            self.net = mlp()
            self.one, self.two, self.sum = (nn.Parameter(torch.zeros(3)) for _ in range(3))

        def forward(self, x):
            return self.net(x) + (self.one + self.two) + self.sum.sum()

    def loss(output, target):
        return F.cross_entropy(output, target) + output.sum() / 100

    step, said = both(Shares, batches(), loss=loss, optimizer=functools.partial(Clipping, lr=1e-3))
    assert step.why_eager is None and not said and step._programs


class Remembers(nn.Module):
    """Its buffers are not written to, but others are put in their places."""

    def __init__(self, shape=(6,), kind=torch.float32):
        super().__init__()
        self.net = mlp()
        self.register_buffer("now", torch.zeros(shape, dtype=kind))
        self.register_buffer("before", torch.zeros(shape, dtype=kind))

    def forward(self, x):
        self.before = self.now
        self.now = 0.5 * self.now + x.mean(0)
        return self.net(x - self.before)


class Shrinks(Remembers):
    def forward(self, x):
        self.now = 0.9 * self.now.mean(0) + 0.1 * x.mean(0)
        return self.net(x - self.now)


class Ties(Remembers):
    """From the second step on they are one."""

    def forward(self, x):
        self.now.mul_(0.5).add_(x.mean(0))
        output = self.net(x - self.before)
        self.before = self.now
        return output


class Recurs(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = nn.GRUCell(6, 12), nn.Linear(12, 3)
        self.register_buffer("hidden", torch.zeros(8, 12))

    def forward(self, x):
        hidden = self.cell(x, self.hidden)
        self.hidden = hidden.detach()
        return self.head(hidden)


@pytest.mark.usefixtures("traced_only")
def test_a_buffer_in_whose_place_another_is_put_has_its_new_value_when_the_step_is_over():
    for make in (Remembers, Recurs):
        step, said = both(make, batches())
        assert step.why_eager is None and not said and len(step._programs) == 1


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize(
    "make",
    [functools.partial(Remembers, kind=torch.int64), functools.partial(Shrinks, (1, 6)), Ties],
    ids=["dtype", "shape", "tie"],
)
def test_a_buffer_in_whose_place_one_of_another_kind_or_another_s_is_put_runs_eagerly(make):
    step, said = both(make, batches())
    assert len(said) == 1 and "puts another tensor in the place of" in step.why_eager


class Penalised(nn.Module):
    """``leaf``: whether the gradient is that of a copy of the batch, or of the batch."""

    def __init__(self, leaf=True):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.leaf = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)), leaf

    def forward(self, x):
        x = x.detach().requires_grad_() if self.leaf else x.requires_grad_()
        output = self.net(x)
        return output, torch.autograd.grad(output.logsumexp(1).sum(), x, create_graph=True)[0]


def penalised(output, target):
    return F.cross_entropy(output[0], target) + output[1].square().sum()


@pytest.mark.usefixtures("traced_only")
def test_a_gradient_for_a_leaf_that_forward_makes_is_compiled():
    step, said = both(Penalised, batches(), loss=penalised)
    assert step.why_eager is None and not said and step._programs


@pytest.mark.usefixtures("traced_only")
def test_a_batch_that_forward_wants_a_gradient_for_gets_it():
    data = batches()
    step, said = both(functools.partial(Penalised, leaf=False), data, loss=penalised)
    assert len(said) == 1 and "requires a gradient" in step.why_eager and all(x.grad is not None for x, _ in data)


@pytest.mark.usefixtures("traced_only")
@pytest.mark.filterwarnings("ignore::gxd.ObservationWarning")
def test_layers_that_are_frozen_while_their_units_are_reset_are_compiled():
    found = []
    for why in ("asked for", None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))
        optimizer = sgd(model.parameters())
        cbp = gxd.ContinualBackprop(
            model, optimizer, example_inputs=batches()[0][0], replacement_rate=0.05, maturity=2, seed=1
        )
        step = gxd.compiled_step(model, optimizer, F.cross_entropy, cbp)
        step.why_eager = why
        for number, (x, y) in enumerate(batches(count=10)):
            model[0].requires_grad_(number < 4)
            step(x, y)
        assert cbp.total_resets
        found.append(model.state_dict())
    assert step.why_eager is None and len(step._programs) == 2
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def clipping(optimizer):
    """Put a function around the step of an optimizer."""
    step = optimizer.step

    @functools.wraps(step)
    def clipped(*args, **kwargs):
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)
        return step(*args, **kwargs)

    optimizer.step = clipped


def scheduled(parameters, clip=False):
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    optimizer.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    if clip:
        clipping(optimizer)
    return optimizer


def advance(number, model, optimizer):
    if number:
        optimizer.schedule.step()


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("clip", [False, True])
def test_what_is_put_around_the_step_of_an_optimizer_is_not_passed_over(clip):
    step, said = both(mlp, batches(), optimizer=functools.partial(scheduled, clip=clip), before=advance)
    assert step.why_eager is None and not said and len(step._programs) == 1
    assert (step._recipe.update is None) == clip  # a schedule only counts the calls


@pytest.mark.usefixtures("traced_only")
def test_what_is_put_around_the_step_of_an_optimizer_later_on_is_seen_and_a_schedule_compiles_nothing():
    def clip_later(number, model, optimizer):
        if number == 2:
            clipping(optimizer)

    def schedule_later(number, model, optimizer):
        if number == 2:
            optimizer.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        elif number > 2:
            optimizer.schedule.step()

    step, said = both(mlp, batches(), before=clip_later)
    assert step.why_eager is None and not said and len(step._programs) == 1 and step._recipe.update is None
    step, said = both(mlp, batches(), before=schedule_later)
    assert step.why_eager is None and not said and len(step._programs) == 1 and step._recipe.update is not None


class Filters(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.filter, self.head = nn.Parameter(torch.randn(4, dtype=torch.cfloat)), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=6))


COMPLEX = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
}


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("name", COMPLEX)
def test_complex_parameters_are_updated_as_pairs_of_real_ones(name):
    step, said = both(Filters, batches(count=20), optimizer=COMPLEX[name])
    assert step.why_eager is None and not said and step._programs


class Divides(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.net, self.by, self.read = mlp(), torch.ones(1), read  # not registered

    def forward(self, x):
        return self.net(x) / self.read(self.by)


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize(
    ("read", "said_of_it"),
    [
        *((one, "reads a number") for one in (torch.Tensor.item, float, int)),
        *((one, "reads a number") for one in (lambda t: t.tolist()[0], lambda t: t.numpy()[0])),
        (lambda t: 3 if t > 2 else 1, "data-dependent"),
    ],
)
def test_a_number_that_is_read_from_a_tensor_of_nobody_s_is_no_constant(read, said_of_it):
    def change(number, model, optimizer):
        model.by.fill_(1 + number)

    step, said = both(functools.partial(Divides, read), batches(), before=change)
    assert len(said) == 1 and said_of_it in step.why_eager


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize(
    "loss",
    [
        lambda o, y, a, n: F.cross_entropy(F.leaky_relu(o, a), y),
        lambda o, y, a, n: F.cross_entropy(o, y, label_smoothing=a),
        lambda o, y, a, n: F.cross_entropy(torch.add(o, o, alpha=a), y),
        lambda o, y, a, n: F.cross_entropy(o, y) + o[:, n].mean(),
        lambda o, y, a, n: F.cross_entropy(o, y) + o[:, :n].sum(),
        lambda o, y, a, n: F.cross_entropy(o, y) * (2.0 if torch.is_nonzero(n) else 1.0),
    ],
)
def test_a_number_that_torch_reads_from_a_tensor_by_itself_is_no_constant_either(loss):
    share, count = torch.tensor(0.0), torch.tensor(0)

    def change(number, model, optimizer):
        share.fill_(0.1 * (number % 3))
        count.fill_(number % 3)

    step, said = both(mlp, batches(), before=change, loss=lambda o, y: loss(o, y, share, count))
    assert len(said) == 1 and "reads a number" in step.why_eager


@pytest.mark.usefixtures("traced_only")
def test_a_loss_of_one_element_is_compiled_with_adam():
    step, said = both(mlp, batches(), loss=lambda o, y: F.cross_entropy(o, y).reshape(1), optimizer=torch.optim.Adam)
    assert step.why_eager is None and not said and step._programs


@pytest.mark.usefixtures("traced_only")
def test_a_number_that_is_read_from_a_tensor_made_of_a_constant_is_one():
    step, said = both(functools.partial(Divides, lambda _: torch.tensor(2.0).item()), batches())
    assert step.why_eager is None and not said and step._programs


@pytest.mark.usefixtures("traced_only")
def test_a_layer_that_learns_its_shape_from_the_first_batch_is_compiled_from_then_on():
    def lazy():
        torch.manual_seed(0)
        return nn.Sequential(nn.LazyLinear(12), nn.LazyBatchNorm1d(), nn.ReLU(), nn.Linear(12, 3))

    def grow(number, model, optimizer):
        if number == 2 and len(model) == 4:
            torch.manual_seed(1)
            model.append(nn.LazyLinear(3))
            optimizer.add_param_group({"params": list(model[-1].parameters())})

    for before in (lambda *_: None, grow):
        step, said = both(lazy, batches(), before=before)
        assert step.why_eager is None and not said and step._programs


# --- with the compiler


@pytest.fixture(scope="module")
def compiler():
    model = mlp()
    step = gxd.compiled_step(model, sgd(model.parameters()), F.cross_entropy)
    step(*batches()[0])
    if step.why_eager:
        pytest.skip(f"nothing can be compiled here: {step.why_eager}")


def compiled(make, data, **options):
    """As ``both``, and no step is eager."""
    step, said = both(make, data, **options)
    assert step.why_eager is None and not said
    return step


@pytest.mark.usefixtures("compiler")
def test_a_learning_rate_that_becomes_a_tensor_and_a_number_again_is_read_as_what_it_is():
    def change(number, model, optimizer):
        optimizer.param_groups[0]["lr"] = {2: torch.tensor(0.2), 4: 0.3}.get(number, optimizer.param_groups[0]["lr"])

    step = compiled(mlp, batches(count=6), before=change)
    assert len(step._programs) == 2


@pytest.mark.usefixtures("compiler")
def test_a_batch_with_gaps_or_repeats_in_memory_is_compiled():
    data = [(torch.cat([x, x], 1)[:, :6], y) for x, y in batches()]
    compiled(mlp, data)
    compiled(mlp, [(x[:1].expand(8, 6), y) for x, y in batches()])


@pytest.mark.usefixtures("compiler")
def test_states_of_another_memory_format_are_compiled_for():
    def make():
        torch.manual_seed(0)
        layers = nn.Conv2d(2, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)

    def load(number, model, optimizer):
        if number == 3:
            saved = copy.deepcopy(optimizer.state_dict())
            for state in saved["state"].values():
                state["momentum_buffer"] = state["momentum_buffer"].contiguous()
            optimizer.load_state_dict(saved)
            for parameter, state in optimizer.state.items():
                state["momentum_buffer"] = state["momentum_buffer"].contiguous()
                assert parameter.dim() != 4 or state["momentum_buffer"].stride() != parameter.stride()

    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(4, 2, 8, 8, generator=generator), torch.tensor([0, 1, 2, 0])) for _ in range(6)]
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    compiled(make, data, optimizer=optimizer, before=load)


@pytest.mark.usefixtures("compiler")
def test_a_step_with_complex_parameters_gives_the_numbers_of_the_eager_loop():
    compiled(Filters, batches(), optimizer=COMPLEX["adam"])


class Looks(nn.Module):
    """Looks up rows, of which there are six."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.norm, self.net = nn.Embedding(6, 6), nn.BatchNorm1d(6), mlp()

    def forward(self, x, number):
        return self.net(F.dropout(self.norm(x), 0.1) + self.rows(number))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("bad", ["input", "target"])
def test_a_batch_with_bad_numbers_raises_what_the_eager_step_raises_and_moves_no_counter(bad):
    model = Looks()
    optimizer = torch.optim.Adam(model.parameters())
    step = gxd.compiled_step(model, optimizer, F.cross_entropy)
    (x, y), number = batches()[0], torch.arange(8) % 6
    for _ in range(3):
        step((x, number), y)
    assert step.why_eager is None
    before = copy.deepcopy(optimizer.state_dict()["state"])
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    random = torch.get_rng_state()
    with pytest.raises(IndexError):
        step((x, number + 3 if bad == "input" else number), y + 9 if bad == "target" else y)
    torch.testing.assert_close(optimizer.state_dict()["state"], before, rtol=0, atol=0)
    torch.testing.assert_close(dict(model.named_parameters()), weights, rtol=0, atol=0)
    torch.set_rng_state(random)
    step((x, number), y)
    assert step.why_eager is None and {int(state["step"]) for state in optimizer.state.values()} == {4}
