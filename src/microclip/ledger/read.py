"""Reading a ledger batch by batch, so that its length does not matter for memory.

Knows files and columns. Readers see the ledger as it was when they opened it, even if a run keeps
writing to it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from microclip.files import DamagedFileError
from microclip.ledger import storage
from microclip.ledger.storage import Part
from microclip.ledger.tables import (
    AFTER,
    CLASSES,
    EXAMPLES,
    IDS,
    MICROBATCHES,
    RANKS,
    SCHEMAS,
    TABLES,
    WITH_EXAMPLES,
    metadata_of,
    notes_of,
    with_all_columns,
)

BATCH = 2**16  # rows read at once by default
INTEGER_IDS = {"id": pa.int64(), "ids": pa.list_(pa.field("element", pa.int64()))}


def open_ledger(path: str | os.PathLike[str]) -> Record:
    """Open a ledger for reading, as it is now, after checking that it is complete."""
    folder = Path(path)
    _expect_ledger(folder)
    content = storage.read_manifest(folder)
    for _ in range(5):
        try:
            return Record(folder, content)
        except FileNotFoundError:  # its writer removed old parts while we were looking
            continue
    raise OSError(f"Parts of the ledger {folder} keep disappearing while it is being opened.")


@dataclass(frozen=True)
class Footer:
    """What a part says about itself without being read."""

    rows: int
    last: int  # step; the file name may say a later one if the writer was killed while cutting it
    metadata: dict[bytes, bytes]


class Record:
    """A ledger opened for reading.

    >>> record = open_ledger("run/ledger")  # doctest: +SKIP
    >>> for batch in record.microbatches(["step", "norm", "weight"]):  # doctest: +SKIP
    ...     print(batch.num_rows)

    Attributes:
        path: Its folder.
        manifest: What its ledger.json says.
        rows: How many micro-batches it holds.
        notes: What a rule that weights examples said, as (step, text).
        ids_are_integers: Whether every id was an integer; then ids are read as integers.
        classes: How many classes the model tells apart; None if no predictions were recorded.
    """

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path = path
        self.manifest = content
        # In this order: once the micro-batches of a part are there, its examples are too.
        self._parts = {table: storage.find_parts(path / table) for table in TABLES}
        if not self._parts[MICROBATCHES]:
            _raise_empty(path, self._parts[EXAMPLES])
        self._verified: set[Path] = set()  # files that were compared with their checksums
        for part in self._parts[EXAMPLES]:
            self._open(EXAMPLES, part).close()
        footers = {part: self._footer(part) for part in self._parts[MICROBATCHES]}
        self.rows = sum(footer.rows for footer in footers.values())
        self.ids_are_integers = all(f.metadata.get(IDS) == b"integer" for f in footers.values())
        classes = max(int(f.metadata.get(CLASSES, b"0")) for f in footers.values())
        self.classes = classes or None
        said = [note for f in footers.values() for note in notes_of(f.metadata, f.last)]
        # all ranks say the same
        self.notes = tuple(sorted({text: (step, text) for step, text in reversed(said)}.values()))
        self._last_steps = {part.place: footer.last for part, footer in footers.items()}
        self._worlds = {p.place: int(f.metadata.get(RANKS, b"0")) for p, f in footers.items()}
        self._expect_no_gaps({part: footer.metadata for part, footer in footers.items()})

    def __repr__(self) -> str:
        steps = f"steps {self.steps.start} to {self.steps.stop - 1}"
        return f"Record({str(self.path)!r}: {self.rows} micro-batches, {steps})"

    @property
    def steps(self) -> range:
        """From the first step to the last."""
        found = self._parts[MICROBATCHES]
        return range(found[0].first, max(self._last_steps.values()) + 1)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have recorded something."""
        return tuple(sorted({part.rank for part in self._parts[MICROBATCHES]}))

    @property
    def world(self) -> int:
        """How many ranks there were when the last step was written; 0 if it does not say."""
        newest = max(self._parts[MICROBATCHES], key=lambda part: self._last_steps[part.place])
        return self._worlds[newest.place]

    @cached_property
    def complete(self) -> range:
        """From the first step to the last that every rank has written; ranks write by themselves.

        How many ranks there were, each part says. If it does not, since it is older or `record` was
        told the rank, they are the ranks that have written anything.
        """
        unwritten = dict.fromkeys(range(max(self._worlds.values())), 0)  # the next of each rank
        spans: dict[int, tuple[int, int]] = {}  # what was written while there were so many ranks
        for part in self._parts[MICROBATCHES]:
            last, world = self._last_steps[part.place], self._worlds[part.place]
            unwritten[part.rank] = max(unwritten.get(part.rank, 0), last + 1)
            first, before = spans.get(world, (part.first, last))
            spans[world] = min(first, part.first), max(before, last)
        stop = self.steps.stop
        for world, (first, last) in spans.items():
            for rank in range(world) if world else self.ranks:
                if unwritten[rank] <= last:
                    stop = min(stop, max(unwritten[rank], first))
        return range(self.steps.start, max(stop, self.steps.start))

    @property
    def has_examples(self) -> bool:
        """Whether there are per-example losses."""
        return bool(self._parts[EXAMPLES])

    @cached_property
    def domains(self) -> tuple[str, ...]:
        """The names of all domains, sorted; none if no domains were given."""
        names: set[str | None] = set()
        for batch in self.microbatches(["domain"]):
            names.update(pc.unique(batch["domain"]).to_pylist())
        return tuple(sorted(name for name in names if name is not None))

    def microbatches(
        self, columns: Sequence[str] | None = None, batch_size: int = BATCH
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of micro-batches, part by part, sorted by first step and rank."""
        return self._batches(MICROBATCHES, columns, batch_size)

    def examples(
        self, columns: Sequence[str] | None = None, batch_size: int = BATCH
    ) -> Iterator[pa.RecordBatch]:
        """Yield the losses of examples, in the same order; nothing if there are none."""
        return self._batches(EXAMPLES, columns, batch_size)

    def dataset(self, table: str = MICROBATCHES) -> ds.Dataset:
        """Return a table as a pyarrow dataset for your own queries; its ids are strings."""
        _expect_table(table)
        files = [str(self.path / table / part.name) for part in self._parts[table]]
        return ds.dataset(files, schema=SCHEMAS[table], format="parquet")

    def _batches(
        self, table: str, columns: Sequence[str] | None, batch_size: int
    ) -> Iterator[pa.RecordBatch]:
        known = SCHEMAS[table].names
        chosen = known if columns is None else list(columns)
        if unknown := [column for column in chosen if column not in known]:
            raise ValueError(
                f"The columns of {table} are {', '.join(known)}, but got "
                f"{', '.join(map(repr, unknown))}."
            )
        return self._read(table, chosen, batch_size)

    def _read(self, table: str, columns: list[str], batch_size: int) -> Iterator[pa.RecordBatch]:
        for part in self._parts[table]:
            last = self._last_steps[part.place]
            # a writer was killed after removing rows from one table, before the other
            longer = part.last > last
            needed = list(dict.fromkeys([*columns, "step"])) if longer else columns
            with self._open(table, part) as file:
                try:
                    for batch in file.iter_batches(batch_size, columns=needed):
                        if longer:
                            batch = batch.filter(pc.less_equal(batch["step"], last))
                        yield self._with_ids(with_all_columns(batch, table, columns))
                except (pa.ArrowException, OSError) as error:
                    raise storage.damaged_error(self.path / table / part.name, error) from error

    def _with_ids(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        wanted = INTEGER_IDS if self.ids_are_integers else {}
        for place, name in enumerate(batch.schema.names):
            if name in wanted:
                batch = batch.set_column(place, name, batch[name].cast(wanted[name]))
        return batch.replace_schema_metadata()  # so that all batches have the same schema

    def _open(self, table: str, part: Part) -> pq.ParquetFile:
        path = self.path / table / part.name
        try:
            has_checksum = path in self._verified or storage.verify_part(path)
            file = pq.ParquetFile(path)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                error.errno,
                "This part was removed while the ledger was being read, either by its keep_steps "
                "option or by a run that restarted: open the ledger again",
                str(path),
            ) from error
        except DamagedFileError:
            raise
        except (pa.ArrowException, OSError) as error:
            raise storage.damaged_error(path, error) from error
        storage.check_columns(path, table, file.schema_arrow)
        if not has_checksum and self.manifest["version"] != storage.WITHOUT_CHECKSUMS:
            file.close()
            raise storage.damaged_error(path, "it has lost its checksum")
        self._verified.add(path)
        return file

    def _footer(self, part: Part) -> Footer:
        with self._open(MICROBATCHES, part) as file:
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            last = max(group.column(0).statistics.max for group in groups)
            return Footer(file.metadata.num_rows, last, metadata_of(file))

    def _expect_no_gaps(self, metadata: dict[Part, dict[bytes, bytes]]) -> None:
        """Check that no part between two others is missing, nor the examples of a part."""
        for rank in self.ranks:
            own = [part for part in self._parts[MICROBATCHES] if part.rank == rank]
            for before, part in pairwise(own):
                after = metadata[part].get(AFTER, b"").decode()
                if after != str(self._last_steps[before.place]):
                    gap = f"what rank {rank} recorded between {before.name} and {part.name}"
                    raise storage.deleted_error(self.path, gap)
        there = {part.place: part for part in self._parts[EXAMPLES]}
        matching = []
        for part in self._parts[MICROBATCHES]:
            if part.place in there:
                matching.append(there[part.place])
            elif metadata[part].get(WITH_EXAMPLES) == b"yes":
                raise storage.deleted_error(self.path, f"{EXAMPLES}/{part.name}")
        self._parts[EXAMPLES] = matching  # others belong to an unfinished flush


def _expect_ledger(folder: Path) -> None:
    storage.expect_utf8(folder)
    if not folder.exists():
        raise FileNotFoundError(
            f"There is no ledger at {folder}: the folder does not exist. One is written by "
            "Clipper(model, ..., ledger=microclip.Ledger(path)), or by Ledger.record() in a plain "
            "training loop."
        )
    if not folder.is_dir():
        raise NotADirectoryError(f"A ledger is a folder, but {folder} is a file.")
    if not (folder / storage.MANIFEST).exists():
        storage.expect_no_remains(folder)
        raise ValueError(
            f"{folder} is not a ledger: it has no {storage.MANIFEST}. Pass the same folder as to "
            "Ledger(...)."
        )


def _raise_empty(path: Path, examples: list[Part]) -> None:
    if len(examples) > len({part.rank for part in examples}):  # more than one unfinished flush
        raise storage.deleted_error(path, MICROBATCHES)
    raise ValueError(
        f"The ledger {path} is empty: no step has been written yet. Steps are written by a flush: "
        "every flush_every steps, with Clipper.state_dict(), and at the end."
    )


def _expect_table(table: str) -> None:
    if table not in TABLES:
        raise ValueError(f"table must be one of {' and '.join(TABLES)}, but got {table!r}.")
