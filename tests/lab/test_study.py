"""The page of a study: its numbers against plain arithmetic on the files of the runs, and what it says of bad input."""

from __future__ import annotations

import csv
import json
import math
import random
import re
from pathlib import Path
from statistics import fmean, stdev

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

import gxd
import gxd_command as cli
from gxd.lab.experiments import experiment as experiment_of
from gxd.lab.grid import load
from gxd.lab.report import digest, study, study_page
from gxd.lab.report.build import report
from gxd.lab.selection import select

VERSIONS = {"gxd": "0.1.0", "torch": "2.13.0", "python": "3.12.0", "commit": "0123abc"}


def write(
    root: Path,
    name: str = "permuted-digits",
    *,
    level: float = 0.8,
    dies: int | None = None,
    stops: int | None = None,
    **values: object,
) -> Path:
    """A run whose metric is around ``level``; it may diverge after some tasks, or be under way."""
    made = experiment_of(name).from_dict({"tasks": 30, "method": "gxd_paper", **values}).resolved()
    chance = random.Random(f"{sorted(made.to_dict().items())}{level}")
    end = min(n for n in (dies, stops, made.tasks) if n is not None)
    directory = made.run_directory(root)
    directory.mkdir(parents=True)
    lines = []
    for task in range(end):
        line = {
            "task": task,
            made.metric: level + chance.gauss(0, 0.02),
            "effective_rank": 10 - task / 30,
            "churn": None,
        }
        lines.append(json.dumps({**line, "nonfinite": 0, "resets": task}))
    (directory / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    record = {"experiment": name, "config": made.settings(), "versions": VERSIONS, "machine": {"device": "cpu"}}
    (directory / "config.json").write_text(json.dumps(record))
    status = "diverged" if dies is not None else "running" if stops is not None else "done"
    seconds = 2.0 * end if made.method == "backprop" else 3.0 * end
    (directory / "status.json").write_text(json.dumps({"status": status, "task": end, "seconds": seconds}))
    return directory


def values_of(directory: Path, metric: str = "test_accuracy") -> list[float]:
    return [json.loads(line)[metric] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def rows(out: Path, name: str) -> list[dict[str, str]]:
    with (out / "tables" / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def own_sweep(root: Path) -> dict[tuple[str, str, float, int], Path]:
    """Backprop, and two methods that are not in the paper, in two networks, at two learning rates, on three seeds."""
    levels = {"backprop": 0.7, "redo": 0.8, "l2_init": 0.75}
    return {
        (activation, method, lr, seed): write(
            root / "mine", level=level - lr, method=method, activation=activation, lr=lr, seed=seed
        )
        for activation in ("relu", "tanh")
        for method, level in levels.items()
        for lr in (0.05, 0.1)
        for seed in range(3)
    }


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    root = tmp_path_factory.mktemp("own")
    runs = own_sweep(root / "runs")
    return runs, report([root / "runs"], root / "out").parent


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_a_study_of_ones_own_has_its_own_page_and_no_claim_of_the_paper(own):
    page = (own[1] / "index.html").read_text()
    titles = re.findall(r"<h2[^>]*>([^<]+)</h2>", page)
    assert titles == [
        "What was run",
        "Learning curves",
        "Sensitivity",
        "Best settings",
        "Divergences",
        "Metrics",
        "Timings",
        "Every setting",
        "Versions and commands",
    ]
    assert "not tested" not in page and "No runs found" not in page and not (own[1] / "figures").exists()
    links = re.findall(r'<a href="#([^"]+)">', page)
    assert len(links) == len(titles) and all(f'id="{link}"' in page for link in links)


def test_the_first_and_last_tenth_of_the_best_table_are_those_of_the_files(own):
    runs, out = own
    found = rows(out, "study-mine-permuted-digits-best")
    assert [(row["activation"], row["method"]) for row in found] == [
        (activation, method) for activation in ("relu", "tanh") for method in ("backprop", "l2_init", "redo")
    ]
    for row in found:
        assert row["setting"] == "lr 0.05" and row["candidates"] == "2"
        mine = [values_of(runs[row["activation"], row["method"], 0.05, seed]) for seed in range(3)]
        for name, part in (("first", slice(3)), ("last", slice(-3, None))):
            by_seed = [fmean(values[part]) for values in mine]
            assert float(row[name]) == pytest.approx(fmean(by_seed), abs=2e-5)
            assert float(row[f"{name}_se"]) == pytest.approx(stdev(by_seed) / math.sqrt(3), abs=2e-5)


def test_the_sensitivity_is_the_best_and_the_mean_of_all_settings_with_a_value(own):
    runs, out = own
    for row in rows(out, "study-mine-permuted-digits-sensitivity"):
        chosen = {
            (activation, lr): fmean(fmean(values_of(runs[activation, row["method"], lr, s])[-3:]) for s in range(3))
            for activation in ("relu", "tanh")
            for lr in (0.05, 0.1)
            if row["value"] in (activation, str(lr)) and row["activation"] in ("", activation)
        }
        assert len(chosen) == int(row["settings"]) == (1 if row["setting"] == "lr" else 2)
        assert float(row["best"]) == pytest.approx(max(chosen.values()), abs=2e-5)
        assert float(row["mean"]) == pytest.approx(fmean(chosen.values()), abs=2e-5)


def test_the_points_of_a_curve_are_means_over_seeds_and_say_how_many(own):
    runs, out = own
    page = (out / "index.html").read_text()
    (at,) = re.findall(r'data-name="redo \(lr 0\.05\), 3 seeds" data-at="([^"]+)"', page)[:1]
    points = [point.split() for point in at.split(";")]
    assert len(points) == 30
    for task, (x, mean, error, seeds) in enumerate(points):
        here = [values_of(runs["relu", "redo", 0.05, seed])[task] for seed in range(3)]
        assert (x, seeds) == (str(task + 1), "3")
        assert float(mean) == pytest.approx(100 * fmean(here), abs=0.06)
        assert float(error) == pytest.approx(100 * stdev(here) / math.sqrt(3), abs=0.06)


def test_times_are_medians_per_run_task_and_step(own):
    by_method = {row["method"]: row for row in rows(own[1], "study-mine-permuted-digits-times")}
    assert {name: float(row["seconds_per_run"]) for name, row in by_method.items()} == {
        "backprop": 60.0,
        "redo": 90.0,
        "l2_init": 90.0,
    }
    steps = 2 * 1440 / 16  # two epochs of the digits
    assert float(by_method["redo"]["seconds_per_step"]) == pytest.approx(3.0 / steps, rel=1e-4)


def test_the_best_setting_is_the_one_that_a_sweep_would_choose(tmp_path):
    (tmp_path / "mine.toml").write_text(
        'experiment = "permuted-digits"\nseeds = [100, 101]\n[fixed]\ntasks = 30\n[grid]\n'
        'method = ["backprop", "gxd"]\nlr = [0.05, 0.1, 0.3]\n[final]\nper = ["method"]\nseeds = [0]\n'
    )
    sweep = load(tmp_path / "mine.toml")
    for number, run in enumerate(sweep.runs()):
        level = random.Random(number).uniform(0.5, 0.9)
        dies = 12 if run.seed == 100 and run.lr == 0.3 else None
        shown = {"method": run.method, "lr": run.lr, "seed": run.seed, "level": 0.95 if run.lr == 0.3 else level}
        write(tmp_path / "mine-selection", dies=dies, **shown)
    choices = {choice.per["method"]: choice.best for choice in select(sweep, tmp_path)}
    (one,) = study.studies(digest.collect([tmp_path]).runs)
    best = one.best(())
    assert {method: found.setting.group.runs[0].config["lr"] for method, found in best.items()} == {
        method: choice.cell["lr"] for method, choice in choices.items()
    }
    for method, found in best.items():
        assert found.setting.merit() == pytest.approx(choices[method].value, abs=2e-5)


def test_of_a_regression_the_lowest_loss_is_best_and_a_diverged_run_is_the_worst(tmp_path):
    runs = {
        lr: [
            write(tmp_path / "runs" / "reg", "slow-regression", level=level, lr=lr, seed=s, method="l2") for s in (0, 1)
        ]
        for lr, level in ((0.01, 0.9), (0.02, 0.4))
    }
    write(tmp_path / "runs" / "reg", "slow-regression", level=0.1, lr=0.05, seed=0, method="l2")
    write(tmp_path / "runs" / "reg", "slow-regression", level=0.1, lr=0.05, seed=1, method="l2", dies=3)
    out = report([tmp_path / "runs"], tmp_path / "out").parent
    (row,) = rows(out, "study-reg-slow-regression-best")
    expected = fmean(fmean(values_of(directory, "loss")[-3:]) for directory in runs[0.02])
    assert row["setting"] == "lr 0.02" and float(row["last"]) == pytest.approx(expected, abs=2e-5)
    assert "lower is better" in (out / "index.html").read_text()
    again = report([out], tmp_path / "again").parent  # the digest keeps the loss of all settings
    assert (again / "index.html").read_bytes() == (out / "index.html").read_bytes()


def test_tasks_that_do_not_count_are_in_no_number_and_in_no_curve(tmp_path):
    directory = write(tmp_path / "runs" / "five", "cifar-5+1", tasks=30)
    out = report([tmp_path / "runs"], tmp_path / "out").parent
    (row,) = rows(out, "study-five-cifar-5-1-best")
    counted = values_of(directory, "online_accuracy")[::2]
    assert float(row["last"]) == pytest.approx(fmean(counted[-2:]), abs=2e-5)
    at = re.findall(r'data-at="([^"]+)"', (out / "index.html").read_text())[0]
    assert [point.split()[0] for point in at.split(";")] == [str(task) for task in range(1, 31, 2)]


def test_divergences_are_counted_with_their_tasks_and_their_interval(tmp_path):
    for seed, dies in enumerate((None, 7, 20)):
        write(tmp_path / "runs" / "hot", method="redo", seed=seed, dies=dies)
    out = report([tmp_path / "runs"], tmp_path / "out").parent
    (row,) = rows(out, "study-hot-permuted-digits-divergences")
    assert (row["diverged"], row["started"], row["after"], row["seeds"]) == ("2", "3", "7 20", "1 2")
    page = (out / "index.html").read_text()
    assert "2 of 3 runs diverged." in page and "2/3 [21, 94] %" in page and page.count('class="death"') >= 2


def test_runs_under_way_are_named_and_in_no_number(tmp_path):
    done = write(tmp_path / "runs" / "now", method="redo", seed=0)
    write(tmp_path / "runs" / "now", method="redo", seed=1, level=0.1, stops=11)
    out = report([tmp_path / "runs"], tmp_path / "out").parent
    (row,) = rows(out, "study-now-permuted-digits-best")
    assert float(row["last"]) == pytest.approx(fmean(values_of(done)[-3:]), abs=2e-5)
    page = (out / "index.html").read_text()
    assert "redo, seed 1: task 11 of 30." in page and "1 not complete" in page


def test_a_study_with_nothing_but_runs_under_way_still_has_curves(tmp_path):
    for seed in (0, 1):
        write(tmp_path / "runs" / "now", method="redo", seed=seed, stops=5 + seed)
    page = report([tmp_path / "runs"], tmp_path / "out").read_text()
    at = re.findall(r'data-at="([^"]+)"', page)[0].split(";")
    assert len(at) == 5 and at[0].endswith(" 2")


# --- what is said of the numbers --------------------------------------------------------------------------------------


def test_a_choice_on_the_seeds_that_are_reported_is_marked(own, tmp_path):
    page = (own[1] / "index.html").read_text()
    assert "6 of these 6 settings were chosen by the same seeds that are reported" in page
    assert page.count("best of 2 on these seeds") == 6
    for seed in (100, 101):
        for lr in (0.05, 0.1):
            write(tmp_path / "runs" / "good-selection", method="redo", lr=lr, seed=seed, level=0.7 + lr)
    for seed in (0, 1):
        write(tmp_path / "runs" / "good", method="redo", lr=0.1, seed=seed)
    report([tmp_path / "runs"], tmp_path / "out")
    text = (tmp_path / "out" / "tables" / "study-good-permuted-digits-best.md").read_text()
    assert "beforehand, on seeds 100, 101" in text and "on these seeds" not in text
    choosing = (tmp_path / "out" / "tables" / "study-good-selection-permuted-digits-best.md").read_text()
    assert "best of 2 on these seeds" in choosing


def test_a_setting_with_fewer_seeds_waits(tmp_path):
    for seed in (0, 1):
        write(tmp_path / "now", method="redo", lr=0.05, seed=seed, level=0.5)
    write(tmp_path / "now", method="redo", lr=0.1, seed=0, level=0.9)
    (one,) = study.studies(digest.collect([tmp_path]).runs)
    best = one.best(())["redo"]
    assert (best.setting.values["lr"], best.candidates, best.waiting) == ("0.05", 1, 1)


def test_what_differs_between_methods_alone_was_not_swept(tmp_path):
    write(tmp_path / "now", method="backprop")
    write(tmp_path / "now", method="gxd", rate=1e-3)
    write(tmp_path / "now", method="redo", options={"threshold": 0.1})
    write(tmp_path / "now", method="redo", options={"threshold": 0.2})
    (one,) = study.studies(digest.collect([tmp_path]).runs)
    assert dict(one.swept) == {"threshold": ("0.1", "0.2")} and one.facet_fields == ()
    assert one.fixed["tasks"] == "30" and "rate" not in one.fixed


def test_an_option_that_is_not_given_has_its_default_and_one_named_like_a_field_its_own_place(tmp_path):
    write(tmp_path / "now", method="hare_and_tortoise")
    write(tmp_path / "now", method="hare_and_tortoise", options={"decay": 0.9})
    (one,) = study.studies(digest.collect([tmp_path]).runs)
    default = gxd.methods()["hare_and_tortoise"].options["decay"]
    assert dict(one.swept) == {"options.decay": ("0.9", f"{default:g}")} and one.fixed["decay"] == "0.99"


def test_the_runs_of_another_version_are_shown_with_a_warning(tmp_path):
    for seed in (0, 1):
        directory = write(tmp_path / "runs" / "old", method="redo", seed=seed)
        record = json.loads((directory / "config.json").read_text())
        record |= {"experiment": "rotated-digits", "versions": {**VERSIONS, "torch": f"2.{seed}"}}
        record["config"] |= {"method": "of_before", "angle": 30, "options": "threshold=1"}
        (directory / "config.json").write_text(json.dumps(record))
    page = report([tmp_path / "runs"], tmp_path / "out").read_text()
    assert "This version does not know rotated-digits" in page and "of_before n=2" in page
    assert "In 1 settings the seeds were made with different versions of gxd or torch." in page
    assert "Milliseconds per step" in page and "gxd run rotated-digits" in page
    assert report([tmp_path / "out"], tmp_path / "again").read_text() == page


# --- without scripts, and with bad input ------------------------------------------------------------------------------


def test_without_scripts_everything_is_there_and_no_control_is_dead(own):
    page = re.sub(r"<script>.*?</script>", "", (own[1] / "index.html").read_text(), flags=re.S)
    assert "<input" not in page and "<button" not in page
    assert re.findall(r'<div class="filters"( hidden)', page) == [" hidden"] * 3
    assert page.count('<svg class="chart"') == 2 + 3 + 2 * 2  # curves, sensitivity, two metrics; by activation
    curves = page[page.index('id="study1-curves"') : page.index('id="study1-sensitivity"')]
    assert len(re.findall(r'<g class="line"', curves)) == 6 and len(re.findall(r'<g class="line quiet"', curves)) == 6
    assert "<table" in page and "redo n=3" in curves


def test_what_a_run_says_of_itself_cannot_break_out_of_the_page(tmp_path):
    directory = write(tmp_path / "runs" / "x", method="redo")
    record = json.loads((directory / "config.json").read_text())
    record["config"] |= {"method": "\"'><script>alert(1)</script>", "activation": "</svg><b>'"}
    (directory / "config.json").write_text(json.dumps(record))
    write(tmp_path / "runs" / "x", method="redo", seed=1)
    page = report([tmp_path / "runs"], tmp_path / "out").read_text()
    assert "<script>alert" not in page and "</svg><b>" not in page and "'><script" not in page


def refusal(capsys, *argv: object) -> str:
    assert cli.main(["report", *map(str, argv)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "Traceback" not in said
    return said


def test_the_paper_is_not_compared_with_runs_that_are_not_of_it(tmp_path, capsys):
    write(tmp_path / "runs" / "reg", "slow-regression", method="l2")
    said = refusal(capsys, tmp_path / "runs", "--out", tmp_path / "out", "--paper", "yes")
    assert "no run of permuted-mnist, permuted-digits, cifar100" in said and "leave --paper out" in said
    assert not (tmp_path / "out").exists()


def test_the_papers_part_is_there_if_its_runs_are_and_can_be_left_out(tmp_path):
    for method, level in (("backprop", 0.5), ("gxd_paper", 0.9), ("redo", 0.8), ("gxd", 0.1)):
        for seed in range(3):
            write(tmp_path / "runs" / "p", method=method, layer_norm=True, seed=seed, level=level, tasks=100)
    page = report([tmp_path / "runs"], tmp_path / "out").read_text()
    assert "Beside the paper" in page and 'id="cifar100"' not in page and "redo n=3" in page and "GXD n=3" in page
    claims = page[page.index('id="claims"') : page.index('id="permuted-digits"')]
    assert "✓ ReLU + LayerNorm" in claims and "CIFAR" not in claims
    assert "Beside the paper" not in report([tmp_path / "runs"], tmp_path / "out", "no").read_text()
    assert not list((tmp_path / "out").glob("figures/*"))
    whole = report([tmp_path / "runs"], tmp_path / "out", "yes").read_text()
    assert 'id="cifar100"' in whole and "gxd run cifar100 --method gxd_paper" in whole


def test_directories_that_are_empty_broken_or_of_others_are_told_apart(tmp_path, capsys):
    out = ("--out", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    assert "holds no run" in refusal(capsys, tmp_path / "empty", *out)
    other = tmp_path / "other" / "bert"
    other.mkdir(parents=True)
    (other / "config.json").write_text('{"model_type": "bert"}')
    (other / "metrics.jsonl").write_text('{"loss": 1.0}\n')
    assert "holds no run" in refusal(capsys, tmp_path / "other", *out)
    directory = write(tmp_path / "broken" / "x", method="redo")
    record = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**record, "config": {**record["config"], "tasks": "many"}}))
    assert "cannot be read as a run" in refusal(capsys, tmp_path / "broken", *out)
    (directory / "config.json").write_text('{"experiment": "permuted-di')
    assert "is not JSON" in refusal(capsys, tmp_path / "broken", *out)
    assert not (tmp_path / "out").exists()


def test_two_studies_on_one_page_keep_their_anchors_and_files_apart(tmp_path):
    write(tmp_path / "runs" / "a" / "mine", method="redo")
    write(tmp_path / "runs" / "b" / "mine", "slow-regression", method="l2")
    every = study.studies(digest.collect([tmp_path / "runs"]).runs)
    anchors = [section.anchor for one in every for section in study_page.sections(one, every)]
    assert len(anchors) == len(set(anchors))
    out = report([tmp_path / "runs"], tmp_path / "out").parent
    assert len(list((out / "tables").glob("study-*-best.csv"))) == 2
