"""Files that a crash cannot leave half written, and lines that one cannot run together."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there complete or not at all."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def append_line(path: Path, line: str) -> None:
    """Add a line; after one that was cut off, begin a new one instead of being lost with it."""
    with path.open("a+b") as file:
        if file.tell() and not _ends_with_newline(file):
            line = "\n" + line
        file.write(f"{line}\n".encode())


def _ends_with_newline(file: Any) -> bool:
    file.seek(-1, 2)
    return bool(file.read(1) == b"\n")
