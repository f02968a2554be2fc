"""Reading a review from CSV or JSON, and checking it: every verdict known, one for each example.

Knows files; what follows from the verdicts is up to `result`.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from microclip.review.result import DROP, KEEP, RELABEL, VERDICTS, Id, Label, Review

FORMAT, VERSION = "microclip-review", 1
INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,18})")
LARGEST = 2**63  # ledgers and tables hold integers of 64 bits; larger ones are texts
ESCAPED = re.compile(r"'+[=+\-@\t\r]")  # an apostrophe was put before it for spreadsheets
DELIMITERS = ",;\t"

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Entry:
    """A verdict as the file has it."""

    place: str  # "line 3", for messages
    id: Id
    verdict: str
    label: str
    from_json: bool = False


@dataclass(frozen=True)
class RunIds:
    """What a run knows about its examples."""

    ids: Sequence[Id]
    classes: int | None
    name: str


def read_review(path: PathLike, run: PathLike | None = None) -> Review:
    """Read the verdicts that were exported from the page, or written by other means.

    >>> review = read_review("review-digits.csv", run="runs/digits")  # doctest: +SKIP
    >>> kept = torch.utils.data.Subset(dataset, review.kept_ids())  # doctest: +SKIP

    Args:
        path: A CSV file with the columns id and verdict ("keep", "relabel" or "drop"), and label
            for relabeled examples; other columns are ignored, and so are rows without a verdict.
            Or the JSON file that the page exports.
        run: The folder of the run or its ledger. With it, every id must be one of the run, new
            labels must be among its classes, and `Review.kept_ids` knows all ids.
    """
    file = Path(path)
    entries = list(_entries(file))
    if not entries:
        raise ValueError(f"{file} has no verdicts: review some examples and export them again.")
    known = None if run is None else _read_run(Path(run))
    integers = _ids_are_integers(entries, known)
    verdicts: dict[Id, str] = {}
    seen: dict[Id, Entry] = {}
    for entry in entries:
        number = _integer(str(entry.id)) if integers else None
        one: Id = str(entry.id) if number is None else number
        _expect_verdict(file, entry)
        if (other := seen.setdefault(one, entry)) and _differ(entry, other):
            raise ValueError(
                f"{file}: the example {one!r} has two verdicts, {_said(other)} in {other.place} "
                f"and {_said(entry)} in {entry.place}. Leave only one of them."
            )
        verdicts[one] = entry.verdict
    texts = {one: entry.label for one, entry in seen.items() if entry.verdict == RELABEL}
    if known is not None:
        _expect_ids(file, seen, known)
    return Review(verdicts, _labels(file, texts, known), None if known is None else known.ids)


def _entries(path: Path) -> Iterator[Entry]:
    expected = "Pass the CSV or JSON file that the page of microclip report exports"
    if path.is_dir():
        raise IsADirectoryError(
            f"A review is a file, but {path} is a folder. {expected}; the folder of the run goes "
            "after --run, or run=."
        )
    if not path.exists():
        raise FileNotFoundError(f"There is no review at {path}. {expected}.")
    try:
        text = path.read_bytes().decode("utf-8-sig")  # spreadsheets put a byte order mark in front
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text ({error.reason}). Spreadsheets call the right format CSV "
            "UTF-8: save it as that."
        ) from error
    if not text.strip():
        raise ValueError(f"{path} is empty: export the review again.")
    return _from_json(path, text) if text.lstrip()[0] in "[{" else _from_csv(path, text)


def _from_csv(path: Path, text: str) -> Iterator[Entry]:
    first = text.lstrip("\r\n").split("\n", 1)[0]
    delimiter = max(DELIMITERS, key=first.count)
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        headings = [name.strip().lower() for name in next(row for row in rows if row)]
        for needed in ("id", "verdict"):
            if headings.count(needed) != 1:
                raise ValueError(
                    f"{path} must have one column {needed!r}, but its first line names "
                    f"{', '.join(map(repr, headings[:10]))}."
                )
        for row in rows:
            place = f"line {rows.line_num}"
            if not any(row):
                continue
            if len(row) != len(headings):
                raise ValueError(
                    f"{path}: {place} has {len(row)} values, but there are {len(headings)} columns."
                )
            values = {name: _restored(value) for name, value in zip(headings, row, strict=True)}
            if values["verdict"].strip():
                yield Entry(
                    place,
                    values["id"],
                    values["verdict"].strip().lower(),
                    values.get("label", "").strip(),
                )
    except csv.Error as error:
        raise ValueError(f"{path} is not CSV: {error} in line {rows.line_num}.") from error


def _restored(value: str) -> str:
    """Remove the apostrophe that keeps spreadsheets from running a text as a formula."""
    return value[1:] if ESCAPED.match(value) else value


def _from_json(path: Path, text: str) -> Iterator[Entry]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}.") from error
    if isinstance(content, dict):
        if content.get("format") != FORMAT:
            raise ValueError(f'{path} does not say "format": "{FORMAT}": this is not a review.')
        if content.get("version") != VERSION:
            raise ValueError(
                f"{path} has version {content.get('version')!r}, but this microclip reads version "
                f"{VERSION}."
            )
        content = content.get("reviews")
    if not isinstance(content, list):
        raise ValueError(f"{path} has no list of verdicts.")
    for place, one in enumerate(content, start=1):
        yield _entry(path, f"entry {place}", one)


def _entry(path: Path, place: str, content: Any) -> Entry:
    if not isinstance(content, dict) or not _is_id(content.get("id")):
        raise ValueError(
            f"{path}: {place} must be an object with an id, an integer or a string, but is "
            f"{json.dumps(content)[:80]}."
        )
    verdict, label = content.get("verdict"), content.get("label")
    if isinstance(label, bool | list | dict):
        raise ValueError(
            f"{path}: {place} gives the example {content['id']!r} the label "
            f"{json.dumps(label)[:50]}, but labels are integers or strings."
        )
    new = "" if label is None else str(label).strip()
    return Entry(place, content["id"], str(verdict).lower(), new, from_json=True)


def _is_id(value: object) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)


def _expect_verdict(path: Path, entry: Entry) -> None:
    if entry.verdict not in VERDICTS:
        raise ValueError(
            f"{path}: {entry.place} has the verdict {entry.verdict[:50]!r} for the example "
            f"{entry.id!r}, but verdicts are {KEEP}, {RELABEL} and {DROP}."
        )
    if entry.verdict == RELABEL and not entry.label:
        raise ValueError(
            f"{path}: {entry.place} relabels the example {entry.id!r}, but has no label."
        )


def _differ(entry: Entry, other: Entry) -> bool:
    return entry.verdict != other.verdict or (
        entry.verdict == RELABEL and entry.label != other.label
    )


def _said(entry: Entry) -> str:
    return f"relabel {entry.label}" if entry.verdict == RELABEL else entry.verdict


def _ids_are_integers(entries: Sequence[Entry], known: RunIds | None) -> bool:
    """Return whether to read ids as integers, which CSV does not tell from strings."""
    if known is not None:
        return isinstance(known.ids[0], int)
    if any(isinstance(entry.id, str) and entry.from_json for entry in entries):
        return False
    return all(_integer(str(entry.id)) is not None for entry in entries)


def _integer(text: str) -> int | None:
    number = int(text) if INTEGER.fullmatch(text) else None
    return number if number is not None and -LARGEST <= number < LARGEST else None


def _labels(path: Path, texts: dict[Id, str], known: RunIds | None) -> dict[Id, Label]:
    # pandas writes 1.0 for 1 in a column with gaps
    numbers = {one: _integer(text.removesuffix(".0")) for one, text in texts.items()}
    classes = None if known is None else known.classes
    if known is not None and classes is not None:
        for one, number in numbers.items():
            if number is None or not 0 <= number < classes:
                raise ValueError(
                    f"{path} gives the example {one!r} the label {texts[one][:50]}, but the model "
                    f"of {known.name} has the classes 0 to {classes - 1}."
                )
    integers: dict[Id, Label] = {one: n for one, n in numbers.items() if n is not None}
    return integers if len(integers) == len(texts) else dict(texts)


def _expect_ids(path: Path, seen: dict[Id, Entry], known: RunIds) -> None:
    if missing := seen.keys() - set(known.ids):
        places = [f"{one!r} in {entry.place}" for one, entry in seen.items() if one in missing]
        verb = "is" if len(missing) == 1 else "are"
        raise ValueError(
            f"{len(missing):,} of the {len(seen):,} ids in {path} {verb} not in the run "
            f"{known.name}: "
            f"{', '.join(places[:3])}{', ...' if len(places) > 3 else ''}. "
            + (
                "This is the review of another run."
                if len(missing) == len(seen) > 1
                else f"Correct them: ids are like {known.ids[0]!r}."
            )
        )


def _read_run(path: Path) -> RunIds:
    """Return all ids of a run, in ascending order."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from microclip.ledger import open_ledger
    from microclip.report.runs import read_run

    ledger = read_run(path).ledger
    if ledger is None:
        raise ValueError(f"The run {path} has no ledger, so its ids are unknown.")
    record = open_ledger(ledger)
    ids = pa.chunked_array([pc.unique(b["ids"].flatten()) for b in record.microbatches(["ids"])])
    return RunIds(sorted(pc.unique(ids).to_pylist()), record.classes, str(path))
