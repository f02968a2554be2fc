"""Writing results for other tools: CSV, Parquet, data maps, lists of ids.

Knows tables and files; nothing about scores.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from microclip.files import open_whole

FORMULA = r"^[=+\-@\t\r]"
AT_ONCE = 10_000  # rows converted to Python objects at a time


def csv(table: pa.Table, path: str | os.PathLike[str]) -> None:
    """Write a table as CSV that is safe to open in a spreadsheet."""
    with open_whole(path) as file:
        pyarrow.csv.write_csv(without_formulas(table), file)


def without_formulas(table: pa.Table) -> pa.Table:
    """Put an apostrophe before every text that a spreadsheet would run as a formula."""
    for place, field in enumerate(table.schema):
        if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
            table = table.set_column(place, field.name, _quoted(table[field.name]))
    return table


def _quoted(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    quoted = pc.binary_join_element_wise(
        pa.scalar("'", texts.type), texts, pa.scalar("", texts.type)
    )
    return pc.if_else(pc.match_substring_regex(texts, FORMULA), quoted, texts)


def parquet(table: pa.Table, path: str | os.PathLike[str]) -> None:
    """Write a table as Parquet."""
    with open_whole(path) as file:
        pq.write_table(table, file)


def cartography(table: pa.Table, confidence: pa.Table, path: str | os.PathLike[str]) -> None:
    """Write a data map as JSON lines, in the order of the table."""
    with open_whole(path) as file:
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
    """Write ids as a JSON list if the file name ends in .json, else one per line."""
    if Path(path).suffix == ".json":
        with open_whole(path) as file:
            file.write(json.dumps(list(kept)).encode())
        return
    for one in kept:
        if isinstance(one, str) and one.splitlines() != [one]:
            raise ValueError(
                f"The id {one[:50]!r} does not fit on a single line. Write the ids to a file whose "
                "name ends in .json instead."
            )
    with open_whole(path) as file:
        file.writelines(f"{one}\n".encode() for one in kept)
