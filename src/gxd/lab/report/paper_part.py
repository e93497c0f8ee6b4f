"""The part of a page that sets runs beside the paper: verdicts, its tables and figures, its settings.

It is made for runs of the paper's experiments in the paper's settings, and for assays. Other studies do without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from gxd.lab.errors import UserError
from gxd.lab.experiments import base
from gxd.lab.report import digest, evidence, figures, paper, provenance, questions, tables, verdicts
from gxd.lab.report.digest import Run
from gxd.lab.report.evidence import Group, Panel
from gxd.lab.report.page import Block, Section

Wanted = Literal["auto", "yes", "no"]
STREAMS = ("permuted-mnist", "permuted-digits")
TITLE = "Beside the paper"
# Of the paper's settings, those without which a run is of another experiment.
KEPT = ("depth", "batch_size", "momentum", "weight_decay", "decay")
TENTH = 0.1
LEAD = (
    "GXD ranks the hidden units of a network by what their reset would do to its output, and resets the cheapest. "
    "This part sets the runs beside the numbers of the paper (arXiv 2605.06834)."
)
ABOUT = {
    "permuted-mnist": "The paper's plasticity experiment: MNIST with its pixels permuted anew for every task. "
    "The paper shows curves and prints no numbers.",
    "permuted-digits": "Ours, after the paper's Permuted MNIST: 8×8 digits and a small network. "
    "Cheap enough for hundreds of runs on a laptop; not an experiment of the paper.",
    "cifar100": "Pairs of classes, one after another, with a small ResNet: the paper's test of feature stability.",
}


def beside_paper(found: digest.Collection, wanted: Wanted) -> PaperPart | None:
    """The part, if it is wanted: by default if runs of the paper's experiments in its settings, or assays, can say
    something about its claims. Raises :class:`UserError` if it is asked for and there is nothing.
    """
    if wanted == "no":
        return None
    if wanted == "auto":
        runs = [run for run in found.runs if _in_its_settings(run)]
        part = PaperPart(digest.Collection(runs, found.assays, found.sources))
        return part.make() if part.says_something else None
    runs = [run for run in found.runs if run.experiment in paper.EXPERIMENTS]
    if not runs and not found.assays:
        raise UserError(
            f"--paper yes: there is no run of {', '.join(paper.EXPERIMENTS)} below {', '.join(found.sources)}, and no "
            "assay; make them with `gxd sweep permuted-mnist` or `gxd assay`, or leave --paper out"
        )
    return PaperPart(digest.Collection(runs, found.assays, found.sources), whole=True).make()


def _in_its_settings(run: Run) -> bool:
    """The paper's but for what a small machine or a search changes: seeds, epochs, widths, rates and maturity, and
    tasks down to a tenth, below which nothing is lost that a method could keep.
    """
    rows = paper.SETTINGS["permuted-mnist"] if run.experiment in STREAMS else paper.SETTINGS.get(run.experiment, ())
    for row in rows:
        if row.field in KEPT and run.config.get(row.field, row.value) != row.value:
            return False
    config = run.config
    method = config.get("method")
    named = method in paper.METHODS and method != "gxd" and config.get("activation") in paper.ACTIVATIONS
    plain = all(config.get(name, value) == value for name, value in base.BEFORE.items() if name != "paper")
    tasks = paper.TASKS.get(run.experiment, paper.TASKS["permuted-mnist"])
    return bool(rows) and named and plain and run.planned >= TENTH * tasks


@dataclass
class PaperPart:
    """The claims as the runs judge them, and what :meth:`make` has made so far; each method adds a section.

    Args:
        whole: also what there are no runs of, with the commands that would make them.
    """

    found: digest.Collection
    whole: bool = False
    tables: list[tables.Table] = field(default_factory=list)
    pictures: list[figures.Picture] = field(default_factory=list)
    sections: list[tuple[Section, list[Block | figures.Picture]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = sorted({run.experiment for run in self.found.runs})
        self.panels: dict[str, dict[Panel, dict[str, Group]]] = {
            name: evidence.shown([run for run in self.found.runs if run.experiment == name]) for name in names
        }
        self.columns = evidence.assay_columns(self.found.assays)
        judged = verdicts.verdicts(self.columns, self.panels)
        present = {*self.panels, *(["assay"] if self.columns else [])}
        self.judged = [one for one in judged if self.whole or one.arena in present]

    @property
    def says_something(self) -> bool:
        """Whether a claim can be tested, or a table of assays be filled."""
        return self.whole or bool(self.columns) or any(one.result != verdicts.UNTESTED for one in self.judged)

    def make(self) -> PaperPart:
        """Make all sections."""
        self.claims()
        if self.whole or self.columns:
            self.assay()
        for name in STREAMS:
            if self.whole or name in self.panels:
                self.stream(name)
        if self.whole or "cifar100" in self.panels:
            self.cifar()
        if self.whole or self.panels:
            self.questions()
        self.settings()
        return self

    def section(self, anchor: str, title: str, text: str, parts: Iterable[Block | figures.Picture]) -> None:
        parts = list(parts)
        self.pictures += [part for part in parts if isinstance(part, figures.Picture)]
        self.tables += [part.table for part in parts if isinstance(part, Block) and part.table is not None]
        first = not self.sections
        texts = [*([LEAD] if first else []), *([text] if text else [])]
        self.sections.append((Section(anchor, title, texts, part=TITLE if first else ""), parts))

    def claims(self) -> None:
        text = "Each verdict is computed from the runs by the rule below the table; none is written by hand."
        overview, detail = verdicts.overview(self.judged), verdicts.detail(self.judged)
        self.section(
            "claims",
            "Claims",
            text,
            [Block(table=overview, kind="claims"), Block(table=detail, kind="claims", fold=True)],
        )

    def assay(self) -> None:
        text = (
            "How well does a utility predict what the reset of a unit does to the output? Each unit is clamped in turn."
        )
        first = tables.spearman("spearman", "Table 1: Spearman of utility and shock", paper.SPEARMAN, self.columns)
        second = tables.spearman(
            "spearman-variants",
            "Appendix table: Spearman of the GXD variants",
            paper.SPEARMAN_VARIANTS,
            self.columns,
            only=paper.VARIANTS,
        )
        parts: list[Block | figures.Picture] = [Block(table=first, kind="dense"), Block(table=second, kind="dense")]
        extra = [column for column in self.columns if column not in paper.COLUMNS]
        if extra:
            title = "Spearman of utility and shock where the paper prints none (ours)"
            third = tables.spearman("spearman-ours", title, {}, self.columns, shown=extra)
            parts.append(Block(table=third, kind="dense"))
        parts += figures.assay_figures(self.columns)
        if self.columns:
            parts.append(Block(table=tables.shocks(self.columns), kind="dense", fold=True))
        self.section("assay", "Reset cost", text, parts)

    def stream(self, name: str) -> None:
        panels = self.panels.get(name, {})
        parts: list[Block | figures.Picture] = [*figures.stream_figures(name, panels)]
        if panels:
            parts += [figures.diagnostics(name, panels), Block(table=tables.summary(name, panels), kind="wide grouped")]
        self.section(name, paper.EXPERIMENTS[name], ABOUT[name], parts)

    def cifar(self) -> None:
        panels = self.panels.get("cifar100", {})
        parts: list[Block | figures.Picture] = [*figures.cifar_figures(panels)]
        if panels:
            parts.append(Block(table=tables.summary("cifar100", panels), kind="wide grouped"))
        self.section("cifar100", paper.EXPERIMENTS["cifar100"], ABOUT["cifar100"], parts)

    def questions(self) -> None:
        text = f"{questions.RULE[0].upper()}{questions.RULE[1:]}"
        parts: list[Block | figures.Picture] = []
        for ask in (questions.compensation, questions.sketch, questions.replacement):
            question = ask(self.found.runs)
            if question.missing:
                parts.append(Block(points=[f"{question.title} Not answered here."], missing=question.missing))
                continue
            several = bool(question.together.rows)
            if several:
                parts.append(Block(table=question.together, kind="wide asked"))
            parts.append(Block(points=question.answers))
            parts.append(Block(table=question.table, kind="wide dense asked", fold=several))
        self.section("questions", "Open questions", text, parts)

    def settings(self) -> None:
        times = [run.seconds for run in self.found.runs] + [assay.seconds for assay in self.found.assays]
        hours = sum(time or 0.0 for time in times) / 3600
        text = (
            f"{len(self.found.runs)} runs and {len(self.found.assays)} assays, {hours:.1f} hours of computing. What "
            "differs from the paper's settings is marked. Numbers of a smaller scale are evidence about that scale."
        )
        parts: list[Block | figures.Picture] = [
            Block(table=table) for table in provenance.settings(self.panels, self.columns)
        ]
        absent = provenance.missing(self.found, self.panels, self.columns, self.pictures)
        parts.append(Block(points_title="What is missing", points=absent))
        if self.found.runs:
            parts.append(Block(table=tables.all_settings(self.found), kind="dense", fold=True))
        self.section("settings", "Settings and scale", text, parts)

    def groups(self) -> list[Group]:
        """Every setting that is drawn."""
        return [group for panels in self.panels.values() for methods in panels.values() for group in methods.values()]

    def fact(self) -> tuple[str, str]:
        """How the claims stand."""
        counts = [sum(one.result == result for one in self.judged) for result in verdicts.MARKS]
        return " / ".join(map(str, counts)), "claims of the paper confirmed / not confirmed / undecided / not tested"
