"""Slowly changing regression: the bits that flip and those that do not, and the target, against plain loops."""

import itertools

import pytest
import torch

from gxd.lab import streams
from gxd.lab.experiments.slow_regression import SlowBits, SlowRegression


def periods(stream, tasks=3):
    """The slow bits of each 10,000 examples, after a look that they stay the same within."""
    found = []
    for number in range(tasks):
        for part in stream.task(number).train_images[:, :15].split(10_000):
            assert bool((part == part[0]).all())
            found.append(part[0])
    return found


def test_one_slow_bit_flips_every_ten_thousand_examples() -> None:
    found = periods(SlowBits(seed=1, batch_size=1))
    assert len(found) == 6
    for before, after in itertools.pairwise(found):
        assert int((before != after).sum()) == 1


def test_the_flips_are_those_of_a_plain_loop() -> None:
    stream = SlowBits(seed=4, batch_size=1)
    bits = torch.randint(2, (15,), generator=streams.generator(4, 0, "slow bits")).tolist()
    for period in range(40):
        if period:
            flip = int(torch.randint(15, (1,), generator=streams.generator(4, period, "flip")))
            bits[flip] = 1 - bits[flip]
        assert stream.slow_bits(period).tolist() == bits


def test_or_all_slow_bits_are_drawn_anew() -> None:
    found = periods(SlowBits(seed=1, batch_size=1, flip="all"))
    changes = [int((a != b).sum()) for a, b in itertools.pairwise(found)]
    assert len(changes) == 5 and 4 < sum(changes) / 5 < 11


def test_the_other_five_bits_are_drawn_for_every_example() -> None:
    bits = SlowBits(seed=0, batch_size=1).task(2).train_images[:, 15:]
    assert set(bits.unique().tolist()) == {0.0, 1.0}
    assert bool(((bits.mean(0) - 0.5).abs() < 0.02).all())
    correlation = torch.corrcoef(bits.T) - torch.eye(5)
    assert float(correlation.abs().max()) < 0.03


def test_the_target_is_a_network_of_threshold_units() -> None:
    stream = SlowBits(seed=0, batch_size=1)
    task = stream.task(1)
    assert set(stream.hidden.unique().tolist()) == set(stream.output.unique().tolist()) == {-1.0, 1.0}
    for x, y in zip(task.train_images[::997], task.train_labels[::997]):
        inputs = [*x.tolist(), 1.0]
        total = float(stream.output[100])
        for unit in range(100):
            weights = stream.hidden[unit].tolist()
            negative = sum(weight < 0 for weight in weights)
            if sum(w * i for w, i in zip(weights, inputs)) >= 0.7 * 21 - negative:
                total += float(stream.output[unit])
        assert y.tolist() == [total]
    assert len(task.train_labels.unique()) > 5


def test_the_test_set_is_all_that_the_last_slow_bits_allow() -> None:
    task = SlowBits(seed=0, batch_size=1).task(1)
    assert len({tuple(x) for x in task.test_images.tolist()}) == 32 == len(task.test_images)
    assert bool((task.test_images[:, :15] == task.train_images[-1, :15]).all())
    last = task.train_images[-1]
    row = (task.test_images == last).all(1).nonzero().item()
    assert task.test_labels[row] == task.train_labels[-1]


def test_examples_come_one_by_one_in_their_order() -> None:
    task = SlowBits(seed=0, batch_size=1).task(0)
    for number, (x, y) in zip(range(5), task.batches(0)):
        assert torch.equal(x, task.train_images[number : number + 1]) and y.shape == (1, 1)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_task_is_a_pure_function_of_seed_and_number(seed) -> None:
    stream, fresh = SlowBits(seed, 1), SlowBits(seed, 1)
    stream.task(0)
    assert torch.equal(stream.task(3).train_images, fresh.task(3).train_images)
    assert torch.equal(stream.task(3).train_labels, fresh.task(3).train_labels)
    assert not torch.equal(stream.hidden, SlowBits(seed + 1, 1).hidden)


def test_the_defaults_are_those_of_the_paper() -> None:
    config = SlowRegression().resolved()
    assert (config.width, config.depth, config.batch_size, config.lr, config.optimizer) == (5, 1, 1, 0.01, "sgd")
    assert (config.steps_per_task, config.steps) == (20_000, 1_000_000)
    assert (config.metric, config.higher_is_better) == ("loss", False)
