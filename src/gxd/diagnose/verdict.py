"""What a probe says: how much less a network learns than a fresh one, with an interval, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gxd.diagnose import plots
from gxd.diagnose.student import interval, ratio, shares
from gxd.tables import html_table, shown, text_table

PHASES = 10
"""Parts of a run whose mean losses are compared."""
MATTERS = 0.1
"""A smaller loss of learning than this share is never called losing, however sure it is."""
HEALTHY, LOST = 1 / 3, 0.75
"""Share of a fresh network's learning that a healthy network has lost at most, and a lost one at least."""
LEARNS = 0.01
"""A fresh network learns if its loss falls by at least this share of what it was before training, on average."""


@dataclass(frozen=True, repr=False)
class Probe:
    """What :func:`gxd.probe` has found. ``print`` it.

    With ``start`` the mean loss of fresh networks before training, a run has *learned* the mean over ten phases of
    ``max(0, start - mean loss of the phase)``: how far below a new network's first loss it was, on average. A loss
    above that, or one that is not finite, is nothing learned; it does not count against what is learned later.

    ``gap = 1 - learned by the network / learned by fresh ones``, the means over runs. Above 0, the network learns less
    than a fresh one; below 0, it learns more.

    The interval of the gap compares the network with *one* fresh network, not with the mean of many. Fresh networks
    differ by the luck of their first weights, and the network had such luck once, too. At a confidence
    of 95 %, a network that is as good as new has 0 outside of its interval in about 5 % of probes at most, half of them
    on each side (:func:`gxd.diagnose.student.ratio`).

    ============  =====================================================================================================
    verdict       rule
    ============  =====================================================================================================
    lost          the interval begins at or above 0.75: it learns less than a quarter of what a fresh network learns
    losing        else, the interval begins above 0, and the gap is at least 0.1: it learns less than fresh networks do
    healthy       else, the interval ends at or below 1/3: within the range of fresh networks, or hardly worse, and
                  a loss of more than a third is ruled out
    undecided     else; or fresh networks do not learn: by less than 1 % of ``start``, or with an interval around 0
    ============  =====================================================================================================

    Attributes:
        losses: ``old`` (the network) -> ``(seeds, steps)`` and ``fresh`` -> ``(networks, steps)`` the loss of each
            batch before its step. Row i of ``old`` has the data in order i, row j of ``fresh`` in order ``j % seeds``.
        readiness: ``old`` -> ``(1,)`` and ``fresh`` -> ``(seeds,)`` optimization readiness before training, see
            :func:`gxd.diagnose.definitions.readiness`. It does not enter the verdict.
        start: the mean loss of the first ``seeds`` fresh networks before training.
        batches: how many different batches there were.
        task: what was learned: ``given``, ``permuted_inputs`` or ``random_labels``.
        confidence: of the interval.
        looks: how often the verdict could have been asked for, each time with more fresh networks.
        look: which of these times this is. The interval is wider if there are several, so that stopping as soon as the
            verdict is clear does not spoil the confidence (:func:`gxd.diagnose.student.shares`).
    """

    losses: Mapping[str, Tensor]
    readiness: Mapping[str, Tensor]
    start: float
    batches: int
    task: str
    confidence: float
    looks: int = 1
    look: int = 1

    @property
    def seeds(self) -> int:
        """How many orders of the data there were."""
        return len(self.losses["old"])

    @property
    def networks(self) -> int:
        """How many fresh networks there were."""
        return len(self.losses["fresh"])

    @property
    def steps(self) -> int:
        """How many each run has taken."""
        return self.losses["old"].shape[1]

    @cached_property
    def learned(self) -> dict[str, Tensor]:
        """``old`` -> ``(seeds,)`` and ``fresh`` -> ``(networks,)`` how much each run has learned."""
        return {name: self._falls(losses).clamp_min(0).mean(1) for name, losses in self.losses.items()}

    @cached_property
    def gap(self) -> float:
        """The share of a fresh network's learning that is lost; below 0 if the network learns more."""
        old, fresh = self.learned["old"], self.learned["fresh"]
        return float(1 - old.mean() / fresh.mean())

    @cached_property
    def interval(self) -> tuple[float, float]:
        """Of the gap. NaN if fresh networks learn nothing; ``-math.inf`` if they differ too much for a lower end."""
        old, fresh = self.learned["old"], self.learned["fresh"]
        if not fresh.mean() > 0:
            return math.nan, math.nan
        low, high = ratio(old, fresh, shares(self.confidence, self.looks)[self.look - 1])
        return 1 - high, 1 - low

    @property
    def verdict(self) -> str:
        """``healthy``, ``losing``, ``lost`` or ``undecided``."""
        low, high = self.interval
        if not self.fresh_learns or math.isnan(low):
            return "undecided"
        if low > 0 and self.gap >= MATTERS:
            return "lost" if low >= LOST else "losing"
        return "healthy" if high <= HEALTHY else "undecided"

    @cached_property
    def fresh_learns(self) -> bool:
        """Whether there is a yardstick."""
        falls = self._falls(self.losses["fresh"]).mean(1)
        return not self.is_hopeless and interval(falls, self.confidence)[0] > 0

    @cached_property
    def is_hopeless(self) -> bool:
        """Whether fresh networks learn so little, on average, that more of them would not help."""
        return not float(self._falls(self.losses["fresh"]).mean()) >= LEARNS * abs(self.start)

    @property
    def headline(self) -> str:
        """The verdict, and why, in a sentence."""
        if not self.fresh_learns:
            return (
                f"undecided: a fresh network does not learn this in {self.steps} steps, so there is nothing to compare "
                "with. Take more steps, another learning rate, fresh=lambda: Net(), or data that can be learned"
            )
        low, high = self.interval
        why = {
            "lost": "",
            "losing": "",
            "healthy": ", no worse than fresh networks among themselves" if self.gap > 0 and low <= 0 else "",
            "undecided": ", which may be luck: single runs differ too much to tell",
        }[self.verdict]
        ends = f"{100 * self.confidence:g} % interval {_range(low, high)}"
        return f"{self.verdict}: the network learns {_compared(self.gap)} a fresh one{why} ({ends})"

    @property
    def notes(self) -> list[str]:
        """What the numbers rest on, and what to do if there is no verdict."""
        lines = [
            f"{self.networks} fresh networks, {self.seeds} orders of the data, {self.steps} steps each, "
            f"{self.batches} batches, task {self.task}"
        ]
        if self.fresh_learns and self.verdict == "undecided":
            lines.append("To decide: more steps=, because fresh networks then differ less, or more seeds=")
        return lines

    def plot(self) -> Any:
        """A figure: both learning curves, with the range of single runs. Needs matplotlib."""
        return plots.probe(self)

    def _falls(self, losses: Tensor) -> Tensor:
        """``(runs, phases)`` how far the mean loss of each phase is below the start; 0 where it is not finite."""
        phases = losses.double().tensor_split(min(PHASES, losses.shape[1]), 1)
        falls = self.start - torch.stack([phase.mean(1) for phase in phases], 1)
        return falls.where(falls.isfinite(), 0.0)

    def _rows(self) -> list[list[str]]:
        last = max(1, self.steps // PHASES)
        first = {name: float(losses[:, 0].mean()) for name, losses in self.losses.items()}
        end = {name: float(losses[:, -last:].mean()) for name, losses in self.losses.items()}
        learned = {name: float(values.mean()) for name, values in self.learned.items()}
        ready = {name: float(values.mean()) for name, values in self.readiness.items()}
        rows = {"loss of the first batch": first, "loss of the last tenth": end, "learned": learned, "readiness": ready}
        return [[label, shown(values["old"]), shown(values["fresh"])] for label, values in rows.items()]

    def __str__(self) -> str:
        table = text_table(["", "this network", "a fresh one"], self._rows(), rule=False)
        return "\n".join([self.headline, *table, *self.notes])

    def __repr__(self) -> str:
        return f"Probe({self.verdict}, gap={self.gap:.2f}; print it)"

    def _repr_html_(self) -> str:
        return html_table(["", "this network", "a fresh one"], self._rows(), self.headline, self.notes)


def _compared(gap: float) -> str:
    """``31 % less than``. The sign is in the word, never in the number."""
    share = round(100 * abs(gap))
    return f"{share} % {_word(gap)} than" if share else "as much as"


def _word(gap: float) -> str:
    return "less" if gap > 0 else "more"


def _range(low: float, high: float) -> str:
    """``25 to 37 % less``, ``11 to 15 % more`` or ``12 % less to 5 % more``: the smaller change first on one side."""
    less, more = round(100 * high), round(-100 * low) if math.isfinite(low) else math.inf
    ends = {"less": (-more, less), "more": (-less, more)}
    if more <= 0 or less <= 0:
        word = "less" if more <= 0 else "more"
        near, far = ends[word]
        return f"{near:g} to {far:g} % {word}" if math.isfinite(far) else f"{near:g} % {word} or better"
    return f"{less:g} % less to {more:g} % more" if math.isfinite(more) else f"{less:g} % less or better"
