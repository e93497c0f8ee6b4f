"""The page of methods: every registered one, what follows from it, and what was measured."""

import json
import sys
from pathlib import Path

import pytest

import gxd
from gxd.lab import method_page
from gxd.lab.method_page import listed, render

ROOT = Path(__file__).parents[2]
COSTS = ROOT / "results" / "methods.json"


@pytest.fixture(autouse=True)
def own(monkeypatch):
    """The methods that come with gxd: tests register others."""
    known = {name: info for name, info in gxd.methods().items() if info.make.__module__.startswith("gxd.")}
    monkeypatch.setattr(sys.modules["gxd.methods.registry"], "_REGISTRY", known)


def cells(page, name):
    """Of the row of a method, by column."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in page.splitlines() if line[:1] == "|"]
    return dict(zip(rows[0], next(row for row in rows if row[0] == f"`{name}`")))


@pytest.mark.skipif(not (ROOT / "results").is_dir(), reason="not a checkout: a source distribution has no results")
def test_the_committed_page_is_what_the_registry_and_the_measurement_say():
    """If not: python -m gxd.lab.method_page results/methods.json docs/methods.md (`make methods` measures, too)."""
    page = (ROOT / "docs" / "methods.md").read_text()
    assert listed(page) == list(gxd.methods())
    assert page == render(json.loads(COSTS.read_text()) if COSTS.exists() else {})


def test_what_a_method_needs_follows_from_it():
    page = render({})
    assert cells(page, "continual_backprop")["needs"] == "units, observe"
    assert cells(page, "redo")["needs"] == "units"
    assert cells(page, "swr")["needs"] == "gradients"
    assert cells(page, "l2_init")["needs"] == "initial weights"
    assert cells(page, "regrama")["needs"] == "units, gradients"
    assert (
        cells(page, "nap")["needs"].endswith("norms")
        and "gxd.injectable" in cells(page, "plasticity_injection")["needs"]
    )


def test_every_method_says_what_it_changes_in_its_own_words():
    assert all(info.changes and info.reference for info in gxd.methods().values())


def test_a_method_that_it_does_not_know_has_a_row_of_what_its_functions_tell():
    class Odd(gxd.Method):
        needs_data = True
        output_gradient = "sketch"

        def init(self, host):
            return {name: p.detach().clone() for name, p in host.model.named_parameters()}

        def after_step(self, host, state):  # an average, which begins with the weights and moves on
            return {name: 0.5 * state[name] + 0.5 * p.detach() for name, p in host.model.named_parameters()}

        def at_boundary(self, host, state):
            return state

    gxd.register_method("odd", description="a|b", reference="nobody", inert={})(Odd)
    row = cells(render({}), "odd")
    assert row == {
        "method": "`odd`",
        "what it does": "a\\|b",
        "needs": "observe, boundaries, data",
        "changes": "weights when a task ends",
        "step": "",
        "event": "",
        "memory": "",
        "source": "nobody",
    }


def test_costs_are_those_that_were_measured(tmp_path):
    names = ["l2_init", "l2_init, kept", "redo", "redo, every step", "swr", "swr, a boundary"]
    rows = [{"suite": "methods", "setting": "an MLP", "variant": v, "ratio": 1.1 + n} for n, v in enumerate(names)]
    rows.append({"suite": "mlp", "setting": "", "variant": "upgd", "ratio": 9.0})
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"machine": {"cpu": "x86"}, "rows": rows}))
    assert method_page.main([str(file), str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text()
    costs = {name: [cells(page, name)[key] for key in ("step", "event", "memory")] for name in gxd.methods()}
    assert costs["l2_init"] == ["1.10", "", "2.10"]
    assert costs["redo"] == ["3.10", "3.10", ""]  # a step with the event, without the step
    assert costs["swr"] == ["5.10", "6.10", ""]
    assert costs["upgd"] == ["", "", ""]
    assert "Measured on an MLP: cpu x86." in page


def test_a_wrong_call_says_how(capsys):
    assert method_page.main([]) == 2
    assert "usage" in capsys.readouterr().err
