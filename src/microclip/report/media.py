"""Images and sounds as data URIs: small enough, of a kind that browsers know, from inside the run.

What a file is, its first bytes say; its name may say anything. SVG is not among them: it is a
language of its own.
"""

from __future__ import annotations

import base64
import struct
from dataclasses import dataclass
from pathlib import Path

from microclip.report.inside import OutsideError, opened, short

LARGEST_FILE = 400_000  # bytes
FULL = "Not shown: the page is full, and is to stay small enough to be sent."
ENLARGED = 96  # an image of fewer pixels than that is enlarged pixel by pixel

BEGINNINGS = {
    "image": {
        b"\x89PNG\r\n\x1a\n": "image/png",
        b"\xff\xd8\xff": "image/jpeg",
        b"GIF87a": "image/gif",
        b"GIF89a": "image/gif",
        b"BM": "image/bmp",
    },
    "audio": {
        b"ID3": "audio/mpeg",
        b"\xff\xfb": "audio/mpeg",
        b"\xff\xf3": "audio/mpeg",
        b"OggS": "audio/ogg",
        b"fLaC": "audio/flac",
    },
}
IN_RIFF = {"image": {b"WEBP": "image/webp"}, "audio": {b"WAVE": "audio/wav"}}


@dataclass(frozen=True)
class Media:
    """What goes into the page."""

    uri: str
    pixelated: bool = False


class LeftOutError(ValueError):
    """A file is not shown; the message says why."""


class Room:
    """How much may still go into the page."""

    def __init__(self, size: int) -> None:
        self.left = size

    def take(self, size: int) -> bool:
        """Take so many bytes, if they are there."""
        if size > self.left:
            return False
        self.left -= size
        return True

    def embed(self, folder: Path, name: str, kind: str) -> Media:
        """Return a file of a run as a data URI."""
        content = _read(folder, name)
        mime = _mime(content, kind)
        if mime is None:
            article = "an image" if kind == "image" else "a sound"
            raise LeftOutError(f"{short(name)} is not {article} that browsers know.")
        uri = f"data:{mime};base64,{base64.b64encode(content).decode()}"
        if not self.take(len(uri)):
            raise LeftOutError(FULL)
        return Media(uri, kind == "image" and _is_small(content))


def _read(folder: Path, name: str) -> bytes:
    try:
        with opened(folder, name) as file:
            content = file.read(LARGEST_FILE + 1)
    except OutsideError as error:
        raise LeftOutError(str(error)) from error
    except OSError as error:
        raise LeftOutError(
            f"{short(name)} cannot be read ({error.strerror or 'bad name'})."
        ) from error
    if len(content) > LARGEST_FILE:
        raise LeftOutError(f"{short(name)} is larger than {LARGEST_FILE // 1000} KB.")
    return content


def _mime(content: bytes, kind: str) -> str | None:
    if content.startswith(b"RIFF"):
        return IN_RIFF[kind].get(content[8:12])
    if kind == "audio" and content[4:8] == b"ftyp":
        return "audio/mp4"
    for beginning, mime in BEGINNINGS[kind].items():
        if content.startswith(beginning):
            return mime
    return None


def _is_small(content: bytes) -> bool:
    """Say whether an image has so few pixels that each is worth being seen; others are smooth."""
    if content.startswith(b"\x89PNG") and len(content) >= 24:
        width, height = struct.unpack(">II", content[16:24])
    elif content.startswith(b"GIF") and len(content) >= 10:
        width, height = struct.unpack("<HH", content[6:10])
    else:
        return False
    return bool(0 < width <= ENLARGED and 0 < height <= ENLARGED)
