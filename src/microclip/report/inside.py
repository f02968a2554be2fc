"""Files of a folder, and of no place else: what leads outside is refused, however it is written.

A run's files name other files, and a run may come from anyone. Knows nothing of what is in them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


class OutsideError(ValueError):
    """A name leads out of its folder."""


@contextmanager
def opened(folder: Path, name: str) -> Iterator[IO[bytes]]:
    """Open an ordinary file in a folder for reading; links may not lead out of it."""
    root = folder.resolve()
    try:
        place = (root / name).resolve()
    except (ValueError, RuntimeError) as error:  # a null byte; links that go round in circles
        raise OutsideError(f"{short(name)} is not the name of a file.") from error
    if os.path.isabs(name) or not place.is_relative_to(root):
        raise OutsideError(f"{short(name)} leads out of the run's folder.")
    # not blocking, since a pipe would wait for a writer; not following what became a link just now
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(place, flags | getattr(os, "O_BINARY", 0))
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OutsideError(f"{short(name)} is not an ordinary file.")
        yield file


def short(text: str, length: int = 80) -> str:
    """Return a text in quotes, cut if it is long."""
    return repr(text if len(text) <= length else text[: length - 1] + "…")
