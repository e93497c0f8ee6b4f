"""The table and the figure of the study of births, from its runs.

    python studies/births/table.py results/births

Writes ``births.md`` and ``births.png`` beside ``streams.jsonl`` and ``cartpole.csv``.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RULES = ("backprop", "fresh", "1.0", "he", "2.0", "he, Adam as peers")
Scores = dict[str, dict[str, list[float]]]  # stream -> rule -> the score of each seed


def scores(folder: Path) -> Scores:
    """All scores: accuracy in percent, return, or minus the loss."""
    found: Scores = defaultdict(lambda: defaultdict(list))
    for line in (folder / "streams.jsonl").read_text().splitlines():
        run = json.loads(line)
        found[run["stream"]][run["rule"]].append(run["score"] if run["stream"] == "decoder" else 100 * run["score"])
    levels: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    if (folder / "cartpole.csv").exists():
        with (folder / "cartpole.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                if int(row["level"]):  # the first level is the same for all
                    levels[row["networks"], row["rule"], row["seed"]].append(float(row["mean_return"]))
    for (networks, rule, _), values in levels.items():
        found[f"PPO on CartPole, {networks}"][rule].append(fmean(values))
    return found


def cell(values: list[float]) -> str:
    """Mean and standard error."""
    if not values:
        return "–"
    error = f" ± {stdev(values) / len(values) ** 0.5:.1f}" if len(values) > 1 else ""
    return f"{fmean(values):.1f}{error}"


def table(found: Scores) -> str:
    """One row a stream."""
    lines = ["| stream | seeds | " + " | ".join(RULES) + " |", "|---|---|" + "---|" * len(RULES)]
    for stream, by_rule in found.items():
        seeds = max(map(len, by_rule.values()))
        lines.append(f"| {stream} | {seeds} | " + " | ".join(cell(by_rule.get(rule, [])) for rule in RULES) + " |")
    return "\n".join(lines) + "\n"


def figure(found: Scores, path: Path) -> None:
    """What each birth gains over births as the layer began, in percent of that score, with standard errors."""
    streams = [stream for stream, by_rule in found.items() if by_rule.get("fresh")]
    colours = {
        "backprop": "#7f7f7f",
        "1.0": "#56b4e9",
        "he": "#0072b2",
        "2.0": "#009e73",
        "he, Adam as peers": "#e69f00",
    }
    _, axes = plt.subplots(figsize=(7.5, 0.42 * len(streams) + 1.6), layout="constrained")
    for place, stream in enumerate(reversed(streams)):
        base = fmean(found[stream]["fresh"])
        for shift, (rule, colour) in enumerate(colours.items()):
            values = found[stream].get(rule)
            if values:
                gains = [100 * (value - base) / abs(base) for value in values]
                error = stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
                spot = place + 0.28 - 0.14 * shift
                axes.errorbar(fmean(gains), spot, xerr=error, fmt="o", color=colour, markersize=5, label=rule)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(streams)), list(reversed(streams)))
    axes.set_xlabel("gain over births as the layer began, % of its score (± standard error)")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(
        handles.values(), handles.keys(), loc="upper center", bbox_to_anchor=(0.35, 1.16), ncols=5, frameon=False
    )
    axes.spines[["top", "right"]].set_visible(False)
    plt.savefig(path, dpi=130)


def main() -> None:
    """The command."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "results/births")
    found = scores(folder)
    (folder / "births.md").write_text(table(found))
    figure(found, folder / "births.png")
    print(table(found))


if __name__ == "__main__":
    main()
