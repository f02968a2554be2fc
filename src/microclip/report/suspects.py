"""The suspects: examples that are probably wrong, ready to be reviewed in the page.

Knows what to say and show of them; `microclip.issues` finds them, review.js takes the verdicts.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from microclip.report.blocks import Block, Cell, Paragraph, Section, Suspect, Suspects, Table
from microclip.report.gallery import NO_CONTENT, shortened, shown_content
from microclip.report.media import ByteBudget
from microclip.report.run_data import RunData, suspect_rows

SHARE = 0.6  # of the bytes left for pictures and texts; galleries further down get the others
ROW = 160  # bytes of a suspect in the page besides its texts
LISTED = 100  # in print, and without scripts
LONGEST_ID = 1000  # characters; the page must hold whole ids to export them
LONGEST_LABEL = 40  # characters of the name of a class
LONGEST_NAME = 200  # characters of the name of the run
MOST_LABELS = 2000  # to choose from
HOW_TO_READ = (
    "The probability that an example is wrong follows from how it was learned over the whole run, "
    "compared with all others. It is an estimate: look before you drop. Your verdicts stay in this "
    "browser until you export them; “microclip apply” turns the export into a list of ids to "
    "train on and a list of new labels."
)


def headline(data: RunData, several: bool = False) -> str:
    """Return how many labels look wrong, without a full stop; "" if nothing can be said."""
    if data.issues is None:
        return ""
    what = _counted(data, len(data.issues))
    low, high = data.issues.interval
    start = f"{shortened(data.run.name)}: " if several else ""
    wrong = data.issues.wrong
    count, verb = (f"{wrong:,}", "look") if wrong != 1 else ("1", "looks")
    if not wrong:
        count, verb = ("none" if start else "None"), "looks"
    return f"{start}{count} of {len(data.issues):,} {what} {verb} wrong (95 %: {low:,} to {high:,})"


def suspects_section(data: RunData, budget: ByteBudget, suffix: str) -> Section | None:
    """Return the section to review, if anything is suspicious."""
    if data.issues is None:
        return None
    rows, total = suspect_rows(data.issues)
    if not rows:
        return None
    labels, fixed = _labels(data)
    found, left_out = _fill(data, [_suspect(data, row, labels) for row in rows], budget)
    if not found:
        return None
    blocks: list[Block] = [Paragraph(text) for text in _truth_sentences(data, rows)]
    blocks += [Paragraph(text, "finding") for text in data.issue_warnings]
    name = f"suspects-{data.key}"
    blocks.append(
        Suspects(
            key=name,
            storage=_storage(data),
            run=shortened(data.run.name, LONGEST_NAME),
            rows=found,
            labels=labels,
            fixed_labels=fixed,
            integer_ids=isinstance(found[0].id, int),
            listed=_listed(name, found, labels),
        )
    )
    blocks.append(Paragraph(HOW_TO_READ, "note"))
    blocks += [Paragraph(note, "note") for note in data.issues.notes]
    if not data.examples.contents:
        blocks.append(Paragraph(NO_CONTENT, "note"))
    if len(found) < total:
        blocks.append(
            Paragraph(
                f"These are the {len(found):,} most probable of {total:,}. All of them: "
                "microclip issues RUN --csv issues.csv.",
                "note",
            )
        )
    if left_out:
        blocks.append(Paragraph(f"{left_out:,} contents are not shown; each says why.", "note"))
    return Section(f"suspects-section-{data.key}", f"Suspects{suffix}", blocks)


def review_data(block: Suspects) -> dict[str, Any]:
    """Return what the script of the page needs to know, as JSON."""
    return {
        "storage": block.storage,
        "run": block.run,
        "labels": dict(block.labels),
        "fixedLabels": block.fixed_labels,
        "integerIds": block.integer_ids,
        "rows": [_plain(row) for row in block.rows],
    }


def _plain(row: Suspect) -> dict[str, Any]:
    """Return a suspect without what is empty; its id as text, since scripts round large numbers."""
    found = {name: value for name, value in vars(row).items() if value not in (None, "", False)}
    return {**found, "id": str(row.id), "name": shortened(str(row.id))}


def _suspect(data: RunData, row: Mapping[str, Any], labels: Mapping[str, str]) -> Suspect:
    one = str(row["id"])
    facts = data.examples.facts.get(one)
    given = row["given_label"]
    if given is None and facts is not None:
        given = facts.label
    domain = row["domain"] if row["domain"] is not None else facts.domain if facts else None
    suggested = row["suggested_label"]
    return Suspect(
        id=row["id"],
        probability=row["probability"],
        flagged=row["flagged"],
        kind=row["kind"],
        evidence=row["evidence"] or "",
        given=None if given is None else str(given),
        suggested=None if suggested is None or suggested == given else str(suggested),
        truth=None if facts is None or facts.truth is None else shortened(facts.truth),
        domain=None if domain is None else shortened(str(domain)),
    )


def _fill(data: RunData, rows: Sequence[Suspect], budget: ByteBudget) -> tuple[list[Suspect], int]:
    """Add pictures, sounds and texts while there is space; also return how many are missing."""
    own = ByteBudget(int(budget.left * SHARE))
    size = own.left
    kept = []
    for row in rows:
        if len(str(row.id)) > LONGEST_ID:
            continue
        if not own.take(ROW + _size(_plain(row))):
            break
        kept.append(row)
    found, left_out = [], 0
    for row in kept:
        content = data.examples.contents.get(str(row.id))
        media, text, note = shown_content(data, content, own, _size)
        left_out += content is not None and media is None and not text
        found.append(
            replace(
                row,
                shows=content.kind if content and (media or text) else "",
                uri=media.uri if media else "",
                pixelated=media is not None and media.pixelated,
                text=text,
                note=note,
            )
        )
    budget.take(size - own.left)
    return found, left_out


def _size(value: object) -> int:
    """Return how many bytes this takes as JSON in the page, where < > & are written as \\u003c."""
    text = json.dumps(value)
    return len(text) + 5 * sum(map(text.count, "<>&"))


def _labels(data: RunData) -> tuple[dict[str, str], bool]:
    """Return the labels to choose from with their names, and whether there can be no others."""
    assert data.issues is not None
    table = data.issues.table
    given = table["given_label"]
    if given.null_count == len(given):
        seen = Counter(f.label for f in data.examples.facts.values() if f.label is not None)
        if len(seen) > min(MOST_LABELS, len(data.examples.facts) // 2):  # transcripts, perhaps
            return {}, False
        return {label: shortened(label) for label in sorted(seen)}, False
    numbers = {n for name in ("given_label", "suggested_label") for n in table[name].to_pylist()}
    known = sorted(number for number in numbers if number is not None and number >= 0)
    classes = data.classes or 0
    if classes and classes <= MOST_LABELS:
        known = list(range(classes))
    names = _names(data)
    labels = {
        str(number): f"{name} ({number})" if (name := names.get(number)) else str(number)
        for number in known[:MOST_LABELS]
    }
    return labels, len(known) <= MOST_LABELS and classes > 0


def _names(data: RunData) -> dict[int, str]:
    """Return the names of classes, where examples were described with other labels than numbers."""
    assert data.issues is not None
    table = data.issues.table
    found: dict[int, set[str]] = {}
    for one, number in zip(table["id"].to_pylist(), table["given_label"].to_pylist(), strict=True):
        facts = data.examples.facts.get(str(one))
        if number is not None and facts is not None and facts.label is not None:
            found.setdefault(number, set()).add(facts.label)
    names = {number: next(iter(seen)) for number, seen in found.items()}
    if len(set(names.values())) < len(names) or any(len(seen) > 1 for seen in found.values()):
        return {}  # the labels of examples are something else
    return {n: shortened(name, LONGEST_LABEL) for n, name in names.items() if name != str(n)}


def _storage(data: RunData) -> str:
    """Return a name that stays the same while the run goes on, and when it is moved."""
    text = json.dumps([data.created, data.run.name])
    return f"microclip-review-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _listed(key: str, rows: Sequence[Suspect], labels: Mapping[str, str]) -> Table:
    shown = rows[:LISTED]
    return Table(
        key=f"{key}-listed",
        caption=f"The {len(shown):,} most probable of {len(rows):,}",
        headings=("id", "given", "suggested", "probability", "kind", "evidence"),
        rows=[
            [
                Cell(shortened(str(row.id))),
                Cell(shortened(labels.get(row.given or "", row.given or ""))),
                Cell(shortened(labels.get(row.suggested or "", row.suggested or ""))),
                Cell("" if row.probability is None else _percent(row.probability)),
                Cell(row.kind),
                Cell(row.evidence),
            ]
            for row in shown
        ],
        numeric=(False, False, False, True, False, False),
    )


def _percent(probability: float) -> str:
    """Return a probability without rounding it to certainty."""
    if 0.999 < probability < 1:
        return "over 99.9 %"
    return f"{100 * probability:.0f} %" if probability < 0.99 else f"{100 * probability:.1f} %"


def _truth_sentences(data: RunData, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return how many of the flagged are really wrong, where the truth is known."""
    flagged = [data.examples.facts.get(str(row["id"])) for row in rows if row["flagged"]]
    known = [facts.wrong for facts in flagged if facts is not None and facts.wrong is not None]
    if not known:
        return []
    those = "" if len(known) == len(flagged) else f" {len(known):,} of them whose truth is known:"
    total = sum(bool(facts.wrong) for facts in data.examples.facts.values())
    return [
        f"Of the {len(flagged):,} flagged,{those} {sum(known):,} have a wrong label; {total:,} "
        "wrong labels are known in all. The verdicts do not use that knowledge."
    ]


def _counted(data: RunData, count: int) -> str:
    assert data.issues is not None
    given = data.issues.table["given_label"]
    labelled = given.null_count < len(given) or any(f.label for f in data.examples.facts.values())
    return ("label" if labelled else "example") + ("" if count == 1 else "s")
