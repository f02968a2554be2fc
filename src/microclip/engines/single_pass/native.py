"""Two sums that torch has no single operation for, by a small C library where there is one.

`hatch_build.py` compiles it from `native.c` when the package is installed, if there is a compiler.
The products of all pairs of rows take 0.6 times as long as with torch, which computes each pair
twice, and the sums for layer norms half as long. If the library is missing or does not suit the
processor, torch does the work. MICROCLIP_C=0 forces torch, and MICROCLIP_C=1 forces the library
wherever it runs, even if torch is faster there.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

MOST_ROWS = 128  # of a micro-batch; beyond that torch is faster
MOST_ROWS_ADDED = 1024  # added sequentially in float32; beyond that torch is more precise
LIBRARY = Path(__file__).with_name("libnative.so")


class _Rows(ctypes.Structure):
    _fields_ = (
        ("start", ctypes.c_void_p),
        ("microbatch", ctypes.c_ssize_t),
        ("row", ctypes.c_ssize_t),
        ("width", ctypes.c_ssize_t),
    )


@cache
def library() -> ctypes.CDLL | None:
    """Return the library if there is one and it is faster on this processor."""
    wanted = os.environ.get("MICROCLIP_C")
    if wanted == "0" or not LIBRARY.exists():
        return None
    size, address, count = ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_int
    try:
        found = ctypes.CDLL(str(LIBRARY))
        found.microclip_pair_sums.argtypes = (
            *(_Rows, _Rows, size, size),
            *(address, address, count),
        )
        found.microclip_layer_norm.argtypes = (*[address] * 4, *[size] * 3, address, address, count)
    except (OSError, AttributeError):
        return None  # torch has loaded another OpenMP library, or this one is out of date
    found.microclip_pair_sums.restype = found.microclip_layer_norm.restype = None
    usable = found.microclip_runs() if wanted == "1" else found.microclip_pays()
    return found if usable else None


def knows(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the library can be used for this dtype and device."""
    return dtype == torch.float32 and device.type == "cpu" and library() is not None


def pairs_up(left: Tensor, right: Tensor) -> bool:
    """Whether `pairs` can take these rows."""
    alike = left.dtype == right.dtype and left.stride(2) == right.stride(2) == 1
    return alike and left.shape[1] <= MOST_ROWS and knows(left.dtype, left.device)


def pairs(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum_rs (left_r . left_s)(right_r . right_s) for every micro-batch, in float64.

    Also return the part of it where r = s.
    """
    found = library()
    assert found is not None
    microbatches, rows, _ = left.shape
    out, own = torch.empty(2, microbatches, dtype=torch.float64).unbind()
    sides = [_Rows(side.data_ptr(), *side.stride()[:2], side.shape[2]) for side in (left, right)]
    addresses = out.data_ptr(), own.data_ptr()
    found.microclip_pair_sums(*sides, rows, microbatches, *addresses, torch.get_num_threads())
    return out, own


def adds_up(rows: int, *tensors: Tensor) -> bool:
    """Whether `layer_norm` can take these tensors, with this many rows in each micro-batch."""
    if rows > MOST_ROWS_ADDED or not knows(tensors[0].dtype, tensors[0].device):
        return False
    return all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors)


def layer_norm(
    x: Tensor, mean: Tensor, rstd: Tensor, d: Tensor, microbatches: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of scale and shift, for micro-batches with equally many rows."""
    found = library()
    assert found is not None
    rows = mean.numel() // microbatches
    width = x.numel() // max(1, mean.numel())
    scales, shifts = torch.empty(2, microbatches, width).unbind()
    found.microclip_layer_norm(
        *[tensor.data_ptr() for tensor in (x, d, mean, rstd)],
        *(rows, width, microbatches),
        *(scales.data_ptr(), shifts.data_ptr(), torch.get_num_threads()),
    )
    return scales, shifts
