"""Avalanche: ``Naive(..., plugins=[GxdPlugin()])``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gxd.attachment import Attachment
from gxd.errors import ObservationWarning, PlanError, warn
from gxd.integrations.base import Session, on_device, required
from gxd.methods.base import Method
from gxd.plan.layouts import unwrap

required("avalanche-lib", "0.5", extra="avalanche", module="avalanche")

from avalanche.core import SupervisedPlugin  # noqa: E402


class GxdPlugin(SupervisedPlugin):  # type: ignore[misc]
    """Attaches gxd to the model of a strategy in every experience, with statistics that go on from one to the next.

    A model may grow a head between two experiences: it is planned again, and the units behind the head keep their
    statistics. Where hidden layers were replaced they begin anew, with a warning. Methods that wait for the end of a
    task act when the next experience begins: what is evaluated in between is the network that was trained.

    Args:
        methods: as for :func:`gxd.attach`; none: the method ``gxd``. Not ``dash``, which needs the data of
            the next task.
        options: of :func:`gxd.attach`, and of the method ``gxd`` if no other is given. Without
            ``example_inputs``, the model is traced with the first batch of an experience.

    Attributes:
        cbp: what is attached; after an experience closed, but still to be asked.
    """

    def __init__(self, *methods: Method | str, **options: Any) -> None:
        super().__init__()
        self._session = Session(methods, options)
        needing = [method.name for method in self._session.methods if method.needs_data]
        if needing:
            raise ValueError(
                f"{needing[0]} needs the data of the next task, which this plugin does not have: attach it by hand, "
                "and call boundary(batches, loss) between two experiences"
            )
        self._began = False  # this experience

    @property
    def cbp(self) -> Attachment | None:
        """What is attached."""
        return self._session.attached

    def state_dict(self) -> dict[str, Any]:
        """To be saved beside the model."""
        return self._session.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there in the next experience."""
        self._session.load_state_dict(state)

    def before_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Let go of the last experience, if it has raised."""
        self._session.end()
        self._began = False

    def before_forward(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Attach, in the first iteration: the model and the optimizer are then those of this experience."""
        if self._began:
            return
        self._began = True
        model, goes_on = unwrap(strategy.model), bool(self._session.state_dict())
        inputs = on_device(strategy.mb_x[:2], model) if self._session.needs_inputs(model) else None
        try:
            self._session.begin(model, strategy.optimizer, inputs)
        except PlanError as error:
            if self.cbp is None:  # not of the last experience
                raise
            self._session.forget()
            self._session.begin(model, strategy.optimizer, inputs)
            warn(f"layers were replaced, so all units begin with fresh statistics: {error}", ObservationWarning)
        if goes_on and self.cbp is not None:
            self.cbp.boundary()

    def before_backward(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Observe."""
        if self._session.is_open and self.cbp is not None and self._session.needs_observe:
            self.cbp.observe(strategy.mb_output, strategy.mb_y if self._session.needs_target else None)

    def after_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Detach; the state is kept for the next experience."""
        self._session.end()
