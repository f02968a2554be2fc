"""The products of all pairs of rows, by a small library in C where there is one.

`hatch_build.py` makes it of `symmetric.c` when the package is installed and a compiler is there. It
takes about 0.6 of the time of torch's products, which calculate each pair twice. Where it is
missing or not made for the processor, torch does the work; MICROCLIP_C=0 asks for that.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

MOST_ROWS = 128  # of a micro-batch; blocks of more are multiplied faster by torch
LIBRARY = Path(__file__).with_name("libsymmetric.so")


class _Rows(ctypes.Structure):
    _fields_ = (
        ("start", ctypes.c_void_p),
        ("microbatch", ctypes.c_ssize_t),
        ("row", ctypes.c_ssize_t),
        ("width", ctypes.c_ssize_t),
    )


@cache
def library() -> ctypes.CDLL | None:
    """Return the library if there is one and this processor gains by it."""
    if os.environ.get("MICROCLIP_C") == "0" or not LIBRARY.exists():
        return None
    try:
        found = ctypes.CDLL(str(LIBRARY))
    except OSError:  # torch has not loaded the OpenMP library that it was made for
        return None
    found.microclip_pairs.restype = None
    size = ctypes.c_ssize_t
    found.microclip_pairs.argtypes = (_Rows, _Rows, size, size, ctypes.c_void_p, ctypes.c_int)
    return found if found.microclip_pairs_pay() else None


def serves(rows: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether micro-batches of so many rows, of numbers like these, are done by the library."""
    known = dtype == torch.float32 and device.type == "cpu"
    return known and rows <= MOST_ROWS and library() is not None


def takes(left: Tensor, right: Tensor) -> bool:
    """Whether the library can read these rows."""
    alike = left.dtype == right.dtype and left.stride(2) == right.stride(2) == 1
    return alike and serves(left.shape[1], left.dtype, left.device)


def pairs(left: Tensor, right: Tensor) -> Tensor:
    """Return sum_rs (left_r . left_s)(right_r . right_s) for every micro-batch, in float64."""
    found = library()
    assert found is not None
    microbatches, rows, _ = left.shape
    out = torch.empty(microbatches, dtype=torch.float64)
    sides = [_Rows(side.data_ptr(), *side.stride()[:2], side.shape[2]) for side in (left, right)]
    found.microclip_pairs(*sides, rows, microbatches, out.data_ptr(), torch.get_num_threads())
    return out
