"""Parts: the files of a table. Each holds some steps of one rank and appears whole or not at all.

A part is written under a hidden name and renamed. Going back to an earlier step removes rows,
newest first, so that at no moment a row is there twice, or missing between two others.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from microclip.ledger.schema import SCHEMAS, write_parquet

NAME = re.compile(r"part-(\d{5,})-(\d{10,})-(\d{10,})\.parquet")


@dataclass(frozen=True, order=True)
class Part:
    """Which steps a file holds, of which rank; sorted as training went."""

    first: int
    rank: int
    last: int

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"part-{self.rank:05}-{self.first:010}-{self.last:010}.parquet"

    @property
    def place(self) -> tuple[int, int]:
        """What stays the same when rows are removed at its end."""
        return self.rank, self.first


def find(folder: Path, rank: int | None = None) -> list[Part]:
    """Return the parts in a table's folder, as training went; of one rank, or of all."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    matches = (NAME.fullmatch(name) for name in names)
    parts = (Part(int(m[2]), int(m[1]), int(m[3])) for m in matches if m)
    return sorted(part for part in parts if rank is None or part.rank == rank)


def write(folder: Path, part: Part, table: pa.Table) -> None:
    """Put a part in its place, whole, and see that it stays there if the machine goes down."""
    temporary = folder / f".{part.name}.tmp"
    try:
        with open(temporary, "wb") as file:
            write_parquet(table, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / part.name)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    settle(folder)


def settle(folder: Path) -> None:
    """Let what was renamed or removed in a folder outlast a machine that goes down."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows has no such thing
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path, rank: int) -> None:
    """Remove what a writer of this rank left half written when it was killed."""
    for path in folder.glob(f".part-{rank:05}-*.tmp"):
        path.unlink(missing_ok=True)


def last_step(folder: Path, rank: int) -> int:
    """Return the last step that a rank has in a table, -1 if none, and mend its part's name.

    A writer that was killed while it took rows off a part may have left it with its old name.
    """
    parts = find(folder, rank)
    if not parts:
        return -1
    part = parts[-1]
    steps = read(folder / part.name, columns=["step"])
    return _rename(folder, part, steps).last


def cut_back(folder: Path, rank: int, step: int) -> int:
    """Remove a rank's rows from this step on; return how many parts that touched."""
    touched = 0
    for part in reversed(find(folder, rank)):
        path = folder / part.name
        if part.last < step:
            break
        touched += 1
        if part.first >= step:
            path.unlink()
            continue
        table = read(path)
        kept = table.filter(pc.less(table["step"], step))
        # under its old name first: with a new one, rows would be there twice for a moment
        write(folder, part, kept)
        _rename(folder, part, kept)
    if touched:
        settle(folder)
    return touched


def read(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Return a part's rows, or say that it is damaged."""
    try:
        with pq.ParquetFile(path) as file:
            return file.read(columns=columns)
    except pa.ArrowInvalid as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> ValueError:
    """Return the error to raise for a part that cannot be read."""
    return ValueError(
        f"{path} is damaged, and cannot be read as Parquet ({error}). A ledger's writer puts only "
        "whole files in place, so it was changed or cut short afterwards, perhaps by a copy that "
        "was interrupted: take it from where it is whole, or remove it."
    )


def _rename(folder: Path, part: Part, rows: pa.Table) -> Part:
    """Give a part the name that its rows ask for."""
    last = pc.max(rows["step"]).as_py()  # None: its examples had no losses until the step cut at
    renamed = Part(part.first, part.rank, part.first if last is None else last)
    if renamed != part:
        os.rename(folder / part.name, folder / renamed.name)
    return renamed


def check_columns(path: Path, table: str, found: pa.Schema) -> None:
    """Refuse a file that has other columns than its table."""
    expected = SCHEMAS[table]
    if found.names != expected.names or [f.type for f in found] != [f.type for f in expected]:
        raise ValueError(
            f"{path} has other columns than a ledger's {table}: expected "
            f"{', '.join(expected.names)}, but found {', '.join(found.names)}."
        )
