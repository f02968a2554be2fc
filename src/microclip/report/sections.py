"""What the page says: sections of text, figures and tables about the runs.

A section without data says why in one sentence, or is left out. Every figure comes with a
sentence on how to read it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from microclip.probing.advice import is_trusted, suggestions
from microclip.report import figures
from microclip.report.blocks import Block, Cell, Figure, Paragraph, Section, Table
from microclip.report.comparison import (
    Comparison,
    by_interest,
    signed,
    unsigned,
    verdicts,
)
from microclip.report.domains import domain_blocks, domain_sentence
from microclip.report.gallery import NO_CONTENT, gallery, scores, shortened
from microclip.report.held_back import HELD_BACK, held_back_text
from microclip.report.media import ByteBudget
from microclip.report.run_data import RunData
from microclip.report.runs import Run

LONGEST_VALUE = 200  # characters of a setting
MOST_ROWS = 200


def summary(
    runs: Sequence[Run], comparisons: Sequence[Comparison], all_data: Sequence[RunData]
) -> list[str]:
    """Return the results in plain words."""
    found = [sentence for one in comparisons for sentence in verdicts(one)]
    if len(runs) == 1 and (reached := runs[0].metrics.get(runs[0].headline or "")):
        step, value = list(reached.items())[-1]
        found.append(f"{shortened(str(runs[0].headline))} is {value:.4g} after step {step:,}.")
    for data in all_data:
        found.append(_ledger_sentence(data, len(runs) > 1))
        found += _wrong_labels(data)
        found += _when_to_clip(data, len(runs) > 1)
        start = f"{shortened(data.run.name)}: " if len(runs) > 1 else ""
        found += [f"{start}{warning}" for warning in data.issue_warnings]
    return found or [
        f"{_count(len(runs), 'run')}. There is nothing to compare yet: a run with another "
        "micro-batch size would show what clipping does, and a ledger to which examples."
    ]


def comparing(comparison: Comparison, key: str) -> Section:
    """Compare the settings of a group."""
    choices = {metric: figures.sweet_spot(comparison, metric) for metric in comparison.metrics}
    rows = comparison.rows(comparison.headline)
    differs = any(row.difference is not None for row in rows)
    how = (
        "Each dot is the mean over seeds of the last value, with its 95 % interval; the dashed "
        "line with its band is plain training."
    )
    if differs:
        how += (
            " Below, the difference from plain training, paired by seed: if a bar lies entirely "
            "on one side of 0, the difference is unlikely to be noise."
        )
    by = "By setting" if comparison.has_rules else "By micro-batch size"
    blocks: list[Block] = [
        Figure(f"sweet-spot-{key}", by, how, choices, "metric", 460),
        _comparison_table(comparison, key),
    ]
    if not differs:
        blocks.append(Paragraph(_why_no_difference(comparison), "note"))
    one_size = len(comparison.settings) == 2 and comparison.settings[0].is_plain
    title = "Does clipping help?" if one_size else "Which micro-batch size?"
    if comparison.has_rules:
        title = "What helps?"
    if comparison.group:
        title += f" ({shortened(comparison.group)})"
    return Section(f"comparison-{key}", title, blocks)


def what_was_run(runs: Sequence[Run]) -> Section:
    """List what differs between the runs, then what is the same for all."""
    facts = [_facts_of(run) for run in runs]
    names = list(dict.fromkeys(name for fact in facts for name in fact))
    shared = {
        name: facts[0][name]
        for name in names
        if all(fact.get(name) == facts[0].get(name) for fact in facts)
    }
    blocks: list[Block] = []
    if len(runs) > 1:
        blocks.append(_differences(runs, facts, [name for name in names if name not in shared]))
    if shared:
        caption = "The same for all" if len(runs) > 1 else "Settings"
        rows = [
            [Cell(shortened(name)), Cell(shortened(value, LONGEST_VALUE))]
            for name, value in list(shared.items())[:MOST_ROWS]
        ]
        blocks.append(Table("shared", caption, ("setting", "value"), rows))
    if not any(run.described for run in runs):
        blocks.append(Paragraph("The settings are unknown: there is a ledger, but no run.json."))
    for run in runs:
        blocks += [Paragraph(f"{shortened(run.name)}: {note}", "note") for note in run.notes]
    return Section("runs", "What was run", blocks)


def learning_curves(runs: Sequence[Run], all_data: Sequence[RunData]) -> Section | None:
    """Draw every metric that was logged more than once, else the losses in the ledgers."""
    curved = [run for run in runs if any(len(curve) > 1 for curve in run.metrics.values())]
    names = dict.fromkeys(
        name for run in curved for name, curve in run.metrics.items() if len(curve) > 1
    )
    how = "Each line is a run; a line that falls or rises early belongs to a run that learned fast."
    if curved:
        metrics = sorted(names, key=by_interest)
        choices = figures.curves(curved, metrics)
        lone = {name for run in runs for name in run.metrics} - set(names)
        blocks: list[Block] = [Figure("curves", "Metrics over steps", how, choices, "metric")]
        if len(curved) < len(runs):
            blocks.append(
                Paragraph(
                    f"Only {len(curved)} of {len(runs)} runs logged metrics more than once.", "note"
                )
            )
        if lone:
            some = ", ".join(sorted(shortened(name, 40) for name in lone)[:8])
            blocks.append(Paragraph(f"Logged only once per run, so not drawn: {some}.", "note"))
        return Section("curves", "Learning curves", blocks)
    with_loss = [d for d in all_data if sum(value is not None for value in d.timeline.loss) > 1]
    if not with_loss:
        return None
    from_ledgers = [
        Run(
            d.run.path,
            d.run.name,
            d.run.microbatch_size,
            d.run.seed,
            None,
            {},
            described=d.run.described,
            metrics={
                "training loss": {
                    round(step): loss
                    for step, loss in zip(d.timeline.steps, d.timeline.loss, strict=True)
                    if loss is not None
                }
            },
        )
        for d in with_loss
    ]
    choices = figures.curves(from_ledgers, ["training loss"])
    return Section(
        "curves",
        "Learning curves",
        [
            Figure("curves", "Training loss over steps", how, choices),
            Paragraph("No metric was logged over time; these losses are from the ledger.", "note"),
        ],
    )


def clipping(data: RunData, title: str) -> Section:
    """Show norms, the bound and weights over time."""
    timeline = data.timeline
    text = (
        f"{timeline.recorded:,} steps and {timeline.microbatches:,} micro-batches of up to "
        f"{timeline.largest} examples were recorded, from step {timeline.first:,} to "
        f"{timeline.last:,}."
    )
    if timeline.not_finite:
        text += f" {timeline.not_finite:,} micro-batches had a gradient that was not finite."
    if not data.is_clipped:
        how = (
            "The norms of half of the gradients lie in the dark band, those of nine in ten in the "
            "light one."
        )
        drawing = figures.norms(timeline, bound=False)
        norms = Figure(f"norms-{data.key}", "Norms", how, {"": drawing})
        return Section(f"clipping-{data.key}", title, [Paragraph(text), norms])
    blocks: list[Block] = [
        Paragraph(text),
        Figure(
            f"norms-{data.key}",
            "Norms and bound",
            "The norms of half of the micro-batch gradients lie in the dark band, those of nine in "
            "ten in the light one. Clipping scales each down to the dashed bound: the further a "
            "norm lies above it, the more its micro-batch is held back.",
            {"": figures.norms(timeline)},
        ),
        Figure(
            f"weights-{data.key}",
            "Weights",
            "What clipping left of the micro-batch gradients, in the same bands: at 1, a gradient "
            "is unchanged; near 0, it hardly counts. A wide band means that clipping treats "
            "examples differently, a narrow one that it treats them all alike.",
            {"": figures.weights(timeline)},
        ),
    ]
    return Section(f"clipping-{data.key}", title, blocks)


def held_back(data: RunData, title: str) -> Section:
    """Show what is held back: the weights of examples and of domains."""
    blocks: list[Block] = [
        Paragraph(warning, "finding") for warning in dict.fromkeys(data.warnings)
    ]
    weights = _by_truth(data, "mean_weight")
    if weights:
        how = (
            "How many examples had which mean weight, over the micro-batches they were in. Those "
            "far to the left were held back again and again."
        )
        if len(weights) > 1:
            how += " Hatched: examples with a label known to be wrong."
        drawing = figures.histogram(weights, "mean weight of an example")
        blocks.append(
            Figure(f"spread-{data.key}", "Mean weights of examples", how, {"": drawing}, "", 300)
        )
    else:
        blocks.append(Paragraph("No example had a finite weight, so there is nothing to draw."))
    blocks += domain_blocks(data)
    return Section(f"held-back-{data.key}", title, blocks)


def drag(data: RunData, count: int, budget: ByteBudget, titles: tuple[str, str]) -> list[Section]:
    """Show the most suspicious examples, and the table of scores."""
    tiles, notes = gallery(data, count, budget)
    blocks: list[Block] = [Paragraph(text) for text in truth_sentences(data, count)]
    if data.is_plain:  # else they are said where it is shown what is held back
        blocks += [Paragraph(warning, "finding") for warning in dict.fromkeys(data.warnings)]
    if not data.examples.contents:
        blocks.append(Paragraph(NO_CONTENT, "note"))
    if data.no_issues:
        blocks.append(Paragraph(f"There is no list of suspects. {data.no_issues}", "note"))
    blocks.append(tiles)
    blocks += [Paragraph(note, "note") for note in (*notes, *data.examples.notes)]
    shown = Section(f"gallery-section-{data.key}", titles[0], blocks)
    listed: list[Block] = []
    values = _by_truth(data, "score")
    if values:
        how = "How many examples have which score; the draggers are on the right."
        if len(values) > 1:
            how += " Hatched: examples with a label known to be wrong."
        drawing = figures.histogram(values, "score")
        listed.append(Figure(f"scores-drawn-{data.key}", "Scores", how, {"": drawing}, "", 300))
    listed.append(scores(data))
    return [shown, Section(f"scores-section-{data.key}", titles[1], listed)]


def truth_sentences(data: RunData, count: int) -> list[str]:
    """Return how many of the shown examples have a wrong label, where the truth is known."""
    known = [wrong for wrong in data.wrong[:count] if wrong is not None]
    if not known:
        return []
    those = "" if len(known) == min(count, len(data.wrong)) else " and a known truth"
    found = [
        f"Of the {len(known)} examples with the highest scores{those}, {sum(known)} have a wrong "
        "label."
    ]
    return found + _wrong_labels(data)


def _wrong_labels(data: RunData) -> list[str]:
    """Return how many wrong labels have the highest scores, if the truth is known for all."""
    known = [wrong for wrong in data.wrong if wrong is not None]
    total = sum(known)
    if len(known) < len(data.wrong) or not 0 < total < len(known):
        return []
    among = sum(known[:total])
    return [
        f"{total:,} of the {len(known):,} labels are known to be wrong, and {among:,} of these are "
        f"among the {total:,} highest scores ({100 * among / total:.0f} %; by chance it would be "
        f"{100 * total / len(known):.0f} %). The scores do not use that knowledge."
    ]


def _ledger_sentence(data: RunData, several: bool) -> str:
    timeline = data.timeline
    if data.held is not None:
        start = f"In {shortened(data.run.name)}, the rule" if several else "The rule"
        return f"{start} {held_back_text(data)}" + domain_sentence(data, HELD_BACK)
    if data.is_plain:
        name = shortened(data.run.name)
        start = f"{name} is plain training: nothing" if several else "Plain training: nothing"
        if data.run.described and not data.run.is_plain:
            start = f"In {name}, nothing" if several else "Nothing"
        what = "gradient norms" if data.draggers.losses == "none" else "losses"
        text = f"Its {what} show which of {len(data.draggers):,} examples are hard."
        if what == "losses" and not any(value is not None for value in timeline.loss):
            text = "None of its losses is finite."
        return f"{start} was clipped in {timeline.recorded:,} steps. {text}"
    name = f"In {shortened(data.run.name)}, clipping" if several else "Clipping"
    left = "" if timeline.mean_weight is None else f"left {100 * timeline.mean_weight:.0f} % of "
    text = (
        f"{name} {left or 'changed '}the average gradient over {timeline.recorded:,} steps and "
        f"{len(data.draggers):,} examples."
    )
    return text + domain_sentence(data, "Held back most")


def _when_to_clip(data: RunData, several: bool) -> list[str]:
    """Return what the norms suggest about clipping, a quarter into the run, if they are known."""
    known = data.figures
    if not known:
        return []
    start = f"{shortened(data.run.name)}, a" if several else "A"
    text = f"{start} quarter into the run: {' '.join(suggestions(known))}"
    if data.is_clipped and is_trusted():
        text += " Forecasts were fitted to plain training, and this run was clipped."
    return [text]


def _comparison_table(comparison: Comparison, key: str) -> Table:
    metric = comparison.headline
    rows = []
    for place, row in enumerate(comparison.rows(metric)):
        difference = row.difference
        rows.append(
            [
                Cell(shortened(row.setting.name), place),
                Cell(str(row.value.count), row.value.count),
                Cell(unsigned(row.value), row.value.mean),
                Cell(
                    "" if difference is None else signed(difference),
                    None if difference is None else difference.mean,
                ),
            ]
        )
    return Table(
        f"comparison-table-{key}",
        f"{shortened(metric)}: last values, with 95 % intervals over seeds",
        ("setting", "seeds", shortened(metric), "difference from plain"),
        rows,
        numeric=(False, True, True, True),
        sortable=True,
        sorted_by=0,
    )


def _why_no_difference(comparison: Comparison) -> str:
    plain = [setting for setting in comparison.settings if setting.is_plain]
    if not plain:
        return "There is no plain training among the runs, so there are no differences to show."
    if len(plain) > 1:
        return (
            "Plain training was run with several settings. It is unclear which of them to compare "
            "with, so differences are not shown."
        )
    return (
        "Differences from plain training are not shown: they are paired by seed, and no other "
        "setting has a seed in common with it."
    )


def _facts_of(run: Run) -> dict[str, str]:
    if not run.described:
        return {}
    versions = ", ".join(f"{name} {value}" for name, value in run.versions.items())
    size = "plain" if run.is_plain else str(run.microbatch_size or "the whole batch")
    facts = {
        "micro-batch size b": size,
        "seed": "" if run.seed is None else str(run.seed),
        "group": run.group or "",
        **run.settings,
        "command": run.command or "",
        "versions": versions,
    }
    return {name: value for name, value in facts.items() if value}


def _differences(
    runs: Sequence[Run], facts: Sequence[dict[str, str]], names: Sequence[str]
) -> Table:
    """Return a row for each setting; runs that differ only in the seed share one."""
    columns = [name for name in names if name != "seed"][:12]
    alike: dict[tuple[str, ...], list[Run]] = {}
    for run, fact in zip(runs, facts, strict=True):
        alike.setdefault(tuple(fact.get(name, "") for name in columns), []).append(run)
    rows = []
    first = next(iter(alike))
    for values, members in list(alike.items())[:MOST_ROWS]:
        seeds = sorted({run.seed for run in members if run.seed is not None})
        name = members[0].name if len(members) == 1 else f"{len(members)} runs"
        rows.append(
            [
                Cell(shortened(name)),
                *(
                    Cell(shortened(value), _sort(value), marked=value != usual)
                    for value, usual in zip(values, first, strict=True)
                ),
                Cell(_ranges(seeds), seeds[0] if seeds else None),
            ]
        )
    return Table(
        "differences",
        "What differs between the runs (marked: different from the first row)",
        ("run", *(shortened(name) for name in columns), "seeds"),
        rows,
        sortable=True,
    )


def _by_truth(data: RunData, name: str) -> dict[str, list[float]]:
    """Return the values of a column, separately for wrong labels if any are known."""
    pairs = list(zip(data.column(name), data.wrong, strict=True))
    known = [(value, bool(wrong)) for value, wrong in pairs if value is not None]
    if any(wrong for _, wrong in known):
        return {
            "label correct or unknown" if None in data.wrong else "label correct": [
                value for value, wrong in known if not wrong
            ],
            "label wrong": [value for value, wrong in known if wrong],
        }
    return {"examples": [value for value, _ in known]} if known else {}


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _sort(value: str) -> float | str:
    try:
        found = float(value)
    except ValueError:
        return value
    return found if math.isfinite(found) else value


def _ranges(numbers: Sequence[int]) -> str:
    """Return integers as text, consecutive ones as a range: 0 to 3, 7."""
    pieces: list[list[int]] = []
    for one in numbers:
        if pieces and pieces[-1][-1] == one - 1:
            pieces[-1].append(one)
        else:
            pieces.append([one])
    texts = [str(p[0]) if len(p) == 1 else f"{p[0]} to {p[-1]}" for p in pieces]
    return ", ".join(texts[:20])
