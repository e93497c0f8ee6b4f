"""The report: reads runs and digests, never averages a diverged run in, and says what it has not got."""

from __future__ import annotations

import csv
import json
import math
import random
import re
import statistics
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from scipy import stats

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

import gxd_command as cli
from gxd.lab.errors import UserError
from gxd.lab.experiments import experiment as experiment_of
from gxd.lab.report import demo_page, digest, evidence, figures, numbers, paper, provenance, questions, tables, verdicts
from gxd.lab.report.build import report

VERSIONS = {"gxd": "0.1.0", "torch": "2.13.0", "python": "3.12.0", "commit": "0123abc"}
METRICS = (
    "online_accuracy resets dormant_fraction effective_rank stable_rank weight_norm bias_norm gradient_norm "
    "largest_reference"
)
UTILITIES = [name for name in paper.METHODS if name != "backprop"]


def write_run(
    root: Path,
    experiment: str = "permuted-digits",
    *,
    first: float = 0.9,
    last: float = 0.9,
    noise: float = 0.01,
    diverged_at: int | None = None,
    stop_at: int | None = None,
    **values: object,
) -> Path:
    """A run directory in the format of docs/lab.md, its accuracy going from ``first`` to ``last``."""
    made = experiment_of(experiment).from_dict({"tasks": 200, "method": "gxd_paper", **values}).resolved()
    rng = random.Random(str(sorted(made.to_dict().items())))
    directory = made.run_directory(root)
    directory.mkdir(parents=True)
    shift = rng.gauss(0, noise / 2)
    end = min(n for n in (diverged_at, stop_at, made.tasks) if n is not None)
    with (directory / "metrics.jsonl").open("w") as file:
        for task in range(end):
            done = task / made.tasks
            accuracy = min(1.0, max(0.0, first + (last - first) * done + shift + rng.gauss(0, noise)))
            line = {"task": task, "test_accuracy": accuracy, **dict.fromkeys(METRICS.split(), 1.0 + done)}
            line["dormant_fraction"] = 0.1 + 0.8 * max(0.0, (first - last) * done)
            line["effective_rank"] = 30 - 25 * max(0.0, (first - last) * done)
            file.write(json.dumps({**line, "nonfinite": 0, "loss": None if task == 3 else 0.3}) + "\n")
    status = "diverged" if diverged_at is not None else "running" if stop_at is not None else "done"
    record = {"experiment": experiment, "config": made.settings(), "versions": VERSIONS}
    (directory / "config.json").write_text(json.dumps({**record, "machine": {"device": "cpu", "threads": 1}}))
    (directory / "status.json").write_text(json.dumps({"status": status, "task": end, "seconds": 60.0}))
    return directory


def write_assay(
    root: Path, model: str, activation: str, seed: int, rho: dict[str, float], checkpoints: list[int]
) -> Path:
    """An assay directory in the format of docs/lab.md."""
    directory = root / "assay" / f"{model}_{activation}_{'abcdef0123'}" / f"seed{seed}"
    directory.mkdir(parents=True)
    rng = random.Random(f"{model}{activation}{seed}")
    groups = {"0": 256, "2": 256, "4": 256, "6": 256}

    def spread(value: float, width: float) -> dict[str, float]:
        return {name: value + rng.gauss(0, width) for name in groups}

    with (directory / "assay.jsonl").open("w") as file:
        for checkpoint in checkpoints:
            utilities = {
                name: {
                    "spearman": {"l1": spread(value, 0.005), "kl": spread(value - 0.02, 0.005)},
                    "shock": {
                        "l1": spread(0.02 + 0.3 * (1 - value), 0.001),
                        "kl": spread(0.002 + 0.01 * (1 - value), 1e-4),
                    },
                }
                for name, value in rho.items()
            }
            line = {"checkpoint": checkpoint, "test_accuracy": 0.9, "groups": groups, "utilities": utilities}
            line["oracle"] = {"l1": spread(0.015, 0.0005), "kl": spread(0.0015, 1e-5)}
            file.write(json.dumps({**line, "fraction": 0.05, "calibration": 2048, "probe": 2048}) + "\n")
    settings = {"model": model, "activation": activation, "seed": seed, "lr": 0.01, "batch_size": 64}
    record = {"config": settings, "versions": VERSIONS, "machine": {"device": "cpu", "threads": 1}}
    (directory / "config.json").write_text(json.dumps(record))
    (directory / "status.json").write_text(json.dumps({"status": "done", "task": 30, "seconds": 60.0}))
    return directory


RHO = {"activation": 0.5, "contribution": 0.6, "mc_contribution": 0.65, "mc_adaptable_contribution": 0.7}
RHO |= {"loss_gradient": 0.4, "gxi": 0.8, "gxd": 0.97, "gxd_all_logit": 0.98, "gxd_sketch": 0.985, "random": 0.0}


def write_everything(root: Path, tasks: int = 60, seeds: int = 2) -> None:
    """A small world with every table and figure in it."""
    losing = {"backprop": 0.5, "activation": 0.6, "contribution": 0.6, "mc_adaptable_contribution": 0.85}
    losing |= {"loss_gradient": 0.55, "gxi": 0.75, "gxd_paper": 0.9, "gxd_sketch": 0.905}
    for method, last in losing.items():
        for seed in range(seeds):
            for activation in paper.ACTIVATIONS:
                common = {"method": method, "activation": activation, "seed": seed, "tasks": tasks}
                dies = activation == "silu" and method == "gxd_paper" and seed == 1
                kept = last if activation != "relu" or method in ("backprop", "loss_gradient") else 0.9
                write_run(root / "grid", last=kept, diverged_at=tasks // 2 if dies else None, **common)
            write_run(root / "grid", last=last, method=method, seed=seed, layer_norm=True, tasks=tasks)
    for seed in range(2):
        for method, last in {
            "backprop": 0.80,
            "contribution": 0.79,
            "mc_adaptable_contribution": 0.8,
            "gxd_paper": 0.83,
        }.items():
            write_run(root / "cifar", "cifar100", first=0.8, last=last, method=method, seed=seed, tasks=100, epochs=2)
        for method, last in {"backprop": 0.93, "contribution": 0.945, "gxd_paper": 0.95, "gxd_sketch": 0.951}.items():
            at = {"method": method, "seed": seed, "tasks": 150, "activation": "silu"}
            write_run(root / "mnist", "permuted-mnist", first=0.95, last=last, noise=0.002, **at)
    for seed in range(10):
        for rate in (1e-4, 1e-3):
            for method in ("gxd_paper", "gxd_sketch"):
                for compensate in (True, False):
                    dies = compensate and rate == 1e-3 and seed < (8 if method == "gxd_paper" else 2)
                    at = {
                        "method": method,
                        "activation": "silu",
                        "lr": 0.25,
                        "rate": rate,
                        "tasks": tasks,
                        "seed": seed,
                    }
                    write_run(
                        root / "questions",
                        last=0.85,
                        diverged_at=tasks // 2 if dies else None,
                        compensate=compensate,
                        **at,
                    )
    for seed in range(3):
        for activation in ("relu", "silu", "tanh"):
            write_assay(root, "mlp", activation, seed, RHO, [0, 5, 10, 20, 30])
        write_assay(root, "resnet18", "relu", seed, RHO, [1, 2])


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A world of synthetic runs and the report of it."""
    root = tmp_path_factory.mktemp("world")
    write_everything(root / "runs")
    return root / "runs", report([root / "runs"], root / "report", "yes").parent


def panels_of(root: Path, experiment: str = "permuted-digits"):
    runs = [run for run in digest.collect([root]).runs if run.experiment == experiment]
    return evidence.shown(runs)


def accuracies(directory: Path) -> list[float]:
    return [json.loads(line)["test_accuracy"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


# --- statistics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "n"), [(0, 10), (3, 5), (1, 1), (19, 20), (400, 1000)])
def test_the_interval_of_a_rate_is_that_of_scipy(count, n):
    low, high = stats.binomtest(count, n).proportion_ci(method="wilson")
    assert numbers.wilson(count, n) == pytest.approx((count / n, low, high))


def test_of_nothing_the_rate_can_be_anything():
    assert numbers.wilson(0, 0)[1:] == (0.0, 1.0)


def test_a_paired_difference_uses_the_pairs_and_one_pair_has_no_interval():
    far = numbers.paired([0.1, 0.5, 0.9], [0.0, 0.4, 0.8])
    assert far == pytest.approx((0.1, 0.1, 0.1))
    ours, theirs = [0.3, 0.5, 0.8, 0.7], [0.2, 0.6, 0.5, 0.4]
    low, high = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    assert numbers.paired(ours, theirs) == pytest.approx((0.15, low, high))
    assert numbers.paired([1.0], [0.0]) == (1.0, -math.inf, math.inf)


def test_the_distance_to_the_paper_is_in_standard_errors_of_both():
    ours = numbers.Mean(0.95, 0.03, 15)
    assert tables.distance(ours, (0.90, 0.04)) == pytest.approx(1.0, rel=1e-3)
    assert math.isfinite(tables.distance(numbers.Mean(0.999, 0.0, 15), (0.998, 0.0)))


# --- reading ----------------------------------------------------------------------------------------------------------


def test_a_run_directory_becomes_blocks_of_means_with_the_first_and_last_tasks_whole(tmp_path):
    directory = write_run(tmp_path, tasks=800, seed=3, method="gxd_paper")
    run = digest.read_run(directory)
    accuracy = accuracies(directory)
    assert (run.tasks, run.block, run.seed, run.status, run.diverged_at) == (800, 10, 3, "done", None)
    assert len(run.series["test_accuracy"]) == 80
    assert run.first() == pytest.approx(sum(accuracy[:50]) / 50, abs=1e-5)
    assert run.last() == pytest.approx(sum(accuracy[-50:]) / 50, abs=1e-5)
    assert run.key == directory.parent.name.rpartition("_")[2]


def test_the_last_tasks_of_a_run_of_any_length_are_averaged(tmp_path):
    for tasks in (3, 40, 150, 161, 403):
        directory = write_run(tmp_path, tasks=tasks)
        run = digest.read_run(directory)
        accuracy = accuracies(directory)
        counted = digest.window(tasks)
        if tasks % run.block:  # whole blocks, of which the last is short
            counted += tasks % run.block - run.block
        assert run.last() == pytest.approx(sum(accuracy[-counted:]) / counted, abs=2e-5)


def test_a_torn_last_line_is_tolerated_in_a_running_run_only(tmp_path):
    running = write_run(tmp_path, stop_at=20, seed=0)
    done = write_run(tmp_path, seed=1)
    for directory in (running, done):
        with (directory / "metrics.jsonl").open("a") as file:
            file.write('{"task": 20, "test_acc')
    assert digest.read_run(running).tasks == 20
    with pytest.raises(UserError, match=r"seed1/metrics\.jsonl, line 201 "):
        digest.read_run(done)


def test_a_corrupt_line_in_the_middle_is_an_error_that_names_file_and_line(tmp_path):
    directory = write_run(tmp_path, stop_at=20)
    lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines[6] = "nonsense\n"
    (directory / "metrics.jsonl").write_text("".join(lines))
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 7 "):
        digest.collect([tmp_path])


def test_a_directory_without_runs_is_an_error_that_names_it_and_the_commands(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert cli.main(["report", str(tmp_path / "empty"), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert str(tmp_path / "empty") in said and "gxd run" in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert cli.main(["report", str(tmp_path / "absent")]) == 2
    assert "absent does not exist" in capsys.readouterr().err


def test_a_damaged_digest_is_an_error_that_names_the_line(tmp_path):
    (tmp_path / "digest.jsonl").write_text('{"experiment": "permuted-digits"}\n')
    with pytest.raises(UserError, match=r"digest\.jsonl, line 1 is not a line of a digest"):
        digest.collect([tmp_path])


def test_paths_of_the_machine_stay_out_of_the_digest(tmp_path):
    directory = write_run(tmp_path / "runs", tasks=8)
    record = json.loads((directory / "config.json").read_text())
    record["config"]["data_dir"] = "/somewhere/private"
    (directory / "config.json").write_text(json.dumps(record))
    report([tmp_path / "runs"], tmp_path / "out")
    assert "private" not in (tmp_path / "out" / "digest.jsonl").read_text()


def write_digest(directory: Path, *runs: digest.Run) -> Path:
    """A digest of these runs, as a report leaves it."""
    directory.mkdir(parents=True)
    digest.write(digest.Collection(list(runs)), directory, {id(run) for run in runs})
    return directory


def test_of_two_copies_of_a_run_the_newer_counts_wherever_it_stands(tmp_path):
    done = digest.read_run(write_run(tmp_path / "runs", tasks=160))
    running = write_digest(tmp_path / "old", replace(done, status="running"))
    shorter = {name: values[:70] for name, values in done.series.items()}
    stale = write_digest(tmp_path / "older", replace(done, status="running", tasks=139, series=shorter))
    for order in ([running, tmp_path / "runs"], [tmp_path / "runs", running], [stale, tmp_path / "runs"]):
        (run,) = digest.collect(order).runs
        assert (run.status, run.tasks) == ("done", 160)


def test_two_copies_of_a_run_that_contradict_each_other_are_an_error_that_names_both(tmp_path):
    run = digest.read_run(write_run(tmp_path / "runs", tasks=20))
    other = {**run.series, "test_accuracy": (0.5, *run.series["test_accuracy"][1:])}
    one, two = write_digest(tmp_path / "one", run), write_digest(tmp_path / "two", replace(run, series=other))
    with pytest.raises(UserError, match=r"two/digest\.jsonl and .*one/digest\.jsonl have different numbers"):
        digest.collect([one, two])
    dead = write_digest(tmp_path / "dead", replace(run, status="diverged", diverged_at=10, tasks=10))
    with pytest.raises(UserError, match="different numbers"):
        digest.collect([dead, one])


def test_a_complete_run_that_lost_lines_is_an_error_that_says_what_to_do(tmp_path, capsys):
    for seed, ending in enumerate(({}, {"diverged_at": 9})):
        directory = write_run(tmp_path, tasks=20, seed=seed, **ending)
        lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
        (directory / "metrics.jsonl").write_text("".join(lines[:-3]))
        with pytest.raises(UserError, match=rf"seed{seed} has \d+ of the \d+ lines .* remove the directory"):
            digest.read_run(directory)
    assert cli.main(["run", "permuted-digits", "--method", "gxd_paper", "--tasks", "20", "--out", str(tmp_path)]) == 2
    assert "has lost lines: delete" in capsys.readouterr().err


def test_a_file_that_is_no_digest_is_not_for_the_user_to_remove(tmp_path, capsys):
    (tmp_path / "ok.py").write_text("print('mine')\n")
    assert cli.main(["report", str(tmp_path / "ok.py"), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "ok.py, line 1" in said and "no digest" in said and "remove" not in said


def test_versions_say_that_the_code_was_changed_and_with_what_a_run_went_on(tmp_path):
    commit = 40 * "a"
    for seed, more in enumerate(({}, {"resumed": [{**VERSIONS, "commit": f"{commit}-dirty", "torch": "2.14.0"}]})):
        directory = write_run(tmp_path / "runs", tasks=8, seed=seed)
        record = json.loads((directory / "config.json").read_text())
        record["versions"]["commit"] = f"{commit}-dirty"
        (directory / "config.json").write_text(json.dumps({**record, **more}))
    found = digest.collect([tmp_path / "runs"])
    again = digest.collect([write_digest(tmp_path / "out", *found.runs)])
    assert again.runs == found.runs
    for collection in (found, again):
        records = provenance.versions(collection).records
        assert {(row["torch"], row["commit"]) for row in records} == {
            ("2.13.0", "aaaaaaaaaaaa-dirty"),
            ("2.13.0 → 2.14.0", "aaaaaaaaaaaa-dirty"),
        }
    assert "resumed" not in found.runs[0].line()  # as in the digests of before


# --- divergence -------------------------------------------------------------------------------------------------------


def test_a_diverged_run_is_in_no_mean_and_the_curve_says_how_many_live(tmp_path):
    for seed in range(3):
        write_run(tmp_path, first=0.9, last=0.9, noise=0.0, tasks=100, seed=seed)
    for seed in (3, 4):
        write_run(tmp_path, first=0.1, last=0.1, noise=0.0, tasks=100, seed=seed, diverged_at=50)
    group = panels_of(tmp_path)["relu", False]["gxd_paper"]
    assert group.last() == pytest.approx((0.9, 0.0, 3))
    line = evidence.curve(group)
    assert line is not None and (line.n, line.living, line.label) == (5, 3, "3/5 alive")
    assert line.mean[49] == pytest.approx((3 * 0.9 + 2 * 0.1) / 5) and line.alive[49] == 5
    assert line.mean[50] == pytest.approx(0.9) and line.alive[50] == 3
    assert line.deaths == (50.0, 50.0)
    row = tables.summary("permuted-digits", {("relu", False): {"gxd_paper": group}}).rows[0]
    assert [cell.text for cell in row][-2:] == ["2/5 [12, 77] %", "50, 50"]


def test_the_block_in_which_a_run_diverged_is_left_out(tmp_path):
    run = digest.read_run(write_run(tmp_path, tasks=400, diverged_at=52))
    assert run.block == 5 and len(run.series["test_accuracy"]) == 11 and len(run.blocks("test_accuracy")) == 10
    assert run.first() is not None and run.last() is None


def test_a_run_under_way_counts_in_no_number_and_is_named_as_missing(tmp_path):
    write_run(tmp_path, tasks=40, seed=0, noise=0.0)
    write_run(tmp_path, tasks=40, seed=1, first=0.0, last=0.0, stop_at=7)
    group = panels_of(tmp_path)["relu", False]["gxd_paper"]
    assert group.last().n == 1 and group.last().value == pytest.approx(0.9, abs=1e-3)
    line = evidence.curve(group)
    assert line is not None and line.n == 1
    page = report([tmp_path], tmp_path / "out").read_text()
    assert "GXD (paper), seed 1: task 7 of 40." in page and "1/2 so far" not in page
    assert "seed 1 at task 7 of 40" in report([tmp_path], tmp_path / "out2", "yes").read_text()


def test_while_runs_are_under_way_the_rate_of_divergence_is_of_all_that_were_started(tmp_path):
    write_lasts(tmp_path, "backprop", [0.1] * 3)
    for seed in range(10):
        dies = {"diverged_at": 20} if seed < 2 else {"stop_at": 180}
        write_run(tmp_path, activation="silu", seed=seed, **dies)
        write_run(tmp_path, activation="silu", seed=seed, compensate=False)
    panels = panels_of(tmp_path)
    rows = tables.summary("permuted-digits", panels).rows
    assert [row[-2].text for row in rows] == ["0/3 [0, 56] %", "2/10 [6, 51] % so far"]
    line = evidence.curve(panels["silu", False]["gxd_paper"])
    assert line is not None and line.label == "8/10 alive so far"
    judged = judge(tmp_path)
    assert verdict(judged, "GXD keeps its plasticity", "SiLU") == verdicts.UNTESTED
    assert ruling(judged, "GXD keeps its plasticity", "SiLU").scale == "runs under way"
    asked = questions.compensation(digest.collect([tmp_path]).runs)
    assert asked.table.rows[0][1].text.endswith("so far") and asked.table.rows[0][-1].text == "open"
    assert "stays open" in asked.answers[0]


def test_a_claim_waits_for_the_backprop_it_is_measured_against(tmp_path):
    write_lasts(tmp_path, "gxd_paper", [0.9, 0.9])
    write_lasts(tmp_path, "backprop", [0.1])
    write_run(tmp_path, method="backprop", activation="silu", seed=1, stop_at=30)
    assert ruling(judge(tmp_path), "GXD keeps its plasticity", "SiLU").evidence.endswith("backprop is under way")


# --- which runs a figure shows ----------------------------------------------------------------------------------------


def test_a_stress_test_with_more_seeds_does_not_replace_a_comparison(world):
    shown = panels_of(world[0])["silu", False]["gxd_paper"]
    assert {run.study for run in shown.runs} == {"grid"} and shown.compensates


def test_the_candidates_of_a_sweep_give_way_to_the_final_runs(tmp_path):
    for lr in (0.1, 0.3):
        for seed in (100, 101):
            write_run(tmp_path, tasks=20, lr=lr, seed=seed, last=0.99)
    for seed in (0, 1):
        write_run(tmp_path, tasks=40, lr=0.3, seed=seed, last=0.5)
    group = panels_of(tmp_path)["relu", False]["gxd_paper"]
    assert [(run.seed, run.planned) for run in group.runs] == [(0, 40), (1, 40)]


def test_methods_that_were_trained_in_different_settings_are_not_compared(tmp_path):
    for seed in range(3):
        at = {"activation": "silu", "seed": seed, "tasks": 20}
        for method in ("backprop", "loss_gradient", "gxi"):
            write_run(tmp_path, method=method, last=0.2, **at)
        write_run(tmp_path, method="gxd_paper", **{**at, "tasks": 40}, width=128, epochs=3)
        write_run(tmp_path, method="contribution", **at, maturity=7)
    panels = panels_of(tmp_path)
    assert list(panels["silu", False]) == ["backprop", "loss_gradient", "gxi"]
    judged = judge(tmp_path)
    assert verdict(judged, "GXD ends higher than GXI", "SiLU") == verdicts.UNTESTED
    assert ruling(judged, "GXD ends higher than GXI", "SiLU").scale == "no runs to compare"
    left = evidence.left_out(digest.collect([tmp_path]).runs, panels)
    assert {method: fields for _, method, fields in left} == {
        "gxd_paper": ["epochs", "tasks", "width"],
        "contribution": ["maturity"],
    }


def test_rates_that_were_chosen_for_each_method_do_not_part_them(tmp_path):
    for seed in range(2):
        write_run(tmp_path, method="backprop", seed=seed, tasks=20, lr=0.05)
        for method, lr, rate in (("gxd_paper", 0.1, 1e-3), ("contribution", 0.2, 1e-4)):
            write_run(tmp_path, method=method, seed=seed, tasks=20, lr=lr, rate=rate, maturity=7)
    assert list(panels_of(tmp_path)["relu", False]) == ["backprop", "contribution", "gxd_paper"]


def test_final_runs_go_before_the_grid_and_a_stress_test_even_while_some_are_to_come(tmp_path):
    methods = ("backprop", "contribution", "loss_gradient", "gxi", "gxd_paper", "gxd_sketch")
    for method in methods:
        for lr in (0.05, 0.1):
            write_run(tmp_path / "main", method=method, activation="silu", lr=lr, seed=100, tasks=20)
    for method in methods[2:]:  # the first ones are still to come
        for seed in range(2):
            write_run(tmp_path / "main", method=method, activation="silu", lr=0.1, seed=seed, tasks=40)
    for method in ("gxd_paper", "gxd_sketch"):
        for seed in range(10):
            write_run(tmp_path / "stress", method=method, activation="silu", lr=0.25, seed=seed, tasks=20)
    shown = panels_of(tmp_path)["silu", False]
    assert list(shown) == list(methods[2:]) and {group.tasks for group in shown.values()} == {40}


def test_a_difference_to_backprop_is_taken_task_by_task(tmp_path):
    for seed in range(2):
        write_run(tmp_path, "cifar100", method="backprop", seed=seed, tasks=60, first=0.5, last=0.9, noise=0.0)
        write_run(tmp_path, "cifar100", method="gxd_paper", seed=seed, tasks=400, first=0.5, last=0.9, noise=0.0)
    runs = digest.collect([tmp_path]).runs
    short, long = sorted(evidence.groups(runs), key=lambda group: group.tasks)
    assert evidence.curve(long, baseline=short) is None
    same = evidence.curve(long, baseline=long)
    assert same is not None and set(same.mean) == {0.0}


# --- the report -------------------------------------------------------------------------------------------------------


def test_the_report_has_every_figure_and_table_of_the_paper(world):
    _, out = world
    drawn = {path.stem for path in (out / "figures").glob("*.png")}
    assert drawn == {path.stem for path in (out / "figures").glob("*.svg")}
    for experiment in ("permuted-mnist", "permuted-digits"):
        assert {f"{experiment}-fig3-activations", f"{experiment}-app-gxi-gradient"} <= drawn
    assert {"permuted-digits-fig1-utility-failures", "permuted-digits-fig4-layernorm"} <= drawn
    assert {"fig2-shock", "app-shock-variants", "cifar100-fig4-relative", "cifar100-app-absolute"} <= drawn
    for path in (out / "figures").glob("*.svg"):
        ElementTree.parse(path)
    for name in (
        "spearman",
        "spearman-variants",
        "spearman-ours",
        "shock",
        "verdicts-detail",
        "question-sketch",
        "runs",
    ):
        assert (out / "tables" / f"{name}.md").exists() and (out / "tables" / f"{name}.csv").exists()


def test_a_figure_without_runs_says_which_commands_make_them(world):
    page = (world[1] / "index.html").read_text()
    card = page[page.index('id="permuted-mnist-fig4-layernorm"') :][:900]
    assert "No runs found" in card
    assert "gxd run permuted-mnist --method gxd_paper --activation relu --layer-norm" in card


def test_the_page_needs_no_network_and_repeats_no_id(world):
    page = (world[1] / "index.html").read_text()
    assert not re.search(r'(src|href)="(https?:)?//', page) and "<script " not in page and "@import" not in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:xlink:)?href="#([^"]+)"', page)) <= set(ids)
    assert set(re.findall(r"url\(#([^)]+)\)", page)) <= set(ids)


def test_table_1_has_the_papers_cell_beside_ours_with_the_distance(world):
    with (world[1] / "tables" / "spearman.csv").open() as file:
        cells = {(row["utility"], row["model"], row["activation"], row["metric"]): row for row in csv.DictReader(file)}
    cell = cells["gxd", "mlp", "silu", "kl"]
    assert (float(cell["paper"]), float(cell["paper_se"]), int(cell["n"])) == (0.56, 0.051, 15)
    assert float(cell["ours"]) == pytest.approx(0.95, abs=0.01)
    error = math.sqrt(float(cell["ours_se"]) ** 2 + 0.051**2)
    assert float(cell["distance_se"]) == pytest.approx((float(cell["ours"]) - 0.56) / error, rel=0.02)
    assert cells["gxd_sketch", "mlp", "relu", "l1"]["paper"] == ""
    assert cells["activation", "resnet18", "relu", "kl"]["paper"] == "0.62"


def test_the_digest_gives_the_same_report_without_the_runs(tmp_path):
    for seed in range(2):
        for method in ("backprop", "gxd_paper", "gxd_sketch"):
            write_run(tmp_path / "runs" / "one", method=method, layer_norm=True, seed=seed, last=0.7)
        write_run(tmp_path / "runs" / "one", lr=0.3, layer_norm=True, seed=seed, last=0.2)  # a candidate of a sweep
        write_run(tmp_path / "runs" / "two", activation="silu", seed=seed, diverged_at=80 + seed)
        write_assay(tmp_path / "runs", "mlp", "relu", seed, RHO, [0, 30])
    out = report([tmp_path / "runs"], tmp_path / "out").parent
    again = report([out], tmp_path / "again").parent
    files = sorted(path.relative_to(out) for path in out.rglob("*.*"))
    assert files == sorted(path.relative_to(again) for path in again.rglob("*.*")) and len(files) > 20
    for path in files:
        assert (out / path).read_bytes() == (again / path).read_bytes(), path
    kept = {
        line["config"]["lr"]: len(line["series"])
        for line in map(json.loads, (out / "digest.jsonl").read_text().splitlines())
    }
    assert kept[0.3] == 1 and kept[0.1] > 5  # what no figure shows keeps its accuracy alone


def test_what_a_user_wrote_is_escaped(tmp_path):
    directory = write_run(tmp_path / "runs", tasks=8)
    record = json.loads((directory / "config.json").read_text())
    record["versions"]["commit"] = "<b>&"
    record["config"]["method"] = "<script>alert(1)</script>"
    (directory / "config.json").write_text(json.dumps(record))
    page = report([tmp_path / "runs"], tmp_path / "out").read_text()
    assert "<script>alert" not in page and "<b>&<" not in page
    assert "&lt;script&gt;" in page and "&lt;b&gt;&amp;" in page


def test_settings_that_differ_from_the_papers_are_marked(world):
    with (world[1] / "tables" / "settings-permuted-mnist.csv").open() as file:
        rows = {row["setting"]: row for row in csv.DictReader(file)}
    assert (rows["Tasks"]["ours"], rows["Tasks"]["differs"]) == ("150", "True")
    assert (rows["Units per layer"]["ours"], rows["Units per layer"]["differs"]) == ("256", "False")
    assert rows["Seeds"]["differs"] == "True" and rows["Methods"]["differs"] == "True"


def test_the_questions_are_answered_by_their_intervals(world):
    runs = digest.collect([world[0]]).runs
    asked = questions.compensation(runs)
    found = {(row["method"], row["rate"]): row for row in asked.table.records}
    assert set(found) == {(method, rate) for method in ("gxd_paper", "gxd_sketch") for rate in (1e-4, 1e-3)}
    hot = found["gxd_paper", 1e-3]
    assert (hot["diverged"], hot["n"], hot["other_diverged"], hot["other_n"], hot["pairs"]) == (8, 10, 0, 10, 2)
    assert float(hot["rate_difference_low"]) > 0
    follows = {row[0].text: row[-1].text for row in asked.table.rows}
    assert "diverges more often" in follows["GXD (paper), SiLU, lr 0.25, rate 1e-3"]
    assert "diverges" not in follows["GXD (paper), SiLU, lr 0.25, rate 1e-4"]
    assert "diverges more often in 1, less often in 0, as often in 0, undecided in 3" in asked.answers[0]
    assert questions.compensation([]).missing.startswith("gxd run")


def test_an_interval_inside_the_margin_says_that_nothing_differs(tmp_path):
    for seed in range(10):
        for rate, level in ((1e-4, 0.8), (1e-3, 0.85)):
            at = {"activation": "silu", "seed": seed, "tasks": 60, "noise": 0.0, "rate": rate}
            with_it = level + (0.004 if seed % 2 else -0.004)  # 0 +- 0.3 points
            write_run(tmp_path, first=with_it, last=with_it, **at)
            write_run(tmp_path, first=level, last=level, compensate=False, **at)
    runs = digest.collect([tmp_path]).runs
    assert [row[-1].text for row in questions.compensation(runs).table.rows] == ["ends as high"] * 2
    asked = questions.replacement(runs)
    assert [row[-1].text for row in asked.table.rows] == ["ends higher"] * 2
    (together,) = asked.together.rows
    assert (together[0].text, together[1].text) == ("lr 0.1", "0/20 [0, 16] %")


def test_settings_of_the_same_rates_are_answered_together_and_a_seed_counts_once(tmp_path):
    means = []
    for seed in range(10):
        for activation, gain in (("silu", 0.01), ("leaky_relu", 0.03)):
            dies = {"diverged_at": 20} if activation == "silu" and seed < 6 else {}
            at = {"activation": activation, "seed": seed, "tasks": 60, "noise": 0.0}
            level = 0.8 + gain + seed / 1000
            write_run(tmp_path, first=level, last=level, **at, **dies)
            write_run(tmp_path, first=0.8, last=0.8, compensate=False, **at)
        means.append((0.03 if seed < 6 else 0.02) + seed / 1000)
    asked = questions.compensation(digest.collect([tmp_path]).runs)
    (whole,) = asked.together.records
    assert (whole["settings"], whole["diverged"], whole["n"], whole["other_n"]) == (2, 6, 20, 20)
    rates = [0.5 if seed < 6 else 0.0 for seed in range(10)]  # of the two settings, by seed
    low, high = stats.ttest_1samp(rates, 0).confidence_interval(0.95)
    found = [float(whole[f"rate_difference{end}"]) for end in ("", "_low", "_high")]
    assert found == pytest.approx((0.3, low, high), rel=1e-3)
    assert whole["pairs"] == 14
    centre, spread = statistics.mean(means), statistics.stdev(means) / math.sqrt(10)
    expected = (centre, centre - 2.2622 * spread, centre + 2.2622 * spread)
    found = [float(whole[f"paired_difference{end}"]) for end in ("", "_low", "_high")]
    assert found == pytest.approx(expected, rel=1e-2)
    assert asked.together.rows[0][-1].text == "diverges more often, ends higher"


def test_settings_that_diverge_together_are_no_more_evidence_than_one():
    rng = random.Random(0)
    said = []
    for _ in range(300):  # no difference: on either side a seed diverges with the same chance, in all settings
        dead = [[rng.random() < 0.3 for _ in range(10)] for _ in range(2)]
        pair = tuple(evidence.Group(tuple(_ended(seed, dies) for seed, dies in enumerate(side))) for side in dead)
        gap = questions.Comparison([pair] * 8).gap
        said.append(gap.low > 0 or gap.high < 0)
    assert stats.binomtest(sum(said), len(said), 0.05, alternative="greater").pvalue > 0.001


def test_without_any_divergence_many_settings_know_no_more_than_their_seeds():
    pair = tuple(evidence.Group(tuple(_ended(seed, False) for seed in range(10))) for _ in range(2))
    _, high = stats.binomtest(0, 10).proportion_ci(method="wilson")
    assert questions.Comparison([pair] * 8).gap == pytest.approx((0.0, -high, high))


def _ended(seed: int, dies: bool) -> digest.Run:
    status = "diverged" if dies else "done"
    return digest.Run("permuted-digits", "", {"seed": seed, "tasks": 1}, {}, status, 0 if dies else None, 1, 1, {})


def test_a_report_refuses_to_overwrite_a_digest_that_it_was_not_given(tmp_path, capsys):
    write_run(tmp_path / "old", tasks=8)
    write_assay(tmp_path / "old", "mlp", "relu", 0, RHO, [0, 30])
    write_run(tmp_path / "old", tasks=8, seed=1)
    write_run(tmp_path / "new", tasks=8)
    out = tmp_path / "out"
    report([tmp_path / "old"], out)
    before = {path: path.read_bytes() for path in out.rglob("*.*")}
    assert cli.main(["report", str(tmp_path / "new"), "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert "digest.jsonl has 2 runs" in said and f"give {out} as an input too" in said
    assert {path: path.read_bytes() for path in out.rglob("*.*")} == before
    report([tmp_path / "new", out], out)
    assert len(digest.collect([out]).runs) == 3 and len(digest.collect([out]).assays) == 1


def test_pictures_and_tables_of_an_earlier_report_go_and_the_files_of_others_stay(tmp_path):
    write_run(tmp_path / "runs", tasks=8)
    old, new = tmp_path / "out" / "figures" / "permuted-digits-inside.svg", tmp_path / "out" / "tables" / "runs.md"
    report([tmp_path / "runs"], tmp_path / "out", "yes")
    assert old.exists() and new.exists()
    mine = tmp_path / "out" / "figures" / "mine.png"
    mine.write_bytes(b"")
    (tmp_path / "out" / "digest.jsonl").unlink()
    write_assay(tmp_path / "assays", "mlp", "relu", 0, RHO, [0, 30])
    report([tmp_path / "assays"], tmp_path / "out")
    assert mine.exists() and not old.exists() and not new.exists()
    assert (tmp_path / "out" / "figures" / "fig2-shock.svg").exists()


def test_runs_that_all_diverged_are_not_called_missing(tmp_path):
    for method in ("backprop", "gxd_paper"):
        for seed in range(2):
            write_run(tmp_path / "runs", method=method, activation="silu", seed=seed, diverged_at=0)
    write_run(tmp_path / "runs", method="gxd_paper", activation="tanh")
    page = report([tmp_path / "runs"], tmp_path / "out").read_text()
    assert "GXD (paper), SiLU: all 2 runs diverged (after task 0, 0)." in page
    figure = page[page.index('id="permuted-digits-fig3-activations"') :]
    figure = figure[: figure.index("</figure>")]
    assert "--method contribution --activation silu" in figure and "--method gxd_paper --activation silu" not in figure
    panels = panels_of(tmp_path / "runs")
    (picture,) = [
        one
        for one in figures.stream_figures("permuted-digits", {("silu", False): panels["silu", False]})
        if one.name.endswith("app-gxi-gradient")
    ]
    assert picture.drawn is None
    found = digest.collect([tmp_path / "runs"])
    said = provenance.missing(found, {"permuted-digits": panels}, {}, [picture])
    assert not any(picture.title in line for line in said)


def test_where_backprop_always_diverged_there_is_nothing_to_compare_with_and_nothing_missing(tmp_path):
    for method in ("backprop", "contribution", "mc_adaptable_contribution", "gxd_paper"):
        dies = {"diverged_at": 0} if method == "backprop" else {}
        write_run(tmp_path, "cifar100", method=method, tasks=20, epochs=1, **dies)
    relative, absolute = figures.cifar_figures(panels_of(tmp_path, "cifar100"))
    assert relative.drawn is None and absolute.drawn is not None
    for picture in (relative, absolute):
        assert picture.dead == ["Backprop, ReLU: the only run diverged (after task 0)."] and not picture.missing


def test_an_assay_that_diverged_is_named_wherever_it_is_averaged(tmp_path):
    for seed in range(3):
        directory = write_assay(tmp_path / "runs", "mlp", "relu", seed, RHO, [0, 5] if seed == 2 else [0, 5, 30])
    (directory / "status.json").write_text(json.dumps({"status": "diverged", "task": 7, "seconds": 1.0}))
    out = report([tmp_path / "runs"], tmp_path / "out").parent
    named = "MLP ReLU, seed 2, diverged after checkpoint 5"
    for name in ("spearman", "spearman-variants", "shock"):
        assert named in (out / "tables" / f"{name}.md").read_text()
    assert "1 diverged before the end" in (out / "tables" / "verdicts-detail.md").read_text()
    assert f"Not complete: assay of {named}" in (out / "index.html").read_text()


# --- verdicts ---------------------------------------------------------------------------------------------------------


def ruling(found, claim, place, arena="permuted-digits"):
    (one,) = [v for v in found if v.claim.startswith(claim) and v.place == place and v.arena == arena]
    return one


def verdict(*what):
    return ruling(*what).result


def test_verdicts_follow_from_the_numbers(world):
    found = digest.collect([world[0]])
    panels = {name: panels_of(world[0], name) for name in paper.EXPERIMENTS}
    judged = verdicts.verdicts(evidence.assay_columns(found.assays), panels)
    assert verdict(judged, "GXD predicts", "MLP SiLU", "assay") == verdicts.CONFIRMED
    assert verdict(judged, "GXD keeps its plasticity", "tanh") == verdicts.CONFIRMED
    assert verdict(judged, "GXD keeps its plasticity", "SiLU") == verdicts.REFUTED  # one seed diverged
    assert verdict(judged, "GXD ends higher than Contribution", "tanh") == verdicts.CONFIRMED
    assert verdict(judged, "Contribution loses", "SiLU") == verdicts.CONFIRMED
    assert verdict(judged, "With ReLU, loss gradient ends", "ReLU") == verdicts.CONFIRMED
    assert verdict(judged, "GXD keeps", "tanh", "permuted-mnist") == verdicts.UNTESTED  # no runs


def test_a_claim_that_the_numbers_contradict_is_not_confirmed(tmp_path):
    rho = {**RHO, "gxd": 0.5, "contribution": 0.9}
    for seed in range(3):
        write_assay(tmp_path, "mlp", "relu", seed, rho, [0, 30])
        write_run(tmp_path, method="backprop", activation="silu", last=0.3, seed=seed)
        write_run(tmp_path, method="gxd_paper", activation="silu", last=0.6, seed=seed)
        write_run(tmp_path, method="contribution", activation="silu", last=0.9, seed=seed)
    columns = evidence.assay_columns(digest.collect([tmp_path]).assays)
    judged = verdicts.verdicts(columns, {"permuted-digits": panels_of(tmp_path)})
    assert verdict(judged, "GXD predicts", "MLP ReLU", "assay") == verdicts.REFUTED
    assert verdict(judged, "GXD ends higher than Contribution", "SiLU") == verdicts.REFUTED
    assert verdict(judged, "GXD keeps its plasticity", "SiLU") == verdicts.REFUTED
    assert verdict(judged, "Contribution loses", "SiLU") == verdicts.REFUTED


def test_nothing_is_claimed_where_backprop_kept_its_plasticity(tmp_path):
    for seed in range(3):
        for method in ("backprop", "gxd_paper", "contribution"):
            write_run(tmp_path, method=method, activation="silu", seed=seed, noise=0.02)
    judged = verdicts.verdicts({}, {"permuted-digits": panels_of(tmp_path)})
    assert verdict(judged, "GXD keeps its plasticity", "SiLU") == verdicts.UNTESTED
    assert verdict(judged, "GXD ends higher than Contribution", "SiLU") == verdicts.UNTESTED


def judge(root: Path):
    return verdicts.verdicts({}, {"permuted-digits": panels_of(root)})


def write_lasts(root: Path, method: str, lasts: list[float | None], **values: object) -> None:
    """One run per seed, from 90 % (or ``first``) to the accuracy given; None: it diverged."""
    for seed, last in enumerate(lasts):
        at = {"activation": "silu", "first": 0.9, **values}
        dies = {"diverged_at": 150} if last is None else {"last": last}
        write_run(root, method=method, seed=seed, noise=0.0, **{**at, **dies})


def test_noise_does_not_confirm_that_plasticity_was_kept_or_lost(tmp_path):
    write_lasts(tmp_path, "backprop", [0.1, 0.1])
    write_lasts(tmp_path, "gxd_paper", [0.9, 0.1])
    write_lasts(tmp_path, "contribution", [0.9, 0.1])
    judged = judge(tmp_path)
    assert verdict(judged, "GXD keeps its plasticity", "SiLU") == verdicts.OPEN
    assert verdict(judged, "Contribution loses", "SiLU") == verdicts.OPEN


@pytest.mark.parametrize("lasts", [[0.83, 0.87], [0.80, 0.81, 0.86], [0.80, 0.85, 0.86, 0.82, 0.81]])
def test_a_difference_is_as_clear_as_so_few_seeds_can_make_it(tmp_path, lasts):
    write_lasts(tmp_path, "backprop", [0.3] * len(lasts))
    write_lasts(tmp_path, "gxd_paper", lasts)
    write_lasts(tmp_path, "contribution", [0.79] * len(lasts))
    panel = panels_of(tmp_path)["silu", False]
    p = stats.ttest_rel(*(list(panel[name].finals().values()) for name in ("gxd_paper", "contribution"))).pvalue
    wanted = verdicts.CONFIRMED if p < 0.05 else verdicts.REFUTED
    assert verdict(judge(tmp_path), "GXD ends higher than Contribution", "SiLU") == wanted
    lost = stats.ttest_1samp([0.9 - last for last in lasts], 0.01, alternative="greater").pvalue  # 2.5 % on a side
    wanted = verdicts.CONFIRMED if lost < 0.025 else verdicts.OPEN
    write_lasts(tmp_path / "more", "contribution", lasts, activation="leaky_relu")
    assert verdict(judge(tmp_path / "more"), "Contribution loses", "LeakyReLU") == wanted


def test_many_checkpoints_of_two_seeds_are_two_samples(tmp_path):
    for seed, rho in enumerate((0.81, 0.95)):  # far above the next, .80, by chance or not
        write_assay(tmp_path, "mlp", "relu", seed, {**RHO, "gxd": rho}, [0, 5, 10, 15, 20, 25, 30])
    columns = evidence.assay_columns(digest.collect([tmp_path]).assays)
    samples = [columns["mlp", "relu"].spearman(name, "l1") for name in ("gxd", "gxi")]
    by_seed = [[statistics.mean(v for (s, _), v in one.items() if s == seed) for seed in (0, 1)] for one in samples]
    assert stats.ttest_rel(*by_seed).pvalue > 0.05
    assert verdict(verdicts.verdicts(columns, {}), "GXD predicts", "MLP ReLU", "assay") == verdicts.REFUTED
    assert verdicts._paired(*samples).n == 2


def test_a_method_at_chance_has_kept_nothing(tmp_path):
    write_lasts(tmp_path, "backprop", [0.1, 0.1])
    write_lasts(tmp_path, "gxd_paper", [0.1, 0.1], first=0.1)
    judged = judge(tmp_path)
    assert verdict(judged, "GXD keeps its plasticity", "SiLU") == verdicts.OPEN
    assert "chance" in ruling(judged, "GXD keeps its plasticity", "SiLU").evidence


def test_a_noisy_backprop_leaves_something_to_rescue(tmp_path):
    write_lasts(tmp_path, "backprop", [0.9, 0.1])
    write_lasts(tmp_path, "gxd_paper", [0.9, 0.905])
    assert verdict(judge(tmp_path), "GXD keeps its plasticity", "SiLU") == verdicts.CONFIRMED


def test_noise_does_not_confirm_that_one_method_is_as_good_as_another(tmp_path):
    write_lasts(tmp_path, "contribution", [0.9, 0.9], activation="relu")
    write_lasts(tmp_path, "gxd_paper", [0.9, 0.5], activation="relu")
    assert verdict(judge(tmp_path), "With ReLU, GXD ends as high", "ReLU") == verdicts.OPEN


def test_one_divergence_in_two_seeds_decides_nothing(tmp_path):
    write_lasts(tmp_path, "backprop", [0.1, 0.1])
    write_lasts(tmp_path, "gxd_paper", [0.1, 0.1], first=0.1)
    write_lasts(tmp_path, "contribution", [0.9, None])
    assert verdict(judge(tmp_path), "GXD ends higher than Contribution", "SiLU") == verdicts.OPEN


def test_two_methods_that_always_diverge_are_not_compared(tmp_path):
    write_lasts(tmp_path, "gxd_paper", [None, None])
    write_lasts(tmp_path, "contribution", [None, None])
    assert verdict(judge(tmp_path), "GXD ends higher than Contribution", "SiLU") == verdicts.OPEN


def test_a_clear_difference_in_divergence_decides_unless_the_survivors_contradict(tmp_path):
    write_lasts(tmp_path / "a", "gxd_paper", [0.9] * 5)
    write_lasts(tmp_path / "a", "contribution", [None] * 5)
    assert verdict(judge(tmp_path / "a"), "GXD ends higher than Contribution", "SiLU") == verdicts.CONFIRMED
    write_lasts(tmp_path / "b", "gxd_paper", [0.5] * 5)
    write_lasts(tmp_path / "b", "contribution", [0.9, *[None] * 4])
    assert verdict(judge(tmp_path / "b"), "GXD ends higher than Contribution", "SiLU") == verdicts.OPEN
    write_lasts(tmp_path / "c", "gxd_paper", [None] * 5)
    write_lasts(tmp_path / "c", "contribution", [0.9] * 5)
    assert verdict(judge(tmp_path / "c"), "GXD ends higher than Contribution", "SiLU") == verdicts.REFUTED


# --- the demo ---------------------------------------------------------------------------------------------------------


def test_the_demo_page_says_what_its_own_runs_did(tmp_path):
    lasts = {"backprop": 0.3, "contribution": 0.8, "gxd_paper": 0.9}
    runs = [write_run(tmp_path, method=m, last=v, noise=0.0, tasks=80, activation="silu") for m, v in lasts.items()]
    runs.append(write_run(tmp_path, method="gxd_sketch", tasks=80, activation="silu", diverged_at=30))
    page = demo_page(runs, tmp_path / "demo")
    text = page.read_text()
    assert "Backprop falls from 83 % to 38 %" in text and "GXD (paper) holds at 90 %" in text
    assert "GXD sketch (ours) (1 of 1 runs diverged)" in text
    assert (tmp_path / "demo" / "demo.png").read_bytes().startswith(b"\x89PNG") and "<svg" in text
    assert "tasks, one seed." in text and "seeds, shaded" not in text  # the caption says how many
    assert "loses its plasticity" in text and not re.search(r'(src|href)="(https?:)?//', text)
