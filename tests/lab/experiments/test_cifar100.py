"""Continuous CIFAR-100: its pairs, and what happens between them."""

import itertools

import pytest
import torch

from gxd.lab import streams
from gxd.lab.errors import UserError
from gxd.lab.experiments.cifar100 import Cifar100, ClassPairs, pairs
from gxd.lab.training import Training
from tests.lab.tiny import tiny


def test_the_first_pairs_exhaust_the_classes_and_no_pair_ever_repeats():
    found = pairs(100, seed=0)
    assert sorted(itertools.chain(*found[:50])) == list(range(100))
    assert len({frozenset(pair) for pair in found}) == len(found) == 4950
    assert pairs(100, seed=0) == found != pairs(100, seed=1)
    higher_second = sum(a < b for a, b in found) / len(found)
    assert 0.45 < higher_second < 0.55  # a class number says nothing about the label


def test_a_pair_task_holds_the_standardised_images_of_its_two_classes():
    dataset = tiny(shape=(3, 32, 32), examples=60, tests=20, classes=6)
    stream = ClassPairs(dataset, seed=0, batch_size=4)
    first, second = stream.pairs[2]
    task = stream.task(2)
    assert stream.classes == 2 and stream.input_shape == (3, 32, 32) and stream.tasks == 15
    of_second = dataset.train_images[dataset.train_labels == second].float() / 255
    expected = (of_second - torch.tensor(streams.CIFAR_MEAN).view(3, 1, 1)) / torch.tensor(streams.CIFAR_STD).view(
        3, 1, 1
    )
    assert torch.allclose(task.train_images[task.train_labels == 1], expected)
    assert len(task.train_labels) == (dataset.train_labels == first).sum() + len(of_second)
    assert torch.bincount(task.test_labels).tolist() == [
        int((dataset.test_labels == first).sum()),
        int((dataset.test_labels == second).sum()),
    ]


def test_there_are_no_more_tasks_than_pairs():
    stream = ClassPairs(tiny(shape=(3, 32, 32), classes=4), seed=0, batch_size=4)
    with pytest.raises(UserError, match="no task 6: this stream has tasks from 0 to 5"):
        stream.task(6)


def tiny_cifar(tmp_path, **changes):
    """Random images of CIFAR-100's kind; 4 classes would do, but the pairs are of 100."""
    chance = torch.Generator().manual_seed(0)
    images = torch.randint(256, (800, 3, 32, 32), generator=chance, dtype=torch.uint8)
    labels = torch.arange(800) % 100
    from gxd.lab.data import Dataset

    dataset = Dataset(images, labels, images[:200], labels[:200], 100, 255)
    config = Cifar100(tasks=2, epochs=3, batch_size=8, maturity=2, rate=0.05, compile="no", threads=1, **changes)
    return config.resolved(), ClassPairs(dataset, 0, 8)


def test_the_head_and_the_momentum_are_new_for_every_pair_of_classes(tmp_path) -> None:
    config, stream = tiny_cifar(tmp_path)
    training = Training(config, stream, torch.device("cpu"))
    assert any("blocks" in group.name for group in training.plan.groups)
    for number in range(2):
        training.new_task(stream.task(0))
        assert not training.model.head.weight.any() and not training.model.head.bias.any()
        for value in training.optimizer.state.values():
            assert not value["momentum_buffer"].any()
        weight = training.model.conv.weight.clone()
        assert training.learn(stream.task(number)) is not None
        assert training.model.head.weight.any()
        assert not torch.equal(weight, training.model.conv.weight)
    assert training.resets > 0


def test_zeroed_momentum_is_the_same_as_no_momentum_yet() -> None:
    config, stream = tiny_cifar(None, method="backprop")
    one, two = (Training(config, stream, torch.device("cpu")) for _ in range(2))
    for training, clear in ((one, None), (two, two.optimizer.state.clear)):
        training.new_task(stream.task(0))
        training.learn(stream.task(0))
        training.new_task(stream.task(0))
        if clear is not None:
            clear()
        training.learn(stream.task(1))
    for a, b in zip(one.model.parameters(), two.model.parameters()):
        assert torch.equal(a, b)


def test_the_residual_stream_is_reset_as_the_paper_needs(tmp_path) -> None:
    names = {}
    for residual in ("group", "skip"):
        config, stream = tiny_cifar(tmp_path, residual=residual)
        plan = Training(config, stream, torch.device("cpu")).plan
        names[residual] = {p.weight for group in plan.groups for p in group.producers}
    assert {"blocks.0.conv2.weight", "blocks.1.shortcut.conv.weight"} <= names["group"]
    assert names["skip"] < names["group"]
