"""The worst examples of a run as a small table, with their text or picture where it is known.

They come from `microclip.find_issues`, or, where a record is not enough for that, from
`microclip.draggers`. Knows nothing about where the table goes.
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from microclip.draggers import score
from microclip.issues import find_issues
from microclip.ledger import Record
from microclip.report.folder import EXAMPLES
from microclip.report.media import FULL, ByteBudget, LeftOutError, png
from microclip.report.run_data import Content, read_examples

OF_ISSUES = (
    "id",
    "flagged",
    "probability",
    "kind",
    "given_label",
    "suggested_label",
    "confidence",
    "loss",
    "evidence",
)
OF_DRAGGERS = ("id", "score", "loss", "mean_weight", "appearances", "domain")
LONGEST_TEXT = 1000  # characters
MOST_BYTES = 20_000_000  # of pictures in one table
POSITIONS = "positions in the mini-batch"  # what find_issues and score call ids that are no ids

Show = Callable[[Any], Any]


@dataclass(frozen=True)
class Example:
    """One of the worst: its values by column, and what it contains."""

    values: dict[str, Any]
    text: str | None = None
    picture: bytes | None = None  # an image file


@dataclass(frozen=True)
class ExampleTable:
    """The worst examples, the most suspicious first."""

    rows: Sequence[Example] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def columns(self) -> list[str]:
        """The names of columns; text and picture at the end, if any example has one."""
        found = list(self.rows[0].values) if self.rows else []
        return found + [
            name
            for name in ("text", "picture")
            if any(getattr(row, name) is not None for row in self.rows)
        ]


def worst_examples(record: Record, most: int, show: Show | None) -> ExampleTable:
    """Return the worst examples on record.

    Args:
        record: An open ledger.
        most: How many.
        show: Returns the text or the pixels of an example by its id; by default, those in the run
            folder that the ledger belongs to.
    """
    table, notes = _ranked(record)
    if table is None:
        return ExampleTable(notes=notes)
    rows = table.slice(0, most).to_pylist()
    show = show or _described(record, table["id"], [row["id"] for row in rows])
    examples, unshown = [], []
    for row in rows:
        try:
            examples.append(_example(row, show))
        except Exception as error:  # whatever one picture does, training goes on
            examples.append(Example(row))
            unshown.append((row["id"], error))
    return ExampleTable(examples, (*notes, *_not_shown(unshown)))


def _ranked(record: Record) -> tuple[pa.Table | None, tuple[str, ...]]:
    """Return the examples with verdicts, else with scores; None and why if nothing can be said."""
    try:
        with _positions_refused():
            found = find_issues(record)
        return found.table.select(OF_ISSUES), found.notes
    except ValueError as error:
        reason = str(error)
        if POSITIONS in reason.lower():
            return None, (reason,)
    try:
        with _positions_refused():
            scored = score(record)
    except ValueError as error:
        return None, (str(error),)
    there = [name for name in OF_DRAGGERS if name in scored.table.column_names]
    return scored.table.select(there), (f"Ranked by score. {reason}",)


@contextmanager
def _positions_refused() -> Iterator[None]:
    """Raise what others only warn about: a table of ids that are no ids would mislead."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", f".*{POSITIONS}", UserWarning)
        try:
            yield
        except UserWarning as warning:
            raise ValueError(str(warning)) from warning


def _example(row: dict[str, Any], show: Show) -> Example:
    shown = show(row["id"])
    if shown is None:
        return Example(row)
    if isinstance(shown, str):
        text = shown[:LONGEST_TEXT] + "…" * (len(shown) > LONGEST_TEXT)
        return Example(row, text=_encodable(text))
    return Example(row, picture=_decodable(shown if isinstance(shown, bytes) else png(shown)))


def _encodable(text: str) -> str:
    """Return a text with what UTF-8 has no bytes for, lone surrogates, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _decodable(content: bytes) -> bytes:
    """Return the content of an image file, after decoding it to see that this is possible."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as picture:
        picture.convert("RGB")
    return content


def _not_shown(failed: Sequence[tuple[Any, Exception]]) -> Iterator[str]:
    """Say which examples are in the table without what they contain."""
    if not failed:
        return
    ids = ", ".join(repr(one) for one, _ in failed[:3]) + ", ..." * (len(failed) > 3)
    whose = f"example {ids}" if len(failed) == 1 else f"{len(failed)} examples ({ids})"
    error = failed[0][1]
    kind = "" if isinstance(error, LeftOutError) else f"{type(error).__name__}: "
    yield _encodable(f"Text or picture of {whose} cannot be shown: {kind}{error!s:.200}")


def _described(record: Record, known: pa.ChunkedArray, shown: Sequence[Any]) -> Show:
    """Return what the run folder says about examples; nothing if there is none."""
    run = next((f for f in (record.path, record.path.parent) if (f / EXAMPLES).exists()), None)
    if run is None:
        return lambda one: None
    budget = ByteBudget(MOST_BYTES)
    contents = read_examples(run, set(map(str, known.to_pylist())), set(map(str, shown))).contents
    return lambda one: _content(run, contents.get(str(one)), budget)


def _content(run: Path, content: Content | None, budget: ByteBudget) -> str | bytes | None:
    if content is None or content.kind == "audio":
        return None
    if content.kind == "text":
        return content.text
    try:
        media = budget.embed(run, content.file or "", "image", content.checksum)
    except LeftOutError as error:
        if str(error) == FULL:  # which speaks of a page
            raise LeftOutError("The table has reached its size limit.") from error
        raise
    return base64.b64decode(media.uri.partition(",")[2])
