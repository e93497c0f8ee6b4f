"""Links of all pages lead somewhere, and lists are lists."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "results", "examples", "studies")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
ITEM = re.compile(r"\s*([-*]|\d+\.) ")


def prose(page: Path) -> list[str]:
    """The lines outside of fences."""
    kept, fenced = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        fenced ^= line.lstrip().startswith("```")
        kept.append("" if fenced or line.lstrip().startswith("```") else line)
    return kept


def anchors(page: Path) -> set[str]:
    """Of the headings, as the site makes them."""
    titles = [re.sub(r"[`*]|\]\([^)]*\)|\[", "", line.lstrip("#")) for line in prose(page) if line.startswith("#")]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_to_a_file_and_to_a_heading_of_it(page: Path):
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", "\n".join(prose(page))):
        if ":" in link:
            continue
        target = (page.parent / link).resolve() if link else page
        assert target.exists(), f"{link} is not there"
        assert not anchor or anchor in anchors(target), f"{link} has no heading #{anchor}: {sorted(anchors(target))}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_list_begins_after_a_blank_line(page: Path):
    """Or the site shows a paragraph with dashes in it."""
    lines = prose(page)
    for before, line in pairwise(lines):
        begins = ITEM.match(line) and not line.startswith(" ")
        inside = not before.strip() or ITEM.match(before) or before.startswith((" ", "#"))
        assert not begins or inside, f"no blank line before {line[:60]!r}"
