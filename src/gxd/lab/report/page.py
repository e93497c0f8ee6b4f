"""One HTML page that needs nothing else: figures inline, no network."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup

from gxd.lab.report import style
from gxd.lab.report.chart import Chart, Entry, Facts
from gxd.lab.report.figures import Picture
from gxd.lab.report.tables import Table

FOLDERS = ("figures", "tables")


@dataclass
class Shown:
    """A picture as the template needs it."""

    name: str
    title: str
    caption: str
    missing: list[str]
    dead: list[str]
    svg: Markup | None


@dataclass(frozen=True)
class Filters:
    """A place for checkboxes, which the script makes: they would be of no use without it. Those of a study go together.

    ``every``: whether there are settings beside the best ones, to be asked for.
    """

    study: str
    values: Mapping[str, Sequence[str]]
    every: bool


@dataclass
class Charts:
    """Charts of a study, side by side."""

    study: str
    charts: list[Chart]
    title: str = ""
    facts: Facts = field(default_factory=dict)
    legend: list[Entry] = field(default_factory=list)
    small: bool = False


@dataclass
class Block:
    """A piece of a section: any of a picture, charts, a table, a list, a command for what is missing, folded text."""

    picture: Shown | None = None
    filters: Filters | None = None
    charts: Charts | None = None
    table: Table | None = None
    kind: str = ""
    fold: bool = False
    points: list[str] = field(default_factory=list)
    points_title: str = ""
    fold_points: str = ""  # a title that the list is folded under
    missing: str = ""
    code: str = ""
    code_title: str = ""


@dataclass
class Section:
    """A heading with what stands below it. ``part``: the heading of a part of the page that begins here."""

    anchor: str
    title: str
    texts: list[str] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    part: str = ""

    @property
    def interactive(self) -> bool:
        """Whether a script could do anything here."""
        return any(block.charts is not None or "sortable" in block.kind for block in self.blocks)


def save_pictures(pictures: Iterable[Picture], out: Path) -> dict[str, Shown]:
    """Write every drawn picture as PNG and SVG below ``out``, and return them for the page."""
    shown = {}
    for picture in pictures:
        inline = None
        if picture.drawn is not None:
            with style.styled():
                pixels = style.png(picture.drawn)
                picture.drawn.set_layout_engine("none")  # it is laid out now, and need not be once more
                vector = style.svg(picture.drawn, picture.name)
                out.mkdir(parents=True, exist_ok=True)
                (out / f"{picture.name}.svg").write_text(vector, encoding="utf-8")
                (out / f"{picture.name}.png").write_bytes(pixels)
            # Our own drawing: matplotlib has escaped the text in it.
            inline = Markup(style.inline(vector, picture.name, picture.alt))
        shown[picture.name] = Shown(picture.name, picture.title, picture.caption, picture.missing, picture.dead, inline)
    return shown


def save_tables(made: Iterable[Table], out: Path) -> None:
    """Write every table as Markdown, and as CSV if it has data."""
    out.mkdir(parents=True, exist_ok=True)
    for table in made:
        (out / f"{table.name}.md").write_text(table.markdown(), encoding="utf-8")
        if table.records:
            (out / f"{table.name}.csv").write_text(table.csv(), encoding="utf-8")


def files(index: Path) -> set[str]:
    """The files beside a page that were made with it, by its own word; so no file of the user's is taken for one."""
    text = index.read_text(encoding="utf-8") if index.is_file() else ""
    found = re.search(r'<meta name="gxd-files" content="([^"]*)">', text)
    names = html.unescape(found.group(1)).split() if found else []
    return {name for name in names if re.fullmatch(rf"({'|'.join(FOLDERS)})/[^/\\]+\.(png|svg|md|csv)", name)}


def render(
    title: str,
    lead: str,
    facts: Sequence[tuple[str, str]],
    sections: Sequence[Section],
    *,
    made_by: str,
    files: Sequence[str] = (),
) -> str:
    """The page. Everything that came from a run is escaped; the script is ours."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}  # settings have an order of their own
    ours = resources.files("gxd.lab.report")
    source = ours.joinpath("template.html.j2").read_text(encoding="utf-8")
    script = ours.joinpath("page.js").read_text(encoding="utf-8")
    return environment.from_string(source).render(
        title=title,
        lead=lead,
        facts=facts,
        sections=sections,
        made_by=made_by,
        files=files,
        script=Markup(script) if any(section.interactive for section in sections) else "",
    )
