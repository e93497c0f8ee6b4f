"""The sweep file: a grid of runs as TOML, every key and every value of it checked when it is read.

::

    experiment = "permuted-digits"
    seeds = [100, 101]             # of the grid
    [fixed]                        # fields of the config, the same in all runs
    tasks = 200
    [grid]                         # the product of these; several [[grid]] tables are run one after another
    method = ["backprop", "gxd"]
    lr = [0.1, 0.3]
    options = [{ threshold = 0.1 }, { threshold = 0.2 }]   # of the method, as tables; here or in [fixed]
    [final]                        # optional: a second stage
    per = ["method"]               # of all settings that agree in these fields, the best one ...
    seeds = [0, 1, 2, 3, 4]        # ... is run on these seeds
    fixed = { tasks = 800 }        # ... with these changes
"""

from __future__ import annotations

import difflib
import itertools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gxd.lab.config import check_name, check_range
from gxd.lab.errors import UserError
from gxd.lab.experiments import Experiment, experiment
from gxd.lab.workers import Job

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Values = dict[str, Any]
SWEEPS = Path(__file__).parent / "sweeps"


@dataclass(frozen=True)
class Final:
    """The second stage."""

    per: tuple[str, ...]
    seeds: tuple[int, ...]
    fixed: Values


@dataclass(frozen=True)
class Sweep:
    """What a sweep file says."""

    name: str
    kind: type[Experiment]
    seeds: tuple[int, ...]
    cells: tuple[Values, ...]  # the settings of the grid, without seed; no two are the same run
    varied: tuple[str, ...]  # the fields of the grid
    final: Final | None

    def root(self, out: Path) -> Path:
        """Where the runs go that count: those of the final stage, or of the grid if that is all."""
        return out / self.name

    def grid_root(self, out: Path) -> Path:
        """Where the grid goes: apart from the final runs, so that a report does not mix the seeds of the two."""
        return out / f"{self.name}-selection" if self.final is not None else self.root(out)

    def runs(self) -> list[Experiment]:
        """The grid on its seeds. All settings of one seed come first, so that an early look sees all of them."""
        return [self.config(cell, seed) for seed in self.seeds for cell in self.cells]

    def config(self, values: Values, seed: int) -> Experiment:
        """One run. It stays unresolved: what a default stands for may depend on fields that [final] changes."""
        return self.kind.from_dict({**values, "seed": seed})

    def job(self, config: Experiment) -> Job:
        """The run with a name that tells it from the others."""
        full = config.resolved()
        named = ("method", "activation", "layer_norm")
        rest = [n for n in self.varied if n not in named and not (n == "rate" and full.method == "backprop")]
        label, _, seed = full.label().rpartition(" seed ")
        return Job(" ".join([label, *(f"{n} {short(getattr(full, n))}" for n in rest), f"seed {seed}"]), config)


def sweeps() -> list[str]:
    """The names of the sweeps that come with gxd."""
    return sorted(file.stem for file in SWEEPS.glob("*.toml"))


def find(name: str) -> Path:
    """The file of that name, else the sweep of that name that comes with gxd."""
    file = Path(name)
    if file.exists() and not file.is_dir():  # also a pipe
        return file
    if file.name != name or file.suffix:
        raise UserError(f"{name} is not a file: give a sweep file, or one that comes with gxd: {', '.join(sweeps())}")
    check_name(name, sweeps(), "sweep")
    return SWEEPS / f"{name}.toml"


def load(file: Path) -> Sweep:
    """Read a sweep file and check every key and every value of it."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not TOML: {error}") from error
    try:
        return _parse(file.stem, table)
    except UserError as error:
        raise UserError(f"{file}: {error}") from error


def _parse(name: str, table: Values) -> Sweep:
    _known(table, ("experiment", "seeds", "fixed", "grid", "final"), "key")
    if not isinstance(table.get("experiment"), str):
        raise UserError('say which experiment, as in experiment = "permuted-digits"')
    kind = experiment(table["experiment"])
    known = [f.name for f in fields(kind) if f.name != "seed"]
    fixed = _table(table.get("fixed", {}), "[fixed]", known)
    grids = table.get("grid", {})
    if grids == []:
        raise UserError("grid = [] leaves nothing to run: take it out for one run per seed, or fill in a [grid] table")
    grids = [_table(grid, "[grid]", known) for grid in (grids if isinstance(grids, list) else [grids])]
    for key, values in itertools.chain.from_iterable(grid.items() for grid in grids):
        if not isinstance(values, list) or not values:
            raise UserError(f"{key} = {values!r} in [grid] must be a list of values; a single one belongs into [fixed]")
        if key in fixed:
            raise UserError(f"{key} is in [fixed] and in [grid]: take it out of one")
    varied = tuple(dict.fromkeys(itertools.chain(*grids)))
    seeds = _seeds(table.get("seeds"), "seeds")
    cells: dict[str, Values] = {}
    for grid in grids:
        for values in itertools.product(*grid.values()):
            cell = {**fixed, **dict(zip(grid, values, strict=True))}
            # Cells that are the same run, such as backprop at several reset rates, share a key; the first one stands.
            cells.setdefault(kind.from_dict(cell).key(), cell)
    final = _final(table["final"], known, varied, seeds) if "final" in table else None
    if final is not None:
        for cell in cells.values():
            kind.from_dict({**cell, **final.fixed})
    return Sweep(name, kind, seeds, tuple(cells.values()), varied, final)


def _final(table: Any, known: Sequence[str], varied: Sequence[str], used: Sequence[int]) -> Final:
    table = _table(table, "[final]", ("per", "seeds", "fixed"), "key")
    per = table.get("per")
    if not isinstance(per, list) or not per:
        raise UserError('[final] needs per, the fields to choose the best setting for, as in per = ["method"]')
    _known(per, known, "setting", " in per of [final]")
    seeds = _seeds(table.get("seeds"), "seeds of [final]")
    both = sorted(set(seeds) & set(used))
    if both:
        raise UserError(f"seed {both[0]} is in both stages: the final seeds must not have taken part in the selection")
    fixed = _table(table.get("fixed", {}), "fixed of [final]", known)
    for key in fixed:
        if key in varied:
            raise UserError(f"{key} is in fixed of [final] and in [grid]: the grid chooses it; take it out of one")
    return Final(tuple(per), seeds, fixed)


def _table(value: Any, where: str, known: Sequence[str], what: str = "setting") -> Values:
    if not isinstance(value, dict):
        raise UserError(f"{where} = {value!r} must be a table")
    if "seed" in value:
        raise UserError(f"seed in {where}: the seeds are a list of their own, as in seeds = [0, 1, 2]")
    _known(value, known, what, f" in {where}")
    return value


def _known(keys: Iterable[Any], known: Sequence[str], what: str, where: str = "") -> None:
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UserError(f"unknown {what} {key!r}{where}.{hint} There are {', '.join(known)}")


def _seeds(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(seed) is int and seed >= 0 for seed in value):
        raise UserError(f"{name} = {value!r} must be a list of whole numbers, as in seeds = [0, 1, 2]")
    for seed in value:
        check_range("seed", seed)
    if len(set(value)) < len(value):
        raise UserError(f"{name} = {value!r} has a seed twice: take it out")
    return tuple(value)


def short(value: Any) -> str:
    """A value as it is shown."""
    if isinstance(value, tuple):
        return " ".join(value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
