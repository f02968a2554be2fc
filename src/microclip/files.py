"""Writing files so that a crash never leaves half a file, and appending lines that survive one.

Knows nothing about what is in the files.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def open_whole(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a temporary file for writing and rename it to `path` once the block has succeeded."""
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"Cannot write {target}: {target.parent} is not a folder.")
    temporary = target.parent / f".{secrets.token_hex(16)}.tmp"
    try:
        with temporary.open("wb") as file:
            yield file
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file atomically: readers see the old content or the new, never half of it."""
    with open_whole(path) as file:
        file.write(content)


def append_line(path: Path, line: str) -> None:
    """Append a line; if the last one was cut off by a crash, start a new line after it."""
    with path.open("a+b") as file:
        if file.tell() and not _ends_with_newline(file):
            line = "\n" + line
        file.write(f"{line}\n".encode())


def _ends_with_newline(file: IO[bytes]) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"
