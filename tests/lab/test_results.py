"""What is committed in ``results/``: data, tables and the pictures of its README; the page is built from the data."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from gxd.lab.report import digest, figures
from gxd.lab.report.build import compose
from gxd.lab.report.page import Block, save_tables

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"

pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="not a checkout: a source distribution has no results")


def test_the_tables_are_those_that_the_digests_give(tmp_path, monkeypatch) -> None:
    for name in ("assay_figures", "stream_figures", "cifar_figures"):  # a picture takes a second, a table none
        monkeypatch.setattr(figures, name, lambda *_: [])
    monkeypatch.setattr(figures, "diagnostics", lambda *_: Block())
    save_tables(compose(digest.collect([RESULTS])).tables, tmp_path)
    made = {file.name: file.read_text() for file in tmp_path.iterdir() if not file.name.startswith("study-")}
    assert made == {file.name: file.read_text() for file in (RESULTS / "tables").iterdir()}


def test_pages_and_drawings_are_built_and_pictures_are_kept_only_where_a_readme_shows_them() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = {name for name in listed.stdout.split("\0") if (ROOT / name).is_file()}
    shown = {
        str((page.parent / picture).resolve().relative_to(ROOT))
        for page in (ROOT / name for name in files if name.endswith(".md"))
        for picture in re.findall(r"!\[[^]]*\]\(([^):]+)\)", page.read_text(encoding="utf-8"))
    }
    assert {name for name in files if name.endswith((".png", ".svg", ".html"))} == shown
    assert all(name.endswith(".png") for name in shown)


def test_every_link_within_the_documentation_leads_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), RESULTS / "README.md"]
    assert len(pages) > 5
    for page in pages:
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert ":" in link or (page.parent / link).exists(), f"{page.name} links to {link}, which is not there"
