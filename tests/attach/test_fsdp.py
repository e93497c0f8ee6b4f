"""A model under FSDP2 (`fully_shard`): two processes, each with a part of every parameter.

Ground truth is one process that has all parameters and sees the whole batch; and two processes under DDP, which have
all parameters and see the same halves.
"""

import io
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch import multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import gxd
from gxd.reset.fresh import distributions, fresh
from gxd.reset.units import operate
from gxd.reset.writes import AlongAxis, SetEntry, Whole, Write, carry_out
from tests.attach.fsdp_models import Convs, Odd, Plain, Transformer
from tests.attach.test_regimes import batches, close, same

STEPS = 6


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def adam(parameters: Any) -> Optimizer:
    return torch.optim.Adam(parameters, 0.02)


def cbp(utility: str, **options: Any) -> gxd.Method:
    return gxd.method("continual_backprop", utility=utility, replacement_rate=0.1, maturity=1, **options)


class Redrawn(gxd.Method):
    """All parameters are drawn anew after the third step, as a method of one's own may do it."""

    name = "redrawn"
    sharded = True

    def init(self, host: gxd.Host) -> dict[str, Any]:
        return {"step": 0, "began": distributions(host.model)}

    def after_step(self, host: gxd.Host, state: dict[str, Any]) -> dict[str, Any]:
        if state["step"] == 2:
            drawn = [(p, fresh(name, p, state["began"], host.generator)) for name, p, _, _ in host.trained()]
            host.write([Write(p, Whole(), value) for p, value in drawn], memories="reset")
        return {**state, "step": state["step"] + 1}


class Scenario:
    """How to train: which method on which model, and how that is sharded.

    Args:
        whole: whether one process that sees the whole batch is to agree, too.
        bits: whether two processes under DDP agree to the last bit: gradients are averaged alike, but sums of weights
            are added in another order.
        evaluate: whether the model runs without gradients before the optimizer steps, and keeps its whole parameters.
    """

    def __init__(
        self,
        make: Callable[[], gxd.Method],
        net: type[nn.Module] = Plain,
        optimizer: Callable[[Any], Optimizer] = adam,
        *,
        layers: bool = True,
        reshard: bool = True,
        parts: int = 1,
        policy: MixedPrecisionPolicy | None = None,
        whole: bool = True,
        bits: bool = True,
        evaluate: bool = False,
    ) -> None:
        self.make, self.net, self.optimizer, self.parts, self.whole, self.bits = (
            make,
            net,
            optimizer,
            parts,
            whole,
            bits,
        )
        self.layers, self.reshard, self.policy, self.evaluate = layers, reshard, policy, evaluate


SCENARIOS: dict[str, Scenario] = {
    "gxd": Scenario(lambda: cbp("gxd")),
    "gxd, momentum": Scenario(lambda: cbp("gxd"), optimizer=sgd),
    "gxd, not resharded": Scenario(lambda: cbp("gxd"), reshard=False),
    "gxd, one unit of sharding": Scenario(lambda: cbp("gxd"), layers=False),
    "gxd, evaluated": Scenario(lambda: cbp("gxd"), reshard=False, evaluate=True),
    "gxd, accumulated": Scenario(lambda: cbp("gxd"), parts=2, bits=False),  # in the order of two reductions
    "gxd, convolutions": Scenario(lambda: cbp("gxd"), Convs),
    "gxd, transformer": Scenario(lambda: cbp("gxd"), Transformer, sgd, bits=False),
    "sketch": Scenario(lambda: cbp("gxd_sketch"), whole=False),
    "all logits": Scenario(lambda: cbp("gxd_all_logit")),
    "contribution": Scenario(lambda: cbp("contribution"), Convs, bits=False),
    "adaptable": Scenario(lambda: cbp("mc_adaptable_contribution"), Convs, sgd, bits=False),
    "adaptable, transformer": Scenario(lambda: cbp("mc_adaptable_contribution"), Transformer, sgd, bits=False),
    "weight gradient": Scenario(lambda: cbp("weight_gradient"), Convs, bits=False),
    "loss gradient": Scenario(lambda: cbp("loss_gradient"), Convs, whole=False),
    "in part": Scenario(
        lambda: gxd.method("unit_reset", selection="soft", every=2, incoming="initial", outgoing=0.5, memories="reset"),
        Convs,
        bits=False,
    ),
    "all drawn anew": Scenario(Redrawn, Convs),
    "l2_init": Scenario(lambda: gxd.method("l2_init", strength=0.5)),
    "l2_init, penalty": Scenario(lambda: gxd.method("l2_init", strength=0.5, decoupled=False)),
}


# ---- training


def sharded(model: nn.Module, layers: bool = True, reshard: bool = True, policy: Any = None) -> nn.Module:
    options = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),)), "reshard_after_forward": reshard}
    options |= {} if policy is None else {"mp_policy": policy}
    for module in list(model.children()) if layers else []:
        if next(module.parameters(), None) is not None:
            fully_shard(module, **options)
    return fully_shard(model, **options)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Training:
    """A scenario under way, by one process or by one of two."""

    def __init__(self, scenario: Scenario, how: str, rank: int = 0) -> None:
        self.scenario, self.share = scenario, slice(rank, None, 1 if how == "whole" else 2)
        torch.manual_seed(0)
        self.model = scenario.net()
        plan = gxd.find_units(self.model, torch.zeros(2, *self.model.shape))
        if how == "fsdp":
            self.model = sharded(self.model, scenario.layers, scenario.reshard, scenario.policy)
        elif how == "ddp":
            self.model = DistributedDataParallel(self.model)
        self.optimizer = scenario.optimizer(self.model.parameters())
        group = False if how == "whole" else None
        self.attached = gxd.attach(self.model, self.optimizer, scenario.make(), plan=plan, process_group=group)
        self.resets: list[dict[str, list[int]]] = []

    def run(self, start: int = 0, stop: int = STEPS) -> "Training":
        parts = self.scenario.parts
        for x, y in batches(STEPS, 8, self.attached.model.shape)[start:stop]:
            x, y = x[self.share], y[self.share]
            for number, (x_part, y_part) in enumerate(zip(x.chunk(parts), y.chunk(parts))):
                last = number == parts - 1
                if isinstance(self.model, FSDPModule):
                    self.model.set_requires_gradient_sync(last)
                later = isinstance(self.model, DistributedDataParallel) and not last
                with self.model.no_sync() if later else nullcontext():
                    logits = self.model(x_part)
                    self.attached.observe(logits, y_part)
                    (F.cross_entropy(logits, y_part) / parts).backward()
            if self.scenario.evaluate:
                with torch.no_grad():
                    self.model(x)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.resets.append({name: index.tolist() for name, index in self.attached.last_resets.items()})
        return self

    def found(self) -> dict[str, Any]:
        """What came of it, all parameters whole."""
        named = dict(self.attached.model.named_parameters())
        keys = [key for key, value in self.optimizer.state[next(iter(named.values()))].items() if value.dim()]
        scores = bool(self.attached._unit_parts())
        return {
            "parameters": {name: whole(p) for name, p in named.items()},
            "moments": {
                f"{name} {key}": whole(self.optimizer.state[p][key]) for name, p in named.items() for key in keys
            },
            "utilities": self.attached.utilities() if scores else {},
            "references": self.attached.references() if scores else {},
            "resets": self.resets,
            "state": [part["state"] for part in self.attached.state_dict()["methods"].values()],
        }


# ---- resets alone


RESETS: dict[str, tuple[type[nn.Module], Callable[[Any], Optimizer]]] = {
    "linear": (Plain, sgd),
    "convolutions": (Convs, adam),
    "attention": (Transformer, adam),
    "the rest": (Odd, adam),
    "a copy of the weights": (Odd, lambda p: torch.optim.ASGD(p, 0.1, t0=0.0)),
    "memories that begin with another number": (Convs, lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.3)),
}


def reset_once(
    net: type[nn.Module], make: Callable[[Any], Optimizer], shard: Callable[[nn.Module], nn.Module]
) -> dict[str, Tensor]:
    """Two steps with given gradients, then a reset of some units of every group, of some of them in part."""
    torch.manual_seed(0)
    model = net()
    plan = gxd.find_units(model, torch.zeros(2, *model.shape), residual="group")
    model = shard(model)
    optimizer = make(model.parameters())
    for _ in range(2):
        for p in model.parameters():
            gradient = torch.randn(p.shape)
            shared = isinstance(p, DTensor)
            p.grad = distribute_tensor(gradient, p.device_mesh, p.placements) if shared else gradient
        optimizer.step()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    chosen = [(group, torch.randperm(group.size)[: 1 + group.size // 3]) for group in plan.groups]
    references = {group.name: torch.randn(len(group.views), group.size) for group in plan.groups}
    amounts = {group.name: torch.rand(len(index)) for group, index in chosen[1::2]}
    generator = torch.Generator().manual_seed(3)
    operate(tensors, chosen, references, generator, gxd.Reset(), amounts=amounts, optimizers=[optimizer])
    state = {f"{name} {key}": v for name, p in tensors.items() for key, v in optimizer.state.get(p, {}).items()}
    found = {name: whole(t) for name, t in {**tensors, **state}.items() if isinstance(t, Tensor)}
    return {**found, "generator": generator.get_state()}


def undone() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All tensors of a model before, and after, a reset that fails in its last write."""
    torch.manual_seed(0)
    named = dict(sharded(Plain()).named_parameters())
    before = {name: whole(p) for name, p in named.items()}
    writes = [Write(p, AlongAxis(0, torch.tensor([0, p.shape[0] - 1])), 7.0) for p in named.values()]
    with torch.no_grad(), pytest.raises(KeyError):
        carry_out([*writes, SetEntry({}, "missing", 0)])
    return before, {name: whole(p) for name, p in named.items()}


# ---- checkpoints and precision

RESUMED = ("gxd", "sketch", "in part", "l2_init")


def resumed(scenario: Scenario, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What came of it without a break, and of new objects that go on from a checkpoint."""
    half = STEPS // 2
    first = Training(scenario, "fsdp", rank).run(stop=half)
    file = io.BytesIO()
    torch.save((first.model.state_dict(), first.optimizer.state_dict(), first.attached.state_dict()), file)
    first.run(half)
    file.seek(0)
    model, optimizer, attached = torch.load(file, weights_only=True)
    second = Training(scenario, "fsdp", rank)
    second.model.load_state_dict(model)
    second.optimizer.load_state_dict(optimizer)
    second.attached.load_state_dict(attached)
    second.run(half)
    second.resets = first.resets[:half] + second.resets
    return first.found(), second.found()


def in_half_precision(rank: int) -> dict[str, Any]:
    """The statistics of a run in bfloat16, and of the same in float32; nothing is reset."""
    make = lambda: gxd.method("continual_backprop", utility="gxd", replacement_rate=0.0)
    halves = Scenario(
        make, optimizer=sgd, policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    )
    return {
        name: Training(one, "fsdp", rank).run().found()
        for name, one in [("bf16", halves), ("fp32", Scenario(make, optimizer=sgd))]
    }


def exchanged(rank: int) -> list[tuple[int, int]]:
    """How often parameters are gathered, and gradients exchanged, in a step without and in one with an observation."""
    training, found = Training(SCENARIOS["gxd"], "fsdp", rank).run(stop=2), []
    for observed in (False, True):
        x, y = batches(1, 4, (4,))[0]
        with CommDebugMode() as noted:
            logits = training.model(x)
            if observed:
                training.attached.observe(logits, y)
            F.cross_entropy(logits, y).backward()
        counts = {str(kind): count for kind, count in noted.get_comm_counts().items()}
        kinds = ("gather", "reduce_scatter")
        found.append(tuple(sum(n for name, n in counts.items() if kind in name) for kind in kinds))
    return found


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found: dict[str, Any] = {}
    for name, scenario in SCENARIOS.items():
        found[name] = {how: Training(scenario, how, rank).run().found() for how in ("fsdp", "ddp")}
    for name, (net, optimizer) in RESETS.items():
        found[f"reset {name}"] = reset_once(net, optimizer, sharded)
    for name in RESUMED:
        found[f"resumed {name}"] = resumed(SCENARIOS[name], rank)
    found["undone"] = undone()
    found["exchanged"] = exchanged(rank)
    found["checkpoint"] = Training(SCENARIOS["in part"], "fsdp", rank).run().attached.state_dict()
    found["halves"] = in_half_precision(rank)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("no gloo")
    folder: Path = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_both_processes_end_with_the_same(ranks: list, name: str):
    assert same(ranks[0][name]["fsdp"], ranks[1][name]["fsdp"])


@pytest.mark.parametrize("name", SCENARIOS)
def test_sharded_parameters_are_trained_and_reset_as_whole_ones_are(ranks: list, name: str):
    fsdp, ddp = ranks[0][name]["fsdp"], ranks[0][name]["ddp"]
    assert fsdp["resets"] == ddp["resets"]
    assert any(fsdp["resets"]) == SCENARIOS[name].make().needs_units
    if SCENARIOS[name].bits:
        assert same(fsdp, ddp)
    for key in ("parameters", "moments", "utilities", "references"):
        assert close(fsdp[key], ddp[key], 1e-5), key


@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if scenario.whole])
def test_two_processes_agree_with_one_that_sees_the_whole_batch(ranks: list, name: str):
    both, one = ranks[0][name]["fsdp"], Training(SCENARIOS[name], "whole").run().found()
    assert both["resets"] == one["resets"]
    for key in ("parameters", "moments", "utilities", "references"):
        assert close(both[key], one[key], 1e-4), key


@pytest.mark.parametrize("name", RESETS)
def test_a_reset_of_shards_is_the_reset_of_the_whole_to_the_last_bit(ranks: list, name: str):
    truth = reset_once(*RESETS[name], lambda model: model)
    assert len({tuple(t.shape) for t in truth.values()}) > 3
    for rank in ranks:
        assert same(rank[f"reset {name}"], truth)


def test_a_reset_of_shards_that_fails_is_undone(ranks: list):
    for rank in ranks:
        assert same(*rank["undone"])


@pytest.mark.parametrize("name", RESUMED)
def test_training_is_resumed_exactly(ranks: list, name: str):
    for rank in ranks:
        assert same(*rank[f"resumed {name}"])


def test_statistics_of_a_model_in_bfloat16_are_kept_in_float32(ranks: list):
    halves, whole = ranks[0]["halves"]["bf16"], ranks[0]["halves"]["fp32"]
    for key in ("utilities", "references"):
        for name, ours in halves[key].items():  # bfloat16 has three digits
            assert ours.dtype == torch.float32
            assert 0 < (ours - whole[key][name]).abs().max() < 0.05 * whole[key][name].abs().max()


def test_a_checkpoint_is_whole_and_is_loaded_by_one_process(ranks: list):
    saved = ranks[0]["checkpoint"]
    one = Training(SCENARIOS["in part"], "whole").attached
    one.load_state_dict(saved)
    assert same(one.state_dict(), saved)
    shapes = {name: p.shape for name, p in Convs().named_parameters()}
    initial = saved["methods"]["0.unit_reset"]["state"]["initial"]
    assert initial and all(weight.shape == shapes[name] for name, weight in initial.items())


def test_an_observation_gathers_every_layer_once_more_and_exchanges_no_gradients(ranks: list):
    """Of three layers, each gathered for the forward and for the backward pass."""
    assert ranks[0]["exchanged"] == ranks[1]["exchanged"] == [(6, 3), (9, 3)]
