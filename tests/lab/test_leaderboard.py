"""The leaderboard: equal budgets, numbers against a naive computation, resumes, methods that misbehave."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import gxd
from gxd.lab import methods, store, workers
from gxd.lab.errors import UserError
from gxd.lab.experiments import slow_regression
from gxd.lab.leaderboard import board as board_module
from gxd.lab.leaderboard import cli, command, records, work
from gxd.lab.leaderboard.board import Row, Standing, average_ranks
from gxd.lab.leaderboard.entries import Entry, entries
from gxd.lab.leaderboard.output import ranks_table
from gxd.lab.leaderboard.plan import Place
from gxd.lab.leaderboard.protocol import PROTOCOL, Protocol, Track
from gxd.lab.leaderboard.timing import time_ratios
from gxd.lab.progress import Board
from gxd.lab.report.tables import Cell
from gxd.lab.run import make_stream
from gxd.methods import registry

DIGITS = {"tasks": 20, "epochs": 1, "batch_size": 720, "width": 8, "depth": 1}
RATES = (0.1, 0.03, 0.3, 0.01, 0.06, 0.2)
SMALL = Protocol(
    0,
    (
        Track("digits", "permuted-digits", DIGITS, RATES, step=1.0),
        Track(
            "regression", "slow-regression", {"tasks": 2, "batch_size": 2, "compile": "no"}, RATES, clock=10, step=1.0
        ),
    ),
    trials=6,
    tuning_seeds=(100,),
    seeds=(0, 1, 2),
)
ENTRIES = ("backprop", "gxd_paper", "dash", "full_reset")
IN_PROCESSES = workers.run_all
RUN = ["run", "--entries", *ENTRIES]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    make_quick(monkeypatch)


def make_quick(patch):
    """Runs happen in this process, a bin of the regression is small, and times are not measured well."""
    patch.setattr(slow_regression, "PERIOD", 30)
    patch.setattr(slow_regression, "BIN", 60)
    patch.setattr(workers, "run_all", _here)
    patch.setattr(work, "time_ratios", partial(time_ratios, steps=2, rounds=3))


def _here(jobs, root, board, *, processes=None, files=()):
    outcomes = []
    for job in jobs:
        failure = workers.train_one(job.config, root, files=files)
        outcomes.append(workers.outcome_of(job, root) if failure is None else workers.failed(job, failure))
    return outcomes


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A board with four entries, complete."""
    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        out = tmp_path_factory.mktemp("board") / "out"
        assert command([*RUN, "--out", str(out)], SMALL) == 0
    return out


@pytest.fixture
def board(done, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(done, tmp_path / "board"))


@pytest.fixture
def own(tmp_path):
    """A file of the user's; what it registers is forgotten."""
    before = dict(registry._REGISTRY)
    file = tmp_path / "mine.py"

    def write(body, name="mine", extra=""):
        forget_files()
        file.write_text(
            "import gxd, torch\n"
            "class Mine(gxd.Method):\n"
            f"{body}\n"
            f"@gxd.register_method({name!r}, description='mine', inert={{}})\n"
            f"def mine(strength: float = 1.0): return Mine()\n{extra}\n"
        )
        return file

    yield write
    registry._REGISTRY.clear()
    registry._REGISTRY.update(before)
    forget_files()


def forget_files():
    """As in a new process: nothing has imported a file of the user's."""
    for name in [name for name in sys.modules if name.startswith("gxd_user_")]:
        del sys.modules[name]


def rows(out):
    with (out / "board.csv").open() as file:
        return {(row["stream"], row["method"]): row for row in csv.DictReader(file)}


def lines(out):
    """The digest, with the names that entries have on the board."""
    found = [json.loads(line) for line in (out / "digest.jsonl").read_text().splitlines()]
    return [{**line, "method": methods.shown(line["method"])} for line in found]


# --- budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("track", PROTOCOL.tracks, ids=lambda track: track.name)
def test_every_entry_has_the_same_number_of_different_trials(track):
    for name, entry in entries().items():
        if (track.name, name) != ("slow-regression", "dash"):  # which needs boundaries
            tried = entry.settings(PROTOCOL, track)
            assert len({track.config(values, 0).key() for values in tried}) == PROTOCOL.trials == 6, name


def test_the_committed_runs_are_those_of_the_entries_as_they_are_now():
    """Every trial of an entry that was on the board before is found by its key, and those of gxd as gxd_paper."""
    committed = Path(__file__).parents[2] / "results/leaderboard"
    known = records.read_digest(committed)
    before = ("gxd_paper", "gxd_mature", "contribution", "redo", "unit_reset", "l2")
    assert '"method": "gxd",' in (committed / "digest.jsonl").read_text()
    for place in work.places(PROTOCOL, [entries()[name] for name in before]):
        assert all(run.name in known for run in place.trials()), place.entry.name
        assert {known[run.name].method for run in place.trials()} <= set(before)
    assert {r.method for r in known.values()} <= set(entries()), "a method that left the board is in withdrawn.jsonl"


def test_the_names_in_files_are_those_of_before(done):
    digest = (done / "digest.jsonl").read_text().splitlines()
    assert {json.loads(line)["method"] for line in digest} == {"backprop", "gxd", "dash", "full_reset"}
    for name in ("times.json", "objections.json"):
        found = json.loads((done / name).read_text())
        assert set(found["digits"]) == {"backprop", "gxd", "dash", "full_reset"}
    assert {method for _, method in rows(done)} >= {"gxd_paper", "gxd"} and rows(done)["digits", "gxd_paper"]["rank"]
    assert not rows(done)["digits", "gxd"]["time_ratio"], "another rule, which was not run"


def test_who_is_told_the_boundaries_is_said(done):
    told = {method for (stream, method), row in rows(done).items() if stream == "digits" and row["told"] == "True"}
    assert told >= {"dash", "full_reset", "hare_and_tortoise", "hare_and_tortoise+gxd", "shrink_and_perturb"}
    assert not told & {"backprop", "gxd", "gxd_paper", "hare_and_tortoise_by_clock", "parseval+gxd", "redo"}
    assert not any(row["told"] == "True" for (stream, _), row in rows(done).items() if stream == "regression")
    head, line = [
        text for text in (done / "board.md").read_text().splitlines() if text.startswith(("| method", "| full"))
    ]
    assert (head.split(" | ")[1], line.split(" | ")[1]) == ("told", "yes")


def test_every_registered_method_is_an_entry():
    assert set(gxd.methods()) - set(entries()) == {"continual_backprop"}
    assert {"backprop", "contribution", "gxd_paper", "gxd_kl", "gxd_mature", "random"} <= set(entries())
    assert {"linear", "input_norm", "layer_norm", "crelu", "full_reset"} <= set(entries())


def test_settings_are_chosen_on_seeds_that_are_not_reported():
    assert len(PROTOCOL.seeds) >= 5
    assert not set(PROTOCOL.seeds) & set(PROTOCOL.tuning_seeds)


def test_a_run_spends_the_same_budget_on_every_entry(done):
    found = [line for line in lines(done) if line["stream"] == "digits"]
    for name in ENTRIES:
        mine = [line for line in found if line["method"] == name]
        assert sum(line["stage"] == "tuning" for line in mine) == 6
        assert sum(line["stage"] == "report" for line in mine) == 3
    assert not (done / "report" / "permuted-digits" / "seed100").exists()
    seeds = {stage: {path.name for path in (done / stage).glob("*/*/seed*")} for stage in ("tuning", "report")}
    assert seeds == {"tuning": {"seed100"}, "report": {"seed0", "seed1", "seed2"}}


def test_a_grid_that_is_not_a_sixth_part_is_refused():
    entry = Entry("mine", "", "l2", [{"strength": s} for s in (1.0, 2.0, 3.0, 4.0)])
    with pytest.raises(UserError, match="has 4 settings: give 1, 2, 3 or 6"):
        entry.settings(PROTOCOL, PROTOCOL.tracks[0])
    with pytest.raises(UserError, match="the same run"):
        replace(entry, grid=[{"strength": 1.0}] * 2).settings(PROTOCOL, PROTOCOL.tracks[0])


# --- numbers ----------------------------------------------------------------------------------------------------------


def naive(out, line):
    """Online accuracies of a run, from its metrics, whichever directory they are in."""
    for path in (out / line["stage"]).glob(f"*/*{line['key']}/seed{line['seed']}/metrics.jsonl"):
        return [json.loads(text) for text in path.read_text().splitlines()]
    raise AssertionError(line)


def test_the_numbers_are_those_of_a_naive_computation(done):
    reached = {}
    for name in ENTRIES:
        tuned = [line for line in lines(done) if (line["stream"], line["method"]) == ("digits", name)]
        means = {
            line["key"]: np.mean([task["online_accuracy"] for task in naive(done, line)])
            for line in tuned
            if line["stage"] == "tuning"
        }
        best = max(means, key=means.get)
        seeds = [line for line in tuned if line["stage"] == "report"]
        assert {line["key"] for line in seeds} == {best}
        runs = [[task["online_accuracy"] for task in naive(done, line)] for line in seeds]
        reached[name] = [np.mean(run) for run in runs]
        low, high = stats.t.interval(0.95, 2, np.mean(reached[name]), stats.sem(reached[name]))
        row = rows(done)["digits", name]
        assert float(row["mean"]) == pytest.approx(np.mean(reached[name]), abs=1e-5)
        assert (float(row["low"]), float(row["high"])) == pytest.approx((low, high), abs=1e-4)
        assert float(row["last_tenth"]) == pytest.approx(np.mean([run[-2:] for run in runs]), abs=1e-5)
        assert (int(row["seeds"]), float(row["diverged"])) == (3, 0)
    ranks = stats.rankdata([-np.mean(values) for values in reached.values()])
    assert [float(rows(done)["digits", name]["rank"]) for name in reached] == pytest.approx(list(ranks))
    gain = stats.ttest_rel(reached["gxd_paper"], reached["backprop"]).confidence_interval(0.95)
    row = rows(done)["digits", "gxd_paper"]
    assert (float(row["gain_low"]), float(row["gain_high"])) == pytest.approx(tuple(gain), abs=1e-4)


def test_the_ranks_have_the_gain_and_the_rank_on_every_stream_marked_where_the_interval_leaves_zero_out():
    digits, regression = SMALL.tracks
    rows = (
        Row("digits", "a", rank=1.0, gain=0.0271, gain_low=0.01, gain_high=0.04),
        Row("digits", "b", rank=2.5, gain=-0.05, gain_low=-0.06, gain_high=-0.04),
        Row("regression", "a", rank=2.0, gain=-0.0042, gain_low=-0.1, gain_high=0.1),
        Row("regression", "b", note="not on this stream: it has no boundaries"),
    )
    standings = (Standing("a", 2, 1.5, 1.0, 2.0, 2.0, 1, 0, True), Standing("b", 1, 2.5, 2.0, 3.0, 2.5, 0, 1, False))
    table = ranks_table(board_module.Board((digits, regression), rows, {}, standings))
    assert table.columns[4:6] == ["digits", "regression"]
    assert [row[4:6] for row in table.rows] == [
        [Cell("+2.7", "rank 1", "good"), Cell("-0.004", "rank 2")],
        [Cell("-5.0", "rank 2.5", "bad"), Cell("–")],
    ]


def test_of_a_regression_the_lowest_loss_is_the_best(done):
    found = [row for (stream, _), row in rows(done).items() if stream == "regression" and row["mean"]]
    assert len(found) == 3
    assert min(found, key=lambda row: float(row["mean"])) is min(found, key=lambda row: float(row["rank"]))


@pytest.mark.parametrize("higher", [True, False])
def test_equals_share_their_rank(higher):
    values = np.array([[0.3, 1.0], [0.1, math.inf], [0.3, math.inf], [0.2, 0.5]])
    expected = np.stack([stats.rankdata(-column if higher else column) for column in values.T], 1)
    assert np.array_equal(average_ranks(values, higher), expected)


def test_the_table_has_the_columns_that_others_rely_on(done):
    head = (done / "board.csv").read_text().splitlines()[0]
    assert head.startswith("stream,method,seeds,mean,low,high,diverged,time_ratio,")
    assert float(rows(done)["digits", "backprop"]["time_ratio"]) == 1
    assert float(rows(done)["digits", "gxd_paper"]["time_ratio"]) > 0


def test_a_method_that_a_stream_cannot_treat_has_a_row_that_says_why(done):
    row = rows(done)["regression", "dash"]
    assert row["mean"] == row["rank"] == ""
    assert "acts between tasks, which slow-regression does not have" in row["note"]
    full = [line for line in lines(done) if (line["stream"], line["method"]) == ("regression", "full_reset")]
    assert all("every=10" in line["setting"] for line in full)


def test_a_board_that_is_not_complete_says_what_is_missing(done):
    text = (done / "board.md").read_text()
    assert (
        "of 6 settings on seed 100, reported on 3 other seeds. NOT COMPLETE" in text
        and f"digits: {len(entries()) - len(ENTRIES)} entries are not complete" in text
    )
    assert rows(done)["digits", "l2"]["note"] == "missing: 6 of 6 tuning runs"
    assert set(rows(done)) == {(track.name, name) for track in SMALL.tracks for name in entries()}


def test_the_page_has_every_row_and_needs_nothing_else(done):
    page = (done / "board.html").read_text()
    for stream, method in rows(done):
        assert f"<span>{method}</span>" in page and stream in page
    assert page.count('class="sortable') == 1 + len(SMALL.tracks)
    assert "Learning curves of 4 entries on digits" in page
    assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page


# --- directories ------------------------------------------------------------------------------------------------------


def test_a_board_goes_on_where_it_stopped_and_counts_nothing_twice(board, monkeypatch, capsys):
    before, digest = rows(board), (board / "digest.jsonl").read_text()
    gone = next((board / "report").glob("permuted-digits/gxd*/seed1"))
    shutil.rmtree(gone)
    (board / "digest.jsonl").unlink()  # written when all runs are over
    trained = []
    monkeypatch.setattr(workers, "run_all", lambda jobs, *a, **k: trained.extend(jobs) or _here(jobs, *a, **k))
    assert command([*RUN, "--out", str(board)], SMALL) == 0
    assert [(job.config.method, job.config.seed) for job in trained] == [("gxd_paper", 1)]
    assert rows(board) == before
    drop = lambda text: [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in text.splitlines()]
    assert drop((board / "digest.jsonl").read_text()) == drop(digest)


def test_ranks_on_a_stream_that_is_under_way_do_not_count_for_those_over_all_streams(board):
    digest = [json.loads(line) for line in (board / "digest.jsonl").read_text().splitlines()]
    for stage in ("tuning", "report"):
        shutil.rmtree(board / stage)
    few = [r for r in digest if r["stream"] == "digits" or r["method"] in ("backprop", "gxd")]  # gxd_paper on disk
    (board / "digest.jsonl").write_text("".join(json.dumps(record) + "\n" for record in few))
    assert command(["show", str(board), "--write"], SMALL) == 0
    standings = list(csv.DictReader((board / "ranks.csv").read_text().splitlines()))
    assert {row["method"]: row["streams"] for row in standings} == dict.fromkeys(ENTRIES, "1")


def test_a_gain_on_a_stream_that_does_not_count_is_not_counted(board):
    digest = lines(board)
    for stage in ("tuning", "report"):
        shutil.rmtree(board / stage)
    few = [r for r in digest if r["stream"] == "digits" or r["method"] in ("backprop", "gxd_paper")]
    for record in few:
        if (record["stream"], record["stage"]) == ("regression", "report"):
            loss = (1 if record["method"] == "gxd_paper" else 2) + record["seed"] / 1000  # the better, on every seed
            record |= {"status": "done", "mean": loss, "last": loss}
    (board / "digest.jsonl").write_text("".join(json.dumps(record) + "\n" for record in few))
    assert command(["show", str(board), "--write"], SMALL) == 0
    found = rows(board)
    assert float(found["regression", "gxd_paper"]["gain_low"]) > 0
    for row in csv.DictReader((board / "ranks.csv").read_text().splitlines()):
        digits = found["digits", row["method"]]
        assert int(row["better"]) == (float(digits["gain_low"]) > 0), row["method"]
        assert int(row["worse"]) == (float(digits["gain_high"]) < 0), row["method"]


def test_a_copy_without_the_runs_goes_on_where_they_stopped(board, capsys):
    whole = (board / "board.csv").read_text()
    shutil.rmtree(board / "tuning")
    shutil.rmtree(board / "report")
    digest = (board / "digest.jsonl").read_text().splitlines(keepends=True)
    (board / "digest.jsonl").write_text("".join(digest[:-1]))
    capsys.readouterr()
    assert command([*RUN, "--out", str(board)], SMALL) == 0
    assert len(list(board.glob("*/**/status.json"))) == 1, "what the digest does not know"
    assert (board / "board.csv").read_text() == whole


def test_a_copy_without_the_runs_is_the_same_board(board, capsys):
    before = rows(board)
    for stage in ("tuning", "report"):
        shutil.rmtree(board / stage)
    assert command(["show", str(board), "--write"], SMALL) == 0
    assert rows(board) == before
    assert "| gxd_paper |" in capsys.readouterr().out


def test_without_a_checkout_the_board_that_came_with_gxd_is_shown_and_added_to_and_never_written_to(
    own, board, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(cli, "SHIPPED", board)
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    for stage in ("tuning", "report"):
        shutil.rmtree(board / stage)
    before = {path: path.stat().st_mtime_ns for path in [board, *board.iterdir()]}
    assert command(["show"], SMALL) == 0
    assert "| gxd_paper |" in capsys.readouterr().out and not list(empty.iterdir())
    assert command(["add", str(own(FINE)), "--streams", "digits"], SMALL) == 0
    assert "digits: mine is" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in [board, *board.iterdir()]} == before
    shutil.copytree(board, empty / "results" / "leaderboard")
    assert command(["show", "--write"], SMALL) == 0  # of a checkout, its own counts
    assert "results/leaderboard/board.html is the page" in capsys.readouterr().out
    monkeypatch.setattr(cli, "SHIPPED", tmp_path / "none")
    monkeypatch.setattr(cli, "CHECKOUT", board)  # of an editable install, elsewhere
    monkeypatch.chdir(tmp_path)
    assert command(["show"], SMALL) == 0
    assert "| gxd_paper |" in capsys.readouterr().out


def test_where_there_is_no_board_at_all_a_line_says_how_to_make_one(own, tmp_path, monkeypatch):
    for name in ("SHIPPED", "CHECKOUT"):
        monkeypatch.setattr(cli, name, tmp_path / "none")
    monkeypatch.chdir(tmp_path)
    for args in (["show"], ["add", str(own(FINE))]):
        with pytest.raises(UserError, match=r"no board in results/leaderboard.*gxd leaderboard run.*--board DIR"):
            command(args, SMALL)
    with pytest.raises(UserError, match=r"theirs\.py is not a Python file"):  # which comes first
        command(["add", "theirs.py"], SMALL)


def test_a_directory_of_another_protocol_is_refused_and_left_alone(board):
    other = replace(SMALL, seeds=(0, 1, 2, 3))
    before = {path: path.stat().st_mtime_ns for path in board.iterdir()}
    for args in (["show", str(board)], [*RUN, "--out", str(board)], ["run", "--estimate", "--out", str(board)]):
        with pytest.raises(UserError, match="is of another protocol"):
            command(args, other)
    assert {path: path.stat().st_mtime_ns for path in board.iterdir()} == before
    assert replace(SMALL, version=1).fingerprint() != SMALL.fingerprint() != other.fingerprint()


def test_a_directory_with_other_things_in_it_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="no leaderboard"):
        command([*RUN, "--out", str(tmp_path)], SMALL)
    with pytest.raises(UserError, match="no leaderboard"):
        command(["show", str(tmp_path / "nothing")], SMALL)


@pytest.mark.parametrize("damage", ['{"stage": "report"}', '{"stage": "rep', "[1]", '{"strange": 1}'])
def test_a_damaged_digest_is_an_error_that_names_the_line_without_which_the_run_is_made_again(board, damage):
    for stage in ("tuning", "report"):
        shutil.rmtree(board / stage)
    digest = (board / "digest.jsonl").read_text().splitlines()
    (board / "digest.jsonl").write_text("\n".join([*digest[:6], damage, *digest[7:]]) + "\n")
    with pytest.raises(
        UserError, match=r"digest\.jsonl is damaged \(line 7: .*: delete that line, and its run is made"
    ):
        command(["show", str(board)], SMALL)
    (board / "digest.jsonl").write_text("\n".join([*digest[:6], *digest[7:]]) + "\n")
    assert command([*RUN, "--out", str(board)], SMALL) == 0
    assert len(lines(board)) == len(digest)


@pytest.mark.parametrize("file", ["digest.jsonl", "times.json", "objections.json", "failures.json"])
def test_a_damaged_file_of_either_board_is_said_before_the_runs_and_not_after(own, board, tmp_path, monkeypatch, file):
    monkeypatch.setattr(work, "_do_track", lambda *_: pytest.fail("too late"))
    (board / file).write_text("{")
    with pytest.raises(UserError, match=re.escape(str(board / file))):
        command([*RUN, "--out", str(board)], SMALL)
    with pytest.raises(UserError, match=re.escape(str(board / file))):
        add(own(FINE), board, tmp_path)
    assert not (tmp_path / "mine").exists()


def test_to_show_a_board_writes_nothing(board, capsys):
    (board / "board.csv").unlink()
    before = {path: path.stat().st_mtime_ns for path in [board, *board.rglob("*")]}
    assert command(["show", str(board)], SMALL) == 0
    assert "| gxd_paper |" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in [board, *board.rglob("*")]} == before


def test_streams_are_listed_so_that_a_name_with_a_comma_is_one():
    with pytest.raises(UserError, match=r"There are permuted-digits, 'permuted-digits, tanh', random"):
        command(["run", "--streams", "foo"])


def test_what_another_process_writes_to_a_board_meanwhile_is_kept(board, monkeypatch):
    """As two of `gxd leaderboard run`, with other entries, at one directory."""

    def meanwhile(file, change, function):
        def changed(*args, **options):
            found = function(*args, **options)
            store.write_json(board / file, {**store.read_json(board / file), **change})
            return found

        return changed

    for path in board.glob("*/permuted-digits/gxd*"):
        shutil.rmtree(path)
    for file in ("digest.jsonl", "times.json"):
        (board / file).unlink()
    store.write_json(board / "times.json", {})
    change = {"elsewhere": {"theirs": 2.0}}
    monkeypatch.setattr(work, "time_ratios", meanwhile("times.json", change, work.time_ratios))
    change = {"elsewhere": {"theirs": "it cannot"}}
    monkeypatch.setattr(work, "objection", meanwhile("objections.json", change, work.objection))
    monkeypatch.setattr(workers, "run_all", meanwhile("failures.json", {"theirs": "it raised"}, _here))
    assert command(["run", "--entries", "gxd_paper", "--streams", "digits", "--out", str(board)], SMALL) == 0
    read = {name: json.loads((board / f"{name}.json").read_text()) for name in ("times", "objections", "failures")}
    assert read["times"]["elsewhere"] == {"theirs": 2.0} and read["times"]["digits"]["gxd"]
    assert read["objections"]["elsewhere"] == {"theirs": "it cannot"} and "gxd" in read["objections"]["digits"]
    assert read["failures"] == {"theirs": "it raised"}


def test_the_estimate_says_how_long_it_takes_and_does_nothing(tmp_path, board, capsys):
    assert command([*RUN, "--estimate", "--streams", "digits", "--out", str(tmp_path / "new")], SMALL) == 0
    # 4 entries x (6 trials on 1 seed + 3 seeds) = 36 runs of 20 tasks x 2 steps of 1 ms
    said = capsys.readouterr().out
    assert [word for line in said.splitlines()[2:3] for word in line.split()][:4] == ["digits", "4", "36", "36"]
    assert not (tmp_path / "new").exists()
    command([*RUN, "--estimate", "--out", str(board)], SMALL)
    assert "about 0.0 hours" in capsys.readouterr().out


def test_the_committed_protocol_takes_about_six_hours(capsys, tmp_path):
    assert command(["run", "--estimate", "--out", str(tmp_path / "new")]) == 0
    hours = float(capsys.readouterr().out.splitlines()[-1].split()[1])
    assert 4 < hours < 8


@pytest.mark.parametrize("args", [["--entries", "gdx"], ["--streams", "digit"], ["--workers", "0"]])
def test_a_wrong_name_or_number_is_one_line(args, tmp_path):
    with pytest.raises(UserError, match=r"unknown|must be"):
        command(["run", *args, "--out", str(tmp_path / "new")], SMALL)


# --- a user's own method ----------------------------------------------------------------------------------------------

FINE = "    def after_step(self, host, state):\n        return state"
RAISES = "    def after_step(self, host, state):\n        raise RuntimeError('no idea')"
LATER = (
    "    def init(self, host): return 0\n"
    "    def after_step(self, host, state):\n"
    "        if state > 30: raise RuntimeError('too late')\n"
    "        return state + 1"
)
NAN = (
    "    def after_step(self, host, state):\n"
    "        with torch.no_grad():\n"
    "            for one in host.trained(): one.parameter.fill_(float('nan'))\n"
    "        return state"
)
LR = FINE.replace("return", "host.optimizers[0].param_groups[0]['lr'] = 9.0; return")
SEEDS = FINE.replace("return", "torch.manual_seed(0); return")
FREEZES = FINE.replace("return", "[one.parameter.requires_grad_(False) for one in host.trained()]; return")
DTYPE = FINE.replace("return", "torch.set_default_dtype(torch.float64); return")
LATE = LATER.replace("raise RuntimeError('too late')", "{}")


def add(file, board, tmp_path, *args):
    return command(["add", str(file), "--board", str(board), "--out", str(tmp_path / "mine"), *args], SMALL)


def _as_before_files_were_named(_, out):
    own = json.loads((out / "own.json").read_text())
    (out / "own.json").write_text(json.dumps({name: about["version"] for name, about in own.items()}))


def test_a_method_that_does_nothing_ties_with_backprop(own, board, tmp_path, capsys):
    assert add(own(FINE), board, tmp_path, "--streams", "digits") == 0
    found = rows(tmp_path / "mine")
    mine, plain = found["digits", "mine"], found["digits", "backprop"]
    assert [mine[name] for name in ("mean", "low", "high", "rank")] == [
        plain[n] for n in ("mean", "low", "high", "rank")
    ]
    assert float(mine["gain"]) == 0 and mine["time_ratio"]
    assert f"digits: mine is {float(mine['rank']):g} of 5" in capsys.readouterr().out
    assert not (tmp_path / "mine" / "report" / "permuted-digits").joinpath("backprop").exists()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (RAISES, "it raises RuntimeError: no idea"),
        (LR, "it changes the learning rate or another setting of the optimizer, which a method may not"),
        (SEEDS, "it changes torch's global random state, which a method may not"),
        (FREEZES, "it changes requires_grad of parameters, which a method may not"),
        (DTYPE, "it changes torch's default dtype, which a method may not"),
        (
            "    def init(self, host): host.optimizers[0].param_groups[0]['lr'] = 0.02; return ()",
            "it changes the learning rate or another setting of the optimizer, which a method may not",
        ),
    ],
    ids=["raises", "learning rate", "seed", "freezes", "dtype", "in init"],
)
def test_a_method_that_misbehaves_is_a_row_that_says_so(own, board, tmp_path, capsys, body, why):
    assert add(own(body), board, tmp_path) == 1
    found = rows(tmp_path / "mine")
    assert found["digits", "mine"]["note"] == f"not on this stream: {why}"
    assert found["digits", "gxd_paper"]["rank"]
    assert why in capsys.readouterr().out


def test_a_method_that_raises_later_is_a_row_too_and_is_tried_again(own, board, tmp_path, capsys):
    file = own(LATER)
    assert add(file, board, tmp_path, "--streams", "digits") == 1
    assert rows(tmp_path / "mine")["digits", "mine"]["note"] == "all trials failed: RuntimeError: too late"
    said = capsys.readouterr()
    assert "6 failed; the same command tries them again" in said.err
    registry._REGISTRY.pop("mine")
    forget_files()
    assert add(file, board, tmp_path, "--streams", "digits") == 1
    assert "tuning: 6 runs, 0 of them done before" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("does", "what"),
    [
        ("host.optimizers[0].param_groups[0]['lr'] = 0.02", "the learning rate or another setting of the optimizer"),
        ("next(host.trained()).parameter.requires_grad_(False)", "requires_grad of parameters"),
        ("[one.parameter.requires_grad_(False) for one in host.trained()]", "requires_grad of parameters"),
        ("torch.manual_seed(0)", "torch's global random state"),
        ("torch.set_default_dtype(torch.float64)", "torch's default dtype"),
        ("state == 31 and host.model.register_forward_pre_hook(spoil)", "the examples that are learned"),
    ],
    ids=["lr", "freezes", "freezes all", "seeds", "dtype", "examples"],
)
def test_a_method_that_changes_later_what_it_may_not_has_no_rank_and_is_told_what_and_when(
    own, board, tmp_path, does, what
):
    file = own(LATE.format(does), extra="def spoil(model, args): args[0].mul_(0.9)")
    assert add(file, board, tmp_path, "--streams", "digits") == 1
    row = rows(tmp_path / "mine")["digits", "mine"]
    # Of 2 steps; the hook changes those after the one that makes it.
    task = 16 if "hook" in does else 15
    assert row["note"] == f"all trials failed: it changes {what}, which a method may not: seen in task {task}"
    assert not row["rank"] and torch.get_default_dtype() == torch.float32


def test_what_a_method_raises_is_said_too_where_it_has_changed_what_it_may_not(own, board, tmp_path):
    does = "[one.parameter.requires_grad_(False) for one in host.trained()] and {{}}['the real bug']"
    assert add(own(LATE.format(does).replace("{{}}", "{}")), board, tmp_path, "--streams", "digits") == 1
    note = rows(tmp_path / "mine")["digits", "mine"]["note"]
    assert "it changes requires_grad of parameters" in note and note.endswith("then KeyError: 'the real bug'")


def test_what_a_file_sets_for_all_of_torch_when_it_is_imported_does_not_reach_the_runs(own):
    methods.load(own(FINE, extra="torch.set_default_dtype(torch.float64)"))
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("error", ["gxd.lab.errors.UserError", "BrokenPipeError", "EOFError", "ConnectionResetError"])
def test_what_a_method_raises_is_its_failure_whatever_the_lab_itself_means_by_it(own, tmp_path, warm_workers, error):
    file = own(LATER.replace("RuntimeError", error))
    methods.load(file)
    job = workers.Job("mine", SMALL.tracks[0].config({"method": "mine", "lr": 0.1}, 0))
    with Board(1) as board:
        (outcome,) = IN_PROCESSES([job], tmp_path / "runs", board, processes=1, files=[file])
    assert outcome.failure is not None and not outcome.failure.elsewhere
    assert "too late" in outcome.failure.reason and "its process" not in outcome.failure.reason


def test_a_step_that_could_not_be_timed_is_said_in_the_row_until_it_is(own, board, tmp_path, monkeypatch):
    file = own(LATER)
    methods.load(file)
    digits = SMALL.tracks[0]
    places, stream = (
        [Place(SMALL, digits, entries()[n]) for n in ("backprop", "mine")],
        make_stream(digits.config({}, 0)),
    )
    assert time_ratios(places, stream, steps=40, rounds=2) == {"backprop": 1.0, "mine": "RuntimeError: too late"}
    registry._REGISTRY.pop("mine")
    file, quick = own(FINE), work.time_ratios
    monkeypatch.setattr(work, "time_ratios", lambda *_: {"backprop": 1.0, "mine": "RuntimeError: too late"})
    add(file, board, tmp_path, "--streams", "digits")
    row = rows(tmp_path / "mine")["digits", "mine"]
    assert row["rank"] and not row["time_ratio"] and row["note"] == "not timed: RuntimeError: too late"
    forget()
    monkeypatch.setattr(work, "time_ratios", quick)
    add(file, board, tmp_path, "--streams", "digits")
    row = rows(tmp_path / "mine")["digits", "mine"]
    assert row["time_ratio"] and not row["note"]


def test_two_files_of_one_name_are_two_files(own, board, tmp_path):
    add(own(FINE), board, tmp_path, "--streams", "digits")
    other = tmp_path / "other" / "mine.py"
    other.parent.mkdir()
    other.write_text((tmp_path / "mine.py").read_text().replace("'mine', desc", "'other', desc"))
    assert add(other, board, tmp_path, "--streams", "digits") == 0
    found = rows(tmp_path / "mine")
    assert found["digits", "mine"]["rank"] and found["digits", "other"]["rank"]


def test_a_file_that_goes_to_another_directory_does_not_take_the_board_along(own, board, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    own(FINE, extra="import os; os.chdir('there')")
    options = ["--board", board.name, "--out", "mine", "--streams", "digits"]
    assert command(["add", "mine.py", *options], SMALL) == 0
    assert rows(tmp_path / "mine")["digits", "mine"]["rank"] and not list((tmp_path / "there").iterdir())


def test_settings_that_do_not_fit_all_methods_of_a_file_are_said_to_need_a_file_each(own, board, tmp_path):
    second = (
        "@gxd.register_method('second', description='other', inert={})\ndef second(amount: float = 1.0): return Mine()"
    )
    file = own(FINE, extra=f"{second}\nGRID = [{{'strength': 1.0}}, {{'strength': 2.0}}]")
    with pytest.raises(UserError, match=r"no option 'strength'.* tried of mine and second, .* give each its own file"):
        add(file, board, tmp_path)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="the place where nothing can be made")
def test_a_place_where_no_directory_can_be_made_is_one_line_with_a_remedy():
    with pytest.raises(UserError, match=r"cannot write to /proc/x .*: choose another place with --out"):
        command([*RUN, "--out", "/proc/x"], SMALL)


def test_a_method_that_ends_the_process_later_is_a_row_too(own, board, tmp_path, capsys, monkeypatch):
    """In the process of the command it would end that, and with it the board."""
    monkeypatch.setattr(work, "time_ratios", partial(time_ratios, steps=10, rounds=5))  # it comes to its 30 steps
    file = own(LATER.replace("RuntimeError('too late')", "SystemExit(7)"))
    assert add(file, board, tmp_path, "--streams", "digits") == 1
    assert rows(tmp_path / "mine")["digits", "mine"]["note"].startswith("all trials failed: SystemExit: 7")
    assert "digits: mine has no rank" in capsys.readouterr().out


def test_runs_of_another_version_of_the_file_are_not_taken_for_those_of_this_one(own, board, tmp_path):
    add(own(RAISES), board, tmp_path, "--streams", "digits")
    registry._REGISTRY.pop("mine")
    with pytest.raises(UserError, match=r"from before .*mine\.py was changed: choose another --out"):
        add(own(FINE), board, tmp_path, "--streams", "digits")


def files(out):
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}


def forget():
    """As in a new process: nothing has imported the user's file."""
    registry._REGISTRY.pop("mine", None)
    forget_files()


@pytest.mark.parametrize("grid", [(), ("--grid", "strength=1.0", "strength=2.0")], ids=["defaults", "grid"])
def test_the_command_that_add_names_shows_the_same_board(own, board, tmp_path, capsys, grid):
    add(own(FINE), board, tmp_path, "--streams", "digits", *grid)
    out, before = tmp_path / "mine", files(tmp_path / "mine")
    assert f"gxd leaderboard show {out} prints" in capsys.readouterr().out
    forget()
    assert command(["show", str(out)], SMALL) == 0
    assert "| mine |" in capsys.readouterr().out
    assert files(out) == before
    forget()
    command(["run", "--streams", "digits", "--entries", "backprop", "--out", str(out)], SMALL)
    assert rows(out)["digits", "mine"]["rank"]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda file, out: file.unlink(), r"mine\.py that registers it is gone"),
        (lambda file, out: file.write_text(file.read_text() + "# better"), r"mine\.py that registers it was changed"),
        (_as_before_files_were_named, r"own\.json does not say which file registers it"),
    ],
    ids=["gone", "changed", "old own.json"],
)
def test_a_board_is_left_alone_when_the_file_of_a_method_on_it_cannot_be_had(own, board, tmp_path, spoil, why):
    file, out = own(FINE), tmp_path / "mine"
    add(file, board, tmp_path, "--streams", "digits")
    spoil(file, out)
    before = files(out)
    for name in (["show", str(out)], ["run", "--entries", "backprop", "--out", str(out)]):
        forget()
        with pytest.raises(UserError, match=f"has runs of mine, .*{why}") as refused:
            command(name, SMALL)
        assert "\n" not in str(refused.value)
        assert "mine" not in gxd.methods(), "a file that was changed must not be imported"
    assert files(out) == before


def test_adding_the_same_file_again_mends_a_board_that_does_not_name_it(own, board, tmp_path):
    file, out = own(FINE), tmp_path / "mine"
    add(file, board, tmp_path, "--streams", "digits")
    before = files(out)
    _as_before_files_were_named(file, out)
    forget()
    assert add(file, board, tmp_path, "--streams", "digits") == 0
    assert files(out) == before


def test_a_second_method_goes_on_the_board_beside_the_first(own, board, tmp_path):
    add(own(FINE), board, tmp_path, "--streams", "digits")
    first = rows(tmp_path / "mine")["digits", "mine"]
    other = tmp_path / "other.py"
    other.write_text((tmp_path / "mine.py").read_text().replace("'mine', desc", "'other', desc"))
    forget()
    assert add(other, board, tmp_path, "--streams", "digits") == 0
    found = rows(tmp_path / "mine")
    assert found["digits", "mine"]["mean"] == first["mean"] and found["digits", "other"]["rank"]


def test_runs_of_a_method_that_nobody_knows_stay_in_the_digest(board):
    mine = {**lines(board)[0], "method": "mine", "key": "of another time"}
    with (board / "digest.jsonl").open("a") as file:
        file.write(json.dumps(mine) + "\n")
    before = lines(board)
    assert command(["show", str(board)], SMALL) == 0
    assert lines(board) == before


def test_nan_counts_as_divergence_and_as_having_learned_nothing(own, board, tmp_path):
    add(own(NAN), board, tmp_path)
    found = rows(tmp_path / "mine")
    mine = found["digits", "mine"]
    assert (float(mine["diverged"]), float(mine["tuning_diverged"]), float(mine["mean"])) == pytest.approx((1, 1, 0.1))
    assert float(mine["rank"]) == 5
    assert (found["regression", "mine"]["mean"], float(found["regression", "mine"]["rank"])) == ("inf", 4)


def test_a_grid_comes_from_the_file_or_the_command(own, board, tmp_path):
    two = "GRID = [{'strength': 1.0}, {'strength': 2.0}]"
    add(own(FINE, extra=two), board, tmp_path, "--streams", "digits")
    tried = [line["setting"] for line in lines(tmp_path / "mine") if line["method"] == "mine"]
    assert sum("strength=2" in text for text in tried) >= 3
    registry._REGISTRY.pop("mine")
    with pytest.raises(UserError, match="has 4 settings"):
        add(own(FINE), board, tmp_path, "--grid", *[f"strength={n}.0" for n in range(4)])


def test_worker_processes_know_the_method_too(own, tmp_path, warm_workers):
    file = own(FINE)
    methods.load(file)
    job = workers.Job("mine", SMALL.tracks[0].config({"method": "mine", "lr": 0.1}, 0))
    with Board(1) as board:
        outcomes = IN_PROCESSES([job], tmp_path / "runs", board, processes=1, files=[file])
    assert [(outcome.status, outcome.failure) for outcome in outcomes] == [("done", None)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import nothing_of_this_name", "cannot be imported: ModuleNotFoundError"),
        ("raise SystemExit(3)", "cannot be imported: SystemExit"),
        ("x = 1", "registers no method"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(own, board, tmp_path, text, why):
    file = own(FINE)
    file.write_text(text)
    with pytest.raises(UserError, match=why):
        add(file, board, tmp_path)
    with pytest.raises(UserError, match="is there already"):
        add(own(FINE, name="l2"), board, tmp_path)
    with pytest.raises(UserError, match="is not a Python file"):
        forget_files()
        add(tmp_path / "mine.txt", board, tmp_path)


@pytest.mark.parametrize("name", ["backprop", "gxd_paper", "crelu", "contribution", "activation"])
def test_the_name_of_a_control_or_a_utility_is_there_already(own, board, tmp_path, name):
    with pytest.raises(UserError, match=f"'{name}', which is there already"):
        add(own(FINE, name=name), board, tmp_path)
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("maker", "why"),
    [
        ("def mine(): raise RuntimeError('boom')", "making mine raises RuntimeError: boom"),
        ("def mine(): raise SystemExit(3)", "making mine raises SystemExit: 3"),
        ("def mine(): return 5", "making mine raises TypeError"),
    ],
)
def test_a_method_that_cannot_be_made_is_one_line(own, board, tmp_path, maker, why):
    file = own(FINE)
    text = file.read_text()
    file.write_text(text[: text.index("def mine(")] + maker + "\n")
    with pytest.raises(UserError, match=why):
        add(file, board, tmp_path)


def test_a_method_that_ends_the_process_in_its_first_steps_is_a_row(own, board, tmp_path):
    assert add(own(RAISES.replace("RuntimeError('no idea')", "SystemExit(3)")), board, tmp_path) == 1
    assert "it raises SystemExit: 3" in rows(tmp_path / "mine")["digits", "mine"]["note"]


def test_a_trial_that_another_process_is_at_is_missing_and_nothing_is_chosen_without_it(board, capsys, monkeypatch):
    """What is chosen among some of the trials would be published as the best of all."""
    plain = next(path for path in (board / "tuning" / "permuted-digits").iterdir() if "backprop" in path.name)
    shutil.rmtree(plain)
    (board / "digest.jsonl").unlink()
    lr, train = float(re.search(r"_lr([^_]+)", plain.name)[1]), workers.train_one

    def busy(config, root, **options):
        if (config.method, config.lr) == ("backprop", lr):
            return workers.Failure("another process is at it", elsewhere=True)
        return train(config, root, **options)

    monkeypatch.setattr(workers, "train_one", busy)
    assert command([*RUN, "--streams", "digits", "--out", str(board)], SMALL) == 1
    row = rows(board)["digits", "backprop"]
    assert row["note"] == "missing: 1 of 6 tuning runs" and not row["rank"] and not row["setting"]
    assert "another process is at it" in capsys.readouterr().err
    assert json.loads((board / "failures.json").read_text()) == {}


def test_the_lock_of_another_process_says_nothing_about_a_run(tmp_path):
    config = SMALL.tracks[0].config({"lr": 0.1}, 0)
    path = config.run_directory(tmp_path)
    path.mkdir(parents=True)
    handle = store._locked(path / store.LOCK)
    failure = workers.train_one(config, tmp_path)
    os.close(handle)
    assert failure.elsewhere and "another process" in failure.reason
    assert workers.train_one(config, tmp_path) is None


@pytest.mark.parametrize("spoil", ["status.json", "metrics.jsonl"])
def test_a_run_whose_files_are_damaged_is_missing_and_the_others_stay_on_the_board(board, capsys, spoil):
    path = next(path for path in (board / "report" / "permuted-digits").iterdir() if path.name.startswith("gxd"))
    (path / "seed1" / spoil).write_text("")
    (board / "digest.jsonl").unlink()
    assert command(["show", str(board), "--write"], SMALL) == 0
    found = rows(board)
    assert found["digits", "gxd_paper"]["note"] == "missing: 1 of 3 seeds" and found["digits", "backprop"]["rank"]
    assert f"{path.name}" in capsys.readouterr().err
    assert command([*RUN, "--streams", "digits", "--out", str(board)], SMALL) == (1 if spoil == "status.json" else 0)


def test_trials_that_failed_are_said_in_the_row(own, board, tmp_path):
    only_fast = LATER.replace("state > 30", "state > 30 and next(host.trained()).lr > 0.09")
    add(own(only_fast), board, tmp_path, "--streams", "digits")
    row = rows(tmp_path / "mine")["digits", "mine"]
    assert row["rank"] and row["note"] == "3 of 6 trials failed: RuntimeError: too late"


def test_who_is_on_some_of_the_streams_comes_after_those_who_are_on_all(own, board, tmp_path, monkeypatch):
    monkeypatch.setattr(board_module, "ENOUGH", 0.5)  # of a board of four entries
    add(own(FINE), board, tmp_path, "--streams", "digits")
    with (tmp_path / "mine" / "ranks.csv").open() as file:
        streams = [int(line["streams"]) for line in csv.DictReader(file)]
    assert streams == sorted(streams, reverse=True) and streams[0] == 2 and streams[-1] == 1


def test_the_curve_of_a_method_of_ones_own_has_its_name(own, board, tmp_path):
    add(own(FINE), board, tmp_path, "--streams", "digits")
    page = (tmp_path / "mine" / "board.html").read_text()
    assert re.search(r"<text[^>]*>mine</text>|>mine</tspan>", page)
    shown = (board / "board.html").read_text()
    assert not re.search(r"<text[^>]*>mine</text>|>mine</tspan>", shown)


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("times.json", "garbage", "delete this file alone"),
        ("times.json", '{"digits": 5}', "damaged at 'digits': delete this file alone"),
        ("times.json", '{"digits": {"backprop": "fast"}}', "damaged at 'digits'"),
        ("objections.json", '{"digits": "no"}', "damaged at 'digits'"),
        ("failures.json", "", "delete this file alone"),
        ("own.json", '{"x": 3}', "own.json is damaged: restore it"),
        ("protocol.json", "{", "restore it, or choose another directory"),
    ],
)
def test_a_damaged_file_of_the_board_is_one_line_that_does_not_cost_the_runs(board, file, text, why):
    (board / file).write_text(text)
    with pytest.raises(UserError, match=why):
        command(["show", str(board)], SMALL)


@pytest.mark.parametrize("change", [{"seed": "0"}, {"churn": "abc"}, {"seconds": [1]}])
def test_a_line_of_the_digest_with_values_of_another_kind_is_damaged(board, change):
    first, *rest = (board / "digest.jsonl").read_text().splitlines()
    (board / "digest.jsonl").write_text("\n".join([json.dumps({**json.loads(first), **change}), *rest]) + "\n")
    with pytest.raises(UserError, match=r"digest\.jsonl is damaged"):
        command(["show", str(board)], SMALL)


def test_runs_of_the_board_keep_their_keys_though_a_default_has_changed():
    """``decoupled`` was True once, and is written since."""
    (digits,) = [track for track in PROTOCOL.tracks if track.name == "permuted-digits"]
    keys = {
        name: [digits.config(values, 100).key() for values in entries()[name].settings(PROTOCOL, digits)][:2]
        for name in ("parseval", "spectral", "l2_init")
    }
    assert keys == {
        "parseval": ["0068111ef2", "2e27b01fff"],
        "spectral": ["679619b88b", "4d9773128a"],
        "l2_init": ["88d8470945", "9780d55477"],
    }
    assert methods.canonical("parseval", ()) == methods.canonical("parseval", {"decoupled": False})
    assert methods.canonical("parseval", {"decoupled": True}) == ("decoupled=true",)
    board = Path(__file__).parents[2] / "results" / "leaderboard" / "digest.jsonl"
    known = {(line["stream"], line["method"], line["key"]) for line in map(json.loads, board.read_text().splitlines())}
    for track in PROTOCOL.tracks:
        for name in ("parseval", "spectral"):
            for values in entries()[name].settings(PROTOCOL, track):
                assert (track.name, name, track.config(values, 100).key()) in known
