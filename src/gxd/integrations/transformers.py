"""Transformers: ``Trainer(..., callbacks=[GxdCallback()])``. The state is in ``checkpoint-N/gxd.pt``."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from gxd.attachment import Attachment
from gxd.errors import ObservationError, ObservationWarning, warn
from gxd.integrations.base import Session, logged, on_device, required
from gxd.methods.base import Method
from gxd.observe.output import Take, logits_in
from gxd.plan.layouts import unwrap

required("accelerate", "1.0", extra="transformers")
required("transformers", "4.46", extra="transformers")

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402
from transformers.trainer_callback import CallbackHandler  # noqa: E402

FILE = "gxd.pt"


class GxdCallback(TrainerCallback):
    """Attaches gxd to the model of a ``Trainer`` for the time of ``train()``, and keeps its state in its checkpoints.

    Without options it is the method ``gxd``. For methods that look at the output, the model's ``logits`` and the
    ``labels`` it is called with are observed, shifted by one for causal language models. In a regression the
    predictions count, and for several labels per example ``(2 * labels - 1) * logits``.

    Args:
        methods: as for :func:`gxd.attach`; none: the method ``gxd``.
        select, target: as for :meth:`gxd.Attachment.observe_output`, for models that return no ``logits``, or losses
            that the Trainer computes itself.
        resume_from: the folder whose ``gxd.pt`` training resumes with. Default: that of the checkpoint that ``train()``
            resumes from; False: begin with fresh statistics.
        options: of :func:`gxd.attach`, and of the method ``gxd`` if no other is given. Without
            ``example_inputs`` or ``plan``, the model is traced with two examples of the training data.

    Attributes:
        cbp: what is attached; after ``train()`` closed, but still to be asked.
    """

    def __init__(
        self,
        *methods: Method | str,
        select: Take | None = None,
        target: Take | None = None,
        resume_from: str | Path | bool = True,
        **options: Any,
    ) -> None:
        self._session = Session(methods, options)
        self.select, self.target, self.resume_from = select, target, resume_from
        self._state: Any = None  # of the Trainer, another one in each train()

    @property
    def cbp(self) -> Attachment | None:
        """What is attached."""
        return self._session.attached

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach, and go on from the checkpoint that is resumed from."""
        if self._state is not state:  # else it was given twice
            self._session.end()
            if state.is_hyper_param_search:  # each trial has a model of its own
                self._session.forget()
        self._state = state
        _before_reporters(self, sys._getframe(1).f_locals.get("self"))
        model = unwrap(kwargs["model"])
        if state.global_step and self.resume_from is not False:
            self._session.load_state_dict(torch.load(self._file(args, state), map_location="cpu", weights_only=True))
        inputs = None
        if self._session.needs_inputs(model) and not self._session.is_open:
            inputs = on_device(_two_examples(kwargs["train_dataloader"], model), model)
        attached = self._session.begin(model, kwargs["optimizer"], inputs)
        try:
            if self._session.needs_observe:
                attached.observe_output(None, self._observed(model))
            _say_what_is_recomputed(attached)
        except BaseException:  # a warning may be an error
            self._session.end()
            raise

    def _observed(self, model: nn.Module) -> Take:
        causal = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        needs_target = self._session.needs_target

        def observed(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Mapping[str, Any] | None:
            try:
                logits = logits_in(output) if self.select is None else self.select(args, kwargs, output)
                if logits is None or isinstance(logits, Mapping):
                    return logits
                labels = kwargs.get("labels") if self.target is None else self.target(args, kwargs, output)
                if needs_target and labels is None:
                    raise ObservationError(
                        "the model was called without labels, as the Trainer computes the loss itself: use a method "
                        "that needs none, such as GxdCallback() or GxdCallback(gxd.method('continual_backprop', "
                        "utility='gxd_sketch')), of swr the score 'attribution_sketch', or say GxdCallback(target=...)"
                    )
            except BaseException:
                self._session.end()  # the Trainer does not tell callbacks of an error
                raise
            return _arguments(logits, labels if needs_target else None, causal and self.target is None)

        return observed

    def _file(self, args: TrainingArguments, state: TrainerState) -> Path:
        folder = _resumed_from(args) or _folder(args, state)
        if isinstance(self.resume_from, (str, Path)):  # there, or nowhere
            folder = Path(self.resume_from)
        if not (folder / FILE).is_file():
            raise FileNotFoundError(
                f"training resumes at step {state.global_step}, but {folder} has no {FILE}: give the folder of the "
                "checkpoint, GxdCallback(resume_from='.../checkpoint-N'), or False to begin with fresh statistics"
            )
        return folder / FILE

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the state to the checkpoint."""
        folder = _folder(args, state)
        if self._session.is_open and args.should_save and folder.is_dir():
            torch.save(self._session.state_dict(), folder / FILE)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        """Add the metrics to what is logged."""
        if self._session.is_open and self.cbp is not None and isinstance(logs, dict):
            metrics = logged(self.cbp)
            del metrics["gxd/gradient_norm"]  # the gradients are gone by now; the Trainer logs its own grad_norm
            logs.update(metrics)
            if state.log_history:
                state.log_history[-1].update(metrics)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Detach; the state is kept for another ``train()``."""
        self._session.end()
        self._state = None


def _say_what_is_recomputed(attached: Attachment) -> None:
    unseen = [skipped.name for skipped in attached.plan.skipped if "use_reentrant" in skipped.reason]
    if unseen:
        warn(
            f"{len(unseen)} layers ('{unseen[0]}', ...) are called under torch.no_grad(), so nothing of them can be "
            "observed and none of their units is reset. If that is gradient checkpointing, say "
            "TrainingArguments(gradient_checkpointing_kwargs={'use_reentrant': False})",
            ObservationWarning,
        )


def _resumed_from(args: TrainingArguments) -> Path | None:
    """The checkpoint that was given to ``train()``, or else to its arguments. The Trainer, which calls us, has it, and
    does not tell callbacks: the output folder may hold a checkpoint of another training at the same step.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), Trainer):
        frame = frame.f_back
    told = None if frame is None else frame.f_locals.get("resume_from_checkpoint")
    for one in (told, args.resume_from_checkpoint):
        if isinstance(one, (str, Path)) and Path(one).is_dir():
            return Path(one)
    return None


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"


def _arguments(logits: Tensor, labels: Tensor | None, causal: bool) -> dict[str, Any]:
    """What ``observe`` is to be called with."""
    if labels is not None and labels.is_floating_point():
        if labels.shape == logits.shape and logits.shape[-1] > 1:
            return {"score": (2 * labels - 1) * logits}
        return {"score": logits}
    if causal and logits.dim() == 3:  # the next token is what each position is to say
        logits, labels = logits[:, :-1], None if labels is None else labels[:, 1:]
    return {"logits": logits, "target": labels, "class_dim": -1 if logits.dim() > 2 else None}


def _two_examples(loader: Any, model: nn.Module) -> dict[str, Any]:
    """A batch of two, as the model is called with it. Random numbers that this takes are given back."""
    data = loader.dataset
    with _random_state():
        if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
            examples = [data[number % len(data)] for number in range(2)]
        else:
            examples = list(islice(iter(data), 2))
        batch = dict(loader.collate_fn(examples))
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):  # where labels are what it reads, too
        batch.pop("labels", None)
    return {name: value for name, value in batch.items() if isinstance(value, Tensor)}


@contextmanager
def _random_state() -> Iterator[None]:
    import numpy

    before, numpys = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(before)
        numpy.random.set_state(numpys)


def _before_reporters(callback: GxdCallback, handler: Any) -> None:
    """Be the first that is told of a log: TensorBoard and the others report what is in it when they are. The handler
    calls us, and is not told to callbacks otherwise.
    """
    if isinstance(handler, CallbackHandler) and handler.callbacks.count(callback) == 1:
        handler.callbacks.remove(callback)
        handler.callbacks.insert(0, callback)
