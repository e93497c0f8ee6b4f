"""Loops that nobody has adapted train with one line, ``gxd.attach(model, optimizer, "gxd", ...)``, and no callback."""

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gxd
from tests.rig import same

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*isinstance.*:FutureWarning")]

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (64,), generator=torch.Generator().manual_seed(1))
OFTEN: dict[str, Any] = {"replacement_rate": 0.1, "maturity": 2}
NEVER: dict[str, Any] = {"replacement_rate": 0.0}
Options = dict[str, Any] | None  # of the method; None: without gxd


@contextmanager
def silent() -> Iterator[None]:
    """Ours are errors."""
    with warnings.catch_warnings():
        for kind in (gxd.ObservationWarning, gxd.NonFiniteWarning, gxd.CompileWarning):
            warnings.simplefilter("error", kind)
        yield


def line(model: Any, optimizer: Any, options: Options, inputs: Any) -> list[gxd.Attachment]:
    """The only line; none of them without gxd."""
    if options is None:
        return []
    return [gxd.attach(model, optimizer, gxd.method("gxd", **options), example_inputs=inputs)]


def mlp() -> nn.Sequential:
    torch.manual_seed(0), np.random.seed(0)
    return nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))


# Each trains and returns what was trained, with the random numbers that come next, and what was attached.
Trained = tuple[dict[str, Any], list[gxd.Attachment]]


def after(*modules: nn.Module) -> dict[str, Any]:
    """All weights, copied, and what the generators would draw next."""
    weights = [copy.deepcopy(dict(module.state_dict())) for module in modules]
    return {"weights": weights, "drawn": torch.rand(3), "numpy": np.random.rand(3).tolist()}


# --- Lightning --------------------------------------------------------------------------------------------------------


def lightning(folder: Path, options: Options, where: str, **settings: Any) -> Trained:
    framework = pytest.importorskip("lightning.pytorch")
    found: list[gxd.Attachment] = []

    class Module(framework.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.dropout = mlp(), nn.Dropout(0.1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self.net(self.dropout(batch[0])), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.net(batch[0])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), 0.01)
            if where == "configure_optimizers":
                found.extend(line(self.net, optimizer, options, X[:2]))
            return optimizer

        def on_fit_start(self) -> None:
            if where == "on_fit_start":  # with the optimizer as Lightning wraps it
                found.extend(line(self.net, self.optimizers(), options, X[:2]))

    framework.seed_everything(0, verbose=False)
    module = Module()
    trainer = framework.Trainer(
        default_root_dir=folder,
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    loader = DataLoader(TensorDataset(X, Y), 8, shuffle=True)
    trainer.fit(module, loader, DataLoader(TensorDataset(X, Y), 32))
    return after(module), found


def lightning_configured(folder: Path, options: Options) -> Trained:
    return lightning(folder, options, "configure_optimizers")


def lightning_at_the_start(folder: Path, options: Options) -> Trained:
    return lightning(folder, options, "on_fit_start", gradient_clip_val=0.5)


def lightning_accumulated_in_16_bits(folder: Path, options: Options) -> Trained:
    return lightning(folder, options, "configure_optimizers", accumulate_grad_batches=2, precision="bf16-mixed")


# --- Transformers -----------------------------------------------------------------------------------------------------


def transformers_model(kind: str) -> Any:
    framework = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "bert":
        sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 12}
        return framework.BertForSequenceClassification(framework.BertConfig(vocab_size=17, num_labels=3, **sizes))
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 8, "bos_token_id": 0, "eos_token_id": 0}
    return framework.GPT2LMHeadModel(framework.GPT2Config(vocab_size=17, **sizes))


def transformers(folder: Path, options: Options, kind: str, **settings: Any) -> Trained:
    framework = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    tokens = torch.randint(1, 17, (24, 6), generator=torch.Generator().manual_seed(0))
    labels = tokens if kind == "gpt2" else Y[:24]
    model = transformers_model(kind)
    arguments = framework.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=4,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        learning_rate=0.01,
        max_steps=12,
        **settings,
    )
    data = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels)]
    trainer = framework.Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
    found = line(model, trainer.create_optimizer(), options, {"input_ids": tokens[:2]})
    trainer.train()
    return after(model), found


def transformers_bert(folder: Path, options: Options) -> Trained:
    return transformers(folder, options, "bert", eval_strategy="steps", eval_steps=5, label_smoothing_factor=0.1)


def transformers_gpt2(folder: Path, options: Options) -> Trained:
    return transformers(folder, options, "gpt2", gradient_accumulation_steps=2, bf16=True)


# --- Stable-Baselines3 ------------------------------------------------------------------------------------------------

OFF = {"learning_starts": 20, "batch_size": 16, "buffer_size": 500}
AGENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "PPO": ("CartPole-v1", {"n_steps": 32, "batch_size": 16, "n_epochs": 3}),
    "DQN": ("CartPole-v1", {**OFF, "train_freq": 1, "target_update_interval": 10}),
    "SAC": ("Pendulum-v1", OFF),
}


def agent(name: str) -> Any:
    framework = pytest.importorskip("stable_baselines3")
    environment, settings = AGENTS[name]
    options = {"policy_kwargs": {"net_arch": [12, 10]}, "seed": 0, "device": "cpu", **settings}
    return getattr(framework, name)("MlpPolicy", environment, **options)


def policy_lines(made: Any, options: Options) -> list[gxd.Attachment]:
    """One for each network that has an optimizer."""
    states = torch.zeros(2, *made.observation_space.shape)
    if not hasattr(made, "critic"):
        network = made.q_net if hasattr(made, "q_net") else made.policy
        return line(network, made.policy.optimizer, options, states)
    actions = torch.zeros(2, *made.action_space.shape)
    actor = line(made.actor, made.actor.optimizer, options, states)
    return [*line(made.critic, made.critic.optimizer, options, (states, actions)), *actor]


def sb3(name: str, options: Options) -> Trained:
    made = agent(name)
    found = policy_lines(made, options)
    made.learn(90)
    return after(made.policy), found


def sb3_ppo(folder: Path, options: Options) -> Trained:
    return sb3("PPO", options)


def sb3_dqn(folder: Path, options: Options) -> Trained:
    return sb3("DQN", options)


def sb3_sac(folder: Path, options: Options) -> Trained:
    return sb3("SAC", options)


# --- accelerate, and loops of one's own -------------------------------------------------------------------------------


def accelerated(folder: Path, options: Options) -> Trained:
    framework = pytest.importorskip("accelerate")
    accelerator = framework.Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    loader = DataLoader(TensorDataset(X, Y), 8)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    found = line(model, optimizer, options, X[:2])
    for _ in range(3):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return after(model), found


def scaled(folder: Path, options: Options) -> Trained:
    """Autocast and a gradient scaler that gxd is not told of; one batch overflows and is skipped."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    found = line(model, optimizer, options, X[:2])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    for step in range(20):
        x, y = X[step % 8 * 8 :][:8], Y[step % 8 * 8 :][:8]
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y) * (torch.inf if step == 7 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return after(model), found


LOOPS: dict[str, Callable[[Path, Options], Trained]] = {
    "Lightning, configure_optimizers": lightning_configured,
    "Lightning, on_fit_start": lightning_at_the_start,
    "Lightning, accumulated in 16 bits": lightning_accumulated_in_16_bits,
    "Transformers, BERT": transformers_bert,
    "Transformers, GPT-2": transformers_gpt2,
    "Stable-Baselines3, PPO": sb3_ppo,
    "Stable-Baselines3, DQN": sb3_dqn,
    "Stable-Baselines3, SAC": sb3_sac,
    "accelerate": accelerated,
    "autocast and a gradient scaler": scaled,
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_nobody_has_adapted_resets_units_of_every_layer_in_silence(name: str, tmp_path: Path):
    with silent():
        _, attached = LOOPS[name](tmp_path, OFTEN)
    assert attached
    for resets in attached:
        assert resets.total_resets > 3 and resets.nonfinite_observations == 0
        for group, utility in resets.utilities().items():
            assert bool(utility.isfinite().all()) and bool(utility.any()), group
            assert int(resets.ages()[group].min()) < int(resets._parts[0].units.step), f"a unit of {group} was reset"
        resets.close()


@pytest.mark.parametrize("name", LOOPS)
def test_a_rate_of_zero_is_the_training_without_gxd_to_the_last_bit(name: str, tmp_path: Path):
    with silent():
        with_gxd, attached = LOOPS[name](tmp_path / "with", NEVER)
    assert all(utility.any() for resets in attached for utility in resets.utilities().values())
    for resets in attached:
        resets.close()
    without, _ = LOOPS[name](tmp_path / "without", None)
    assert same(with_gxd, without)


# --- an actor's loss runs through its critic --------------------------------------------------------------------------


@contextmanager
def hidden_from(resets: gxd.Attachment, critic: nn.Module) -> Iterator[None]:
    """Within this context, gxd does not see the critic when it is called with actions that an actor has just made."""
    forward = critic.forward

    def called(states: Tensor, actions: Tensor) -> Any:
        if not actions.requires_grad:
            return forward(states, actions)
        with resets.paused():
            return forward(states, actions)

    critic.forward = called
    try:
        yield
    finally:
        del critic.forward


def test_the_critics_utilities_are_those_of_a_training_in_which_the_actors_pass_is_hidden():
    """Nothing is frozen or paused by the loop: the gradients of that pass are zeroed before the critic's next one."""
    trainings: list[Any] = []
    for hide in (False, True):
        made = agent("SAC")
        critic, actor = policy_lines(made, OFTEN)
        with hidden_from(critic, made.critic) if hide else nullcontext():
            made.learn(60)
        for one in (critic, actor):
            one.discard()  # what the last pass of the actor has left, which the next one would have voided
            one.close()
        assert critic.total_resets > 3
        states = [one.state_dict() for one in (critic, actor)]
        trainings.append((critic.utilities(), states, dict(made.policy.state_dict())))
    assert same(*trainings)


# --- the line ---------------------------------------------------------------------------------------------------------


def test_the_snippet_runs_as_it_stands_in_silence_and_resets_units():
    model, stream = mlp(), [(X[start:][:8], Y[start:][:8]) for start in range(0, 64, 8)] * 30
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    x, y = stream[0]
    with silent():
        resets = gxd.attach(model, optimizer, "gxd", example_inputs=x[:2])  # the only line
        for x, y in stream:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert resets.total_resets > 0
    assert all(bool(utility.isfinite().all()) for utility in resets.utilities().values())
    assert all(int(age.max()) > 100 for age in resets.ages().values())
