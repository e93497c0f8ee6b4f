"""How results look: short reprs, tables in notebooks, pictures."""

import sys
from html.parser import HTMLParser

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gxd
from gxd.tables import html_table, percent, shown
from tests import models as zoo
from tests.rig import X, Y, mlp, plan_of, sgd


class Checker(HTMLParser):
    """Collects the text, and raises on tags that do not match."""

    def __init__(self):
        super().__init__()
        self.open, self.cells, self.text = [], 0, ""

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.cells += tag == "td"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def checked(page):
    found = Checker()
    found.feed(page)
    found.close()
    assert not found.open and found.cells
    return found.text


def results():
    model = mlp()
    return {
        "plan": plan_of(),
        "report": gxd.verify_plan(model, X, plan=plan_of()),
        "cost": gxd.reset_cost(model, (X, Y), X, plan=plan_of()),
        "diagnosis": gxd.diagnose(model, X, Y, plan=plan_of()),
        "probe": gxd.probe(model, lambda p: torch.optim.SGD(p, 0.1), [(X, Y)], F.cross_entropy, steps=20, seeds=2),
    }


@pytest.fixture(scope="module")
def found():
    return results()


@pytest.mark.parametrize("name", ["plan", "report", "cost", "diagnosis", "probe"])
def test_every_result_has_a_short_repr_and_a_table_for_notebooks(found, name):
    one = found[name]
    assert len(repr(one)) < 400 and "\n" not in repr(one) and type(one).__name__ in repr(one)
    text = checked(one._repr_html_())
    if name in ("plan", "report", "diagnosis"):
        assert "fc1" in text and "fc2" in text


def test_the_repr_of_a_large_plan_fits_on_a_screen_and_its_str_is_the_whole_account():
    torch.manual_seed(0)
    plan = gxd.find_units(nn.Sequential(*[nn.Linear(64, 64) for _ in range(60)]), torch.randn(2, 64))
    assert len(repr(plan)) < 400 and f"{len(plan)} groups, {plan.size} units" in repr(plan)
    assert all(len(repr(group)) < 200 for group in plan.groups)
    assert all(group.name in str(plan) for group in plan.groups)
    assert "3 groups" not in repr(gxd.UnitPlan(())) and repr(gxd.UnitPlan(()))


def test_what_is_not_reset_is_in_the_notebook_with_its_reason():
    model, batch, _ = zoo.make("resnet")
    plan = gxd.find_units(model, batch()[0])
    text = checked(plan._repr_html_())
    assert plan.skipped and all(entry.name in text and entry.reason in text for entry in plan.skipped)
    assert f"{len(plan.skipped)} not reset" in repr(plan)


def test_names_cannot_break_the_page():
    page = html_table(["<a>"], [["<script>alert(1)</script>"]], "a & b", ["<i>"])
    assert "<script>" not in page and checked(page) == "a & b<a><script>alert(1)</script><i>"


def test_numbers_are_shown_in_few_characters():
    assert [shown(v) for v in (float("nan"), 0.0, 1234.5, 1e-7)] == ["-", "0", "1.23e+03", "1e-07"]
    assert [percent(v) for v in (float("nan"), 0.0, 0.004, 0.5, 1.0)] == ["-", "0 %", "0.4 %", "50 %", "100 %"]


def test_pictures_show_the_curves_and_the_groups(found):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    (axes,) = found["probe"].plot().axes
    assert len(axes.lines) == 3 and len(axes.collections) == 2 and axes.get_title() in str(found["probe"])
    shares, ranks, utilities = found["diagnosis"].plot().axes
    assert [label.get_text() for label in shares.get_yticklabels()] == ["fc1", "fc2"]
    widths = [bar.get_width() for bar in shares.patches]
    assert widths[:2] == [100 * found["diagnosis"].groups[name]["dormant"] for name in ("fc1", "fc2")]
    assert len(ranks.patches) == 4 and len(utilities.lines) == 2
    plt.close("all")


def test_a_dead_network_has_a_picture_too():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    model = mlp()
    with torch.no_grad():
        model.fc1.bias.fill_(-1e3)
        model.fc2.bias.fill_(-1e3)
    figure = gxd.diagnose(model, X, Y, plan=plan_of()).plot()
    figure.canvas.draw()
    diverged = gxd.probe(model, lambda p: torch.optim.SGD(p, 1e25), [(X, Y)], F.cross_entropy, steps=5, seeds=2)
    diverged.plot().canvas.draw()


def test_without_matplotlib_a_picture_says_which_extra_to_install(found, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    for name in ("probe", "diagnosis"):
        with pytest.raises(ImportError, match=r"gxd\[plot\]"):
            found[name].plot()


def test_the_repr_of_an_attachment_is_as_short_as_before():
    model = mlp()
    assert len(repr(gxd.attach(model, sgd(model), gxd.method("redo"), plan=plan_of()))) < 200
