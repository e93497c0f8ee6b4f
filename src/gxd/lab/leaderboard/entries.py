"""The entries of the board, and the settings that are tried of each: every registered method, and the controls.

An entry has ``n`` settings of its own, and each is tried with the first ``trials / n`` learning rates of the stream:
all entries have the same number of trials, and those without an option of their own spend them on the learning rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gxd
from gxd.lab import methods
from gxd.lab.errors import UserError
from gxd.lab.leaderboard.protocol import Protocol, Track
from gxd.lab.training import waits_for_boundaries

Setting = Mapping[str, Any]
DEFAULTS: tuple[Setting, ...] = ({},)
CLOCKS = ("every", "at")  # options that let a method go by the clock where there are no boundaries


@dataclass(frozen=True)
class Entry:
    """A row of the board.

    Attributes:
        name: on the board.
        about: what it is, in a line.
        method: as ``gxd run --method`` takes it.
        grid: its own settings: options of the method, or what is a field instead (of continual_backprop).
        fields: fields of the experiment that all settings share.
    """

    name: str
    about: str
    method: str = "backprop"
    grid: Sequence[Setting] = DEFAULTS
    fields: Setting = field(default_factory=dict)

    def settings(self, protocol: Protocol, track: Track) -> list[dict[str, Any]]:
        """What is tried on a stream: fields of the experiment, one dict for each trial.

        Raises :class:`UserError` if it cannot be on this stream, or its trials are not as many as those of the others.
        """
        many, left = divmod(protocol.trials, len(self.grid) or protocol.trials + 1)
        if left or many > len(track.rates):
            raise UserError(
                f"the grid of {self.name} has {len(self.grid)} settings: give 1, 2, 3 or {protocol.trials}, so that "
                f"with the learning rates there are {protocol.trials} trials, as of every method"
            )
        tried = [self._values(track, setting, lr) for setting in self.grid for lr in track.rates[:many]]
        if len({track.config(values, 0).key() for values in tried}) != protocol.trials:
            raise UserError(f"two settings in the grid of {self.name} are the same run: every trial must be another")
        return tried

    def _values(self, track: Track, setting: Setting, lr: float) -> dict[str, Any]:
        resets = methods.utility_of(self.method) is not None
        own = {name: value for name, value in setting.items() if resets and name in methods.FIELDS.values()}
        options = {**self.fields.get("options", {}), **{n: v for n, v in setting.items() if n not in own}}
        if not track.kind.boundaries and self.method in gxd.methods():
            options |= self._clock(track, options)
        return {**self.fields, **own, "method": self.method, "options": options, "lr": lr}

    def _clock(self, track: Track, options: dict[str, Any]) -> dict[str, int]:
        """What lets it act where there are no boundaries."""
        if not waits_for_boundaries(gxd.method(self.method, **options)):
            return {}
        clock = next((name for name in CLOCKS if name in gxd.methods()[self.method].options), None)
        if clock is None:
            raise UserError(f"acts between tasks, which {track.stream} does not have, and cannot go by the clock")
        return {clock: track.clock}


def _each(option: str, *values: Any, **same: Any) -> tuple[Setting, ...]:
    return tuple({option: value, **same} for value in values)


def _coupled(*strengths: float) -> tuple[Setting, ...]:
    """In the loss, as the papers have it; the last one after the step, which with Adam is another method."""
    return *_each("strength", *strengths[:-1], decoupled=False), {"strength": strengths[-1], "decoupled": True}


GRIDS: dict[str, tuple[Setting, ...]] = {
    "cpr": ({"blend": 0.015}, {"blend": 0.1}, {"blend": 0.015, "every": 100}),
    "dash": _each("minimum", 0.05, 0.1, 0.3),
    "hare_and_tortoise": _each("decay", 0.99, 0.999, 0.9999),
    "l2": _coupled(1e-3, 1e-4, 1e-2),
    "l2_init": _coupled(1e-2, 1e-3, 1e-1),
    "nap": _each("strength", 1e-3, 1e-2, 1e-1),
    "parseval": _each("strength", 1e-2, 1e-3, 1e-4, decoupled=False),
    "redo": ({"threshold": 0.1}, {"threshold": 0.01}, {"threshold": 0.1, "every": 100}),
    "regrama": ({"threshold": 0.1}, {"threshold": 0.01}, {"threshold": 0.25, "every": 100}),
    "shrink_and_perturb": _each("variant", "ash_adams", "kumar", "lop"),
    "snr": _each("rejection", 0.08, 0.02, 0.005),
    "spectral": _each("strength", 1e-2, 1e-3, 1e-4, decoupled=False),
    "swr": ({"factor": 1e-5}, {"factor": 1e-5, "every": 256}, {"factor": 1e-3, "every": 256}),
    # The soft selection of CPR and the threshold of ReDo with the score of GXD; and its own, the whole set at once.
    "unit_reset": (
        {"selection": "soft", "every": 1000, "blend": 0.015},
        {"selection": "threshold", "normalise": "layer_mean", "threshold": 0.1, "every": 1000},
        {"selection": "lowest_set", "rate": 1e-3},
    ),
    "upgd": _each("noise", 1e-3, 1e-2, 1e-1),
    "weight_clipping": _each("zeta", 1.0, 2.0, 4.0),
}
"""Registered method -> its own settings, around the values of its paper; a method that is not here has its defaults."""
RATES = _each("rate", 1e-4, 1e-3, 1e-2)
NEEDS = {"nap": {"layer_norm": True}}
"""Registered method -> fields without which it cannot be."""
UTILITIES = {
    "contribution": "continual backprop by the contribution utility, as in Dohare et al.",
    "gxd": "continual backprop by GXD",
    "gxd_kl": "continual backprop by GXD, measured on the whole output",
    "random": "continual backprop that resets units at random",
}
CONTROLS = (
    Entry("backprop", "the optimizer alone"),
    Entry("linear", "a linear model, which has no plasticity to lose", fields={"network": "linear"}),
    Entry("input_norm", "backprop, inputs normalised by running averages", fields={"input_norm": "ema"}),
    Entry("layer_norm", "backprop with LayerNorm before each activation", fields={"layer_norm": True}),
    Entry("crelu", "backprop with CReLU, as many parameters", fields={"activation": "crelu"}),
)


def entries(grids: Mapping[str, Sequence[Setting]] | None = None) -> dict[str, Entry]:
    """All entries by name. ``grids`` are those of methods that the user has registered."""
    found = list(CONTROLS)
    found += [Entry(name, about, name, RATES) for name, about in UTILITIES.items()]
    by_age = {"options": {"ranking": "age"}}
    found.append(Entry("gxd_age", "continual backprop by GXD, ranked by age", "gxd", RATES, by_age))
    found.append(Entry("gxd_mature", "continual backprop by GXD, maturity 1000", "gxd", RATES, {"maturity": 1000}))
    for name, info in gxd.methods().items():
        if name != "continual_backprop":
            grid = {**GRIDS, **(grids or {})}.get(name, DEFAULTS)
            found.append(Entry(name, info.description, name, grid, NEEDS.get(name, {})))
    return {entry.name: entry for entry in found}
