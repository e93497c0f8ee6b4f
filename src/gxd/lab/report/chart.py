"""Small charts as SVG for a page: they scale with it, follow its theme, and read without scripts.

matplotlib draws the figures of the paper; a study has dozens of small charts whose lines a script hides, shows and
reads out, which is simpler if every line is one element with its numbers. Every line is there from the start: a script
only changes what is seen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape
from matplotlib.ticker import MaxNLocator

from gxd.lab.report.style import COLOURS

OTHERS = ("#e0559b", "#17a589", "#a3a327", "#9467bd", "#c0504d", "#4f9fd0", "#b7791f", "#7f8c5a", "#48a868", "#d9776c")
DASHES = ("", "6 3", "2 2")
LETTER = 5.7  # the width of one, in the units of a chart

Facts = Mapping[str, str]  # what a script filters by: setting -> value


@dataclass(frozen=True)
class Look:
    """The colour and the dashes of a method, the same in every chart of a study."""

    colour: str
    dash: str = ""


@dataclass(frozen=True)
class Line:
    """A line: its points with a standard error and the number of seeds, and what is said of it."""

    name: str
    look: Look
    points: Sequence[tuple[float, float, float, int]]  # x, mean, standard error, seeds
    facts: Facts
    label: str = ""  # at its end
    quiet: bool = False  # seen only if every setting is asked for
    deaths: Sequence[float] = ()  # where a run diverged


@dataclass(frozen=True)
class Dot:
    """What one setting reached, above the value of a swept setting; NaN if all its runs diverged."""

    name: str
    look: Look
    slot: int  # the place of the value
    shift: float  # of its method, so that dots of several do not hide each other
    y: float
    facts: Facts


@dataclass(frozen=True)
class Entry:
    """A line of a legend."""

    text: str
    look: Look
    facts: Facts
    quiet: bool = False


@dataclass
class Chart:
    """A chart for the page."""

    title: str
    svg: Markup
    facts: Facts
    legend: list[Entry] = field(default_factory=list)


def looks(methods: Sequence[str]) -> dict[str, Look]:
    """A look for each method: the colour that it has in the figures of the paper, or one of ten, then with dashes."""
    others = [method for method in methods if method not in COLOURS]
    made = {m: Look(OTHERS[i % len(OTHERS)], DASHES[i // len(OTHERS) % len(DASHES)]) for i, m in enumerate(others)}
    return {method: made.get(method) or Look(COLOURS[method]) for method in methods}


def number(value: float, percent: bool) -> str:
    """A value of a metric."""
    return f"{100 * value:.1f}" if percent else f"{value:.4g}"


# --- the two kinds ----------------------------------------------------------------------------------------------------


def over_tasks(lines: Sequence[Line], *, percent: bool, end: int, title: str, size: tuple[int, int]) -> Markup:
    """Lines over the tasks, with bands of one standard error, each with its name at its end.

    There is room for what is seen at first; another line that leaves the chart runs along its edge.
    """
    seen = [line for line in lines if not line.quiet and line.points] or lines
    values = [value for line in seen for _, y, se, _ in line.points for value in _band(y, se)]
    named = [line for line in lines if line.label and line.points]
    longest = max((len(line.label) for line in named), default=0)
    frame = _Frame(
        *size, _Scale.of(values, percent), (0.0, float(max(end, 1))), min(size[0] // 3, longest * LETTER + 14)
    )
    parts = [frame.y_axis(percent), frame.x_axis(_ticks(0.0, float(max(end, 1)), 4, whole=True), "task")]
    places = _apart([frame.y(line.points[-1][1]) for line in named], 11.5, frame.top, frame.bottom)
    heights = dict(zip(map(id, named), places, strict=True))
    for line in lines:
        if line.points:
            parts.append(_line(frame, line, percent, heights.get(id(line))))
    return frame.svg(parts, title, ' data-unit="{}"', " %" if percent else "")


def _line(frame: _Frame, line: Line, percent: bool, label_at: float | None) -> Markup:
    """A line, its band, its divergences, and its label if it has a place for one."""
    colour = line.look.colour
    seen = [(frame.x(x), frame.y(y)) for x, y, _, _ in line.points]
    low = [(frame.x(x), frame.y(_band(y, se)[0])) for x, y, se, _ in line.points]
    high = [(frame.x(x), frame.y(_band(y, se)[1])) for x, y, se, _ in line.points]
    band = _points([*high, *low[::-1]], digits=0)
    drawn = [Markup('<polygon points="{}" fill="{}" opacity=".16"/>').format(band, colour)]
    drawn.append(_polyline(seen, line.look))
    if len(seen) == 1:
        drawn.append(Markup('<circle cx="{:.1f}" cy="{:.1f}" r="2.5" fill="{}"/>').format(*seen[0], colour))
    for death in line.deaths:
        _, y = min(seen, key=lambda point: abs(point[0] - frame.x(death)))
        cross = Markup('<text class="death" x="{:.1f}" y="{:.1f}" fill="{}">×</text>')
        drawn.append(cross.format(frame.x(death), y + 4, colour))
    if label_at is not None:
        room = int((frame.width - frame.right - 6) / LETTER)
        label = line.label if len(line.label) <= room else line.label[: room - 1] + "…"
        text = Markup('<text class="end" x="{:.1f}" y="{:.1f}" fill="{}">{}</text>')
        drawn.append(text.format(frame.right + 6, label_at + 3.5, colour, label))
    # What the script reads out: task, mean, standard error, seeds of every point.
    at = ";".join(f"{x:g} {number(y, percent)} {number(se, percent)} {seeds}" for x, y, se, seeds in line.points)
    group = Markup('<g class="line{}" data-facts="{}" data-name="{}" data-at="{}">{}</g>')
    quiet = Markup(' quiet" data-quiet="') if line.quiet else ""
    return group.format(quiet, _json(line.facts), line.name, at, Markup("").join(drawn))


def over_values(
    dots: Sequence[Dot],
    slots: Sequence[str],
    label: str,
    *,
    percent: bool,
    higher: bool,
    title: str,
    size: tuple[int, int],
) -> Markup:
    """Dots over the values of a setting, evenly spaced in their order, and for each method a line along its best."""
    frame = _Frame(*size, _Scale.of([dot.y for dot in dots], percent), (-0.6, len(slots) - 0.4))
    best: dict[str, dict[int, Dot]] = {}
    circles = []
    for dot in dots:
        place, said = frame.x(dot.slot + dot.shift), Markup("<title>{}</title>").format(dot.name)
        facts = Markup('fill="{}" data-slot="{}" data-facts="{}"').format(dot.look.colour, dot.slot, _json(dot.facts))
        if math.isnan(dot.y):
            cross = Markup('<text class="death" x="{:.1f}" y="{}" {}>×{}</text>')
            circles.append(cross.format(place, frame.bottom - 1, facts, said))
            continue
        circle = Markup('<circle class="dot" cx="{:.1f}" cy="{:.1f}" r="3" {}>{}</circle>')
        circles.append(circle.format(place, frame.y(dot.y), facts, said))
        row = best.setdefault(dot.facts["method"], {})
        if dot.slot not in row or (dot.y > row[dot.slot].y) == higher:
            row[dot.slot] = dot
    lines = []
    for method, row in best.items():
        points = [(frame.x(slot + row[slot].shift), frame.y(row[slot].y)) for slot in sorted(row)]
        lines.append(_polyline(points, next(iter(row.values())).look, ' class="best" data-method="{}"', method))
    axes = [frame.y_axis(percent), frame.x_axis(list(range(len(slots))), label, slots)]
    return frame.svg([*axes, *lines, *circles], title, ' data-higher="{}"', int(higher))


# --- what they are made of --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scale:
    """From values to [0, 1]."""

    low: float
    high: float
    log: bool
    ticks: Sequence[float]

    @staticmethod
    def of(values: Sequence[float], percent: bool) -> _Scale:
        """Room for all that is finite; logarithmic where sizes differ by more than a factor of fifty."""
        kept = [value for value in values if math.isfinite(value)]
        low, high = min(kept, default=0.0), max(kept, default=1.0)
        if not percent and low > 0 and high / low > 50:
            tens = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            ticks = [10.0**ten for ten in tens][:: max(1, len(tens) // 5)]
            return _Scale(math.log10(low), math.log10(high), True, ticks)
        if high - low < 1e-9 * max(1.0, abs(high)):
            low, high = low - (0.05 * abs(low) or 0.05), high + (0.05 * abs(high) or 0.05)
        ticks = _ticks(low, high, 5)
        return _Scale(min(low, ticks[0]), max(high, ticks[-1]), False, ticks)

    def __call__(self, value: float) -> float:
        if self.log:
            value = math.log10(value) if value > 0 else self.low
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return min(max(share, -0.02), 1.02) if math.isfinite(share) else 0.0


@dataclass(frozen=True)
class _Frame:
    """Where things are in a chart: ``ends`` are the values at its left and right, ``margin`` is the room beyond."""

    width: int
    height: int
    scale: _Scale
    ends: tuple[float, float]
    margin: float = 10.0
    left: int = 44
    top: int = 8

    @property
    def right(self) -> float:
        return self.width - max(self.margin, 10.0)

    @property
    def bottom(self) -> int:
        return self.height - 34

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * (value - self.ends[0]) / (self.ends[1] - self.ends[0])

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top) * self.scale(value)

    def y_axis(self, percent: bool) -> Markup:
        parts = []
        for tick in self.scale.ticks:
            if 0 <= self.scale(tick) <= 1:
                text = f"{100 * tick if percent else tick:g}"
                mark = Markup('<path d="M{} {:.1f}H{:.1f}"/><text x="{}" y="{:.1f}" text-anchor="end">{}</text>')
                parts.append(mark.format(self.left, self.y(tick), self.right, self.left - 6, self.y(tick) + 3.5, text))
        return Markup('<g class="axis">{}</g>').format(Markup("").join(parts))

    def x_axis(self, ticks: Sequence[float], label: str, texts: Sequence[str] = ()) -> Markup:
        said = texts or [f"{tick:g}" for tick in ticks]
        mark = Markup('<text x="{:.1f}" y="{}" text-anchor="middle">{}</text>')
        parts = [mark.format(self.x(x), self.bottom + 14, text) for x, text in zip(ticks, said, strict=True)]
        parts.append(mark.format((self.left + self.right) / 2, self.bottom + 29, label))
        return Markup('<g class="axis">{}</g>').format(Markup("").join(parts))

    def svg(self, parts: Sequence[Markup], title: str, more: str = "", *values: object) -> Markup:
        head = Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}"{}>')
        attributes = Markup(more).format(*values)
        return head.format(self.width, self.height, title, attributes) + Markup("\n").join(parts) + Markup("</svg>")


def _band(y: float, se: float) -> tuple[float, float]:
    reach = se if math.isfinite(se) else 0.0
    return y - reach, y + reach


def _polyline(points: Sequence[tuple[float, float]], look: Look, more: str = "", *values: object) -> Markup:
    dash = Markup(' stroke-dasharray="{}"').format(look.dash) if look.dash else ""
    head = Markup('<polyline points="{}" stroke="{}" fill="none"{}{}/>')
    return head.format(_points(points), look.colour, dash, Markup(more).format(*values))


def _points(points: Sequence[tuple[float, float]], digits: int = 1) -> str:
    return " ".join(f"{x:.{digits}f},{y:.{digits}f}" for x, y in points)


def _json(value: object) -> Markup:
    return escape(json.dumps(value, separators=(",", ":"), ensure_ascii=False))


def _ticks(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    found = MaxNLocator(count, steps=[1, 2, 2.5, 5, 10], integer=whole).tick_values(low, high)
    kept = [round(float(tick), 12) for tick in found]
    return [tick for tick in kept if low <= tick <= high] if whole else kept


def _apart(heights: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Heights pushed apart until no two are nearer than ``gap``, between the bounds if there is room."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed = [heights[i] for i in order]
    for k in range(1, len(placed)):  # from above downwards, then back from the lower bound
        placed[k] = max(placed[k], placed[k - 1] + gap)
    limit = high
    for k in reversed(range(len(placed))):
        placed[k] = min(placed[k], limit)
        limit = placed[k] - gap
    result = [0.0] * len(placed)
    for i, place in zip(order, placed, strict=True):
        result[i] = max(place, low)
    return result
