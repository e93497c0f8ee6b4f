"""Shrink and perturb: parameters are scaled down, and noise is added; six published forms of it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gxd import arguments
from gxd.methods.base import Host
from gxd.methods.event import Event, fresh_statistics
from gxd.methods.registry import register_method
from gxd.methods.scope import KINDS, Exclude, patterns, treated, wide
from gxd.reset.fresh import distributions, fixed_rows, fresh, with_rows_of
from gxd.reset.operator import STEP_POLICIES
from gxd.reset.writes import Whole, Write

NOISES = ("fresh", "gaussian", "initial")


class Form(NamedTuple):
    """What a form of shrink and perturb does, see :func:`shrink_and_perturb`."""

    retain: float
    scale: float
    noise: str
    every: int
    decay: float = 0.0
    optimizer: str = "keep"
    buffers: str = "keep"


VARIANTS = {
    "ash_adams": Form(0.4, 0.1, "fresh", 0, optimizer="reset", buffers="reset"),
    "lop": Form(1.0, 1e-5, "gaussian", 1, decay=1e-4),
    "kumar": Form(1.0 - 1e-3, 1e-2, "fresh", 1),
    "swr": Form(1.0 - 1e-4, math.sqrt(1e-7), "gaussian", 1),
    "initial": Form(0.2, 0.8, "initial", 0, optimizer="reset"),
    "soft": Form(1.0 - 1e-6, 1e-6, "fresh", 1),
}


class ShrinkAndPerturb(Event):
    """Remembers what the noise of each parameter is made from, by name: a distribution, its initial value, nothing."""

    def __init__(self, form: Form, exclude: Exclude) -> None:
        super().__init__(form.every)
        self.form, self.exclude = form, patterns(exclude)
        self.also_changes = ("buffers",) if form.buffers == "reset" else ()

    def begin(self, host: Host) -> dict[str, Any]:
        known: dict[str, Any] = treated(host.model, self.exclude, KINDS)
        if self.form.decay:
            host.need_rates(self.name, known, "use decay=0.0, with a smaller retain")
        if self.form.noise == "fresh":
            return {name: kind for name, kind in distributions(host.model).items() if name in known}
        if self.form.noise == "initial":
            return {name: p.detach().clone() for name, p in host.model.named_parameters() if name in known}
        return known

    def act(self, host: Host, own: dict[str, Any]) -> dict[str, Any]:
        form, writes, fixed = self.form, [], fixed_rows(host.model)
        for one in host.trained():
            name, parameter = one.name, one.parameter
            if name in own:
                decay = one.rate * form.decay if form.decay else 0.0
                value = wide(parameter.detach()) * (form.retain - min(form.retain, decay))
                if form.scale:
                    value.add_(self._noise(host, own, name, parameter), alpha=form.scale)
                writes.append(Write(parameter, Whole(), with_rows_of(parameter, fixed.get(id(parameter), ()), value)))
        if form.buffers == "reset":
            writes += fresh_statistics(host.model)
        host.write(writes, memories=form.optimizer, step_policy=form.optimizer)
        return own

    def _noise(self, host: Host, own: dict[str, Any], name: str, parameter: Tensor) -> Tensor:
        if self.form.noise == "fresh":
            return fresh(name, parameter, own, host.generator)
        if self.form.noise == "initial":
            initial: Tensor = own[name]
            return initial
        # On the CPU, so that a seed gives the same on every device.
        return torch.randn(parameter.shape, generator=host.generator).to(parameter)


@register_method(
    "shrink_and_perturb",
    description="scale parameters down and add noise: at the end of a task, or at every step",
    reference="Ash, Adams: On Warm-Starting Neural Network Training, NeurIPS 2020; the other forms see the docstring",
    inert={"retain": 1.0, "scale": 0.0, "decay": 0.0, "optimizer": "keep", "buffers": "keep"},
    changes="all parameters, statistics of norms, all optimizer state, when a task ends; or all parameters, at "
    "every step",
)
def shrink_and_perturb(
    variant: str = "ash_adams",
    retain: float | None = None,
    scale: float | None = None,
    noise: str | None = None,
    every: int | None = None,
    decay: float | None = None,
    optimizer: str | None = None,
    buffers: str | None = None,
    exclude: Exclude = (),
) -> ShrinkAndPerturb:
    """``theta <- (retain - lr * decay) * theta + scale * noise``, for all parameters, those of norms too. Different
    things carry this name; a variant is a row of this table, and an option that is given takes the place of its entry:

    =========  ======  =======  ========  ========  =====  =========  =======
    variant    retain  scale    noise     every     decay  optimizer  buffers
    =========  ======  =======  ========  ========  =====  =========  =======
    ash_adams  0.4     0.1      fresh     boundary  0      reset      reset
    lop        1       1e-5     gaussian  step      1e-4   keep       keep
    kumar      1-1e-3  1e-2     fresh     step      0      keep       keep
    swr        1-1e-4  3.16e-4  gaussian  step      0      keep       keep
    initial    0.2     0.8      initial   boundary  0      reset      keep
    soft       1-1e-6  1e-6     fresh     step      0      keep       keep
    =========  ======  =======  ========  ========  =====  =========  =======

    ``ash_adams``: Ash & Adams, a new optimizer and new buffers when data arrives. ``lop``: Dohare et al. (Nature 2024);
    their decay is in the gradient (for that give ``decay=0``, and the optimizer a ``weight_decay``), scale from {1e-4,
    1e-5, 1e-6}. ``kumar``: Kumar et al. (L2-Init's paper), whose best shrinkage is 1e-3 or 1e-4; code read.
    ``swr``: in the paper on selective weight reinitialisation; noise of variance 1e-7. ``initial``: as a baseline of
    FIRE, and of Hare & Tortoise, towards the saved initial values. ``soft``: Juliani & Ash, at every minibatch. Only
    what optimizers train is changed, and the rows of padding tokens (``padding_idx``), which nothing trains, are not.

    Args:
        variant: the row of the table.
        retain: what remains of a parameter, 0 to 1.
        scale: of the noise.
        noise: ``fresh``: a draw from the distribution that the parameter began with, for gains of norms 1;
            ``gaussian``: standard normal, so that ``scale`` is its standard deviation; ``initial``: the parameter's
            initial value.
        every: 0: at the end of a task (``attached.boundary()``); else every so many steps.
        decay: of the parameter, with its learning rate.
        optimizer: ``reset``: what the optimizer remembers of the parameters begins anew, as that of a new one does;
            ``keep``: it stays. With ``reset``, ``every=1`` is refused: nothing would ever be remembered.
        buffers: ``reset``: so do running statistics of norms.
        exclude: names of parameters or modules that are left out, with wildcards; ``"head"`` is the last layer.
    """
    form = VARIANTS[arguments.choice("variant", variant, VARIANTS)]
    given = {"retain": retain, "scale": scale, "noise": noise, "every": every, "decay": decay}
    given |= {"optimizer": optimizer, "buffers": buffers}
    said: dict[str, Any] = {**form._asdict(), **{name: value for name, value in given.items() if value is not None}}
    form = Form(
        arguments.number("retain", said["retain"], 0.0, 1.0),
        arguments.number("scale", said["scale"], 0.0),
        arguments.choice("noise", said["noise"], NOISES),
        arguments.every("every", said["every"], least=0),
        arguments.number("decay", said["decay"], 0.0),
        arguments.choice("optimizer", said["optimizer"], STEP_POLICIES),
        arguments.choice("buffers", said["buffers"], STEP_POLICIES),
    )
    for name in ("optimizer", "buffers"):
        if form.every == 1 and getattr(form, name) == "reset":
            raise ValueError(f"{name}='reset' contradicts every=1: nothing would be remembered from step to step")
    if not form.every and form.decay:
        raise ValueError(f"decay={form.decay:g} is per step, and contradicts every=0, boundaries: give retain instead")
    return ShrinkAndPerturb(form, exclude)
