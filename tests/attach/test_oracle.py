"""The oracle itself, on cases small enough to work out by hand."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from tests.oracle import UTILITIES, NaiveCBP, View, naive_clamp_logits, naive_scores, naive_select

HAND_WEIGHTS = [[[1.0, 1.0], [1.0, -1.0]], [[2.0, -1.0]]]
HAND_X = torch.tensor([[1.0, 2.0], [3.0, 0.0]])  # h = (3, -1) and (3, 3); r = (3, 1); z = 7 and 3
HAND_Y = torch.tensor([0, 0])


def identity(x: Tensor) -> Tensor:
    return x


def ones(_layer: int, _unit: int, fan_in: int) -> Tensor:
    return torch.ones(fan_in)


def hand_net(utility: str, **options: object) -> NaiveCBP:
    """2-2-1 without activation or learning: identity(x W0') W1'."""
    defaults: dict[str, object] = {"lr": 0.0, "rate": 0.0, "maturity": 0, "decay": 0.5}
    return NaiveCBP(
        weights=[torch.tensor(weight) for weight in HAND_WEIGHTS],
        biases=[torch.zeros(2), torch.full((1,), 0.5)],
        activation=identity,
        utility=utility,
        fresh=ones,
        loss=lambda z, _y: z.mean(),
        **{**defaults, **options},  # type: ignore[arg-type]
    )


def random_linears(sizes: list[int], seed: int = 0) -> list[nn.Linear]:
    torch.manual_seed(seed)
    return [nn.Linear(i, o, dtype=torch.float64) for i, o in pairwise(sizes)]


def random_batches(steps: int, features: int, classes: int, examples: int = 6) -> list[tuple[Tensor, Tensor]]:
    make = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(examples, features, generator=make, dtype=torch.float64),
            torch.randint(classes, (examples,), generator=make),
        )
        for _ in range(steps)
    ]


# ---- scores


@pytest.mark.parametrize(
    ("utility", "expected"),
    [
        ("activation", [3.0, 2.0]),
        ("contribution", [6.0, 2.0]),
        ("mc_contribution", [0.0, 2.0]),
        ("mc_adaptable_contribution", [0.0, 1.0]),
        ("loss_gradient", [1.0, 0.5]),
        ("gxi", [6.0, 2.0]),
        ("gxd", [0.0, 2.0]),
        ("gxd_all_logit", [0.0, 2.0]),
        ("gxd_sketch", [0.0, 2.0]),
        ("output_gradient", [2.0, 1.0]),
        ("taylor", [3.0, 1.0]),
        ("gxd_loss", [0.0, 2.0]),
    ],
)
def test_the_2_2_1_net_has_the_scores_computed_by_hand(utility: str, expected: list[float]) -> None:
    record = hand_net(utility).step(HAND_X, HAND_Y, noise=torch.tensor([[1.0], [-1.0]]))
    assert record.references == [[3.0, 1.0]]
    assert record.scores == [expected]
    assert record.utilities == [expected]
    assert record.loss == 5.5  # mean of 7 + 0.5 and 3 + 0.5


def test_positions_are_summed_signed_and_only_then_made_absolute() -> None:
    h = torch.tensor([[[3.0], [1.0]], [[2.0], [5.0]]])
    g = torch.tensor([[[1.0], [2.0]], [[4.0], [-1.0]]])
    view = [View(h, g, [2.0])]
    assert naive_scores("gxd", view) == [(abs(1 - 2) + abs(0 - 3)) / 2]
    assert naive_scores("gxd", view, absolute_positions=True) == [((1 + 2) + (0 + 3)) / 2]
    assert naive_scores("gxi", view) == [(abs(3 + 2) + abs(8 - 5)) / 2]
    assert naive_scores("loss_gradient", view) == [(1 + 2 + 4 + 1) / 4]
    assert naive_scores("activation", view) == [(3 + 1 + 2 + 5) / 4]


def test_signed_effects_of_two_views_add_before_the_absolute_value() -> None:
    # effects of the two examples: 4 and 0 in the first view, -6 and -3 in the second
    first = View(torch.tensor([[[3.0]], [[1.0]]]), torch.tensor([[[2.0]], [[1.0]]]), [1.0])
    second = View(torch.tensor([[[0.0]], [[5.0]]]), torch.tensor([[[3.0]], [[-1.0]]]), [2.0])
    assert naive_scores("gxd", [first, second]) == [(abs(4 - 6) + abs(0 - 3)) / 2]
    assert naive_scores("gxd_sketch", [first, second]) == naive_scores("gxd", [first, second])


def test_local_utilities_add_the_views_each_with_its_own_outgoing_weights() -> None:
    first = View(torch.tensor([[[3.0]], [[-1.0]]]), r=[1.0])  # mean abs h 2, mean abs (h - r) 2
    second = View(torch.tensor([[[0.0], [4.0]], [[4.0], [4.0]]]), r=[3.0])  # 3 and 1.5, two positions
    views, w_in = [first, second], [torch.tensor([0.5, -1.5])]
    w_out = [[torch.tensor([1.0, -1.0])], [torch.tensor([-4.0])]]
    assert naive_scores("activation", views) == [2.0 + 3.0]
    assert naive_scores("contribution", views, w_in, w_out) == [2.0 * 2.0 + 3.0 * 4.0]
    assert naive_scores("mc_contribution", views, w_in, w_out) == [2.0 * 2.0 + 1.5 * 4.0]
    assert naive_scores("mc_adaptable_contribution", views, w_in, w_out) == [(2.0 * 2.0 + 1.5 * 4.0) / 2.0]


def test_all_logit_is_the_mean_over_the_classes_of_the_absolute_effects() -> None:
    h = torch.tensor([[[3.0]], [[0.0]]])
    per_class = [torch.tensor([[[1.0]], [[2.0]]]), torch.tensor([[[-3.0]], [[0.0]]])]
    # class 0: |2 x 1|, |-1 x 2|; class 1: |2 x -3|, 0
    assert naive_scores("gxd_all_logit", [View(h, per_class, [1.0])]) == [((2 + 2) / 2 + (6 + 0) / 2) / 2]


def test_an_unknown_utility_is_refused() -> None:
    with pytest.raises(ValueError, match="bogus"):
        naive_scores("bogus", [View(torch.zeros(1, 1, 1))])


@pytest.mark.parametrize("group", [0, 1])
def test_in_a_linear_net_gxd_is_exactly_the_change_of_the_target_logit_under_a_clamp(group: int) -> None:
    (x, y), *_ = random_batches(1, features=3, classes=2)
    net = NaiveCBP.of_linears(
        random_linears([3, 4, 5, 2]), activation=identity, utility="gxd", fresh=ones, lr=0.0, rate=0.0
    )
    record = net.step(x, y)
    for unit, score in enumerate(record.scores[group]):
        moved = net.logits(x, {(group, unit): record.references[group][unit]}) - net.logits(x)
        effects = [abs(float(moved[example, y[example]])) for example in range(len(y))]
        assert score == pytest.approx(sum(effects) / len(effects), abs=1e-12)


def test_in_a_linear_net_the_sketch_is_the_change_of_the_signed_sum_of_logits_under_a_clamp() -> None:
    (x, y), *_ = random_batches(1, features=3, classes=3)
    signs = torch.tensor([[1.0, 1, -1], [-1, 1, 1], [1, -1, 1], [1, 1, 1], [-1, -1, 1], [-1, 1, -1]])
    net = NaiveCBP.of_linears(
        random_linears([3, 4, 3]), activation=identity, utility="gxd_sketch", fresh=ones, lr=0.0, rate=0.0
    )
    record = net.step(x, y, signs)
    for unit, score in enumerate(record.scores[0]):
        moved = net.logits(x, {(0, unit): record.references[0][unit]}) - net.logits(x)
        assert score == pytest.approx(float((signs * moved).sum(1).abs().mean()), abs=1e-12)


# ---- running statistics


def test_the_bias_corrected_average_of_a_constant_is_that_constant_at_every_age() -> None:
    net = hand_net("activation", decay=0.99)
    for age in range(1, 30):
        record = net.step(HAND_X, HAND_Y)
        assert record.ages == [[age, age]]
        assert net.mean[0] == pytest.approx([3 * (1 - 0.99**age), 1 - 0.99**age])
        assert record.references[0] == pytest.approx([3.0, 1.0])
        assert record.utilities[0] == pytest.approx([3.0, 2.0])


def test_two_different_batches_average_as_computed_by_hand() -> None:
    net = hand_net("gxd")
    net.step(HAND_X, HAND_Y)  # f = (1.5, 0.5), u = (0, 1)
    record = net.step(torch.tensor([[1.0, 0.0]]), HAND_Y[:1])  # h = (1, 1)
    # f = (0.75 + 0.5, 0.25 + 0.5), divided by 0.75: r = (5/3, 1); effects (1 - 5/3) 2 and 0
    assert record.references[0] == pytest.approx([5 / 3, 1.0])
    assert record.scores[0] == pytest.approx([4 / 3, 0.0])
    assert record.utilities[0] == pytest.approx([(2 / 3) / 0.75, 0.5 / 0.75])


def test_activations_precede_the_parameter_update_and_weights_of_local_utilities_follow_it() -> None:
    # dL/dW1 = mean h = (3, 1), dL/dW0 = rows of (2, -1) x mean x (2, 1); lr 1.
    record = hand_net("mc_adaptable_contribution", lr=1.0).step(HAND_X, HAND_Y)
    w0, b0, w1, b1 = record.parameters
    assert w0.tolist() == [[1 - 4, 1 - 2], [1 + 2, -1 + 1]]
    assert b0.tolist() == [-2.0, 1.0]
    assert w1.tolist() == [[2 - 3, -1 - 1]]
    assert b1.tolist() == [-0.5]
    assert record.references == [[3.0, 1.0]]
    assert record.scores == [[0.0, 2.0 * 2.0 / 3.0]]  # mean abs (h - r) = 2, |w_out| = 2, |w_in| = 3 + 0


# ---- selection


def test_fractions_of_a_unit_are_saved_until_they_make_one() -> None:
    budget, chosen = 0.0, []
    for _ in range(8):
        units, budget = naive_select([3.0, 1.0, 2.0], [9, 9, 9], budget, rate=0.125, maturity=5)
        chosen.append(units)
    assert chosen == [[], [], [1], [], [], [1], [], [1]]  # in eighths 3, 6, 9; 1 + 3, 7, 10; 2 + 3, 8
    assert budget == 0.0


def test_only_units_older_than_the_maturity_count_and_are_chosen() -> None:
    assert naive_select([0.0, 1.0, 2.0], [5, 6, 6], 0.0, rate=0.5, maturity=5) == ([1], 0.0)
    assert naive_select([0.0, 1.0], [5, 5], 0.75, rate=0.5, maturity=5) == ([], 0.75)


def test_ties_go_to_the_lowest_index() -> None:
    assert naive_select([1.0, 0.0, 0.0, 0.0], [1] * 4, 0.0, rate=0.5, maturity=0) == ([1, 2], 0.0)


def test_no_more_units_are_reset_than_are_eligible() -> None:
    assert naive_select([0.0, 0.0], [9, 1], 3.5, rate=0.5, maturity=5) == ([0], 3.0)


# ---- the reset operator


def test_the_2_2_1_net_resets_as_computed_by_hand() -> None:
    net = hand_net("gxd", rate=0.5, maturity=1)
    assert net.step(HAND_X, HAND_Y).resets == []  # age 1 is not above 1
    record = net.step(HAND_X, HAND_Y)
    assert record.resets == [(0, [0])]
    assert [p.tolist() for p in record.parameters] == [[[1, 1], [1, -1]], [0, 0], [[0, -1]], [0.5 + 2 * 3]]
    assert net.age == [[0, 2]]
    assert net.mean == [[0.0, 0.75]]
    assert net.raw_utility == [[0.0, 1.5]]
    assert net.references() == [[0.0, 1.0]]
    assert net.budget == [0.0]
    after = net.step(HAND_X, HAND_Y)
    assert after.ages == [[1, 3]]
    assert after.resets == []


def test_without_compensation_the_consumers_bias_stays() -> None:
    net = hand_net("gxd", rate=0.5, compensate=False)
    record = net.step(HAND_X, HAND_Y)
    assert record.resets == [(0, [0])]
    assert record.parameters[3].tolist() == [0.5]


@pytest.mark.parametrize("chosen", [[[1], [], []], [[], [0, 3], []], [[0, 2], [4], []], [[0, 2], [1, 4], [0, 3]]])
def test_a_reset_leaves_the_function_with_the_units_held_at_their_references(chosen: list[list[int]]) -> None:
    make = torch.Generator().manual_seed(2)
    net = NaiveCBP.of_linears(
        random_linears([3, 4, 5, 4, 2]),
        activation=nn.functional.silu,
        utility="gxd",
        fresh=lambda _layer, _unit, fan_in: torch.randn(fan_in, generator=make),
        lr=0.1,
        rate=0.0,
    )
    for x, y in random_batches(5, features=3, classes=2):
        net.step(x, y)
    references = net.references()
    probe = torch.randn(20, 3, generator=make)
    clamped = net.logits(probe, {(g, u): references[g][u] for g, units in enumerate(chosen) for u in units})
    assert not torch.allclose(clamped, net.logits(probe))
    old = net.parameters()
    net.reset(chosen)
    torch.testing.assert_close(net.logits(probe), clamped, rtol=0, atol=1e-14)
    assert any(not torch.equal(a, b) for a, b in zip(old, net.parameters(), strict=True))


def test_adjacent_groups_compensate_with_old_weights_and_keep_crossed_columns_at_zero() -> None:
    net = NaiveCBP(
        weights=[torch.eye(2), torch.tensor([[3.0, 1.0], [5.0, 7.0]]), torch.tensor([[2.0, 4.0]])],
        biases=[torch.ones(2), torch.ones(2), torch.ones(1)],
        activation=identity,
        utility="gxd",
        fresh=ones,
        lr=0.0,
        rate=0.0,
        loss=lambda z, _y: z.mean(),
    )
    net.step(torch.tensor([[1.0, 2.0]]), torch.tensor([0]))
    # r = (1 + 1, 2 + 1), then (3 x 2 + 1 x 3 + 1, 5 x 2 + 7 x 3 + 1)
    assert net.references() == [pytest.approx([2.0, 3.0]), pytest.approx([10.0, 32.0])]
    net.reset([[0], [0]])
    w0, b0, w1, b1, w2, b2 = net.parameters()
    assert w0.tolist() == [[1, 1], [0, 1]]
    assert b0.tolist() == [0, 1]
    assert w1.tolist() == [[0, 1], [0, 7]]  # the zeroed column crosses the fresh row (1, 1)
    assert b1.tolist() == pytest.approx([0, 1 + 5 * 2])  # 0 although it was compensated
    assert w2.tolist() == [[0, 4]]
    assert b2.tolist() == pytest.approx([1 + 2 * 10])


def test_a_consumer_without_bias_is_reset_without_compensation() -> None:
    weights = [torch.eye(2), torch.ones(1, 2)]
    net = NaiveCBP(weights, [None, None], identity, "activation", ones, loss=lambda z, _y: z.sum())
    net.step(torch.ones(1, 2), torch.tensor([0]))
    net.reset([[1]])
    assert len(net.parameters()) == 2
    assert net.parameters()[1][0, 1] == 0


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_a_reset_zeroes_the_optimizer_state_of_exactly_the_slices_of_the_unit(optimizer: str) -> None:
    net = NaiveCBP.of_linears(
        random_linears([3, 4, 4, 2]),
        activation=torch.tanh,
        utility="gxd",
        fresh=ones,
        optimizer=optimizer,
        rate=0.0,
    )
    for x, y in random_batches(3, features=3, classes=2):
        net.step(x, y)
    net.reset([[], [2], []])
    for layer, kinds in enumerate(net.optimizer_state):
        for kind, states in kinds.items():
            assert len(states) == {"momentum": 1, "adam": 2}[optimizer]
            for state in states.values():
                expected = torch.zeros_like(state, dtype=torch.bool)
                if layer == 1:
                    expected[2] = True
                elif (layer, kind) == (2, "weight"):
                    expected[:, 2] = True
                assert torch.equal(state == 0, expected)
    assert net.optimizer_steps == 3


def test_every_unit_but_the_chosen_one_keeps_its_parameters_and_statistics() -> None:
    net = NaiveCBP.of_linears(random_linears([3, 4, 2]), activation=torch.relu, utility="gxd", fresh=ones, rate=0.0)
    for x, y in random_batches(3, features=3, classes=2):
        net.step(x, y)
    before, mean, utility = net.parameters(), list(net.mean[0]), list(net.raw_utility[0])
    net.reset([[1]])
    after, others = net.parameters(), [0, 2, 3]
    assert torch.equal(after[0][others], before[0][others])
    assert torch.equal(after[1][others], before[1][others])
    assert torch.equal(after[2][:, others], before[2][:, others])
    assert [net.mean[0][u] for u in others] == [mean[u] for u in others]
    assert [net.raw_utility[0][u] for u in others] == [utility[u] for u in others]
    assert net.age == [[3, 0, 3, 3]]
    assert utility[1] > 0
    assert (net.mean[0][1], net.raw_utility[0][1]) == (0.0, 0.0)


# ---- training


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.05)),
        ("momentum", lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
        ("adam", lambda p: torch.optim.Adam(p, lr=0.05)),
    ],
)
def test_when_nothing_is_reset_the_optimizer_is_that_of_torch(
    name: str, make: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
) -> None:
    linears = random_linears([3, 5, 4, 3])
    net = NaiveCBP.of_linears(
        linears, activation=nn.functional.silu, utility="gxd", fresh=ones, optimizer=name, lr=0.05
    )
    model = nn.Sequential(linears[0], nn.SiLU(), linears[1], nn.SiLU(), linears[2])
    optimizer = make(model.parameters())
    for x, y in random_batches(25, features=3, classes=3):
        record = net.step(x, y)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        torch.autograd.backward(loss)
        optimizer.step()
        assert record.loss == pytest.approx(loss.item(), abs=1e-12)
        for ours, theirs in zip(record.parameters, model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-11)


@pytest.mark.parametrize("utility", UTILITIES)
def test_a_run_resets_at_the_replacement_rate_and_only_the_lowest_mature_units(utility: str) -> None:
    make = torch.Generator().manual_seed(3)
    net = NaiveCBP.of_linears(
        random_linears([3, 8, 8, 3]),
        activation=nn.functional.leaky_relu,
        utility=utility,
        fresh=lambda _layer, _unit, fan_in: torch.randn(fan_in, generator=make) / fan_in,
        optimizer="adam",
        rate=1 / 32,
        maturity=2,
        decay=0.9,
    )
    mature = [0, 0]
    for x, y in random_batches(20, features=3, classes=3):
        signs = torch.randint(2, (len(y), 3), generator=make) * 2 - 1
        record = net.step(x, y, torch.rand(len(y), generator=make) if utility == "gxd_kl" else signs)
        for group in (0, 1):
            mature[group] += sum(age > 2 for age in record.ages[group])
        for group, units in record.resets:
            spared = [u for u in range(8) if record.ages[group][u] > 2 and u not in units]
            assert all(record.ages[group][u] > 2 for u in units)
            dearest_reset = max(record.utilities[group][u] for u in units)
            assert dearest_reset <= min(record.utilities[group][u] for u in spared)
    assert len(net.history) == 20
    for group in (0, 1):
        done = sum(len(units) for record in net.history for g, units in record.resets if g == group)
        assert done > 0
        assert done + net.budget[group] == mature[group] / 32


# ---- clamping


def test_clamping_the_columns_of_a_linear_agrees_with_clamping_the_units() -> None:
    linears = random_linears([3, 4, 2])
    model = nn.Sequential(linears[0], nn.Tanh(), linears[1])
    net = NaiveCBP.of_linears(linears, activation=torch.tanh, utility="gxd", fresh=ones)
    x = torch.randn(7, 3, dtype=torch.float64)
    plain = model(x)
    torch.testing.assert_close(naive_clamp_logits(model, "2", [1], 0.25, x), net.logits(x, {(0, 1): 0.25}))
    both = naive_clamp_logits(model, "2", [1, 3], [0.25, -2.0], x)
    torch.testing.assert_close(both, net.logits(x, {(0, 1): 0.25, (0, 3): -2.0}))
    assert torch.equal(model(x), plain)


def test_clamping_a_channel_of_a_convolution_holds_it_everywhere() -> None:
    conv = nn.Conv2d(2, 1, 1, bias=False)
    nn.init.constant_(conv.weight, 1.0)
    x = torch.arange(8.0).reshape(1, 2, 2, 2)
    assert naive_clamp_logits(nn.Sequential(conv), "0", [1], 10.0, x).flatten().tolist() == [10, 11, 12, 13]
    assert x.flatten().tolist() == list(range(8))


def test_clamping_a_module_that_is_never_called_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_module("unused", nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="never called"):
        naive_clamp_logits(model, "0.unused", [0], 0.0, torch.zeros(1, 2))
