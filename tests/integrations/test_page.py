"""The lines of docs/frameworks/ run as they stand."""

import copy
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import gxd

PAGES = Path(__file__).parents[2] / "docs" / "frameworks"
X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (32,), generator=torch.Generator().manual_seed(1))


def sections() -> dict[str, str]:
    """Title -> all its blocks of Python, one after the other."""
    found = {}
    text = "\n".join(page.read_text() for page in sorted(PAGES.glob("*.md")))
    for section in re.split(r"^##? ", text, flags=re.M)[1:]:
        title, _, text = section.partition("\n")
        if blocks := re.findall(r"```python\n(.*?)```", text, re.S):
            assert title not in found, f"two sections are called {title!r}"
            found[title] = "\n".join(blocks)
    return found


BLOCKS = sections()


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3))
    return model, torch.optim.Adam(model.parameters(), 0.01)


def run(title: str, names: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(folder)
    names = {"gxd": gxd, "torch": torch, "F": F, "copy": copy, "x": X, "y": Y, "__name__": "page", **names}
    exec(compile(BLOCKS[title], f"docs/frameworks: {title}", "exec"), names)
    return names


def of_net(given: Any) -> int:
    """How many steps the units of an attachment have seen; all of them were scored."""
    assert all(utility.any() for utility in given.utilities().values())
    return int(given._parts[0].units.step)


def with_model() -> dict[str, Any]:
    model, optimizer = make()
    return {"model": model, "optimizer": optimizer}


def test_the_line_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    names = {**with_model(), "your_trainer": train}
    assert of_net(run("In your training framework", names, tmp_path, monkeypatch)["resets"]) == 8


def test_a_loop_that_hides_the_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.loss_fn = make()[0], nn.CrossEntropyLoss()

        def forward(self, x: Any) -> Any:
            return self.net(x)

    def your_trainer(model: Any, optimizer: Any) -> None:
        for _ in range(5):
            model.loss_fn(model(X), Y).backward()
            optimizer.step()
            optimizer.zero_grad()

    model = Own()
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), "your_trainer": your_trainer}
    assert run("A loop that hides the logits", names, tmp_path, monkeypatch)["cbp"].utilities()["net.0"].any()


def test_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make()[0]

        def forward(self, x: Any) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.01)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    loader = DataLoader(TensorDataset(X, Y), 2)
    names = {"Trainer": lambda **options: lightning.Trainer(**options, **quiet), "module": Module(), "loader": loader}
    assert run("Lightning", names, tmp_path, monkeypatch)["callback"].cbp.ages()["net.0"].max() >= 31


def test_lightning_without_the_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lightning = pytest.importorskip("lightning.pytorch")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    names = {"nn": nn, "LightningModule": lightning.LightningModule, "loader": DataLoader(TensorDataset(X, Y), 2)}
    names["Trainer"] = lambda **options: lightning.Trainer(**options, **quiet, enable_checkpointing=False)
    module = run("Lightning without the callback", names, tmp_path, monkeypatch)["module"]
    assert of_net(module.resets) == 32


def test_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    transformers = pytest.importorskip("transformers")
    callback = run("Transformers", of_a_trainer(transformers, tmp_path), tmp_path, monkeypatch)["callback"]
    assert of_net(callback.cbp) == 4


def of_a_trainer(transformers: Any, folder: Path) -> dict[str, Any]:
    pytest.importorskip("accelerate")
    config = transformers.GPT2Config(
        vocab_size=17, n_layer=1, n_head=2, n_embd=8, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    settings = {"max_steps": 4, "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    tokens = torch.randint(0, 17, (8, 6), generator=torch.Generator().manual_seed(0))
    return {
        "Trainer": transformers.Trainer,
        "model": transformers.GPT2LMHeadModel(config),
        "arguments": transformers.TrainingArguments(output_dir=str(folder), **settings),
        "data": [{"input_ids": row, "labels": row} for row in tokens],
        "input_ids": tokens[:2],
    }


def test_the_trainer_without_the_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    names = of_a_trainer(pytest.importorskip("transformers"), tmp_path)
    assert of_net(run("The Trainer without the callback", names, tmp_path, monkeypatch)["resets"]) == 4


def test_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    accelerate = pytest.importorskip("accelerate")
    names = {**with_model(), "accelerator": accelerate.Accelerator(cpu=True)}
    names["loader"] = DataLoader(TensorDataset(X, Y), 8)
    resets = run("accelerate", names, tmp_path, monkeypatch)["resets"]
    assert of_net(resets) == 4 and (tmp_path / "checkpoint").is_dir()


def test_stable_baselines3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    callback = run("Stable-Baselines3", {"agent": agent()}, tmp_path, monkeypatch)["callback"]
    assert of_net(callback.cbps["policy"]) == 32


def agent() -> Any:
    sb3 = pytest.importorskip("stable_baselines3")
    net = {"policy_kwargs": {"net_arch": [8]}, "device": "cpu"}
    return sb3.PPO("MlpPolicy", "CartPole-v1", n_steps=32, batch_size=16, n_epochs=2, **net)


def test_stable_baselines3_without_the_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    names = run("Stable-Baselines3 without the callback", {"agent": agent()}, tmp_path, monkeypatch)
    assert of_net(names["resets"]) == 16


def test_agents_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor = make()[0]
            self.critic = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    agent = Agent()
    names = {"agent": agent, "optimizer": torch.optim.Adam(agent.parameters()), "observations": X}
    names |= {"actions": Y, "returns": torch.randn(32, 1)}
    assert of_net(run("Agents of one file", names, tmp_path, monkeypatch)["resets"]) == 1


def test_target_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    names = run("Target networks and averages of the weights", with_model(), tmp_path, monkeypatch)
    assert len(names["resets"]._listeners) == 2


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")
def test_fsdp2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        names = run("FSDP2", {"model": make()[0], "fully_shard": fully_shard}, tmp_path, monkeypatch)
        train(names["model"], names["optimizer"])
        assert isinstance(names["model"][0].weight, DTensor) and of_net(names["resets"]) == 8
        names["resets"].close()
    finally:
        dist.destroy_process_group()


def train(model: Any, optimizer: Any, steps: int = 8) -> float:
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        optimizer.step()
    return loss.item()


def test_optuna(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    names = run("Optuna", {"optuna": optuna, "make": make, "train": train}, tmp_path, monkeypatch)
    assert len(names["study"].trials) == 3 and "replacement_rate" in names["study"].best_params


# --- a cluster on this machine ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Any:
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.tune")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AIR_NEW_OUTPUT", "0")
        patch.setenv("RAY_TRAIN_V2_ENABLED", "1")
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))  # results go there
        ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
        yield ray
        ray.shutdown()


@pytest.mark.slow
def test_ray_tune(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from ray import tune
    from ray.tune.schedulers import PopulationBasedTraining

    names = {"tune": tune, "PopulationBasedTraining": PopulationBasedTraining, "tempfile": tempfile}
    results = run("Ray Tune", {**names, "make": make, "train": train}, tmp_path, monkeypatch)["results"]
    assert not results.errors and len(results) == 2
    assert all(1e-6 < result.metrics["rate"] < 0.1 for result in results)


def test_a_trial_goes_on_from_anothers_checkpoint_with_a_rate_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What population-based training does; here in the order that is wanted."""
    reports: list[Any] = []
    kept: list[Any] = []

    class Checkpoint:
        from_directory = staticmethod(lambda folder: kept.append(torch.load(f"{folder}/state.pt", weights_only=True)))

        @contextmanager
        def as_directory(self) -> Iterator[str]:
            torch.save(kept[1], tmp_path / "state.pt")
            yield str(tmp_path)

    tune = MagicMock(Checkpoint=Checkpoint, report=lambda metrics, checkpoint: reports.append(metrics))
    tune.get_checkpoint.return_value = None
    names = {"tune": tune, "PopulationBasedTraining": MagicMock(), "tempfile": tempfile, "make": make}
    names["train"] = lambda model, optimizer: train(model, optimizer, 60)  # units are mature after 100
    trial = run("Ray Tune", names, tmp_path, monkeypatch)["trial"]
    trial({"rate": 1e-3})
    assert [report["rate"] for report in reports] == [1e-3] * 4
    tune.get_checkpoint.return_value = Checkpoint()
    trial({"rate": 0.1})
    assert [report["rate"] for report in reports[4:]] == [0.1] * 2, "the last two epochs"
    old, new = (entry[3]["methods"]["0.gxd"]["state"] for entry in (kept[1], kept[-1]))
    assert new["units"]["step"] == old["units"]["step"] + 120 and new["total"] > old["total"]


@pytest.mark.slow
def test_ray_train(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import ray.train.torch
    from ray.train.torch import TorchTrainer

    names = {"ray": ray, "TorchTrainer": TorchTrainer, "tempfile": tempfile, "make": make, "train": train}
    result = run("Ray Train", names, tmp_path, monkeypatch)["result"]
    with result.checkpoint.as_directory() as folder:
        state = torch.load(f"{folder}/gxd.pt", weights_only=True)
    assert result.metrics["loss"] > 0 and state["groups"] == {"0": 12}


def test_every_section_with_code_is_run():
    here = Path(__file__).read_text()
    assert all(f'run("{title}"' in here for title in BLOCKS)
