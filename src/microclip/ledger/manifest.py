"""ledger.json: what makes a folder a ledger, of which version, and with which options."""

from __future__ import annotations

import json
import os
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from microclip.ledger import parts
from microclip.ledger.schema import TABLES

FORMAT = "microclip-ledger"
VERSION = 1
NAME = "ledger.json"


def create(folder: Path, options: dict[str, Any]) -> None:
    """Make the folder a ledger, unless it is one; several processes may do so at once."""
    from microclip import __version__

    try:
        if not (folder / NAME).exists():
            expect_no_remains(folder)
        for table in TABLES:
            (folder / table).mkdir(parents=True, exist_ok=True)
        if (folder / NAME).exists():
            return
        said = {
            "format": FORMAT,
            "version": VERSION,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "microclip": __version__,
            "options": options,
        }
        temporary = folder / f".{NAME}-{os.getpid()}-{secrets.token_hex(4)}.tmp"
        temporary.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, folder / NAME)
    except OSError as error:
        raise OSError(
            error.errno,
            f"A ledger cannot be kept here ({error.strerror}): give a folder that can be "
            "written to, or one that does not exist yet",
            str(folder),
        ) from error


def read(folder: Path) -> dict[str, Any]:
    """Return what ledger.json says, if it is one that this version understands."""
    path = folder / NAME
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}). Take it from a copy, or from another ledger of the "
            f'same version: it must say {{"format": "{FORMAT}", "version": {VERSION}}}.'
        ) from error
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise ValueError(f'{path} does not say "format": "{FORMAT}": this is not a ledger.')
    if said.get("version") != VERSION:
        raise ValueError(
            f"{path} is of version {said.get('version')!r}, but this microclip reads and writes "
            f"version {VERSION}. Use the microclip that wrote it ({said.get('microclip')!r})."
        )
    return said


def expect_no_remains(folder: Path) -> None:
    """Refuse a folder that was a ledger, and has lost what says so."""
    for table in TABLES:
        if parts.find(folder / table):
            raise deleted(folder, NAME)


def deleted(folder: Path, what: str) -> ValueError:
    """Return the error to raise for a ledger that is not all there."""
    return ValueError(
        f"A part of the ledger {folder} was deleted: {what} is missing. Put it back from a copy. "
        "(The oldest parts may be removed, of both tables; not those between others.)"
    )
