"""The gallery and the table of scores: the most suspicious examples, with the evidence.

Knows what to show of an example; `media` reads the files.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import pyarrow as pa
import pyarrow.csv

from microclip.draggers.result import without_formulas
from microclip.report.blocks import Cell, Gallery, Sparkline, Table, Tile
from microclip.report.media import FULL, ByteBudget, LeftOutError, Media
from microclip.report.run_data import Content, RunData

LONGEST_TEXT = 2000  # characters of an example
LONGEST_NAME = 80  # characters of an id, label or domain
ROWS = 300
CSV_ROWS = 2000
LARGEST_CSV = 300_000  # bytes
THIRDS = ("early", "middle", "late")
MEANINGS = {
    "loss": "how far its loss lies above the median loss of its step, on average",
    "late_loss": "how far its loss lies above the median loss of its step, late in training",
    "raw_loss": "its mean loss",
    "combined": "its loss and its gradient norms together, in standard deviations",
    "group": "the mean log norm of its micro-batches, relative to the median of their steps",
    "refined": "its contribution to the log norm of its micro-batches, relative to the median of "
    "their steps",
}

NO_CONTENT = (
    "The content of the examples was not recorded. To see them here, describe them with "
    "RunFolder.example(id, image=..., text=..., label=...)."
)


def gallery(data: RunData, count: int, budget: ByteBudget) -> tuple[Gallery, list[str]]:
    """Return the most suspicious examples as tiles, and notes on what could not be shown."""
    key = f"gallery-{data.key}"
    return gallery_of(data, data.draggers.top(count), budget, key, _how_to_read(data))


def gallery_of(
    data: RunData, table: pa.Table, budget: ByteBudget, key: str, how_to_read: str
) -> tuple[Gallery, list[str]]:
    """Return some rows of the draggers as tiles, and notes on what could not be shown."""
    sparklines = _sparklines(table, data.measure)
    tiles, left_out = [], 0
    for row, sparkline in zip(table.to_pylist(), sparklines, strict=True):
        one = str(row["id"])
        facts = data.examples.facts.get(one)
        content = data.examples.contents.get(one)
        media, text, note = shown_content(data, content, budget)
        left_out += media is None and content is not None and content.kind != "text"
        tiles.append(
            Tile(
                id=shortened(one),
                rank=row["rank"],
                score=row["score"],
                facts=_facts(data, row),
                kind=content.kind if content and (media or text) else "",
                uri=media.uri if media else "",
                pixelated=media is not None and media.pixelated,
                text=text,
                note=note,
                label=None if facts is None or facts.label is None else shortened(facts.label),
                truth=None if facts is None or facts.truth is None else shortened(facts.truth),
                domain=_domain(data, row, one),
                appearances=row["appearances"],
                weight=row["mean_weight"],
                sparkline=sparkline,
            )
        )
    notes = []
    if left_out:
        notes.append(
            f"{left_out} of the files could not be shown; each tile says why. Files of up to "
            "400 KB are embedded until the page reaches its size limit."
        )
    return Gallery(key, tiles, how_to_read), notes


def scores(data: RunData) -> Table:
    """Return the table of the highest scores."""
    table = data.draggers.top(ROWS)
    rows = table.to_pylist()
    known = [data.examples.facts.get(str(row["id"])) for row in rows]
    with_label = any(facts and facts.label is not None for facts in known)
    with_truth = any(facts and facts.truth is not None for facts in known)
    domains = [_domain(data, row, str(row["id"])) for row in rows]
    with_domain = any(domain is not None for domain in domains)
    with_loss = data.draggers.losses != "none"
    headings = [
        "rank",
        "id",
        *(["label"] if with_label else []),
        *(["truth"] if with_truth else []),
        *(["domain"] if with_domain else []),
        "score",
        "seen",
        "weight",
        *(["held back"] if data.held is not None else []),
        *(["mean loss"] if with_loss else []),
        "trend",
    ]
    texts = {"id", "label", "truth", "domain"}
    sparklines = _sparklines(table, data.measure)
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
            "weight": _number(row["mean_weight"]),
            "held back": Cell(f"{row.get('held_back', 0):,}", row.get("held_back")),
            "mean loss": _number(row["loss"]),
            "trend": Cell("", _fall(row, data.measure), sparkline=sparkline),
        }
        cells.append([by_heading[heading] for heading in headings])
    return Table(
        key=f"scores-{data.key}",
        caption=f"The {len(rows):,} highest scores of {len(data.draggers):,} examples",
        headings=headings,
        rows=cells,
        numeric=[heading not in texts for heading in headings],
        sortable=True,
        filterable=True,
        sorted_by=0,
        download=_download(data),
    )


def shortened(text: str, length: int = LONGEST_NAME) -> str:
    """Return a text, cut if it is long, with its full length."""
    if len(text) <= length:
        return text
    return f"{text[:length]}… ({len(text):,} characters)"


def number(value: float | None) -> str:
    """Format a number with three significant digits."""
    return "unknown" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _how_to_read(data: RunData) -> str:
    measured = "loss" if data.measure == "excess_loss" else "norm"
    left = "clipping left of the gradients of its micro-batches"
    if data.held is not None:
        left = "the rule left of its gradient"
    return (
        f"The score of an example is {MEANINGS[data.draggers.method]}; the highest come first. The "
        f"interval is the 95 % interval of that {measured}. The weight is what {left}, on average. "
        f"The three dots of the trend are its {measured} above the step's median early, in the "
        "middle and late in training: an example may drag early and help late. A high score is a "
        "reason to look, not a verdict: rare examples with correct labels score high too."
    )


def shown_content(
    data: RunData,
    content: Content | None,
    budget: ByteBudget,
    size: Callable[[str], int] = lambda text: len(escape(text).encode("utf-8", "replace")),
) -> tuple[Media | None, str, str]:
    """Return what to show of an example, a file or a text, and a note if it is incomplete.

    Args:
        data: The run.
        content: What the example contains; None if unknown.
        budget: Pays for it.
        size: How many bytes a text takes in the page.
    """
    if content is None:
        return None, "", ""
    if content.kind == "text":
        text = content.text or ""
        if not budget.take(size(text[:LONGEST_TEXT])):
            return None, "", FULL
        if len(text) <= LONGEST_TEXT:
            return None, text, ""
        note = f"The first {LONGEST_TEXT:,} of {len(text):,} characters."
        return None, text[:LONGEST_TEXT], note
    try:
        file = content.file or ""
        return budget.embed(data.run.path, file, content.kind, content.checksum), "", ""
    except LeftOutError as error:
        return None, "", str(error)


def _facts(data: RunData, row: dict[str, Any]) -> list[tuple[str, str]]:
    def value(name: str) -> str:
        found = row[name]
        return number(found if isinstance(found, float) else None)

    measure = data.measure
    facts = [("score", value("score"))]
    if row[measure] != row["score"]:
        facts.append(("excess loss" if measure == "excess_loss" else "log norm", value(measure)))
    if row[f"{measure}_low"] is not None:
        facts.append(("interval", f"{value(f'{measure}_low')} to {value(f'{measure}_high')}"))
    facts += [("weight", value("mean_weight")), ("seen", _times(row["appearances"]))]
    if row.get("held_back"):
        facts.append(("held back", _times(row["held_back"])))
        now = row["held_back_since"] is not None
        when = row["held_back_since"] if now else row["held_back_last"]
        facts.append(("since" if now else "until", f"step {when:,}"))
    if row["nonfinite"]:
        facts.append(("not finite", _times(row["nonfinite"])))
    return facts


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _domain(data: RunData, row: dict[str, object], one: str) -> str | None:
    facts = data.examples.facts.get(one)
    domain = row["domain"] if row["domain"] is not None else facts.domain if facts else None
    return None if domain is None else shortened(str(domain))


def _sparklines(table: pa.Table, measure: str) -> list[Sparkline]:
    """Return the trends of examples, all on the same scale."""
    columns = [table[f"{measure}_{third}"].to_pylist() for third in THIRDS]
    known = [value for column in columns for value in column if value is not None]
    # 0, the median of all examples, is always on the scale
    low, high = min(known, default=0.0), max(known, default=1.0)
    low, high = min(low, 0.0), max(high, 0.0)
    span = (high - low) or 1.0

    def drawn(values: Sequence[float | None]) -> Sparkline:
        words = (f"{t} {number(v)}" for t, v in zip(THIRDS, values, strict=True))
        scaled = [None if value is None else (value - low) / span for value in values]
        return Sparkline(scaled, -low / span, ", ".join(words))

    return [drawn(values) for values in zip(*columns, strict=True)]


def _fall(row: dict[str, object], measure: str) -> float | None:
    """Return how much less an example drags late than early; trends are sorted by it."""
    early, late = row[f"{measure}_early"], row[f"{measure}_late"]
    if isinstance(early, float) and isinstance(late, float):
        return early - late
    return None


def _name_cell(one: object) -> Cell:
    return Cell(shortened(str(one)), one if isinstance(one, int) else shortened(str(one)))


def _number(value: float | None) -> Cell:
    return Cell("" if value is None else number(value), value)


def _download(data: RunData) -> str:
    """Return as many of the highest scores as fit, as CSV that is safe in spreadsheets."""
    count = min(CSV_ROWS, len(data.draggers))
    while count:
        content = _csv(data.draggers.top(count))
        if len(content) <= LARGEST_CSV:
            return f"data:text/csv;charset=utf-8;base64,{base64.b64encode(content).decode()}"
        count //= 2
    return ""


def _csv(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pyarrow.csv.write_csv(without_formulas(table), buffer)
    return buffer.getvalue()
