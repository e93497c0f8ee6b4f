"""The tables of the age study."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch

from gxd.cost.ranks import spearman
from gxd.lab.report import numbers, paper, tables
from gxd.lab.report.age_results import (
    CHOOSING,
    PAPER_MATURITY,
    RANKINGS,
    Result,
    Results,
    Rule,
    Setting,
    Stream,
    at_rate,
    interval,
    paired_gains,
    papers,
    ranking,
    reported,
    rules_at,
)
from gxd.lab.report.evidence import Panel, panel_order
from gxd.lab.report.tables import Cell, Table


def overview(found: Results, stream: Stream, rate: float) -> Table:
    """Every utility with every rule on every network, at one rate."""
    here = at_rate(found, stream, rate)
    panels = sorted({setting.panel for setting in here}, key=panel_order)
    table = Table(
        f"age-{stream.name}-rate-{rate:g}",
        f"Accuracy by utility and rule, {stream.label}, rate {rate:g}",
        "In %, over the last eighth of the tasks: mean ± 95 % interval over seeds, and the churn, in %. Reach, where "
        "it was recorded: the share of all units that were reset in the second half of the tasks, in %. Paper's: "
        f"absolute, maturity {PAPER_MATURITY}. By age: with the same maturity.",
        ["Utility", "Rule", *map(tables.panel_label, panels), "Seeds"],
    )
    rows: dict[tuple[str, Rule | None], dict[Panel, Mapping[int, Result]]] = {}
    for method in sorted({setting.method for setting in here}, key=paper.method_order):
        for rule in (None, *rules_at(here)):
            for setting, by_seed in here.items():
                if setting.method == method and rule == (Rule.of(setting) if setting.resets else None):
                    rows.setdefault((method, rule), {})[setting.panel] = by_seed
    for (method, rule), cells in rows.items():
        counts = sorted({len(by_seed) for by_seed in cells.values()})
        counted = "–".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        named = Cell(paper.method_label(method)), Cell(rule.words if rule else "")
        shown = [_came_to(cells.get(panel, {})) for panel in panels]
        table.rows.append([*named, *shown, Cell(counted)])
    return table


def _came_to(by_seed: Mapping[int, Result]) -> Cell:
    accuracy, *others = (
        interval(getattr(r, name) for r in by_seed.values()) for name in ("accuracy", "churn", "reach")
    )
    named = zip(("churn", "reach"), others, strict=True)
    below = [f"{name} {100 * one.value:.0f}" for name, one in named if math.isfinite(one.value)]
    return Cell(_plus_minus(accuracy), ", ".join(below))


def by_reach(found: Results) -> Table:
    """Whether networks learn the better, the more of their units are reset: over all utilities and rules but random."""
    table = Table(
        "age-reach",
        "Does accuracy follow reach?",
        "Spearman's rank correlation of accuracy with reach, and with churn, over the settings whose reach was "
        "recorded: every utility but random with every rule. Each setting counts by its means over the seeds; a "
        "correlation with churn near -1 says that less churn is better. Reach: from the lowest to the highest.",
        ["Stream", "Rate", "Network", "Settings", "Accuracy by reach", "Accuracy by churn", "Reach, %", "Backprop, %"],
    )
    for stream, rate in sorted({(s.stream, s.rate) for s in found if s.resets}, key=lambda at: (at[0], -at[1])):
        here = at_rate(found, stream, rate)
        for panel in _panels(here):
            mine = {s: _means(by_seed) for s, by_seed in here.items() if s.panel == panel and s.method != "random"}
            plain = next((means for s, means in mine.items() if not s.resets), None)
            recorded = [means for s, means in mine.items() if s.resets and math.isfinite(means.reach)]
            if len(recorded) < 4:
                continue
            by = {name: _correlated(recorded, name) for name in ("reach", "churn")}
            reached = [100 * means.reach for means in recorded]
            words = [stream.label, f"{rate:g}", tables.panel_label(panel), str(len(recorded))]
            words += [tables.rho(by["reach"]), tables.rho(by["churn"])]
            words += [f"{min(reached):.0f} to {max(reached):.0f}", f"{100 * plain.accuracy:.1f}" if plain else ""]
            table.rows.append([Cell(text) for text in words])
            network = {"activation": panel[0], "layer_norm": panel[1]}
            table.records.append({**_stream(stream), "rate": rate, **network, "settings": len(recorded), **by})
    return table


def _means(by_seed: Mapping[int, Result]) -> Result:
    """Of the runs of a setting, each number over the seeds on which it is known."""
    names = ("accuracy", "churn", "age", "reach")
    means = {name: interval(getattr(r, name) for r in by_seed.values()).value for name in names}
    return Result(**means, diverged=any(r.diverged for r in by_seed.values()))


def _correlated(settings: Sequence[Result], name: str) -> float:
    values, accuracies = (torch.tensor([getattr(one, n) for one in settings]) for n in (name, "accuracy"))
    return round(spearman(values, accuracies), 3)


def by_rule(found: Results) -> Table:
    """What each rule gains over the paper's, as a mean over the utilities: which would be the better default?"""
    panels = _panels(found)
    table = Table(
        "age-rules",
        "What a rule gains over the paper's, mean over utilities",
        "Points of accuracy against the absolute ranking with the same rate and maturity "
        f"{PAPER_MATURITY}, seed by seed, the mean over all utilities but random; with the 95 % t interval over the n "
        "seeds on which the runs of all these utilities are over. The last column is the mean over the networks that "
        "have two seeds or more, on the seeds that these have in common; it names the networks where they are not all.",
        ["Stream", "Rule", "Maturity", "Rate", *map(tables.panel_label, panels), "All"],
    )
    rules = {(s.stream, Rule.of(s)) for s in found if s.resets and s != papers(s) and s.method != "random"}
    for stream, rule in sorted(rules, key=lambda found: (found[0], -found[1].rate, found[1])):
        exponent, maturity, rate = rule
        gains = {panel: _gains(found, stream, panel, rule) for panel in panels}
        whole = [panel for panel in panels if len(gains[panel]) >= 2]
        if not whole:
            continue
        common = sorted(set.intersection(*(set(gains[panel]) for panel in whole)))
        over_all = [fmean(gains[panel][seed] for panel in whole) for seed in common]
        named = "" if whole == panels else f"{', '.join(map(tables.panel_label, whole))}; "
        words = [stream.label, ranking(exponent)]
        cells = [*(_gain(list(gains[panel].values())) for panel in panels), _gain(over_all, named)]
        table.rows.append([*(Cell(text) for text in (*words, str(maturity), f"{rate:g}")), *cells])
        for panel, values in [*((panel, list(gains[panel].values())) for panel in panels), (("all", False), over_all)]:
            if values:
                settings = {"exponent": exponent, "maturity": maturity, "rate": rate, "seeds": len(values)}
                network = {"activation": panel[0], "layer_norm": panel[1]}
                table.records.append({**_stream(stream), **network, **settings, **_bounds("gain", interval(values))})
    return table


def _gains(found: Results, stream: Stream, panel: Panel, rule: Rule) -> dict[int, float]:
    """By seed, the mean over the utilities. A seed that not all of them have would compare utilities, not rules."""
    by_utility = [
        paired_gains(found, setting)
        for setting in found
        if (setting.stream, setting.panel, Rule.of(setting)) == (stream, panel, rule) and setting.method != "random"
    ]
    seeds = set.intersection(*map(set, by_utility)) if by_utility else set()
    return {seed: fmean(gains[seed] for gains in by_utility) for seed in sorted(seeds)}


def _panels(found: Results) -> list[Panel]:
    return sorted({setting.panel for setting in found}, key=panel_order)


def _gain(values: Sequence[float], named: str = "") -> Cell:
    """The mean, from two seeds on with its interval."""
    if not values:
        return Cell("")
    gain, n = interval(values), len(values)
    margin = f" ± {100 * (gain.high - gain.value):.1f}" if n > 1 else ""
    return Cell(f"{tables.signed(100 * gain.value)}{margin}", f"{named}n = {n}")


def settings_table(found: Results) -> Table:
    """Every setting: accuracy, churn, and the age of the units that were reset."""
    columns = ["Stream", "Network", "Utility", "Ranking", "Maturity", "Rate", "Accuracy, %", "Churn, %", "Age at reset"]
    columns += ["Reach, %"]
    table = Table(
        "age-settings",
        "Every setting",
        "Mean ± 95 % interval over seeds. Churn: the share of resets that hit a unit younger than 1.5 times the "
        "maturity, so not comparable between maturities. Age: the median age at reset, in steps. Reach: the share of "
        "all units that were reset in the second half of the tasks, over the seeds on which it was recorded.",
        [*columns, "Seeds", "Diverged"],
    )
    for setting, by_seed in found.items():
        here = list(reported(by_seed).values())
        if not here:
            continue
        names = "accuracy", "churn", "age", "reach"
        accuracy, churn, age, reach = (interval(getattr(one, name) for one in here) for name in names)
        diverged = sum(one.diverged for one in here)
        shown = [_plus_minus(accuracy), _plus_minus(churn, digits=0), _plus_minus(age, scale=1.0, digits=0)]
        shown += [_plus_minus(reach, digits=0)]
        cells = [*_words(setting), *shown, str(len(here)), str(diverged or "")]
        table.rows.append([Cell(text) for text in cells])
        table.records.append(
            {
                **_record(setting),
                "seeds": len(here),
                "diverged": diverged,
                **_bounds("accuracy", accuracy),
                **_bounds("churn", churn),
                **_bounds("age_at_reset", age),
                **_bounds("reach", reach),
            }
        )
    return table


def against_paper(found: Results) -> Table:
    """Ranking by age, or a longer maturity, against the paper's rule at the same utility, rate and seeds."""
    return _paired(
        "age-against-paper",
        "Ranked by age, or a longer maturity, against the paper's rule",
        found,
        [(setting, papers(setting)) for setting in found if setting.resets and setting != papers(setting)],
        lambda ours, theirs: f"{ours.rule}, maturity {ours.maturity}, rate {ours.rate:g}",
    )


def by_maturity(found: Results) -> Table:
    """The absolute ranking with ``maturity = c / rate`` against ranking by age with the shortest maturity."""
    shortest = min((setting.maturity for setting in found if setting.resets), default=0)
    pairs = [
        (setting, setting._replace(exponent=exponent, maturity=shortest))
        for setting in found
        if setting.resets and not setting.exponent and setting.maturity > shortest
        for exponent in RANKINGS
        if exponent
    ]
    return _paired(
        "maturity-against-age",
        f"maturity = c / rate, against ranking by age with maturity {shortest}",
        found,
        pairs,
        lambda ours, theirs: f"c = {ours.c:g}, rate {ours.rate:g}, against {theirs.rule}",
    )


def _paired(
    name: str,
    title: str,
    found: Results,
    pairs: Sequence[tuple[Setting, Setting]],
    words: Callable[[Setting, Setting], str],
) -> Table:
    table = Table(
        name,
        title,
        "Difference of the accuracies in points, pair by pair over the same seeds, with its 95 % t interval; better or "
        "worse where the interval leaves 0 out. There is no correction for the number of comparisons.",
        ["Stream", "Network", "Utility", "What", "Difference", "Pairs", "Verdict"],
    )
    for ours, theirs in pairs:
        seeds = paired_gains(found, ours, theirs)
        if len(seeds) < 2:
            continue
        change = interval(seeds.values())
        verdict = "better" if change.low > 0 else "worse" if change.high < 0 else "undecided"
        mark = {"better": "good", "worse": "bad"}.get(verdict, "unknown")
        what = [*_words(ours)[:3], words(ours, theirs), tables.points(change), str(len(seeds))]
        table.rows.append([*(Cell(text) for text in what), Cell(verdict, "", mark)])
        against = {"against_ranking": theirs.rule, "against_maturity": theirs.maturity}
        table.records.append(
            {**_record(ours), **against, "pairs": len(seeds), **_bounds("difference", change), "verdict": verdict}
        )
    return table


def tally(table: Table) -> str:
    """How the comparisons of a table ended, in a sentence."""
    counts = {word: sum(row[-1].text == word for row in table.rows) for word in ("better", "worse", "undecided")}
    said = ", ".join(f"{count} {word}" for word, count in counts.items())
    return f"{table.title}: of {len(table.rows)} comparisons {said}."


def chosen_table(found: Results) -> Table:
    """Each rule in the setting (maturity, rate) that the choosing seeds prefer, on the other seeds."""
    table = Table(
        "age-chosen",
        "Each rule in its best setting",
        f"Maturity and rate are chosen for each rule by the mean accuracy on the seeds from {CHOOSING} on that all its "
        "settings have, the numbers are from the other seeds: mean ± 95 % interval. Absolute at the paper's maturity "
        "has only its rate chosen.",
        ["Stream", "Network", "Utility", "Rule", "Chosen", "Accuracy, %", "Churn, %", "Seeds"],
    )
    candidates: dict[tuple[Any, ...], list[Setting]] = defaultdict(list)
    for setting in found:
        rules = [setting.rule]
        if setting.resets and not setting.exponent:
            rules = ["absolute, any maturity"]
            if setting.maturity == PAPER_MATURITY:
                rules.insert(0, f"absolute, maturity {PAPER_MATURITY}")
        for rule in rules:
            candidates[setting.stream, setting.panel, setting.method, rule].append(setting)
    for (*_, rule), settings in candidates.items():
        common = set.intersection(*({seed for seed in found[s] if seed >= CHOOSING} for s in settings))
        if not common:
            continue  # a choice among some of the settings would favour those that ran first
        # On all the seeds that each has, a setting would be favoured whose hard seeds are still to come.
        tried = {s: fmean(found[s][seed].accuracy for seed in common) for s in settings}
        best = max(tried, key=lambda setting: tried[setting])
        here = list(reported(found[best]).values())
        if not here:
            continue
        accuracy, churn = interval(one.accuracy for one in here), interval(one.churn for one in here)
        stream, panel, method, _, maturity, rate = _words(best)
        values = f"maturity {maturity}, rate {rate}" if best.resets else ""
        shown = [_plus_minus(accuracy), _plus_minus(churn, digits=0), str(len(here))]
        table.rows.append([Cell(text) for text in (stream, panel, method, rule, values, *shown)])
        table.records.append({**_record(best), "rule": rule, "seeds": len(here), **_bounds("accuracy", accuracy)})
    return table


def _words(setting: Setting) -> list[str]:
    named = [setting.stream.label, tables.panel_label(setting.panel), paper.method_label(setting.method), setting.rule]
    return [*named, *([str(setting.maturity), f"{setting.rate:g}"] if setting.resets else ["", ""])]


def _record(setting: Setting) -> dict[str, Any]:
    record = setting._asdict()
    activation, layer_norm = record.pop("panel")
    return {**_stream(record.pop("stream")), "activation": activation, "layer_norm": layer_norm, **record}


def _stream(stream: Stream) -> dict[str, Any]:
    return {"stream": stream.experiment, "tasks": stream.tasks}


def _bounds(name: str, value: numbers.Interval) -> dict[str, str]:
    shown = {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
    return {key: f"{number:.5g}" if math.isfinite(number) else "" for key, number in shown.items()}


def _plus_minus(value: numbers.Interval, scale: float = 100.0, digits: int = 1) -> str:
    return (
        tables.plus_minus(numbers.Mean(value.value, value.high - value.value, 1), digits, scale)
        if math.isfinite(value.value)
        else "–"
    )
