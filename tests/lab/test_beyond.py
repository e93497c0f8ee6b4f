"""The script behind docs/beyond-first-order.md."""

import re
from dataclasses import replace

import pytest

import gxd
from gxd.lab import beyond


@pytest.fixture(scope="module")
def config():
    few = {"tasks": 1, "sets": (0.5,), "examples": 40, "units_per_group": 4, "times": False}
    return beyond.Beyond(activations=("tanh",), seeds=(0,), **few)


def test_every_utility_and_every_rule_has_a_row_of_numbers(config, capsys):
    beyond.main(config)
    single, sets = (
        dict(re.findall(r"^\| ([a-z][\w, ]*?) \| (.*) \|$", part, re.MULTILINE))
        for part in capsys.readouterr().out.split("Sets of 50%")
    )
    for rows, names in ((single, gxd.utilities()), (sets, ["gxd", "gxd, set", "gxd_sketch, set", "gxd_kl, set"])):
        for name in names:
            if name != "silence":  # a tanh that is alive always fires: no rank
                assert re.match(r"-?\d\.\d{3} \| -?\d\.\d{3} \| [\d.e-]+ \| [\d.e-]+", rows[name]), name
    assert single["true"].startswith("1.000 | 1.000")
    assert sets["random"].startswith(" |  | "), "a random set predicts nothing"


def test_the_cells_are_means_over_seeds(config, capsys):
    beyond.main(replace(config, seeds=(0, 0)))
    twice = capsys.readouterr().out
    beyond.main(config)
    assert capsys.readouterr().out == twice
    assert beyond._mean([{"rho l1": 1.0}, {"rho l1": 4.0}]) == {"rho l1": 2.5}
