"""Tensors that processes share out: whatever is written to the shards, or summed over them, is what is written to the
whole, or summed over it.

A process group of torch's own testing stands in for the processes: each is played in turn, and what they exchange is
left to them, so that what one returns is its own share of a sum.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch import distributed as dist

from gxd.plan.layouts import CONV, CONV_TRANSPOSE, LINEAR, LINEAR_TRANSPOSED, AbsoluteSums, Layout
from gxd.reset.fresh import holding
from gxd.reset.writes import AlongAxis, Entries, InBlocks, Slices, Whole, Write, carry_out, read

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

SMALL = st.integers(1, 4)


def as_each_process(world: int, copies: int, act: Callable[[Callable[[Tensor, int], Any]], Any]) -> list[Any]:
    """What a function returns on each process of a row of ``copies`` rows; it is given a way to share a tensor out."""
    found = []
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world * copies)
        try:
            mesh = init_device_mesh("cpu", (copies, world))
            found.append(act(partial(_share_out, mesh)))
        finally:
            dist.destroy_process_group()
    return found


def _share_out(mesh: DeviceMesh, full: Tensor, axis: int) -> Any:
    return distribute_tensor(full, mesh, [Replicate(), Shard(axis)], src_data_rank=None)


@st.composite
def layers(draw: st.DrawFn) -> tuple[Layout, Tensor]:
    """A layout and a weight of it."""
    family = draw(st.sampled_from([LINEAR, LINEAR_TRANSPOSED, CONV, CONV_TRANSPOSE]))
    groups, kernel = (draw(SMALL), draw(st.integers(1, 2))) if "conv" in family else (1, 0)
    shape = (groups * draw(SMALL), draw(SMALL), *[2] * kernel)
    return Layout(family, groups), torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))


def some(draw: st.DrawFn, size: int) -> Tensor:
    return torch.tensor(draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True)))


@st.composite
def places(draw: st.DrawFn, layout: Layout, weight: Tensor) -> Slices:
    """Some elements of a weight, said in one of the ways there are."""
    kind = draw(st.sampled_from(["rows", "columns", "axis", "entries", "whole"]))
    if kind == "whole":
        return Whole()
    if kind == "entries":
        return Entries(some(draw, weight.numel()))
    if kind == "axis":
        axis = draw(st.integers(0, weight.dim() - 1))
        return AlongAxis(axis, some(draw, weight.shape[axis]))
    groups, rows, columns = layout.canonical(weight).shape[:3]
    return InBlocks(layout, kind, some(draw, groups * (rows if kind == "rows" else columns)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_write_to_shards_is_the_write_to_the_whole(data: st.DataObject):
    layout, weight = data.draw(layers())
    where, axis, world = data.draw(places(layout, weight)), data.draw(st.integers(0, 1)), data.draw(SMALL)
    how = data.draw(st.sampled_from(["number", "tensor", "in part", *["added"] * isinstance(where, Whole)]))
    value: Tensor | float = 5.0 if how == "number" else torch.randn_like(where.read(weight))
    amount = torch.rand(()) if isinstance(where, Whole) else torch.rand(len(where.index))
    options = {"added": {"times": -0.5}, "in part": {"amount": amount}}.get(how, {})
    truth = weight.clone()
    carry_out([Write(truth, where, value, **options)])

    def written(share_out: Callable[[Tensor, int], Any]) -> Tensor:
        shared = share_out(weight.clone(), axis)
        carry_out([Write(shared, where, value, **options)])
        return shared.to_local()

    shards = as_each_process(world, data.draw(st.integers(1, 2)), written)
    assert torch.equal(torch.cat(shards, axis), truth)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_what_is_read_of_shards_and_summed_over_them_is_that_of_the_whole(data: st.DataObject):
    layout, weight = data.draw(layers())
    where, axis, world = data.draw(places(layout, weight)), data.draw(st.integers(0, 1)), data.draw(SMALL)
    kind = data.draw(st.sampled_from(["rows", "columns"]))
    groups, rows, columns = layout.canonical(weight).shape[:3]
    count = groups * (rows if kind == "rows" else columns)
    sums = AbsoluteSums(layout, kind, torch.stack([some(data.draw, count)[:1] for _ in range(3)]))
    shares = as_each_process(world, 1, lambda share_out: (read(where, (s := share_out(weight, axis))), sums(s)))
    assert torch.equal(torch.stack([share for share, _ in shares]).sum(0), where.read(weight))
    assert torch.allclose(torch.stack([share for _, share in shares]).sum(0), sums(weight))


@settings(max_examples=20)
@given(st.data())
def test_rows_that_are_held_are_those_of_the_whole(data: st.DataObject):
    rows, columns, world = data.draw(st.integers(1, 6)), data.draw(SMALL), data.draw(SMALL)
    held = some(data.draw, rows).tolist()
    axis = data.draw(st.integers(0, 1))
    full = torch.arange(1.0, rows * columns + 1).view(rows, columns)

    def act(share_out: Callable[[Tensor, int], Any]) -> Tensor:
        shared = share_out(full.clone(), axis)
        with holding(shared, held):
            shared.to_local().zero_()
        return shared.to_local()

    expected = torch.zeros_like(full)
    expected[held] = full[held]
    assert torch.equal(torch.cat(as_each_process(world, 1, act), axis), expected)
