"""The tables: the paper's cells beside ours, summaries of the runs, divergence, settings."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gxd.lab.report import numbers, paper
from gxd.lab.report.digest import Assay, Collection, Run, window
from gxd.lab.report.evidence import AssayColumn, Group, Panel, groups


@dataclass(frozen=True)
class Cell:
    """One cell: what it says, a smaller second line, and a class for the eye (best, differs, good, bad, unknown).

    ``chips`` are several short texts in one cell, each with its own mark.
    """

    text: str
    note: str = ""
    mark: str = ""
    chips: tuple[Cell, ...] = ()


@dataclass
class Table:
    """A table as the page shows it (``rows``) and as data (``records``, one per line of the CSV)."""

    name: str
    title: str
    caption: str
    columns: list[str]
    rows: list[list[Cell]] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)

    def markdown(self) -> str:
        """The table in Markdown."""

        def line(cells: Iterable[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

        body = [line(_plain(cell) for cell in row) for row in self.rows]
        head = [line(self.columns), "|" + "---|" * len(self.columns)]
        return "\n".join([f"**{self.title}**", "", *head, *body, "", self.caption, ""])

    def csv(self) -> str:
        """The records as CSV."""
        if not self.records:
            return ""
        text = io.StringIO()
        names = list(dict.fromkeys(name for record in self.records for name in record))
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.records)
        return text.getvalue()


def _plain(cell: Cell) -> str:
    text = f"**{cell.text}**" if cell.mark == "best" else cell.text
    note = cell.note.replace("\n", ", ")
    return f"{text} ({note})" if note else text


# --- numbers as text --------------------------------------------------------------------------------------------------


def rho(value: float) -> str:
    """A correlation as the paper prints it: .996, -.012."""
    text = f"{value:.3f}"
    return text.replace("0.", ".", 1) if abs(value) < 0.9995 else text


def plus_minus(value: numbers.Mean, digits: int = 1, scale: float = 100.0) -> str:
    """For example "90.1 ± 0.3" (in percent by default)."""
    if value.n == 0:
        return "–"
    error = f" ± {value.se * scale:.{digits}f}" if math.isfinite(value.se) else ""
    return f"{value.value * scale:.{digits}f}{error}"


def signed(value: float, digits: int = 1) -> str:
    """A number with its sign: +0.4, −1.2; zero has none."""
    text = f"{value:+.{digits}f}"
    return text[1:] if not float(text) else text.replace("-", "−")


def points(interval: numbers.Interval, digits: int = 1) -> str:
    """A difference of rates or accuracies in percentage points, with its interval."""
    if not math.isfinite(interval.value):
        return "–"
    if not math.isfinite(interval.low):
        return f"{signed(interval.value * 100, digits)} (one pair: no interval)"
    low, high = signed(interval.low * 100, digits), signed(interval.high * 100, digits)
    return f"{signed(interval.value * 100, digits)} [{low}, {high}]"


def rate(count: int, n: int) -> str:
    """A rate with its Wilson interval: "2/10 [6, 51] %"."""
    if n == 0:
        return "–"
    interval = numbers.wilson(count, n)
    return f"{count}/{n} [{interval.low * 100:.0f}, {interval.high * 100:.0f}] %"


def panel_label(panel: Panel) -> str:
    """For example "ReLU + LayerNorm"."""
    return paper.ACTIVATIONS.get(panel[0], panel[0]) + (" + LayerNorm" if panel[1] else "")


def distance(ours: numbers.Mean, cell: tuple[float, float]) -> float:
    """How many standard errors our mean lies from the paper's."""
    ours_variance = ours.se**2 if math.isfinite(ours.se) else 0.0
    return (ours.value - cell[0]) / math.sqrt(ours_variance + cell[1] ** 2 + paper.ROUNDING_VARIANCE)


# --- the reset-cost assay ---------------------------------------------------------------------------------------------

Printed = Mapping[tuple[str, paper.Column, str], tuple[float, float]]


def spearman(
    name: str,
    title: str,
    printed: Printed,
    columns: Mapping[paper.Column, AssayColumn],
    *,
    shown: Sequence[paper.Column] = paper.COLUMNS,
    only: Sequence[str] | None = None,
) -> Table:
    """Spearman's rho by utility, column and metric: ours, the paper's, and the distance. Best of ours in bold.

    ``only`` these utilities; by default the paper's and all that were assayed.
    """
    utilities = set(only or [utility for utility, _, _ in printed])
    if only is None:
        utilities |= {utility for column in shown if column in columns for utility in columns[column].utilities}
    keys = [(column, metric) for column in shown for metric in paper.METRICS]
    means = {
        (utility, column, metric): numbers.mean(columns[column].spearman(utility, metric).values())
        for utility in utilities
        for column, metric in keys
        if column in columns
    }
    best = {
        key: max(
            (value.value for (_, *rest), value in means.items() if tuple(rest) == key and value.n), default=math.nan
        )
        for key in keys
    }
    table = Table(
        name,
        title,
        "Ours: mean ± SE over seeds × checkpoints, after the mean over layers; below it the paper's cell and the "
        "distance (ours − paper) / √(SE² + SE²), with the rounding of the printed digits in the paper's SE. The "
        "samples of one seed are not independent, so read the distances as a scale, not as a test. Bold: best of "
        "ours in the column." + diverged_assays({column: columns[column] for column in shown if column in columns}),
        ["Utility", *(f"{paper.column_label(column)}, {paper.METRICS[metric]}" for column, metric in keys)],
    )
    for utility in sorted(utilities, key=paper.method_order):
        row = [Cell(paper.method_label(utility))]
        for column, metric in keys:
            value, cell = means.get((utility, column, metric)), printed.get((utility, column, metric))
            row.append(_spearman_cell(value, cell, best[column, metric]))
            if value is None and cell is None:
                continue
            ours = value if value is not None and value.n else None
            record = {
                "utility": utility,
                "model": column[0],
                "activation": column[1],
                "metric": metric,
                "ours": _number(ours.value if ours else None),
                "ours_se": _number(ours.se if ours else None),
                "n": ours.n if ours else 0,
                "paper": cell[0] if cell else "",
                "paper_se": cell[1] if cell else "",
                "distance_se": f"{distance(ours, cell):.2f}" if ours and cell else "",
            }
            table.records.append(record)
        table.rows.append(row)
    return table


def diverged_assays(columns: Mapping[paper.Column, AssayColumn]) -> str:
    """The end of a caption: which assays diverged, so that late checkpoints are missing from the means. Or nothing."""
    dead = [assay for column in columns.values() for assay in column.assays if assay.status == "diverged"]
    return f" In the means only up to there: {'; '.join(map(diverged_assay, dead))}." if dead else ""


def diverged_assay(assay: Assay) -> str:
    """For example "MLP ReLU, seed 2, diverged after checkpoint 5"."""
    points = [int(point["checkpoint"]) for point in assay.checkpoints]
    when = f"after checkpoint {points[-1]}" if points else "before its first checkpoint"
    return f"{paper.column_label(assay.column)}, seed {assay.seed}, diverged {when}"


def _spearman_cell(ours: numbers.Mean | None, cell: tuple[float, float] | None, best: float) -> Cell:
    theirs = f"paper {rho(cell[0])} ± {rho(cell[1])}" if cell else ""
    if ours is None or ours.n == 0:
        return Cell("–", theirs, "unknown" if theirs else "")
    if cell:
        theirs += f"\n{signed(distance(ours, cell))} SE"
    error = f" ± {rho(ours.se)}" if math.isfinite(ours.se) else ""
    return Cell(rho(ours.value) + error, theirs, "best" if ours.value == best else "")


def shocks(columns: Mapping[paper.Column, AssayColumn]) -> Table:
    """Shock@5% of every utility and of the oracle."""
    table = Table(
        "shock",
        "Shock@5% (Fig. 2 as numbers)",
        "Mean output change when each of the 5 % units of lowest utility per layer is clamped to its reference; "
        "mean ± SE over seeds × checkpoints. Lower is better; the oracle is the least possible. The paper shows "
        "bars without numbers." + diverged_assays(columns),
        ["Utility", *(f"{paper.column_label(c)}, {paper.METRICS[m]}" for c in columns for m in paper.METRICS)],
    )
    names = dict.fromkeys(name for column in columns.values() for name in column.utilities)
    for utility in [*sorted(names, key=paper.method_order), "oracle"]:
        row = [Cell("Oracle" if utility == "oracle" else paper.method_label(utility))]
        for key, column in columns.items():
            for metric in paper.METRICS:
                value = numbers.mean(column.shock(utility, metric).values())
                error = f" ± {value.se:.2g}" if math.isfinite(value.se) else ""
                row.append(Cell(f"{value.value:.3g}{error}" if value.n else "–"))
                record = {"utility": utility, "model": key[0], "activation": key[1], "metric": metric}
                table.records.append({**record, "shock": _number(value.value), "se": _number(value.se), "n": value.n})
        table.rows.append(row)
    return table


# --- the runs ---------------------------------------------------------------------------------------------------------


def summary(experiment: str, panels: Mapping[Panel, Mapping[str, Group]]) -> Table:
    """Accuracy over the first and last tasks by method and activation, with what diverged."""
    width = {window(group.tasks) for methods in panels.values() for group in methods.values()}
    span = f"{width.pop()}" if len(width) == 1 else "n"
    table = Table(
        f"{experiment}-summary",
        f"{paper.experiment_label(experiment)}: the first and the last tasks",
        f"Test accuracy in % (mean ± SE over the living runs), over the first and the last {span} tasks (a quarter "
        "of a run shorter than 150 tasks). A diverged run counts in the last columns only: the rate among all runs "
        "started, with Wilson's 95 % interval, and after how many tasks it happened. Bold: the best of each "
        "activation among methods without a diverged run.",
        [
            "Activation",
            "Method",
            "lr",
            "rate",
            f"First {span}",
            f"Last {span}",
            "Tasks",
            "Seeds",
            "Diverged",
            "After tasks",
        ],
    )
    for panel, methods in panels.items():
        sound = [group.last().value for group in methods.values() if group.settled and not group.diverged]
        best = max((value for value in sound if math.isfinite(value)), default=math.nan)
        for number, (method, group) in enumerate(methods.items()):
            config, last = group.runs[0].config, group.last()
            died = sorted(run.diverged_at for run in group.diverged if run.diverged_at is not None)
            running = len(group.runs) - len(group.settled)
            table.rows.append(
                [
                    Cell("" if number else panel_label(panel)),
                    Cell(paper.method_label(method)),
                    Cell(short(config.get("lr"))),
                    Cell(short(config.get("rate"))),
                    Cell(plus_minus(group.first())),
                    Cell(plus_minus(last), "", "best" if last.value == best and not died else ""),
                    Cell(str(group.tasks)),
                    Cell(str(len(group.settled)), f"{running} not complete" if running else ""),
                    Cell(rate(len(died), len(group.runs)) + group.so_far, "", "bad" if died else ""),
                    Cell(", ".join(map(str, died)) or "–"),
                ]
            )
            interval = numbers.wilson(len(died), len(group.runs))
            table.records.append(
                {
                    "activation": panel[0],
                    "layer_norm": panel[1],
                    "method": method,
                    "lr": config.get("lr"),
                    "rate": config.get("rate"),
                    "first": _number(group.first().value),
                    "first_se": _number(group.first().se),
                    "last": _number(last.value),
                    "last_se": _number(last.se),
                    "tasks": group.tasks,
                    "seeds": " ".join(str(run.seed) for run in group.settled),
                    "started": len(group.runs),
                    "diverged": len(died),
                    "diverged_low": _number(interval.low),
                    "diverged_high": _number(interval.high),
                    "diverged_at": " ".join(map(str, died)),
                    "key": group.runs[0].key,
                }
            )
    return table


def all_settings(collection: Collection) -> Table:
    """Every setting that was found, with its seeds and its state."""
    table = Table(
        "runs",
        "Every setting found",
        "One row per setting. The figures take one setting per method and activation, of methods that were trained "
        "alike but for their learning and replacement rates: of the study (directory) that covers most methods there, "
        "then with most methods on two seeds, most tasks, most seeds, highest final accuracy.",
        [
            "Study",
            "Experiment",
            "Method",
            "Activation",
            "lr",
            "rate",
            "Comp.",
            "Tasks",
            "Last",
            "Seeds",
            "Diverged",
            "Key",
        ],
    )
    for group in groups(collection.runs):
        run = group.runs[0]
        unfinished = len(group.runs) - len(group.settled)
        table.rows.append(
            [
                Cell(run.study),
                Cell(run.experiment),
                Cell(paper.method_label(group.method)),
                Cell(panel_label(group.panel)),
                Cell(short(run.config.get("lr"))),
                Cell(short(run.config.get("rate"))),
                Cell("yes" if group.compensates else "no"),
                Cell(str(group.tasks)),
                Cell(plus_minus(group.last())),
                Cell(_seeds(group.runs), f"{unfinished} not complete" if unfinished else ""),
                Cell(f"{len(group.diverged)}/{len(group.runs)}{group.so_far}", "", "bad" if group.diverged else ""),
                Cell(run.key),
            ]
        )
        record = {"study": run.study, "experiment": run.experiment, "key": run.key, **run.config}
        record["seed"] = " ".join(str(member.seed) for member in group.runs)
        table.records.append({**record, "last": _number(group.last().value), "diverged": len(group.diverged)})
    return table


def settings_table(name: str, title: str, rows: Sequence[paper.Setting], configs: Sequence[Mapping[str, Any]]) -> Table:
    """The paper's settings beside those of the runs found. What differs is marked."""
    table = Table(
        f"settings-{name}",
        title,
        "Marked: where the runs differ from the paper.",
        ["Setting", "Paper", "These runs"],
    )
    for row in rows:
        if row.field is None:
            seeds = sorted({int(config.get("seed", 0)) for config in configs})
            text, same = f"{len(seeds)} ({', '.join(map(str, seeds))})" if seeds else "–", str(len(seeds)) == row.text
        else:
            values = [config[row.field] for config in configs if row.field in config]
            found = {row.text if value is None else short(value) for value in values}
            text = ", ".join(sorted(found)) or "–"
            allowed = row.value if isinstance(row.value, tuple) else (row.value,)
            wanted = {row.text if value is None else short(value) for value in allowed}
            # More methods or activations than the paper's are no deviation, fewer are; other settings must be the same.
            same = found >= wanted if row.field in ("method", "activation") else bool(found) and found <= wanted
        mark = "" if same else "unknown" if text == "–" else "differs"
        table.rows.append([Cell(row.label), Cell(row.text), Cell(text, "", mark)])
        table.records.append({"setting": row.label, "paper": row.text, "ours": text, "differs": not same})
    return table


def _seeds(runs: Sequence[Run]) -> str:
    seeds = [run.seed for run in runs]
    if len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]}–{seeds[-1]}"
    return ", ".join(map(str, seeds))


def short(value: Any) -> str:
    """A setting's value for people: 1e-3, 0.3, yes."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and 0 < abs(value) < 1e-2:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(short, value))
    return "–" if value is None else str(value)


def _number(value: float | None) -> str:
    return f"{value:.5g}" if value is not None and math.isfinite(value) else ""
