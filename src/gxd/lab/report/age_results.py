"""What the runs of the age study came to, by setting and seed.

All numbers are over the last eighth of the tasks. Seeds from 100 on choose settings and are in no other number; a run
that diverged counts as a network that has learned nothing.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gxd.lab.errors import UserError
from gxd.lab.experiments import experiment
from gxd.lab.report import digest, numbers, paper
from gxd.lab.report.digest import Run
from gxd.lab.report.evidence import Panel, panel_order
from gxd.lab.store import objects, write_bytes

CHOOSING = 100  # the first of the seeds that choose settings
PAPER_MATURITY = 100
RANKINGS = {
    0.0: "absolute",
    0.5: "age, exponent 1/2",
    1.0: "age, exponent 1",
}  # dividing by E[u | age] ** 0 is absolute


def ranking(exponent: float) -> str:
    """In words."""
    return RANKINGS.get(exponent, f"age, exponent {exponent:g}")


class Stream(NamedTuple):
    """An experiment at a length: what holds after 50 tasks need not hold after 200."""

    experiment: str
    tasks: int

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.experiment}-{self.tasks}-tasks"

    @property
    def label(self) -> str:
        """For people."""
        return f"{paper.experiment_label(self.experiment)}, {self.tasks} tasks"


class Setting(NamedTuple):
    """One cell of the grid; the exponent is 0 where the ranking is absolute."""

    stream: Stream
    panel: Panel
    method: str
    exponent: float
    maturity: int
    rate: float

    @property
    def resets(self) -> bool:
        """Whether there is anything to rank."""
        return self.method != "backprop"

    @property
    def rule(self) -> str:
        """How units are ranked, in words."""
        return ranking(self.exponent) if self.resets else ""

    @property
    def c(self) -> float:
        """The c of ``maturity = c / rate``: for what share of a mean lifetime a newborn is safe."""
        return round(self.maturity * self.rate, 6)


class Rule(NamedTuple):
    """How a unit is chosen by its utility, at a replacement rate."""

    exponent: float
    maturity: int
    rate: float

    @classmethod
    def of(cls, setting: Setting) -> Rule:
        """The one of a setting."""
        return cls(setting.exponent, setting.maturity, setting.rate)

    @property
    def is_papers(self) -> bool:
        """The absolute ranking, with the paper's maturity."""
        return not self.exponent and self.maturity == PAPER_MATURITY

    @property
    def words(self) -> str:
        """In a few words."""
        if self.exponent:
            return ranking(self.exponent)
        return "paper's" if self.is_papers else f"maturity {self.maturity} = {self.maturity * self.rate:g} / rate"


class Result(NamedTuple):
    """What one run came to over the last eighth of its tasks; churn and age are NaN without resets.

    ``reach``: the share of all units that were reset in the second half of the tasks; NaN where it was not recorded.
    """

    accuracy: float
    churn: float
    age: float
    diverged: bool
    seconds: float = 0.0
    reach: float = math.nan


Results = Mapping[Setting, Mapping[int, Result]]  # by seed
DIGEST = "age.jsonl"  # one line per run, all that the page needs


def collect(directories: Sequence[Path]) -> dict[Setting, dict[int, Result]]:
    """The runs below directories, or what the digests in them know of runs. Of one that is in both, the run counts."""
    found: dict[Setting, dict[int, Result]] = {}
    for directory in directories:
        if (directory / DIGEST).is_file():
            for setting, seed, result in _read(directory / DIGEST):
                found.setdefault(setting, {})[seed] = result
    runs = [directory for directory in directories if not (directory / DIGEST).is_file()]
    for setting, by_seed in results(digest.collect(runs).runs if runs else ()).items():
        found.setdefault(setting, {}).update(by_seed)
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def write_digest(found: Results, out: Path) -> None:
    """Small enough to commit."""
    lines = []
    for setting, by_seed in found.items():
        for seed, result in sorted(by_seed.items()):
            values = {name: _plain(value) for name, value in result._asdict().items()}
            lines.append(json.dumps({**setting._asdict(), "seed": seed, **values}) + "\n")
    write_bytes(out / DIGEST, "".join(lines).encode())


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _read(file: Path) -> Iterable[tuple[Setting, int, Result]]:
    try:
        return objects(file.read_bytes(), _line)
    except ValueError as error:
        raise UserError(
            f"{file} is damaged ({error}): restore it; or delete that line, and the run is missing, unless its "
            "directory is named, too"
        ) from error


def _line(line: dict[str, Any]) -> tuple[Setting, int, Result]:
    """A run, as :func:`write_digest` has it."""
    line.setdefault("reach", None)  # runs from before it was recorded
    values: list[Any] = [math.nan if line[name] is None else line[name] for name in Result._fields]
    tuples = {"stream": Stream(*line["stream"]), "panel": tuple(line["panel"])}
    setting = Setting(**{name: tuples.get(name, line[name]) for name in Setting._fields})
    return setting, int(line["seed"]), Result(*values)


def results(runs: Iterable[Run]) -> dict[Setting, dict[int, Result]]:
    """The runs that are over, by setting and seed. Raises :class:`UserError` if a setting was trained in two ways."""
    found: dict[Setting, dict[int, Result]] = defaultdict(dict)
    trained: dict[Setting, str] = {}
    for run in runs:
        if run.status not in digest.SETTLED:
            continue
        setting = _setting(run)
        if trained.setdefault(setting, run.key) != run.key:
            raise UserError(
                f"{setting.stream.label}, {setting.method}, {setting.rule}: there are runs of two networks or learning "
                "rates; name the directory of one study"
            )
        found[setting][run.seed] = _result(run)
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def _setting(run: Run) -> Setting:
    config = run.config
    options: Mapping[str, Any] = config.get("options") or {}
    exponent = float(options.get("exponent", 0.5)) if options.get("ranking") == "age" else 0.0
    panel = str(config["activation"]), bool(config.get("layer_norm", False))
    stream = Stream(run.experiment, run.planned)
    return Setting(stream, panel, config["method"], exponent, int(config["maturity"]), float(config["rate"]))


def _result(run: Run) -> Result:
    kind = experiment(run.experiment)
    if run.status == "diverged":
        return Result(kind.learned_nothing, math.nan, math.nan, True, run.seconds or 0.0)
    eighth = max(1, run.planned // 8)
    accuracy = run.last(kind.metric, eighth)
    churn, age = (run.last_by_resets(name, eighth) for name in ("churn", "median_age_at_reset"))
    found = accuracy, run.last("reach", 1)
    accuracy, reach = (math.nan if value is None else value for value in found)
    return Result(accuracy, churn, age, False, run.seconds or 0.0, reach)


def _order(setting: Setting) -> tuple[Any, ...]:
    stream, panel, method, *rest = setting
    return stream, panel_order(panel), paper.method_order(method), *rest


def reported(by_seed: Mapping[int, Result]) -> dict[int, Result]:
    """Without the seeds that choose."""
    return {seed: result for seed, result in by_seed.items() if seed < CHOOSING}


def at_rate(found: Results, stream: Stream, rate: float) -> dict[Setting, dict[int, Result]]:
    """The reported runs of a stream at a replacement rate, and those without resets."""
    here = {s: reported(by_seed) for s, by_seed in found.items() if s.stream == stream}
    return {s: by_seed for s, by_seed in here.items() if by_seed and (not s.resets or s.rate == rate)}


def rates_of(found: Results, stream: Stream) -> list[float]:
    """The replacement rates of a stream's reported runs, the highest first."""
    return sorted({s.rate for s, by in found.items() if s.stream == stream and s.resets and reported(by)}, reverse=True)


def rules_at(here: Iterable[Setting]) -> list[Rule]:
    """The paper's first, then by age, then longer maturities."""
    rules = {Rule.of(setting) for setting in here if setting.resets}
    return sorted(rules, key=lambda rule: (not rule.is_papers, not rule.exponent, rule))


def papers(setting: Setting) -> Setting:
    """The same with the paper's rule."""
    return setting._replace(exponent=0.0, maturity=PAPER_MATURITY)


def paired_gains(found: Results, setting: Setting, over: Setting | None = None) -> dict[int, float]:
    """By seed, the accuracy minus that of another setting: else of the paper's rule. Only seeds that are reported."""
    ours, theirs = (reported(found.get(one, {})) for one in (setting, over or papers(setting)))
    return {seed: ours[seed].accuracy - theirs[seed].accuracy for seed in sorted(ours.keys() & theirs.keys())}


def interval(values: Iterable[float]) -> numbers.Interval:
    """The mean with its 95 % t interval."""
    kept = [value for value in values if math.isfinite(value)]
    return numbers.paired(kept, [0.0] * len(kept))
