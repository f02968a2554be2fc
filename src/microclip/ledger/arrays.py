"""Arrow arrays made from tensors and from ids of any kind, without NumPy.

Knows nothing about ledgers.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from numbers import Integral
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

TEXT_LIMIT = 2**28  # characters in one table; an Arrow string array holds up to 2**31 bytes


class TooMuchTextError(Exception):
    """The ids of these steps do not fit into one table."""


def ids_array(labels: list[Any] | Tensor, alone: bool) -> tuple[pa.Array, bool]:
    """Return ids as a dictionary array of strings, and whether all of them are integers.

    A tensor holds integers. `alone`: these are the ids of a single step, which cannot be split.
    """
    if isinstance(labels, Tensor):
        return _integer_ids(labels), True
    kinds: set[Any] = set(map(type, labels))
    if all(issubclass(kind, Integral) and kind is not bool for kind in kinds):
        with suppress(OverflowError):  # larger than 64 bits: a string like others
            return _integer_ids(integers(labels)), True
    names = list(map(str, labels))
    characters = sum(map(len, names))
    if characters > TEXT_LIMIT:
        if not alone:
            raise TooMuchTextError
        if characters > 2**29:  # four bytes each at most
            raise ValueError(
                f"The ids of one step have {characters} characters, which is too many for a "
                "ledger. Use short ids, such as row numbers of the data set."
            )
    return texts_array(names).dictionary_encode(), False


def _integer_ids(values: Tensor) -> pa.Array:
    coded = arrow(values).dictionary_encode()
    return pa.DictionaryArray.from_arrays(coded.indices, coded.dictionary.cast(pa.string()))


def texts_array(texts: Sequence[str | None]) -> pa.Array:
    """Return texts, with escapes for what UTF-8 cannot encode."""
    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:
        escaped = [t and t.encode("utf-8", "backslashreplace").decode("utf-8") for t in texts]
        return pa.array(escaped, pa.string())


def with_nulls(values: Tensor, known: list[bool], counts: Tensor) -> pa.Array:
    """Return values of some steps, null where the step has none; `counts` values per step."""
    if all(known):
        return arrow(values)
    mask = arrow(torch.tensor(known).repeat_interleave(counts).to(torch.uint8)).cast(pa.bool_())
    return pc.if_else(mask, arrow(values), pa.scalar(None, TYPES[values.dtype]))


TYPES = {
    torch.int64: pa.int64(),
    torch.int32: pa.int32(),
    torch.uint8: pa.uint8(),
    torch.float32: pa.float32(),
    torch.float64: pa.float64(),
}


def integers(values: Iterable[int]) -> Tensor:
    """Return integers as a tensor; going through an array is several times faster than a list."""
    return torch.frombuffer(array("q", values), dtype=torch.int64)


def arrow(values: Tensor) -> pa.Array:
    """Return a tensor as an Arrow array that shares its memory, without NumPy."""
    values = values.contiguous()
    if not len(values):
        return pa.array([], TYPES[values.dtype])
    memory = pa.foreign_buffer(values.data_ptr(), values.nbytes, values)
    return pa.Array.from_buffers(TYPES[values.dtype], len(values), [None, memory])
