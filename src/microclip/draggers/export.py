"""Files for others: CSV, Parquet, data maps, lists of ids. Each appears whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

FORMULA = r"^[=+\-@\t\r]"
AT_ONCE = 10_000


@contextmanager
def written(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Give a file to write to, and put it in its place when all is in it."""
    place = Path(path)
    if not place.parent.is_dir():
        raise FileNotFoundError(f"{place} cannot be written: {place.parent} is not a folder.")
    temporary = place.parent / f".{uuid4().hex}.tmp"
    try:
        with temporary.open("wb") as file:
            yield file
        os.replace(temporary, place)
    finally:
        temporary.unlink(missing_ok=True)


def csv(table: pa.Table, path: str | os.PathLike[str]) -> None:
    """Write a table as CSV, its texts harmless to spreadsheets."""
    for place, field in enumerate(table.schema):
        if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
            table = table.set_column(place, field.name, harmless(table[field.name]))
    with written(path) as file:
        pyarrow.csv.write_csv(table, file)


def harmless(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Put an apostrophe before what a spreadsheet would take for a formula."""
    quoted = pc.binary_join_element_wise(
        pa.scalar("'", texts.type), texts, pa.scalar("", texts.type)
    )
    return pc.if_else(pc.match_substring_regex(texts, FORMULA), quoted, texts)


def parquet(table: pa.Table, path: str | os.PathLike[str]) -> None:
    """Write a table as Parquet."""
    with written(path) as file:
        pq.write_table(table, file)


def cartography(table: pa.Table, confidence: pa.Table, path: str | os.PathLike[str]) -> None:
    """Write a data map as lines of JSON, in the order of the table."""
    with written(path) as file:
        for start in range(0, len(table), AT_ONCE):
            rows = zip(
                table["id"].slice(start, AT_ONCE).to_pylist(),
                confidence["confidence"].slice(start, AT_ONCE).to_pylist(),
                confidence["variability"].slice(start, AT_ONCE).to_pylist(),
                table["appearances"].slice(start, AT_ONCE).to_pylist(),
                strict=True,
            )
            for guid, mean, deviation, appearances in rows:
                line = {
                    "guid": guid,
                    "confidence": mean,
                    "variability": deviation,
                    "appearances": appearances,
                }
                file.write(f"{json.dumps(line)}\n".encode())


def ids(kept: Sequence[int | str], path: str | os.PathLike[str]) -> None:
    """Write ids: as JSON if the name ends so, else one per line."""
    if Path(path).suffix == ".json":
        with written(path) as file:
            file.write(json.dumps(list(kept)).encode())
        return
    for one in kept:
        if isinstance(one, str) and one.splitlines() != [one]:
            raise ValueError(
                f"The id {one[:50]!r} cannot stand on a line of its own. Write the ids to a file "
                "whose name ends with .json."
            )
    with written(path) as file:
        file.writelines(f"{one}\n".encode() for one in kept)
