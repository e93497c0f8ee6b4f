"""Continual Backpropagation: at every step, reset the eligible units of lowest utility, at a rate."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gxd import arguments
from gxd.acting import OnReset
from gxd.attachment import Attachment
from gxd.methods.registry import register_method
from gxd.methods.unit_reset import UnitReset
from gxd.plan.units import UnitPlan
from gxd.reset.operator import Reset
from gxd.select import LowestRate, LowestSet
from gxd.select.settings import OfPlan

RANKINGS = ("absolute", "age")
SELECTIONS = {"units": LowestRate, "set": LowestSet}


@register_method(
    "continual_backprop",
    description="at every step, reset the mature units of lowest utility, at a rate",
    reference="Dohare et al.: Loss of Plasticity in Deep Continual Learning, Nature 632, 2024; with the utility gxd: "
    "resets by gradient x difference from the reset reference",
    inert={"replacement_rate": 0.0},
    changes="units: new incoming weights, no outgoing ones, their mean into biases, optimizer state of these",
)
def continual_backprop(
    utility: str = "gxd",
    replacement_rate: float = 1e-4,
    maturity: int = 100,
    decay: float = 0.99,
    compensate: bool = True,
    score_every: int = 1,
    positions: str = "signed",
    step_policy: str = "keep",
    ranking: str = "absolute",
    selection: str = "units",
) -> UnitReset:
    """The options are those of :class:`gxd.ContinualBackprop`."""
    arguments.choice("ranking", ranking, RANKINGS)
    kind = SELECTIONS[arguments.choice("selection", selection, SELECTIONS)]
    selector = kind(replacement_rate, maturity, score_every)
    # One observation stands for score_every steps.
    return UnitReset(
        utility,
        selector,
        reset=Reset(compensate=compensate, step_policy=step_policy),
        normalise="age" if ranking == "age" else "none",
        decay=arguments.decay(decay) ** score_every,
        positions=positions,
    )


class ContinualBackprop(Attachment):
    """Reset the cheapest units of a model while it trains: :func:`gxd.attach` with this one method.

    Attach it to a model and its optimizer; ageing, scoring and resets then run after every ``optimizer.step()``. The
    model is not wrapped, its ``state_dict`` gains no key, and gradients are untouched.

    Args:
        model: any module the plan can be made from.
        optimizer: the optimizer that trains it, or several (Muon for matrices, AdamW for the rest) in the order they
            step in; resets follow the step of the last.
        example_inputs: as for :func:`gxd.find_units`; give this or ``plan``.
        plan: a plan made before.
        utility: one of :func:`gxd.utilities`.
        replacement_rate: the share of the eligible units of each group that is reset per step; groups with a rate of
            their own keep it. May be set while training goes on; of single groups in ``replacement_rates``.
        maturity: a unit is eligible when more than this many steps old. May be set, too; of single groups in
            ``maturities``.
        decay: of the running averages, per step.
        compensate: whether to move the mean contribution of a unit into its consumers' biases when it is reset.
        score_every: score only every so many steps; the decay is adjusted so that the horizon stays the same.
        seed: of the fresh weights and of random directions. The global random state is never used.
        positions: ``signed`` sums the effect of a unit over positions (space, tokens) before taking its absolute
            value; ``abs`` takes the absolute value at every position, as the paper seems to have done.
        step_policy: what becomes of Adam's ``step`` on a reset: ``keep`` or ``reset``.
        scaler, process_group, on_unobserved, on_reset: as for :func:`gxd.attach`.
        ranking: ``absolute``: the units of lowest utility go, as in the paper. ``age``: those of lowest utility per
            step that they have lived, ``u / age``, see :class:`gxd.ByAge`.
        selection: ``units``: those of lowest utility go. ``set``: those that are cheapest to reset together, see
            :class:`gxd.LowestSet`.

    Example::

        cbp = gxd.ContinualBackprop(model, optimizer, example_inputs=x[:2], utility="gxd")
        for x, y in stream:
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            cbp.observe(logits, y)
            loss.backward(); optimizer.step(); optimizer.zero_grad()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        example_inputs: Tensor | tuple[Any, ...] | Mapping[str, Any] | list[Any] | None = None,
        plan: UnitPlan | None = None,
        utility: str = "gxd",
        replacement_rate: float = 1e-4,
        maturity: int = 100,
        decay: float = 0.99,
        compensate: bool = True,
        score_every: int = 1,
        seed: int = 0,
        positions: str = "signed",
        step_policy: str = "keep",
        scaler: Any = None,
        process_group: Any = None,
        on_unobserved: str = "raise",
        ranking: str = "absolute",
        selection: str = "units",
        on_reset: OnReset | None = None,
    ) -> None:
        method = continual_backprop(
            utility=utility,
            replacement_rate=replacement_rate,
            maturity=maturity,
            decay=decay,
            compensate=compensate,
            score_every=score_every,
            positions=positions,
            step_policy=step_policy,
            ranking=ranking,
            selection=selection,
        )
        method.name = "continual_backprop"
        self.decay = decay
        super().__init__(
            model,
            optimizer,
            [method],
            plan=plan,
            example_inputs=example_inputs,
            scaler=scaler,
            seed=seed,
            process_group=process_group,
            on_unobserved=on_unobserved,
            on_reset=on_reset,
        )

    @property
    def _method(self) -> UnitReset:
        method = self.methods[0]
        assert isinstance(method, UnitReset)
        return method

    @property
    def _selector(self) -> LowestRate:
        selector = self._method.selector
        assert isinstance(selector, LowestRate)
        return selector

    @property
    def replacement_rate(self) -> float:
        """Of the groups that have none of their own."""
        rate: float = self._selector.rates.default
        return rate

    @replacement_rate.setter
    def replacement_rate(self, value: float) -> None:
        self._selector.rates.default = value

    @property
    def replacement_rates(self) -> MutableMapping[str, float]:
        """Group name -> the rate in force. Set one to give a group its own."""
        return OfPlan(self._selector.rates, self.plan)

    @property
    def maturity(self) -> int:
        """Of the groups that have none of their own."""
        maturity: int = self._selector.maturities.default
        return maturity

    @maturity.setter
    def maturity(self, value: int) -> None:
        self._selector.maturities.default = value

    @property
    def maturities(self) -> MutableMapping[str, int]:
        """Group name -> the maturity in force. Set one to give a group its own."""
        return OfPlan(self._selector.maturities, self.plan)

    @property
    def compensate(self) -> bool:
        """Whether a unit's mean contribution is moved into its consumers' biases."""
        return self._method.reset.compensate

    @property
    def score_every(self) -> int:
        """The steps from one score to the next."""
        return self._selector.score_every

    @property
    def positions(self) -> str:
        """How effects at several positions are put together."""
        return self._method.positions

    @property
    def step_policy(self) -> str:
        """What becomes of Adam's ``step`` on a reset."""
        return self._method.reset.step_policy

    def __repr__(self) -> str:
        utility = self._method.utility
        return (
            f"ContinualBackprop(utility={utility.name if utility else None!r}, {len(self.plan)} groups, "
            f"{self.plan.size} units, replacement_rate={self.replacement_rate:g}, maturity={self.maturity}, "
            f"step={self._parts[0].units.step}, total_resets={self.total_resets})"
        )
