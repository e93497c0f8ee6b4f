"""Events in several processes: of DASH's gradients the mean, over those that have a batch; and what has to be made anew
when a head was injected.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gxd
from tests.processes import WARM
from tests.rig import X, Y, same

SCRIPTS = {0: [0, 1, 2], 1: [3]}  # the batches of each process: one has fewer


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return X + number, Y.roll(number)


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    net = model()
    attached = gxd.attach(net, torch.optim.SGD(net.parameters(), 0.1), gxd.method("dash"))
    attached.boundary([batch(number) for number in SCRIPTS[rank]], F.cross_entropy)
    torch.save((net.state_dict(), injected(rank, anew=True), injected(rank, anew=False)), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def injected(rank: int, anew: bool) -> str | list[torch.Tensor]:
    """The head after the event, with the wrapper made anew or not; or what is said of it."""
    net = gxd.injectable(model(), "2")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    attached = gxd.attach(net, optimizer, gxd.method("plasticity_injection"))
    wrapped = DistributedDataParallel(net, find_unused_parameters=True)
    for step in range(5):
        if step == 2:
            attached.boundary()
            wrapped = DistributedDataParallel(net) if anew else wrapped
        x, y = batch(10 * rank + step)
        F.cross_entropy(wrapped(x), y).backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            return str(error)
        optimizer.zero_grad()
    return [p.detach() for p in net.parameters()]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("no gloo")
    folder = tmp_path_factory.mktemp("ranks")
    processes = [WARM.Process(target=work, args=(rank, str(folder))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        assert process.exitcode == 0
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_processes_with_different_numbers_of_batches_shrink_alike_by_the_mean_gradient(ranks: list[Any]):
    found = [rank[0] for rank in ranks]
    assert same(*found)

    net = model()  # both first batches count half, of the others there is one each
    attached = gxd.attach(net, torch.optim.SGD(net.parameters(), 0.1), gxd.method("dash"))
    both = torch.cat([batch(0)[0], batch(3)[0]]), torch.cat([batch(0)[1], batch(3)[1]])
    attached.boundary([both, batch(1), batch(2)], F.cross_entropy)
    torch.testing.assert_close(net.state_dict(), found[0], rtol=1e-4, atol=1e-6)
    assert not same(net.state_dict(), model().state_dict())


def test_a_head_that_was_injected_is_trained_alike_by_a_wrapper_that_is_made_anew(ranks: list[Any]):
    assert same(ranks[0][1], ranks[1][1]) and isinstance(ranks[0][1], list)


def test_a_wrapper_that_does_not_know_of_an_injected_head_is_refused_by_all_processes(ranks: list[Any]):
    for rank in ranks:
        assert isinstance(rank[2], str) and "different heads" in rank[2] and "make it anew" in rank[2]
