"""A model under FSDP2 (`fully_shard`) in one process, which has all shards: what is refused, and how whole parameters
that a pass has left behind become shards again.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import gxd
from tests.attach.fsdp_models import Plain
from tests.attach.test_fsdp import adam, cbp, sharded
from tests.attach.test_regimes import batches


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


PLAN = gxd.find_units(Plain(), torch.zeros(2, 4))
X, Y = batches(1)[0]


@pytest.mark.parametrize(
    "call",
    [
        lambda model: gxd.find_units(model, X),
        lambda model: gxd.attach(model, adam(model.parameters()), cbp("gxd"), example_inputs=X),
        lambda model: gxd.verify_plan(model, X, plan=PLAN),
        lambda model: gxd.reset_cost(model, (X, Y), X, plan=PLAN),
    ],
    ids=["find_units", "attach", "verify_plan", "reset_cost"],
)
def test_what_needs_the_whole_model_says_to_come_before_the_sharding(alone: None, call: Callable):
    with pytest.raises(gxd.PlanError, match=r"call it before fully_shard.* plan = gxd.find_units"):
        call(sharded(Plain()))


class Unready(gxd.Method):
    name = "unready"


def test_a_method_that_is_not_made_for_shards_is_refused_by_name(alone: None):
    model = sharded(Plain())
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    with pytest.raises(gxd.PlanError, match=r"sharded.* unready is not made for: leave it out, or"):
        gxd.attach(model, adam(model.parameters()), cbp("gxd"), Unready(), plan=PLAN)
    assert hooks == [len(module._forward_pre_hooks) for module in model.modules()]


def test_parameters_that_are_sharded_twice_are_refused(alone: None):
    model = Plain()
    mesh = init_device_mesh("cpu", (1, 1))
    sharded(model)
    model[2].weight = nn.Parameter(distribute_tensor(torch.randn(6, 7), mesh, [Shard(0), Shard(1)]))
    with pytest.raises(gxd.PlanError, match=r"'2.weight' is sharded.* tensor parallelism"):
        gxd.attach(model, adam(model.parameters()), cbp("gxd"), plan=PLAN)


def test_a_model_whose_parameters_are_still_whole_after_a_pass_can_be_attached_to_and_reset(alone: None):
    model = sharded(Plain(), reshard=False)
    optimizer = adam(model.parameters())
    model(X)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    gxd.attach(model, optimizer, cbp("gxd"), plan=PLAN).close()
    model(X)
    gxd.reset_units(model, PLAN, {"0": [1, 3]}, optimizer=optimizer, generator=torch.Generator().manual_seed(0))
    assert not model[2].weight.full_tensor()[:, [1, 3]].any()
    model(X).sum().backward()
    optimizer.step()
    gxd.reset_optimizer_state(optimizer, model[0].weight, [2], dim=0)
    moments = optimizer.state[model[0].weight]["exp_avg_sq"].full_tensor()
    assert not moments[2].any() and moments[[0, 4]].any()


def test_a_compiled_step_of_a_sharded_model_runs_eagerly_and_says_so(alone: None):
    model = sharded(Plain())
    optimizer = adam(model.parameters())
    attached = gxd.attach(model, optimizer, cbp("gxd"), plan=PLAN)
    with pytest.warns(gxd.CompileWarning, match="runs eagerly"):
        step = gxd.compiled_step(model, optimizer, F.cross_entropy, attached)
    for x, y in batches(4):
        step(x, y)
    assert attached.total_resets > 0
    attached.close()
