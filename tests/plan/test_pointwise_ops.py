"""Every pointwise op is followed, by any of its names: what ATen's ops do with numbers decides, not a list of ours."""

import itertools
import warnings
from functools import cache

import torch
from torch import Tensor, nn

import gxd
from tests.aten import PROBES, SHAPE, Call, calls, tensor_of

# Ops that are pointwise on the tensors they are tried with, and are not followed.
POOL = "pools along the units: pointwise only because its windows are tried with one element"
MEMORY = "gives a tensor the memory of another, whatever its shape"
NOT_FOLLOWED = {
    **dict.fromkeys(("avg_pool1d.default", "max_pool1d.default", "max_pool1d_with_indices.default"), POOL),
    **dict.fromkeys(("resize_as.default", "resize_as_.default", "set.source_Tensor", "set_.source_Tensor"), MEMORY),
}


class Branches(nn.Module):
    """Every op between two layers, side by side: some units of the first are one operand, the others are constant."""

    def __init__(self, cases: list[tuple[Call, int]]) -> None:
        super().__init__()
        self.cases = cases
        self.before = nn.Linear(5, SHAPE[1] * len(cases))
        self.after = nn.Linear(SHAPE[1] * len(cases), 2)
        for kind, number in itertools.product(("float", "bool", "int"), range(3)):
            self.register_buffer(f"{kind}{number}", tensor_of(kind, number))

    def forward(self, x: Tensor) -> Tensor:
        results = []
        for (call, place), units in zip(self.cases, self.before(x).split(SHAPE[1], -1), strict=True):
            operands = [getattr(self, f"{kind}{number}") for number, kind in enumerate(call.kinds)]
            operands[place] = units
            result = call(*(operand.clone() for operand in operands) if call.writes else operands)
            results.append(result.abs() if result.is_complex() else result)
        return self.after(torch.cat(results, -1))


@cache
def found() -> list[tuple[Call, int, dict[int, set[int]]]]:
    """Every op and each of its operands that units can be: where the plan sees each unit in the result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = [
            (call, place)
            for call in calls()
            if call.reach is not None
            for place, kind in enumerate(call.kinds)
            if kind == "float" and call.takes_units(place)
        ]
        torch.manual_seed(0)
        plan = gxd.find_units(Branches(cases), torch.rand(SHAPE[0], 5))
    seen: list[dict[int, set[int]]] = [{} for _ in cases]
    for group in plan.groups:
        coupled = any(norm.couples for norm in group.norms)  # the plan says that they are not alone
        for row, columns in zip(group.producers[0].rows.tolist(), group.views[0].columns.tolist(), strict=True):
            number, unit = divmod(row, SHAPE[1])
            assert coupled or {column // SHAPE[1] for column in columns} == {number}
            seen[number][unit] = {column % SHAPE[1] for column in (range(SHAPE[1]) if coupled else columns)}
    return [(*case, units) for case, units in zip(cases, seen, strict=True)]


def test_every_op_that_is_pointwise_is_followed():
    pointwise = [case for case in found() if case[0].is_pointwise and case[0].reads(case[1])]
    missing = []
    for call, place, seen in pointwise:
        read = {unit for (_, unit), reached in zip(PROBES, call.reach[place], strict=True) if reached.any()}
        if not read <= seen.keys() and str(call) not in NOT_FOLLOWED:
            missing.append(f"{call}, operand {place}")
    assert not missing, "\n".join(missing)
    assert len(pointwise) > 500, "ATen has become smaller than it was: are its ops still called?"


def test_no_op_is_followed_to_other_places_than_it_writes_to():
    wrong = []
    for call, place, seen in found():
        for (_, unit), reached in zip(PROBES, call.reach[place], strict=True):
            columns = set(reached.any(0).nonzero().flatten().tolist())
            if unit in seen and not columns <= seen[unit]:
                wrong.append(f"{call}, operand {place}: unit {unit} goes to {columns}, the plan says {seen[unit]}")
    assert not wrong, "\n".join(wrong)


def test_the_exceptions_are_still_exceptions():
    """One that is followed by now shall be struck off the list."""
    assert set(NOT_FOLLOWED) <= {str(call) for call, _, seen in found() if not seen}
