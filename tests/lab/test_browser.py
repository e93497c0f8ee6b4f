"""The page of a study in a real browser: what the script does, seen in the DOM that it leaves."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from gxd.lab.report.build import report

from .test_study import own_sweep

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --virtual-time-budget=4000 --window-size=1400,1000"
)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no browser")

# Collects what is wrong and what is seen, after the page's own script.
ASK = """
<script>
const seen = {};
const all = (selector) => [...document.querySelectorAll(selector)];
const shown = (selector) => all(selector).filter((one) => one.getClientRects().length).length;
const boxes = (text) => all(".filters label").filter((one) => one.textContent === text).map((one) => one.firstChild);
const box = (text) => boxes(text)[0];
const curves = "#study1-curves ~ div .line";
%s
document.body.dataset.seen = JSON.stringify(seen);
</script></body>
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("browser")
    own_sweep(root / "runs")
    return report([root / "runs"], root / "out")


def ask(page: Path, tmp_path: Path, script: str) -> dict[str, object]:
    """What a script finds in the page. An error of either script is an error here."""
    caught = "<script>window.onerror = (text) => { document.documentElement.dataset.error = text; };</script></head>"
    text = page.read_text().replace("</head>", caught, 1)
    copy = tmp_path / "page.html"
    copy.write_text(text.replace("</body>", ASK % script))
    command = [str(BROWSER), *QUIET.split(), f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", copy.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    error = re.search(r'data-error="([^"]*)"', dom)
    assert error is None, error
    found = re.search(r'data-seen="([^"]*)"', dom)
    assert found is not None, dom[-500:]
    return json.loads(html.unescape(found.group(1)))


def test_checkboxes_hide_methods_networks_and_settings_and_show_every_setting(page, tmp_path):
    seen = ask(
        page,
        tmp_path,
        """
        seen.first = shown(curves);
        box("redo").click();
        seen.without_redo = shown(curves);
        seen.boxes = boxes("redo").filter((one) => !one.checked).length;
        box("tanh").click();
        seen.relu_alone = shown(curves);
        box("every setting, not only the best").click();
        seen.every = shown(curves);
        box("0.05").click();
        seen.one_rate = shown(curves);
        """,
    )
    # Three methods in two networks, each at two learning rates; a box acts wherever the study has its filters.
    assert seen == {"first": 6, "without_redo": 4, "boxes": 3, "relu_alone": 2, "every": 4, "one_rate": 2}


def test_the_line_along_the_best_follows_the_dots_that_are_seen(page, tmp_path):
    seen = ask(
        page,
        tmp_path,
        """
        const line = document.querySelector('svg[data-higher] .best[data-method="redo"]');
        seen.before = line.getAttribute("points");
        box("0.05").click();
        seen.after = line.getAttribute("points");
        box("0.05").click();
        seen.again = line.getAttribute("points");
        """,
    )
    assert seen["again"] == seen["before"] != seen["after"]
    high = [[float(point.split(",")[1]) for point in str(seen[when]).split()] for when in ("before", "after")]
    assert all(best < other for best, other in zip(*high, strict=True))  # the rate that was best is gone


def test_hovering_reads_out_the_nearest_point(page, tmp_path):
    seen = ask(
        page,
        tmp_path,
        """
        const svg = document.querySelector("svg.chart"), line = svg.querySelector('.line:not(.quiet)');
        const [x, y] = line.querySelector("polyline").getAttribute("points").split(" ")[4].split(",").map(Number);
        const at = new DOMPoint(x, y).matrixTransform(svg.getScreenCTM());
        svg.dispatchEvent(new PointerEvent("pointermove", { clientX: at.x, clientY: at.y }));
        seen.tip = document.querySelector(".tip").innerText;
        seen.hot = svg.querySelectorAll(".hot").length;
        seen.expected = [line.dataset.name, line.dataset.at.split(";")[4]];
        svg.dispatchEvent(new PointerEvent("pointerleave"));
        seen.gone = document.querySelector(".tip").hidden;
        """,
    )
    name, point = seen["expected"]
    task, mean, error, seeds = point.split()
    assert str(seen["tip"]).split("\n") == [name, f"task {task}: {mean} % ± {error}, {seeds} seeds"]
    assert seen["hot"] == 1 and seen["gone"] is True


def test_tables_sort_and_the_contents_stay_in_sight(page, tmp_path):
    seen = ask(
        page,
        tmp_path,
        """
        const table = document.querySelector("#study1-best ~ div table"), heads = [...table.querySelectorAll("th")];
        heads.find((head) => head.textContent.startsWith("Last")).firstChild.click();
        seen.last = [...table.tBodies[0].rows].map((row) => parseFloat(row.cells[4].textContent));
        scrollTo(0, 3000);
        seen.top = document.querySelector("nav").getBoundingClientRect().top;
        seen.wide = document.documentElement.scrollWidth <= innerWidth;
        """,
    )
    assert seen["last"] == sorted(seen["last"]) and len(seen["last"]) == 6
    assert seen["top"] == 0 and seen["wide"] is True
