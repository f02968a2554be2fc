"""What the page says: sections of sentences, figures and tables about what is known of the runs.

A section without data says why in one sentence, or is left out. Every figure comes with a
sentence on how to read it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from microclip.report import figures
from microclip.report.blocks import Block, Cell, Figure, Paragraph, Section, Table
from microclip.report.comparison import (
    Comparison,
    by_interest,
    signed,
    unsigned,
    verdict,
)
from microclip.report.dossier import Dossier
from microclip.report.gallery import gallery, number, scores, shortened
from microclip.report.media import Room
from microclip.report.runs import Run

LONGEST_VALUE = 200  # characters of a setting
MOST_ROWS = 200


def summary(
    runs: Sequence[Run], comparisons: Sequence[Comparison], dossiers: Sequence[Dossier]
) -> list[str]:
    """Return what came out, in plain words."""
    found = [sentence for one in comparisons if (sentence := verdict(one)) is not None]
    if len(runs) == 1 and (reached := runs[0].metrics.get(runs[0].headline or "")):
        step, value = list(reached.items())[-1]
        found.append(f"{shortened(str(runs[0].headline))} is {value:.4g} after step {step:,}.")
    found += [_ledger_sentence(dossier, len(runs) > 1) for dossier in dossiers]
    return found or [
        f"{_count(len(runs), 'run')}. There is nothing to compare yet: the same with "
        "another micro-batch size would show what it does, and a ledger to whom."
    ]


def comparing(comparison: Comparison, key: str) -> Section:
    """Compare the settings of a group."""
    choices = {metric: figures.sweet_spot(comparison, metric) for metric in comparison.metrics}
    rows = comparison.rows(comparison.headline)
    differs = any(row.difference is not None for row in rows)
    how = (
        "Each dot is the mean over seeds of a run's last value, with its 95 % interval; the "
        "dashed line with its band is plain training."
    )
    if differs:
        how += (
            " Below, the difference to plain training, seed by seed: a bar that lies entirely on "
            "one side of 0 is a difference that the seeds agree on."
        )
    blocks: list[Block] = [
        Figure(f"sweet-spot-{key}", "By micro-batch size", how, choices, "metric", 460),
        _comparison_table(comparison, key),
    ]
    if not differs:
        blocks.append(Paragraph(_why_no_difference(comparison), "note"))
    title = "Which micro-batch size?"
    if comparison.group:
        title += f" ({shortened(comparison.group)})"
    return Section(f"comparison-{key}", title, blocks)


def what_was_run(runs: Sequence[Run]) -> Section:
    """Tell runs apart by what differs, then say what is the same for all."""
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
        blocks.append(
            Paragraph("Nothing is known of the settings: there is a ledger, and no run.json.")
        )
    for run in runs:
        blocks += [Paragraph(f"{shortened(run.name)}: {note}", "note") for note in run.notes]
    return Section("runs", "What was run", blocks)


def learning_curves(runs: Sequence[Run], dossiers: Sequence[Dossier]) -> Section | None:
    """Draw every metric that was logged more than once; else the loss that ledgers have."""
    curved = [run for run in runs if any(len(curve) > 1 for curve in run.metrics.values())]
    names = dict.fromkeys(
        name for run in curved for name, curve in run.metrics.items() if len(curve) > 1
    )
    how = "Each line is a run; a line that falls or rises early has learnt early."
    if curved:
        metrics = sorted(names, key=by_interest)
        choices = figures.curves(curved, metrics)
        lone = {name for run in runs for name in run.metrics} - set(names)
        blocks: list[Block] = [Figure("curves", "Metrics over steps", how, choices, "metric")]
        if len(curved) < len(runs):
            blocks.append(
                Paragraph(
                    f"{_count(len(curved), 'run')} of {len(runs)} logged more than the end.", "note"
                )
            )
        if lone:
            some = ", ".join(sorted(shortened(name, 40) for name in lone)[:8])
            blocks.append(Paragraph(f"Logged only once in a run, and not drawn: {some}.", "note"))
        return Section("curves", "Learning curves", blocks)
    with_loss = [d for d in dossiers if sum(value is not None for value in d.course.loss) > 1]
    if not with_loss:
        return None
    made_up = [
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
                    for step, loss in zip(d.course.steps, d.course.loss, strict=True)
                    if loss is not None
                }
            },
        )
        for d in with_loss
    ]
    choices = figures.curves(made_up, ["training loss"])
    return Section(
        "curves",
        "Learning curves",
        [
            Figure("curves", "Training loss over steps", how, choices),
            Paragraph("No metrics were logged; the losses are those of the ledger.", "note"),
        ],
    )


def clipping(dossier: Dossier, title: str) -> Section:
    """Show norms, bound and weights over time."""
    course = dossier.course
    told = (
        f"{course.recorded:,} steps and {course.microbatches:,} micro-batches of up to "
        f"{course.largest} examples were recorded, step {course.first:,} to {course.last:,}."
    )
    if course.not_finite:
        told += f" {course.not_finite:,} micro-batches had a gradient that was not finite."
    if dossier.is_plain:
        how = (
            "Half of the gradients have a norm within the dark band, nine in ten in the light one."
        )
        norms = Figure(f"norms-{dossier.key}", "Norms", how, {"": figures.norms(course)})
        return Section(f"clipping-{dossier.key}", title, [Paragraph(told), norms])
    blocks: list[Block] = [
        Paragraph(told),
        Figure(
            f"norms-{dossier.key}",
            "Norms and bound",
            "Half of the micro-batches' gradients have a norm within the dark band, nine in ten "
            "within the light one. Each is rescaled to the dashed bound: the further a norm lies "
            "above it, the more its micro-batch is held back.",
            {"": figures.norms(course)},
        ),
        Figure(
            f"weights-{dossier.key}",
            "Weights",
            "What was left of the micro-batches' gradients, as bands in the same way: at 1, a "
            "gradient is as it was; near 0, it hardly counts. A wide band means that clipping "
            "makes a difference between examples, a narrow one that it treats all alike.",
            {"": figures.weights(course)},
        ),
    ]
    return Section(f"clipping-{dossier.key}", title, blocks)


def suppressed(dossier: Dossier, title: str) -> Section:
    """Show who is held back: how weights are spread over examples, and over domains."""
    blocks: list[Block] = [
        Paragraph(warning, "finding") for warning in dict.fromkeys(dossier.warnings)
    ]
    weights = _by_truth(dossier, "mean_weight")
    if weights:
        how = (
            "Each bar is a number of examples, by the mean weight of the micro-batches that they "
            "were in. Those far to the left were held back again and again."
        )
        if len(weights) > 1:
            how += " Hatched: examples whose label is known to be wrong."
        drawing = figures.histogram(weights, "mean weight of an example")
        blocks.append(
            Figure(f"spread-{dossier.key}", "Mean weight of examples", how, {"": drawing}, "", 300)
        )
    else:
        blocks.append(Paragraph("No example had a finite weight: there is nothing to draw."))
    blocks += _domain_blocks(dossier)
    return Section(f"suppressed-{dossier.key}", title, blocks)


def drag(dossier: Dossier, count: int, room: Room, titles: tuple[str, str]) -> list[Section]:
    """Show the most suspicious examples, and the table of scores."""
    tiles, notes = gallery(dossier, count, room)
    blocks: list[Block] = [Paragraph(text) for text in truth_sentences(dossier, count)]
    if not dossier.examples.contents:
        blocks.append(
            Paragraph(
                "What the examples look like was not recorded: describe them with "
                "RunFolder.example(id, image=..., text=..., label=...).",
                "note",
            )
        )
    blocks.append(tiles)
    blocks += [Paragraph(note, "note") for note in (*notes, *dossier.examples.notes)]
    shown = Section(f"gallery-section-{dossier.key}", titles[0], blocks)
    listed: list[Block] = []
    values = _by_truth(dossier, "score")
    if values:
        how = "Each bar is a number of examples, by score; the draggers are those to the right."
        if len(values) > 1:
            how += " Hatched: examples whose label is known to be wrong."
        drawing = figures.histogram(values, "score")
        listed.append(Figure(f"scores-drawn-{dossier.key}", "Scores", how, {"": drawing}, "", 300))
    listed.append(scores(dossier))
    return [shown, Section(f"scores-section-{dossier.key}", titles[1], listed)]


def truth_sentences(dossier: Dossier, count: int) -> list[str]:
    """Say how many of the examples shown are really wrong, where the truth is known."""
    known = [wrong for wrong in dossier.wrong[:count] if wrong is not None]
    if not known:
        return []
    those = "" if len(known) == min(count, len(dossier.wrong)) else " whose truth is known"
    found = [
        f"Of the {len(known)} examples with the highest scores{those}, {sum(known)} have a wrong "
        "label."
    ]
    everyone = [wrong for wrong in dossier.wrong if wrong is not None]
    total = sum(everyone)
    if len(everyone) == len(dossier.wrong) and 0 < total < len(everyone):
        among = sum(everyone[:total])
        found.append(
            f"The truth is known for all {len(everyone):,} examples: {total:,} labels are wrong, "
            f"and {among:,} of them are among the {total:,} highest scores "
            f"({100 * among / total:.0f} %; by chance it would be "
            f"{100 * total / len(everyone):.0f} %). The scores were made without it."
        )
    return found


def _ledger_sentence(dossier: Dossier, several: bool) -> str:
    course = dossier.course
    if dossier.is_plain:
        name = f"{shortened(dossier.run.name)} is plain training" if several else "Plain training"
        return (
            f"{name}: nothing was clipped in {course.recorded:,} steps. Its losses tell which of "
            f"{len(dossier.draggers):,} examples it finds hard."
        )
    name = f"In {shortened(dossier.run.name)}, clipping" if several else "Clipping"
    left = "" if course.mean_weight is None else f"left {100 * course.mean_weight:.0f} % of "
    text = (
        f"{name} {left or 'changed '}the average gradient over {course.recorded:,} steps and "
        f"{len(dossier.draggers):,} examples."
    )
    found = dossier.domains.findings if dossier.domains is not None else ()
    if found:
        held = ", ".join(shortened(one.domain, 40) for one in found[:3])
        text += f" It holds whole {dossier.grouped_by}s back: {held}. See who is suppressed."
    elif dossier.domains is not None:
        text += f" No {dossier.grouped_by} is held back as a whole."
    return text


def _comparison_table(comparison: Comparison, key: str) -> Table:
    metric = comparison.headline
    rows = []
    for row in comparison.rows(metric):
        difference = row.difference
        rows.append(
            [
                Cell(shortened(row.setting.name), row.setting.microbatch_size or 0),
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
        f"{shortened(metric)}: the last value, with 95 % intervals over seeds",
        ("setting", "seeds", shortened(metric), "difference to plain"),
        rows,
        numeric=(False, True, True, True),
        sortable=True,
        sorted_by=0,
    )


def _why_no_difference(comparison: Comparison) -> str:
    plain = [setting for setting in comparison.settings if setting.microbatch_size is None]
    if not plain:
        return "There is no plain training among the runs, so differences to it are not shown."
    if len(plain) > 1:
        return (
            "Plain training was run with several settings; which of them to compare with cannot "
            "be told, so differences to it are not shown."
        )
    return (
        "Differences to plain training are not shown: they are taken seed by seed, and no other "
        "setting has a seed in common with it."
    )


def _facts_of(run: Run) -> dict[str, str]:
    if not run.described:
        return {}
    versions = ", ".join(f"{name} {value}" for name, value in run.versions.items())
    facts = {
        "micro-batch size b": "plain" if run.microbatch_size is None else str(run.microbatch_size),
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
    """Return a row for each setting; runs that differ in nothing but the seed share one."""
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
        "What differs between the runs (marked: other than in the first line)",
        ("run", *(shortened(name) for name in columns), "seeds"),
        rows,
        sortable=True,
    )


def _domain_blocks(dossier: Dossier) -> list[Block]:
    report, kind = dossier.domains, dossier.grouped_by
    if report is None:
        return [
            Paragraph(
                "Nothing is known of domains: give domains= to the Clipper, or describe the "
                "examples with a domain, to see whether a whole domain is held back.",
                "note",
            )
        ]
    rows = report.domains.to_pylist()
    shown = [row["domain"] for row in rows[:10]]
    blocks: list[Block] = [Paragraph(found.message, "finding") for found in report.findings]
    if not report.findings:
        blocks.append(Paragraph(f"None of the {len(rows)} {kind}s is held back as a whole."))
    if kind == "label":
        blocks.append(
            Paragraph("No domains were recorded; labels, as given, stand for them here.", "note")
        )
    if any(row["ratio"] is not None for row in rows):
        over_time = figures.domains_over_time(report.over_time.to_pylist(), shown)
        blocks += [
            Figure(
                f"domains-{dossier.key}",
                f"{kind.capitalize()}s",
                f"Each dot is a {kind}'s share of the weight over its share of the examples, with "
                "its 95 % interval. At 1 it counts as much as it has examples; one that stays "
                "below 0.8 with its whole interval is held back systematically.",
                {"": figures.domain_ratios(rows[:25])},
                "",
                min(120 + 26 * min(len(rows), 25), 700),
            ),
            Figure(
                f"domains-time-{dossier.key}",
                f"{kind.capitalize()}s over time",
                f"The same ratio for each tenth of training: a line below 1 is a {kind} that was "
                "held back then."
                + (" The ten with the lowest ratio are drawn." if len(rows) > 10 else ""),
                {"": over_time},
            ),
        ]
    blocks.append(_domain_table(dossier, rows))
    return blocks


def _domain_table(dossier: Dossier, rows: Sequence[dict[str, float | str | None]]) -> Table:
    def percent(value: object) -> Cell:
        return Cell(f"{100 * value:.1f}", value) if isinstance(value, float) else Cell("")

    def plain(value: object) -> Cell:
        return Cell(number(value), value) if isinstance(value, float) else Cell("")

    return Table(
        f"domain-table-{dossier.key}",
        f"{dossier.grouped_by.capitalize()}s, the one most held back first",
        (dossier.grouped_by, "% of examples", "% of weight", "ratio", "from", "to", "suppression"),
        [
            [
                Cell(shortened(str(row["domain"]))),
                percent(row["example_share"]),
                percent(row["weight_share"]),
                *(plain(row[name]) for name in ("ratio", "low", "high", "suppression")),
            ]
            for row in rows[:MOST_ROWS]
        ],
        numeric=(False, *[True] * 6),
        sortable=True,
        sorted_by=3,
    )


def _by_truth(dossier: Dossier, name: str) -> dict[str, list[float]]:
    """Return a column's values; with those of wrong labels by themselves, if some are known."""
    pairs = list(zip(dossier.column(name), dossier.wrong, strict=True))
    known = [(value, bool(wrong)) for value, wrong in pairs if value is not None]
    if any(wrong for _, wrong in known):
        return {
            "label right, or not known" if None in dossier.wrong else "label right": [
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
    """Return whole numbers, neighbours as a range: 0 to 3, 7."""
    pieces: list[list[int]] = []
    for one in numbers:
        if pieces and pieces[-1][-1] == one - 1:
            pieces[-1].append(one)
        else:
            pieces.append([one])
    texts = [str(p[0]) if len(p) == 1 else f"{p[0]} to {p[-1]}" for p in pieces]
    return ", ".join(texts[:20])
