"""Puts the report together: reads, computes, draws, writes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from gxd.lab.arguments import parse
from gxd.lab.errors import UserError
from gxd.lab.report import digest, page, provenance, study, study_page
from gxd.lab.report.evidence import groups
from gxd.lab.report.page import Block, Section
from gxd.lab.report.paper_part import PaperPart, Wanted, beside_paper
from gxd.lab.report.tables import Table


@dataclass(frozen=True)
class Options:
    """One page about all runs below the directories: learning curves, what every setting does, the best, and more.

    Runs of the paper's experiments in its settings, and assays, are also set beside the paper.
    """

    directories: tyro.conf.Positional[tuple[Path, ...]]
    """Where to look: directories with runs, assays or digest.jsonl files, at any depth."""
    out: Path = Path("report")
    """Where the report goes: index.html, tables/, figures/ (of the paper), digest.jsonl, assay.jsonl."""
    paper: Wanted = "auto"
    """Whether to set runs beside the paper. auto: those of its experiments in its settings.
    yes: whatever there is of its experiments, and what is missing, with the commands that make it. no: not at all."""


def command(argv: list[str]) -> int:
    """``gxd report DIR...``."""
    options = parse(Options, argv, "gxd report")
    if not options.directories:
        raise UserError(f"name a directory with runs; {digest.REMEDY}")
    index = report(options.directories, options.out, options.paper)
    print(f"the report is {index}")
    return 0


def report(directories: Sequence[Path], out: Path, paper: Wanted = "auto") -> Path:
    """Make the report in ``out`` and return the path of its page."""
    found = digest.collect(directories)
    _refuse_to_lose(found, out)
    made = compose(found, paper)
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


def compose(found: digest.Collection, paper: Wanted = "auto") -> Report:
    """Every section of the report, nothing written yet."""
    part = beside_paper(found, paper)
    if not found.runs and part is None:
        raise UserError("there are assays and no runs, and assays are set beside the paper: leave --paper out")
    return Report(found, study.studies(found.runs), part)


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


@dataclass
class Report:
    """A page about studies, and the part beside the paper if there is one."""

    found: digest.Collection
    studies: list[study.Study]
    paper: PaperPart | None
    sections: list[Section] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = [study_page.title(one) for one in self.studies]
        for one, name in zip(self.studies, names, strict=True):
            made = study_page.sections(one, self.studies)
            if len(names) > 1 or self.paper is not None:
                made[0].part = name if len(names) > 1 else "The study"
            self.sections += made
        self.title = f"{len(names)} studies" if len(names) > 1 else f"Study: {names[0]}" if names else "Reset cost"
        self.lead = f"{', '.join(names)}." if len(names) > 1 else ""

    @property
    def tables(self) -> list[Table]:
        """All tables."""
        ours = [block.table for section in (*self.sections, self._origin()) for block in section.blocks]
        return [*(self.paper.tables if self.paper else []), *(table for table in ours if table is not None)]

    def write(self, out: Path) -> None:
        """Write everything below ``out``."""
        sections = list(self.sections)
        drawn = {id(run) for one in self.studies for setting in one.chosen() for run in setting.group.runs}
        page.save_tables(self.tables, out / "tables")
        if self.paper is not None:
            saved = page.save_pictures(self.paper.pictures, out / "figures")
            drawn |= {id(run) for group in self.paper.groups() for run in group.runs}
            for section, parts in self.paper.sections:
                section.blocks = [
                    part if isinstance(part, Block) else Block(picture=saved[part.name]) for part in parts
                ]
                sections.append(section)
        digest.write(self.found, out, drawn)
        sections.append(self._origin())
        files = sorted(f"{folder}/{file.name}" for folder in page.FOLDERS for file in (out / folder).glob("*.*"))
        text = page.render(self.title, self.lead, self._facts(), sections, made_by="gxd report", files=files)
        (out / "index.html").write_text(text, encoding="utf-8")

    def _origin(self) -> Section:
        """Where all of it comes from."""
        blocks = [Block(table=provenance.versions(self.found))]
        blocks.append(Block(points=provenance.warnings(self.found)))
        commands = provenance.commands(self.found)
        blocks.append(Block(code="\n".join(commands), code_title="The commands that make these runs"))
        part = "Origin" if any(section.part for section in self.sections) or self.paper else ""
        return Section("origin", "Versions and commands", blocks=blocks, part=part)

    def _facts(self) -> list[tuple[str, str]]:
        runs, assays = self.found.runs, self.found.assays
        seconds = [run.seconds for run in runs] + [assay.seconds for assay in assays]
        hours = sum(one or 0.0 for one in seconds) / 3600
        under_way = sum(run.status not in digest.SETTLED for run in runs)
        facts = [
            (f"{len(runs):,}", "training runs"),
            (f"{len(groups(runs)):,}", "settings"),
            (f"{sum(run.tasks for run in runs):,}", "tasks trained"),
            (f"{sum(run.status == 'diverged' for run in runs):,}", "runs diverged"),
            *([(f"{under_way:,}", "runs not complete")] if under_way else []),
            *([(f"{sum(len(assay.checkpoints) for assay in assays):,}", "checkpoints assayed")] if assays else []),
            (f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.0f} min", "of computing"),
        ]
        return [*facts, *([self.paper.fact()] if self.paper is not None else [])]
