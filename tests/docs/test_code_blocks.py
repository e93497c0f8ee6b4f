"""The Python of the README and of the site runs as it stands. (docs/frameworks: tests/integrations/test_page.py.)"""

import re
import textwrap
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gxd

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"^( *)```python\n(.*?)^\1```", re.S | re.M)


class Net(nn.Module):
    """As the pages have it: an encoder whose features may die, a hidden layer, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.fc1, self.head = nn.Linear(4, 12), nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.fc1(self.encoder(x).relu()).relu())


class MyOptimizer(torch.optim.SGD):
    """One that gxd has never heard of."""


def names() -> dict[str, Any]:
    """What the pages take for granted."""
    torch.manual_seed(0)
    model, x, y = Net(), torch.randn(32, 4), torch.randint(0, 3, (32,))
    known: dict[str, Any] = {"torch": torch, "F": F, "nn": nn, "gxd": gxd, "Net": Net, "x": x, "y": y}
    data = {"stream": [(x, y)] * 3, "new_data": [(x, y)] * 20, "next_task": [(x, y)] * 20, "step": 1}
    data["train"] = lambda model, optimizer: None
    tools = {name: MagicMock() for name in ("wandb", "mlflow", "writer")}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    unit = {"plan": gxd.find_units(model, x[:2]), "dead": [1, 3], "MyOptimizer": MyOptimizer}
    return {**known, **data, **tools, **unit, "model": model, "optimizer": optimizer, "__name__": "page"}


def blocks(page: str) -> list[str]:
    return [textwrap.dedent(code) for _, code in CODE.findall((ROOT / page).read_text())]


def run(page: str, code: str, known: dict[str, Any]) -> dict[str, Any]:
    exec(compile(code, page, "exec"), known)
    return known


@pytest.fixture(autouse=True)
def a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


APART = (
    "README.md",
    "docs/births.md",
    "docs/reach.md",
    "docs/which.md",
    "docs/extending.md",
    "docs/optimizers.md",
    "docs/leaderboard.md",
)  # each block stands alone
PASTED = {"__name__": "page"}  # all that a reader has who pastes a page into an empty file


@pytest.mark.parametrize(
    ("page", "number"), [(page, n) for page in APART for n in range(len(blocks(page)))], ids=lambda value: str(value)
)
def test_the_block_runs(page: str, number: int):
    run(page, blocks(page)[number], names())


def fences(page: str) -> list[str]:
    """What a page says is printed: fences without a language."""
    found = re.findall(r"^```(\w*)\n(.*?)\n```$", (ROOT / page).read_text(), re.S | re.M)
    return [text for language, text in found if not language]


def test_the_one_line_of_the_readme_runs_when_pasted_and_resets_units():
    (code,) = (code for code in blocks("README.md") if "gxd.attach" in code)
    known = run("README.md", code, dict(PASTED))
    assert known["resets"].total_resets > 0
    assert len(code.splitlines()) <= 14
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


@pytest.fixture(scope="module")
def five_minutes() -> tuple[list[str], dict[str, Any]]:
    """What each block of the page prints, and the names at its end."""
    known, said = dict(PASTED), []
    for code in blocks("docs/start.md"):
        with redirect_stdout(StringIO()) as printed:
            run("docs/start.md", code, known)
        said.append(printed.getvalue())
    return said, known


def test_the_network_of_the_five_minutes_loses_plasticity_with_plain_backprop_and_keeps_it_with_gxd(five_minutes):
    (_, before, after, *_), known = five_minutes
    assert before.startswith(("losing:", "lost:")), before
    assert after.startswith("healthy:"), after
    assert f"{known['resets'].total_resets} units were reset" in after and known["resets"].total_resets > 100
    assert known["resets"].metrics()["gxd/reach"] > 0.9


def test_the_pages_show_what_is_printed(five_minutes):
    """Numbers differ from machine to machine, and with them a verdict may be worse. No other word does."""
    (_, before, after, *_), _ = five_minutes
    shown_before, shown_after = (text for text in fences("docs/start.md") if "this network" in text)
    assert fences("README.md")[1] == shown_before, "the README shows the verdict of the five minutes"
    for shown, printed in ((shown_before, before), (shown_after, after)):
        assert shape(shown) == shape(printed)


def shape(text: str) -> str:
    """A printed text without its numbers and the verdicts of a network that learns less."""
    text = re.sub(r"\d[\d.e-]*|\b(losing|lost)\b", "#", text)
    return re.sub(r"\s+", " ", text).strip()


def test_the_page_of_the_loop_runs_when_pasted(tmp_path: Path):
    known = dict(PASTED)
    for code in blocks("docs/loop.md"):
        run("docs/loop.md", code, known)
    assert (tmp_path / "run.pt").exists() and known["cbp"].replacement_rates["0"] == 0.0
    assert known["resets"].ages()["0"].max() == len(known["stream"]), "compiled steps count"
    assert known["critic_resets"].utilities()["0"].any() and known["logits"].shape == (32, 5)


def test_the_page_of_the_loop_says_which_backward_passes_count():
    """Its actor's loss does not show in the scores of the critic."""
    (code,) = (code for code in blocks("docs/loop.md") if "actor" in code)
    lines = [line for line in code.splitlines() if "actor" not in line or line.startswith(("actor", "obs", "critic"))]
    found = []
    for text in (code, "\n".join(lines)):
        torch.manual_seed(0)
        found.append(run("docs/loop.md", text, names())["critic_resets"].utilities())
    assert text != code
    torch.testing.assert_close(*found)


def test_the_page_of_the_diagnosis_runs():
    known = names()
    known["cbp"] = gxd.ContinualBackprop(known["model"], known["optimizer"], example_inputs=known["x"][:2])
    for code in blocks("docs/diagnosis.md"):
        run("docs/diagnosis.md", code, known)
    assert known["wandb"].log.called and known["mlflow"].log_metrics.called and known["writer"].add_scalar.called


def test_every_page_with_python_is_run():
    here = Path(__file__).read_text()
    pages = [path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]]
    assert all(f'"{page}"' in here for page in pages if blocks(page))
