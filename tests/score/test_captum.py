"""Captum as an oracle: the scores and the clamp of gxd are attributions that others have implemented."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captum.attr import LayerActivation, LayerFeatureAblation, LayerGradientXActivation
from torch import Tensor, nn

import gxd
from gxd.observe.clamp import clamped

CLASSES = 5
SEED = 3


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    group: str
    consumer: str
    units: Callable[[Tensor], Tensor]
    """The consumer's input, or a tensor of its shape, as (examples, positions, units)."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().double().train()

    def plan(self) -> gxd.UnitPlan:
        if self.build not in PLANS:
            PLANS[self.build] = gxd.find_units(self.model(), self.data()[0][:2])
        return PLANS[self.build]

    def data(self, examples: int = 6) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(examples, *self.shape, dtype=torch.float64, generator=generator)
        return x, torch.randint(CLASSES, (examples,), generator=generator)


PLANS: dict[Callable[[], nn.Module], gxd.UnitPlan] = {}


class Block(nn.Module):
    """A transformer block and a head on the mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.norm1, self.norm2 = nn.LayerNorm(6), nn.LayerNorm(6)
        self.q, self.k, self.v, self.o = (nn.Linear(6, 6) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(6, 9), nn.Linear(9, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (2, 3)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return self.head(x.mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 8), nn.SiLU(), nn.Linear(8, CLASSES))


def conv_then_flatten() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 2), nn.SiLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 4, CLASSES))


def two_convs() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 5, 3, padding=1)),
        *(nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, CLASSES)),
    )


def vectors(x: Tensor) -> Tensor:
    return x.unsqueeze(1)


def tokens(x: Tensor) -> Tensor:
    return x


def channels(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


def flattened_channels(x: Tensor) -> Tensor:
    return x.view(len(x), 4, -1).transpose(1, 2)


CASES = [
    Case("first layer of an mlp", mlp, (4,), "0", "2", vectors),
    Case("second layer of an mlp", mlp, (4,), "2", "4", vectors),
    Case("conv, pool, flatten, linear", conv_then_flatten, (3, 6, 6), "0", "4", flattened_channels),
    Case("conv, conv", two_convs, (3, 5, 5), "0", "3", channels),
    Case("conv, pool, linear", two_convs, (3, 5, 5), "3", "7", vectors),
    Case("mlp of a transformer block", Block, (3, 4), "fc1", "fc2", tokens),
    Case("values of a transformer block", Block, (3, 4), "v", "o", tokens),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def score(case: Case, utility: str, examples: int = 6, target: bool = True, **options: Any) -> tuple[Tensor, Tensor]:
    """The utilities of the group after one observed step, and the references."""
    model, (x, y) = case.model(), case.data(examples)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    plan = case.plan()
    assert [c.module for c in plan[case.group].consumers] == [case.consumer]
    options = {"plan": plan, "utility": utility, "replacement_rate": 0.0, "seed": SEED, **options}
    with gxd.ContinualBackprop(model, optimizer, **options) as cbp:
        logits = model(x)
        cbp.observe(logits, y if target else None)
        F.cross_entropy(logits, y).backward()
        optimizer.step()
        return cbp.utilities()[case.group], cbp.references()[case.group]


class Captum:
    """What captum says of the consumer's input: all as (examples, positions, units)."""

    def __init__(self, case: Case, output: Callable[[Tensor], Tensor] | None = None, examples: int = 6) -> None:
        self.case, self.model = case, case.model()
        self.x, self.y = case.data(examples)
        self.layer = self.model.get_submodule(case.consumer)
        self.function = self.model if output is None else lambda x: output(self.model(x))

    def product(self, target: Tensor | int | None) -> Tensor:
        """Gradient times activation."""
        method = LayerGradientXActivation(self.function, self.layer)
        return self._units(method.attribute(self.x, target=target, attribute_to_layer_input=True))

    def gradient(self, target: Tensor | int | None) -> Tensor:
        method = LayerGradientXActivation(self.function, self.layer, multiply_by_inputs=False)
        return self._units(method.attribute(self.x, target=target, attribute_to_layer_input=True))

    def activation(self) -> Tensor:
        method = LayerActivation(self.model, self.layer)
        return self._units(method.attribute(self.x, attribute_to_layer_input=True))

    def deviation(self) -> Tensor:
        h = self.activation()
        return h - h.mean((0, 1))

    def effect(self, target: Tensor | int | None) -> Tensor:
        """(examples, units): the deviation from the mean times the gradient, summed over positions with its sign."""
        return (self.deviation() * self.gradient(target)).sum(1)

    def _units(self, attribution: Tensor | tuple[Tensor, ...]) -> Tensor:
        tensor = attribution[0] if isinstance(attribution, tuple) else attribution
        return self.case.units(tensor.detach())


def same(left: Tensor, right: Tensor) -> bool:
    return torch.allclose(left, right, rtol=1e-9, atol=1e-12)


@every_case
def test_gxi_is_layer_gradient_x_activation_summed_over_positions_before_it_is_made_absolute(case: Case):
    captum = Captum(case)
    expected = captum.product(captum.y).sum(1).abs().mean(0)
    assert same(score(case, "gxi")[0], expected)


@every_case
def test_the_reference_is_the_mean_of_the_layer_activation_over_examples_and_positions(case: Case):
    assert same(score(case, "gxd")[1], Captum(case).activation().mean((0, 1)))


@every_case
def test_gxd_is_the_layer_gradient_times_the_deviation_from_the_reference(case: Case):
    captum = Captum(case)
    assert same(score(case, "gxd")[0], captum.effect(captum.y).abs().mean(0))


@every_case
@pytest.mark.parametrize("target", [True, False], ids=["target given", "no target"])
def test_gxd_all_logit_is_the_mean_over_the_classes(case: Case, target: bool):
    captum = Captum(case)
    effects = torch.stack([captum.effect(c) for c in range(CLASSES)])
    assert same(score(case, "gxd_all_logit", target=target)[0], effects.abs().mean((0, 1)))


@every_case
def test_with_positions_abs_every_position_is_made_absolute(case: Case):
    captum = Captum(case)
    expected = (captum.deviation() * captum.gradient(captum.y)).abs().mean((0, 1))
    assert same(score(case, "gxd", positions="abs")[0], expected)


@every_case
def test_activation_is_the_mean_of_the_absolute_layer_activation(case: Case):
    assert same(score(case, "activation")[0], Captum(case).activation().abs().mean((0, 1)))


@every_case
def test_loss_gradient_is_what_autograd_says_of_the_layer_input(case: Case):
    model, (x, y) = case.model(), case.data()
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        args[0].retain_grad()
        seen.append(args[0])

    model.get_submodule(case.consumer).register_forward_pre_hook(keep)
    F.cross_entropy(model(x), y).backward()
    assert same(score(case, "loss_gradient")[0], case.units(seen[0].grad).abs().mean((0, 1)))


# ---------------------------------------------------------------- the sketch


def signs(examples: int) -> Tensor:
    """The directions that the first observe() draws, drawn again from a generator of the same seed."""
    generator = torch.Generator().manual_seed(SEED + 1)
    return torch.randint(0, 2, (examples, CLASSES), generator=generator, dtype=torch.int8).double() * 2 - 1


@every_case
def test_the_sketch_is_the_effect_on_a_random_signed_sum_of_the_logits(case: Case):
    v = signs(6)
    captum = Captum(case, lambda logits: (v * logits).sum(1))
    assert same(score(case, "gxd_sketch", target=False)[0], captum.effect(None).abs().mean(0))


@pytest.fixture
def squared_sketch():
    """The sketch, squared instead of made absolute: its expectation has a closed form."""

    @gxd.register_utility("squared_sketch", gradient="sketch")
    def squared_sketch(o: gxd.Observation) -> Tensor:
        return sum(((v.h - v.r) * v.g).sum(1) for v in o.views).square().mean(0)

    return "squared_sketch"


@pytest.mark.parametrize("case", [c for c in CASES if c.build is not two_convs], ids=lambda case: case.name)
def test_the_mean_of_the_squared_sketch_is_the_squared_effect_on_all_logits(case: Case, squared_sketch: str):
    """E (v.a)^2 = |a|^2 for random signs v, with variance 2 (|a|^4 - sum a_c^4); a is the effect on the logits.

    Not for nets with a BatchNorm: it couples the examples of a batch, and none has an effect of its own.
    """
    examples = 3000
    captum = Captum(case, examples=examples)
    a = torch.stack([captum.effect(c) for c in range(CLASSES)])  # (classes, examples, units)
    mean = a.square().sum(0)
    variance = 2 * (mean.square() - a.pow(4).sum(0))
    found = score(case, squared_sketch, examples, target=False)[0]
    deviation = (found - mean.mean(0)) / (variance.sum(0).sqrt() / examples)
    assert deviation.abs().max() < 4.5
    assert deviation.std() > 0.2, "too good to be random"


def test_a_direction_is_drawn_anew_for_every_example_and_every_observation():
    case = CASES[0]
    model, x = case.model(), case.data()[0]
    x = x[:1].expand(64, -1).clone()
    x[32:] = -x[32:]
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    spread = []

    @gxd.register_utility("spread", gradient="sketch")
    def spread_of_examples(o: gxd.Observation) -> Tensor:
        effects = ((o.views[0].h - o.views[0].r) * o.views[0].g).sum(1)
        spread.append(effects.clone())
        return effects.abs().mean(0)

    with gxd.ContinualBackprop(
        model, optimizer, example_inputs=x[:2], utility="spread", replacement_rate=0.0, decay=0.0
    ) as cbp:
        for _ in range(2):
            logits = model(x)
            cbp.observe(logits)
            logits.sum().backward()
            optimizer.step()
    first, second = torch.cat(spread[: len(spread) // 2], 1), torch.cat(spread[len(spread) // 2 :], 1)
    assert len(first[:32].unique(dim=0)) > 8, "examples that are equal get different directions"
    assert not torch.equal(first, second), "the next observation gets other directions"


# ---------------------------------------------------------------- the clamp


@every_case
def test_the_clamp_is_a_layer_feature_ablation_with_the_reference_as_the_baseline(case: Case):
    captum = Captum(case)
    model, x, y = captum.model.eval(), captum.x, captum.y
    group = case.plan()[case.group]
    example = _layer_input(model, captum.layer, x)
    reference = case.units(example).mean((0, 1))
    unit_of = _unit_of_each_element(case, example[:1], group.size)
    ablation = LayerFeatureAblation(model, captum.layer).attribute(
        x,
        layer_baselines=reference[unit_of].expand_as(example),
        target=y,
        layer_mask=unit_of,
        attribute_to_layer_input=True,
    )
    ablation = (ablation[0] if isinstance(ablation, tuple) else ablation).detach()
    before = model(x).gather(1, y.unsqueeze(1)).squeeze(1)
    for unit in range(group.size):
        with clamped(model, group, torch.tensor([unit]), reference.expand(1, -1)):
            after = model(x).gather(1, y.unsqueeze(1)).squeeze(1)
        # captum gives the change to every element of the feature
        changes = ablation.movedim(0, -1)[unit_of[0] == unit]
        assert same(changes, (before - after).detach().expand_as(changes))


@every_case
def test_units_held_together_are_one_feature(case: Case):
    captum = Captum(case)
    model, x, y = captum.model.eval(), captum.x, captum.y
    group = case.plan()[case.group]
    example = _layer_input(model, captum.layer, x)
    unit_of = _unit_of_each_element(case, example[:1], group.size)
    chosen = torch.tensor([0, 2, 3])
    mask = torch.isin(unit_of, chosen).long()
    ablation = LayerFeatureAblation(model, captum.layer).attribute(
        x, layer_baselines=0.7, target=y, layer_mask=mask, attribute_to_layer_input=True
    )
    ablation = (ablation[0] if isinstance(ablation, tuple) else ablation).detach()
    with clamped(model, group, chosen, 0.7):
        after = model(x)
    change = (model(x) - after).gather(1, y.unsqueeze(1)).squeeze(1).detach()
    changes = ablation.movedim(0, -1)[mask[0] == 1]
    assert same(changes, change.expand_as(changes))


def _layer_input(model: nn.Module, layer: nn.Module, x: Tensor) -> Tensor:
    seen = LayerActivation(model, layer).attribute(x, attribute_to_layer_input=True)
    return (seen[0] if isinstance(seen, tuple) else seen).detach()


def _unit_of_each_element(case: Case, example: Tensor, size: int) -> Tensor:
    """The unit that each element of the consumer's input belongs to: read off by writing unit numbers through views."""
    number = torch.zeros_like(example)
    case.units(number).copy_(torch.arange(size).to(number).expand_as(case.units(number)))
    return number.long()
