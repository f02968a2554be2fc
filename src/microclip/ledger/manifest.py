"""ledger.json, which marks a folder as a ledger and records its version and options.

Knows nothing about rows or columns.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from microclip.files import write_whole
from microclip.ledger import parts
from microclip.ledger.schema import TABLES

FORMAT = "microclip-ledger"
VERSION = 1
NAME = "ledger.json"


def create(folder: Path, options: dict[str, Any]) -> None:
    """Turn a folder into a ledger unless it is one; several processes may do so at once."""
    from microclip import __version__

    try:
        if not (folder / NAME).exists():
            expect_no_remains(folder)
        for table in TABLES:
            (folder / table).mkdir(parents=True, exist_ok=True)
        if (folder / NAME).exists():
            return
        content = {
            "format": FORMAT,
            "version": VERSION,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "microclip": __version__,
            "options": options,
        }
        write_whole(folder / NAME, (json.dumps(content, indent=2) + "\n").encode())
    except OSError as error:
        raise OSError(
            error.errno,
            f"Cannot create a ledger here ({error.strerror}): choose a folder that is writable, or "
            "one that does not exist yet",
            str(folder),
        ) from error


def read(folder: Path) -> dict[str, Any]:
    """Return the content of ledger.json, if this version of microclip understands it."""
    path = folder / NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}). Restore it from a backup, or copy one from another "
            f'ledger of version {VERSION}: it must contain "format": "{FORMAT}".'
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f'{path} does not say "format": "{FORMAT}": this is not a ledger.')
    if content.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {content.get('version')!r}, but this microclip reads and writes "
            f"version {VERSION}. Use the version that wrote it ({content.get('microclip')!r})."
        )
    return content


def expect_no_remains(folder: Path) -> None:
    """Refuse a folder that was a ledger and has lost its ledger.json."""
    for table in TABLES:
        if parts.find(folder / table):
            raise deleted(folder, NAME)


def deleted(folder: Path, what: str) -> ValueError:
    """Return the error to raise for an incomplete ledger."""
    return ValueError(
        f"Part of the ledger {folder} was deleted: {what} is missing. Restore it from a backup. "
        "(You may delete the oldest parts of both tables, but none from the middle.)"
    )
