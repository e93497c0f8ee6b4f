"""The cases of the contract: every method, utility and selector that is registered, without a line here for a new one.
The laws are in `gxd.testing`.
"""

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import gxd
from gxd import testing
from gxd.methods.unit_reset import UnitReset
from gxd.select import Selector
from gxd.select.normalise import NORMALISATIONS
from gxd.testing.case import Case, lively

# Of single methods and selectors, where that is not enough, or too much.
ACTS: dict[str, dict[str, Any]] = {
    "unit_reset": {"rate": 0.2, "maturity": 1},
    "redo": {},
    "regrama": {"most": 1.0},
    "snr": {"every": 1},
    "Threshold": {"most": 1.0},
    "SilenceTest": {"every": 1},
}
SELECTIONS = {
    "lowest_set": {"rate": 0.2, "maturity": 1, "score": "gxd_kl"},
    "threshold": {"threshold": 0.7, "every": 3, "normalise": "none"},
    "lowest_fraction": {"fraction": 0.3, "every": 3, "normalise": "age"},
    "silence_test": {"score": "silence", "most": 1, "decay": 0.0},
    "soft": {"every": 3, "incoming": "initial", "outgoing": 0.5, "memories": "reset"},
}


def case_of(name: str, label: str | None = None, **options: Any) -> Case:
    return testing.case_of(name, label, **{**ACTS.get(name, {}), **options})


def method_cases() -> Iterator[Case]:
    """Every method that is registered, and once more with each of its switches the other way round."""
    for name, info in gxd.methods().items():
        yield case_of(name)
        for option, default in info.options.items():
            if isinstance(default, bool):
                yield case_of(name, f"{name} {option}={not default}", **{option: not default})
    for selection, options in SELECTIONS.items():
        options = {"rate": None, "maturity": None, "selection": selection, **options}
        yield Case(f"unit_reset {selection}", case_of("unit_reset", **options).make, case_of("unit_reset").inert)


def utility_cases() -> Iterator[Case]:
    for utility in gxd.utilities():
        yield case_of("continual_backprop", f"utility {utility}", utility=utility)


def selector_cases() -> Iterator[Case]:
    """Every selector, and the first with every normalisation."""
    for number, kind in enumerate(selectors()):
        known = {name: p.default for name, p in inspect.signature(kind).parameters.items()}
        options = {**lively(known), **ACTS.get(kind.__name__, {})}
        off = {**options, **{name: 0 for name in ("rate", "every") if name in known}}
        utility = "silence" if kind is gxd.SilenceTest else "gxd_sketch" if kind.pairs else "activation"
        for normalise in (None,) if number else (None, *NORMALISATIONS):
            make = partial(UnitReset, utility, normalise=normalise)
            yield Case(
                " ".join(["selector", kind.__name__, *([normalise] if normalise else [])]),
                lambda kind=kind, make=make, options=options: make(kind(**options)),
                lambda kind=kind, make=make, off=off: make(kind(**off)),
            )


def selectors(kind: type = Selector) -> Iterator[type]:
    """Those of the library. One that another test of this process has defined is its own, and may still live."""
    for each in kind.__subclasses__():
        if each.__module__.startswith("gxd."):
            yield each
            yield from selectors(each)
