"""Files of a run: opened safely, embedded as data URIs, and PNG made from arrays.

A run may come from anyone, and its files name other files: anything that leads out of its folder is
refused. What a file is, its first bytes say; its name may say anything. SVG is left out on purpose,
since it can carry scripts. Knows nothing about what a run means.
"""

from __future__ import annotations

import base64
import math
import os
import stat
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

LARGEST_FILE = 400_000  # bytes
FULL = "Not shown: the page has reached its size limit."
ENLARGED = 96  # images no larger than this, in pixels, are enlarged without smoothing

SIGNATURES = {
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
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
INTEGER_RANGES = (255, 1023, 4095, 16383, 65535)
OVERSHOOT = 0.05
DARKEST_WHITE = 64  # floats that go no higher hardly range from 0 to 255
PNG_COLOR_TYPES = {1: 0, 3: 2, 4: 6}  # by the number of channels: gray, RGB, RGBA


class OutsideError(ValueError):
    """A name that leads out of its folder, or is not the name of a regular file."""


@contextmanager
def safe_open(folder: Path, name: str) -> Iterator[IO[bytes]]:
    """Open a regular file in a folder for reading; links may not lead out of the folder."""
    root = folder.resolve()
    try:
        path = (root / name).resolve()
    except (ValueError, RuntimeError) as error:  # a null byte; a cycle of links
        raise OutsideError(f"{quoted(name)} is not a file name.") from error
    if os.path.isabs(name) or not path.is_relative_to(root):
        raise OutsideError(f"{quoted(name)} leads out of the run's folder.")
    # non-blocking, since a pipe would wait for a writer; no following of a link created just now
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(path, flags | getattr(os, "O_BINARY", 0))
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OutsideError(f"{quoted(name)} is not a regular file.")
        yield file


def quoted(text: str, length: int = 80) -> str:
    """Return a text in quotes, cut if it is long."""
    return repr(text if len(text) <= length else text[: length - 1] + "…")


@dataclass(frozen=True)
class Media:
    """A file as it goes into the page."""

    uri: str
    pixelated: bool = False


class LeftOutError(ValueError):
    """A file is not shown; the message says why."""


class ByteBudget:
    """How many bytes may still go into the page."""

    def __init__(self, size: int) -> None:
        self.left = size

    def take(self, size: int) -> bool:
        """Spend this many bytes, if there are enough left."""
        if size > self.left:
            return False
        self.left -= size
        return True

    def embed(self, folder: Path, name: str, kind: str, checksum: str | None = None) -> Media:
        """Return a file of a run as a data URI, if it is still what its checksum says."""
        content = _read(folder, name)
        if checksum is not None and checksum != f"{zlib.crc32(content):08x}":
            raise LeftOutError(f"{quoted(name)} is damaged: it is not what was written.")
        mime = _mime(content, kind)
        if mime is None:
            what = "an image" if kind == "image" else "a sound"
            raise LeftOutError(f"{quoted(name)} is not {what} in a format that browsers support.")
        uri = f"data:{mime};base64,{base64.b64encode(content).decode()}"
        if not self.take(len(uri)):
            raise LeftOutError(FULL)
        return Media(uri, kind == "image" and _is_small(content))


def _read(folder: Path, name: str) -> bytes:
    try:
        with safe_open(folder, name) as file:
            content = file.read(LARGEST_FILE + 1)
    except OutsideError as error:
        raise LeftOutError(str(error)) from error
    except OSError as error:
        raise LeftOutError(
            f"{quoted(name)} cannot be read ({error.strerror or 'bad name'})."
        ) from error
    if len(content) > LARGEST_FILE:
        raise LeftOutError(f"{quoted(name)} is larger than {LARGEST_FILE // 1000} KB.")
    return content


def _mime(content: bytes, kind: str) -> str | None:
    if content.startswith(b"RIFF"):
        return IN_RIFF[kind].get(content[8:12])
    if kind == "audio" and content[4:8] == b"ftyp":
        return "audio/mp4"
    for signature, mime in SIGNATURES[kind].items():
        if content.startswith(signature):
            return mime
    return None


def _is_small(content: bytes) -> bool:
    """Return whether an image has so few pixels that each should be visible."""
    if content.startswith(b"\x89PNG") and len(content) >= 24:
        width, height = struct.unpack(">II", content[16:24])
    elif content.startswith(b"GIF") and len(content) >= 10:
        width, height = struct.unpack("<HH", content[6:10])
    else:
        return False
    return bool(0 < width <= ENLARGED and 0 < height <= ENLARGED)


def png(pixels: Any, value_range: tuple[float, float] | None = None) -> bytes:
    """Return an array of height x width (x channels) as a PNG file, without an imaging library.

    >>> png([[0, 255]])[:4]
    b'\\x89PNG'

    Args:
        pixels: An array, a nested list or a tensor on the CPU: one channel (gray), three (RGB) or
            four (RGBA), which may come first as well, as in torch.
        value_range: Which values are black and white. By default `pixel_range` finds out.
    """
    import numpy as np  # here, so that the rest of this module needs the standard library only

    array = np.asarray(pixels)
    array = array[:, :, None] if array.ndim == 2 else array
    if array.ndim == 3 and array.shape[2] not in PNG_COLOR_TYPES and array.shape[0] in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    if array.ndim != 3 or array.shape[2] not in PNG_COLOR_TYPES or 0 in array.shape:
        raise ValueError(
            "An image must be an array of height x width, or height x width x 1, 3 or 4 channels, "
            f"but got one of shape {np.shape(pixels)}."
        )
    black, white = pixel_range(array) if value_range is None else _checked_range(value_range)
    numbers = np.nan_to_num(array.astype(np.float64), nan=black, posinf=white, neginf=black)
    values = ((numbers - black) * (255 / (white - black))).clip(0, 255).round().astype(np.uint8)
    height, width, channels = values.shape
    # each line begins with the number of its filter: 0, none
    lines = np.pad(values.reshape(height, -1), ((0, 0), (1, 0))).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, PNG_COLOR_TYPES[channels], 0, 0, 0)
    return (
        PNG_SIGNATURE
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(lines, 9))
        + _chunk(b"IEND", b"")
    )


def pixel_range(array: Any) -> tuple[float, float]:
    """Return which values of an image are black and white, judging by its type and values.

    | pixels | black to white |
    | --- | --- |
    | booleans | False to True |
    | integers from 0 to 255 | 0 to 255 |
    | larger integers, none below 0 | 0 to 1023, 4095, 16383 or 65535, whichever is enough |
    | floats from 0 to 1 | 0 to 1 |
    | floats from -1 to 1 | -1 to 1 |
    | floats from 0 to 255, some above 64 | 0 to 255 |
    | other floats, such as standardized ones | the lowest, or 0 if less, to the highest |

    Resampling may overshoot the ranges of floats by a twentieth. Integers below 0 are refused.
    """
    import numpy as np

    if array.dtype == np.bool_:
        return 0.0, 1.0
    if not (np.issubdtype(array.dtype, np.integer) or np.issubdtype(array.dtype, np.floating)):
        raise ValueError(f"Pixels must be numbers, but got an array of {array.dtype}.")
    known = array[np.isfinite(array)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
    if np.issubdtype(array.dtype, np.integer):
        if low < 0 or high > INTEGER_RANGES[-1]:
            raise ValueError(
                f"Integer pixels must be between 0 and {INTEGER_RANGES[-1]}, but these range from "
                f"{low:.0f} to {high:.0f}. Say which are black and white with value_range=(black, "
                "white)."
            )
        return 0.0, float(next(top for top in INTEGER_RANGES if high <= top))
    for black, white in ((0.0, 1.0), (-1.0, 1.0)):
        if black - OVERSHOOT <= low and high <= white + OVERSHOOT:
            return black, white
    if high > DARKEST_WHITE and low >= -255 * OVERSHOOT and high <= 255 * (1 + OVERSHOOT):
        return 0.0, 255.0
    return (min(low, 0.0), high) if high > low else (low - 1, high)


def _checked_range(value_range: tuple[float, float]) -> tuple[float, float]:
    black, white = map(float, value_range)
    if not (math.isfinite(white - black) and black != white):
        raise ValueError(
            f"value_range must be two different numbers, black and white, but got {value_range!r}."
        )
    return black, white


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)
