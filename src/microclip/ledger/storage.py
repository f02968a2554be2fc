"""The folder of a ledger: ledger.json, and the parts of its tables, written atomically.

ledger.json marks a folder as a ledger and records its version and options. A part is a Parquet file
with some steps of one rank, written under a hidden name, synced and renamed. Going back to an
earlier step removes rows, newest first, so that at no time a row exists twice or is missing between
two others. Knows nothing about outcomes.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from microclip.files import (
    DamagedFileError,
    Lock,
    is_intact,
    lock,
    sealed,
    sync_folder,
    write_whole,
)
from microclip.ledger import tables
from microclip.ledger.tables import OPTIONAL, SCHEMAS, TABLES, write_parquet

FORMAT = "microclip-ledger"
VERSION = 3
# Older versions are read and continued.
WITHOUT_PREDICTIONS = 2  # before steps of plain training, which have no norms but predictions
WITHOUT_CHECKSUMS = 1
VERSIONS = (VERSION, WITHOUT_PREDICTIONS, WITHOUT_CHECKSUMS)
MANIFEST = "ledger.json"
PART_NAME = re.compile(r"part-(\d{5,})-(\d{10,})-(\d{10,})\.parquet")


def create_ledger(folder: Path, options: dict[str, Any]) -> None:
    """Turn a folder into a ledger unless it is one; several processes may do so at once."""
    from microclip import __version__

    expect_utf8(folder)
    try:
        if not (folder / MANIFEST).exists():
            expect_no_remains(folder)
        for table in TABLES:
            (folder / table).mkdir(parents=True, exist_ok=True)
        if (folder / MANIFEST).exists():
            return
        content = {
            "format": FORMAT,
            "version": VERSION,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "microclip": __version__,
            "options": options,
        }
        write_whole(folder / MANIFEST, (json.dumps(sealed(content), indent=2) + "\n").encode())
    except OSError as error:
        raise OSError(
            error.errno,
            f"Cannot create a ledger here ({error.strerror}): choose a folder that is writable, or "
            "one that does not exist yet",
            str(folder),
        ) from error


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the content of ledger.json, if this version of microclip understands it."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}). Restore it from a backup, or copy one from another "
            f'ledger of version {VERSION}: it must contain "format": "{FORMAT}".'
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f'{path} does not say "format": "{FORMAT}": this is not a ledger.')
    if content.get("version") in VERSIONS[:-1] and not is_intact(content):
        raise DamagedFileError(
            f"{path} is damaged: it does not have its own checksum. Restore it from a backup, or "
            f"copy one from another ledger of version {VERSION}."
        )
    if content.get("version") not in VERSIONS:
        raise ValueError(
            f"{path} has version {content.get('version')!r}, but this microclip reads versions up "
            f"to {VERSION}. Use the version that wrote it ({content.get('microclip')!r})."
        )
    return content


def expect_utf8(folder: Path) -> None:
    """Refuse a folder that pyarrow could not open."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        shown = str(folder).encode("utf-8", "backslashreplace").decode()
        raise ValueError(
            f"The path {shown} is not valid UTF-8, which Parquet files need. Rename the folder, or "
            "pass a path that is valid, such as a symbolic link to it."
        ) from None


def expect_no_remains(folder: Path) -> None:
    """Refuse a folder that was a ledger and has lost its ledger.json."""
    for table in TABLES:
        if find_parts(folder / table):
            raise deleted_error(folder, MANIFEST)


def deleted_error(folder: Path, what: str) -> ValueError:
    """Return the error to raise for an incomplete ledger."""
    return ValueError(
        f"Part of the ledger {folder} was deleted: {what} is missing. Restore it from a backup. "
        "(You may delete the oldest parts of both tables, but none from the middle.)"
    )


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


def find_parts(folder: Path, rank: int | None = None) -> list[Part]:
    """Return the parts in the folder of a table in training order, of one rank or of all."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    matches = (PART_NAME.fullmatch(name) for name in names)
    parts = (Part(int(m[2]), int(m[1]), int(m[3])) for m in matches if m)
    return sorted(part for part in parts if rank is None or part.rank == rank)


def write_part(folder: Path, part: Part, table: pa.Table) -> None:
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


def remove_leftovers(folder: Path, rank: int) -> None:
    """Remove temporary files left by a writer of this rank that was killed."""
    for path in folder.glob(f".part-{rank:05}-*.tmp"):
        path.unlink(missing_ok=True)


def last_step(folder: Path, rank: int) -> int:
    """Return the last step of a rank in a table, -1 if there is none, and fix its part's name.

    A writer that was killed while removing rows from a part may have left it with its old name.
    """
    parts = find_parts(folder, rank)
    if not parts:
        return -1
    part = parts[-1]
    steps = read_part(folder / part.name, columns=["step"])
    return _rename(folder, part, steps).last


def cut_back(folder: Path, rank: int, step: int) -> int:
    """Remove the rows of a rank from this step on; return how many parts were changed."""
    touched = 0
    for part in reversed(find_parts(folder, rank)):
        path = folder / part.name
        if part.last < step:
            break
        touched += 1
        if part.first >= step:
            path.unlink()
            continue
        table = read_part(path)
        kept = table.filter(pc.less(table["step"], step))
        # under its old name first: with a new one, rows would briefly exist twice
        write_part(folder, part, kept)
        _rename(folder, part, kept)
    if touched:
        sync_folder(folder)
    return touched


def read_part(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Return the rows of a part."""
    verify_part(path)
    try:
        with pq.ParquetFile(path) as file:
            return file.read(columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise damaged_error(path, error) from error


def verify_part(path: Path) -> bool:
    """Compare a part with its checksum; return whether it has one."""
    intact = tables.is_intact(path.read_bytes())
    if intact is False:
        raise damaged_error(path, "its checksum is another one")
    return intact is True


def damaged_error(path: Path, error: object) -> DamagedFileError:
    """Return the error to raise for a part that cannot be read."""
    return DamagedFileError(
        f"{path} is damaged and cannot be read as Parquet ({error}). Ledgers are written file by "
        "file, atomically, so it was changed or truncated later, perhaps by an interrupted copy: "
        "restore it from a backup, or delete it."
    )


def lock_rank(folder: Path, rank: int) -> Lock:
    """Become the only writer of a rank, until the returned lock is closed."""
    taken = FileExistsError(
        f"Rank {rank} of the ledger {folder} already has a writer: another process, or another "
        "Ledger in this one that was not closed. Two would overwrite each other's rows: close() "
        "the first, give each its own folder, or their own rank= in record()."
    )
    return lock(folder / f".lock-{rank:05}", taken)


def _rename(folder: Path, part: Part, rows: pa.Table) -> Part:
    """Rename a part to match its rows."""
    last = pc.max(rows["step"]).as_py()  # None: no example had a loss before the step it was cut at
    renamed = Part(part.first, part.rank, part.first if last is None else last)
    if renamed != part:
        os.rename(folder / part.name, folder / renamed.name)
    return renamed


def check_columns(path: Path, table: str, found: pa.Schema) -> None:
    """Refuse a file whose columns are not those of its table."""
    expected = [f for f in SCHEMAS[table] if f.name in found.names or f.name not in OPTIONAL[table]]
    if [(f.name, f.type) for f in found] != [(f.name, f.type) for f in expected]:
        raise ValueError(
            f"{path} does not have the columns of {table} in a ledger: expected "
            f"{', '.join(SCHEMAS[table].names)}, but found {', '.join(found.names)}."
        )
