"""A compiled step follows what a user changes between two steps, or runs eagerly and says why.

Each test trains twice: by a compiled step, and by one that was told to run eagerly. The graph is run without the
compiler.
"""

import collections
import collections.abc
import copy
import functools
import types
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import gxd
from gxd.compile import program
from gxd.compile.step import MOST_PROGRAMS

pytestmark = pytest.mark.usefixtures("traced_only")
BETA = 1.0


@pytest.fixture
def traced_only(monkeypatch):
    monkeypatch.setattr(program, "compile_graph", lambda graph, example: graph)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.0), nn.Linear(12, 3))


def batch(rows=8):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def train(model, loss, change, compiled, optimizer=sgd, steps=4):
    """The losses; ``change(model, optimizer)`` comes before the third step."""
    optimizer = optimizer(model.parameters())
    step = gxd.compiled_step(model, optimizer, loss)
    if not compiled:
        step.why_eager = "asked for"
    torch.manual_seed(3)
    losses = []
    for number in range(steps):
        if number == 2:
            change(model, optimizer)
        losses.append(float(step(*batch())[0]))
    return losses, step


def agree(make, change, loss=lambda: F.cross_entropy, why=None, **options):
    """Both trainings give the same losses and weights. ``why``: what the compiled one says when it gives up."""
    models = [make(), make()]
    expected, _ = train(models[0], loss(), change, False, **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found, step = train(models[1], loss(), change, True, **options)
    said = [str(one.message) for one in said if issubclass(one.category, gxd.CompileWarning)]
    assert found == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(dict(models[1].state_dict()), dict(models[0].state_dict()))
    if why is None:
        assert step.why_eager is None and not said and step._programs
    else:
        assert len(said) == 1 and why in said[0] and why in step.why_eager
    return step


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.heads = nn.Linear(6, 12), nn.ModuleList([nn.Linear(12, 3) for _ in range(2)])
        self.task = 0

    def forward(self, x):
        return self.heads[self.task](F.relu(self.body(x)))


def nothing(model, optimizer):
    pass


OPTIMIZERS = [sgd, torch.optim.Adam, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)]


# --- values that Python holds


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["sgd", "adam", "momentum"])
def test_a_switch_of_the_head_is_followed_also_where_its_state_is_not_made_yet(optimizer):
    def switch(model, optimizer):
        model.task = 1

    step = agree(Heads, switch, optimizer=optimizer, steps=6)
    assert len(step._programs) == 2


def test_a_switch_back_needs_no_new_program():
    def switch(model, optimizer):
        model.task = 1

    model = Heads()
    _, step = train(model, F.cross_entropy, switch, True, torch.optim.Adam)
    model.task = 0
    step(*batch())
    assert len(step._programs) == 2


def test_the_rate_of_dropout_is_followed():
    def change(model, optimizer):
        model[2].p = 0.9

    agree(mlp, change)


def test_a_value_that_is_computed_again_and_is_the_same_compiles_nothing():
    def change(model, optimizer):
        model[2].p = float("0.0")

    assert len(agree(mlp, change)._programs) == 1


def test_variables_around_the_loss_are_followed():
    beta = 1.0

    def change(model, optimizer):
        nonlocal beta
        beta = 10.0

    def loss():
        nonlocal beta
        beta = 1.0
        return lambda output, target: beta * F.cross_entropy(output, target)

    agree(mlp, change, loss)


def test_globals_that_the_loss_names_are_followed_through_a_helper(monkeypatch):
    def loss():
        monkeypatch.setitem(globals(), "BETA", 1.0)
        return lambda output, target: weighted(output, target)

    agree(mlp, lambda model, optimizer: monkeypatch.setitem(globals(), "BETA", 10.0), loss)


def weighted(output, target):
    return BETA * F.cross_entropy(output, target)


def test_defaults_and_arguments_bound_to_the_loss_are_followed():
    made = []

    def loss():
        def with_default(output, target, beta=1.0, *, gamma):
            return beta * gamma * F.cross_entropy(output, target)

        made.append(functools.partial(with_default, gamma=1.0))
        return made[-1]

    def change_default(model, optimizer):
        made[-1].func.__defaults__ = (10.0,)

    def change_argument(model, optimizer):
        made[-1].keywords["gamma"] = 10.0

    agree(mlp, change_default, loss)
    agree(mlp, change_argument, loss)


def test_attributes_of_a_loss_module_of_settings_and_of_a_trainer_are_followed():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.beta = 1.0

        def forward(self, output, target):
            return self.beta * F.cross_entropy(output, target)

    class Trainer:
        def __init__(self):
            self.beta, self.steps = 1.0, 0

        def weight(self):
            return self.beta

        def loss(self, output, target):
            return self.weight() * F.cross_entropy(output, target)

    held = []

    def keep(value):
        held.append(value)
        return value

    def with_settings():
        settings = keep(types.SimpleNamespace(beta=1.0))
        return lambda output, target: settings.beta * F.cross_entropy(output, target)

    def change(model, optimizer):
        held[-1].beta = 10.0

    for loss in (lambda: keep(Weighted()), with_settings, lambda: keep(Trainer()).loss):
        agree(mlp, change, loss)


class OfClass:
    beta = 1.0


class OfSlots:
    __slots__ = ("beta",)

    def __init__(self):
        self.beta = 1.0


class OfProperty:
    hidden = 1.0

    @property
    def beta(self):
        return self.hidden


class Reverse(torch.autograd.Function):
    beta = 1.0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return Reverse.beta * gradient


class WithKeys(collections.UserDict):
    """As many classes of settings are: keys are attributes, or not, and there is a list of them."""

    def keys(self):
        return list(self.data)


class MadeAsAskedFor(collections.abc.Mapping):
    """An archive, which reads its arrays anew each time."""

    def __getitem__(self, key):
        return torch.ones(2)

    def __iter__(self):
        return iter(["weight"])

    def __len__(self):
        return 1


def test_a_mapping_that_makes_its_values_and_one_of_weak_keys_are_no_reason_to_run_eagerly():
    archive, cache = MadeAsAskedFor(), weakref.WeakKeyDictionary()

    def weigh(output, target):
        return (2.0 if output in cache else 1.0) * archive["weight"].sum() * F.cross_entropy(output, target)

    step = agree(mlp, lambda model, optimizer: None, lambda: weigh)
    assert len(step._programs) == 1


def reached_by_name():
    """Name -> a loss, and how to make its weight 10."""
    settings, holder, config = types.SimpleNamespace(beta=1.0), OfSlots(), {"loss": {"beta": 1.0}}
    hidden, file = OfProperty(), types.ModuleType("a_file_of_the_user")
    exec("BETA = 1.0\ndef weight(): return BETA", vars(file))
    options, reverse = collections.UserDict(beta=1.0), type("Reversed", (Reverse,), {})
    of_mapping, of_dict = WithKeys(beta=5.0), type("OfDict", (dict,), {})(beta=5.0)
    of_mapping.beta = of_dict.beta = 1.0

    class Criterion(nn.Module):
        def forward(self, output, target):
            return settings.beta * F.cross_entropy(output, target)

    class Helper:
        @staticmethod
        def weigh(value):
            return settings.beta * value

        @classmethod
        def weigh_too(cls, value):
            return cls.weigh(value)

    def with_attribute(output, target):
        return with_attribute.beta * F.cross_entropy(output, target)

    with_attribute.beta = Reverse.beta = 1.0
    instance, kind = OfClass(), type("OfItsOwn", (OfClass,), {})

    def by_default(output, target, used=settings):
        return used.beta * F.cross_entropy(output, target)

    def by_keyword(output, target, *, used=1.0):
        return used * F.cross_entropy(output, target)

    return {
        "attribute of a default": (by_default, lambda: setattr(settings, "beta", 10.0)),
        "keyword default": (by_keyword, lambda: by_keyword.__kwdefaults__.update(used=10.0)),
        "key": (lambda o, t: config["loss"]["beta"] * F.cross_entropy(o, t), lambda: config["loss"].update(beta=10.0)),
        "slot": (lambda o, t: holder.beta * F.cross_entropy(o, t), lambda: setattr(holder, "beta", 10.0)),
        "class": (lambda o, t: kind.beta * F.cross_entropy(o, t), lambda: setattr(kind, "beta", 10.0)),
        "instance": (lambda o, t: instance.beta * F.cross_entropy(o, t), lambda: setattr(instance, "beta", 10.0)),
        "property": (lambda o, t: hidden.beta * F.cross_entropy(o, t), lambda: setattr(hidden, "hidden", 10.0)),
        "mapping": (lambda o, t: options["beta"] * F.cross_entropy(o, t), lambda: options.update(beta=10.0)),
        "attribute of a mapping": (
            lambda o, t: of_mapping.beta * F.cross_entropy(o, t),
            lambda: setattr(of_mapping, "beta", 10.0),
        ),
        "key of a mapping with such an attribute": (
            lambda o, t: of_mapping["beta"] * F.cross_entropy(o, t),
            lambda: of_mapping.update(beta=50.0),
        ),
        "attribute of a dict": (
            lambda o, t: of_dict.beta * F.cross_entropy(o, t),
            lambda: setattr(of_dict, "beta", 10.0),
        ),
        "own attribute": (with_attribute, lambda: setattr(with_attribute, "beta", 10.0)),
        "module made within": (lambda o, t: Criterion()(o, t), lambda: setattr(settings, "beta", 10.0)),
        "static method": (lambda o, t: Helper.weigh(F.cross_entropy(o, t)), lambda: setattr(settings, "beta", 10.0)),
        "class method": (lambda o, t: Helper.weigh_too(F.cross_entropy(o, t)), lambda: setattr(settings, "beta", 10.0)),
        "backward": (lambda o, t: F.cross_entropy(reverse.apply(o), t), lambda: setattr(Reverse, "beta", 10.0)),
        "variable of a file": (lambda o, t: file.BETA * F.cross_entropy(o, t), lambda: setattr(file, "BETA", 10.0)),
        "function of a file": (lambda o, t: file.weight() * F.cross_entropy(o, t), lambda: setattr(file, "BETA", 10.0)),
    }


@pytest.mark.parametrize("where", reached_by_name())
def test_what_the_loss_reaches_by_name_is_followed(where):
    made = []

    def loss():
        made.append(reached_by_name()[where])
        return made[-1][0]

    assert len(agree(mlp, lambda model, optimizer: made[-1][1](), loss)._programs) == 2


def test_what_forward_reaches_by_name_is_followed_through_its_methods_and_objects(monkeypatch):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.config, self.table = mlp(), types.SimpleNamespace(scale=1.0), {"scale": 1.0}

        def forward(self, x):
            return self.scale() * self.body(x)

        def scale(self):
            return self.config.scale * self.table["scale"] * BETA

    def loss():
        monkeypatch.setitem(globals(), "BETA", 1.0)
        return F.cross_entropy

    agree(Scaled, lambda model, optimizer: setattr(model.config, "scale", 10.0), loss)
    agree(Scaled, lambda model, optimizer: model.table.update(scale=10.0), loss)
    agree(Scaled, lambda model, optimizer: monkeypatch.setitem(globals(), "BETA", 10.0), loss)


def test_what_the_forward_of_a_base_class_reaches_by_name_is_followed():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.table = mlp(), {"scale": 1.0}

        def forward(self, x):
            return self.table["scale"] * self.body(x)

    class Inherits(Scaled):
        def forward(self, x):
            return super().forward(x)

    class Names(Scaled):
        def forward(self, x):
            return Scaled.forward(self, x)

    for make in (Inherits, Names):
        assert len(agree(make, lambda model, optimizer: model.table.update(scale=10.0))._programs) == 2


def losses_with_a_list(recompile):
    betas = [1.0]

    def loss(output, target):
        return betas[0] * F.cross_entropy(output, target)

    model = mlp()
    step = gxd.compiled_step(model, torch.optim.SGD(model.parameters(), lr=0.0), loss)
    first = step(*batch())[0]
    betas[0] = 10.0
    if recompile:
        step.recompile()
    return float(step(*batch())[0] / first), step


def test_what_is_inside_a_list_is_followed_after_recompile():
    assert losses_with_a_list(recompile=False)[0] == 1
    ratio, step = losses_with_a_list(recompile=True)
    assert ratio == pytest.approx(10) and len(step._programs) == 1


def test_a_step_that_fell_back_compiles_again_after_recompile():
    model = mlp()
    hook = model[1].register_forward_hook(lambda module, args, output: None)
    with pytest.warns(gxd.CompileWarning, match="forward hook") as said:
        step = gxd.compiled_step(model, sgd(model.parameters()), F.cross_entropy)
    step(*batch())
    assert said[0].filename == __file__ and step.why_eager and not step._programs
    with pytest.warns(gxd.CompileWarning, match="forward hook") as said:
        step.recompile()
    assert said[0].filename == __file__ and step.why_eager
    hook.remove()
    step.recompile()
    step(*batch())
    assert step.why_eager is None and len(step._programs) == 1


def test_a_step_that_asked_for_too_many_programs_compiles_again_after_recompile():
    model = mlp()
    step = gxd.compiled_step(model, sgd(model.parameters()), F.cross_entropy)
    with pytest.warns(gxd.CompileWarning, match="shapes") as said:
        for rows in range(1, MOST_PROGRAMS + 2):
            step(*batch(rows))
    assert said[0].filename == __file__
    step.recompile()
    step(*batch())
    assert step.why_eager is None and len(step._programs) == 1


def test_what_the_loss_does_not_read_compiles_nothing():
    class Trainer:
        steps = 0

        def __init__(self):
            self.steps = 0

        def loss(self, output, target):
            return F.cross_entropy(output, target)

    trainer = Trainer()

    def count(model, optimizer):
        trainer.steps += 1

    assert len(agree(mlp, count, lambda: trainer.loss)._programs) == 1


def test_tensors_that_the_loss_holds_are_read_anew_whether_written_to_or_replaced():
    weights = torch.ones(3)

    def loss():
        nonlocal weights
        weights = torch.ones(3)
        return lambda output, target: F.cross_entropy(output, target, weights)

    def write(model, optimizer):
        weights[0] = 10.0

    def replace(model, optimizer):
        nonlocal weights
        weights = torch.tensor([10.0, 1.0, 1.0])

    assert len(agree(mlp, write, loss)._programs) == 1
    agree(mlp, replace, loss)


def test_a_tensor_that_the_loss_holds_is_no_constant_of_the_graph(monkeypatch):
    graphs = []
    monkeypatch.setattr(program, "compile_graph", lambda graph, example: graphs.append(graph) or graph)
    weights = torch.ones(3)
    train(mlp(), lambda output, target: F.cross_entropy(output, target, weights), nothing, True)
    assert not [node for node in graphs[0].graph.nodes if node.op == "get_attr"]


def test_a_tensor_that_a_module_holds_without_registering_it_is_followed():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.scale = mlp(), torch.ones(1)

        def forward(self, x):
            return self.body(x) * self.scale

    def replace_by_its_equal_and_write(model, optimizer):
        model.scale = torch.ones(1)
        model.scale.mul_(3)

    def write(model, optimizer):
        model.scale.mul_(3)

    agree(Masked, replace_by_its_equal_and_write)
    agree(Masked, write)


def test_a_penalty_on_the_parameters_reaches_their_gradients():
    def penalised(model):
        return lambda output, target: F.cross_entropy(output, target) + model[0].weight.square().sum()

    models = [mlp(), mlp()]
    for model, compiled in zip(models, (False, True)):
        _, step = train(model, penalised(model), nothing, compiled)
    assert step.why_eager is None
    torch.testing.assert_close(dict(models[1].state_dict()), dict(models[0].state_dict()))


def test_a_parameter_that_is_read_past_the_model_runs_eagerly():
    model = mlp()
    weight = model[0].weight
    with pytest.warns(gxd.CompileWarning, match=r"'0\.weight' is read other than through the model"):
        train(model, lambda output, target: F.cross_entropy(output, target) + weight.sum(), nothing, True)


def test_an_attribute_that_forward_sets_is_left_as_the_eager_step_leaves_it():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.calls = mlp(), 0

        def forward(self, x):
            self.calls += 1
            return self.body(x)

    class Caches(Keeps):
        def forward(self, x):
            self.features = self.body[:2](x)
            return self.body[2:](self.features)

    class Lists(Keeps):
        def __init__(self):
            super().__init__()
            self.seen = []

        def forward(self, x):
            self.seen.append(x)
            return self.body(x)

    model = Keeps()
    with pytest.warns(gxd.CompileWarning, match=r"'model\.calls'"):
        train(model, F.cross_entropy, nothing, True)
    assert model.calls == 4
    model = Caches()
    with pytest.warns(gxd.CompileWarning, match=r"'model\.features'"):
        train(model, F.cross_entropy, nothing, True)
    assert type(model.features) is torch.Tensor
    model = Lists()
    with pytest.warns(gxd.CompileWarning, match=r"'model\.seen'"):
        train(model, F.cross_entropy, nothing, True)
    assert [type(x) for x in model.seen] == [torch.Tensor] * 4


@pytest.mark.parametrize(
    "memory",
    [
        lambda: collections.deque([torch.zeros(6)], maxlen=3),
        lambda: [[torch.zeros(6)]],
        lambda: {"seen": [torch.zeros(6)]},
        lambda: types.SimpleNamespace(seen=collections.deque([torch.zeros(6)])),
    ],
    ids=["deque", "list in a list", "list in a dict", "deque of an object"],
)
def test_what_forward_keeps_in_a_container_is_left_as_the_eager_step_leaves_it(memory):
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.memory = mlp(), memory()

        def forward(self, x):
            seen = self.memory[0] if type(self.memory) is list else self.memory
            seen = seen["seen"] if isinstance(seen, dict) else getattr(seen, "seen", seen)
            mean = torch.stack(list(seen)).mean(0)
            seen.append(x.mean(0).detach())
            return self.body(x - mean)

    agree(Remembers, nothing, why="model.memory")


def test_a_variable_that_the_loss_counts_with_is_counted_at_every_step():
    calls = 0

    def loss(output, target):
        nonlocal calls
        calls += 1
        return F.cross_entropy(output, target)

    with pytest.warns(gxd.CompileWarning, match="'loss: calls'"):
        train(mlp(), loss, nothing, True)
    assert calls == 4


def test_an_attribute_that_is_set_once_does_not_keep_a_model_from_being_compiled():
    class Sizes(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            self.width = x.shape[1]
            return self.body(x)

    agree(Sizes, nothing)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU])
def test_recurrent_layers_which_mend_their_lists_of_weights_are_compiled(kind):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.rnn, self.head = kind(6, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(self.rnn(x.unsqueeze(1))[0][:, -1])

    agree(Recurrent, nothing)


# --- the optimizer, hooks, autocast, replaced parts


def test_the_learning_rate_is_followed_after_the_optimizer_was_loaded():
    def load(model, optimizer):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.param_groups[0]["lr"] = 0.001

    for optimizer in OPTIMIZERS:
        agree(mlp, load, optimizer=optimizer)


@pytest.mark.filterwarnings("ignore::gxd.CompileWarning", "ignore:Full backward hook")
def test_hooks_of_the_user_run_at_every_step():
    def on_gradient(model, optimizer):
        model[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))

    def on_accumulation(model, optimizer):
        model[0].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 0))

    def on_step(model, optimizer):
        optimizer.register_step_pre_hook(lambda *_: setattr(model[0].weight, "grad", None))

    def on_forward(model, optimizer):
        model[1].register_forward_hook(lambda module, args, output: output * 0.5)

    def on_input(model, optimizer):
        model[1].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))

    def on_backward(model, optimizer):
        model[0].register_full_backward_hook(lambda module, gi, go: None)

    for hook, why in (
        (on_gradient, "'0.weight' has a hook on its gradient"),
        (on_accumulation, "'0.weight' has a hook on its gradient"),
        (on_step, "step hooks"),
        (on_forward, "'model.1' has a forward hook"),
        (on_input, "'model.1' has a forward pre hook"),
        (on_backward, "'model.0' has a backward hook"),
    ):
        agree(mlp, hook, why=why)

    def hooked():
        model = mlp()
        on_gradient(model, None)
        return model

    agree(hooked, nothing, why="'0.weight' has a hook")


def test_a_hook_that_comes_after_one_that_went_is_seen():
    def come_and_go(model, optimizer):
        model[0].weight.register_hook(lambda gradient: gradient).remove()

    def make():
        model = mlp()
        come_and_go(model, None)
        return model

    def come(model, optimizer):
        model[0].weight.register_hook(lambda gradient: gradient * 0)

    agree(mlp, come_and_go)
    agree(make, come, why="hook on its gradient")


def with_resets():
    """A step that has been compiled and taken once, and what it is made of."""
    model = mlp()
    optimizer = sgd(model.parameters())
    cbp = gxd.ContinualBackprop(model, optimizer, example_inputs=batch()[0])
    step = gxd.compiled_step(model, optimizer, F.cross_entropy, cbp)
    step(*batch())
    return model, optimizer, cbp, step


def test_the_hooks_of_gxd_itself_are_no_reason():
    *_, step = with_resets()
    assert step.why_eager is None and len(step._programs) == 1


def test_autocast_on_the_cpu_is_followed():
    model = mlp()
    step = gxd.compiled_step(model, sgd(model.parameters()), F.cross_entropy)
    assert step(*batch())[1].dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert step(*batch())[1].dtype == torch.bfloat16
    with torch.autocast("cpu", torch.float16):
        assert step(*batch())[1].dtype == torch.float16
    assert step(*batch())[1].dtype == torch.float32
    assert step.why_eager is None and len(step._programs) == 3


def test_a_new_head_is_trained():
    def replace(model, optimizer):
        torch.manual_seed(4)
        model[3] = nn.Linear(12, 3)
        optimizer.param_groups[0]["params"] = list(model.parameters())

    def add(model, optimizer):
        torch.manual_seed(4)
        model.append(nn.Linear(3, 3))
        optimizer.add_param_group({"params": list(model[-1].parameters()), "lr": 0.01})

    for change in (replace, add):
        for optimizer in OPTIMIZERS:
            agree(mlp, change, optimizer=optimizer, steps=6)


def test_a_new_parameter_is_trained_where_the_optimizer_has_it_and_named_where_not():
    def replace(model, optimizer):
        model[3].weight = nn.Parameter(torch.ones(3, 12))
        optimizer.param_groups[0]["params"] = list(model.parameters())

    def forget(model, optimizer):
        model[3].weight = nn.Parameter(torch.ones(3, 12))

    agree(mlp, replace)
    agree(mlp, forget, why="the optimizer trains 1 parameters that are not the model's")


def test_a_parameter_of_another_shape_or_kind_is_seen():
    def grow(model, optimizer):
        model[0].weight.data = torch.ones(20, 6)
        model[0].bias.data = torch.ones(20)
        model[3].weight.data = torch.ones(3, 20)

    def freeze(model, optimizer):
        model[0].weight.requires_grad_(False)

    agree(mlp, grow)
    agree(mlp, freeze)


def test_pruning_after_the_first_steps_is_not_passed_over():
    agree(mlp, lambda model, optimizer: prune.l1_unstructured(model[0], "weight", 0.5), why="forward pre hook")


def test_a_module_that_cbp_was_made_with_and_that_is_replaced_is_named():
    model = mlp()
    optimizer = sgd(model.parameters())
    cbp = gxd.ContinualBackprop(model, optimizer, example_inputs=batch()[0], utility="contribution")
    step = gxd.compiled_step(model, optimizer, F.cross_entropy, cbp)
    step(*batch())
    model[0] = nn.Linear(6, 12)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    with pytest.warns(gxd.CompileWarning, match="'0' was replaced after cbp was made"):
        step(*batch())


def test_a_step_after_close_is_refused():
    *_, cbp, step = with_resets()
    cbp.close()
    with pytest.raises(ValueError, match="cbp is closed: attach a new one"):
        step(*batch())


# --- parameters without gradients, and too many programs


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["sgd", "adam", "momentum"])
def test_a_parameter_without_a_gradient_does_not_keep_the_others_from_being_compiled(optimizer):
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.aux = mlp(), nn.Linear(3, 3)
            nn.init.ones_(self.aux.weight), nn.init.ones_(self.aux.bias)

        def forward(self, x):
            return self.body(x)

    agree(Unused, nothing, optimizer=optimizer)


def until_it_gives_up(change, optimizer=sgd, inputs=lambda number: batch()):
    model = mlp()
    optimizer = optimizer(model.parameters())
    step = gxd.compiled_step(model, optimizer, F.cross_entropy)
    with pytest.warns(gxd.CompileWarning) as said:
        for number in range(MOST_PROGRAMS + 3):
            change(number, model, optimizer)
            step(*inputs(number))
    assert len(said) == 1
    return str(said[0].message)


def test_what_asks_for_too_many_programs_is_named_with_the_remedy():
    def momentum(number, model, optimizer):
        optimizer.param_groups[0]["momentum"] = 0.5 + 0.01 * number

    def dropout(number, model, optimizer):
        model[2].p = 0.01 * number

    said = until_it_gives_up(momentum, OPTIMIZERS[2])
    assert "options other than lr" in said and "cycle_momentum=False" in said and "shape" not in said
    said = until_it_gives_up(dropout)
    assert "'model.2.p' has had 9 values" in said and "change that in place" in said
    said = until_it_gives_up(lambda *_: None, inputs=lambda number: batch(2 + number))
    assert "more than 8 shapes" in said
