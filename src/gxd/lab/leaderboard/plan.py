"""Which runs the board is made of, and which setting of an entry is the best."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from gxd.lab.errors import UserError, first_line
from gxd.lab.experiments import Experiment
from gxd.lab.leaderboard.entries import Entry
from gxd.lab.leaderboard.protocol import Protocol, Track
from gxd.lab.leaderboard.records import REPORT, TUNING, Record, Records, read
from gxd.lab.training import waits_for_boundaries


@dataclass(frozen=True)
class Place:
    """An entry on a stream: its trials, and its reported runs once the trials are over."""

    protocol: Protocol
    track: Track
    entry: Entry

    @cached_property
    def _tried(self) -> tuple[list[dict[str, Any]], str]:
        try:
            return self.entry.settings(self.protocol, self.track), ""
        except UserError as error:
            return [], str(error)
        except (Exception, SystemExit) as error:  # of a user's own code
            return [], f"making {self.entry.name} raises {type(error).__name__}: {first_line(error)}"

    @property
    def settings(self) -> list[dict[str, Any]]:
        """What is tried; nothing if the entry cannot be on this stream."""
        return self._tried[0]

    @property
    def refusal(self) -> str:
        """Why the entry cannot be on this stream, as far as its settings tell."""
        return self._tried[1]

    @cached_property
    def is_told(self) -> bool:
        """Whether it acts when a task ends, and so has to be told."""
        if not self.track.kind.boundaries:
            return False
        made = [one for values in self.settings for one in self.track.config(values, 0).plasticity()]
        return any(map(waits_for_boundaries, made))

    def trials(self) -> list[Run]:
        """All settings on one seed, then on the next: an early look sees all of them."""
        return [self._run(TUNING, values, seed) for seed in self.protocol.tuning_seeds for values in self.settings]

    def reports(self, values: Mapping[str, Any]) -> list[Run]:
        """A setting on the seeds that count."""
        return [self._run(REPORT, values, seed) for seed in self.protocol.seeds]

    def _run(self, stage: str, values: Mapping[str, Any], seed: int) -> Run:
        return Run(self, stage, self.track.config(values, seed), setting_text(values))

    def best(self, records: Records) -> dict[str, Any] | None:
        """The setting with the best mean over the tuning seeds, the first of equals; None while trials are missing, or
        if none of them came to an end. What diverged or failed has learned nothing.
        """
        if not self.settings:
            return None
        reached: list[float] = []
        for values in self.settings:
            runs = [self._run(TUNING, values, seed) for seed in self.protocol.tuning_seeds]
            found = [records.get(run.name) for run in runs]
            if any(record is None for record in found):
                return None
            reached.append(fmean(score(record, self.track) for record in found if record is not None))
        if all(records[run.name].status == "failed" for run in self.trials()):
            return None
        sign = -1 if self.track.kind.higher_is_better else 1
        return min(zip(self.settings, reached, strict=True), key=lambda pair: sign * pair[1])[0]


@dataclass(frozen=True)
class Run:
    """A run of the board."""

    place: Place
    stage: str
    config: Experiment
    setting: str

    @cached_property
    def draft(self) -> Record:
        """Its record before there is anything to say."""
        key, seed = self.config.key(), self.config.seed
        return Record(self.stage, self.place.track.name, self.place.entry.name, self.setting, key, seed, "missing")

    @property
    def name(self) -> tuple[str, str, int]:
        """Of its record."""
        return self.draft.name

    def record(self, out: Path, failures: Mapping[str, str]) -> Record | None:
        """What its directory says; None if it is missing."""
        return read(self.config, out, self.draft, self.place.track, failures)


def score(record: Record, track: Track) -> float:
    """What counts of a run: its mean, or what a network has that has learned nothing."""
    return track.kind.learned_nothing if record.mean is None else record.mean


def setting_text(values: Mapping[str, Any]) -> str:
    """A setting in a few words: the learning rate, and what is the entry's own."""
    options = values.get("options", {})
    own = {name: value for name, value in values.items() if name not in ("lr", "method", "options")}
    words = {"lr": values["lr"], **own, **options}
    return " ".join(
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in words.items()
    )


def gather(runs: list[Run], out: Path, failures: Mapping[str, str], known: Records | None = None) -> Records:
    """The records of runs that are over: from their directories, else what is known of them."""
    found = (_readable(run, out, failures) or (known or {}).get(run.name) for run in runs)
    return {record.name: record for record in found if record is not None}


def _readable(run: Run, out: Path, failures: Mapping[str, str]) -> Record | None:
    """The record of a run. One whose files are damaged is missing: the others stay on the board."""
    try:
        return run.record(out, failures)
    except UserError as error:
        print(f"gxd: {error}; until then it counts as missing", file=sys.stderr)
        return None
