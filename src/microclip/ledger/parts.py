"""Parts: the Parquet files of a table, each with some steps of one rank, written atomically.

A part is written under a hidden name, synced and renamed. Going back to an earlier step removes
rows, newest first, so that at no time a row exists twice or is missing between two others.
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
    """Which steps of which rank a file holds; sorts in training order."""

    first: int
    rank: int
    last: int

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"part-{self.rank:05}-{self.first:010}-{self.last:010}.parquet"

    @property
    def place(self) -> tuple[int, int]:
        """What stays the same when rows are removed from its end."""
        return self.rank, self.first


def find(folder: Path, rank: int | None = None) -> list[Part]:
    """Return the parts in the folder of a table in training order, of one rank or of all."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    matches = (NAME.fullmatch(name) for name in names)
    parts = (Part(int(m[2]), int(m[1]), int(m[3])) for m in matches if m)
    return sorted(part for part in parts if rank is None or part.rank == rank)


def write(folder: Path, part: Part, table: pa.Table) -> None:
    """Write a part atomically and sync it, so that it survives a power failure."""
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
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Sync renames and removals in a folder to disk."""
    if not hasattr(os, "O_DIRECTORY"):  # not available on Windows
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path, rank: int) -> None:
    """Remove temporary files left by a writer of this rank that was killed."""
    for path in folder.glob(f".part-{rank:05}-*.tmp"):
        path.unlink(missing_ok=True)


def last_step(folder: Path, rank: int) -> int:
    """Return the last step of a rank in a table, -1 if there is none, and fix its part's name.

    A writer that was killed while removing rows from a part may have left it with its old name.
    """
    parts = find(folder, rank)
    if not parts:
        return -1
    part = parts[-1]
    steps = read(folder / part.name, columns=["step"])
    return _rename(folder, part, steps).last


def cut_back(folder: Path, rank: int, step: int) -> int:
    """Remove the rows of a rank from this step on; return how many parts were changed."""
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
        # under its old name first: with a new one, rows would briefly exist twice
        write(folder, part, kept)
        _rename(folder, part, kept)
    if touched:
        sync_folder(folder)
    return touched


def read(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Return the rows of a part."""
    try:
        with pq.ParquetFile(path) as file:
            return file.read(columns=columns)
    except pa.ArrowInvalid as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> ValueError:
    """Return the error to raise for a part that cannot be read."""
    return ValueError(
        f"{path} is damaged and cannot be read as Parquet ({error}). Ledgers are written file by "
        "file, atomically, so it was changed or truncated later, perhaps by an interrupted copy: "
        "restore it from a backup, or delete it."
    )


def _rename(folder: Path, part: Part, rows: pa.Table) -> Part:
    """Rename a part to match its rows."""
    last = pc.max(rows["step"]).as_py()  # None: no example had a loss before the step it was cut at
    renamed = Part(part.first, part.rank, part.first if last is None else last)
    if renamed != part:
        os.rename(folder / part.name, folder / renamed.name)
    return renamed


def check_columns(path: Path, table: str, found: pa.Schema) -> None:
    """Refuse a file whose columns are not those of its table."""
    expected = SCHEMAS[table]
    if found.names != expected.names or [f.type for f in found] != [f.type for f in expected]:
        raise ValueError(
            f"{path} does not have the columns of {table} in a ledger: expected "
            f"{', '.join(expected.names)}, but found {', '.join(found.names)}."
        )
