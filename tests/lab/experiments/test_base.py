"""The configs: the paper's values, what is refused, what makes two runs the same."""

import json
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

import gxd
from gxd.lab import experiments, methods
from gxd.lab.errors import UserError
from gxd.lab.experiments import EXPERIMENTS, experiment
from gxd.lab.experiments.cifar100 import Cifar100
from gxd.lab.experiments.permuted_digits import PermutedDigits
from gxd.lab.experiments.permuted_mnist import PermutedMNIST
from gxd_command import main


def test_permuted_mnist_is_the_papers_table() -> None:
    config = PermutedMNIST()
    assert (config.width, config.depth, config.tasks, config.epochs, config.batch_size) == (256, 4, 800, 1, 16)
    assert (config.momentum, config.weight_decay, config.maturity, config.decay) == (0.0, 0.0, 100, 0.99)
    chosen = {
        (method, activation): (c.lr, c.rate)
        for method in ("backprop", "contribution", "gxd_paper")
        for activation in ("relu", "tanh", "silu", "leaky_relu")
        for c in [PermutedMNIST(method=method, activation=activation, paper=True).resolved()]
    }
    for (method, activation), (lr, rate) in chosen.items():
        assert lr == (0.1 if method == "backprop" else 0.3)
        assert rate == (0.0 if method == "backprop" else 1e-4 if activation in ("relu", "tanh") else 1e-3)


def test_cifar100_is_the_papers_table() -> None:
    config = Cifar100(method="gxd_paper").resolved()
    assert (config.tasks, config.epochs, config.batch_size, config.maturity) == (500, 200, 100, 1000)
    assert (config.lr, config.momentum, config.weight_decay, config.rate) == (0.1, 0.9, 0.0, 1e-4)
    assert config.residual == "group"


def test_what_is_given_wins_over_the_papers_choice() -> None:
    config = PermutedMNIST(lr=0.05, rate=1e-5).resolved()
    assert (config.lr, config.rate) == (0.05, 1e-5)


def test_cells_of_a_grid_that_are_the_same_backprop_are_one_run() -> None:
    plain = PermutedDigits(method="backprop", lr=0.1)
    for twin in (
        replace(plain, rate=1e-3),
        replace(plain, maturity=5, compensate=False, score_every=10),
        replace(plain, lr=None),
    ):
        assert twin.resolved() == plain.resolved()
        assert twin.run_directory("runs") == plain.run_directory("runs")
    assert replace(plain, lr=0.3).key() != plain.key()
    assert replace(plain, method="gxd", rate=1e-4).key() != replace(plain, method="gxd", rate=1e-3).key()


def test_every_setting_that_changes_the_numbers_changes_the_key_and_no_other_does() -> None:
    base = PermutedMNIST(data_dir="a")
    other = {
        "method": "gxi", "activation": "silu", "tasks": 7, "epochs": 3, "batch_size": 5, "lr": 0.7, "momentum": 0.5,
        "weight_decay": 0.1, "rate": 0.5, "maturity": 3, "decay": 0.5, "compensate": False, "score_every": 4,
        "positions": "abs", "seed": 9, "compile": "no", "device": "cuda", "threads": 3, "layer_norm": True, "width": 9,
        "depth": 2, "data_dir": "b", "options": ("incoming=fresh",), "optimizer": "adam", "init": "default",
        "input_norm": "ema", "network": "linear", "paper": True,
    }  # fmt: skip
    assert set(other) == {f.name for f in fields(base)}
    for name, value in other.items():
        changed = replace(base, **{name: value})
        assert (changed.key() == base.key()) == (name in ("seed", "device", "threads", "data_dir")), name
    assert len({cls().key() for cls in EXPERIMENTS.values()}) == len(EXPERIMENTS)


def test_the_keys_of_runs_that_were_made_before_there_were_other_streams_and_methods_stay() -> None:
    assert PermutedDigits(method="gxd_paper").key() == "f6838c0ec9"
    assert PermutedMNIST(method="gxd_paper", lr=0.3).key() == "b1843ab467"
    assert Cifar100(method="backprop").key() == "c0fd80b321"
    new = {"options", "optimizer", "init", "input_norm", "network", "paper"}
    for kind in (PermutedDigits, PermutedMNIST, Cifar100):
        assert not new & set(kind().settings())
    other = PermutedDigits(method="redo", options=("every=5",), optimizer="adam", network="linear").settings()
    assert new & set(other) == {"options", "optimizer", "network"} and other["options"] == {"every": 5}


DIGEST = Path(__file__).parents[3] / "results/digest.jsonl"


def test_every_committed_run_has_the_key_that_it_was_stored_with() -> None:
    """The keys of one run of each kind are literal: whoever makes the digest again cannot change them."""
    found = [json.loads(line) for line in DIGEST.read_text().splitlines()]
    assert {line["key"] for line in found} >= {"0b089cb8d3", "a28fec2949", "240c0eb4ca", "37e29767e3"}
    assert {line["config"]["method"] for line in found} >= {"gxd", "gxd_sketch", "backprop"}
    for line in found:
        config = experiment(line["experiment"]).from_dict(methods.from_disk(line["config"]))
        assert config.key() == line["key"], line["config"]
        assert config.method == {"gxd": "gxd_paper"}.get(line["config"]["method"], line["config"]["method"])


def test_the_two_rules_by_the_name_of_gxd_are_never_the_same_run() -> None:
    ours, papers = PermutedDigits(method="gxd"), PermutedDigits(method="gxd_paper")
    assert ours.settings()["method"] == "gxd_loss_per_step" and papers.settings()["method"] == "gxd"
    assert PermutedDigits() == ours and ours.run_directory("runs") != papers.run_directory("runs")
    by_age = replace(papers, options=("ranking=age",))
    assert by_age.settings()["options"] == {"ranking": "per_step"}  # in runs of before, age is another rule
    assert by_age.key() != "0b163378b7"
    with pytest.raises(UserError, match="can be reported, but not continued"):
        PermutedDigits.from_dict(methods.from_disk({"method": "gxd", "options": {"ranking": "age"}}))


def test_the_settings_of_resets_are_fields_of_gxd_and_options_of_gxd_beside_others() -> None:
    (made,) = PermutedDigits(rate=0.5, maturity=7, decay=0.5, compensate=False, positions="abs").plasticity()
    assert (made.selector.rates.default, made.selector.maturities.default) == (0.5, 7)
    assert (made.decay, made.reset.compensate, made.positions) == (0.5, False, "abs")
    assert PermutedMNIST().resolved().rate == gxd.methods()["gxd"].options["replacement_rate"]
    both = PermutedDigits(method="parseval+gxd", options=("gxd.replacement_rate=0.5",))
    assert [method.name for method in both.plasticity()] == ["parseval", "gxd"]
    assert both.plasticity()[1].selector.rates.default == 0.5
    assert replace(both, rate=0.1, maturity=5).key() == both.key()
    assert replace(both, method="gxd+parseval").key() != both.key(), "they act in this order"
    with pytest.raises(UserError, match=r"with parseval\+gxd write --options gxd.replacement_rate=VALUE"):
        replace(both, rate=0.1).check_used()
    with pytest.raises(UserError, match="redo has --options instead"):
        PermutedDigits(method="redo", rate=0.1).check_used()
    with pytest.raises(UserError, match="backprop has no resets"):
        PermutedDigits(method="backprop", maturity=1).check_used()


def test_what_a_run_does_not_use_does_not_tell_it_apart() -> None:
    redo = PermutedDigits(method="redo", options=("every=5",))
    for twin in (
        replace(redo, rate=0.1, maturity=3, decay=0.5, positions="abs"),
        replace(redo, options=("every=5", "threshold=0.1")),  # which is the default
    ):
        assert twin.key() == redo.key() != replace(redo, options=("every=6",)).key()
    linear = PermutedDigits(method="l2_init", network="linear")
    assert replace(linear, activation="tanh", width=5, depth=9).key() == linear.key()
    assert PermutedDigits(method="continual_backprop").key() == PermutedDigits(method="gxd_paper").key()
    plain = Cifar100(method="backprop")
    assert replace(plain, residual="skip").key() == plain.key()
    assert Cifar100(residual="skip").key() != Cifar100().key()
    adam = Cifar100(optimizer="adam")
    assert replace(adam, momentum=0.0).key() == adam.key() != Cifar100().key()


def test_seeds_of_one_setting_are_siblings() -> None:
    paths = [
        PermutedDigits(method="gxd_paper", activation="silu", layer_norm=True, seed=s).run_directory("runs")
        for s in (0, 1)
    ]
    assert paths[0].parent == paths[1].parent and paths[0] != paths[1]
    assert paths[1].name == "seed1"
    assert paths[0].parent.name.startswith("gxd_silu_layernorm_lr0.1_rate0.001_")
    assert paths[0].parent.parent.name == "permuted-digits"


@pytest.mark.parametrize("cls", EXPERIMENTS.values())
def test_a_config_survives_json(cls) -> None:
    config = cls(method="gxd_sketch", options=("ranking=age", "selection=units"), lr=1, seed=4)
    assert cls.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert replace(config, lr=1.0).key() == config.key()
    assert cls.from_dict(methods.from_disk(config.settings())).resolved() == config.resolved()


def test_long_runs_are_compiled_and_short_ones_are_not() -> None:
    assert PermutedMNIST().resolved().compile == "yes"
    assert PermutedMNIST(tasks=1).resolved().compile == "no"
    assert PermutedMNIST(compile="no").resolved().compile == "no"
    assert PermutedMNIST(tasks=1, compile="yes").resolved().compile == "yes"
    assert PermutedDigits(tasks=10, batch_size=100).steps == 10 * 2 * 15


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"learning_rate": 0.1}, ["learning_rate", "There are", "lr"]),
        ({"lrr": 0.1}, ["lrr", "Did you mean 'lr'?"]),
        ({"batch-size": 4}, ["batch-size", "Did you mean 'batch_size'?"]),
        ({"method": "gdx"}, ["'gdx'", "Did you mean 'gxd'?"]),
        ({"method": "contribtion"}, ["Did you mean 'contribution'?"]),
        ({"activation": "gelu"}, ["activation='gelu'", "leaky_relu"]),
        ({"lr": "fast"}, ["lr='fast'", "a number above 0"]),
        ({"lr": 0}, ["lr=0.0", "above 0"]),
        ({"lr": float("nan")}, ["lr=nan", "above 0"]),
        ({"rate": 1.5}, ["rate=1.5", "[0, 1]"]),
        ({"tasks": 0}, ["tasks=0", "1 or more"]),
        ({"tasks": 2.5}, ["tasks=2.5", "whole number"]),
        ({"tasks": True}, ["tasks=True", "whole number"]),
        ({"decay": 1}, ["decay=1.0", "[0, 1)"]),
        ({"seed": -1}, ["seed=-1"]),
        ({"lr": 1e39}, ["lr=1e+39", "below 3.4e38"]),
        ({"weight_decay": 1e300}, ["weight_decay=1e+300", "below 3.4e38"]),
        ({"batch_size": 10**20}, [f"batch_size={10**20}", "below 2**31"]),
        ({"maturity": 2**31}, ["maturity=2147483648", "below 2**31"]),
        ({"compensate": "no"}, ["compensate='no'", "true or false"]),
        ({"layer_norm": 1}, ["layer_norm=1", "true or false"]),
        ({"compile": True}, ["compile=True", "auto or yes or no"]),
        ({"threads": 0}, ["threads=0"]),
        ({"device": 0}, ["device=0", "a text"]),
        ({"method": "l2-init"}, ["'l2-init'", "Did you mean 'l2_init'?"]),
        ({"method": "redo", "options": {"treshold": 1}}, ["'treshold'", "Did you mean 'threshold'?"]),
        ({"optimizer": "sdg"}, ["optimizer='sdg'", "sgd or adam"]),
        ({"optimizer": "adam", "momentum": 0.9}, ["momentum=0.9", "Adam has betas"]),
        ({"network": "linear", "layer_norm": True}, ["layer_norm", "network linear"]),
        ({"init": "zero"}, ["init='zero'", "default or glorot"]),
    ],
)
def test_a_bad_setting_is_named_with_what_is_allowed(values, words) -> None:
    with pytest.raises(UserError) as error:
        PermutedDigits.from_dict(values)
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


def test_an_unknown_experiment_is_refused_with_the_near_one() -> None:
    assert experiment("cifar100") is Cifar100
    with pytest.raises(UserError, match="Did you mean 'permuted-mnist'"):
        experiment("permuted_mnist")


FILE = """
from dataclasses import dataclass
from typing import ClassVar
from gxd.lab import data, streams
from gxd.lab.experiments.base import register
from gxd.lab.experiments.feedforward import Perceptron

@register
@dataclass(frozen=True)
class Shuffled(Perceptron):
    \"\"\"Of this test.\"\"\"

    name: ClassVar[str] = "shuffled-digits"
    train_size: ClassVar[int] = 1440

    def stream(self) -> streams.Stream:
        return streams.Permuted(data.digits(), self.seed, self.batch_size, self.device)

    def default_lr(self) -> float:
        return 0.1
"""


def test_an_experiment_is_one_file_in_the_package(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "shuffled.py").write_text(FILE)
    monkeypatch.setattr(experiments, "__path__", [*experiments.__path__, str(tmp_path)])
    try:
        experiments.discover()
        small = ["--tasks", "1", "--batch-size", "240", "--width", "8", "--out", str(tmp_path)]
        assert main(["run", "shuffled-digits", *small]) == 0
        assert capsys.readouterr().out.splitlines()[-1].startswith("final test accuracy: seed 0 0.")
        assert main(["run"]) == 0 and "shuffled-digits      Of this test" in capsys.readouterr().out
    finally:
        EXPERIMENTS.pop("shuffled-digits", None)
        sys.modules.pop("gxd.lab.experiments.shuffled", None)
