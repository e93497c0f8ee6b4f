"""Who runs the step: several processes, a gradient scaler, a compiler, checkpointed regions, an agent.

Ground truth is one eager process in full precision that saw the same data.
"""

import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch import multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import gxd
from gxd.processes import Processes
from tests.attach.test_regimes import KINDS, attach, attached, batches, clone, close, mlp, same, train

# ---- two processes


class ConvNet(nn.Module):
    """BatchNorm after a layer without bias: the compensation goes into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, 6, 3), nn.Conv2d(6, 6, 2, bias=False)
        self.bn, self.head = nn.BatchNorm2d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.bn(self.conv2(F.relu(self.conv1(x))))).mean((2, 3)))


class TwoHeads(nn.Module):
    """Each head has hidden units of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(x), self.value(x)

    @staticmethod
    def loss(output: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        return F.cross_entropy(output[0], y) + output[1].square().mean()


SCENARIOS: dict[str, dict[str, Any]] = {
    "gxd": {"utility": "gxd"},
    "accumulated": {"utility": "gxd", "parts": 2},
    "local": {"utility": "mc_contribution"},
    "sketch": {"utility": "gxd_sketch"},
    "loss": {"utility": "loss_gradient"},
    "batchnorm": {"utility": "gxd", "net": ConvNet, "shape": (2, 5, 5)},
    "planned before": {"utility": "gxd", "seeds": (0, 1), "std": 0.3},
    "one head": {"utility": "gxd", "net": TwoHeads, "observe": (0, 0), "loss": TwoHeads.loss},
    "a head each": {"utility": "gxd", "net": TwoHeads, "observe": (0, 1), "loss": TwoHeads.loss},
}


def run(scenario: str, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """Train on every ``ranks``-th example; what came of it."""
    options = {"net": mlp, "shape": (4,), "parts": 1, "seeds": (0, 0), "loss": F.cross_entropy, **SCENARIOS[scenario]}
    torch.manual_seed(options["seeds"][rank])
    model = options["net"]()
    if "std" in options:  # not the layers' default, so its scale is read off the weights
        torch.manual_seed(options["seeds"][rank])
        for layer in (model[0], model[2]):
            nn.init.normal_(layer.weight, std=options["std"])
    plan = gxd.find_units(model, torch.zeros(2, *options["shape"]))
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    cbp = attach(wrapped, optimizer, plan=plan, utility=options["utility"])
    resets: list[dict[str, list[int]]] = []
    said: list[str] = []
    for x, y in batches(8, 8, options["shape"]):
        x, y = x[rank::ranks], y[rank::ranks]
        for x_part, y_part in zip(x.chunk(options["parts"]), y.chunk(options["parts"])):
            logits = wrapped(x_part)
            cbp.observe(logits[options["observe"][rank]] if "observe" in options else logits, y_part)
            (options["loss"](logits, y_part) / options["parts"]).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        said += [str(one.message) for one in caught]
        optimizer.zero_grad()
        resets.append({name: index.tolist() for name, index in cbp.last_resets.items()})
    return {
        "parameters": clone(dict(model.named_parameters())),
        "moments": {name: optimizer.state[p]["exp_avg_sq"] for name, p in model.named_parameters()},
        "references": cbp.references(),
        "utilities": cbp.utilities(),
        "ages": cbp.ages(),
        "resets": resets,
        "said": said,
    }


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.save({scenario: run(scenario, rank, 2) for scenario in SCENARIOS}, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("no gloo")
    folder: Path = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_the_default_process_group_is_not_kept_alive():
    """An attachment is a part of cycles, so it may be freed after ``destroy_process_group()``, and a group of gloo that
    is freed when the interpreter ends aborts the process.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        default, own = Processes(), Processes(dist.group.WORLD)
        assert default.several and default.group is own.group is dist.group.WORLD
        assert all(value is not dist.group.WORLD for value in vars(default).values())
        assert not Processes(False).several and Processes(False).group is None
    finally:
        dist.destroy_process_group()
    assert default.group is None and not Processes().several


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_both_ranks_hold_the_same_parameters_and_statistics_to_the_last_bit(ranks: list, scenario: str):
    first, second = (rank[scenario] for rank in ranks)
    assert first["resets"] == second["resets"]
    assert sum(len(units) for step in first["resets"] for units in step.values()) > 3
    assert same(first, second)


@pytest.mark.parametrize("scenario", ["gxd", "accumulated", "local"])
def test_two_ranks_agree_with_one_process_that_saw_the_whole_batch(ranks: list, scenario: str):
    both, one = ranks[0][scenario], run(scenario)
    assert both["resets"] == one["resets"]
    for key in ("references", "utilities", "parameters", "moments"):
        assert close(both[key], one[key], 1e-4), key
    assert same(both["ages"], one["ages"])


def test_a_group_is_shown_if_one_of_the_ranks_shows_it(ranks: list):
    for rank in ranks:
        each, one = rank["a head each"], rank["one head"]
        assert each["said"] == []
        assert all(bool(utilities.any()) for utilities in each["utilities"].values())
        assert len(one["said"]) == 1 and "does not depend on the group 'value.0'" in one["said"][0]
        assert bool(one["utilities"]["policy.0"].any()) and not one["utilities"]["value.0"].any()
        assert not any("value.0" in step for step in one["resets"])


# ---- mixed precision


def scaled(fused: bool, utility: str, inf_at: int | None = None, left_out: int | None = None, scale: float = 64.0):
    """Five steps with a GradScaler, one of them with an infinite loss or left out."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    cbp = attach(model, optimizer, utility=utility, scaler=scaler, maturity=1, replacement_rate=0.15)
    history = []
    for step, (x, y) in enumerate(batches(5)):
        if step == left_out:
            continue
        before = cbp.references(), cbp.utilities(), cbp.ages(), cbp.total_resets
        logits = model(x)
        cbp.observe(logits, y)
        scaler.scale(F.cross_entropy(logits, y) * (torch.inf if step == inf_at else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        history.append((before, (cbp.references(), cbp.utilities(), cbp.ages(), cbp.total_resets)))
    assert (scaler.get_scale() < scale) == (inf_at is not None)
    assert cbp.total_resets > 0
    return model, cbp, history


@pytest.mark.parametrize("fused", [False, True], ids=["not called", "fused"])
@pytest.mark.parametrize("utility", ["gxd", "activation", "loss_gradient"])
def test_a_step_skipped_by_the_scaler_ages_and_resets_nothing(utility: str, fused: bool):
    _, _, history = scaled(fused, utility, inf_at=2)
    for step, (before, after) in enumerate(history):
        assert same(before, after) == (step == 2)


@pytest.mark.parametrize("fused", [False, True], ids=["not called", "fused"])
@pytest.mark.parametrize("utility", ["gxd", "activation", "loss_gradient"])
def test_a_step_skipped_by_the_scaler_is_forgotten_by_the_next(utility: str, fused: bool):
    model, cbp, _ = scaled(fused, utility, inf_at=2)
    expected_model, expected, _ = scaled(fused, utility, left_out=2)
    assert cbp.nonfinite_observations == 0
    assert close(cbp.references(), expected.references())
    assert close(cbp.utilities(), expected.utilities())
    assert same(cbp.ages(), expected.ages())
    assert close(dict(model.named_parameters()), dict(expected_model.named_parameters()))


@pytest.mark.parametrize("fused", [False, True])
def test_the_gradient_of_the_loss_does_not_depend_on_the_scale(fused: bool):
    small, large = scaled(fused, "loss_gradient", scale=1.0)[1], scaled(fused, "loss_gradient", scale=4096.0)[1]
    assert close(small.utilities(), large.utilities())
    plain_model = mlp()
    optimizer = torch.optim.Adam(plain_model.parameters(), 0.01)
    plain = attach(plain_model, optimizer, utility="loss_gradient", maturity=1, replacement_rate=0.15)
    train(plain_model, optimizer, plain, batches(5))
    assert close(plain.utilities(), large.utilities())


@pytest.mark.parametrize("utility", KINDS)
def test_autocast_is_observed_in_the_precision_it_runs_in(utility: str):
    (model, optimizer, cbp), (_, _, plain) = (attached(utility=utility, replacement_rate=0.0) for _ in range(2))
    for x, y in batches(4):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
            cbp.observe(logits, y)
            loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    train(plain.model, plain.optimizer, plain, batches(4))
    assert {t.dtype for t in (*cbp.references().values(), *cbp.utilities().values())} == {torch.float32}
    for ours, theirs in ((cbp.references(), plain.references()), (cbp.utilities(), plain.utilities())):
        for name in ours:  # bfloat16 has three digits
            assert (ours[name] - theirs[name]).abs().max() < 0.03 * theirs[name].abs().max()
            assert not torch.equal(ours[name], theirs[name])


# ---- compiled and checkpointed


class Fused(nn.Module):
    """Something to fuse between the layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.norm, self.fc2, self.head = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc2(F.gelu(self.norm(self.fc1(x)).sin()))
        return self.head(x.cos() * x.sigmoid())


def compiled_run(utility: str, how: str | None, backend: str = "aot_eager"):
    torch.compiler.reset()
    model = called = Fused()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    if how == "in place":
        model.compile(backend=backend)
    elif how == "before":
        called = torch.compile(model, backend=backend)
    cbp = attach(called, optimizer, utility=utility)
    if how == "after":
        called = torch.compile(model, backend=backend)
    train(called, optimizer, cbp, batches(6))
    called.eval()
    called(torch.ones(2, 4))
    assert cbp.total_resets > 0
    return cbp, model


def assert_agree(left: tuple[gxd.ContinualBackprop, nn.Module], right: tuple[gxd.ContinualBackprop, nn.Module]):
    assert same(left[0].last_resets, right[0].last_resets)
    assert close(left[0].references(), right[0].references())
    assert close(left[0].utilities(), right[0].utilities())
    assert close(dict(left[1].named_parameters()), dict(right[1].named_parameters()), 1e-4)


@pytest.mark.filterwarnings("ignore:the model runs through torch.compile:gxd.CompileWarning")
@pytest.mark.parametrize(
    ("utility", "how"), [("gxd", "before"), ("gxd", "after"), ("activation", "after"), ("loss_gradient", "in place")]
)
def test_a_compiled_model_agrees_with_the_eager_one(utility: str, how: str):
    assert_agree(compiled_run(utility, how), compiled_run(utility, None))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the model runs through torch.compile:gxd.CompileWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
def test_a_model_compiled_by_inductor_agrees_with_the_eager_one():
    assert_agree(compiled_run("gxd", "before", "inductor"), compiled_run("gxd", None))


@pytest.mark.filterwarnings("ignore:the model runs through torch.compile:gxd.CompileWarning")
def test_a_compiled_model_that_ran_before_is_refused_with_the_remedy():
    torch.compiler.reset()
    model = Fused()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    train(compiled, optimizer, None, batches(1))
    cbp = attach(compiled, optimizer)
    with pytest.raises(gxd.ObservationError, match=r"compiler\.reset"):
        train(compiled, optimizer, cbp, batches(1))
    torch.compiler.reset()
    train(compiled, optimizer, cbp, batches(4))
    assert int(cbp.ages()["fc1"].max()) == 4


class Blocks(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.reentrant = nn.Linear(4, 6), nn.Linear(6, 3), reentrant
        self.mlp = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 6))
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def attend(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        # Reentrant: the second block only, so that there is something else to see.
        x = x + (checkpoint(self.attend, x, use_reentrant=False) if self.reentrant is False else self.attend(x))
        x = x + (self.mlp(x) if self.reentrant is None else checkpoint(self.mlp, x, use_reentrant=self.reentrant))
        return self.head(x).mean(1)


def blocks(reentrant: bool | None, utility: str) -> tuple[Blocks, Optimizer, gxd.ContinualBackprop]:
    model = Blocks(reentrant)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    plan = gxd.find_units(Blocks(None), torch.zeros(2, 5, 4))
    assert {"attention", "mlp.0"} <= {group.name for group in plan.groups}
    torch.manual_seed(1)  # dropout
    return model, optimizer, attach(model, optimizer, plan=plan, utility=utility)


@pytest.mark.parametrize("utility", KINDS)
def test_checkpointed_regions_are_observed_once(utility: str):
    runs = []
    for reentrant in (None, False):
        model, optimizer, cbp = blocks(reentrant, utility)
        train(model, optimizer, cbp, batches(5, shape=(5, 4)))
        runs.append((cbp.state_dict(), model.state_dict()))
        assert cbp.total_resets > 0
    assert same(*runs)


@pytest.mark.filterwarnings("ignore:the group:gxd.ObservationWarning")
def test_units_that_were_never_seen_are_not_reset_blindly():
    """Reentrant checkpointing runs forward without gradients, then inside backward, where only utilities of the loss
    look.
    """
    model, optimizer, cbp = blocks(True, "activation")
    with suppress(gxd.ObservationError):  # to refuse is as good
        for batch in batches(6, shape=(5, 4)):
            train(model, optimizer, cbp, [batch])
            assert "mlp.0" not in cbp.last_resets


# ---- reinforcement learning


class ActorCritic(nn.Module):
    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh())
        self.actor, self.critic = nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.backbone(x)
        return self.actor(z), self.critic(z)


def actor_critic(**options: Any) -> tuple[ActorCritic, Optimizer, gxd.ContinualBackprop]:
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    return model, optimizer, attach(model, optimizer, **options)


def test_acting_without_gradients_then_updating_with_a_score_resets_units():
    runs = []
    for acts in (True, False):
        model, optimizer, cbp = actor_critic()
        for x, _ in batches(8):
            if acts:
                with torch.no_grad():
                    for state in x:
                        model(state[None])
            logits, value = model(x)
            cbp.observe(score=value.squeeze(1) + logits.logsumexp(1))
            (value.square().mean() + logits.square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append((cbp.state_dict(), model.state_dict()))
        assert cbp.total_resets > 0
    assert same(*runs)


def test_a_score_counts_the_heads_it_depends_on():
    model, optimizer, cbp = actor_critic(utility="gxi")
    ((x, _),) = batches(1)
    z = model.backbone(x).detach()
    logits, value = model(x)
    cbp.observe(score=value)
    expected = (z * model.critic.weight.detach()).abs().mean(0)
    (value.mean() + logits.mean()).backward()
    optimizer.step()
    torch.testing.assert_close(cbp.utilities()["backbone.2"], expected)


@pytest.mark.parametrize("heads", ["actor", "critic", "both"])
def test_the_gradient_of_a_loss_counts_the_heads_it_depends_on(heads: str):
    model, optimizer, cbp = actor_critic(utility="loss_gradient")
    ((x, _),) = batches(1)
    z = model.backbone(x).detach().requires_grad_()

    losses = {
        "actor": lambda logits, value: logits.square().mean(),
        "critic": lambda logits, value: value.square().mean(),
        "both": lambda logits, value: logits.square().mean() + value.square().mean(),
    }
    (expected,) = torch.autograd.grad(losses[heads](model.actor(z), model.critic(z)), z)
    cbp.load_state_dict(cbp.state_dict())  # forget the two calls above
    losses[heads](*model(x)).backward()
    optimizer.step()
    torch.testing.assert_close(cbp.utilities()["backbone.2"], expected.abs().mean(0))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("utility", ["gxi", "activation", "loss_gradient"])
def test_submodules_may_be_called_directly_in_any_order(utility: str, interleaved: bool):
    model, optimizer, cbp = actor_critic(utility=utility)
    whole, whole_optimizer, expected = actor_critic(utility=utility)
    (x, _), (y, _) = batches(2)
    if interleaved:  # both states through the backbone, then both through the head
        z_x, z_y = model.backbone(x), model.backbone(y)
        v_x, v_y = model.critic(z_x), model.critic(z_y)
    else:
        v_x = model.critic(model.backbone(x))
        v_y = model.critic(model.backbone(y))
    for v in (v_x, v_y):
        cbp.observe(score=v)
    (v_x.square().sum() + v_y.square().sum()).backward()
    optimizer.step()
    value = whole.critic(whole.backbone(torch.cat([x, y])))
    expected.observe(score=value)
    value.square().sum().backward()
    whole_optimizer.step()
    assert close(cbp.references(), expected.references())
    assert close(cbp.utilities(), expected.utilities())


def test_an_unobserved_call_of_a_head_leaves_no_trace():
    model, optimizer, cbp = actor_critic(utility="gxi")
    whole, whole_optimizer, expected = actor_critic(utility="gxi")
    ((x, _),) = batches(1)
    model.critic(torch.ones(3, 6))
    for net, opt, resetter in ((model, optimizer, cbp), (whole, whole_optimizer, expected)):
        _, value = net(x)
        resetter.observe(score=value)
        value.sum().backward()
        opt.step()
    assert same(cbp.references(), expected.references())
    assert same(cbp.utilities(), expected.utilities())
