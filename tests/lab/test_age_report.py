"""The page of the age study: settings by seed, pairs, choices, one figure."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from scipy import stats

from gxd.lab.errors import UserError
from gxd.lab.experiments import experiment
from gxd.lab.grid import SWEEPS, load
from gxd.lab.report import age, age_figure, age_results, age_tables, digest, style
from gxd.lab.report.age_results import CHOOSING, Result, Setting, Stream
from gxd.lab.report.age_results import results as by_setting

BY_AGE = {"ranking": "age", "exponent": 1.0}
TASKS = 16  # an eighth of it is two tasks
DIGITS = Stream("permuted-digits", TASKS)


def write(root: Path, accuracy: float, *, stream: str = "permuted-digits", status: str = "done", **values: Any) -> None:
    """A run that learns nothing but the last eighth of its tasks, those with ``accuracy`` on average."""
    settings = {"tasks": TASKS, "activation": "tanh", "rate": 1e-3, **values}
    config = experiment(stream).from_dict(settings).resolved()
    directory = config.run_directory(root)
    directory.mkdir(parents=True)
    last = config.tasks // 8
    curve = [0.1] * (config.tasks - last) + [accuracy - 0.01, accuracy + 0.01] * (last // 2)
    resets = config.method != "backprop"
    lines = [
        {
            "task": n,
            config.metric: value,
            "churn": 0.9 if resets else None,
            "median_age_at_reset": 120 if resets else None,
        }
        for n, value in enumerate(curve if status == "done" else curve[:5])
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "config.json").write_text(json.dumps({"experiment": stream, "config": config.settings()}))
    (directory / "status.json").write_text(json.dumps({"status": status, "task": len(lines), "seconds": 36.0}))


def results(root: Path) -> dict[Setting, dict[int, Result]]:
    return by_setting(digest.collect([root]).runs)


def only(table: Any) -> dict[str, Any]:
    (record,) = table.records
    return dict(record)


def test_a_setting_has_the_mean_of_the_last_eighth_with_its_t_interval_and_the_choosing_seeds_are_left_out(
    tmp_path: Path,
) -> None:
    values = [0.8, 0.84, 0.91]
    for seed, value in enumerate(values):
        write(tmp_path, value, method="gxd", seed=seed)
    write(tmp_path, 0.2, method="gxd", seed=CHOOSING)
    record = only(age_tables.settings_table(results(tmp_path)))
    low, high = stats.t.interval(0.95, 2, fmean(values), stdev(values) / 3**0.5)
    assert float(record["accuracy"]) == pytest.approx(fmean(values), abs=1e-4)
    assert (float(record["accuracy_low"]), float(record["accuracy_high"])) == pytest.approx((low, high), abs=1e-4)
    assert (float(record["churn"]), float(record["age_at_reset"]), record["seeds"]) == (0.9, 120, 3)


def test_a_run_that_diverged_counts_as_one_that_has_learned_nothing_and_one_under_way_not_at_all(
    tmp_path: Path,
) -> None:
    write(tmp_path, 0.9, method="gxd", seed=0)
    write(tmp_path, 0.9, method="gxd", seed=1, status="diverged")
    write(tmp_path, 0.9, method="gxd", seed=2, status="running")
    record = only(age_tables.settings_table(results(tmp_path)))
    assert float(record["accuracy"]) == pytest.approx((0.9 + 0.1) / 2, abs=1e-4)
    assert (record["seeds"], record["diverged"]) == (2, 1)


def test_age_is_compared_with_absolute_in_the_same_setting_over_common_seeds(tmp_path: Path) -> None:
    ours, theirs = {0: 0.92, 1: 0.93, 2: 0.95, 5: 0.1}, {0: 0.90, 1: 0.90, 2: 0.91, 6: 0.1}
    for by_seed, options in ((ours, BY_AGE), (theirs, {})):
        for seed, value in by_seed.items():
            write(tmp_path, value, method="gxd", seed=seed, options=options)
    write(tmp_path, 0.5, method="gxd", seed=0, maturity=1000)  # another setting
    table = age_tables.against_paper(results(tmp_path))
    gaps = [ours[seed] - theirs[seed] for seed in (0, 1, 2)]
    low, high = stats.t.interval(0.95, 2, fmean(gaps), stats.sem(gaps))
    record = only(table)
    assert float(record["difference"]) == pytest.approx(fmean(gaps), abs=1e-4)
    assert float(record["difference_low"]) == pytest.approx(low, abs=1e-4)
    assert float(record["difference_high"]) == pytest.approx(high, abs=1e-4)
    assert (record["pairs"], record["verdict"]) == (3, "better")
    assert "1 comparisons 1 better, 0 worse, 0 undecided" in age_tables.tally(table)


def test_a_maturity_of_c_over_the_rate_is_compared_with_age_at_the_shortest_maturity_and_the_same_rate(
    tmp_path: Path,
) -> None:
    for seed, rate in product((0, 1), (1e-3, 1e-4)):
        write(tmp_path, 0.80 + seed / 50, method="gxd", seed=seed, rate=rate, maturity=round(1 / rate))
        write(tmp_path, 0.90 + seed / 50, method="gxd", seed=seed, rate=rate, options=BY_AGE)
        write(tmp_path, 0.70, method="gxd", seed=seed, rate=rate)
    table = age_tables.by_maturity(results(tmp_path))
    assert [(record["maturity"], record["rate"]) for record in table.records] == [(1000, 1e-3), (10_000, 1e-4)]
    assert all(float(record["difference"]) == pytest.approx(-0.1, abs=1e-4) for record in table.records)
    assert all("c = 1," in row[3].text for row in table.rows)


def test_a_rule_gains_the_mean_over_utilities_and_networks_seed_by_seed_and_random_has_no_part_in_it(
    tmp_path: Path,
) -> None:
    gains: dict[tuple[str, str], list[float]] = {
        ("gxd", "tanh"): [0.01, 0.03, 0.02],
        ("contribution", "tanh"): [0.05, 0.09, 0.04],
        ("gxd", "relu"): [-0.02, -0.01, -0.06],
        ("random", "tanh"): [0.5, 0.5, 0.5],
    }
    for (method, activation), by_seed in gains.items():
        for seed, gain in enumerate(by_seed):
            both = {"method": method, "activation": activation, "seed": seed}
            write(tmp_path, 0.3 + seed / 10, **both)
            write(tmp_path, 0.3 + seed / 10 + gain, maturity=1000, **both)
    write(tmp_path, 0.9, method="gxd", seed=7, maturity=1000)  # without a partner
    records = {record["activation"]: record for record in age_tables.by_rule(results(tmp_path)).records}
    tanh = [0.03, 0.06, 0.03]
    expected = {"tanh": tanh, "relu": gains["gxd", "relu"], "all": [0.005, 0.025, -0.015]}
    for name, values in expected.items():
        low, high = stats.t.interval(0.95, 2, fmean(values), stats.sem(values))
        found = [float(records[name][key]) for key in ("gain", "gain_low", "gain_high")]
        assert found == pytest.approx([fmean(values), low, high], abs=1e-4), name
        assert (records[name]["maturity"], records[name]["seeds"]) == (1000, 3)


def tiny(panel: str, method: str, exponent: float, by_seed: dict[int, float]) -> dict[Setting, dict[int, Result]]:
    setting = Setting(DIGITS, (panel, False), method, exponent, 100, 1e-3)
    return {setting: {seed: Result(accuracy, 0.5, 100.0, False) for seed, accuracy in by_seed.items()}}


def test_while_a_sweep_is_under_way_a_rule_is_judged_on_the_seeds_that_all_utilities_have() -> None:
    gain = {"contribution": 0.1, "gxd": -0.1}  # none on average, on every seed
    over = {("relu", "contribution"): 4, ("relu", "gxd"): 3, ("tanh", "contribution"): 2, ("tanh", "gxd"): 2}
    over |= {("silu", "contribution"): 2, ("silu", "gxd"): 1}  # has only begun
    found: dict[Setting, dict[int, Result]] = {}
    for (panel, method), seeds in over.items():
        levels = {seed: 0.5 + seed**2 / 1000 for seed in range(4)}
        found |= tiny(panel, method, 0.0, levels)
        found |= tiny(panel, method, 1.0, {seed: levels[seed] + gain[method] for seed in range(seeds)})
    table = age_tables.by_rule(found)
    seen = {record["activation"]: (float(record["gain"]), record["seeds"]) for record in table.records}
    expected = {"relu": (0, 3), "silu": (0, 1), "tanh": (0, 2), "all": (0, 2)}
    assert seen.keys() == expected.keys()
    assert all(seen[name] == pytest.approx(expected[name], abs=1e-9) for name in expected)
    (row,) = table.rows
    notes = dict(zip(table.columns, (cell.note for cell in row), strict=True))
    assert (notes["ReLU"], notes["SiLU"], notes["All"]) == ("n = 3", "n = 1", "ReLU, tanh; n = 2")


def test_settings_are_chosen_on_seeds_that_all_of_them_have() -> None:
    easy, hard = CHOOSING + 1, CHOOSING
    found = tiny("relu", "gxd", 1.0, {hard: 0.80, easy: 0.90, 0: 0.85})  # the better one where both are
    other = tiny("relu", "gxd", 1.0, {easy: 0.88, 0: 0.70})
    found |= {setting._replace(rate=1e-4): by_seed for setting, by_seed in other.items()}
    assert [record["rate"] for record in age_tables.chosen_table(found).records] == [1e-3]
    for by_seed in found.values():
        by_seed.pop(easy)
    assert not age_tables.chosen_table(found).rows


def test_the_overview_has_a_row_for_every_utility_and_rule_and_a_column_for_every_network(tmp_path: Path) -> None:
    for seed, value in enumerate((0.8, 0.9)):
        write(tmp_path, value, method="gxd", seed=seed)
        write(tmp_path, value - 0.2, method="backprop", seed=seed)
    write(tmp_path, 0.7, method="gxd", seed=0, activation="relu", options=BY_AGE)
    write(tmp_path, 0.1, method="gxd", seed=0, rate=1e-4)  # of another rate
    table = age_tables.overview(results(tmp_path), DIGITS, 1e-3)
    assert table.columns == ["Utility", "Rule", "ReLU", "tanh", "Seeds"]
    assert [[(cell.text, cell.note) for cell in row[1:4]] for row in table.rows] == [
        [("", ""), ("–", ""), ("65.0 ± 63.5", "")],
        [("paper's", ""), ("–", ""), ("85.0 ± 63.5", "churn 90")],
        [("age, exponent 1", ""), ("70.0", "churn 90"), ("–", "")],
    ]


def test_settings_are_chosen_on_other_seeds_than_those_that_are_reported(tmp_path: Path) -> None:
    write(tmp_path, 0.95, method="gxd", seed=0, maturity=100)  # the best where it is reported ...
    write(tmp_path, 0.70, method="gxd", seed=0, maturity=1000)
    write(tmp_path, 0.60, method="gxd", seed=100, maturity=100)
    assert age_tables.chosen_table(results(tmp_path)).rows[1:] == []  # not all of "any maturity" has been tried
    write(tmp_path, 0.65, method="gxd", seed=100, maturity=1000)  # ... not where it is chosen
    chosen = {record["rule"]: record for record in age_tables.chosen_table(results(tmp_path)).records}
    assert float(chosen["absolute, any maturity"]["accuracy"]) == pytest.approx(0.7, abs=1e-4)
    assert float(chosen["absolute, maturity 100"]["accuracy"]) == pytest.approx(0.95, abs=1e-4)


def test_the_page_has_a_figure_of_each_stream_and_rate_and_the_tables_and_needs_no_network(tmp_path: Path) -> None:
    methods: list[dict[str, Any]] = [{"method": "backprop"}, {"method": "random"}, {"method": "gxd"}]
    for stream, one, seed in product(("permuted-digits", "permuted-mnist-small"), methods, (0, 1)):
        write(tmp_path / "runs", 0.8 + seed / 100, stream=stream, seed=seed, **one)
    write(tmp_path / "runs", 0.9, method="gxd", options=BY_AGE, seed=0)
    write(tmp_path / "runs", 0.9, method="gxd", rate=1e-4, seed=0)
    text = age.write([tmp_path / "runs"], tmp_path / "out").read_text()
    pictures = {file.name for file in (tmp_path / "out").glob("*.png")}
    digits, mnist = "age-permuted-digits-16-tasks-rate", "age-permuted-mnist-small-16-tasks-rate"
    assert pictures == {f"{digits}-0.001.png", f"{digits}-0.0001.png", f"{mnist}-0.001.png"}
    assert (tmp_path / "out" / "age-settings.csv").read_text().count("\n") == 9
    assert "14 runs, 0.1 hours" in text and not re.search(r'(src|href)="(https?:)?//', text)


def test_a_task_without_resets_has_no_weight_in_churn_and_age() -> None:
    resets, churn, ages = [5.0] * 14 + [30.0, 0.0], [0.5] * 14 + [0.8, math.nan], [10.0] * 14 + [150.0, math.nan]
    config = {"activation": "relu", "method": "gxd", "maturity": 100, "rate": 1e-4, "tasks": 32, "seed": 0}
    series = {"test_accuracy": (0.9,) * 32, "resets": (1.0,) * 16 + tuple(resets)}
    series |= {"churn": (0.1,) * 16 + tuple(churn), "median_age_at_reset": (1.0,) * 16 + tuple(ages)}
    run = digest.Run("permuted-digits", "key", config, {}, "done", None, 32, 1, series)
    (by_seed,) = by_setting([run]).values()
    last = list(zip(churn, ages, resets, strict=True))[-4:]  # an eighth
    total = sum(count for *_, count in last)
    assert by_seed[0].churn == pytest.approx(sum(c * count for c, _, count in last if count) / total)
    assert by_seed[0].age == pytest.approx(sum(a * count for _, a, count in last if count) / total)
    assert by_seed[0].accuracy == pytest.approx(0.9)


def of(*accuracies: float, age: float = 200.0, reach: float = math.nan) -> dict[int, Result]:
    return {seed: Result(value, 0.5, age, False, reach=reach) for seed, value in enumerate(accuracies)}


GXD = Setting(DIGITS, ("tanh", False), "gxd", 0.0, 100, 1e-3)


def test_the_figure_has_a_mark_for_every_rule() -> None:
    rules = [(0.0, 100), (0.25, 100), (0.5, 100), (1.0, 100), (0.0, 1000), (0.0, 500)]
    found = {GXD._replace(exponent=exponent, maturity=maturity): of(0.8, 0.81) for exponent, maturity in rules}
    figure = age_figure.picture(found, DIGITS, 1e-3).drawn
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words[:2] == ["backprop", "paper's rule"]
    assert {"age, exponent 0.25", "maturity 1000 = 1 / rate"} <= set(words)
    marks = [line.get_marker() for line in figure.axes[1].lines if len(line.get_xdata()) == 1]
    assert len(set(marks)) == len(marks) == len(words) - 2 == len(rules) - 1


def test_the_figure_shows_what_a_rule_gains_on_the_seeds_that_it_shares_with_the_papers() -> None:
    found = {
        GXD: of(0.60, 0.70),
        GXD._replace(maturity=1000): of(0.65, 0.79, 0.99),  # the last has no pair
        GXD._replace(maturity=1000, rate=1e-4): of(0.1, 0.1),  # of another rate
        GXD._replace(method="backprop", rate=0.0): of(0.50, 0.52),
    }
    above, below = age_figure.picture(found, DIGITS, 1e-3).drawn.axes
    (gain,) = [line for line in below.lines if line.get_marker() == "v"]
    assert gain.get_xdata()[0] == pytest.approx(7.0)
    assert [line.get_ydata()[0] for line in above.lines] == pytest.approx([65.0, 81.0, 51.0])


def test_accuracy_is_drawn_by_the_share_of_units_that_resets_reach_a_mark_for_every_rule() -> None:
    found = {
        GXD: of(0.60, 0.70, reach=0.25),
        GXD._replace(exponent=1.0): {
            **of(0.8, 0.9, reach=0.75),
            2: Result(0.85, 0.5, 200.0, False),
        },  # not in the third
        GXD._replace(method="random"): of(0.75, 0.75, reach=1.0),
        GXD._replace(method="backprop", rate=0.0): of(0.50, 0.52),
    }
    above, below = age_figure.picture(found, DIGITS, 1e-3).drawn.axes
    points = [line for line in above.lines if len(line.get_xdata()) == 1]
    drawn = sorted((line.get_marker(), *(round(float(v), 9) for v in line.get_xydata()[0])) for line in points)
    assert drawn == [("D", 0.75, 85.0), ("o", 0.25, 65.0), ("o", 1.0, 75.0)]
    assert [line.get_ydata()[0] for line in above.lines if len(line.get_xdata()) == 2] == pytest.approx([51.0])
    assert [label.get_text() for label in below.get_yticklabels()] == ["GXD", "Random"]  # the key to the colours


def test_runs_from_before_reach_was_recorded_are_drawn_by_the_ages_that_are_reset(tmp_path: Path) -> None:
    found = {GXD: of(0.60, 0.70, age=110.0), GXD._replace(exponent=1.0): of(0.8, 0.9, age=400.0)}
    age_results.write_digest(found, tmp_path)
    digest_file = tmp_path / age_results.DIGEST
    digest_file.write_text(digest_file.read_text().replace(', "reach": null', ""))
    above, _ = age_figure.picture(age_results.collect([tmp_path]), DIGITS, 1e-3).drawn.axes
    assert sorted(float(line.get_xdata()[0]) for line in above.lines) == pytest.approx([110.0, 400.0])
    assert above.get_xscale() == "log" and "age at reset" in above.get_xlabel()


def test_every_gain_and_its_interval_lie_within_the_axes() -> None:
    found = {
        GXD: of(0.60, 0.62, 0.64),
        GXD._replace(exponent=1.0): of(0.91, 0.90, 0.97),
        GXD._replace(exponent=0.5): of(0.60, 0.40, 0.61),
    }
    _, below = age_figure.picture(found, DIGITS, 1e-3).drawn.axes
    ends = [x for collection in below.collections for segment in collection.get_segments() for x in segment[:, 0]]
    low, high = below.get_xlim()
    assert len(ends) == 4 and low < min(ends) < -35 and 30 < max(ends) < high


def test_the_forest_fills_a_mark_only_if_its_gain_stands_among_all_the_comparisons() -> None:
    seeds = range(5)
    clear, weak = ([0.70 + gain + noise * s for s in seeds] for gain, noise in ((0.10, 0.001), (0.001, 0.004)))
    found = {
        GXD: of(*[0.70] * 5),
        GXD._replace(exponent=0.5): of(*weak),
        GXD._replace(exponent=1.0): of(*clear),
        GXD._replace(maturity=1000, rate=1e-4): of(*clear),  # has nothing to be compared with
        GXD._replace(method="contribution"): of(*[0.70] * 5),
        GXD._replace(method="contribution", exponent=1.0): of(*clear),
    }
    low, _ = stats.t.interval(0.95, 4, fmean(weak) - 0.70, stdev(weak) / 5**0.5)
    corrected, _ = stats.t.interval(1 - 0.05 / 2, 4, fmean(weak) - 0.70, stdev(weak) / 5**0.5)
    assert corrected < 0 < low  # so the correction decides
    (forest,) = age_figure.forest(found, "gxd")
    (axes,) = forest.drawn.axes
    marks = {line.get_marker(): line for line in axes.lines if len(line.get_xdata()) == 1}
    assert set(marks) == {"D", "s"} and "for 2 comparisons" in forest.caption
    assert marks["D"].get_xdata()[0] == pytest.approx(100 * (fmean(weak) - 0.70))
    assert marks["D"].get_markerfacecolor() == style.PAPER
    assert marks["s"].get_markerfacecolor() == marks["s"].get_color()
    assert not age_figure.forest({GXD: of(0.7, 0.7)}, "gxd")


def test_the_forest_shows_nothing_where_nothing_was_compared() -> None:
    both, one = GXD._replace(rate=1e-4), GXD._replace(stream=Stream("permuted-mnist-small", 16))
    found = {s: of(0.7, 0.7) for s in (GXD, both, one)}
    found |= {s._replace(exponent=1.0): of(0.8, 0.9) for s in (GXD, both, one)}
    (forest,) = age_figure.forest(found, "gxd")
    assert [axes.get_visible() for axes in forest.drawn.axes] == [True, True, True, False]


def test_runs_that_were_trained_in_two_ways_are_not_averaged(tmp_path: Path) -> None:
    write(tmp_path, 0.8, method="gxd", seed=0)
    write(tmp_path, 0.9, method="gxd", seed=1, lr=0.05)
    with pytest.raises(UserError, match="learning rates"):
        results(tmp_path)


def test_runs_of_two_lengths_are_two_streams(tmp_path: Path) -> None:
    for seed, tasks in product((0, 1), (TASKS, 2 * TASKS)):
        write(tmp_path, 0.5 + tasks / 100, method="gxd", seed=seed, tasks=tasks)
    table = age_tables.settings_table(results(tmp_path))
    assert [row[0].text for row in table.rows] == ["Permuted digits, 16 tasks", "Permuted digits, 32 tasks"]
    assert [(record["tasks"], float(record["accuracy"])) for record in table.records] == [(16, 0.66), (32, 0.82)]


def test_a_study_that_has_only_begun_is_told_so(tmp_path: Path) -> None:
    write(tmp_path / "runs", 0.9, method="gxd", seed=0, status="running")
    with pytest.raises(UserError, match="no run below"):
        age.write([tmp_path / "runs"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "utilities", "networks"), [("age-digits", {1e-3: 5, 1e-4: 2}, 5), ("age-mnist", {1e-3: 2, 1e-4: 2}, 3)]
)
def test_the_sweeps_of_the_study_hold_every_pair_that_is_compared(
    name: str, utilities: dict[float, int], networks: int
) -> None:
    sweep = load(SWEEPS / f"{name}.toml")
    text = (SWEEPS / f"{name}.toml").read_text()
    assert f" {len(sweep.runs())} runs" in text
    configs = [sweep.config(cell, 0).resolved() for cell in sweep.cells]
    ranked = {(c.method, c.activation, c.layer_norm, c.maturity, c.rate): set() for c in configs}
    for c in configs:
        ranked[c.method, c.activation, c.layer_norm, c.maturity, c.rate].add(c.options)
    rules = {(), ("ranking=age",), ("exponent=1.0", "ranking=age")}
    for rate, many in utilities.items():
        here = [options for (*_, maturity, each), options in ranked.items() if (maturity, each) == (100, rate)]
        assert sum(options == rules for options in here) == many * networks
        for maturity in {1000, round(1 / rate)}:
            longer = [key for key in ranked if key[-2:] == (maturity, rate) and key[0] != "random"]
            assert len(longer) == many * networks
    assert {seed >= CHOOSING for seed in sweep.seeds} == {True, False}


def test_the_long_sweep_asks_the_question_of_the_short_one_about_the_same_runs_but_for_their_length() -> None:
    short, long = (load(SWEEPS / f"{name}.toml") for name in ("age-mnist", "age-mnist-long"))
    assert f" {len(long.runs())} runs" in (SWEEPS / "age-mnist-long.toml").read_text()
    settings = [{by_key(one.config(cell, 0), tasks=1) for cell in one.cells} for one in (short, long)]
    assert settings[1] < settings[0]
    ours = [long.config(cell, 0) for cell in long.cells]
    by_age = [config for config in ours if config.options]
    assert len(by_age) == (2 + 1) * 3 * 2 and all(replace(config, options=()) in ours for config in by_age)


def test_the_sweep_of_the_resnet_holds_the_papers_rule_beside_every_ranking_by_age() -> None:
    sweep = load(SWEEPS / "age-resnet.toml")
    assert f" {len(sweep.runs())} runs" in (SWEEPS / "age-resnet.toml").read_text()
    configs = [sweep.config(cell, 0) for cell in sweep.cells]
    by_age = [config for config in configs if config.options]
    assert len(by_age) == 3 and all(replace(config, options=()) in configs for config in by_age)
    assert {config.maturity for config in configs} == {age_results.PAPER_MATURITY}


def by_key(config: Any, **changes: Any) -> str:
    return str(replace(config, **changes).resolved().key())


def test_the_digest_alone_makes_the_same_page_and_goes_together_with_new_runs(tmp_path: Path) -> None:
    for seed, options in product((0, 1, CHOOSING), ({}, BY_AGE)):
        write(tmp_path / "runs", 0.8 + seed / 1000, method="gxd", options=options, seed=seed)
    write(tmp_path / "runs", 0.1, method="contribution", status="diverged", seed=0)
    age.write([tmp_path / "runs"], tmp_path / "one")
    age.write([tmp_path / "one"], tmp_path / "other")
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert "age.jsonl" in names
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes(), name
    write(tmp_path / "more", 0.9, method="gxd", seed=2)
    age.write([tmp_path / "one", tmp_path / "more"], tmp_path / "both")
    assert len((tmp_path / "both" / "age.jsonl").read_text().splitlines()) == 8
    with (tmp_path / "one" / "age.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(UserError, match=r"age\.jsonl is damaged \(line [0-9]+: it has no .*delete that line"):
        age.write([tmp_path / "one"], tmp_path / "other")


def test_accuracy_is_correlated_with_reach_and_churn_over_the_settings_without_random() -> None:
    came_to = {  # exponent -> accuracy, churn, reach
        0.0: (0.60, 0.9, 0.1),
        0.25: (0.80, 0.95, 0.5),
        0.5: (0.70, 0.2, 0.6),
        1.0: (0.90, 0.1, 1.0),
    }
    found: dict[Setting, dict[int, Result]] = {
        GXD._replace(exponent=exponent): {0: Result(accuracy, churn, 200.0, False, reach=reach)}
        for exponent, (accuracy, churn, reach) in came_to.items()
    }
    found[GXD._replace(method="random")] = {0: Result(0.1, 0.0, 200.0, False, reach=1.0)}
    found[GXD._replace(method="contribution")] = of(0.1)  # its reach is not known
    found[GXD._replace(method="backprop", rate=0.0)] = of(0.5)
    accuracies, churns, reaches = zip(*came_to.values(), strict=True)
    (record,) = age_tables.by_reach(found).records
    assert record["settings"] == 4
    assert record["reach"] == pytest.approx(stats.spearmanr(accuracies, reaches).statistic, abs=1e-3)
    assert record["churn"] == pytest.approx(stats.spearmanr(accuracies, churns).statistic, abs=1e-3)
    (row,) = age_tables.by_reach(found).rows
    assert [cell.text for cell in row][-2:] == ["10 to 100", "50.0"]
