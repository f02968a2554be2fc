"""Pictures of arrays: the smallest PNG writer that does, so that no imaging library is needed."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np

SIGNATURE = b"\x89PNG\r\n\x1a\n"
COLOUR_TYPES = {1: 0, 3: 2, 4: 6}  # by the number of channels: grey, RGB, RGBA


def png(pixels: Any) -> bytes:
    """Return an array of height x width (x channels) as a PNG file.

    >>> png([[0, 255]])[:4]
    b'\\x89PNG'

    Args:
        pixels: An array, a nested list or a tensor on the CPU. Whole numbers are taken for 0 to
            255, others for 0 to 1; what lies beyond is cut off. One channel (grey), three or four.
    """
    array = np.asarray(pixels)
    array = array[:, :, None] if array.ndim == 2 else array
    if array.ndim != 3 or array.shape[2] not in COLOUR_TYPES or 0 in array.shape:
        raise ValueError(
            "An image must be an array of height x width, or height x width x 1, 3 or 4 channels, "
            f"but got one of shape {np.shape(pixels)}."
        )
    if not np.issubdtype(array.dtype, np.integer):
        array = np.nan_to_num(array.astype(np.float64)) * 255
    values = array.clip(0, 255).round().astype(np.uint8)
    height, width, channels = values.shape
    # each line begins with the number of its filter: 0, none
    lines = np.pad(values.reshape(height, -1), ((0, 0), (1, 0))).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, COLOUR_TYPES[channels], 0, 0, 0)
    return (
        SIGNATURE
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(lines, 9))
        + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)
