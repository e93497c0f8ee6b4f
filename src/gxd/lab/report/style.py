"""How every figure looks: one fixed, colour-blind safe colour per method, direct labels, little ink."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = {
    "backprop": "#767676",
    "activation": "#a6761d",
    "contribution": "#e69f00",
    "mc_contribution": "#b8a600",
    "mc_adaptable_contribution": "#cc6699",
    "loss_gradient": "#d55e00",
    "gxi": "#009e73",
    "gxd": "#0072b2",
    "gxd_paper": "#0b2a6f",
    "gxd_all_logit": "#5b5fc7",
    "gxd_sketch": "#2fa4d9",
    "gxd_kl": "#00a3a3",
    "random": "#8a3ffc",
}
# These four never mean a method. In the page they become variables, so that figures follow its light or dark theme.
INK, MUTED, RULE, PAPER = "#1c2024", "#60676f", "#d9dde1", "#fffffe"
THEME = {INK: "var(--ink)", MUTED: "var(--muted)", RULE: "var(--rule)", PAPER: "var(--card)"}

STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica"],
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 8.5,
    "axes.edgecolor": RULE,
    "axes.facecolor": "none",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class Label:
    """A text for the end of a line: where the line ends (data coordinates), what to say, its colour."""

    x: float
    y: float
    text: str
    colour: str
    bold: bool = False


def colour(method: str) -> str:
    """The colour of a method, the same in every figure."""
    return COLOURS.get(method, "#444444")


def styled() -> AbstractContextManager[None]:
    """Figures made and saved inside look alike."""
    return matplotlib.rc_context(STYLE)


def new_figure(width: float, height: float) -> Figure:
    """A figure of so many inches, without pyplot and its global state."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def label_ends(axes: Axes, labels: Sequence[Label], *, size: float = 8.0, room: float | None = None) -> None:
    """Write each label right of the axes at the height of its line, pushed apart where they would collide.

    ``room`` is the height of the axes in inches. Call it last: it needs the final limits.
    """
    if not labels:
        return
    low, high = axes.get_ylim()
    left, right = axes.get_xlim()
    gap = size * 1.3 / 72 / (room or 2.0)
    wanted = sorted((((label.y - low) / (high - low)), i) for i, label in enumerate(labels))
    placed = [min(max(height, 0.0), 1.0) for height, _ in wanted]
    for _ in range(200):  # neighbours that are too near push each other away, until none is
        moved = False
        for k in range(len(placed) - 1):
            lack = gap - (placed[k + 1] - placed[k])
            if lack > 1e-6:
                placed[k] -= lack / 2
                placed[k + 1] += lack / 2
                moved = True
        if not moved:
            break
    for (height, i), place in zip(wanted, placed, strict=True):
        label = labels[i]
        ends = (label.x - left) / (right - left)
        axes.annotate(
            label.text,
            xy=(min(ends, 1.0), height),
            xytext=(1.035, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=label.colour,
            fontsize=size,
            fontweight="bold" if label.bold else "normal",
            va="center",
            ha="left",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": label.colour,
                "linewidth": 0.6,
                "alpha": 0.6,
                "shrinkA": 1,
                "shrinkB": 0,
                "relpos": (0, 0.5),
            },
        )


def png(figure: Figure, dpi: int = 160) -> bytes:
    """The figure as PNG, the same bytes each time."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def svg(figure: Figure, name: str) -> str:
    """The figure as SVG, the same text each time."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    # Hundredths of a point are finer than any screen, and the file is half as large.
    return re.sub(r' d="[^"]*"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), buffer.getvalue())


def inline(text: str, name: str, alt: str) -> str:
    """An SVG made fit to stand in a page: no prologue, its own ids, colours of the theme, as wide as there is room."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.S)
    text = re.sub(r'<svg ([^>]*?)height="[^"]*"', r"<svg \1", text, count=1)
    head = f'<svg role="img" aria-label="{html.escape(alt, quote=True)}"'
    text = re.sub(
        r'<svg ([^>]*?)width="([\d.]+)pt"', lambda m: f'{head} style="max-width:{m[2]}pt" {m[1]}', text, count=1
    )
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="|url\()#', rf"\1#{name}-", text)
    for colour_, variable in THEME.items():
        text = re.sub(colour_, variable, text, flags=re.I)
    return text
