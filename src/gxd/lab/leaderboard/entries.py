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
from gxd.lab.training import clock_of, waits_for_boundaries

Setting = Mapping[str, Any]
DEFAULTS: tuple[Setting, ...] = ({},)


@dataclass(frozen=True)
class Entry:
    """A row of the board.

    Attributes:
        name: on the board.
        about: what it is, in a line.
        method: as ``gxd run --method`` takes it.
        grid: its own settings: options of the method, or what is a field instead (of gxd and continual_backprop).
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
        fields = methods.FIELDS.values() if methods.has_fields(self.method) else ()
        own = {name: value for name, value in setting.items() if name in fields}
        options = {**self.fields.get("options", {}), **{n: v for n, v in setting.items() if n not in own}}
        if not track.kind.boundaries:
            options |= self._clock(track, options)
        return {**self.fields, **own, "method": self.method, "options": options, "lr": lr}

    def _clock(self, track: Track, options: dict[str, Any]) -> dict[str, int]:
        """What lets it act where there are no boundaries."""
        known = methods.values_of(methods.canonical(self.method, options))
        waiting = [m.name for m in methods.make(self.method, known) if waits_for_boundaries(m)]
        clocks = {}
        for name in waiting:
            clock = clock_of(self.method, name)
            if clock is None:
                raise UserError(f"acts between tasks, which {track.stream} does not have, and cannot go by the clock")
            clocks[clock] = track.clock
        return clocks


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
GRIDS["gxd"] = RATES
NEEDS = {"nap": {"layer_norm": True}}
"""Registered method -> fields without which it cannot be."""
UTILITIES = {
    "contribution": "continual backprop by the contribution utility, as in Dohare et al.",
    methods.PAPER: "continual backprop by GXD, the rule of the paper",
    "gxd_kl": "continual backprop by GXD, measured on the whole output",
    "random": "continual backprop that resets units at random",
}


def _unit_reset(score: str, **same: Any) -> dict[str, Any]:
    """The rule of continual backprop, put together from unit_reset, which lets births be chosen."""
    options = {"score": score, "selection": "lowest_rate", "maturity": 100, "incoming": "he", **same}
    return {"method": "unit_reset", "grid": RATES, "fields": {"options": options}}


def _with_gxd(method: str) -> Entry:
    """The settings of a method as in its own entry, with resets beside it: what they add, and nothing else, differs."""
    prefixed = tuple(
        {**{f"{method}.{name}": value for name, value in setting.items()}, "gxd.replacement_rate": 1e-4}
        for setting in GRIDS[method]
    )
    return Entry(f"{method}+gxd", f"{method} and gxd at once", f"{method}+gxd", prefixed)


VARIANTS = (
    Entry("gxd_mature", "gxd_paper with maturity 1000", methods.PAPER, RATES, {"maturity": 1000}),
    # One part of gxd each, on the paper's rule.
    Entry("gxd_paper_free_score", "gxd_paper, scored by the gradients of the training loss", "gxd_loss", RATES),
    Entry(
        "gxd_paper_per_step",
        "gxd_paper, ranked by cost per step lived",
        methods.PAPER,
        RATES,
        {"options": {"ranking": "age"}},
    ),
    Entry("gxd_paper_he_births", "gxd_paper with newborn units at He's scale", **_unit_reset("gxd", normalise="none")),
    Entry(
        "contribution_per_step",
        "contribution, ranked by cost per step lived, with newborn units at He's scale",
        **_unit_reset("contribution", normalise="age"),
    ),
    *map(_with_gxd, ("parseval", "hare_and_tortoise", "l2_init")),
    Entry(
        "hare_and_tortoise_by_clock",
        "hare and tortoise every 1000 steps, which is not told when a task ends",
        "hare_and_tortoise",
        GRIDS["hare_and_tortoise"],
        {"options": {"every": 1000}},
    ),
)
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
    found += VARIANTS
    for name, info in gxd.methods().items():
        if name != "continual_backprop":
            grid = {**GRIDS, **(grids or {})}.get(name, DEFAULTS)
            found.append(Entry(name, info.description, name, grid, NEEDS.get(name, {})))
    return {entry.name: entry for entry in found}
