"""The comparison of trajectories must see what it is for. What was recorded is not here: bits depend on the machine."""

from copy import deepcopy
from itertools import product

import pytest
import torch

import gxd
from tests import golden


@pytest.fixture(scope="module")
def cases() -> list[golden.Case]:
    names = ("relu random sgd accumulation", "silu gxd sgd resume", "branches gxi adam resume")
    return [case for case in golden.table() if case.name in names]


@pytest.fixture(scope="module")
def recorded(cases: list[golden.Case]) -> dict:
    return golden.record(cases)


def test_a_case_recorded_twice_is_equal_and_has_many_resets(cases: list, recorded: dict):
    assert len(recorded) == 3
    assert golden.compare(recorded, golden.record(cases)) == []
    assert all(case["trajectory"]["total_resets"][-1] > 10 for case in recorded.values())


@pytest.mark.parametrize(
    ("part", "key", "at", "place"),
    [("trajectory", "utilities/fc2", (7, 3), "step 7"), ("end", "parameters/fc1.bias", (2,), "at the end")],
)
def test_a_difference_of_one_bit_is_named_with_its_place_and_size(recorded: dict, part, key, at, place):
    name, other = "silu gxd sgd resume", deepcopy(recorded)
    value = other[name][part][key]
    before = value[at].item()
    value.view(torch.int32)[at] ^= 1
    (line,) = golden.compare(recorded, other)
    assert line == f"{name}: {part}/{key}: {abs(value[at].item() - before):.3g}, {place}"


def test_zeros_of_different_sign_are_different(recorded: dict):
    other = deepcopy(recorded)
    other["silu gxd sgd resume"]["end"]["parameters/fc1.bias"] = torch.zeros(2)
    negative = deepcopy(other)
    negative["silu gxd sgd resume"]["end"]["parameters/fc1.bias"].neg_()
    assert golden.compare(other, negative) == ["silu gxd sgd resume: end/parameters/fc1.bias: 0, at the end"]
    assert golden.compare(negative, negative) == []


def test_what_is_missing_or_of_another_kind_is_named(recorded: dict):
    other = deepcopy(recorded)
    del other["relu random sgd accumulation"]
    del other["silu gxd sgd resume"]["trajectory"]["loss"]
    end = other["branches gxi adam resume"]["end"]
    end["parameters/head.bias"] = end["parameters/head.bias"].double()
    assert golden.compare(recorded, other) == [
        "relu random sgd accumulation: only in A",
        "silu gxd sgd resume: trajectory/loss: only in A",
        "branches gxi adam resume: end/parameters/head.bias: torch.float32[4] and torch.float64[4]",
    ]


def test_a_case_that_fails_is_told_of_and_left_out(capsys: pytest.CaptureFixture):
    case = golden.Case("relu", "no such utility", "sgd")
    assert golden.record([case]) == {}
    assert "FAILED: ['relu no such utility sgd every_step']" in capsys.readouterr().out


def test_a_renamed_keyword_is_called_by_the_name_that_this_version_has():
    assert golden.call(lambda positions, seed: (positions, seed), positions="abs", seed=1) == ("abs", 1)
    assert golden.call(lambda position_reduction: position_reduction, positions="abs") == "abs"


def test_every_pair_occurs_among_the_cases():
    cases = list(golden.table())
    assert len({case.name for case in cases}) == len(cases)
    assert {*golden.UTILITIES} <= {*gxd.utilities()}
    rows = [{"m": case.model, "u": case.utility, "o": case.optimizer, "r": case.regime} for case in cases]
    every = {"m": [*golden.MODELS][:-1], "u": golden.UTILITIES, "o": [*golden.OPTIMIZERS], "r": golden.REGIMES}
    for a, b in ("mu", "ur", "or", "mr", "mo", "uo"):
        assert {*product(every[a], every[b])} <= {(row[a], row[b]) for row in rows}
