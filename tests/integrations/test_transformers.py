"""Transformers' Trainer trains with gxd as with an explicit observe(), and resumes from its checkpoints bit for bit."""

import math
import random
import shutil
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gxd
from tests.rig import same

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
from gxd.integrations.transformers import GxdCallback  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning:t")]
OFTEN: dict[str, Any] = {"maturity": 1, "replacement_rate": 0.05}
SMALL: dict[str, Any] = {"vocab_size": 17, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8}


def bert(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(**SMALL, intermediate_size=12, num_labels=options.pop("num_labels", 3), **options)
    return transformers.BertForSequenceClassification(config)


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=17, n_layer=1, n_head=2, n_embd=8, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, intermediate_size=12, max_position_embeddings=8, num_key_value_heads=1)
    return transformers.LlamaForCausalLM(config)


MODELS = {"bert": bert, "gpt2": gpt2, "llama": llama}


@cache
def plan_of(name: str) -> gxd.UnitPlan:
    return gxd.find_units(MODELS[name](), {"input_ids": torch.ones(2, 6, dtype=torch.long)})


def method_of(utility: str | None, **options: Any) -> gxd.Method:
    """ContinualBackprop with a utility, or without any the default of the callback."""
    options = {**OFTEN, **options}
    if utility is None:
        return gxd.method("gxd", **options)
    return gxd.method("continual_backprop", utility=utility, **options)


def callback_of(name: str, utility: str | None = None, **options: Any) -> Any:
    """Of a model. Without a utility the callback is given no method."""
    options = {"plan": plan_of(name), **options}
    if utility is None:
        return GxdCallback(**{**OFTEN, **options})
    own = {name: options.pop(name) for name in ("maturity", "replacement_rate") if name in options}
    return GxdCallback(method_of(utility, **own), **options)


def data(causal: bool, labels: Any = None) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 17, (24, 6), generator=generator)
    labels = tokens if causal else torch.randint(0, 3, (24,), generator=generator) if labels is None else labels
    return [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]


class Explicit(transformers.Trainer):
    """Observes in its own loss."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        loss, output = super().compute_loss(model, inputs, True, **options)
        if model.training:
            logits, labels = output.logits, inputs["labels"]
            if logits.dim() == 3:
                self.callback.cbp.observe(logits[:, :-1], labels[:, 1:], class_dim=-1)
            else:
                self.callback.cbp.observe(logits, labels)
        return (loss, output) if return_outputs else loss


class Alone(transformers.Trainer):
    """Attaches by the one line, when it has made its optimizer. There is no callback."""

    plan: Any = None

    def create_optimizer(self, *given: Any) -> Any:
        optimizer = super().create_optimizer(*given)
        self.resets = gxd.attach(self.model, optimizer, method_of(None), plan=self.plan)
        return optimizer


def train(folder: Path, model: Any, callback: Any, kind: Any = transformers.Trainer, **options: Any) -> Any:
    examples, resume = options.pop("data", None), options.pop("resume", None)
    causal = "CausalLM" in type(model).__name__ or "LMHead" in type(model).__name__
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=4,
        disable_tqdm=True,
        **{"report_to": [], "save_strategy": "no", "logging_strategy": "no", "learning_rate": 0.01, "max_steps": 8}
        | options,
    )
    examples = data(causal) if examples is None else examples
    callbacks = [] if callback is None else callback if isinstance(callback, list) else [callback]
    made = kind(model=model, args=arguments, train_dataset=examples, eval_dataset=examples, callbacks=callbacks)
    made.callback = callback
    made.train(resume_from_checkpoint=resume)
    return made


REGIMES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "checkpointed": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
}
CASES = [("bert", "plain"), ("gpt2", "accumulated"), ("llama", "bf16"), ("gpt2", "checkpointed"), ("llama", "plain")]


@pytest.mark.parametrize(("name", "regime"), CASES)
def test_a_training_is_that_with_the_one_line(tmp_path: Path, name: str, regime: str):
    callback, model = callback_of(name), MODELS[name]()
    train(tmp_path, model, callback, **REGIMES[regime])
    assert callback.cbp.total_resets > 3 and callback.cbp.closed
    expected = MODELS[name]()
    trainer = train(tmp_path, expected, None, type("Planned", (Alone,), {"plan": plan_of(name)}), **REGIMES[regime])
    assert same(dict(model.state_dict()), dict(expected.state_dict()))
    assert same(callback.cbp.state_dict(), trainer.resets.state_dict())
    trainer.resets.close()


@pytest.mark.parametrize(("name", "regime"), CASES)
def test_a_training_is_that_with_an_explicit_observe(tmp_path: Path, name: str, regime: str):
    callback, model = callback_of(name, "gxd"), MODELS[name]()
    train(tmp_path, model, callback, **REGIMES[regime])
    assert callback.cbp.total_resets > 3 and callback.cbp.closed
    mine = callback_of(name, "gxd", select=lambda *_: None)
    expected = MODELS[name]()
    train(tmp_path, expected, mine, Explicit, **REGIMES[regime])
    assert same(dict(model.state_dict()), dict(expected.state_dict()))
    assert same(callback.cbp.state_dict(), mine.cbp.state_dict())


@pytest.mark.parametrize(
    ("name", "regime", "utility"),
    [
        ("bert", "plain", None),
        ("bert", "bf16", None),
        ("gpt2", "accumulated", None),
        ("llama", "checkpointed", None),
        ("bert", "bf16", "gxd"),
        ("gpt2", "accumulated", "gxd_sketch"),
        ("llama", "checkpointed", "gxd"),
        ("gpt2", "plain", "loss_gradient"),
    ],
)
def test_a_checkpoint_resumes_bit_for_bit(tmp_path: Path, name: str, regime: str, utility: str | None):
    options = {**REGIMES[regime], "save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 3}
    whole, model = callback_of(name, utility), MODELS[name]()
    train(tmp_path, model, whole, **options)
    rest, fresh = callback_of(name, utility), MODELS[name]()
    train(tmp_path, fresh, rest, resume=str(tmp_path / "checkpoint-4"), **options)
    half = torch.load(tmp_path / "checkpoint-4" / "gxd.pt", weights_only=True)
    (part,) = half["methods"].values()
    assert 0 < part["state"]["total"] < whole.cbp.total_resets
    assert same(dict(fresh.state_dict()), dict(model.state_dict()))
    assert same(rest.cbp.state_dict(), whole.cbp.state_dict())


def test_a_checkpoint_elsewhere_is_resumed_from_and_not_that_of_another_training_in_the_output_folder(tmp_path: Path):
    options = {"save_strategy": "steps", "save_steps": 4}
    whole, model = callback_of("bert"), bert()
    train(tmp_path / "one", model, whole, **options)
    train(tmp_path / "two", bert(), callback_of("bert", seed=1), seed=1, **options)
    rest, fresh = callback_of("bert"), bert()
    train(tmp_path / "two", fresh, rest, resume=str(tmp_path / "one" / "checkpoint-4"), **options)
    assert same(rest.cbp.state_dict(), whole.cbp.state_dict())
    assert same(dict(fresh.state_dict()), dict(model.state_dict()))


def test_the_state_of_a_checkpoint_is_named_where_it_is_not_in_its_folder(tmp_path: Path):
    options = {"save_strategy": "steps", "save_steps": 4}
    whole, model = callback_of("bert"), bert()
    train(tmp_path / "one", model, whole, **options)
    moved = tmp_path / "moved"
    shutil.copytree(tmp_path / "one" / "checkpoint-4", moved)
    (tmp_path / "state").mkdir()
    (moved / "gxd.pt").rename(tmp_path / "state" / "gxd.pt")
    with pytest.raises(FileNotFoundError, match="resume_from="):
        train(tmp_path / "two", bert(), callback_of("bert"), resume=str(moved), **options)
    rest, fresh = callback_of("bert", resume_from=tmp_path / "state"), bert()
    train(tmp_path / "three", fresh, rest, resume=str(moved), **options)
    assert same(rest.cbp.state_dict(), whole.cbp.state_dict())
    missing = callback_of("bert", resume_from=tmp_path / "nowhere")  # not the one in the output folder instead
    with pytest.raises(FileNotFoundError, match=r"nowhere has no gxd\.pt"):
        train(tmp_path / "one", bert(), missing, resume=str(tmp_path / "one" / "checkpoint-4"), **options)
    anew = callback_of("bert", resume_from=False)
    train(tmp_path / "four", bert(), anew, resume=str(moved), **options)
    assert anew.cbp._parts[0].units.step == 4


def test_causal_models_are_observed_at_the_next_token(tmp_path: Path):
    callback, model = callback_of("gpt2", "gxd", replacement_rate=0.0), gpt2()
    batch = torch.stack([one["input_ids"] for one in data(True)[:4]])
    sgd = torch.optim.SGD(model.parameters(), 0.0)
    cbp = gxd.ContinualBackprop(model, sgd, plan=plan_of("gpt2"), replacement_rate=0.0)
    for dropout in (m for m in model.modules() if isinstance(m, torch.nn.Dropout)):
        dropout.p = 0.0
    logits = model(input_ids=batch).logits
    score = logits[:, :-1].gather(-1, batch[:, 1:, None]).sum()
    cbp.observe(score=score)
    score.backward()
    sgd.step()
    cbp.close()
    expected = cbp.utilities()
    train(tmp_path, model, callback, max_steps=1, data=data(True)[:4], learning_rate=0.0)
    for name, utility in expected.items():
        torch.testing.assert_close(callback.cbp.utilities()[name], utility)


@pytest.mark.parametrize("utility", ["gxd", "gxi"])
def test_label_smoothing_hides_the_labels_and_a_utility_that_needs_them_says_what_does_without(
    tmp_path: Path, utility: str
):
    model = bert()
    with pytest.raises(gxd.ObservationError, match=r"GxdCallback\(\) or .*utility='gxd_sketch'"):
        train(tmp_path, model, callback_of("bert", utility), label_smoothing_factor=0.1)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("utility", [None, "gxd_sketch"])
def test_label_smoothing_and_a_loss_of_ones_own_are_the_same_training_to_what_needs_no_labels(
    tmp_path: Path, utility: str | None
):
    """Nothing of the labels is seen but the loss's gradients."""
    smooth = transformers.trainer_pt_utils.LabelSmoother(0.1)

    class Own(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            return smooth(model(**{key: value for key, value in inputs.items() if key != "labels"}), inputs["labels"])

    callback, model = callback_of("bert", utility), bert()
    train(tmp_path, model, callback, label_smoothing_factor=0.1)
    expected, own = bert(), callback_of("bert", utility)
    train(tmp_path, expected, own, Own)
    assert same(callback.cbp.state_dict(), own.cbp.state_dict()) and own.cbp.total_resets > 3
    assert same(dict(model.state_dict()), dict(expected.state_dict()))


def test_layers_that_reentrant_checkpointing_hides_are_said_with_the_remedy(tmp_path: Path):
    hidden = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.warns(gxd.ObservationWarning, match=r"layers \('bert.*'use_reentrant': False"):
        train(tmp_path, bert(), GxdCallback(), **hidden)
    callback = GxdCallback()
    with warnings.catch_warnings(), pytest.raises(gxd.ObservationWarning):
        warnings.simplefilter("error", gxd.ObservationWarning)
        train(tmp_path, bert(), callback, **hidden)
    assert callback.cbp.closed


@pytest.mark.parametrize("labels", ["one number", "several labels"])
def test_regressions_and_several_labels_are_observed_by_what_they_predict(tmp_path: Path, labels: str):
    generator = torch.Generator().manual_seed(3)
    if labels == "one number":
        target, options = torch.randn(24, generator=generator), {"num_labels": 1}
    else:
        target = torch.randint(0, 2, (24, 3), generator=generator).float()
        options = {"num_labels": 3, "problem_type": "multi_label_classification"}
    examples = data(False, labels=target)[:4]

    def model() -> Any:
        return bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **options)

    callback = GxdCallback(method_of("gxd", replacement_rate=0.0))
    train(tmp_path, model(), callback, data=examples, max_steps=1)
    other = model()
    inputs, y = torch.stack([one["input_ids"] for one in examples]), target[:4]
    cbp = gxd.ContinualBackprop(
        other, torch.optim.SGD(other.parameters(), 0.1), plan=callback.cbp.plan, replacement_rate=0.0
    )
    logits = other(input_ids=inputs).logits
    cbp.observe(score=logits if labels == "one number" else (2 * y - 1) * logits)
    F.mse_loss(logits, torch.zeros_like(logits)).backward()
    cbp.optimizer.step()
    for name, utility in cbp.utilities().items():
        torch.testing.assert_close(callback.cbp.utilities()[name], utility)


def test_a_second_train_goes_on_where_the_first_has_ended(tmp_path: Path):
    callback = callback_of("bert")
    trainer = train(tmp_path, bert(), callback)
    first = callback.cbp.total_resets
    trainer.train()
    assert callback.cbp._parts[0].units.step == 16 and callback.cbp.total_resets > first


def test_metrics_are_in_the_history_and_at_tensorboard(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    options = {"logging_strategy": "steps", "logging_steps": 4, "report_to": ["tensorboard"]}
    trainer = train(tmp_path, bert(), callback_of("bert"), **options)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["gxd/resets"] > 0 for entry in logs] == [True, True]
    assert not any(math.isnan(value) for entry in logs for value in entry.values())
    (file,) = tmp_path.rglob("events.out*")
    events = accumulator.EventAccumulator(str(file)).Reload()
    assert any("gxd/resets" in tag for tag in events.Tags()["scalars"])


def test_methods_are_given_as_to_attach_and_a_prepared_model_is_traced(tmp_path: Path):
    redo, l2 = gxd.method("redo", threshold=0.5, every=2), gxd.method("l2_init", strength=1e-3)
    callback = GxdCallback(redo, l2)
    train(tmp_path, bert(), callback, **REGIMES["bf16"], **REGIMES["checkpointed"])
    assert callback.cbp.plan.fingerprint() == plan_of("bert").fingerprint()
    assert callback.cbp.methods == (redo, l2) and callback.cbp._unit_part("redo").units.step == 8


def test_a_model_is_planned_with_two_examples_and_takes_no_random_numbers_from_the_training(tmp_path: Path):
    with_gxd, without, callback = bert(), bert(), GxdCallback(replacement_rate=0.0)

    class Drawing(list):  # type: ignore[type-arg]
        def __getitem__(self, number: Any) -> Any:
            torch.rand(1), np.random.rand(), random.random()
            return super().__getitem__(number)

    train(tmp_path, with_gxd, callback, data=Drawing(data(False)))
    after = torch.rand(1), np.random.rand(), random.random()
    train(tmp_path, without, None, data=Drawing(data(False)))
    assert after == (torch.rand(1), np.random.rand(), random.random())  # the Trainer seeds them
    assert same(dict(with_gxd.state_dict()), dict(without.state_dict()))
    assert callback.cbp.plan.fingerprint() == plan_of("bert").fingerprint()


# --- accelerate -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("utility", [None, "gxd"])
def test_accelerate_saves_and_loads_what_is_registered_for_checkpointing(tmp_path: Path, utility: str | None):
    def start() -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), 0.01))
        method = method_of(utility, maturity=2, replacement_rate=0.2)
        cbp = gxd.attach(model, optimizer, method, example_inputs=torch.zeros(2, 4))
        accelerator.register_for_checkpointing(cbp)
        return accelerator, model, optimizer, cbp

    def steps(accelerator: Any, model: Any, optimizer: Any, cbp: Any, numbers: range) -> None:
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            x, y = torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)
            with accelerator.accumulate(model):
                logits = model(x)
                if utility is not None:
                    cbp.observe(logits, y)
                accelerator.backward(F.cross_entropy(logits, y))
                optimizer.step()
                optimizer.zero_grad()

    whole = start()
    steps(*whole, range(8))
    whole[0].save_state(str(tmp_path / "state"))
    steps(*whole, range(8, 20))
    rest = start()
    rest[0].load_state(str(tmp_path / "state"))
    steps(*rest, range(8, 20))
    assert rest[3].total_resets > 8 and rest[3]._parts[0].units.step == 10
    assert same(dict(rest[1].state_dict()), dict(whole[1].state_dict()))
    assert same(rest[3].state_dict(), whole[3].state_dict())


# --- bad input --------------------------------------------------------------------------------------------------------


def test_a_callback_that_is_given_twice_or_to_another_model_is_refused(tmp_path: Path):
    model, twice = bert(), callback_of("bert")
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="given twice"):
        warnings.simplefilter("ignore")
        train(tmp_path, model, [twice, twice])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    callback = callback_of("bert")
    train(tmp_path, bert(), callback, max_steps=1)
    with pytest.raises(RuntimeError, match="has trained another model"):
        train(tmp_path, bert(), callback, max_steps=1)


def test_a_checkpoint_of_another_plan_is_refused_and_nothing_stays_attached(tmp_path: Path):
    options = {"save_strategy": "steps", "save_steps": 4, "max_steps": 4}
    inputs = {"input_ids": torch.ones(2, 6, dtype=torch.long)}
    part = gxd.find_units(bert(), inputs, exclude="*attention*")
    train(tmp_path, bert(), GxdCallback(plan=part), **options)
    model = bert()
    with pytest.raises(gxd.PlanError, match="another model or plan"):
        train(tmp_path, model, GxdCallback(), resume=str(tmp_path / "checkpoint-4"), **{**options, "max_steps": 8})
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_model_without_logits_needs_to_be_selected_from(tmp_path: Path):
    class Bare(transformers.BertForSequenceClassification):
        def forward(self, input_ids: Tensor, labels: Any = None) -> Any:
            output = super().forward(input_ids=input_ids, labels=labels)
            return {"loss": output.loss, "scores": output.logits} if labels is not None else output.logits

    torch.manual_seed(0)
    model = Bare(transformers.BertConfig(**SMALL, intermediate_size=12, num_labels=3))
    with pytest.raises(TypeError, match="without logits: say which tensor counts"):
        train(tmp_path, model, GxdCallback(method_of("gxd")))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    callback = GxdCallback(method_of("gxd"), select=lambda args, kwargs, output: output["scores"])
    train(tmp_path, model, callback)
    assert callback.cbp.total_resets > 3
    callback = GxdCallback(**OFTEN)  # by default it does not matter what a model returns, besides its loss
    train(tmp_path, model, callback)
    assert callback.cbp.total_resets > 3
