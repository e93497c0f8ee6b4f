"""What the paper leaves open: does compensation help or destabilise, does gxd_sketch beat gxd, how often to reset."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from gxd.lab.report import numbers, paper
from gxd.lab.report.digest import Run
from gxd.lab.report.evidence import Group, twins
from gxd.lab.report.tables import Cell, Table, panel_label, plus_minus, points, rate, short

ENOUGH_SEEDS = 10

MORE, LESS, SAME, OPEN = "more", "less", "same", "open"
# What would not matter. An interval inside of it says that there is no difference worth speaking of.
RATE_MARGIN, ACCURACY_MARGIN = 0.10, 0.01
UNDER_WAY = "runs under way"
RULE = (
    f"an interval that leaves out 0 decides; one inside ±{100 * ACCURACY_MARGIN:g} point of accuracy, or "
    f"±{100 * RATE_MARGIN:g} points of divergence, says that there is no difference that "
    "matters; any other leaves the question open."
)


@dataclass(frozen=True)
class Question:
    """A question, the pairs of settings that bear on it, and the answer that follows from them by rule."""

    title: str
    table: Table  # setting by setting
    together: Table  # all settings of the same learning and replacement rate; may be empty
    answers: list[str]
    missing: str = ""


def compensation(runs: Sequence[Run]) -> Question:
    """Does true bias compensation help or destabilise?"""
    return _question(
        "compensation",
        "Does bias compensation help, or does it destabilise?",
        "compensation",
        ("with", "without"),
        twins(runs, "compensate", True, False),
        "gxd run permuted-digits --method gxd_paper --activation silu --rate 1e-3 (and again with --no-compensate)",
    )


def sketch(runs: Sequence[Run]) -> Question:
    """Does gxd_sketch beat gxd?"""
    return _question(
        "sketch",
        "Does GXD sketch beat GXD?",
        "GXD sketch",
        ("sketch", "GXD"),
        twins(runs, "method", "gxd_sketch", "gxd_paper"),
        "gxd run permuted-digits --method gxd_sketch --activation silu (and again with --method gxd_paper)",
    )


def replacement(runs: Sequence[Run]) -> Question:
    """Is it better to reset more often?"""
    return _question(
        "rate",
        "Does a replacement rate of 1e-3 beat 1e-4?",
        "rate 1e-3",
        ("1e-3", "1e-4"),
        twins(runs, "rate", 1e-3, 1e-4),
        "gxd run permuted-digits --method gxd_paper --activation silu --rate 1e-3 (and again with --rate 1e-4)",
    )


@dataclass(frozen=True)
class Comparison:
    """One setting, or several taken together, with and without what is asked about."""

    pairs: Sequence[tuple[Group, Group]]

    def diverged(self, side: int) -> tuple[int, int]:
        """How many runs of a side have diverged, and of how many."""
        sides = [pair[side] for pair in self.pairs]
        return sum(len(group.diverged) for group in sides), sum(len(group.runs) for group in sides)

    @property
    def gap(self) -> numbers.Interval:
        """The difference of the rates of divergence. Of one setting it is Newcombe's. Several share their seeds, so
        that a seed counts once, by its mean, as it does in ``change``.
        """
        if len(self.pairs) == 1:
            return numbers.rate_difference(*self.diverged(0), *self.diverged(1))
        by_seed: dict[int, list[tuple[bool, bool]]] = defaultdict(list)
        for ours, theirs in self.pairs:
            a, b = ({run.seed: run in group.diverged for run in group.runs} for group in (ours, theirs))
            for seed in sorted(a.keys() & b.keys()):
                by_seed[seed].append((a[seed], b[seed]))
        ours_, theirs_ = ([_share(ends, side) for ends in by_seed.values()] for side in (0, 1))
        if len({a - b for a, b in zip(ours_, theirs_, strict=True)}) > 1:
            return numbers.paired(ours_, theirs_)
        # Where all seeds agree, t would be sure of it. As many runs as seeds are what they are worth at least.
        return numbers.rate_difference(sum(ours_), len(ours_), sum(theirs_), len(theirs_))

    @property
    def lived(self) -> list[tuple[int, float, float]]:
        """Seed and final accuracies of the runs that lived on both sides."""
        found = []
        for ours, theirs in self.pairs:
            a, b = ours.finals(), theirs.finals()
            found += [(seed, a[seed], b[seed]) for seed in sorted(a.keys() & b.keys())]
        return found

    @property
    def counted(self) -> str:
        """How many pairs lived, in words."""
        return f"{len(self.lived)} pair{'' if len(self.lived) == 1 else 's'}"

    @property
    def change(self) -> numbers.Interval:
        """The difference of the final accuracies. Settings share their seeds, so a seed counts once: by its mean."""
        by_seed: dict[int, list[float]] = defaultdict(list)
        for seed, a, b in self.lived:
            by_seed[seed].append(a - b)
        means = [numbers.mean(differences).value for differences in by_seed.values()]
        return numbers.paired(means, [0.0] * len(means))

    @property
    def record(self) -> dict[str, object]:
        """The comparison as data."""
        (dead, n), (dead0, n0) = self.diverged(0), self.diverged(1)
        return {
            "settings": len(self.pairs),
            "diverged": dead,
            "n": n,
            "other_diverged": dead0,
            "other_n": n0,
            **_bounds("rate_difference", self.gap),
            **_bounds("paired_difference", self.change),
            "pairs": len(self.lived),
        }


def _question(
    name: str,
    title: str,
    subject: str,
    sides: tuple[str, str],
    pairs: Sequence[tuple[Group, Group]],
    command: str,
) -> Question:
    pairs = [pair for pair in pairs if pair[0].settled and pair[1].settled]
    fit = [pair for pair in pairs if not _unfit(pair)]
    left_out = f" {len(pairs) - len(fit)} settings with fewer than {ENOUGH_SEEDS} complete seeds are left out."
    caption = left_out if fit and len(fit) < len(pairs) else ""
    columns = [
        "Setting",
        *(f"Diverged, {side}" for side in sides),
        "Difference",
        *(f"Last, {side}" for side in sides),
        "Paired difference",
        f"What follows for {subject}",
    ]
    about = (
        "Settings that differ in nothing else. Diverged: rate with Wilson's 95 % interval; the difference of the rates "
        f"({sides[0]} − {sides[1]}, percentage points) with Newcombe's. Last: test accuracy in % over the last tasks "
        "of the runs that lived; its difference in percentage points over the seeds that lived in both, with the 95 "
        f"% t interval. What follows: {RULE}"
    )
    table = Table(f"question-{name}", f"{title} Setting by setting", about + caption, columns)
    brief = (
        f"All runs of the same rates. Differences ({sides[0]} − {sides[1]}) are in percentage points with their 95 % t "
        "intervals: of the rates of divergence, and of the accuracy over the last tasks, where both lived. A seed "
        "counts once, by its mean over the settings, for these are not independent; where divergence differs by the "
        "same on all seeds, the interval is Newcombe's with as many runs as seeds. The rates of either side have "
        "Wilson's, as if all runs were independent."
    )
    together = Table(f"question-{name}-together", title, brief, [c for c in columns if not c.startswith("Last, ")])
    for ours, theirs in fit or pairs:
        config, experiment = ours.runs[0].config, ours.runs[0].experiment
        method = "" if name == "sketch" else f"{paper.method_label(ours.method)}, "
        rates = f"lr {short(config.get('lr'))}" + ("" if name == "rate" else f", rate {short(config.get('rate'))}")
        note = f"{paper.experiment_label(experiment)}, {ours.tasks} tasks"
        note += "" if name == "compensation" or ours.compensates else ", no compensation"
        one = Comparison([(ours, theirs)])
        unfit = _unfit((ours, theirs))
        table.rows.append(
            [
                Cell(f"{method}{panel_label(ours.panel)}, {rates}", note),
                *(_rate(one.diverged(side), group.so_far) for side, group in enumerate((ours, theirs))),
                Cell(points(one.gap, 0)),
                Cell(plus_minus(ours.last())),
                Cell(plus_minus(theirs.last())),
                Cell(points(one.change), one.counted),
                Cell("open" if unfit == UNDER_WAY else _follows(one), unfit),
            ]
        )
        table.records.append(
            {
                "experiment": experiment,
                "method": ours.method,
                "activation": ours.panel[0],
                "layer_norm": ours.panel[1],
                "compensate": ours.compensates,
                "lr": config.get("lr"),
                "rate": config.get("rate"),
                "tasks": ours.tasks,
                **one.record,
            }
        )
    answers = [_summary(subject, fit)] if pairs else []
    for (experiment, lr, share), whole in _together(fit).items():
        where = f"lr {short(lr)}" + ("" if name == "rate" else f", rate {short(share)}")
        together.rows.append(
            [
                Cell(where, f"{paper.experiment_label(experiment)}, {len(whole.pairs)} settings"),
                *(_rate(whole.diverged(side)) for side in (0, 1)),
                Cell(points(whole.gap, 0)),
                Cell(points(whole.change), whole.counted),
                Cell(_follows(whole)),
            ]
        )
        together.records.append({"experiment": experiment, "lr": lr, "rate": share, **whole.record})
    return Question(title, table, together, answers, "" if pairs else command)


def _share(ends: Sequence[tuple[bool, bool]], side: int) -> float:
    return sum(end[side] for end in ends) / len(ends)


def _together(pairs: Sequence[tuple[Group, Group]]) -> dict[tuple[str, object, object], Comparison]:
    """The settings of an experiment, learning rate and replacement rate as one comparison, where there are several.

    Learning rates stay apart: one at which nothing diverges would water down what another says of divergence.
    """
    found: dict[tuple[str, object, object], list[tuple[Group, Group]]] = defaultdict(list)
    for pair in pairs:
        run = pair[0].runs[0]
        found[run.experiment, run.config.get("lr"), run.config.get("rate")].append(pair)
    order = sorted(found, key=str)
    return {at: Comparison(found[at]) for at in order if len(found[at]) > 1}


def _rate(counted: tuple[int, int], so_far: str = "") -> Cell:
    return Cell(rate(*counted) + so_far, "", "bad" if counted[0] else "")


def _unfit(pair: tuple[Group, Group]) -> str:
    """Why a pair does not count, or nothing. Of runs under way too few have diverged yet, or only those that have
    are settled: the rates say nothing.
    """
    if not all(group.complete for group in pair):
        return UNDER_WAY
    return f"fewer than {ENOUGH_SEEDS} seeds" if min(len(group.runs) for group in pair) < ENOUGH_SEEDS else ""


def _side(interval: numbers.Interval, margin: float) -> str:
    """What an interval says, by the rule."""
    if interval.low > 0 or interval.high < 0:
        return MORE if interval.low > 0 else LESS
    return SAME if -margin < interval.low and interval.high < margin else OPEN


def _divergence(compared: Comparison) -> str:
    return _side(compared.gap, RATE_MARGIN)


def _accuracy(compared: Comparison) -> str:
    return _side(compared.change, ACCURACY_MARGIN)


def _follows(compared: Comparison) -> str:
    said = [
        {MORE: "diverges more often", LESS: "diverges less often", SAME: "diverges as often", OPEN: ""}[
            _divergence(compared)
        ],
        {MORE: "ends higher", LESS: "ends lower", SAME: "ends as high", OPEN: ""}[_accuracy(compared)],
    ]
    return ", ".join(filter(None, said)) or "open"


def _summary(subject: str, pairs: Sequence[tuple[Group, Group]]) -> str:
    if not pairs:
        return f"No setting has {ENOUGH_SEEDS} seeds on both sides, so the question stays open here."
    each = [Comparison([pair]) for pair in pairs]
    d, a = Counter(map(_divergence, each)), Counter(map(_accuracy, each))
    return (
        f"Of the {len(pairs)} settings with at least {ENOUGH_SEEDS} seeds, {subject} diverges more often in "
        f"{d[MORE]}, less often in {d[LESS]}, as often in {d[SAME]}, undecided in {d[OPEN]}; the runs that lived end "
        f"higher in {a[MORE]}, lower in {a[LESS]}, as high in {a[SAME]}, undecided in {a[OPEN]}."
    )


def _bounds(name: str, interval: numbers.Interval) -> dict[str, str]:
    return {
        name: f"{interval.value:.5g}",
        f"{name}_low": f"{interval.low:.5g}",
        f"{name}_high": f"{interval.high:.5g}",
    }
