"""gxd.probe: its verdicts on networks that are fresh, dead or worn, its numbers, and that nothing changes."""

import copy
import itertools
import math
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gxd
from gxd.diagnose.fresh import copied, renewed
from gxd.diagnose.verdict import Probe
from tests.rig import named, refused, same

G = torch.Generator().manual_seed(0)
TEACHER = torch.randn(8, 3, generator=G)
X = torch.randn(30, 16, 8, generator=G)
DATA = [(x, (x @ TEACHER).argmax(1)) for x in X]
OPTIMIZER = lambda parameters: torch.optim.SGD(parameters, lr=0.3)


class Net(nn.Sequential):
    def __init__(self, activation=nn.ReLU):
        super().__init__(nn.Linear(8, 16), activation(), nn.Linear(16, 16), activation(), nn.Linear(16, 3))


def net(seed=0, activation=nn.ReLU):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(activation)


def dead():
    model = net()
    with torch.no_grad():
        model[0].bias.fill_(-1e3)
    return model


def probe(model, **settings):
    settings = {"steps": 60, "seeds": 4, "most": settings.get("seeds", 4), "fresh": Net, **settings}
    return gxd.probe(model, OPTIMIZER, settings.pop("data", DATA), F.cross_entropy, **settings)


# --- verdicts ---------------------------------------------------------------------------------------------------------


def test_a_fresh_network_is_healthy():
    found = probe(net(), steps=100)
    assert found.verdict == "healthy" and abs(found.gap) < 0.1 and str(found).startswith("healthy: ")
    assert found.losses["old"].shape == found.losses["fresh"].shape == (4, 100) and found.batches == 30


def test_more_fresh_networks_are_trained_while_the_verdict_is_open_and_no_longer():
    clear, close = probe(dead(), steps=300, most=None), probe(net(), steps=20, most=None)
    assert (clear.networks, clear.look, clear.looks) == (4, 1, 3) and clear.verdict == "lost"
    assert (close.networks, close.look, close.looks) == (16, 3, 3) and close.losses["old"].shape == (4, 20)
    assert "16 fresh networks, 4 orders of the data" in str(close) and "4 fresh networks" in str(clear)
    assert probe(net(), steps=20, most=6).networks == 6


def test_the_fresh_networks_are_not_the_one_that_a_seed_of_the_user_makes():
    found = probe(net(0), steps=2)
    assert not torch.equal(found.losses["old"][0], found.losses["fresh"][0])


def test_a_network_whose_relus_are_dead_is_lost():
    found = probe(dead())
    assert found.verdict == "lost" and found.gap == pytest.approx(1, abs=0.1)
    assert found.readiness["old"].max() < 0.2 * found.readiness["fresh"].min()


def test_a_network_that_is_stuck_in_the_flat_parts_of_its_tanhs_is_losing_or_lost():
    model = net(activation=nn.Tanh)
    with torch.no_grad():
        model[0].weight.mul_(12)
        model[2].weight.mul_(12)
    found = probe(model, fresh=lambda: Net(nn.Tanh))
    assert found.verdict in ("losing", "lost") and found.interval[0] > 0


def test_a_network_that_knows_the_data_already_learns_no_worse():
    model = net()
    optimizer = OPTIMIZER(model.parameters())
    for x, y in DATA * 10:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = probe(model)
    assert found.gap < 0 and found.verdict == "healthy" and "% more" in str(found)


def test_where_a_fresh_network_does_not_learn_there_is_no_verdict():
    noise = [(x, torch.randint(3, (16,), generator=G)) for x in X]
    found = gxd.probe(
        net(), lambda p: torch.optim.SGD(p, lr=1e-9), noise, F.cross_entropy, steps=20, seeds=3, fresh=Net
    )
    assert found.verdict == "undecided" and "does not learn" in str(found)


def test_losses_that_are_not_finite_are_nothing_learned():
    model = net()
    with torch.no_grad():
        model[2].weight.fill_(1e30)
    found = probe(model)
    assert found.verdict == "lost" and found.learned["old"].eq(0).all() and str(found) and found._repr_html_()
    diverging = gxd.probe(
        net(), lambda p: torch.optim.SGD(p, lr=1e20), DATA, F.cross_entropy, steps=20, seeds=2, fresh=Net
    )
    assert diverging.verdict == "undecided" and diverging.losses["old"].isnan().any() and str(diverging)


def curves(old, fresh, start=1.0, **settings):
    """A probe of runs with constant losses."""
    losses = {"old": torch.tensor(old)[:, None].expand(-1, 20), "fresh": torch.tensor(fresh)[:, None].expand(-1, 20)}
    ready = {"old": torch.ones(len(old)), "fresh": torch.ones(len(old))}
    return Probe(losses, ready, start, 5, "given", **{"confidence": 0.95, **settings})


@pytest.mark.parametrize(
    ("old", "verdict"),
    [
        ([0.50, 0.51, 0.49], "healthy"),
        ([0.30, 0.31, 0.29], "healthy"),  # better
        ([0.54, 0.541, 0.542], "healthy"),  # surely worse, by less than a tenth
        ([0.70, 0.71, 0.69], "losing"),
        ([0.98, 0.97, 0.99], "lost"),
        ([0.57, 0.57, 0.57], "losing"),  # surely worse, and by more than a tenth
        ([0.90, 0.30, 0.60], "undecided"),
        ([7.0, 7.0, 7.0], "lost"),  # above where a new network begins
        ([math.nan, math.nan, math.nan], "lost"),
    ],
)
def test_the_verdict_follows_the_documented_rules(old, verdict):
    found = curves(old, [0.5, 0.501, 0.499])
    assert found.verdict == verdict and str(found).startswith(f"{verdict}: ")
    learned = sum(max(0.0, 1 - (1.0 if math.isnan(x) else x)) for x in old) / 3
    assert found.gap == pytest.approx(1 - learned / 0.5)


def test_a_network_within_the_range_of_fresh_ones_is_healthy_only_if_a_large_loss_is_ruled_out():
    narrow, wide = [0.48, 0.49, 0.50, 0.51, 0.52], [0.40, 0.45, 0.50, 0.55, 0.60]
    assert curves([0.53] * 5, narrow).verdict == "healthy" and curves([0.53] * 5, wide).verdict == "undecided"
    assert "no worse than fresh networks among themselves" in str(curves([0.53] * 5, narrow))
    assert "may be luck" in str(curves([0.53] * 5, wide)) and "more steps" in str(curves([0.53] * 5, wide))


def test_the_luck_of_the_networks_own_first_weights_widens_the_interval_however_many_fresh_ones_there_are():
    few, many = (curves([0.5] * 5, [0.45, 0.475, 0.5, 0.525, 0.55] * n).interval for n in (1, 400))
    assert few[0] < many[0] < -0.05 and few[1] > many[1] > 0.05


def test_several_looks_cost_width():
    fresh = [0.49, 0.50, 0.51]
    one, first, last = (curves([0.6] * 3, fresh, looks=n, look=k).interval for n, k in ((1, 1), (3, 1), (3, 3)))
    assert first[0] < last[0] < one[0] and first[1] > last[1] > one[1]


@pytest.mark.parametrize(
    ("old", "fresh", "words"),
    [
        (0.69, [0.50, 0.505, 0.495], "learns 38 % less than a fresh one (95 % interval 35 to 41 % less)"),
        (0.40, [0.50, 0.505, 0.495], "learns 20 % more than a fresh one (95 % interval 14 to 26 % more)"),
        (0.51, [0.50, 0.505, 0.495], "(95 % interval 7 % less to 3 % more)"),
        (0.50, [0.50, 0.505, 0.495], "learns as much as a fresh one (95 % interval 5 % less to 5 % more)"),
        (0.50, [0.10, 0.30, 0.50], "less or better)"),  # no upper end
        (0.999, [0.50, 0.505, 0.495], "100 % less"),
    ],
)
def test_more_and_less_are_words_and_no_number_has_a_sign(old, fresh, words):
    found = curves([old] * 3, fresh)
    assert words in str(found) and "-" not in found.headline and "inf" not in found.headline
    assert ("less than" in found.headline) == (round(found.gap, 3) > 0)


def test_a_high_first_loss_does_not_count_against_what_is_learned_later():
    losses = torch.full((3, 20), 0.5)
    losses[:, :2] = 50.0
    found = Probe({"old": losses, "fresh": torch.full((3, 20), 0.5)}, {}, 1.0, 5, "given", 0.95)
    assert found.gap == pytest.approx(0.1)  # one phase of ten


# --- what is compared -------------------------------------------------------------------------------------------------


def test_both_networks_see_the_same_batches_in_the_same_order_and_every_one_of_them():
    seen = []

    def loss(output, y):
        seen.append(tuple(y.tolist()))
        return F.cross_entropy(output, y)

    settings = {"steps": 45, "seeds": 2, "most": 4, "confidence": 1 - 1e-9}  # never sure
    gxd.probe(net(), OPTIMIZER, DATA, loss, fresh=Net, **settings)
    every = [tuple(y.tolist()) for _, y in DATA]
    # The network in both orders, then four fresh ones. Before the first run of the network, and of as many fresh ones
    # as there are orders, all batches are seen.
    lengths = [75, 45, 75, 75, 45, 45]
    ends = list(itertools.accumulate(lengths))
    assert len(seen) == ends[-1]
    runs = [seen[end - 45 : end] for end in ends]
    assert runs[0] == runs[2] == runs[4] and runs[1] == runs[3] == runs[5] and runs[0] != runs[1]
    assert all(seen[ends[n] - 75 : ends[n] - 45] == every for n in (0, 2, 3)) and sorted(runs[0][:30]) == sorted(every)


def test_the_curve_of_the_old_network_is_that_of_training_it():
    model = net()
    found = probe(model, seeds=2, steps=30, data=DATA[:1])
    expected, optimizer = [], OPTIMIZER(model.parameters())
    for _ in range(30):
        loss = F.cross_entropy(model(DATA[0][0]), DATA[0][1])
        expected.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert found.losses["old"][1].tolist() == pytest.approx(expected, rel=1e-5)


def test_what_is_measured_before_training_leaves_no_trace_in_buffers():
    class Counting(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * self.calls

    found = probe(Counting(), seeds=2, steps=1, data=DATA[:1], fresh=Counting)
    assert found.losses["fresh"].mean().item() == pytest.approx(found.start, rel=1e-6)


def test_readiness_is_measured_on_the_batches():
    model = net()
    found = probe(model, seeds=2, steps=30)
    flat = lambda x, y: torch.cat(
        [g.flatten() for g in torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))]
    )
    gradients = torch.stack([flat(x, y) for x, y in DATA])
    loss = sum(F.cross_entropy(model(x), y).item() for x, y in DATA) / len(DATA)
    expected = gradients.mean(0).norm() ** 4 / (loss * gradients.square().sum(1).mean())
    assert found.readiness["old"].tolist() == pytest.approx([expected.item()], rel=1e-4)
    assert found.readiness["fresh"].shape == (2,)


@pytest.mark.parametrize("task", ["permuted_inputs", "random_labels"])
def test_tasks_can_be_made_from_old_data(task):
    found = probe(net(), task=task, steps=200, most=None)
    assert found.task == task and found.fresh_learns and found.verdict != "lost"
    assert found.batches == (30 if task == "permuted_inputs" else 4)
    found = probe(dead(), task=task, steps=200, most=None)
    assert found.verdict in ("losing", "lost") and found.gap > 0.95


def test_two_probes_of_the_same_network_are_the_same():
    left, right = probe(net(), steps=10), probe(net(), steps=10)
    assert all(torch.equal(left.losses[k], right.losses[k]) for k in left.losses)


# --- fresh networks ---------------------------------------------------------------------------------------------------


class Own(nn.Module):
    """A parameter that no reset_parameters writes, one that is frozen, and attention."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(500))
        self.fc, self.bn, self.attention = nn.Linear(500, 8), nn.BatchNorm1d(8), nn.MultiheadAttention(8, 2)
        self.frozen, self.partly = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
        self.partly.weight.requires_grad_(False)


def test_without_fresh_all_trained_parameters_are_drawn_anew_and_frozen_ones_stay():
    model = Own()
    with torch.no_grad():
        model.scale.mul_(3)
        for p in (model.fc.weight, model.bn.weight, model.attention.in_proj_weight):
            p.mul_(50)
        model.bn.running_mean.fill_(7)
    with torch.random.fork_rng():
        made = renewed(model, None, 1)
    for (name, old), new in zip(model.named_parameters(), made.parameters(), strict=True):
        if "frozen" in name or name == "partly.weight":
            assert torch.equal(old, new) and not new.requires_grad
        elif not name.endswith("bias") or name == "fc.bias":
            assert not torch.equal(old, new), name
    bound = 1 / math.sqrt(500)
    assert made.fc.weight.abs().max() <= bound and made.bn.weight.eq(1).all() and made.bn.running_mean.eq(0).all()
    assert made.scale.std().item() == pytest.approx(3, rel=0.2)  # the distribution that fits


def test_with_fresh_frozen_parameters_and_their_buffers_stay_and_all_has_the_type_of_the_model():
    model = Own().double()
    model.bn.requires_grad_(False).running_mean.fill_(7)
    with torch.random.fork_rng():
        made = renewed(model, Own, 1)
    for (name, old), new in zip(model.named_parameters(), made.parameters(), strict=True):
        is_kept = name.startswith(("frozen", "bn")) or name == "partly.weight"
        assert new.dtype == torch.float64 and new.requires_grad == old.requires_grad != is_kept
        assert torch.equal(old, new) or not is_kept, name
    assert made.bn.running_mean.eq(7).all() and made.bn.running_mean.dtype == torch.float64
    assert not torch.equal(made.fc.weight, model.fc.weight)
    made.bn.running_mean.zero_()  # its own
    assert model.bn.running_mean.eq(7).all()


@pytest.mark.parametrize("within", [False, True], ids=["alone", "within another"])
def test_a_hugging_face_model_is_initialised_by_its_own_means(within: bool):
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16, initializer_range=0.05,
    )  # fmt: skip
    model: nn.Module = BertForSequenceClassification(config)
    model = nn.ModuleDict({"backbone": model, "head": nn.Linear(5, 400)}) if within else model
    before = {name: p.std().item() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3).add_(torch.randn_like(p))
    with torch.random.fork_rng():
        made = renewed(model, None, 0)
    for name, p in made.named_parameters():
        assert p.std().item() == pytest.approx(before[name], rel=0.2, abs=1e-6), name


class Initialised(nn.Module):
    """Has a function of its own for its first weights, which takes no module."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 3)
        self._init_weights()

    def _init_weights(self, gain=1.0):
        nn.init.constant_(self.fc.weight, 0.25 * gain)

    def reset_parameters(self, gain):
        raise AssertionError("what has to be given an argument is not called")

    def forward(self, x):
        return self.fc(x)


def test_a_function_for_first_weights_is_called_with_what_it_takes():
    model = nn.Sequential(Initialised())
    with torch.no_grad():
        model[0].fc.weight.mul_(3)
    with torch.random.fork_rng():
        assert renewed(model, None, 0)[0].fc.weight.eq(0.25).all()
        assert renewed(model[0], None, 0).fc.weight.eq(0.25).all()


def test_a_model_that_cannot_be_copied_needs_fresh_and_then_its_weights_are_loaded():
    class Locked(Net):
        def __deepcopy__(self, memo):
            raise RuntimeError("it holds a lock")

    model = Locked()
    refused(lambda: probe(model, fresh=None), TypeError, ("copied", "lock", "fresh="))
    made = copied(model, Locked)
    assert same(made.state_dict(), model.state_dict()) and made[0].weight is not model[0].weight
    assert probe(model, fresh=Locked, steps=5).steps == 5


class Last:
    """Keeps an output, as a policy keeps the distribution of its last action."""

    def __init__(self):
        self.kept = {"outputs": []}


class Keeping(Net):
    def __init__(self):
        super().__init__()
        self.last = Last()

    def forward(self, x):
        self.last.kept["outputs"] = [super().forward(x)]
        return self.last.kept["outputs"][0]


def test_outputs_that_a_model_keeps_anywhere_are_copied_without_their_graph():
    model = Keeping()
    kept = model(X[0])
    made = copied(model, None)
    theirs = made.last.kept["outputs"][0]
    assert torch.equal(theirs, kept) and theirs is not kept and not theirs.requires_grad
    assert probe(model, fresh=Keeping, steps=3).steps == 3
    assert model.last.kept["outputs"][0] is kept and kept.grad_fn is not None


def test_what_cannot_be_copied_is_shared_and_named():
    model = nn.Sequential(Net(), nn.Identity())
    model[1].lock = threading.Lock()
    with pytest.warns(gxd.ObservationWarning, match=r"'1\.lock' of the model cannot be copied"):
        made = copied(model, None)
    assert made[1].lock is model[1].lock and made[0][0].weight is not model[0][0].weight
    assert same(made.state_dict(), model.state_dict())


@pytest.mark.parametrize("name", ["PPO", "A2C"])
def test_a_policy_of_stable_baselines3_is_probed_after_it_has_learned(name):
    sb3 = pytest.importorskip("stable_baselines3")
    agent = getattr(sb3, name)("MlpPolicy", "Pendulum-v1", n_steps=16, device="cpu", seed=0)
    agent.learn(32)
    policy, before = agent.policy, copy.deepcopy(agent.policy.state_dict())
    states = [(torch.randn(32, 3, generator=G), torch.zeros(32, 1)) for _ in range(4)]
    states = [(x, x.sum(1, keepdim=True)) for x, _ in states]
    for fresh in (None, lambda: type(policy)(**policy._get_constructor_parameters())):
        found = gxd.probe(
            policy, lambda p: torch.optim.Adam(p, 1e-2), states, lambda out, y: F.mse_loss(out[1], y), steps=30,
            seeds=3, fresh=fresh,
        )  # fmt: skip
        assert found.fresh_learns and found.verdict in ("healthy", "undecided")
    assert same(before, policy.state_dict())


def test_fresh_that_always_makes_the_same_weights_is_warned_of():
    with pytest.warns(gxd.ObservationWarning, match="same weights"):
        probe(net(), fresh=lambda: net(3), steps=3)


# --- nothing changes --------------------------------------------------------------------------------------------------


def test_nothing_of_the_users_changes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    cbp = gxd.ContinualBackprop(model, optimizer, example_inputs=X[0], replacement_rate=0.5, maturity=0)
    seen = []
    model[2].register_forward_hook(lambda module, args, output: seen.append(output))
    logits = model(X[0])
    cbp.observe(logits, DATA[0][1])
    F.cross_entropy(logits, DATA[0][1]).backward()
    optimizer.step()
    model[1].eval()
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(X.flatten(0, 1), torch.cat([y for _, y in DATA])), 16, shuffle=True,
        generator=torch.Generator().manual_seed(5),
    )  # fmt: skip

    def look():
        return (
            model.state_dict(), optimizer.state_dict(), cbp.state_dict(), [p.grad for p in model.parameters()],
            [m.training for m in model.modules()], torch.get_rng_state(), loader.generator.get_state(), len(seen),
            [[len(getattr(m, kind)) for kind in ("_forward_hooks", "_forward_pre_hooks")] for m in model.modules()],
        )  # fmt: skip

    before = copy.deepcopy(look())
    gxd.probe(model, OPTIMIZER, loader, F.cross_entropy, steps=12, seeds=2)
    assert same(list(before), list(look()))


def test_a_frozen_batch_norm_stays_in_its_mode_and_hooks_of_torch_stay():
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.utils.weight_norm(nn.Linear(6, 3)))
    model[1].eval()
    model[0].register_forward_hook(lambda *args: None)
    made = copied(model, None)
    assert made.training and not made[1].training and not made[0]._forward_hooks and made[2]._forward_pre_hooks
    assert all(module.training for module in copied(model.eval(), None).modules())


# --- bad input --------------------------------------------------------------------------------------------------------

NAN = [(X[0], DATA[0][1]), (X[0] * math.nan, DATA[0][1])]
CE = F.cross_entropy


@pytest.mark.parametrize(
    ("settings", "exception", "words"),
    named([
        ("empty", {"data": []}, ValueError, ("empty",)),
        ("used up", {"data": iter(())}, ValueError, ("empty", "iterator")),
        ("not iterable", {"data": 3}, TypeError, ("iterable", "int")),
        ("a single batch", {"data": DATA[0]}, TypeError, ("(x, y)", "[(x, y)]")),
        ("dicts", {"data": [{"x": X[0]}]}, TypeError, ("dict", "(x, y)")),
        ("triples", {"data": [(1, 2, 3)]}, TypeError, ("(x, y)", "3")),
        ("an empty batch", {"data": [(X[0][:0], DATA[0][1][:0])]}, ValueError, ("batch 0", "empty")),
        ("NaN", {"data": NAN}, ValueError, ("batch 1", "NaN")),
        ("another shape", {"data": [DATA[0], (X[0][:, :5], DATA[0][1])]}, ValueError, ("batch 1", "loss(model(x)")),
        ("too few targets", {"data": [(X[0], DATA[0][1][:3])]}, ValueError, ("batch 0", "loss(model(x)", "batch_size")),
        ("steps", {"steps": 0}, ValueError, ("steps", "0")),
        ("seeds", {"seeds": 1, "most": 4}, ValueError, ("seeds", "2 or more")),
        ("most", {"seeds": 3, "most": 2}, ValueError, ("most", "2", "seeds=3")),
        ("confidence", {"confidence": 1.0}, ValueError, ("confidence",)),
        ("task", {"task": "permuted_input"}, ValueError, ("permuted_inputs", "did you mean")),
        ("fresh is no function", {"fresh": Net()}, TypeError, ("fresh", "function|must return")),
        ("fresh makes no module", {"fresh": lambda: 3}, TypeError, ("fresh", "int")),
        ("another network", {"fresh": lambda: nn.Linear(8, 3)}, ValueError, ("fresh", "0.weight")),
    ]),
)  # fmt: skip
def test_bad_input_is_refused_in_words(settings, exception, words):
    refused(lambda: probe(net(), **settings), exception, words)


def test_the_model_itself_is_no_fresh_network_and_is_never_trained():
    model = net()
    before = copy.deepcopy(model.state_dict())
    refused(lambda: probe(model, fresh=lambda: model), ValueError, ("fresh", "model itself"))
    wrong = lambda parameters: torch.optim.SGD(model.parameters(), lr=0.1)
    refused(lambda: gxd.probe(model, wrong, DATA, CE), ValueError, ("make_optimizer", "parameters"))
    refused(lambda: gxd.probe(model, lambda p: 3, DATA, CE), TypeError, ("optimizer", "int"))
    refused(lambda: gxd.probe(model, 0.1, DATA, CE), TypeError, ("make_optimizer", "float"))
    unreduced = lambda z, y: CE(z, y, reduction="none")
    refused(lambda: gxd.probe(model, OPTIMIZER, DATA, unreduced), ValueError, ("scalar", "(16,)", "mean"))
    refused(lambda: gxd.probe(model, OPTIMIZER, DATA, lambda z, y: CE(z, y).item()), ValueError, ("scalar", "float"))
    refused(lambda: gxd.probe(model, OPTIMIZER, DATA, lambda z, y: CE(z, y).detach()), ValueError, ("differentiable",))
    refused(lambda: gxd.probe(nn.ReLU(), OPTIMIZER, DATA, CE), ValueError, ("no parameter",))
    assert same(before, model.state_dict())


def test_tokens_cannot_be_permuted():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 3))
    data = [(torch.randint(9, (16, 3), generator=G), torch.randint(3, (16,), generator=G)) for _ in range(4)]
    words = ("permuted_inputs", "random_labels")
    refused(lambda: gxd.probe(model, OPTIMIZER, data, CE, task="permuted_inputs"), ValueError, words)
    assert gxd.probe(model, OPTIMIZER, data, CE, task="random_labels", steps=100, seeds=2).batches == 2


def test_a_generator_is_read_no_further_than_needed():
    taken = []
    endless = ((taken.append(1), DATA[n % 30])[1] for n in range(10**9))
    assert probe(net(), data=endless, steps=7, seeds=2).batches == 7 == len(taken)
