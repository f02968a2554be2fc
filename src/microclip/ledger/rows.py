"""From outcomes to rows: many steps at once, with one transfer from the device.

Knows nothing of files. Ids and domains become texts, whatever they are: `str()` of them, and what
UTF-8 cannot hold (lone surrogates) written as an escape.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from numbers import Integral
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from microclip.ledger.schema import EXAMPLES, MICROBATCHES, SCHEMAS, stamped
from microclip.outcome import Outcome

TEXT_LIMIT = 2**28  # characters in one table; Arrow's texts end at 2**31 bytes


class TooMuchTextError(Exception):
    """The ids of these steps do not fit into one table."""


def tables(outcomes: Sequence[Outcome], rank: int, examples: bool) -> dict[str, pa.Table]:
    """Return the rows of some steps, none of them empty, for each table that has any."""
    groups = list(chain.from_iterable(outcome.ids for outcome in outcomes))
    counts = _integers(len(outcome.ids) for outcome in outcomes)
    sizes = _integers(map(len, groups))
    steps = _integers(outcome.step for outcome in outcomes).repeat_interleave(counts)
    places = torch.arange(len(groups)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    ids, integers = _ids(list(chain.from_iterable(groups)), alone=len(outcomes) == 1)
    norms, weights, bounds, losses, each = _bring_over(outcomes, examples)
    skipped = torch.cat([outcome.skipped for outcome in outcomes]).cpu()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    found = {
        MICROBATCHES: _table(
            MICROBATCHES,
            [
                _array(steps),
                _array(torch.full_like(steps, rank).int()),
                _array(places.int()),
                pa.ListArray.from_arrays(_array(offsets.int()), ids),
                _array(sizes.int()),
                _array(norms),
                _array(weights),
                _array(bounds),
                _domains(outcomes),
                _with_nulls(losses, [o.losses is not None for o in outcomes], counts),
                _array(skipped.to(torch.uint8)).cast(pa.bool_()),
            ],
        )
    }
    if each is not None:
        told = torch.tensor([o.example_losses is not None for o in outcomes])
        rows = told.repeat_interleave(counts).repeat_interleave(sizes)
        steps, places = (c.repeat_interleave(sizes)[rows] for c in (steps, places))
        found[EXAMPLES] = _table(
            EXAMPLES,
            [
                _array(steps),
                _array(torch.full_like(steps, rank).int()),
                _array(places.int()),
                ids if bool(told.all()) else ids.filter(_array(rows.to(torch.uint8)).cast("bool")),
                _array(each.float()),
            ],
        )
    kind = "integer" if integers else "string"
    with_examples = "yes" if EXAMPLES in found else "no"
    return {name: stamped(table, ids=kind, examples=with_examples) for name, table in found.items()}


def _bring_over(outcomes: Sequence[Outcome], examples: bool) -> tuple[Any, ...]:
    """Return norms, weights, bounds, losses and examples' losses (or None), on the host."""
    columns: list[list[Tensor]] = [
        [outcome.norms for outcome in outcomes],
        [outcome.weights for outcome in outcomes],
        [outcome.bounds for outcome in outcomes],
        [torch.zeros_like(o.norms) if o.losses is None else o.losses for o in outcomes],
        [o.example_losses for o in outcomes if examples and o.example_losses is not None],
    ]
    with torch.no_grad():
        joined = [torch.cat(column) for column in columns if column]
        together = torch.cat(joined).cpu().double()  # the one time that the host waits
    parts = torch.split(together, [len(column) for column in joined])
    return *parts[:4], parts[4] if len(parts) == 5 else None


def _ids(labels: list[Any], alone: bool) -> tuple[pa.Array, bool]:
    """Return ids as texts, each distinct one kept once, and whether all of them are integers."""
    kinds: set[Any] = set(map(type, labels))
    if all(issubclass(kind, Integral) and kind is not bool for kind in kinds):
        with suppress(OverflowError):  # larger than 64 bits: a text like others
            coded = _array(_integers(labels)).dictionary_encode()
            texts = coded.dictionary.cast(pa.string())
            return pa.DictionaryArray.from_arrays(coded.indices, texts), True
    names = list(map(str, labels))
    characters = sum(map(len, names))
    if characters > TEXT_LIMIT:
        if not alone:
            raise TooMuchTextError
        if characters > 2**29:  # four bytes each at most
            raise ValueError(
                f"The ids of one step have {characters} characters, which is too many for a "
                "ledger. Give short ids, such as the numbers of rows in the data set."
            )
    return _texts(names).dictionary_encode(), False


def _domains(outcomes: Sequence[Outcome]) -> pa.Array:
    domains = list(chain.from_iterable(outcome.domains for outcome in outcomes))
    if set(map(type, domains)) == {type(None)}:
        return pa.nulls(len(domains), pa.string())
    return _texts([None if domain is None else str(domain) for domain in domains])


def _texts(texts: Sequence[str | None]) -> pa.Array:
    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:
        escaped = [t and t.encode("utf-8", "backslashreplace").decode("utf-8") for t in texts]
        return pa.array(escaped, pa.string())


def _with_nulls(values: Tensor, told: list[bool], counts: Tensor) -> pa.Array:
    if all(told):
        return _array(values)
    known = _array(torch.tensor(told).repeat_interleave(counts).to(torch.uint8)).cast(pa.bool_())
    return pc.if_else(known, _array(values), pa.scalar(None, pa.float64()))


TYPES = {
    torch.int64: pa.int64(),
    torch.int32: pa.int32(),
    torch.uint8: pa.uint8(),
    torch.float32: pa.float32(),
    torch.float64: pa.float64(),
}


def _integers(values: Iterable[int]) -> Tensor:
    """Return integers as a tensor: an array on the way is several times as fast as a list."""
    return torch.frombuffer(array("q", values), dtype=torch.int64)


def _array(values: Tensor) -> pa.Array:
    """Return a tensor as Arrow sees it: the same memory, and no need for NumPy."""
    values = values.contiguous()
    if not len(values):
        return pa.array([], TYPES[values.dtype])
    memory = pa.foreign_buffer(values.data_ptr(), values.nbytes, values)
    return pa.Array.from_buffers(TYPES[values.dtype], len(values), [None, memory])


def _table(name: str, columns: list[pa.Array]) -> pa.Table:
    return pa.Table.from_arrays(columns, names=SCHEMAS[name].names)
