"""5+1 CIFAR: five classes and one take turns."""

import itertools
from collections import Counter

import pytest
import torch

from gxd.lab import streams
from gxd.lab.errors import UserError
from gxd.lab.experiments.cifar_5_plus_1 import Cifar5Plus1, FivePlusOne
from tests.lab.tiny import clusters, tiny, whole


def test_five_classes_and_one_take_turns_and_none_comes_twice() -> None:
    stream = FivePlusOne(tiny(shape=(3, 32, 32), examples=200, tests=100, classes=100), seed=0, batch_size=2)
    assert stream.tasks == 32 and stream.classes == 100
    assert [len(classes) for classes in stream.chosen] == [5, 1] * 16
    used = list(itertools.chain(*stream.chosen))
    assert len(set(used)) == len(used) == 96
    assert used != sorted(used) and stream.chosen != FivePlusOne(clusters(200, 100, (3, 2, 2), 100), 1, 2).chosen


def test_a_last_task_of_five_needs_five_classes() -> None:
    def tasks(classes):
        return FivePlusOne(clusters(30, 10, (3, 2, 2), classes), 0, 2).tasks

    assert [tasks(classes) for classes in (6, 10, 11, 12)] == [2, 2, 3, 4]


def test_a_task_holds_the_images_of_its_classes_with_their_own_labels() -> None:
    dataset = clusters(400, 200, (3, 32, 32), 100)
    stream = FivePlusOne(dataset, seed=0, batch_size=2)
    for number in (0, 1, 4):
        task, classes = stream.task(number), set(stream.chosen[number])
        rows = [row for row in range(400) if int(dataset.train_labels[row]) in classes]
        assert torch.equal(task.train_images, streams.standardise(dataset.train_images[rows]))
        assert task.train_labels.tolist() == [int(dataset.train_labels[row]) for row in rows]
        assert Counter(task.test_labels.tolist()) == dict.fromkeys(classes, 2)


def test_both_kinds_of_tasks_have_780_steps_of_whole_batches() -> None:
    config = Cifar5Plus1()
    assert config.steps_per_task == 780
    dataset = clusters(3000, 6, (3, 2, 2), 6)  # 500 of each
    stream = FivePlusOne(dataset, seed=0, batch_size=32)
    for number, images in ((0, 2500), (1, 500)):
        task = stream.task(number)
        assert len(task.train_labels) == images
        batches = list(config.batches(task))
        assert len(batches) == 780 and {len(y) for _, y in batches} == {32}
        first, later = (whole(batches[k * task.steps : (k + 1) * task.steps])[0] for k in (0, 9))
        assert not torch.equal(first, later)  # each epoch has its own order


def test_the_tasks_of_five_classes_count() -> None:
    assert [Cifar5Plus1().counts(task) for task in range(4)] == [True, False, True, False]


def test_a_batch_that_one_class_cannot_fill_is_refused() -> None:
    assert Cifar5Plus1(batch_size=500).steps_per_task == 50
    with pytest.raises(UserError, match="batch_size=501 must be at most 500"):
        Cifar5Plus1(batch_size=501)
