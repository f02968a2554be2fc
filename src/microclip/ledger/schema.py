"""The columns of the two tables of a ledger, and how they are stored in a Parquet file.

Knows nothing about outcomes or folders. Numbers of a micro-batch are float64; per-example losses,
by far the most numerous, are float32, which is what models compute them in.
"""

from __future__ import annotations

from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

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
            ("norm", pa.float64()),
            ("weight", pa.float64()),
            ("bound", pa.float64()),
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
        ]
    ),
}

# Metadata of a part.
IDS = b"microclip.ids"  # "integer" if every id was one, else "string"
AFTER = b"microclip.after"  # the last step of the part before it; empty for a rank's first part
WITH_EXAMPLES = b"microclip.examples"  # "yes" if EXAMPLES has a part with the same steps

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
    with pq.ParquetWriter(file, table.schema, **options) as writer:
        writer.write_table(table)
        # without store_schema, metadata is not written automatically
        writer.add_key_value_metadata(table.schema.metadata or {})


def metadata_of(file: pq.ParquetFile) -> dict[bytes, bytes]:
    """Return the metadata of a part."""
    found: dict[bytes, bytes] | None = file.metadata.metadata
    return found or {}


def with_metadata(table: pa.Table, **metadata: Any) -> pa.Table:
    """Return a table with this metadata added."""
    new = {f"microclip.{key}".encode(): str(value).encode() for key, value in metadata.items()}
    return table.replace_schema_metadata({**(table.schema.metadata or {}), **new})
