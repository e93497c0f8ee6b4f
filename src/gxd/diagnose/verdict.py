"""What a probe says: how much of a fresh network's learning a network has lost, with an interval, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gxd.diagnose import plots
from gxd.diagnose.student import interval, quantile
from gxd.tables import html_table, shown, text_table

PHASES = 10
"""Parts of a run whose mean losses are compared."""
HEALTHY, LOST = 0.1, 0.75
"""Share of a fresh network's learning that a healthy network has lost at most, and a lost one at least."""
LEARNS = 0.01
"""A fresh network learns if its loss falls by at least this share of what it was before training, on average."""


@dataclass(frozen=True, repr=False)
class Probe:
    """What :func:`gxd.probe` has found. ``print`` it.

    With ``start`` the mean loss of fresh networks before training, a run has *learned* the mean over ten phases of
    ``max(0, start - mean loss of the phase)``: how far below a new network's first loss it was, on average. A loss
    above that, or one that is not finite, is nothing learned; it does not count against what is learned later.

    ``gap = 1 - learned by the network / learned by fresh ones``, the means over seeds. Its interval is Student's, over
    the seeds, with what the two have learned in each taken as a pair.

    ============  =====================================================================================================
    verdict       rule
    ============  =====================================================================================================
    healthy       the interval ends at or below 0.1: it learns as well as a new network, or nearly so, or better
    lost          the interval begins at or above 0.75: it learns less than a quarter of what a new network does
    losing        else, the interval begins above 0
    undecided     else; or fresh networks do not learn: by less than 1 % of ``start``, or with an interval around 0
    ============  =====================================================================================================

    Attributes:
        losses: ``old`` (the network) and ``fresh`` -> ``(seeds, steps)`` the loss of each batch before its step.
        readiness: ``old`` and ``fresh`` -> ``(seeds,)`` optimization readiness before training, see
            :func:`gxd.diagnose.definitions.readiness`. It is said, and does not enter the verdict.
        start: the mean loss of fresh networks before training.
        batches: how many different batches there were.
        task: what was learned: ``given``, ``permuted_inputs`` or ``random_labels``.
        confidence: of the interval.
    """

    losses: Mapping[str, Tensor]
    readiness: Mapping[str, Tensor]
    start: float
    batches: int
    task: str
    confidence: float

    @property
    def seeds(self) -> int:
        """How many pairs of runs there were."""
        return len(self.losses["old"])

    @property
    def steps(self) -> int:
        """How many each run has taken."""
        return self.losses["old"].shape[1]

    @cached_property
    def learned(self) -> dict[str, Tensor]:
        """``old`` and ``fresh`` -> ``(seeds,)`` how much each run has learned."""
        return {name: self._falls(losses).clamp_min(0).mean(1) for name, losses in self.losses.items()}

    @property
    def gap(self) -> float:
        """The share of a fresh network's learning that is lost; below 0 if the network learns better."""
        return float(self._gaps.mean())

    @property
    def interval(self) -> tuple[float, float]:
        """Of the gap."""
        return interval(self._gaps, self.confidence)

    @property
    def verdict(self) -> str:
        """``healthy``, ``losing``, ``lost`` or ``undecided``."""
        low, high = self.interval
        if not self.fresh_learns or math.isnan(low):
            return "undecided"
        return "healthy" if high <= HEALTHY else "lost" if low >= LOST else "losing" if low > 0 else "undecided"

    @property
    def fresh_learns(self) -> bool:
        """Whether there is a yardstick."""
        falls = self._falls(self.losses["fresh"]).mean(1)
        return float(falls.mean()) >= LEARNS * abs(self.start) and interval(falls, self.confidence)[0] > 0

    @property
    def quantile(self) -> float:
        """Of Student's t, for the intervals of means over seeds."""
        return quantile(self.confidence, self.seeds - 1)

    @property
    def headline(self) -> str:
        """The verdict, and why, in a sentence."""
        low, high = self.interval
        within = f"{100 * self.confidence:g} % interval {100 * low:.0f} to {100 * high:.0f} %"
        of = f"({within}; {self.seeds} seeds, {self.steps} steps, {self.batches} batches, task {self.task})"
        if not self.fresh_learns:
            return (
                f"undecided: a fresh network does not learn this in {self.steps} steps, so there is nothing to compare "
                "with. Take more steps, another learning rate, fresh=lambda: Net(), or data that can be learned"
            )
        how = f"{abs(100 * self.gap):.0f} % {'less' if self.gap >= 0 else 'more'}"
        more = "; more seeds or steps would tell" if self.verdict == "undecided" else ""
        return f"{self.verdict}: the network learns {how} than a fresh one{more} {of}"

    def plot(self) -> Any:
        """A figure: both learning curves, with the interval over seeds. Needs matplotlib."""
        return plots.probe(self)

    @property
    def _gaps(self) -> Tensor:
        """``(seeds,)`` whose mean is the gap, and whose spread is that of a ratio of means (the delta method)."""
        old, fresh = self.learned["old"], self.learned["fresh"]
        ratio = old.mean() / fresh.mean()
        return 1 - ratio - (old - ratio * fresh) / fresh.mean()

    def _falls(self, losses: Tensor) -> Tensor:
        """``(seeds, phases)`` how far the mean loss of each phase is below the start; 0 where it is not finite."""
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
        return "\n".join([self.headline, *text_table(["", "this network", "a fresh one"], self._rows(), rule=False)])

    def __repr__(self) -> str:
        return f"Probe({self.verdict}, gap={self.gap:.2f}; print it)"

    def _repr_html_(self) -> str:
        return html_table(["", "this network", "a fresh one"], self._rows(), self.headline)
