"""The Python of the README and of the site runs as it stands. (Those of docs/frameworks: tests/integrations.)"""

import re
import textwrap
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
    "docs/reach.md",
    "docs/extending.md",
    "docs/optimizers.md",
    "docs/leaderboard.md",
)  # each block stands alone


@pytest.mark.parametrize(
    ("page", "number"), [(page, n) for page in APART for n in range(len(blocks(page)))], ids=lambda value: str(value)
)
def test_the_block_runs(page: str, number: int):
    run(page, blocks(page)[number], names())


def test_the_loop_of_the_readme_resets_units_and_can_be_resumed(tmp_path: Path):
    code = blocks("README.md")[0].replace("replacement_rate=1e-3", "replacement_rate=0.1, maturity=1")
    assert run("README.md", code, names())["cbp"].total_resets > 0
    assert torch.load(tmp_path / "gxd.pt", weights_only=True)["version"] >= 3


def test_the_five_minutes_lead_to_a_verdict(capsys: pytest.CaptureFixture[str]):
    known: dict[str, Any] = {"__name__": "page"}
    for code in blocks("docs/start.md"):
        run("docs/start.md", code, known)
    said = capsys.readouterr().out
    assert known["cbp"].total_resets > 0 and f"{known['cbp'].total_resets} units were reset" in said
    assert re.search(r"\b(healthy|losing|lost|undecided):", said)


def test_the_page_of_the_loop_runs_from_top_to_bottom(tmp_path: Path):
    known = names()
    for code in blocks("docs/loop.md"):
        run("docs/loop.md", code, known)
    assert (tmp_path / "checkpoint.pt").exists() and known["cbp"].replacement_rates["fc1"] == 0.0
    assert known["step"] is not None and known["logits"].shape == (32, 3)


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
