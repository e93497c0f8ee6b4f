"""``gxd bench``: it runs, takes turns, and says what failed. Nothing here depends on how fast the machine is."""

import io
import json
import sys
from functools import partial

import pytest
import torch
from rich.console import Console

import gxd
from gxd.lab import bench, models
from gxd.lab.bench import machine, memory, methods, suites, table, variants, whole
from gxd.lab.bench.measure import Row, Target, Timing, compare, measure
from gxd.lab.errors import UserError
from gxd_command import main


class Clock:
    """Stands still until somebody works."""

    now = 0.0

    def __call__(self):
        return self.now


def spender(clock, seconds, calls=None, name=""):
    """A variant whose steps take so many seconds of the clock."""

    def step():
        clock.now += seconds
        if calls is not None:
            calls.append(name)

    return lambda: step


def small_mlp(scope, width=8, depth=2, batch=4, layer_norm=False):
    model = partial(models.mlp, 6, 3, width=width, depth=depth, layer_norm=layer_norm)
    return variants.Setting(f"tiny, width {width}", model, (batch, 6), 3)


@pytest.fixture
def tiny(monkeypatch):
    """The suites on a tiny network."""
    monkeypatch.setattr(suites, "mlp_setting", small_mlp)
    monkeypatch.setattr(whole, "mlp_setting", small_mlp)


# --- taking turns -----------------------------------------------------------------------------------------------------


def test_of_steps_timed_one_by_one_the_best_of_each_place_in_the_block_counts():
    clock, turn = Clock(), iter([9.0, 5.0, 1.0, 2.0, 7.0, 3.0])  # two rounds of three steps

    def step():
        clock.now += next(turn)

    timing = measure({"a": lambda: step}, steps=3, rounds=2, warmup=0, clock=clock, one_by_one=True)["a"]
    assert timing.rounds == [5.0, 4.0]
    assert timing.best == (2.0 + 5.0 + 1.0) / 3


def test_variants_take_turns_in_blocks_and_nobody_always_follows_the_same_neighbour():
    clock, calls = Clock(), []
    ways = {name: spender(clock, 1.0, calls, name) for name in "abc"}
    measure(ways, steps=2, rounds=3, warmup=1, clock=clock)
    assert calls[:3] == ["a", "b", "c"]  # warming up
    blocks = ["".join(calls[i : i + 3]) for i in range(3, len(calls), 3)]  # one step untimed, two timed
    assert blocks == ["aaa", "bbb", "ccc", "bbb", "ccc", "aaa", "ccc", "aaa", "bbb"]


def test_ratios_and_quartiles_are_those_of_the_times():
    timings = {"base": Timing([2.0, 1.0, 4.0]), "other": Timing([4.0, 3.0, 4.0])}
    base, other = compare("suite", "setting", timings, {"other": [Target(3.5), Target(2.5), Target(1.0, of="base")]})
    assert (base.value, base.ratio, other.value, other.ratio) == (1000.0, 1.0, 3000.0, 3.0)
    assert other.quartiles == (1.5, 2.0, 2.5)  # of 2, 3 and 1
    assert [v.met for v in other.verdicts] == [True, False, False]
    assert [v.found for v in other.verdicts] == [3.0, 3.0, 3.0]


def test_a_rate_is_the_inverse_of_the_time():
    assert compare("loop", "", {"base": Timing([0.5, 0.25])}, unit="steps/s")[0].value == 4.0


def test_the_warm_up_is_not_timed():
    clock = Clock()
    steps = iter([100.0, 100.0] + [1.0] * 100)

    def step():
        clock.now += next(steps)

    timings = measure({"a": lambda: step}, steps=2, rounds=3, warmup=2, clock=clock)
    assert timings["a"].rounds == [1.0, 1.0, 1.0]


def test_a_variant_that_fails_is_reported_and_the_others_go_on():
    clock = Clock()
    left = iter(range(4))

    def breaks_later():
        next(left)

    def unmade():
        raise ValueError("no such thing\nand more")

    def absent():
        raise UserError("not installed")

    ways = {"good": spender(clock, 1.0), "unmade": unmade, "late": lambda: breaks_later, "absent": absent}
    timings = measure(ways, steps=1, rounds=5, warmup=1, clock=clock)
    rows = {row.variant: row for row in compare("s", "x", timings, {"unmade": [Target(1.0)]})}
    assert len(timings["good"].rounds) == 5 and rows["good"].note == ""
    assert rows["unmade"].note == "failed: ValueError: no such thing" and rows["unmade"].value is None
    assert rows["late"].note.startswith("failed: StopIteration")
    assert len(timings["late"].rounds) == 1
    assert rows["absent"].note == "skipped: not installed"
    assert [v.met for v in rows["unmade"].verdicts] == [None]
    assert table.cells(rows["unmade"])["target"] == "<= 1.00: not measured"


def test_a_first_variant_that_fails_leaves_the_others_their_times():
    clock = Clock()

    def unmade():
        raise ValueError("broken")

    timings = measure({"base": unmade, "other": spender(clock, 1.0)}, steps=1, rounds=2, warmup=0, clock=clock)
    other = compare("s", "x", timings)[1]
    assert (other.value, other.ratio, other.quartiles) == (1000.0, None, None)


def test_a_warning_of_gxd_becomes_the_note_of_its_variant():
    def make():
        import warnings

        warnings.warn("fell back", gxd.ObservationWarning, stacklevel=1)
        return lambda: None

    assert measure({"a": make}, steps=1, rounds=1, warmup=0)["a"].note == "fell back"


# --- variants ---------------------------------------------------------------------------------------------------------


def test_every_variant_starts_from_the_same_weights_and_batches():
    setting = small_mlp(suites.Scope())
    one, other = setting.fresh(), setting.fresh()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))
    assert all(torch.equal(a, b) for s, t in zip(setting.batches(), setting.batches()) for a, b in zip(s, t))


def test_an_eager_variant_trains_and_resets():
    setting = small_mlp(suites.Scope())
    model, _, cbp = setting.trainee("gxd", replacement_rate=0.1)
    assert cbp.maturity < suites.MATURITY + 2  # within the warm-up
    step = setting.repeat(variants.steps.eager_step(model, cbp.optimizer, torch.nn.functional.cross_entropy, cbp))
    for _ in range(suites.MATURITY + 10):
        step()
    assert cbp.total_resets > 0


def test_a_compiled_variant_uses_the_compiled_step(monkeypatch):
    seen = []

    def compiled_step(model, optimizer, loss, cbp):
        seen.append(cbp)
        return lambda x, y: (loss(model(x), y), None)

    monkeypatch.setattr(gxd, "compiled_step", compiled_step)
    setting = small_mlp(suites.Scope())
    variants.compiled(setting)()()
    variants.compiled(setting, "gxd")()()
    assert seen[0] is None and seen[1].plan.size == 2 * 8


def test_ccbp_is_skipped_where_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ccbp_pytorch", None)
    with pytest.raises(UserError, match="ccbp-pytorch is not installed"):
        variants.ccbp(small_mlp(suites.Scope()))()


# --- memory -----------------------------------------------------------------------------------------------------------


def test_allocations_are_what_a_function_keeps_and_its_peak():
    kept = []

    def work():
        kept.append(torch.zeros(1000))
        torch.zeros(5000).sum()

    held, peak = memory.allocations(work)
    assert held == 4000
    assert 24000 <= peak < 25000


def test_the_extra_memory_of_resets_grows_like_the_units(tiny):
    *widths, growth = list(whole.memory(suites.Scope()))
    assert len(widths) == 3
    assert [row.variant for row in growth] == [row.variant for row in widths[0]]
    assert all(row.value > 0 for row in widths[0] if "kept" in row.variant)
    assert all(v.met for row in growth for v in row.verdicts)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_writes_json_and_markdown(tiny, tmp_path, capsys):
    files = ["--json", str(tmp_path / "b.json"), "--markdown", str(tmp_path / "b.md")]
    assert main(["bench", "mlp", "resets", "--rounds", "2", "--only", "gxd*10", "*1e-3", *files]) == 0
    out = capsys.readouterr().out
    record = json.loads((tmp_path / "b.json").read_text())
    assert {"cpu", "cores", "threads", "torch", "load", "load_after", "seconds", "clock"} <= set(record["machine"])
    assert record["machine"]["threads"] == 1
    rows = {(row["suite"], row["variant"]): row for row in record["rows"]}
    assert ("mlp", "backprop") in rows and ("mlp", "gxd, every 10") in rows and ("resets", "gxd, rate 1e-3") in rows
    assert ("mlp", "gxd") not in rows and ("mlp", "random") not in rows
    row = rows["mlp", "gxd, every 10"]
    assert row["value"] > 0 and row["unit"] == "ms" and row["ratio"] > 0 and row["note"] == ""
    assert row["quartiles"][0] <= row["quartiles"][1] <= row["quartiles"][2]
    [verdict] = row["verdicts"]
    assert verdict["limit"] == 1.08 and verdict["met"] == (row["ratio"] <= 1.08)
    for text in (out, (tmp_path / "b.md").read_text()):
        assert "gxd, every 10" in text and "<= 1.08" in text and record["machine"]["torch"] in text
    assert "| backprop |" in (tmp_path / "b.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.json", "b.md"]


def test_the_command_leaves_the_number_of_threads_as_it_was(tiny):
    before = torch.get_num_threads()
    main(["bench", "mlp", "--rounds", "1", "--threads", str(before + 1), "--only", "none"])
    assert torch.get_num_threads() == before


def test_a_suite_that_fails_does_not_stop_the_next(tiny, monkeypatch, tmp_path):
    def broken(scope):
        raise ValueError("oh no")
        yield

    monkeypatch.setitem(bench.SUITES, "resnet", broken)
    file = tmp_path / "b.json"
    assert main(["bench", "resnet", "mlp", "--rounds", "1", "--only", "none", "--json", str(file)]) == 1
    rows = json.loads(file.read_text())["rows"]
    assert rows[0]["note"] == "failed: ValueError: oh no"
    assert rows[1]["variant"] == "backprop" and rows[1]["value"] > 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["resnt"], "Did you mean 'resnet'?"),
        (["mlp", "--rounds", "0"], "rounds=0"),
        (["mlp", "--threads", "0"], "threads=0"),
        (["mlp", "--device", "nowhere"], "nowhere"),
        (["mlp", "--clock", "cpu", "--threads", "2"], "--clock cpu"),
        (["mlp", "--json", "no/such/directory/b.json"], "no/such/directory"),
        (["mlp", "--markdown", "/"], "is a directory"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_timed(argv, message, capsys):
    assert main(["bench", *argv]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_busy_machine_is_warned_of():
    assert machine.warning(0.1, "wall") == machine.warning(None, "wall") == machine.warning(1.2, "wall", own=1) == ""
    assert "load average 2.5" in machine.warning(2.5, "wall", own=1)
    assert "--clock cpu" in machine.warning(2.5, "wall") and "--clock cpu" not in machine.warning(2.5, "cpu")


def test_settings_of_one_suite_share_a_table_and_empty_columns_are_left_out():
    rows = [Row("scaling", f"width {w}", "gxd", 1.0) for w in (1, 2)] + [Row("mlp", "small", "a|b", 2.0, note="[x]")]
    text = table.markdown(rows, {"cpu": "x86"})
    assert "| setting | variant | best |\n|---|---|--:|\n| width 1 | gxd | 1 ms |\n| width 2 | gxd | 1 ms |" in text
    assert "### mlp: small\n\n| variant | best | note |" in text
    assert "a\\|b" in text
    console = Console(file=io.StringIO(), width=100)
    table.show(rows, console)
    assert "[x]" in console.file.getvalue()


# --- every method -----------------------------------------------------------------------------------------------------


class Waits(gxd.Method):
    """Acts when a task ends, and needs a norm."""

    def init(self, host):
        if not any(isinstance(module, torch.nn.LayerNorm) for module in host.model.modules()):
            raise ValueError("a model without norms")
        return torch.zeros(1000)

    def at_boundary(self, host, state):
        ENDS.append(state)
        return state


class Refuses(gxd.Method):
    def init(self, host):
        raise ValueError("not this\nmodel")


ENDS = []


@pytest.fixture
def registry(monkeypatch):
    """Three methods of gxd's, one that waits for boundaries, and one that refuses."""
    known = dict(gxd.methods())
    monkeypatch.setattr(
        sys.modules["gxd.methods.registry"], "_REGISTRY", {name: known[name] for name in ("redo", "l2_init", "swr")}
    )
    gxd.register_method("waits", description="", inert={})(Waits)
    gxd.register_method("refuses", description="", inert={})(Refuses)


def test_every_registered_method_is_timed_with_its_events_and_its_memory(tiny, registry):
    times, kept = list(methods.methods(suites.Scope(rounds=1)))
    rows = {row.variant: row for row in times}
    events = {"redo, every step", "swr, every step", "waits, a boundary"}
    assert set(rows) == {"backprop", *gxd.methods(), *events}
    assert all(row.value > 0 for name, row in rows.items() if name != "refuses")
    assert rows["refuses"].note == "skipped: not this model" and rows["refuses"].value is None
    assert ENDS
    rows = {row.variant.removesuffix(", kept"): row for row in kept}
    assert set(rows) == {"backprop", *gxd.methods()} and rows["refuses"].note == "skipped: not this model"
    weights = sum(p.numel() for p in small_mlp(None, layer_norm=True).fresh().parameters())
    assert rows["backprop"].ratio == 1.0 and rows["backprop"].unit == "kB"
    assert rows["backprop"].value * 1024 >= 3 * 4 * weights  # the weights and Adam's two moments
    assert rows["waits"].value * 1024 >= 4000 and rows["waits"].ratio > 1.5
    assert 1.1 < rows["l2_init"].ratio < 1.4  # a copy of the weights
    assert 7.8 < rows["redo"].value < 9.0  # the ages at which the last 1000 units were reset, and a little per unit


def test_the_head_is_prepared_for_an_injection(tiny):
    row, event = next(methods.methods(suites.Scope(rounds=1, only=("plasticity_injection*",))))[1:]
    assert row.value > 0 and event.value > 0


def test_a_quick_benchmark_of_methods_is_written_as_markdown(tiny, registry, tmp_path):
    file = tmp_path / "b.md"
    assert main(["bench", "methods", "--quick", "--only", "swr*", "--markdown", str(file)]) == 0
    assert [line.split(" |")[0] for line in file.read_text().splitlines() if line.startswith("| ")] == [
        *("| variant", "| backprop", "| swr", "| swr, every step", "| backprop, kept", "| swr, kept")
    ]


# --- the loop and the assay -------------------------------------------------------------------------------------------


def test_the_loop_is_timed_with_its_data_and_evaluation():
    rows = next(whole.loop(suites.Scope(quick=True, rounds=1, only=("gxd_paper",))))
    assert [row.variant for row in rows] == ["backprop", "gxd_paper"]
    assert all(row.note == "" and row.value > 0 and row.unit == "steps/s" for row in rows)


def test_clamps_per_second_are_measured():
    rows = whole._assay(suites.Scope(rounds=1), small_mlp(None, batch=32), None)
    assert [row.variant for row in rows] == ["a forward pass", "a clamp"]
    assert all(row.note == "" and row.value > 0 for row in rows)


def test_the_vit_has_units_in_its_mlps_and_its_attention():
    setting = variants.Setting("", lambda: suites.ViT(16, 1, 2), (2, 3, 32, 32), 5)
    assert setting.plan().size == 4 * 16 + 16
