"""Several processes: DDP, or FSDP2 with parameters that are sharded. They reset as one process does.

Each process sees its share of every batch. What they have measured of the units is put together after each step, so all
of them reset the same units, and draw the same fresh weights. Run it in all four ways: the resets are the same, and so
is the loss up to rounding.

    python examples/distributed.py                               # one process, about 5 seconds
    python examples/distributed.py --fsdp
    torchrun --nproc-per-node 2 examples/distributed.py          # DDP, about 10
    torchrun --nproc-per-node 2 examples/distributed.py --fsdp   # FSDP2, about 15
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gxd
from gxd.lab.data import digits


def network():
    torch.manual_seed(0)  # all processes begin with the same weights
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def parallel(model, fsdp):
    if not fsdp:
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(args):
    rank, processes, data = dist.get_rank(), dist.get_world_size(), digits()
    model = network()
    plan = gxd.find_units(model, torch.zeros(2, 64))  # before fully_shard: the model must be whole to be traced
    model = parallel(model, args.fsdp)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # after it: of the shards
    # The processes are found by themselves. `process_group=` names them where only some train this model.
    cbp = gxd.ContinualBackprop(model, optimizer, plan=plan, replacement_rate=args.rate, maturity=20)
    resets, losses = [], []
    for step in range(args.steps):
        index = torch.randint(len(data.train_images), (64,), generator=torch.Generator().manual_seed(step))
        index = index[rank::processes]  # the share of this process
        x, y = data.train_images[index] / data.full, data.train_labels[index]
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        cbp.observe(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        resets += [(step, name, unit) for name, units in cbp.last_resets.items() for unit in units.tolist()]
        losses.append(loss.detach())
    mean = torch.stack(losses[-10:]).mean()
    dist.all_reduce(mean)
    everyone = [None] * processes
    dist.all_gather_object(everyone, resets)
    assert all(theirs == resets for theirs in everyone), "all processes reset the same units in the same steps"
    cbp.state_dict()  # all processes call it: what is sharded is gathered. Each saves its own, or the first for all
    return resets, (mean / processes).item()


def main(argv=None):
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--fsdp", action="store_true", help="shard the parameters, instead of DDP")
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--rate", type=float, default=1e-3)
    args = options.parse_args(argv)
    if "RANK" in os.environ:  # torchrun has set it, and all else that there is to know
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        resets, loss = train(args)
        if dist.get_rank() == 0:
            kind = "FSDP2" if args.fsdp else "DDP"
            print(f"{kind}, processes: {dist.get_world_size()}, resets: {len(resets)}, loss: {loss:.6f}")
            print(f"the last three (step, group, unit): {resets[-3:]}")
        return resets, loss
    finally:
        gc.collect()  # FSDP2 leaves its groups in cycles, and gloo's threads abort the exit of a process that has some
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
