"""The notebooks are clean, run from top to bottom, and show what they say."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def cells(path: Path, kind: str = "code") -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def run(name: str, monkeypatch: pytest.MonkeyPatch, tasks: int) -> tuple[dict[str, Any], list[Any]]:
    """Execute the code as a notebook does. Returns its names, and what the cells would display: their last values."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("TASKS", str(tasks))
    names: dict[str, Any] = {"__name__": "notebook"}
    shown = []
    for number, source in enumerate(cells(FOLDER / f"{name}.ipynb")):
        tree, where = ast.parse(source), f"{name}.ipynb, code cell {number}"
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, where, "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), where, "eval"), names)
            shown += [] if source.rstrip().endswith(";") else [value]
    return names, [value for value in shown if value is not None]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_was_committed_without_outputs(path: Path):
    found = json.loads(path.read_text())
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    assert found["metadata"].keys() == {"kernelspec", "language_info"}
    for cell in found["cells"]:
        extra = {"outputs", "execution_count"} if cell["cell_type"] == "code" else set()
        assert cell.keys() == {"cell_type", "id", "metadata", "source"} | extra
        assert not cell["metadata"] and not cell.get("outputs") and cell.get("execution_count") is None
    ids = [cell["id"] for cell in found["cells"]]
    assert len(ids) == len(set(ids)) and found["cells"][0]["source"][0].startswith("# ")


def test_plasticity_is_measured_diagnosed_and_kept(monkeypatch: pytest.MonkeyPatch):
    names, shown = run("plasticity", monkeypatch, tasks=2)
    tables = [type(value).__name__ for value in shown if "<table" in value._repr_html_()]
    assert tables == ["Probe", "Diagnosis", "Diagnosis", "UnitPlan", "CheckReport", "ResetCost", "Probe", "Diagnosis"]
    assert names["plan"].size == 96 and {group.status for group in shown[4].groups} == {"passed"}
    resets = {name: attached.total_resets for name, attached in names["attachments"].items()}
    assert resets["gxd"] == resets["random"] > 0
    assert {len(curve) for curve in names["curves"].values()} == {2}
    names["plt"].close("all")


def test_a_method_and_a_utility_of_ones_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    names, shown = run("own_method", monkeypatch, tasks=2)
    said = capsys.readouterr().out
    assert "both obey all 15 laws" in said
    assert shown[0] == {"factor": 2.0}
    scores = shown[1].spearman()
    assert scores["gxd"] > max(scores["slope"], scores["random"])
    assert names["results"].keys() == names["contestants"].keys()
