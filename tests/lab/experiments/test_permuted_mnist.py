"""Permuted MNIST, the paper's and the small one."""

import pytest
import torch

from gxd.lab.errors import UserError
from gxd.lab.experiments.permuted_mnist import PermutedMNIST
from gxd.lab.experiments.permuted_mnist_small import PermutedMNISTSmall
from tests.lab.tiny import clusters


@pytest.mark.parametrize("method", ["backprop", "contribution", "gxd", "redo"])
@pytest.mark.parametrize("activation", ["relu", "tanh", "silu", "leaky_relu"])
def test_the_papers_learning_rates_are_one_option_away(method, activation) -> None:
    config = PermutedMNIST(method=method, activation=activation)
    paper = PermutedMNIST(method=method, activation=activation, paper=True)
    assert config.resolved().lr == 0.1 and config.resolved().init == paper.resolved().init == "glorot"
    assert paper.resolved().lr == (0.1 if method == "backprop" else 0.3)
    assert PermutedMNIST(method=method, lr=paper.resolved().lr, activation=activation).key() == paper.key()


def test_what_is_said_beside_paper_wins() -> None:
    config = PermutedMNIST(paper=True, lr=0.05, init="default").resolved()
    assert (config.lr, config.init) == (0.05, "default")
    assert PermutedMNIST(optimizer="adam").resolved().lr == PermutedMNIST(optimizer="adam", paper=True).resolved().lr


def test_the_small_one_is_that_of_kumar_et_al() -> None:
    config = PermutedMNISTSmall().resolved()
    assert (config.steps_per_task, config.tasks, config.optimizer, config.lr) == (625, 500, "adam", 1e-3)
    assert (config.width, config.depth, config.init, config.metric) == (100, 2, "default", "online_accuracy")
    assert PermutedMNISTSmall(optimizer="sgd").resolved().lr == 1e-2


def test_the_small_one_permutes_images_that_the_seed_has_drawn(monkeypatch) -> None:
    dataset = clusters(10_100, 20, (784,), 10)
    monkeypatch.setattr("gxd.lab.data.mnist", lambda data_dir: dataset)
    one, same, other = (PermutedMNISTSmall(seed=seed).stream().task(0) for seed in (0, 0, 1))
    assert len(one.train_labels) == 10_000 and len(one.test_labels) == 20
    assert torch.equal(one.train_images, same.train_images) and not torch.equal(one.train_images, other.train_images)
    assert sorted(one.permutation.tolist()) == list(range(784))


def test_data_that_are_not_there_name_the_command_that_fetches_them(tmp_path) -> None:
    for kind in (PermutedMNIST, PermutedMNISTSmall):
        with pytest.raises(UserError, match="gxd data fetch mnist"):
            kind(data_dir=str(tmp_path)).stream()
