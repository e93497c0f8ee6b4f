"""Lightning: ``Trainer(callbacks=[GxdCallback()])``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from gxd.attachment import Attachment
from gxd.errors import ObservationError
from gxd.integrations.base import Session, logged, on_device, required
from gxd.methods.base import Method
from gxd.observe.hooks import Plain
from gxd.observe.output import OutputObserver, Take, logits_in, submodule

required("lightning", "2.2", extra="lightning")

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402

_TARGETS = ("labels", "label", "targets", "target", "y")  # their usual names in a batch that is a dict


class GxdCallback(Callback):
    """Attaches gxd to a ``LightningModule`` for the time of a ``fit``, and keeps its state in Lightning's checkpoints.

    Without options it is the method ``gxd`` on the whole module. For methods that look at the output, what ``self(x)``
    returns in ``training_step`` are the logits, and the second part of the batch is the target. Validation during the
    fit runs inside :meth:`gxd.Attachment.evaluating`.

    Args:
        methods: as for :func:`gxd.attach`; none: the method ``gxd``.
        module: the name of the part that is trained and called in ``training_step``, as ``self.net(x)``. Default: the
            ``LightningModule``, which is called as ``self(x)``.
        criterion: the name of the loss function, if it is a module that is called with logits and target: they are
            taken from there.
        select, target: as for :meth:`gxd.Attachment.observe_output`. Default of the target: ``batch[1]``, or the entry
            ``labels``, ``label``, ``targets``, ``target`` or ``y`` of a batch that is a dict.
        observe: False: ``training_step`` calls ``observe`` itself, as of ``callback.cbp``.
        options: of :func:`gxd.attach`, and of the method ``gxd`` if no other is given. Without
            ``example_inputs`` or ``plan``, the model is traced with the module's ``example_input_array``, or with the
            first batch.

    Attributes:
        cbp: what is attached; after the ``fit`` closed, but still to be asked.
    """

    def __init__(
        self,
        *methods: Method | str,
        module: str | None = None,
        criterion: str | None = None,
        select: Take | None = None,
        target: Take | None = None,
        observe: bool = True,
        **options: Any,
    ) -> None:
        if criterion is not None and (select is not None or target is not None):
            raise ValueError("give either criterion, which is called with logits and target, or select and target")
        self._session = Session(methods, options)
        self.module, self.criterion, self.select, self.target = module, criterion, select, target
        self.observe = observe and self._session.needs_observe
        self._batch: Any = None
        self._output: OutputObserver | None = None
        self._handles: list[Any] = []
        self._depth = 0  # of calls of the module inside one another
        self._seen = False  # an output, since the fit began
        self._unproven = False  # no step of the fit has shown a unit yet, to methods that need no output
        self._step = -1  # that was logged last
        self._evaluating = ExitStack()

    @property
    def cbp(self) -> Attachment | None:
        """What is attached."""
        return self._session.attached

    @property
    def state_key(self) -> str:
        """Its name in a checkpoint."""
        return self._generate_state_key(module=self.module)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return self._session.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From a checkpoint; before the optimizers exist, so it has to wait."""
        self._session.load_state_dict(state_dict)

    # --- one fit ------------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach, if it is known how the model is called."""
        inputs = None if self.module else getattr(pl_module, "example_input_array", None)
        if inputs is not None or not self._session.needs_inputs(submodule(pl_module, self.module)):
            self._attach(trainer, pl_module, inputs)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Attach, if the first batch is what tells how."""
        self._batch = batch
        if not self._session.is_open:
            self._attach(trainer, pl_module, batch[0] if isinstance(batch, (tuple, list)) else batch)

    def _attach(self, trainer: Trainer, pl_module: LightningModule, inputs: Any) -> None:
        model = submodule(pl_module, self.module)
        if type(model).forward in (LightningModule.forward, nn.Module.forward) and self._session.needs_inputs(model):
            parts = [name for name, part in pl_module.named_children() if any(True for _ in part.parameters())]
            raise ValueError(
                f"{type(model).__name__} has no forward: say which part training_step calls, as "
                f"GxdCallback(module={parts[0] if parts else 'net'!r}); it has {', '.join(map(repr, parts)) or 'none'}"
            )
        own = {id(parameter) for parameter in model.parameters()}
        optimizers = [o for o in trainer.optimizers if own & {id(p) for g in o.param_groups for p in g["params"]}]
        if not optimizers:
            raise ValueError(f"no optimizer of configure_optimizers() trains a parameter of {type(model).__name__}")
        watched = model if self.criterion is None else submodule(pl_module, self.criterion)
        attached = self._session.begin(
            model,
            optimizers if len(optimizers) > 1 else optimizers[0],
            on_device(inputs, model),
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            on_unobserved="skip",  # a training_step that returns None makes a step all the same
        )
        self._seen = not self.observe
        self._unproven = not self.observe and "on_unobserved" not in self._session.options
        if self.observe:
            # Wrapped by a strategy, the module is called for training_step, too, whose output is the loss.
            if watched is pl_module and trainer.strategy.model is not pl_module:
                self._handles = self._counted(pl_module)
            self._output = attached.observe_output(watched, self._selected, self._targeted, defer=True)

    def _counted(self, module: nn.Module) -> list[Any]:
        def enter(*call: Any) -> None:
            self._depth += 1

        def leave(*call: Any) -> None:
            self._depth -= 1

        return [
            module.register_forward_pre_hook(Plain(enter)),
            module.register_forward_hook(Plain(leave), always_call=True),
        ]

    def _selected(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self._handles and not self._depth:  # the call for training_step
            return None
        if self.criterion is not None:
            return args[0]
        return logits_in(output) if self.select is None else self.select(args, kwargs, output)

    def _targeted(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor | None:
        if self.target is not None:
            return self.target(args, kwargs, output)
        if not self._session.needs_target:
            return None
        if self.criterion is not None:
            return args[1]
        batch = self._batch
        if isinstance(batch, Mapping):
            return next((batch[name] for name in _TARGETS if name in batch), None)
        return batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Observe what the module has returned since the last backward pass."""
        attached = self.cbp
        if self._unproven and attached is not None:  # a step with a loss has to show something
            attached.on_unobserved = "raise"
        if self._output is None or attached is None:
            return
        self._seen = bool(self._output.observe()) or self._seen
        if not self._seen and attached.awaits_output:
            raise ObservationError(
                f"training_step has a loss, but has not called {self._name(pl_module)}: say which part it calls, as "
                "GxdCallback(module='net') for self.net(x); or criterion='loss_fn', if that is a module; or observe "
                "in training_step, GxdCallback(observe=False)"
            )

    def _name(self, pl_module: LightningModule) -> str:
        return self.criterion or self.module or f"the {type(pl_module).__name__} itself, as self(x)"

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Forget what had no backward pass, and log."""
        self._batch = None
        if self._output is not None:
            self._output.clear()
        if self._unproven and self.cbp is not None and self.cbp.has_scored:
            self._unproven, self.cbp.on_unobserved = False, "skip"
        step, every = trainer.global_step, max(getattr(trainer, "log_every_n_steps", 1), 1)
        if self.cbp is not None and step != self._step and step % every == 0:
            self._step = step
            for logger in trainer.loggers:
                logger.log_metrics(logged(self.cbp), step=step)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the model have the weights that it is to be evaluated with."""
        if self.cbp is not None and self._session.is_open:
            self._evaluating.enter_context(self.cbp.evaluating())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give it the weights of training back, before a checkpoint is written."""
        self._evaluating.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Detach; the state is kept for another fit."""
        self._evaluating.close()
        for handle in self._handles:
            handle.remove()
        self._handles, self._output, self._batch, self._depth = [], None, None, 0
        self._session.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Detach."""
        self.teardown(trainer, pl_module, "fit")
