"""The paper's claims, each with a rule that the runs decide. Nothing here is written by hand about a result."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gxd.lab import methods
from gxd.lab.report import numbers, paper
from gxd.lab.report.evidence import AssayColumn, Group, Panel, Sample, difference, paired_gaps
from gxd.lab.report.tables import Cell, Table, panel_label, plus_minus, rho, signed

CONFIRMED, REFUTED, OPEN, UNTESTED = "confirmed", "not confirmed", "undecided", "not tested at this scale"
MARKS = {CONFIRMED: "good", REFUTED: "bad", OPEN: "unknown", UNTESTED: "unknown"}
SIGNS = {CONFIRMED: "✓", REFUTED: "✗", OPEN: "?", UNTESTED: "–"}
ARENAS = {"assay": "Reset-cost assay", **paper.EXPERIMENTS}
SLACK = 0.01  # accuracy: what counts as the same to the eye
# Accuracy above which a network has learned at all: twice chance of ten classes, chance itself of two.
LEARNED = {"permuted-mnist": 0.2, "permuted-digits": 0.2, "cifar100": 0.5}
NEAR = 0.02  # Spearman's rho: the largest gap of GXD and its all-logit version in the paper
RULES = (
    f"✓ {CONFIRMED}, ✗ {REFUTED}, ? {OPEN}, – {UNTESTED}, by these rules. A difference counts if the 95 % t "
    "interval of the paired difference leaves out 0 (over common seeds; in the assay a seed counts once, by its mean "
    f"over the checkpoints). “Keeps its plasticity”: no run diverged, and the last tasks are at most {SLACK * 100:g} "
    "point below the first, on every seed or with the whole interval, and above chance; “loses plasticity”: a run "
    "diverged, or the last tasks are lower by more than that with the whole interval; “as high as” is judged "
    "like “keeps”. A method that diverged more often than the other is never the better one. Where fewer than two "
    "runs of a method lived, divergence decides, if Newcombe's 95 % interval of the difference of the rates "
    f"leaves out 0 and the accuracies of those that lived do not contradict. “{OPEN}”: neither follows. "
    f"“{UNTESTED}”: no runs, fewer than two seeds, runs under way, nothing to rescue because backprop kept its "
    "plasticity, or no clear difference in less than half of the paper's training."
)

Panels = Mapping[Panel, Mapping[str, Group]]
Samples = Mapping[Sample, float]


@dataclass(frozen=True)
class Verdict:
    """One claim, where it was looked for, what was seen, and what follows."""

    claim: str
    arena: str
    place: str
    scale: str
    evidence: str
    result: str


def verdicts(columns: Mapping[paper.Column, AssayColumn], experiments: Mapping[str, Panels]) -> list[Verdict]:
    """All claims, in the order of the paper."""
    found = [*_assay_claims(columns)]
    for name in ("permuted-mnist", "permuted-digits"):
        found += _Stream(name, experiments.get(name, {})).claims()
    return [*found, *_Stream("cifar100", experiments.get("cifar100", {})).cifar_claims()]


def overview(found: Sequence[Verdict]) -> Table:
    """One row per claim, one column per experiment that any is about."""
    arenas = {arena: label for arena, label in ARENAS.items() if any(one.arena == arena for one in found)}
    made = Table("verdicts", "The paper's claims, and what these runs say", RULES, ["Claim", *arenas.values()])
    for claim in dict.fromkeys(one.claim for one in found):
        row = [Cell(claim)]
        for arena in arenas:
            here = [one for one in found if one.claim == claim and one.arena == arena]
            chips = tuple(Cell(f"{SIGNS[one.result]} {one.place}", "", MARKS[one.result]) for one in here)
            row.append(Cell(" · ".join(chip.text for chip in chips), chips=chips))
        made.rows.append(row)
    return made


def detail(found: Sequence[Verdict]) -> Table:
    """One row per claim and setting, with the numbers."""
    made = Table(
        "verdicts-detail", "The evidence, claim by claim", RULES, ["Claim", "Tested on", "Evidence", "Verdict"]
    )
    for one in found:
        where = f"{ARENAS[one.arena]}, {one.place}"
        row = [Cell(one.claim), Cell(where, one.scale), Cell(one.evidence), Cell(one.result, "", MARKS[one.result])]
        made.rows.append(row)
        record = {"claim": one.claim, "tested_on": where, "scale": one.scale, "evidence": one.evidence}
        made.records.append({**record, "verdict": one.result})
    return made


# --- the assay --------------------------------------------------------------------------------------------------------


def _assay_claims(columns: Mapping[paper.Column, AssayColumn]) -> Iterator[Verdict]:
    for key in paper.COLUMNS:
        yield _best_utility(columns.get(key), key, "spearman")
    for key in paper.COLUMNS:
        yield _best_utility(columns.get(key), key, "shock")
    yield _worst_shock(columns.get(paper.COLUMNS[0]))
    for key in paper.COLUMNS:
        yield _close_to_all_logit(columns.get(key), key)
    yield _gxi_needs_the_reference(columns)


def _checkpoints(column: AssayColumn) -> list[int]:
    return sorted({int(point["checkpoint"]) for assay in column.assays for point in assay.checkpoints})


def _assay(claim: str, key: paper.Column, column: AssayColumn | None, evidence: str, result: str) -> Verdict:
    scale = "no assay"
    if column is not None:
        points, full = _checkpoints(column), paper.LAST_CHECKPOINT.get(key[0], 0)
        seeds = len(column.assays)
        scale = f"{seeds} seed{'s' if seeds != 1 else ''}, checkpoints {', '.join(map(str, points))}"
        dead = sum(assay.status == "diverged" for assay in column.assays)
        scale += f"; {dead} diverged before the end" if dead else ""
        if result == REFUTED and points and points[-1] < full / 2:
            result = UNTESTED
    return Verdict(claim, "assay", paper.column_label(key), scale, evidence, result)


def _best_utility(column: AssayColumn | None, key: paper.Column, kind: str) -> Verdict:
    claim = (
        "GXD predicts the cost of a reset best (highest Spearman of the five)"
        if kind == "spearman"
        else "GXD's lowest 5 % cost least to reset (Shock@5% nearest to the oracle)"
    )
    if column is None:
        return _assay(claim, key, column, "–", UNTESTED)
    sign = 1.0 if kind == "spearman" else -1.0
    parts, won = [], True
    for metric, label in paper.METRICS.items():
        values = {name: getattr(column, kind)(name, metric) for name in paper.COMPARED}
        if not _two_seeds(values):
            return _assay(claim, key, column, f"{label}: fewer than two seeds of some utility", UNTESTED)
        means = {name: numbers.mean(samples.values()).value for name, samples in values.items()}
        rival = max((name for name in means if name != "gxd"), key=lambda name: sign * means[name])
        gap = _paired(values["gxd"], values[rival])
        won &= sign * gap.value > numbers.margin(gap)
        show = rho if kind == "spearman" else _three
        text = f"{label}: GXD {show(means['gxd'])}, next {_name(rival)} {show(means[rival])}"
        if kind == "shock":
            text += f", oracle {_three(numbers.mean(column.shock('oracle', metric).values()).value)}"
        parts.append(f"{text} ({_sigmas(gap.value, gap.se)})")
    return _assay(claim, key, column, "; ".join(parts), CONFIRMED if won else REFUTED)


def _name(method: str) -> str:
    """The name of a method in the paper's claims: there, GXD is the paper's rule."""
    return paper.method_label("gxd" if method == methods.PAPER else method)


def _worst_shock(column: AssayColumn | None) -> Verdict:
    claim, key = "With ReLU, loss gradient has the largest Shock@5% of the five", paper.COLUMNS[0]
    values = {name: column.shock(name, "l1") for name in paper.COMPARED} if column else {}
    if not values or not _two_seeds(values):
        return _assay(claim, key, column, "–", UNTESTED)
    means = {name: numbers.mean(samples.values()).value for name, samples in values.items()}
    rival = max((name for name in means if name != "loss_gradient"), key=lambda name: means[name])
    gap = _paired(values["loss_gradient"], values[rival])
    text = f"logit L1: loss gradient {_three(means['loss_gradient'])}, next {_name(rival)} "
    text += f"{_three(means[rival])} ({_sigmas(gap.value, gap.se)})"
    return _assay(claim, key, column, text, CONFIRMED if gap.value > numbers.margin(gap) else REFUTED)


def _close_to_all_logit(column: AssayColumn | None, key: paper.Column) -> Verdict:
    claim = f"Target-logit GXD nearly matches all-logit GXD (Spearman at most {rho(NEAR)} lower)"
    gaps = {}
    for metric in paper.METRICS:
        if column is not None:
            gaps[metric] = _paired(column.spearman("gxd", metric), column.spearman("gxd_all_logit", metric))
    if not gaps or any(gap.n < 2 for gap in gaps.values()):
        return _assay(claim, key, column, "–", UNTESTED)
    text = "; ".join(f"{paper.METRICS[metric]}: {_signed(gap.value)}" for metric, gap in gaps.items())
    near = all(gap.value >= -NEAR for gap in gaps.values())
    return _assay(claim, key, column, f"target − all: {text}", CONFIRMED if near else REFUTED)


def _gxi_needs_the_reference(columns: Mapping[paper.Column, AssayColumn]) -> Verdict:
    claim = "GXI (reference zero) falls further behind GXD with SiLU than with ReLU"
    gaps, parts = [], []
    for key in paper.COLUMNS[:2]:
        column = columns.get(key)
        gap = _paired(column.spearman("gxd", "l1"), column.spearman("gxi", "l1")) if column else numbers.mean([])
        gaps.append(gap)
        parts.append(f"{paper.column_label(key)}: GXD ahead by {_signed(gap.value)}")
    if any(gap.n < 2 for gap in gaps):
        return _assay(claim, paper.COLUMNS[1], None, "–", UNTESTED)
    # Of two networks; the fewer seeds decide how sure their difference can be.
    further = numbers.Mean(gaps[1].value - gaps[0].value, math.hypot(gaps[0].se, gaps[1].se), min(g.n for g in gaps))
    clear = further.value > numbers.margin(further)
    verdict = CONFIRMED if clear else REFUTED
    return _assay(claim, paper.COLUMNS[1], columns[paper.COLUMNS[1]], "logit L1, " + "; ".join(parts), verdict)


def _paired(ours: Samples, theirs: Samples) -> numbers.Mean:
    """The difference over seeds: checkpoints of one training are no further evidence, so each seed has their mean."""
    by_seed: dict[int, list[float]] = defaultdict(list)
    for sample in sorted(ours.keys() & theirs.keys()):
        by_seed[sample[0]].append(ours[sample] - theirs[sample])
    return numbers.mean(numbers.mean(gaps).value for gaps in by_seed.values())


def _two_seeds(values: Mapping[str, Samples]) -> bool:
    return all(len({seed for seed, _ in samples}) >= 2 for samples in values.values())


# --- streams of tasks -------------------------------------------------------------------------------------------------

RELU, SILU, LEAKY, TANH, NORM = (
    ("relu", False),
    ("silu", False),
    ("leaky_relu", False),
    ("tanh", False),
    ("relu", True),
)


@dataclass(frozen=True)
class _Stream:
    """The claims about one experiment."""

    experiment: str
    panels: Panels

    def claims(self) -> Iterator[Verdict]:
        """Permuted MNIST, and Permuted digits as if it were."""
        for panel in (RELU, SILU, LEAKY, TANH, NORM):
            yield self.keeps(panel, "gxd_paper")
        yield self.not_worse(RELU, "gxd_paper", "contribution")
        for method in ("contribution", "mc_adaptable_contribution"):
            for panel in (SILU, LEAKY):
                yield self.degrades(panel, method)
        yield self.beats(NORM, "gxd_paper", "backprop", rescue=False)
        for method in ("contribution", "mc_adaptable_contribution"):
            for panel in (SILU, LEAKY, TANH, NORM):
                yield self.beats(panel, "gxd_paper", method)
        yield self.beats(NORM, "gxd_paper", "loss_gradient")
        yield self.beats(TANH, "mc_adaptable_contribution", "contribution")
        yield self.near_backprop(RELU)
        yield self.not_worse(RELU, "gxi", "gxd_paper")
        for panel in (TANH, SILU, LEAKY):
            yield self.beats(panel, "gxd_paper", "gxi")

    def cifar_claims(self) -> Iterator[Verdict]:
        """Continuous CIFAR-100."""
        yield self.keeps(RELU, "backprop", alone=True)
        for method in ("contribution", "mc_adaptable_contribution"):
            yield self.beats(RELU, "gxd_paper", method, rescue=False)

    def keeps(self, panel: Panel, method: str, *, alone: bool = False) -> Verdict:
        claim = f"{_name(method)} keeps its plasticity"
        group = self._group(panel, method)
        if group is None or not _ready(group):
            return self._say(claim, panel, [group], "–", UNTESTED)
        kept = self._kept(group)
        if kept is None:
            return self._say(claim, panel, [group], f"{_span(group)}{self._doubt(group)}", OPEN)
        if kept and not alone and (reason := self._nothing_to_rescue(panel)):
            return self._say(claim, panel, [group], f"{_span(group)}; {reason}", UNTESTED)
        return self._say(claim, panel, [group], _span(group), CONFIRMED if kept else REFUTED)

    def degrades(self, panel: Panel, method: str) -> Verdict:
        claim = f"{_name(method)} loses plasticity or becomes unstable"
        group = self._group(panel, method)
        if group is None or not _ready(group):
            return self._say(claim, panel, [group], "–", UNTESTED)
        kept = self._kept(group)
        if kept is None:
            return self._say(claim, panel, [group], f"{_span(group)}{self._doubt(group)}", OPEN)
        weak = kept and (bool(self._nothing_to_rescue(panel)) or self._short([group]))
        return self._say(claim, panel, [group], _span(group), UNTESTED if weak else REFUTED if kept else CONFIRMED)

    def beats(self, panel: Panel, winner: str, loser: str, *, rescue: bool = True) -> Verdict:
        """``rescue``: the claim is about methods that save a network, so there must be something to save it from."""
        claim = f"{_name(winner)} ends higher than {_name(loser)}"
        ours, theirs = self._group(panel, winner), self._group(panel, loser)
        if ours is None or theirs is None or not _ready(ours, theirs):
            return self._say(claim, panel, [ours, theirs], "–", UNTESTED)
        gap, risk = difference(ours, theirs), _risk(ours, theirs)
        text = f"{_ends(ours)}, {_ends(theirs)}"
        if gap.n < 2:
            return self._say(claim, panel, [ours, theirs], *self._survival(ours, theirs, text))
        text += f" ({_sigmas(gap.value, gap.se)})"
        higher, lower = gap.value > numbers.margin(gap), gap.value < -numbers.margin(gap)
        if higher and risk.low <= 0 < risk.value:  # the accuracies say one thing, the divergences perhaps another
            return self._say(claim, panel, [ours, theirs], text, OPEN)
        contrary = lower or risk.low > 0
        if higher and not contrary:
            return self._say(claim, panel, [ours, theirs], text, CONFIRMED)
        reason = self._nothing_to_rescue(panel) if rescue and not contrary else ""
        if reason:
            return self._say(claim, panel, [ours, theirs], f"{text}; {reason}", UNTESTED)
        weak = not contrary and self._short([ours, theirs])
        return self._say(claim, panel, [ours, theirs], text, UNTESTED if weak else REFUTED)

    def not_worse(self, panel: Panel, method: str, other: str) -> Verdict:
        claim = f"With ReLU, {_name(method)} ends as high as {_name(other)}"
        ours, theirs = self._group(panel, method), self._group(panel, other)
        if ours is None or theirs is None or not _ready(ours, theirs) or difference(ours, theirs).n < 2:
            return self._say(claim, panel, [ours, theirs], "–", UNTESTED)
        gap, risk = difference(ours, theirs), _risk(ours, theirs)
        text = f"{_ends(ours)}, {_ends(theirs)} ({_sigmas(gap.value, gap.se)})"
        near = _small(numbers.Mean(-gap.value, gap.se, gap.n), paired_gaps(theirs, ours))
        if near is False or risk.low > 0:
            return self._say(claim, panel, [ours, theirs], text, REFUTED)
        if near is None or risk.value > 0 or not self._learned(theirs):
            return self._say(claim, panel, [ours, theirs], f"{text}{self._doubt(theirs)}", OPEN)
        return self._say(claim, panel, [ours, theirs], text, CONFIRMED)

    def near_backprop(self, panel: Panel) -> Verdict:
        claim = "With ReLU, loss gradient ends nearer to backprop than to GXD"
        members = [self._group(panel, name) for name in ("loss_gradient", "backprop", "gxd_paper")]
        here = [group for group in members if group is not None and _ready(group) and group.last().n > 1]
        if len(here) < 3:
            return self._say(claim, panel, members, "–", UNTESTED)
        loss, back, gxd = (group.last().value for group in here)
        text = ", ".join(map(_ends, here))
        if abs(gxd - back) <= SLACK:  # then near to one is near to the other
            return self._say(claim, panel, members, text, UNTESTED)
        return self._say(claim, panel, members, text, CONFIRMED if abs(loss - back) < abs(loss - gxd) else REFUTED)

    def _group(self, panel: Panel, method: str) -> Group | None:
        return self.panels.get(panel, {}).get(method)

    def _survival(self, ours: Group, theirs: Group, text: str) -> tuple[str, str]:
        """Too few lived to compare accuracies. Divergence decides, unless those that did live speak against it."""
        risk = _risk(ours, theirs)
        gap = ours.last().value - theirs.last().value  # NaN, which contradicts nothing, if none of a side lived
        if risk.high < 0 and self._learned(ours) and not gap < 0:
            return text, CONFIRMED
        if risk.low > 0 and self._learned(theirs) and not gap > 0:
            return text, REFUTED
        return text, OPEN

    def _kept(self, group: Group) -> bool | None:
        """Whether a method kept its plasticity; None where the numbers leave it open, or it never had any."""
        if group.diverged:
            return False
        drops = group.drops()
        kept = _small(numbers.mean(drops), drops)
        return None if kept and not self._learned(group) else kept

    def _learned(self, group: Group) -> bool:
        finals = group.finals().values()
        return bool(finals) and min(finals) > LEARNED[self.experiment]

    def _doubt(self, group: Group) -> str:
        return "" if self._learned(group) else "; not clearly above chance"

    def _nothing_to_rescue(self, panel: Panel) -> str:
        """Why a method cannot show here that it saves a network, or nothing."""
        backprop = self._group(panel, "backprop")
        if backprop is None:
            return ""
        if not backprop.complete:
            return "backprop is under way"
        return "backprop kept its plasticity too" if self._kept(backprop) else ""

    def _short(self, members: Sequence[Group]) -> bool:
        return min(group.tasks for group in members) < paper.TASKS.get(self.experiment, 0) / 2

    def _say(self, claim: str, panel: Panel, members: Sequence[Group | None], evidence: str, result: str) -> Verdict:
        here = [group for group in members if group is not None and group.runs]
        scale = "no runs to compare" if here else "no runs"
        if not all(group.complete for group in here):
            scale = "runs under way"
        elif len(here) == len(members):
            tasks, full = min(group.tasks for group in here), paper.TASKS.get(self.experiment, 0)
            of = f" of {full}" if tasks < full else ""
            seeds = min(len(group.runs) for group in here)
            scale = f"{tasks}{of} tasks, {seeds} seed{'s' if seeds != 1 else ''}"
        return Verdict(claim, self.experiment, panel_label(panel), scale, evidence, result)


def _small(lost: numbers.Mean, by_seed: Collection[float]) -> bool | None:
    """Whether a loss of accuracy is within ``SLACK``: only if it clearly is or is not. Noise makes it None."""
    if (by_seed and max(by_seed) <= SLACK) or lost.value + numbers.margin(lost) <= SLACK:
        return True
    return False if lost.value - numbers.margin(lost) > SLACK else None


def _ready(*members: Group) -> bool:
    """Whether there is something to judge: two seeds or more, and none under way, for those that diverge end first."""
    return all(group.complete and len(group.runs) >= 2 for group in members)


def _risk(ours: Group, theirs: Group) -> numbers.Interval:
    """How much more often ``ours`` diverges."""
    return numbers.rate_difference(len(ours.diverged), len(ours.runs), len(theirs.diverged), len(theirs.runs))


def _span(group: Group) -> str:
    return f"{_name(group.method)} {plus_minus(group.first())} → {plus_minus(group.last())}{_dead(group)}"


def _ends(group: Group) -> str:
    return f"{_name(group.method)} {plus_minus(group.last())}{_dead(group)}"


def _dead(group: Group) -> str:
    return f" ({len(group.diverged)}/{len(group.runs)} diverged)" if group.diverged else ""


def _sigmas(value: float, se: float) -> str:
    return f"{signed(value / se)} SE" if se > 0 else "no SE"


def _three(value: float) -> str:
    return f"{value:.3g}"


def _signed(value: float) -> str:
    return f"+{rho(value)}" if value >= 0 else f"−{rho(-value)}"
