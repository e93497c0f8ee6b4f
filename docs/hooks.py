"""What the site needs beyond Markdown: files of the repository as pages, and equations without a script.

Pages link to each other as files of the repository do, so that they can be read there as well. Here the same links are
made to fit the site, where what is in ``docs/`` is at the top.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
MOUNTED = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "results/**/*.md", "results/**/*.png", "examples/*")
# The theme takes a README for the head of its section; only the first one is meant as that.
RENAMED = {
    "README.md": "index.md",
    "examples/README.md": "examples/overview.md",
    "results/README.md": "results/found.md",
}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")


def mathml(source: str, *_: Any, **__: Any) -> str:
    """A fence of LaTeX as MathML, which browsers know."""
    lines = [convert(line, display="block") for line in re.split(r"\n\s*\n", source.strip())]
    return f'<div class="math">{"".join(lines)}</div>'


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put pages beside the documentation that live elsewhere in the repository."""
    for pattern in MOUNTED:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            if path.suffix == ".py":  # an example is a page of its own
                text = f"# {path.stem.replace('_', ' ')}\n\n```python\n{path.read_text()}```\n"
                files.append(File.generated(config, f"{name.removesuffix('.py')}.md", content=text))
            elif path.suffix in (".md", ".png"):
                files.append(File.generated(config, _on_site(name), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links between files of the repository become links between pages."""
    here = _in_repository(page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri)

    def follow(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), match[1]))
        if target.startswith("examples/"):
            target = re.sub(r"\.py$", ".md", target)
        return posixpath.relpath(_on_site(target), folder or ".")

    return LINK.sub(follow, markdown)


def _on_site(name: str) -> str:
    return RENAMED.get(name) or name.removeprefix("docs/")


def _in_repository(name: str) -> str:
    for ours, theirs in RENAMED.items():
        if name == theirs:
            return ours
    return name if (ROOT / name).exists() and not (ROOT / "docs" / name).exists() else f"docs/{name}"
