"""Streams: pure functions of (seed, task), on the device, permuted lazily."""

import itertools
from dataclasses import replace

import pytest
import torch

from gxd.lab import streams
from gxd.lab.errors import UserError
from tests.lab.tiny import equal, tiny, whole


def test_a_task_is_a_pure_function_of_seed_and_number():
    stream = streams.Permuted(tiny(), seed=3, batch_size=16)
    for number in (5, 0, 2):  # in any order, and after global random numbers were drawn
        torch.rand(number)
        fresh = streams.Permuted(tiny(), seed=3, batch_size=16)
        for epoch in (1, 0):
            assert equal(whole(stream.task(number).batches(epoch)), whole(fresh.task(number).batches(epoch)))
        assert equal(stream.task(number).probe(99), fresh.task(number).probe(99))


def test_seeds_tasks_and_epochs_all_differ():
    keys = list(itertools.product((0, 1), (0, 1), (0, 1)))
    orders = [whole(streams.Permuted(tiny(classes=40), s, 16).task(t).batches(e))[1] for s, t, e in keys]
    permutations = [streams.Permuted(tiny(), s, 16).task(t).permutation for s, t in itertools.product((0, 1), (0, 1))]
    for several in (orders, permutations):
        assert not any(torch.equal(a, b) for a, b in itertools.combinations(several, 2))


def test_streams_leave_the_global_random_state_alone():
    before = torch.get_rng_state()
    task = streams.Permuted(tiny(), 0, 16).task(1)
    whole(task.batches(0)), task.draw(5), streams.some(tiny(), 5, 0)
    assert torch.equal(before, torch.get_rng_state())


def test_lazy_permuting_gives_what_permuting_everything_gives(monkeypatch):
    monkeypatch.setitem(streams.CHUNK, "cpu", 32)  # several chunks, the last of them ragged
    task = streams.Permuted(tiny(), 0, 8).task(7)
    everything = task.train_images.float()[:, task.permutation] / 255
    order = torch.randperm(40, generator=streams.generator(0, 7, 1, "order"))
    x, y = whole(task.batches(1))
    assert torch.equal(x, everything[order]) and torch.equal(y, task.train_labels[order])
    assert sorted(task.permutation.tolist()) == list(range(12))


def test_the_chunk_does_not_change_the_batches(monkeypatch):
    task = streams.Permuted(tiny(), 0, 16).task(0)
    usual = list(task.batches(0))
    monkeypatch.setitem(streams.CHUNK, "cpu", 1)
    assert all(equal(a, b) for a, b in zip(usual, task.batches(0), strict=True))


def test_the_ragged_last_batch_is_kept():
    task = streams.Permuted(tiny(), 0, 16).task(0)
    assert [len(y) for _, y in task.batches(0)] == [16, 16, 8] and task.steps == 3


def test_the_test_set_is_permuted_like_the_training_set_and_comes_in_order():
    task = streams.Permuted(tiny(), 0, 16).task(1)
    x, y = whole(task.test(chunk=4))
    assert torch.equal(x, task.test_images.float()[:, task.permutation] / 255) and torch.equal(y, task.test_labels)
    assert equal(task.probe(3), (x[:3], y[:3]))


def test_drawn_samples_are_disjoint_and_always_the_same():
    task = streams.Permuted(tiny(shape=(1,)), 0, 16).task(0)
    (a, _), (b, _) = task.draw(15, 25)
    assert sorted(torch.cat([a, b]).flatten().mul(255).round().tolist()) == list(range(40))
    assert equal(task.draw(15, 25)[1], task.draw(15, 25)[1])
    assert set(task.draw(10, test=True)[0][0].flatten().mul(255).round().tolist()) == set(range(40, 50))
    with pytest.raises(UserError, match="cannot draw 41 different examples from 40"):
        task.draw(1, 40)


def test_permuted_digits_has_1440_training_and_357_test_images_of_all_classes():
    stream = streams.permuted_digits(seed=0)
    task = stream.task(0)
    assert (stream.classes, stream.input_shape, task.steps) == (10, (64,), 90)
    assert len(task.train_labels) == 1440 and len(task.test_labels) == 357
    assert task.train_labels.bincount().min() > 130 and task.test_labels.bincount().min() > 25
    x, _ = task.probe(357)
    assert x.min() == 0 and x.max() == 1


def test_a_task_that_does_not_exist_is_an_error():
    stream = streams.AllClasses(tiny(shape=(3, 32, 32), examples=240), seed=0, batch_size=4)
    with pytest.raises(UserError, match="no task 1: this stream has tasks from 0 to 0"):
        stream.task(1)
    with pytest.raises(UserError, match="no task -1"):
        streams.Permuted(tiny(), 0, 4).task(-1)


def test_the_held_out_images_are_the_last_fifty_of_each_class():
    dataset = tiny(shape=(3, 32, 32), examples=120, classes=2)
    task = streams.AllClasses(dataset, 0, batch_size=7).task(0)
    validation = streams.AllClasses(dataset, 0, batch_size=7, validation=True).task(0)
    assert task.train_labels.bincount().tolist() == [10, 10] and validation.test_labels.bincount().tolist() == [50, 50]
    assert torch.equal(task.train_images, dataset.train_images[:20])
    assert torch.equal(validation.test_images, dataset.train_images[20:])
    assert torch.equal(task.test_images, dataset.test_images)


def test_augmented_batches_differ_between_epochs_and_repeat_with_the_seed():
    task = streams.AllClasses(tiny(shape=(3, 32, 32), examples=104, classes=2), 0, batch_size=2).task(0)
    assert equal(whole(task.batches(0)), whole(task.batches(0)))
    assert not torch.equal(whole(task.batches(0))[0].sum(0), whole(task.batches(1))[0].sum(0))
    ((x, _),) = task.draw(4)
    assert {tuple(i.flatten()[:9].tolist()) for i in x} == {
        tuple(i.flatten()[:9].tolist()) for i in streams.standardise(task.train_images)
    }


def test_without_rotation_an_augmented_image_is_a_shifted_or_mirrored_one(monkeypatch):
    monkeypatch.setattr(streams, "LARGEST_ANGLE", 0)
    image = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(torch.stack([image, image.flip(-1)]), (4, 4, 4, 4))
    crops = {(m, i, j): padded[m, :, i : i + 32, j : j + 32] for m in (0, 1) for i in range(9) for j in range(9)}
    seen = set()
    for result in streams.augment(image.expand(200, -1, -1, -1), streams.generator(0)):
        seen |= {key for key, crop in crops.items() if torch.allclose(result, crop, atol=1e-4)}
    assert len(seen) > 80 and {m for m, _, _ in seen} == {0, 1}  # every one of the 200 is one of the 162
    assert {i for _, i, _ in seen} == {j for _, _, j in seen} == set(range(9))


def test_rotation_is_anticlockwise_by_up_to_fifteen_degrees(monkeypatch):
    monkeypatch.setattr(streams, "PAD", 0)
    # A dot at the right edge moves up. Mirroring first would put it on the left, from where it moves down.
    image = torch.zeros(1, 1, 33, 33)
    image[..., 16, 30] = 1
    angles, radii = [], []
    for result in streams.augment(image.expand(300, -1, -1, -1), streams.generator(0)):
        ys, xs = torch.meshgrid(torch.arange(33.0) - 16, torch.arange(33.0) - 16, indexing="ij")
        x, y = (result[0] * xs).sum() / result.sum(), (result[0] * ys).sum() / result.sum()
        angles.append(torch.rad2deg(torch.atan2(-y * x.sign(), x.abs())).item())
        radii.append(x.hypot(y).item())
    assert -1 < min(angles) < 2 and 13 < max(angles) < 16
    assert 13.7 < min(radii) <= max(radii) < 14.3


def test_an_unshuffled_task_comes_in_its_own_order_and_whole_batches_leave_the_rest_out():
    task = replace(streams.Permuted(tiny(), 0, 16).task(0), shuffled=False, whole_batches=True)
    for epoch in (0, 1):
        x, y = whole(task.batches(epoch))
        assert torch.equal(y, task.train_labels[:32]) and len(x) == 32
    assert task.steps == len(list(task.batches())) == 2


def test_some_of_a_data_set_are_different_training_examples_of_it_drawn_with_the_seed():
    dataset = tiny(shape=(1,), examples=40)
    few = streams.some(dataset, 25, seed=1)
    assert len(set(few.train_images.flatten().tolist())) == 25 == len(few.train_labels)
    for image, label in zip(few.train_images, few.train_labels):
        assert label == dataset.train_labels[dataset.train_images.flatten() == image]
    assert torch.equal(few.test_images, dataset.test_images)
    assert not torch.equal(few.train_images, streams.some(dataset, 25, seed=2).train_images)
