"""The figures of the paper, drawn from the runs found. A panel without runs says which command makes them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gxd.lab.report import numbers, paper, style
from gxd.lab.report.evidence import AssayColumn, Curve, Group, Panel, curve
from gxd.lab.report.tables import diverged_assays, panel_label

Panels = Mapping[Panel, Mapping[str, Group]]
SMOOTH = 50  # tasks, of the moving average of Fig. 4
UTILITIES = (*paper.COMPARED, "gxd_sketch")


@dataclass
class Picture:
    """A figure for the page: drawn, or only the commands that would make its runs (``missing``)."""

    name: str
    title: str
    caption: str
    drawn: Figure | None = None
    missing: list[str] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)  # runs that were made and cannot be drawn, in sentences
    alt: str = ""


def stream_figures(experiment: str, panels: Panels) -> list[Picture]:
    """Fig. 1, Fig. 3, Fig. 4 left and the appendix' GXI figure, for Permuted MNIST or Permuted digits."""
    name = paper.experiment_label(experiment)
    ours = "" if experiment in paper.TASKS else " (ours)"
    leaky, norm, relu = ("leaky_relu", False), ("relu", True), ("relu", False)
    local = ("backprop", "activation", "contribution", "mc_adaptable_contribution", "loss_gradient")
    four: tuple[Panel, ...] = tuple((activation, False) for activation in paper.ACTIVATIONS)
    main = ("backprop", "contribution", "mc_adaptable_contribution", "gxd_paper", "gxd_sketch")
    shade = "Mean over seeds, shaded ± SE; × marks a diverged run, after which the mean is over those alive."
    return [
        _curves(
            f"{experiment}-fig1-utility-failures",
            f"Fig. 1, {name}{ours}: where existing utilities fail",
            f"Left: LeakyReLU. Centre: LayerNorm. Right: ReLU with loss gradient. {shade}",
            experiment,
            panels,
            [(leaky, local), (norm, local), (relu, ("backprop", "contribution", "loss_gradient"))],
            columns=3,
        ),
        _curves(
            f"{experiment}-fig3-activations",
            f"Fig. 3, {name}{ours}: test accuracy by activation",
            shade,
            experiment,
            panels,
            [(panel, main) for panel in four],
        ),
        _curves(
            f"{experiment}-fig4-layernorm",
            f"Fig. 4 left, {name}{ours}: ReLU with LayerNorm",
            shade,
            experiment,
            panels,
            [(norm, (*main, "loss_gradient"))],
            columns=1,
        ),
        _curves(
            f"{experiment}-app-gxi-gradient",
            f"Appendix, {name}{ours}: GXI, GXD and loss gradient",
            shade,
            experiment,
            panels,
            [(panel, ("gxi", "gxd_paper", "loss_gradient")) for panel in four],
        ),
    ]


def cifar_figures(panels: Panels) -> list[Picture]:
    """Fig. 4 right and the appendix' absolute accuracy."""
    relu = ("relu", False)
    methods = ("contribution", "mc_adaptable_contribution", "gxd_paper", "gxd_sketch")
    baseline = panels.get(relu, {}).get("backprop")
    relative = _curves(
        "cifar100-fig4-relative",
        "Fig. 4 right, Continuous CIFAR-100: accuracy relative to backprop",
        f"Difference to backprop on the same seed, in percentage points; {SMOOTH}-task moving average (over the "
        "tasks so far at the start). Shaded ± SE over seeds.",
        "cifar100",
        panels if baseline else {},
        [(relu, methods)],
        columns=1,
        make=lambda group: curve(group, smooth=SMOOTH, baseline=baseline),
        unit="points above backprop",
        zero=True,
    )
    if baseline is None and panels:
        relative.missing.insert(0, _command("cifar100", relu, "backprop"))
    if baseline is not None and curve(baseline) is None:  # what is missing is nothing but a line to compare with
        relative.dead, relative.missing = [_lineless(baseline)], []
    absolute = _curves(
        "cifar100-app-absolute",
        "Appendix, Continuous CIFAR-100: absolute test accuracy",
        f"{SMOOTH}-task moving average. Shaded ± SE over seeds.",
        "cifar100",
        panels,
        [(relu, ("backprop", *methods))],
        columns=1,
        make=lambda group: curve(group, smooth=SMOOTH),
    )
    return [relative, absolute]


def assay_figures(columns: Mapping[paper.Column, AssayColumn]) -> list[Picture]:
    """Fig. 2 and the appendix' variants: Shock@5% bars with the oracle."""
    text = (
        "Mean logit L1 change from clamping each of the 5 % units of lowest utility per layer to its reference; "
        "lower is better. Error bars: SE over seeds × checkpoints. The line is the oracle: the least possible."
    )
    return [
        _bars("fig2-shock", "Fig. 2: Shock@5%", text, columns, UTILITIES),
        _bars(
            "app-shock-variants", "Appendix: Shock@5% of the variants", text, columns, (*paper.VARIANTS, "gxd_sketch")
        ),
    ]


def diagnostics(experiment: str, panels: Panels) -> Picture:
    """What happens inside the network, by activation: dormant units, rank, norms. Ours."""
    metrics = {
        "dormant_fraction": "dormant units, %",
        "effective_rank": "effective rank",
        "weight_norm": "weight norm",
        "bias_norm": "bias norm",
    }
    with style.styled():
        figure = style.new_figure(12.0, 1.75 * len(panels) + 0.5)
        grid = figure.subplots(len(panels), len(metrics), squeeze=False, sharex=True)
        drawn: dict[str, Artist] = {}
        for row, (panel, methods) in enumerate(panels.items()):
            for column, (metric, unit) in enumerate(metrics.items()):
                axes = grid[row][column]
                for method, group in methods.items():
                    line = curve(group, metric)
                    if line is not None:
                        drawn[method] = draw(axes, line, method, 100.0 if unit.endswith("%") else 1.0)
                if row == 0:
                    axes.set_title(unit)
                if column == 0:
                    axes.set_ylabel(panel_label(panel), color=style.INK)
                if row == len(panels) - 1:
                    axes.set_xlabel("task")
                axes.set_ylim(bottom=0)
                axes.locator_params(nbins=4)
        order = sorted(drawn, key=paper.method_order)
        names = [paper.method_label(method) for method in order]
        figure.legend([drawn[m] for m in order], names, loc="outside right upper", frameon=False, fontsize=8)
    return Picture(
        f"{experiment}-inside",
        f"Inside the networks, {paper.experiment_label(experiment)} (ours)",
        "Mean over the living seeds, shaded ± SE. Dormant units, ranks and norms are defined in gxd.lab.metrics.",
        figure,
        alt="Dormant units, effective rank, weight norm and bias norm over tasks",
    )


# --- curves -----------------------------------------------------------------------------------------------------------


def _curves(
    name: str,
    title: str,
    caption: str,
    experiment: str,
    panels: Panels,
    wanted: Sequence[tuple[Panel, Sequence[str]]],
    *,
    columns: int = 2,
    make: Callable[[Group], Curve | None] = curve,
    unit: str = "test accuracy, %",
    zero: bool = False,
) -> Picture:
    lines: list[dict[str, Curve]] = []
    missing, dead = [], []
    for panel, methods in wanted:
        here = {}
        for method in methods:
            group = panels.get(panel, {}).get(method)
            line = make(group) if group is not None else None
            if line is not None:
                here[method] = line
            elif group is not None and curve(group) is None:
                dead.append(_lineless(group))
            elif method != "gxd_sketch":  # ours: its absence leaves nothing of the paper out
                missing.append(_command(experiment, panel, method))
        lines.append(here)
    picture = Picture(name, title, caption, None, missing, dead)
    if not any(lines):
        return picture
    rows = -(-len(wanted) // columns)
    width, height = {1: (7.2, 3.6), 2: (10.4, 2.9), 3: (12.4, 3.0)}[columns]
    with style.styled():
        figure = style.new_figure(width, height * rows)
        grid = figure.subplots(rows, columns, squeeze=False)
        for i, ((panel, methods), here) in enumerate(zip(wanted, lines, strict=True)):
            axes = grid[i // columns][i % columns]
            if len(wanted) > 1 or panel[1]:
                axes.set_title(panel_label(panel))
            if not here:
                there = [group for method, group in panels.get(panel, {}).items() if method in methods]
                command = f"gxd run {experiment} --activation {panel[0]}{' --layer-norm' if panel[1] else ''}"
                _empty(axes, *map(_lineless, there) if there else ("no runs found", command))
                continue
            for method, line in here.items():
                draw(axes, line, method, 100.0)
            if zero:
                axes.axhline(0, color=style.MUTED, linewidth=0.8)
            axes.set_xlabel("task")
            if i % columns == 0:
                axes.set_ylabel(unit)
            fit(axes, here)
            style.label_ends(axes, [end_label(method, line) for method, line in here.items()], room=height * 0.72)
    picture.drawn = figure
    picture.alt = f"{title}. " + "; ".join(
        f"{panel_label(panel)}: "
        + ", ".join(f"{paper.method_label(m)} {c.mean[-1] * 100:.1f}" for m, c in here.items())
        for (panel, _), here in zip(wanted, lines, strict=True)
        if here
    )
    return picture


def draw(axes: Axes, line: Curve, method: str, scale: float) -> Artist:
    """Draw one curve in the colour of its method, and return the line."""
    hue, ours = style.colour(method), method in ("gxd", "gxd_paper")
    mean = [value * scale for value in line.mean]
    low = [(value - (se if se == se else 0)) * scale for value, se in zip(line.mean, line.se, strict=True)]
    high = [(value + (se if se == se else 0)) * scale for value, se in zip(line.mean, line.se, strict=True)]
    (handle,) = axes.plot(line.x, mean, color=hue, linewidth=2.3 if ours else 1.5, zorder=4 if ours else 3)
    axes.fill_between(line.x, low, high, color=hue, alpha=0.16, linewidth=0, zorder=2)
    for death in line.deaths:
        nearest = min(range(len(line.x)), key=lambda i: abs(line.x[i] - death))
        axes.plot(line.x[nearest], mean[nearest], marker="x", color=hue, markersize=6, markeredgewidth=1.6, zorder=5)
    return handle


def fit(axes: Axes, here: Mapping[str, Curve]) -> None:
    """Limits and ticks around these curves."""
    axes.set_xlim(0, max(line.tasks for line in here.values()))
    axes.margins(y=0.06)
    axes.autoscale_view(scalex=False)
    axes.locator_params(axis="x", nbins=5, integer=True)
    axes.locator_params(axis="y", nbins=6)


def end_label(method: str, line: Curve) -> style.Label:
    """The name of a curve for its end, with how many runs live."""
    text = paper.method_label(method) + (f", {line.label}" if line.label else "")
    return style.Label(line.x[-1], line.mean[-1] * 100, text, style.colour(method), method in ("gxd", "gxd_paper"))


def _lineless(group: Group) -> str:
    """Why a setting with runs has no line."""
    who = f"{paper.method_label(group.method)}, {panel_label(group.panel)}"
    if len(group.diverged) < len(group.runs):
        return f"{who}: under way."
    when = ", ".join(str(run.diverged_at) for run in group.diverged)
    runs = f"all {len(group.runs)} runs" if len(group.runs) > 1 else "the only run"
    return f"{who}: {runs} diverged (after task {when})."


def _empty(axes: Axes, *lines: str) -> None:
    axes.axis("off")
    text = "\n".join("\n".join(textwrap.wrap(line, 34)) for line in lines)
    axes.text(0.5, 0.5, text, ha="center", va="center", color=style.MUTED, fontsize=8, transform=axes.transAxes)


def _command(experiment: str, panel: Panel, method: str) -> str:
    norm = " --layer-norm" if panel[1] else ""
    activation = f" --activation {panel[0]}" if experiment != "cifar100" else ""
    return f"gxd run {experiment} --method {method}{activation}{norm}"


def assay_command(column: paper.Column) -> str:
    """The command that makes the assays of a column."""
    activation = f" --activation {column[1]}" if column[0] == "mlp" else ""
    return f"gxd assay --model {column[0]}{activation}"


# --- bars -------------------------------------------------------------------------------------------------------------


def _bars(
    name: str, title: str, caption: str, columns: Mapping[paper.Column, AssayColumn], utilities: Sequence[str]
) -> Picture:
    wanted = list(dict.fromkeys([*paper.COLUMNS, *columns]))
    missing = [assay_command(key) for key in paper.COLUMNS if key not in columns]
    picture = Picture(name, title, caption + diverged_assays(columns), None, missing)
    if not columns:
        return picture
    across = min(3, len(wanted))
    rows = -(-len(wanted) // across)
    with style.styled():
        figure = style.new_figure(3.9 * across, 0.62 * rows + 0.3 * rows * len(utilities))
        grid = figure.subplots(rows, across, squeeze=False)
        for axes in grid.flat[len(wanted) :]:
            axes.axis("off")
        shocks = {
            key: {u: numbers.mean(column.shock(u, "l1").values()) for u in (*utilities, "oracle")}
            for key, column in columns.items()
        }
        wide = any(_spans(values) for values in shocks.values())
        for key, axes in zip(wanted, grid.flat, strict=False):
            axes.set_title(paper.column_label(key) + ("" if key in paper.COLUMNS else " (ours)"))
            if key not in columns:
                _empty(axes, "no runs found", assay_command(key))
                continue
            _bar_panel(axes, {u: value for u, value in shocks[key].items() if value.n}, wide)
    picture.drawn = figure
    picture.alt = title
    if wide:
        picture.caption += " Logarithmic scale; the lines begin at the oracle, so their length is the factor above it."
    return picture


def _spans(values: Mapping[str, numbers.Mean]) -> bool:
    """Whether the values differ by so much that bars on a linear scale would show only the largest."""
    positive = [value.value for value in values.values() if value.n]
    return bool(positive) and min(positive) > 0 and max(positive) > 20 * min(positive)


def _bar_panel(axes: Axes, values: Mapping[str, numbers.Mean], wide: bool) -> None:
    order, oracle = [u for u in values if u != "oracle"], values.get("oracle")
    widths = [values[u].value for u in order]
    errors = [values[u].se if values[u].se == values[u].se else 0.0 for u in order]
    hues, places = [style.colour(u) for u in order], range(len(order))
    ends = [width + error for width, error in zip(widths, errors, strict=True)]
    longest = max([*ends, oracle.value if oracle else 0.0])
    if wide:
        start = oracle.value if oracle else min(widths)
        axes.set_xscale("log")
        axes.set_xlim(start / 1.6, longest * 4.5)
        axes.hlines(places, start, widths, colors=hues, linewidth=3.2, zorder=2)
        axes.scatter(widths, places, color=hues, s=34, zorder=3)
        lows = [min(error, width * 0.9) for width, error in zip(widths, errors, strict=True)]
        beside = [end * 1.25 for end in ends]
        axes.errorbar(widths, places, xerr=[lows, errors], fmt="none", ecolor=style.INK, elinewidth=0.9, zorder=4)
    else:
        axes.barh(places, widths, color=hues, height=0.66, zorder=2)
        axes.set_xlim(0.0, longest * 1.18)
        beside = [end + longest * 0.02 for end in ends]
        axes.errorbar(widths, places, xerr=errors, fmt="none", ecolor=style.INK, elinewidth=0.9, zorder=4)
        axes.locator_params(axis="x", nbins=4)
    for place, x, width in zip(places, beside, widths, strict=True):
        axes.text(x, place, f"{width:.2g}", va="center", fontsize=8, color=style.INK)
    if oracle:
        axes.axvline(oracle.value, color=style.INK, linewidth=1.0, linestyle=(0, (3, 2)), zorder=4)
        text, at = f" oracle {oracle.value:.2g}", oracle.value
        axes.text(at, -0.66, text, fontsize=7.5, color=style.MUTED, va="center")
    axes.set_yticks(list(places), [paper.method_label(u) for u in order])
    axes.tick_params(axis="y", labelcolor=style.INK)
    axes.set_ylim(len(order) - 0.45, -0.95)
    axes.grid(visible=False)
    axes.grid(visible=True, axis="x")
    axes.minorticks_off()
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("shock (logit L1)")
