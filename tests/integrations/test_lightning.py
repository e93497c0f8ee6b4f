"""Lightning trains with gxd as a plain loop does, and resumes from its own checkpoints bit for bit."""

import copy
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gxd
from tests.processes import WARM
from tests.rig import same

lightning = pytest.importorskip("lightning.pytorch")
from gxd.integrations.lightning import GxdCallback  # noqa: E402

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*isinstance.*:FutureWarning")

OFTEN: dict[str, Any] = {"maturity": 2, "replacement_rate": 0.1}
X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (48,), generator=torch.Generator().manual_seed(1))


class Module(lightning.LightningModule):
    """Calls itself, and a loss function that is a module."""

    skip = ()  # numbers of batches for which there is no loss

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))
        self.loss_fn, self.automatic_optimization = nn.CrossEntropyLoss(), not manual

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        x, y = batch
        loss = self.loss_fn(self(x), y)
        if batch_idx in self.skip:
            return None
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)


PLAN = gxd.find_units(Module(), X[:2])


def methods_of(utility: str | None) -> list[gxd.Method]:
    """That a callback is given: ContinualBackprop with a utility, or none, and then it is the method ``gxd``."""
    return [] if utility is None else [gxd.method("continual_backprop", utility=utility, **OFTEN)]


def callback_of(utility: str | None, **options: Any) -> Any:
    return GxdCallback(*methods_of(utility), **({**OFTEN, **options} if utility is None else options))


def data(size: int = 8) -> DataLoader:
    return DataLoader(TensorDataset(X, Y), size)


def trainer(folder: Path, *callbacks: Any, epochs: int = 3, **options: Any) -> Any:
    options = {"logger": False, "enable_checkpointing": False, **options}
    return lightning.Trainer(
        default_root_dir=folder,
        max_epochs=epochs,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **options,
    )


def fit(folder: Path, callback: Any, module: Any = None, **options: Any) -> Any:
    module = Module() if module is None else module
    checkpoint = options.pop("ckpt_path", None)
    trainer(folder, callback, **options).fit(module, data(), data(), ckpt_path=checkpoint)
    return module


def plain(epochs: int = 3, accumulate: int = 1, autocast: bool = False, utility: str | None = "gxd") -> Any:
    """The same training as a loop. Without a utility it is the one line alone, and nothing is observed."""
    module = Module()
    optimizer = module.configure_optimizers()
    if utility is None:
        cbp = gxd.attach(module, optimizer, gxd.method("gxd", **OFTEN), plan=PLAN)
    else:
        cbp = gxd.ContinualBackprop(module, optimizer, plan=PLAN, utility=utility, **OFTEN)
    for _ in range(epochs):
        for number, (x, y) in enumerate(data()):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = module(x)
                loss = module.loss_fn(logits, y) / accumulate
            if utility is not None:
                cbp.observe(logits, y)
            loss.backward()
            if number % accumulate == accumulate - 1:
                optimizer.step()
                optimizer.zero_grad()
    return module, cbp


HOW: dict[str, Any] = {
    "automatic": {},
    "accumulated": {"accumulate_grad_batches": 3},
    "bf16": {"precision": "bf16-mixed"},
    "manual": {"manual": True},
}


def start(how: str) -> tuple[Any, dict[str, Any]]:
    options = dict(HOW[how])
    return Module(options.pop("manual", False)), options


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("utility", "criterion"), [(None, None), ("gxd", None), ("gxd", "loss_fn")], ids=["nothing", "output", "criterion"]
)
def test_a_fit_is_the_same_training_as_a_loop(tmp_path: Path, how: str, utility: str | None, criterion: str | None):
    callback = callback_of(utility, criterion=criterion)
    module, options = start(how)
    fit(tmp_path, callback, module, **options)
    accumulate = options.get("accumulate_grad_batches", 1)
    expected, cbp = plain(accumulate=accumulate, autocast=how == "bf16", utility=utility)
    assert callback.cbp.total_resets > (3 if how == "accumulated" else 10)
    assert same(dict(module.state_dict()), dict(expected.state_dict()))
    assert same(callback.cbp.state_dict(), cbp.state_dict())


@pytest.mark.parametrize(
    ("how", "utility"),
    [
        *((how, utility) for how in HOW for utility in (None, "gxd")),
        ("automatic", "gxd_sketch"),
        ("accumulated", "loss_gradient"),
    ],
)
def test_a_checkpoint_resumes_bit_for_bit(tmp_path: Path, how: str, utility: str | None):
    whole = callback_of(utility, plan=PLAN)
    module, options = start(how)
    fit(tmp_path, whole, module, epochs=4, **options)
    first, rest = (callback_of(utility, plan=PLAN) for _ in range(2))
    half, options = start(how)
    one = trainer(tmp_path, first, epochs=2, **options)
    one.fit(half, data(), data())
    one.save_checkpoint(tmp_path / "half.ckpt")
    assert torch.load(tmp_path / "half.ckpt", weights_only=True)["callbacks"]
    fresh, options = start(how)
    trainer(tmp_path, rest, epochs=4, **options).fit(
        fresh, data(), data(), ckpt_path=tmp_path / "half.ckpt", weights_only=True
    )
    assert 0 < first.cbp.total_resets < whole.cbp.total_resets
    assert same(dict(fresh.state_dict()), dict(module.state_dict()))
    assert same(rest.cbp.state_dict(), whole.cbp.state_dict())


def alike() -> DataLoader:
    """Six batches of the same examples, for without a stateful loader Lightning begins its epoch again."""
    return DataLoader(TensorDataset(X[:8].repeat(6, 1), Y[:8].repeat(6)), 8)


class Interrupted(lightning.Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 8:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "mid.ckpt")
            raise RuntimeError("power cut")


@pytest.mark.parametrize("utility", [None, "gxd"])
def test_a_fit_that_is_interrupted_in_mid_epoch_resumes_exactly_and_leaves_no_hook(tmp_path: Path, utility: str | None):
    whole, broken, rest = (callback_of(utility, plan=PLAN) for _ in range(3))
    module, half, fresh = Module(), Module(), Module()
    trainer(tmp_path, whole).fit(module, alike())
    with pytest.raises(RuntimeError, match="power cut"):
        trainer(tmp_path, broken, Interrupted()).fit(half, alike())
    assert broken.cbp.closed and not any(m._forward_hooks or m._forward_pre_hooks for m in half.modules())
    trainer(tmp_path, rest).fit(fresh, alike(), ckpt_path=tmp_path / "mid.ckpt")
    assert same(dict(fresh.state_dict()), dict(module.state_dict()))
    assert same(rest.cbp.state_dict(), whole.cbp.state_dict())


@pytest.mark.parametrize("utility", [None, "gxd"])
def test_a_second_fit_goes_on_where_the_first_has_ended(tmp_path: Path, utility: str | None):
    callback = callback_of(utility)
    module = fit(tmp_path, callback, epochs=2)
    ages, first = callback.cbp.ages(), callback.cbp
    assert first.closed
    fit(tmp_path, callback, module, epochs=1)
    assert callback.cbp is not first and callback.cbp.total_resets > first.total_resets
    assert callback.cbp._parts[0].units.step == 18 and max(int(age.max()) for age in ages.values()) <= 12


@pytest.mark.parametrize("utility", [None, "gxd"])
@pytest.mark.parametrize("skip", [(1,), (0, 1, 2, 3, 4, 5)])
def test_a_step_without_loss_is_not_scored_and_does_not_raise(
    tmp_path: Path, skip: tuple[int, ...], utility: str | None
):
    callback = callback_of(utility)
    module = Module()
    module.skip = skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gxd.ObservationWarning)
        fit(tmp_path, callback, module)
    assert (callback.cbp.total_resets > 0) == (len(skip) == 1)


@pytest.mark.parametrize("utility", [None, "gxd"])
def test_a_micro_batch_without_loss_does_not_count(tmp_path: Path, utility: str | None):
    callback, module = callback_of(utility), Module()
    module.skip = (1,)
    fit(tmp_path, callback, module, epochs=1, accumulate_grad_batches=6)
    expected = Module()
    methods = methods_of(utility) or [gxd.method("gxd", **OFTEN)]
    cbp = gxd.attach(expected, expected.configure_optimizers(), *methods, plan=PLAN)
    for number, (x, y) in enumerate(data()):
        logits = expected(x)
        if number != 1:
            cbp.observe(logits, y)
            (F.cross_entropy(logits, y) / 6).backward()
    cbp.optimizer.step()
    assert same(callback.cbp.utilities(), cbp.utilities())


class Parts(Module):
    """Calls a part of itself, on batches that are dicts."""

    forward = lightning.LightningModule.forward

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch["x"]), batch["y"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


def dicts() -> DataLoader:
    return DataLoader([{"x": x, "y": y} for x, y in zip(X, Y, strict=True)], 8)


@pytest.mark.parametrize("utility", [None, "gxd"])
def test_a_part_that_is_called_by_itself_is_named(tmp_path: Path, utility: str | None):
    callback = callback_of(utility, module="net", example_inputs=X[:2])
    module = Parts()
    trainer(tmp_path, callback).fit(module, dicts())
    expected, cbp = plain(utility=utility)
    assert same(dict(module.state_dict()), dict(expected.state_dict())) and cbp.total_resets > 10
    assert callback.cbp.model is module.net


def test_methods_are_given_as_to_attach_and_metrics_go_to_the_logger(tmp_path: Path):
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    redo, l2 = gxd.method("redo", threshold=0.5, every=4), gxd.method("l2_init", strength=1e-3)
    callback = GxdCallback(redo, l2, example_inputs=X[:2])
    fit(tmp_path, callback, logger=logger, log_every_n_steps=6)
    assert callback.cbp.methods == (redo, l2)
    lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert "gxd/resets" in lines[0] and len(lines) == 4


def test_a_training_step_may_observe_by_itself(tmp_path: Path):
    class Own(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            logits = self(batch[0])
            callback.cbp.observe(logits, batch[1])
            return F.cross_entropy(logits, batch[1])

    callback = callback_of("gxd", observe=False)
    module = fit(tmp_path, callback, Own())
    assert same(dict(module.state_dict()), dict(plain()[0].state_dict()))


def test_example_inputs_of_the_module_are_used(tmp_path: Path):
    module = Module()
    module.example_input_array = X[:2]
    seen: list[Any] = []

    class Look(lightning.Callback):
        def on_train_start(self, *_: Any) -> None:
            seen.append(callback.cbp)

    callback = GxdCallback(**OFTEN)
    trainer(tmp_path, callback, Look()).fit(module, data())
    assert isinstance(seen[0], gxd.Attachment)
    assert [method.utility.name for method in seen[0].methods] == ["gxd_loss"]


def test_a_network_that_stays_in_evaluation_mode_is_told_of_at_the_first_step_with_a_loss(tmp_path: Path):
    """Lightning leaves modes as they are, and pretrained networks come in evaluation mode."""
    module = Module()
    module.net.eval()
    with pytest.raises(gxd.ObservationError, match=r"model\.train\(\)"):
        fit(tmp_path, GxdCallback(**OFTEN), module)
    module = Module()
    module.skip = (0, 1)
    callback = GxdCallback(**OFTEN)
    fit(tmp_path, callback, module, epochs=2)  # steps without a loss, first and in between, are nothing to tell of
    assert callback.cbp.total_resets > 0
    module = Module()
    module.net.eval()
    callback = GxdCallback(on_unobserved="skip", **OFTEN)
    fit(tmp_path, callback, module, epochs=1)
    assert callback.cbp.total_resets == 0


# --- two processes ----------------------------------------------------------------------------------------------------


class Save(lightning.Callback):
    def __init__(self, callback: Any) -> None:
        self.callback = callback

    def on_train_end(self, trainer: Any, module: Any) -> None:
        state = dict(module.state_dict()), self.callback.cbp.state_dict(), self.callback.cbp.total_resets
        torch.save(state, Path(trainer.default_root_dir) / f"rank{trainer.global_rank}.pt")


def in_two_processes(folder: Path, utility: str | None) -> None:
    torch.set_num_threads(1)
    callback = callback_of(utility)
    options = {"strategy": "ddp_fork", "devices": 2, "use_distributed_sampler": False}
    trainer(folder, callback, Save(callback), **options).fit(Shared())


class WithSgd(Module):
    """Adam would make large steps of the rounding of gradients that are zero."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Shared(WithSgd):
    """Each process has every other example."""

    def train_dataloader(self) -> DataLoader:
        rank = self.trainer.global_rank
        return DataLoader(TensorDataset(X[rank::2], Y[rank::2]), 4)


@pytest.mark.slow
@pytest.mark.parametrize("utility", [None, "gxd", "loss_gradient"])
def test_two_processes_train_as_one_does(tmp_path: Path, utility: str | None):
    process = WARM.Process(target=in_two_processes, args=(tmp_path, utility))
    process.start()
    process.join(120)
    process.kill()
    states = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    assert same(states[0][0], states[1][0])
    alone = callback_of(utility)
    module = fit(tmp_path, alone, WithSgd())
    assert states[0][2] == alone.cbp.total_resets > 10
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(states[0][0][name], tensor)


# --- bad input --------------------------------------------------------------------------------------------------------


def refused(folder: Path, callback: Any, module: Any, exception: Any, words: str, **options: Any) -> None:
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(exception, match=words):
        fit(folder, callback, module, **options)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    assert same(dict(module.state_dict()), dict(before))


class Branches(Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * (2 if x.sum() > 0 else 1)


class Beside(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("utility", "options", "kind", "exception", "words"),
    [
        *(
            (utility, *row)
            for utility in (None, "gxd")
            for row in [
                ({"module": "nett"}, Module, ValueError, "Did you mean 'net'"),
                ({"criterion": "loss"}, Module, ValueError, "has no module 'loss'"),
                ({}, Branches, gxd.TraceError, "could not be traced"),
                ({}, Parts, ValueError, r"GxdCallback\(module='net'\)"),
                ({"example_inputs": X[:2, :3]}, Module, gxd.TraceError, "fix example_inputs"),
            ]
        ),
        ("gxd", {}, Beside, gxd.ObservationError, r"has not called the Beside itself"),
        ("gxd", {"target": lambda *_: Y}, Module, ValueError, "target has shape"),
    ],
)
def test_what_cannot_be_trained_is_refused_and_nothing_stays_attached(
    tmp_path: Path, utility: str | None, options: dict[str, Any], kind: Any, exception: Any, words: str
):
    refused(tmp_path, callback_of(utility, **options), kind(), exception, words)


def test_nothing_has_to_be_called_as_a_whole_by_default(tmp_path: Path):
    callback = GxdCallback(**OFTEN)
    module = fit(tmp_path, callback, Beside())
    expected, cbp = plain(utility=None)
    assert same(dict(module.state_dict()), dict(expected.state_dict())) and cbp.total_resets > 10


@pytest.mark.parametrize(
    ("options", "exception", "words"),
    [
        ({"replacment_rate": 0.1}, ValueError, "Did you mean 'replacement_rate'"),
        ({"utility": "gxd"}, ValueError, r"give the method, as gxd\.method\('continual_backprop', utility=\.\.\.\)"),
        ({"replacement_rate": 7}, ValueError, "replacement_rate=7"),
        ({"on_unobserved": "rise"}, ValueError, "Did you mean 'raise'"),
        ({"scaler": None}, TypeError, "the training loop has it"),
        ({"plan": gxd.UnitPlan(()), "example_inputs": X}, ValueError, "either"),
        ({"criterion": "loss_fn", "target": lambda *_: Y}, ValueError, "either criterion"),
    ],
)
def test_wrong_options_are_refused_before_there_is_a_trainer(options: dict[str, Any], exception: Any, words: str):
    with pytest.raises(exception, match=words):
        GxdCallback(**options)


@pytest.mark.parametrize("given", ["redo", gxd.method("redo")])
def test_an_option_of_a_method_that_is_given_to_the_callback_is_refused_with_the_remedy(given: Any):
    with pytest.raises(ValueError, match=r"give the method, as gxd\.method\('redo', threshold=\.\.\.\)"):
        GxdCallback(given, threshold=0.5)


def test_wrong_options_of_a_method_are_refused_when_it_is_made():
    with pytest.raises(TypeError, match="Did you mean 'utility'"):
        gxd.method("continual_backprop", utilty="gxd")
    with pytest.raises((ValueError, KeyError), match="gxd"):
        callback_of("gdx")


def test_a_callback_that_is_given_twice_or_to_another_model_is_refused(tmp_path: Path):
    twice = GxdCallback(example_inputs=X[:2])
    module = Module()
    with pytest.raises(RuntimeError, match=r"twice|more than one"):
        trainer(tmp_path, twice, twice).fit(module, data())
    assert not any(m._forward_hooks for m in module.modules())
    callback = GxdCallback(**OFTEN)
    fit(tmp_path, callback)
    refused(tmp_path, callback, Module(), RuntimeError, "has trained another model")


def test_a_checkpoint_of_another_plan_is_refused_and_nothing_stays_attached(tmp_path: Path):
    one = trainer(tmp_path, GxdCallback(plan=gxd.find_units(Module(), X[:2], exclude="net.2")), epochs=1)
    one.fit(Module(), data())
    one.save_checkpoint(tmp_path / "other.ckpt")
    callback, module = GxdCallback(), Module()
    with pytest.raises(gxd.PlanError, match="another model or plan"):
        fit(tmp_path, callback, module, ckpt_path=tmp_path / "other.ckpt")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_validation_is_of_the_weights_that_a_method_evaluates_with_and_checkpoints_have_those_of_training(
    tmp_path: Path,
):
    seen: list[Tensor] = []

    class Validated(Module):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(self.net[0].weight.detach().clone())

    callback = GxdCallback(gxd.method("hare_and_tortoise", decay=0.5))
    kept = lightning.callbacks.ModelCheckpoint(tmp_path, save_last=True)
    module = Validated()
    trainer(tmp_path, callback, kept, epochs=2, enable_checkpointing=True).fit(module, data(), data(48))
    slow = callback.cbp.state_dict()["methods"]["0.hare_and_tortoise"]["state"]["own"]["net.0.weight"]
    assert torch.equal(seen[-1], slow) and not torch.equal(seen[-1], module.net[0].weight)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]["net.0.weight"]
    assert torch.equal(saved, module.net[0].weight)
