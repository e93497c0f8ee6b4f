"""What it costs to reset several units at once, and how well that is predicted from what is known of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gxd.cost.ranks import mean_over_groups, spearman
from gxd.select.lowest import lowest
from gxd.select.lowest_set import lowest_set

METRICS = ("l1", "kl")
Clamp = Callable[[int, Tensor], Tensor]  # number of a group, (sets, k) units -> (2, sets) the shocks, L1 and KL


@dataclass(frozen=True)
class SetCosts:
    """Whole sets of units, clamped together. A part of :class:`gxd.ResetCost`; ``print`` it.

    A *rule* is a utility, ``"gxd"``, which chooses the units of lowest score and predicts the sum of their scores; or,
    ``"gxd, set"``, its Gram matrix G (see :class:`gxd.LowestSet`), which chooses greedily and predicts ``1' G 1``.

    Attributes:
        fraction: the share of each group that makes a set.
        chosen: rule -> group name -> ``(k,)`` the units that it chooses.
        random: group name -> ``(sets, k)`` sets that were drawn at random.
        predicted: rule -> group name -> ``(sets,)`` the cost of each random set, up to a monotone function.
        shocks: metric -> rule (or ``"random"``) -> group name -> ``(sets,)`` of the sets clamped together: one that was
            chosen, or the random ones.
        alone: the same, the sum of the shocks of the units of the set, clamped one at a time.
    """

    fraction: float
    chosen: Mapping[str, Mapping[str, Tensor]]
    random: Mapping[str, Tensor]
    predicted: Mapping[str, Mapping[str, Tensor]]
    shocks: Mapping[str, Mapping[str, Mapping[str, Tensor]]]
    alone: Mapping[str, Mapping[str, Mapping[str, Tensor]]]

    def spearman(self, metric: str = "l1") -> dict[str, float]:
        """Rule -> rank correlation of predicted and true cost over the random sets, the mean over groups."""
        true = self.shocks[metric]["random"]
        return {
            rule: mean_over_groups({g: spearman(values, true[g]) for g, values in by_group.items()})
            for rule, by_group in self.predicted.items()
        }

    def shock(self, metric: str = "l1") -> dict[str, float]:
        """Rule (or ``"random"``) -> the shock of the set it chooses, the mean over groups."""
        return _means(self.shocks[metric])

    def sum_alone(self, metric: str = "l1") -> dict[str, float]:
        """Rule (or ``"random"``) -> the sum of the shocks of the units of its set, clamped one at a time."""
        return _means(self.alone[metric])

    def __str__(self) -> str:
        rho, shock = ({m: of(m) for m in METRICS} for of in (self.spearman, self.shock))
        alone = self.sum_alone()
        width = max(map(len, shock["l1"]))
        sets = len(next(iter(self.random.values())))
        lines = [
            f"sets of {self.fraction:.3g} of a group; Spearman over {sets} random ones, the shock of the set chosen:",
            f"{'':{width}}  Spearman      Shock                 the units",
            f"{'rule':{width}}  L1     KL     L1         KL         alone, L1",
        ]
        for rule in shock["l1"]:
            ranks = f"{rho['l1'][rule]:6.3f} {rho['kl'][rule]:6.3f}" if rule in rho["l1"] else " " * 13
            cells = f"{shock['l1'][rule]:<9.3g}  {shock['kl'][rule]:<9.3g}  {alone[rule]:.3g}"
            lines.append(f"{rule:{width}} {ranks}  {cells}")
        return "\n".join(lines)


def set_costs(
    fraction: float,
    count: int,
    names: Sequence[str],
    units: Sequence[Tensor],
    scores: Mapping[str, Sequence[Tensor]],
    grams: Mapping[str, Sequence[Tensor]],
    shocks: Mapping[str, Sequence[Tensor]],
    clamp: Clamp,
    seed: int,
) -> SetCosts:
    """Choose sets by every rule, draw others, and clamp them.

    Args:
        fraction: of the units of each group.
        count: how many sets are drawn.
        names: of the groups.
        units: for each group ``(n,)``, those that were clamped one at a time; sets are made of them.
        scores: utility -> for each group ``(size,)``.
        grams: utility -> for each group ``(size, size)``.
        shocks: metric -> for each group ``(n,)``, of single units.
        clamp: see ``Clamp``.
        seed: of the random sets.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen: dict[str, dict[str, Tensor]] = {}
    predicted: dict[str, dict[str, Tensor]] = {}
    random: dict[str, Tensor] = {}
    together: dict[str, dict[str, dict[str, Tensor]]] = {metric: {} for metric in METRICS}
    alone: dict[str, dict[str, dict[str, Tensor]]] = {metric: {} for metric in METRICS}
    for number, (name, index) in enumerate(zip(names, units, strict=True)):
        k = max(1, math.ceil(fraction * len(index) - 1e-9))
        drawn = torch.stack([torch.randperm(len(index), generator=generator)[:k].sort().values for _ in range(count)])
        all_of_them, places = torch.ones(len(index), dtype=torch.bool), {}  # places in index
        for utility, by_group in scores.items():
            score = by_group[number][index]
            places[utility] = lowest(score, all_of_them, k)
            predicted.setdefault(utility, {})[name] = score[drawn].sum(1)
            if utility in grams:
                gram, rule = grams[utility][number][index][:, index], f"{utility}, set"
                places[rule] = lowest_set(gram, all_of_them, k)
                pairs = gram[drawn.unsqueeze(2), drawn.unsqueeze(1)]
                predicted.setdefault(rule, {})[name] = pairs.sum((1, 2))
        shock = clamp(number, index[torch.cat([torch.stack(list(places.values())), drawn])])
        random[name] = index[drawn]
        for rule, place in places.items():
            chosen.setdefault(rule, {})[name] = index[place]
        for metric, values in zip(METRICS, shock, strict=True):
            one_each, rest = values[: len(places)].split(1), values[len(places) :]
            for rule, value in zip([*places, "random"], [*one_each, rest], strict=True):
                together[metric].setdefault(rule, {})[name] = value
            for rule, sets in {**{rule: place.unsqueeze(0) for rule, place in places.items()}, "random": drawn}.items():
                alone[metric].setdefault(rule, {})[name] = shocks[metric][number][sets].sum(1)
    return SetCosts(fraction, chosen, random, predicted, together, alone)


def _means(by_rule: Mapping[str, Mapping[str, Tensor]]) -> dict[str, float]:
    return {
        rule: mean_over_groups({g: float(v.mean()) for g, v in by_group.items()}) for rule, by_group in by_rule.items()
    }
