"""The sections of a study: what was run, learning curves, sensitivity, the best, divergences, metrics, times."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gxd.lab.metrics import DEFINITIONS
from gxd.lab.report import paper, study_charts, study_tables
from gxd.lab.report.digest import SETTLED
from gxd.lab.report.page import Block, Filters, Section
from gxd.lab.report.study import Study, value_order
from gxd.lab.report.tables import Table

FEW = 12  # rows of a table that is not folded, and runs that are named


def title(study: Study) -> str:
    """The study in a few words."""
    kind = paper.experiment_label(study.experiment)
    return kind if study.name in ("", study.experiment) else f"{study.name} ({kind})"


def sections(study: Study, every: Sequence[Study]) -> list[Section]:
    """All sections of a study, one of ``every``; what there is nothing to show of is left out."""
    number = every.index(study) + 1
    anchor = f"study{number}"
    name = "study-" + re.sub(r"[^a-z0-9]+", "-", f"{study.name} {study.experiment}".lower()).strip("-")
    name += f"-{number}" * (sum(title(one) == title(study) for one in every) > 1)
    filters = Block(filters=_filters(study, anchor, every=False))
    goal, swept = study.goal, study_charts.sensitivity(study, anchor)
    inside, names = study_charts.inside(study, anchor)
    best, dead = study_tables.best(study, name, every), study_tables.divergences(study, name)
    times, settings = study_tables.times(study, name), study_tables.every_setting(study, name)
    label = f"{goal.label[0].upper()}{goal.label[1:]}"
    made = [
        Section("runs", "What was run", [], [Block(table=study_tables.overview(study, name)), _late(study)]),
        Section(
            "curves",
            "Learning curves",
            [
                f"{label}, on each task ({goal.better}): mean over seeds, shaded ± SE; n is the number of seeds; × "
                "marks a run that diverged, after which the mean is over those alive. One line per method: its best "
                "setting, chosen as said below."
            ],
            [Block(filters=_filters(study, anchor, every=True)), Block(charts=study_charts.learning(study, anchor))],
        ),
    ]
    if swept:
        text = (
            f"{label}, over the last tenth of the tasks ({goal.better}). A dot is a setting, mean over the seeds that "
            "lived, × one whose runs all diverged; a line joins the best settings of a method. Values are evenly "
            "spaced, in their order. Where a grid is no full product, some values have had more tries than others."
        )
        blocks = [filters, *(Block(charts=one) for one in swept)]
        blocks.append(Block(table=study_tables.sensitivity(study, name), kind="dense sortable", fold=True))
        made.append(Section("sensitivity", "Sensitivity", [text], blocks))
    made.append(Section("best", "Best settings", _warning(best), [Block(table=best, kind="wide sortable")]))
    runs, died = study.runs, sum(run.status == "diverged" for run in study.runs)
    so_far = " so far" * any(run.status not in SETTLED for run in runs)
    said = f"{died or 'None'} of {len(runs)} runs diverged{so_far}."
    blocks = [Block(table=dead, kind="wide sortable")] if dead.rows else []
    made.append(Section("divergences", "Divergences", [said], blocks))
    if inside:
        text = "What happens inside, in the best setting of each method: mean over seeds, shaded ± SE."
        known = [f"{one.replace('_', ' ')}: {DEFINITIONS[one]}" for one in names if one in DEFINITIONS]
        blocks = [filters, *(Block(charts=one) for one in inside)]
        made.append(Section("metrics", "Metrics", [text], [*blocks, Block(points=known, fold_points="What these are")]))
    if times.rows:
        made.append(Section("times", "Timings", [], [Block(table=times, kind="wide sortable")]))
    fold = len(settings.rows) > FEW
    made.append(Section("settings", "Every setting", [], [Block(table=settings, kind="dense sortable", fold=fold)]))
    for section in made:
        section.anchor = f"{anchor}-{section.anchor}"
    return made


def _warning(best: Table) -> list[str]:
    same = sum(row[-1].mark == "bad" for row in best.rows)
    if not same:
        return []
    return [
        f"{same} of these {len(best.rows)} settings were chosen by the same seeds that are reported, which flatters "
        "them, the more so the more settings were tried. For numbers to compare with others, run what was chosen on "
        "fresh seeds, as a [final] table in the sweep file does."
    ]


def _late(study: Study) -> Block:
    """The runs that are under way, or were broken off."""
    late = [run for run in study.runs if run.status not in SETTLED]
    points = [
        f"{paper.method_label(str(run.config.get('method')))}, seed {run.seed}: task {run.tasks} of {run.planned}."
        for run in late[:FEW]
    ]
    points += [f"{len(late) - FEW} more."] if len(late) > FEW else []
    return Block(points=points, points_title="Not complete, and drawn only where no seed of the setting is over")


def _filters(study: Study, anchor: str, *, every: bool) -> Filters:
    values = {"method": [paper.method_label(method) for method in study.methods]}
    for field in study.varied[1:]:
        found = {setting.values[field] for setting in study.settings}
        values[field] = list(study.swept.get(field) or sorted(found, key=value_order))
    return Filters(anchor, values, every and len(study.settings) > len(study.chosen()))
