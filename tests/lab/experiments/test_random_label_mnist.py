"""Random-label MNIST: the same images again and again, with labels that mean nothing."""

import torch

from gxd.lab import streams
from gxd.lab.experiments.random_label_mnist import RandomLabelMNIST, RandomLabels
from tests.lab.tiny import tiny, whole


def test_every_task_draws_the_labels_of_the_same_images() -> None:
    dataset = tiny(examples=600, classes=4)
    stream = RandomLabels(dataset, seed=3, batch_size=32)
    assert stream.classes == 4 and stream.input_shape == (12,) and stream.tasks is None
    seen = []
    for number in (0, 5):
        task = stream.task(number)
        drawn = torch.randint(4, (600,), generator=streams.generator(3, number, "labels"))
        assert torch.equal(task.train_labels, drawn)
        assert torch.equal(task.train_images, dataset.train_images)
        seen.append(drawn)
    agreement = [float((one == other).float().mean()) for one, other in ((*seen,), (seen[0], dataset.train_labels))]
    assert all(0.15 < share < 0.35 for share in agreement)  # a quarter, by chance
    # Drawn, not shuffled: the classes are not equally large.
    assert len(set(seen[0].bincount().tolist())) > 1 and seen[0].bincount().min() > 100


def test_what_is_tested_is_what_was_memorised() -> None:
    task = RandomLabels(tiny(), seed=0, batch_size=8).task(1)
    x, y = whole(task.test())
    assert torch.equal(x, task.train_images.float() / 255) and torch.equal(y, task.train_labels)


def test_the_defaults_are_those_of_the_paper() -> None:
    config = RandomLabelMNIST().resolved()
    assert (config.steps_per_task, config.tasks, config.optimizer, config.lr) == (30_000, 50, "adam", 1e-3)
    assert (config.width, config.depth, config.init, config.batch_size) == (100, 2, "default", 16)
