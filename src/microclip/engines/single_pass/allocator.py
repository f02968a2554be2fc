"""Asking the allocator of glibc to hold on to what is freed.

By itself it gives freed memory back to the system, and every step asks for it anew: fresh pages, to
be zeroed and mapped, which can cost a quarter of a small step. That is so for plain training, too,
which gets faster by the same means. Accelerators have allocators that hold on by themselves.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

LARGEST = 2**25  # bytes of a tensor; whatever is asked, a larger one gets fresh pages
_MARGIN = 2**12  # for what lies around a tensor

LARGEST_TENSOR = LARGEST - _MARGIN
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of options, from malloc.h
_NEVER = 2**31 - 1  # bytes that lie idle at the end of the heap
_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


@cache
def hold_on_to_freed_memory() -> None:
    """Let this process keep up to 2 GiB that it does not use, unless a user has settings of theirs.

    Elsewhere than on Linux with glibc nothing happens.
    """
    if any(name in os.environ for name in _SETTINGS):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_MMAP_THRESHOLD, LARGEST)
    mallopt(_TRIM_THRESHOLD, _NEVER)
