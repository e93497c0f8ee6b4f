"""The page of the board: sortable tables and learning curves. Without scripts it is the same, but not sortable."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from gxd.lab import methods
from gxd.lab.leaderboard.board import BASE, FRESH, Board, Scores
from gxd.lab.leaderboard.protocol import Track
from gxd.lab.report import page, style
from gxd.lab.report.page import Block, Section, Shown
from gxd.lab.report.tables import Table

NAMED = (BASE, FRESH, "gxd", methods.PAPER, "contribution_per_step", "contribution")
"""Always labelled in the curves, beside the best and the user's own; all others are thin lines."""
BEST = 3
ACCENTS = {FRESH: "#009e73", "contribution_per_step": "#b8a600"}
OWN = "#b3123b"
OTHERS = ("#d55e00", "#cc6699", "#a6761d")


def render(lead: str, board: Board, ranks: Table, streams: Sequence[tuple[Track, Table]]) -> str:
    """The page."""
    sections = [Section("ranks", "Over all streams", blocks=[Block(table=ranks, kind="sortable wide")])]
    for number, (track, table) in enumerate(streams):
        blocks = [Block(table=table, kind="sortable wide")]
        curves = _curves(board, track, f"curves{number}")
        if curves is not None:
            blocks.insert(0, Block(picture=curves))
        sections.append(Section(f"stream{number}", track.name, blocks=blocks))
    complete = sum(map(len, board.complete.values()))
    facts = [
        (str(len({row.method for row in board.rows})), "methods and controls"),
        (str(len(board.tracks)), "streams"),
        (f"{complete} of {len(board.rows)}", "rows complete"),
    ]
    return page.render("Leaderboard", lead, facts, sections, made_by="gxd leaderboard show")


def _curves(board: Board, track: Track, name: str) -> Shown | None:
    """The learning curves of a stream."""
    drawn = [scores for scores in board.complete[track.name] if scores.curve]
    if not drawn:
        return None
    colours = _colours(board, drawn)
    with style.styled():
        figure = style.new_figure(8.6, 3.6)
        axes = figure.add_subplot()
        scale = 100 if track.kind.classifies else 1
        labels, seen = [], []
        for scores in sorted(drawn, key=lambda scores: scores.row.method in colours):
            points = [scale * value for value in scores.curve]
            tasks = [(i + 1) * track.config({}, 0).tasks / len(points) for i in range(len(points))]
            colour = colours.get(scores.row.method)
            if colour is not None:
                axes.plot(tasks, points, color=colour, linestyle="--" if scores.row.method == FRESH else "-")
                labels.append(style.Label(tasks[-1], points[-1], scores.row.method, colour))
                seen += points
            else:
                axes.plot(tasks, points, color=style.MUTED, linewidth=0.5, alpha=0.45)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("tasks")
        axes.set_ylabel("online accuracy, %" if track.kind.classifies else track.metric)
        margin = 0.06 * (max(seen) - min(seen)) or scale  # one entry at chance would press all others together
        axes.set_ylim(min(seen) - margin, max(seen) + margin)
        style.label_ends(axes, labels, room=3.0)
        vector = style.svg(figure, name)
    caption = (
        "Mean over the seeds. Thin lines: all other entries, as far as they are within the range of these. Dashed: a "
        "fresh network for every task."
    )
    alt = f"Learning curves of {len(drawn)} entries on {track.name}"
    return Shown(name, "Learning curves", caption, [], [], Markup(style.inline(vector, name, alt)))


def _colours(board: Board, drawn: Sequence[Scores]) -> dict[str, str]:
    """Of the curves that are labelled."""
    best = [scores.row.method for scores in sorted(drawn, key=lambda scores: scores.row.rank or 0)[:BEST]]
    known = {method: ACCENTS.get(method) or style.COLOURS.get(method) for method in (*best, *NAMED)}
    fixed = {method: colour for method, colour in known.items() if colour is not None}
    return {**dict(zip(best, OTHERS, strict=False)), **fixed, **dict.fromkeys(board.own, OWN)}
