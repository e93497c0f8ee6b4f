"""Every example runs, at a tiny scale, and what it is there to show comes out."""

import importlib.util
import itertools
import math
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import gxd

FOLDER = Path(__file__).parents[2] / "examples"
FILES = sorted(FOLDER.glob("*.py"))


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_stream_of_tasks_with_backprop_and_with_resets(capsys: Any):
    results, probes = example("classification_stream").main(["--tasks", "2", "--epochs", "1"])
    assert results["backprop"]["resets"] == 0
    assert results["gxd"]["resets"] == results["random"]["resets"] > 0, "the same rate, other units"
    assert results["gxd"]["last"] != results["random"]["last"] and min(r["last"] for r in results.values()) > 0.2
    assert {name: (found.steps, found.seeds) for name, found in probes.items()} == dict.fromkeys(results, (90, 5))
    assert "than a fresh one" in capsys.readouterr().out


def test_a_resnet_is_planned_with_its_residual_stream_and_resumed_exactly():
    plans, cbp, exact = example("resnet").main(["--steps", "160"])
    inner = {"block1.conv1", "block2.conv1"}
    assert {group.name for group in plans["skip"].groups} == inner
    assert {group.name for group in plans["group"].groups} == inner | {"stem.0", "block2.conv2"}
    assert [skipped.name for skipped in plans["group"].skipped] == ["head"]
    assert cbp.total_resets > 0 and cbp.plan.size == 48
    assert exact


def test_a_trainer_with_a_corpus_that_changes():
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    plain, reset, cbp = example("hugging_face").main(["--phases", "2", "--steps", "60", "--rate", "0.02"])
    assert [entry["step"] for entry in plain] == [entry["step"] for entry in reset] == [60, 120]
    assert not any(key.startswith("gxd") for entry in plain for key in entry)
    assert 0 == reset[0]["gxd/resets"] < reset[1]["gxd/resets"] == cbp.total_resets
    assert {g.name.split(".", 3)[3] for g in cbp.plan.groups} == {"attn.c_attn", "mlp.c_fc"} and len(cbp.plan) == 4
    assert all(entry["loss"] < math.log(64) for entry in reset), "better than any token as likely as any other"


def test_the_corpus_changes_with_the_phase_and_with_nothing_else():
    pytest.importorskip("transformers")
    sentences = list(example("hugging_face").ChangingCorpus(phases=2, sentences=50))
    followers: list[dict[int, set[int]]] = [{}, {}]
    for number, sentence in enumerate(sentences):
        tokens = sentence["input_ids"].tolist()
        for one, other in itertools.pairwise(tokens):
            followers[number // 50].setdefault(one, set()).add(other)
    assert all(len(found) <= 4 for phase in followers for found in phase.values())
    assert len(sentences) == 100 and followers[0] != followers[1]


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_the_world_changes_between_two_episodes(name: str):
    pytest.importorskip("stable_baselines3")
    world = example(name).ChangingCartPole(30)
    world.reset(seed=0)
    forces = []
    for _ in range(300):
        forces.append(world.unwrapped.force_mag)
        *_, terminated, truncated, _ = world.step(1)
        if terminated or truncated:
            world.reset()
    signs = [force > 0 for force in forces]
    assert signs[0] and not all(signs) and len({abs(force) for force in forces}) == (10 if name == "ppo" else 1)


def test_ppo_in_worlds_that_change():
    pytest.importorskip("stable_baselines3")
    results, cbp = example("ppo").main(["--worlds", "2", "--steps", "1024", "--rate", "0.01"])
    assert all(set(found) == {0, 1} for found in results.values()), "episodes in both worlds"
    assert results["PPO"] != results["PPO with gxd"]
    assert cbp.total_resets > 0 and cbp.closed
    assert {group.name.split(".")[1] for group in cbp.plan.groups} == {"policy_net", "value_net"}


def test_dqn_goes_on_from_what_was_saved():
    pytest.importorskip("stable_baselines3")
    worlds, resets, found, cbp = example("dqn").main(["--worlds", "2", "--steps", "1200", "--rate", "0.01"])
    assert 0 < resets[0] < resets[1]
    second_half = 1200 // 4
    assert max(ages.max() for ages in cbp.ages().values()) > second_half, "units are as old as the first training"
    assert all({0, 1} <= set(world.late_returns()) for world in worlds.values())
    assert found["DQN"].groups.keys() == found["DQN with gxd"].groups.keys() == {"q_net.0", "q_net.2"}


def test_dead_features_come_alive():
    results, resets = example("sparse_autoencoder").main(["--steps", "400", "--every", "50"])
    (dead, unexplained, found), (dead_after, unexplained_after, found_after) = results.values()
    assert resets > 0 and dead_after.sum() < 0.8 * dead.sum()
    assert unexplained_after < unexplained and found_after > found


def test_a_dead_feature_is_active_after_its_reset_and_adds_nothing_yet():
    module = example("sparse_autoencoder")
    torch.manual_seed(0)
    sae = module.SparseAutoencoder()
    with torch.no_grad():
        sae.encoder.bias[:100] = -100.0
    dead, *_ = module.measure(sae, range(1))
    plan = gxd.find_units(sae, groups=[gxd.manual_group("encoder", consumers=["decoder"])])
    assert dead[:100].all()
    gxd.reset_units(sae, plan, {"encoder": dead}, optimizer=torch.optim.Adam(sae.parameters()))
    after, *_ = module.measure(sae, range(20))
    assert after[:100].sum() < 20 and not sae.decoder.weight[:, dead].any()


def test_one_process_resets_the_same_under_ddp_and_fsdp():
    run = example("distributed").main
    options = ["--steps", "60", "--rate", "0.005"]
    (resets, loss), (sharded, loss_of_shards) = run(options), run([*options, "--fsdp"])
    assert len(resets) > 5 and resets == sharded
    assert loss == pytest.approx(loss_of_shards, rel=1e-4)


@pytest.mark.slow
def test_two_processes_reset_as_one_does():
    options = ["--steps", "60", "--rate", "0.005"]
    resets, loss = example("distributed").main(options)
    for kind in ([], ["--fsdp"]):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        launch += [str(FOLDER / "distributed.py"), *options, *kind]
        done = subprocess.run(launch, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        count, theirs = re.findall(r"processes: 2, resets: (\d+), loss: ([\d.]+)", done.stdout)[0]
        assert int(count) == len(resets) and float(theirs) == pytest.approx(loss, rel=1e-4)
        assert str(resets[-3:]) in done.stdout


# --- the folder -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_says_how_to_run_it_and_is_short(path: Path):
    text = path.read_text()
    assert f"examples/{path.name}" in text.split('"""')[1] and len(text.splitlines()) <= 125


def test_the_page_of_the_folder_has_a_line_for_each():
    rows = re.findall(r"^\| \[(\w+\.py)\]\(\1\) \|", (FOLDER / "README.md").read_text(), re.M)
    assert sorted(rows) == [path.name for path in FILES]
