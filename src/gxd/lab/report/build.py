"""Puts the report together: reads, computes, draws, writes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from gxd.lab.arguments import parse
from gxd.lab.errors import UserError
from gxd.lab.report import digest, evidence, figures, page, paper, provenance, questions, tables, verdicts
from gxd.lab.report.evidence import Group, Panel
from gxd.lab.report.page import Block, Section

STREAMS = ("permuted-mnist", "permuted-digits")
TITLE = "GXD, reproduced: the paper's tables and figures beside ours"
LEAD = (
    "GXD ranks the hidden units of a network by what their reset would do to its output, and resets the cheapest. "
    "This page sets our runs beside the numbers of the paper (arXiv 2605.06834)."
)
ABOUT = {
    "permuted-mnist": "The paper's plasticity experiment: MNIST with its pixels permuted anew for every task. "
    "The paper shows curves and prints no numbers.",
    "permuted-digits": "Ours, after the paper's Permuted MNIST: 8×8 digits and a small network. "
    "Cheap enough for hundreds of runs on a laptop; not an experiment of the paper.",
    "cifar100": "Pairs of classes, one after another, with a small ResNet: the paper's test of feature stability.",
}


@dataclass(frozen=True)
class Options:
    """Tables and figures of the paper beside ours, from all runs, assays and digests below the directories."""

    directories: tyro.conf.Positional[tuple[Path, ...]]
    """Where to look: directories with runs, assays or digest.jsonl files, at any depth."""
    out: Path = Path("report")
    """Where the report goes: index.html, figures/, tables/, digest.jsonl, assay.jsonl."""


def command(argv: list[str]) -> int:
    """``gxd report DIR...``."""
    options = parse(Options, argv, "gxd report")
    if not options.directories:
        raise UserError(f"name a directory with runs; {digest.REMEDY}")
    index = report(options.directories, options.out)
    print(f"the report is {index}")
    return 0


def report(directories: Sequence[Path], out: Path) -> Path:
    """Make the report in ``out`` and return the path of its page."""
    found = digest.collect(directories)
    _refuse_to_lose(found, out)
    made = compose(found)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"--out {out} is not a directory: choose another") from None
    old = page.files(out / "index.html")
    with tempfile.TemporaryDirectory(dir=out, prefix=".part-") as part:  # a full disk leaves the old report whole
        made.write(Path(part))
        for file in sorted(Path(part).rglob("*.*")):
            place = out / file.relative_to(part)
            place.parent.mkdir(exist_ok=True)
            os.replace(file, place)
    for name in old - page.files(out / "index.html"):  # what the new page does not have
        (out / name).unlink(missing_ok=True)
    return out / "index.html"


def compose(found: digest.Collection) -> Report:
    """Every section of the report, nothing written yet."""
    made = Report(found)
    made.claims()
    made.assay()
    for name in STREAMS:
        made.stream(name)
    made.cifar()
    made.others()
    made.questions()
    made.settings()
    return made


def _refuse_to_lose(found: digest.Collection, out: Path) -> None:
    """A digest in ``out`` will be replaced. It may be all that is left of its runs, so they must be in the new one."""
    kept = {run.name for run in found.runs} | {assay.name for assay in found.assays}
    for file in (out / "digest.jsonl", out / "assay.jsonl"):
        lost = sum(item.name not in kept for item in digest.read_digest(file)) if file.is_file() else 0
        if lost:
            what = "a run that is" if lost == 1 else f"{lost} runs that are"
            raise UserError(
                f"{file} has {what} not among the inputs and would be lost: give {out} as an input too, or choose "
                "another --out"
            )


class Report:
    """What has been made so far. Each method adds a section."""

    def __init__(self, found: digest.Collection) -> None:
        self.found = found
        names = sorted({run.experiment for run in found.runs})
        self.panels: dict[str, dict[Panel, dict[str, Group]]] = {
            name: evidence.shown([run for run in found.runs if run.experiment == name]) for name in names
        }
        self.columns = evidence.assay_columns(found.assays)
        self.judged = verdicts.verdicts(self.columns, self.panels)
        self.tables: list[tables.Table] = []
        self.pictures: list[figures.Picture] = []
        self.sections: list[tuple[Section, list[Block | figures.Picture]]] = []

    def section(self, anchor: str, title: str, text: str, parts: Iterable[Block | figures.Picture]) -> None:
        parts = list(parts)
        self.pictures += [part for part in parts if isinstance(part, figures.Picture)]
        self.tables += [part.table for part in parts if isinstance(part, Block) and part.table is not None]
        self.sections.append((Section(anchor, title, [text] if text else []), parts))

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

    def others(self) -> None:
        """Experiments that the paper does not have."""
        for name in sorted(self.panels.keys() - {*STREAMS, "cifar100"}):
            self.section(name, name, "", [Block(table=tables.summary(name, self.panels[name]), kind="wide")])

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
        parts.append(Block(table=provenance.versions(self.found)))
        absent = provenance.missing(self.found, self.panels, self.columns, self.pictures)
        parts.append(Block(points_title="What is missing", points=absent))
        if self.found.runs:
            parts.append(Block(table=tables.all_settings(self.found), kind="dense", fold=True))
        commands = provenance.commands(self.found)
        parts.append(Block(code="\n".join(commands), code_title="The commands that make these runs"))
        self.section("settings", "Settings and scale", text, parts)

    def write(self, out: Path) -> None:
        """Write everything below ``out``."""
        saved = page.save_pictures(self.pictures, out / "figures")
        page.save_tables(self.tables, out / "tables")
        for section, parts in self.sections:
            section.blocks = [
                Block(picture=saved[part.name]) if isinstance(part, figures.Picture) else part for part in parts
            ]
        drawn = {id(run) for group in self._groups() for run in group.runs}
        digest.write(self.found, out, drawn)
        files = sorted(f"{folder}/{file.name}" for folder in page.FOLDERS for file in (out / folder).glob("*.*"))
        sections = [section for section, _ in self.sections]
        text = page.render(TITLE, LEAD, self._facts(), sections, made_by="gxd report", files=files)
        (out / "index.html").write_text(text, encoding="utf-8")

    def _groups(self) -> list[Group]:
        return [group for panels in self.panels.values() for methods in panels.values() for group in methods.values()]

    def _facts(self) -> list[tuple[str, str]]:
        runs, assays = self.found.runs, self.found.assays
        facts = [
            (f"{len(runs):,}", "training runs"),
            (f"{sum(run.tasks for run in runs):,}", "tasks trained"),
            (f"{sum(run.status == 'diverged' for run in runs):,}", "runs diverged"),
            (f"{sum(len(assay.checkpoints) for assay in assays):,}", "checkpoints assayed"),
        ]
        counts = [sum(one.result == result for one in self.judged) for result in verdicts.MARKS]
        facts.append((" / ".join(map(str, counts)), "claims confirmed / not confirmed / undecided / not tested"))
        return facts
