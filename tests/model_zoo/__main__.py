"""``python -m tests.model_zoo --out coverage.csv``: what gxd makes of every model of the zoo, as a table."""

import argparse
import csv
import logging
import re
import signal
import statistics
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from torch import nn

import gxd
from tests.model_zoo.measure import Measured, measure
from tests.model_zoo.models import FACTORIES


def main() -> None:
    """Measure the models whose names contain one of the given words, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names of models; default: all")
    parser.add_argument("--out", type=Path, default=Path("coverage.csv"))
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one model")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    # The first call imports much of torch, which is not to be timed.
    gxd.find_units(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), torch.randn(2, 2))
    chosen = [name for name in FACTORIES if not options.names or any(part in name for part in options.names)]
    found = []
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(_row(Measured(""))))
        writer.writeheader()
        for name in chosen:
            try:
                with _limit(options.timeout):
                    found.append(measure(name, FACTORIES[name]))
            except Exception as error:  # one model must not cost the others their line
                found.append(Measured(name, error=f"{type(error).__name__}: {error}".splitlines()[0]))
            writer.writerow(_row(found[-1]))
            file.flush()
            print(_line(found[-1]), flush=True)
    for library in sorted({entry.name.split("/")[0] for entry in found}):
        print(_summary(library, [entry for entry in found if entry.name.startswith(library)]))


def _row(entry: Measured) -> dict[str, object]:
    reasons = Counter[str]()
    for (reason, _), rows in entry.reasons.items():
        reasons[_general(reason)] += rows
    return {
        "model": entry.name,
        "seconds": f"{entry.seconds:.2f}",
        "layers": entry.layers,
        "rows": entry.rows,
        "coverage_skip": f"{entry.skip:.4f}",
        "coverage_group": f"{entry.group:.4f}",
        "groups": entry.groups,
        "check": entry.check,
        "damage": "; ".join(entry.damage[:5]),
        "disproof": "; ".join(entry.disproof[:5]),
        "unproved": entry.unproved,
        "error": entry.error,
        "reasons": "; ".join(f"{rows} rows: {reason}" for reason, rows in reasons.most_common(5)),
    }


def _line(entry: Measured) -> str:
    state = entry.error or f"check: {entry.check or 'no group'}"
    bad = "".join(f"\n    {kind}: {text}" for kind in ("damage", "disproof") for text in getattr(entry, kind)[:3])
    return (
        f"{entry.name:<50} {entry.seconds:5.1f} s  {entry.layers:4} layers  {entry.rows:6} rows  "
        f"skip {entry.skip:4.0%}  group {entry.group:4.0%}  {state}{bad}"
    )


def _summary(library: str, entries: Sequence[Measured]) -> str:
    lines = [f"\n{library}: {len(entries)} models"]
    for kind in ("skip", "group"):
        shares = [getattr(entry, kind) for entry in entries]
        lines.append(f"  median coverage, residual={kind!r}: {statistics.median(shares):.1%}")
    seconds = [entry.seconds for entry in entries if not entry.error]
    if seconds:
        lines.append(f"  find_units: median {statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s")
    counts = {kind: sum(bool(getattr(entry, kind)) for entry in entries) for kind in ("error", "damage", "disproof")}
    lines.append("  models not traced {error}, damaged {damage}, disproved {disproof}".format(**counts))
    lines.append(f"  groups that the proof cannot reach: {sum(entry.unproved for entry in entries)}")
    for word in ("crashed", "wrong", "inconclusive"):
        lines.append(f"  check {word}: {sum(word in e.check for e in entries)}")
    for kind in ("reasons", "group_reasons"):
        total = sum(entry.rows for entry in entries)
        cost: Counter[str] = Counter()
        example: dict[str, str] = {}
        models: defaultdict[str, set[str]] = defaultdict(set)
        for entry in entries:
            for (reason, module), rows in getattr(entry, kind).items():
                cost[_general(reason)] += rows
                models[_general(reason)].add(entry.name)
                example.setdefault(_general(reason), f"{entry.name} {module}: {reason}")
        lines.append(f"  why rows are not covered, residual={'skip' if kind == 'reasons' else 'group'!r}")
        for reason, rows in cost.most_common(25):
            lines.append(f"    {rows / total:6.1%} {len(models[reason]):3} models  {reason}   e.g. {example[reason]}")
    return "\n".join(lines)


def _general(reason: str) -> str:
    """A reason without the names of modules in it."""
    return re.sub(r"\d+ times", "several times", re.sub(r"'[^']*'", "*", reason))


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


if __name__ == "__main__":
    main()
