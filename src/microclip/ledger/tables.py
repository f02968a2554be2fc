"""The two tables of a ledger: their columns, and the rows that outcomes become.

Many steps are converted at once, with a single transfer from the device. Numbers of a micro-batch
are float64; per-example losses, by far the most numerous, are float32, which is what models compute
them in. Ids and domains of any type become strings through `str()`; what UTF-8 cannot encode (lone
surrogates) is escaped. What rules that weight examples say is kept in the metadata of a part. Knows
nothing about folders.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from itertools import chain
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from microclip.ledger.arrays import arrow, ids_array, integers, texts_array, with_nulls
from microclip.ledger.predictions import FIELDS, prediction_columns
from microclip.outcome import Outcome

MICROBATCHES = "microbatches"
EXAMPLES = "examples"
TABLES = (MICROBATCHES, EXAMPLES)

SCHEMAS = {
    MICROBATCHES: pa.schema(
        [
            ("step", pa.int64()),
            ("rank", pa.int32()),
            ("microbatch", pa.int32()),  # position within rank and step
            ("ids", pa.list_(pa.field("element", pa.string()))),
            ("size", pa.int32()),
            ("norm", pa.float64()),  # null: a step of plain training
            ("weight", pa.float64()),
            ("bound", pa.float64()),  # null: as norm
            ("domain", pa.string()),  # null: no domains were given
            ("loss", pa.float64()),  # null: not given
            ("skipped", pa.bool_()),
        ]
    ),
    EXAMPLES: pa.schema(
        [
            ("step", pa.int64()),
            ("rank", pa.int32()),
            ("microbatch", pa.int32()),
            ("id", pa.string()),
            ("loss", pa.float32()),
            ("weight", pa.float32()),  # left out of parts whose rule does not weight examples
            *FIELDS,  # left out of parts for which nobody recorded predictions
        ]
    ),
}
PREDICTIONS = tuple(name for name, _ in FIELDS)
OPTIONAL = {MICROBATCHES: (), EXAMPLES: ("weight", *PREDICTIONS)}  # null where a part has none

# Metadata of a part.
IDS = b"microclip.ids"  # "integer" if every id was one, else "string"
AFTER = b"microclip.after"  # the last step of the part before it; empty for a rank's first part
WITH_EXAMPLES = b"microclip.examples"  # "yes" if EXAMPLES has a part with the same steps
CLASSES = b"microclip.classes"  # how many the model tells apart; 0 or nothing: unknown
RANKS = b"microclip.ranks"  # how many there were; 0 or nothing: unknown
NOTES = b"microclip.notes"  # JSON, [[step, text], ...]: what a rule that weights examples said

CHECKSUM = b"microclip.crc32"  # of the whole file, with NO_CHECKSUM in the place of this value
NO_CHECKSUM = b"00000000"
FOOTER = 2**16  # bytes at the end of a file where its metadata is

REPEATED = ["step", "rank", "microbatch", "size", "domain", "id", "ids.list.element"]


def write_parquet(table: pa.Table, file: IO[bytes]) -> None:
    """Write a table as one Parquet file."""
    options: dict[str, Any] = {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": [c for c in REPEATED if c.split(".")[0] in table.column_names],
        "write_statistics": ["step", "rank"],  # for ids they would repeat strings of any length
        "store_schema": False,  # else readers would see dictionary types
    }
    stream = pa.BufferOutputStream()
    with pq.ParquetWriter(stream, table.schema, **options) as writer:
        writer.write_table(table)
        # without store_schema, metadata is not written automatically
        writer.add_key_value_metadata({**(table.schema.metadata or {}), CHECKSUM: NO_CHECKSUM})
    content = memoryview(stream.getvalue())
    place = _checksum_place(content)
    assert place is not None
    file.write(content[:place])
    file.write(_checksum(content, place))
    file.write(content[place + len(NO_CHECKSUM) :])


def is_intact(content: bytes) -> bool | None:
    """Return whether a Parquet file is what `write_parquet` wrote; None if it has no checksum."""
    view = memoryview(content)
    place = _checksum_place(view)
    if place is None:
        return None
    return view[place : place + len(NO_CHECKSUM)] == _checksum(view, place)


def _checksum_place(content: memoryview) -> int | None:
    """Return where the checksum is: after its key, behind two bytes of Thrift."""
    footer = content[-FOOTER:].tobytes()
    key = footer.rfind(CHECKSUM)
    if key < 0:
        return None
    return len(content) - len(footer) + key + len(CHECKSUM) + 2


def _checksum(content: memoryview, place: int) -> bytes:
    before = zlib.crc32(NO_CHECKSUM, zlib.crc32(content[:place]))
    return b"%08x" % zlib.crc32(content[place + len(NO_CHECKSUM) :], before)


def metadata_of(file: pq.ParquetFile) -> dict[bytes, bytes]:
    """Return the metadata of a part."""
    found: dict[bytes, bytes] | None = file.metadata.metadata
    return found or {}


def with_metadata(table: pa.Table, **metadata: Any) -> pa.Table:
    """Return a table with this metadata added."""
    new = {f"microclip.{key}".encode(): str(value).encode() for key, value in metadata.items()}
    return table.replace_schema_metadata({**(table.schema.metadata or {}), **new})


def tables(outcomes: Sequence[Outcome], rank: int, examples: bool) -> dict[str, pa.Table]:
    """Return the rows of some steps, none of them empty, for each table that gets any."""
    groups = list(chain.from_iterable(outcome.ids for outcome in outcomes))
    counts = integers(len(outcome.ids) for outcome in outcomes)
    sizes = integers(map(len, groups))
    steps = integers(outcome.step for outcome in outcomes).repeat_interleave(counts)
    places = torch.arange(len(groups)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    ids, are_integers = ids_array(list(chain.from_iterable(groups)), alone=len(outcomes) == 1)
    norms, weights, bounds, losses, each = _to_host(outcomes, examples)
    skipped = torch.cat([outcome.skipped for outcome in outcomes]).cpu()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    found = {
        MICROBATCHES: table_of(
            MICROBATCHES,
            [
                arrow(steps),
                arrow(torch.full_like(steps, rank).int()),
                arrow(places.int()),
                pa.ListArray.from_arrays(arrow(offsets.int()), ids),
                arrow(sizes.int()),
                arrow(norms),
                arrow(weights),
                arrow(bounds),
                _domains(outcomes),
                with_nulls(losses, [o.losses is not None for o in outcomes], counts),
                arrow(skipped.to(torch.uint8)).cast(pa.bool_()),
            ],
        )
    }
    if each is not None:
        known = torch.tensor([o.example_losses is not None for o in outcomes])
        rows = known.repeat_interleave(counts).repeat_interleave(sizes)
        steps, places = (c.repeat_interleave(sizes)[rows] for c in (steps, places))
        columns = {
            "step": arrow(steps),
            "rank": arrow(torch.full_like(steps, rank).int()),
            "microbatch": arrow(places.int()),
            "id": ids
            if bool(known.all())
            else ids.filter(arrow(rows.to(torch.uint8)).cast("bool")),
            "loss": arrow(each.float()),
        }
        if any(o.example_weights is not None for o in outcomes):
            columns["weight"] = _example_weights(outcomes)
        predicted = _predictions(outcomes)
        if predicted is not None:
            columns |= prediction_columns(predicted)
        found[EXAMPLES] = pa.table(columns)
    kind = "integer" if are_integers else "string"
    with_examples = "yes" if EXAMPLES in found else "no"
    if notes := _notes(outcomes):
        found[MICROBATCHES] = with_metadata(found[MICROBATCHES], notes=json.dumps(notes))
    classes = max(outcome.classes for outcome in outcomes)
    return {
        name: with_metadata(table, ids=kind, examples=with_examples, classes=classes)
        for name, table in found.items()
    }


def with_all_columns(batch: pa.RecordBatch, table: str, columns: Sequence[str]) -> pa.RecordBatch:
    """Return these columns, in this order; those that the part does not have are null."""
    there = batch.schema.names
    found = [
        batch[name] if name in there else pa.nulls(len(batch), SCHEMAS[table].field(name).type)
        for name in columns
    ]
    return pa.RecordBatch.from_arrays(found, names=list(columns))


def _example_weights(outcomes: Sequence[Outcome]) -> pa.Array:
    """Return the weights of examples that have a loss."""
    shown = [o for o in outcomes if o.example_losses is not None]
    losses = [o.example_losses for o in shown if o.example_losses is not None]
    weights = [
        torch.ones(len(of)) if o.example_weights is None else o.example_weights.cpu().float()
        for o, of in zip(shown, losses, strict=True)
    ]
    known = [o.example_weights is not None for o in shown]
    return with_nulls(torch.cat(weights), known, integers(map(len, losses)))


def _predictions(outcomes: Sequence[Outcome]) -> Tensor | None:
    """Return what was predicted of examples that have a loss, NaN where nothing is known."""
    shown = [o for o in outcomes if o.example_losses is not None]
    if all(o.predictions is None for o in shown):
        return None
    parts = [
        torch.full((4, len(o.example_losses)), torch.nan)  # type: ignore[arg-type]
        if o.predictions is None
        else o.predictions
        for o in shown
    ]
    if len({part.device for part in parts}) > 1:
        parts = [part.cpu() for part in parts]
    return torch.cat(parts, 1).cpu()


def _notes(outcomes: Sequence[Outcome]) -> list[tuple[int, str]]:
    """Return what was said for the first time, and when; only for rules that weight examples."""
    found: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.example_weights is not None:
            for note in outcome.notes:
                found.setdefault(note, outcome.step)
    return [(step, note) for note, step in found.items()]


def notes_of(metadata: dict[bytes, bytes], last: int) -> list[tuple[int, str]]:
    """Return the notes of a part up to its last step; later ones were cut off with their rows."""
    return [(step, note) for step, note in json.loads(metadata.get(NOTES, b"[]")) if step <= last]


def _to_host(outcomes: Sequence[Outcome], examples: bool) -> tuple[Any, ...]:
    """Return norms, weights, bounds, losses and per-example losses (or None) on the host."""
    columns: list[list[Tensor]] = [
        [outcome.norms for outcome in outcomes],
        [outcome.weights for outcome in outcomes],
        [outcome.bounds for outcome in outcomes],
        [torch.zeros_like(o.norms) if o.losses is None else o.losses for o in outcomes],
        [o.example_losses for o in outcomes if examples and o.example_losses is not None],
    ]
    with torch.no_grad():
        joined = [torch.cat(column) for column in columns if column]
        together = torch.cat(joined).cpu().double()  # the only time the host waits
    parts = torch.split(together, [len(column) for column in joined])
    return *parts[:4], parts[4] if len(parts) == 5 else None


def _domains(outcomes: Sequence[Outcome]) -> pa.Array:
    domains = list(chain.from_iterable(outcome.domains for outcome in outcomes))
    if set(map(type, domains)) == {type(None)}:
        return pa.nulls(len(domains), pa.string())
    return texts_array([None if domain is None else str(domain) for domain in domains])


def table_of(name: str, columns: list[pa.Array]) -> pa.Table:
    """Return columns as a table; optional ones at the end may be left out."""
    return pa.Table.from_arrays(columns, names=SCHEMAS[name].names[: len(columns)])
