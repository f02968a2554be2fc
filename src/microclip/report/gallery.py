"""The gallery and the table of scores: the most suspicious examples, with the evidence."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape

import pyarrow as pa
import pyarrow.csv

from microclip.draggers.export import harmless
from microclip.report.blocks import Cell, Gallery, Sparkline, Table, Tile
from microclip.report.dossier import Dossier
from microclip.report.examples import Content
from microclip.report.media import FULL, LeftOutError, Media, Room

LONGEST_TEXT = 2000  # characters of an example
LONGEST_NAME = 80  # of an id, label or domain
ROWS = 300
CSV_ROWS = 2000
LARGEST_CSV = 300_000  # bytes
THIRDS = ("early", "middle", "late")
MEANINGS = {
    "loss": "how far its loss lies above the median loss of its step, on average",
    "late_loss": "how far its loss lies above the median of its step, late in training",
    "raw_loss": "its mean loss",
    "combined": "its loss and its gradient norms together, in standard deviations",
    "group": "the logarithm of its micro-batches' norms, relative to the median of their steps",
    "refined": "what it adds to the logarithm of its micro-batches' norms, relative to the "
    "median of their steps",
}


def gallery(dossier: Dossier, count: int, room: Room) -> tuple[Gallery, list[str]]:
    """Return the most suspicious examples as tiles, and notes on what could not be shown."""
    table = dossier.draggers.top(count)
    sparklines = _sparklines(dossier, len(table))
    tiles, left_out = [], 0
    for row, sparkline in zip(table.to_pylist(), sparklines, strict=True):
        one = str(row["id"])
        facts = dossier.examples.facts.get(one)
        content = dossier.examples.contents.get(one)
        media, text, note = _shown(dossier, content, room)
        left_out += media is None and content is not None and content.kind != "text"
        tiles.append(
            Tile(
                id=shortened(one),
                rank=row["rank"],
                score=row["score"],
                facts=_facts(dossier, row),
                kind=content.kind if content and (media or text) else "",
                uri=media.uri if media else "",
                pixelated=media is not None and media.pixelated,
                text=text,
                note=note,
                label=None if facts is None or facts.label is None else shortened(facts.label),
                truth=None if facts is None or facts.truth is None else shortened(facts.truth),
                domain=_domain(dossier, row, one),
                appearances=row["appearances"],
                weight=row["mean_weight"],
                sparkline=sparkline,
            )
        )
    notes = []
    if left_out:
        notes.append(
            f"{left_out} of the files could not be shown; each says why. Files up to 400 KB are "
            "taken in, until the page is full."
        )
    key = f"gallery-{dossier.key}"
    return Gallery(key, tiles, _how_to_read(dossier)), notes


def scores(dossier: Dossier) -> Table:
    """Return the table of the highest scores."""
    table = dossier.draggers.top(ROWS)
    rows = table.to_pylist()
    known = [dossier.examples.facts.get(str(row["id"])) for row in rows]
    with_label = any(facts and facts.label is not None for facts in known)
    with_truth = any(facts and facts.truth is not None for facts in known)
    domains = [_domain(dossier, row, str(row["id"])) for row in rows]
    with_domain = any(domain is not None for domain in domains)
    with_loss = dossier.draggers.losses != "none"
    headings = [
        "rank",
        "id",
        *(["label"] if with_label else []),
        *(["truth"] if with_truth else []),
        *(["domain"] if with_domain else []),
        "score",
        "seen",
        "mean weight",
        *(["mean loss"] if with_loss else []),
        "course",
    ]
    texts = {"id", "label", "truth", "domain"}
    sparklines = _sparklines(dossier, len(rows))
    cells = []
    for row, facts, domain, sparkline in zip(rows, known, domains, sparklines, strict=True):
        by_heading = {
            "rank": Cell(str(row["rank"]), row["rank"]),
            "id": _name_cell(row["id"]),
            "label": Cell(shortened(facts.label or "") if facts else ""),
            "truth": Cell(
                shortened(facts.truth or "") if facts else "", marked=bool(facts and facts.wrong)
            ),
            "domain": Cell(domain or ""),
            "score": _number(row["score"]),
            "seen": Cell(f"{row['appearances']:,}", row["appearances"]),
            "mean weight": _number(row["mean_weight"]),
            "mean loss": _number(row["loss"]),
            "course": Cell("", _fall(row, dossier.measure), sparkline=sparkline),
        }
        cells.append([by_heading[heading] for heading in headings])
    return Table(
        key=f"scores-{dossier.key}",
        caption=f"The {len(rows):,} highest scores of {len(dossier.draggers):,} examples",
        headings=headings,
        rows=cells,
        numeric=[heading not in texts for heading in headings],
        sortable=True,
        filterable=True,
        sorted_by=0,
        download=_download(dossier),
    )


def shortened(text: str, length: int = LONGEST_NAME) -> str:
    """Return a text that can be shown, and how long it is if that is too long."""
    if len(text) <= length:
        return text
    return f"{text[:length]}… ({len(text):,} characters)"


def number(value: float | None) -> str:
    """Return a number with three digits that count."""
    return "unknown" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _how_to_read(dossier: Dossier) -> str:
    measured = "loss" if dossier.measure == "excess_loss" else "norm"
    return (
        f"An example's score is {MEANINGS[dossier.draggers.method]}; the highest come first. The "
        f"interval is the 95 % one of that {measured}, the weight what was left of its "
        "micro-batches' gradients, on average. The "
        f"three dots are its {measured} above the step's median, early, in the middle and late in "
        "training: an example may drag early and help late. A high score is a reason to look, not "
        "a verdict: what is rare and right scores high too."
    )


def _shown(dossier: Dossier, content: Content | None, room: Room) -> tuple[Media | None, str, str]:
    """Return what is shown of an example: a file or a text, and a note if something is missing."""
    if content is None:
        return None, "", ""
    if content.kind == "text":
        text = content.text or ""
        if not room.take(len(escape(text[:LONGEST_TEXT]).encode("utf-8", "replace"))):
            return None, "", FULL
        if len(text) <= LONGEST_TEXT:
            return None, text, ""
        note = f"The first {LONGEST_TEXT:,} of {len(text):,} characters."
        return None, text[:LONGEST_TEXT], note
    try:
        return room.embed(dossier.run.path, content.file or "", content.kind), "", ""
    except LeftOutError as error:
        return None, "", str(error)


def _facts(dossier: Dossier, row: dict[str, object]) -> list[tuple[str, str]]:
    def value(name: str) -> str:
        found = row[name]
        return number(found if isinstance(found, float) else None)

    measure = dossier.measure
    facts = [("score", value("score"))]
    if row[measure] != row["score"]:
        facts.append(("excess loss" if measure == "excess_loss" else "log norm", value(measure)))
    if row[f"{measure}_low"] is not None:
        facts.append(("interval", f"{value(f'{measure}_low')} to {value(f'{measure}_high')}"))
    facts += [("weight", value("mean_weight")), ("seen", f"{row['appearances']:,} times")]
    if row["nonfinite"]:
        facts.append(("not finite", f"{row['nonfinite']:,} times"))
    return facts


def _domain(dossier: Dossier, row: dict[str, object], one: str) -> str | None:
    facts = dossier.examples.facts.get(one)
    domain = row["domain"] if row["domain"] is not None else facts.domain if facts else None
    return None if domain is None else shortened(str(domain))


def _sparklines(dossier: Dossier, count: int) -> list[Sparkline]:
    """Return the courses of the first examples, all on the same scale."""
    columns = [dossier.column(f"{dossier.measure}_{third}", count) for third in THIRDS]
    known = [value for column in columns for value in column if value is not None]
    # 0, the median of all examples, is always on the scale
    low, high = min(known, default=0.0), max(known, default=1.0)
    low, high = min(low, 0.0), max(high, 0.0)
    span = (high - low) or 1.0

    def drawn(values: Sequence[float | None]) -> Sparkline:
        told = (f"{t} {number(v)}" for t, v in zip(THIRDS, values, strict=True))
        scaled = [None if value is None else (value - low) / span for value in values]
        return Sparkline(scaled, -low / span, ", ".join(told))

    return [drawn(values) for values in zip(*columns, strict=True)]


def _fall(row: dict[str, object], measure: str) -> float | None:
    """Return how much less an example drags late than early; courses are sorted by it."""
    early, late = row[f"{measure}_early"], row[f"{measure}_late"]
    if isinstance(early, float) and isinstance(late, float):
        return early - late
    return None


def _name_cell(one: object) -> Cell:
    return Cell(shortened(str(one)), one if isinstance(one, int) else shortened(str(one)))


def _number(value: float | None) -> Cell:
    return Cell("" if value is None else number(value), value)


def _download(dossier: Dossier) -> str:
    """Return as many of the highest scores as fit, as CSV that is harmless to spreadsheets."""
    count = min(CSV_ROWS, len(dossier.draggers))
    while count:
        content = _csv(dossier.draggers.top(count))
        if len(content) <= LARGEST_CSV:
            return f"data:text/csv;charset=utf-8;base64,{base64.b64encode(content).decode()}"
        count //= 2
    return ""


def _csv(table: pa.Table) -> bytes:
    for place, field in enumerate(table.schema):
        if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
            table = table.set_column(place, field.name, harmless(table[field.name]))
    buffer = io.BytesIO()
    pyarrow.csv.write_csv(table, buffer)
    return buffer.getvalue()
