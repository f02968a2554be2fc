"""A table with one row per example, found by its id: the memory of rules that remember.

Columns are tensors on the host. Ids that are integers without large gaps index them directly;
others go through a sorted index of 64-bit keys, 12 bytes per example. Integers are their own keys,
other ids have a digest as key, the same on every rank and machine. Knows nothing of rules.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Hashable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

GAPS = 64  # rows per example that a table without an index may have
FREE = 2**20  # rows that it may have in any case
RECENT = 4096  # new keys that are kept aside until they are sorted into the index
MOST = 255  # visits that are counted

Key = int


class ExampleTable:
    """Numbers about examples; a row is added when an example is seen for the first time.

    >>> table = ExampleTable(loss=torch.float32)
    >>> rows = table.add(torch.tensor([7, 3]))
    >>> table["loss"][rows] = torch.tensor([0.5, 2.0])
    >>> table.find(torch.tensor([3, 4])), table["loss"][table.find(torch.tensor([3]))]
    (tensor([ 3, -1]), tensor([2.]))
    """

    def __init__(self, **columns: torch.dtype) -> None:
        self._types = {**columns, "visits": torch.uint8}
        self._columns = {name: torch.zeros(0, dtype=kind) for name, kind in self._types.items()}
        self._count = 0
        self._index: _Index | None = None  # None: a key is the number of its row

    def __len__(self) -> int:
        """Return the number of known examples."""
        return self._count

    def __getitem__(self, column: str) -> Tensor:
        """Return a column, to read or write at rows; `visits` is how often each was seen."""
        return self._columns[column]

    def find(self, keys: Tensor) -> Tensor:
        """Return the row of each key, -1 for those not seen yet."""
        if self._index is not None:
            return self._index.find(keys)
        capacity = len(self._columns["visits"])
        inside = (keys >= 0) & (keys < capacity)
        rows = torch.where(inside, keys, -1)
        if capacity:
            rows[self._columns["visits"][rows.clamp(min=0)] == 0] = -1
        return rows

    def add(self, keys: Tensor) -> Tensor:
        """Return the row of each key, after counting a visit; a repeated key counts once."""
        if not len(keys):
            return keys
        if self._index is None and self._has_gaps(keys):
            self._build_index()
        if self._index is None:
            self._reserve(int(keys.max()) + 1)
            rows = keys
        else:
            rows = self._index.add(keys)
            self._reserve(len(self._index))
        seen = self._columns["visits"][rows]
        self._count += int(torch.unique(rows[seen == 0]).numel())
        self._columns["visits"][rows] = torch.where(seen == MOST, seen, seen + 1)
        if self._index is not None and self._index.is_sorted:
            self._drop_index()
            rows = keys if self._index is None else rows  # which drop_index renumbers
        return rows

    def known(self) -> Tensor:
        """Return the rows of all known examples."""
        if self._index is not None:
            return torch.arange(self._count)
        return self._columns["visits"].nonzero().flatten()

    def keys(self) -> Tensor:
        """Return the keys of all known examples, in the order of `known`."""
        return self.known() if self._index is None else self._index.keys()

    @property
    def nbytes(self) -> int:
        """Bytes that the table takes, index included."""
        own = sum(column.nbytes for column in self._columns.values())
        return own + (0 if self._index is None else self._index.nbytes)

    def _has_gaps(self, keys: Tensor) -> bool:
        return bool(keys.min() < 0) or int(keys.max()) >= FREE + GAPS * (self._count + len(keys))

    def _reserve(self, rows: int) -> None:
        capacity = len(self._columns["visits"])
        if rows <= capacity:
            return
        # a quarter more than needed, so that growing step by step copies little
        size = rows + max(rows // 4, 1024)
        for name, kind in self._types.items():
            grown = torch.zeros(size, dtype=kind)
            grown[:capacity] = self._columns[name]
            self._columns[name] = grown

    def compact(self) -> None:
        """Give back the room for more examples; rows stay the same."""
        visits = self._columns["visits"]
        if self._index is None:
            rows = int(visits.nonzero().max()) + 1 if self._count else 0
        else:
            rows = len(self._index)
        if rows < len(visits):
            self._columns = {name: column[:rows].clone() for name, column in self._columns.items()}

    def _build_index(self) -> None:
        rows = self.known()
        self._index = _Index(rows)
        self._columns = {name: column[rows] for name, column in self._columns.items()}

    def _drop_index(self) -> None:
        """Drop the index if the keys turn out to be integers without large gaps."""
        assert self._index is not None
        keys = self._index.keys()
        if not self._count or self._has_gaps(keys):
            return
        columns, self._index = self._columns, None
        self._columns = {name: torch.zeros(0, dtype=kind) for name, kind in self._types.items()}
        self._reserve(int(keys.max()) + 1)
        for name, column in columns.items():
            self._columns[name][keys] = column[: len(keys)]

    def state_dict(self) -> dict[str, Any]:
        """Return the known rows for a checkpoint, without gaps."""
        rows, keys = self.known(), self.keys()
        dense = bool((keys == torch.arange(len(keys))).all())
        columns = {name: column[rows].clone() for name, column in self._columns.items()}
        return {"count": self._count, "keys": None if dense else keys.clone(), "columns": columns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        count, columns, keys = (state.get(name) for name in ("count", "columns", "keys"))
        if not isinstance(count, int) or not isinstance(columns, dict):
            raise ValueError(
                "The record of examples has the entries 'count', 'keys' and 'columns', but got "
                f"{ {name: type(value).__name__ for name, value in state.items()} }."
            )
        if columns.keys() != self._types.keys() or any(len(c) != count for c in columns.values()):
            shapes = {name: tuple(column.shape) for name, column in columns.items()}
            raise ValueError(
                f"The record of {count} examples should have the columns "
                f"{sorted(self._types)}, one entry per example, but has {shapes}."
            )
        keys = torch.arange(count) if keys is None else keys
        different = torch.unique(keys).numel()
        if keys.dtype != torch.int64 or keys.shape != (count,) or different != count:
            raise ValueError(
                f"The record of {count} examples has {different} different keys of type "
                f"{keys.dtype}: it is damaged."
            )
        fresh = ExampleTable(**{n: k for n, k in self._types.items() if n != "visits"})
        if count:
            rows = fresh.add(keys)
            for name, column in columns.items():
                fresh._columns[name][rows] = column.to(self._types[name])
        self.__dict__.update(fresh.__dict__)  # all at once, so that an error changes nothing


class _Index:
    """Sorted keys with their rows; new ones are kept aside and sorted in from time to time."""

    def __init__(self, keys: Tensor) -> None:
        self._sorted, order = keys.sort()
        self._rows = order.int()
        self._recent: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._sorted) + len(self._recent)

    @property
    def nbytes(self) -> int:
        return self._sorted.nbytes + self._rows.nbytes + 100 * len(self._recent)

    @property
    def is_sorted(self) -> bool:
        """Whether no keys are kept aside."""
        return not self._recent

    def find(self, keys: Tensor) -> Tensor:
        rows = torch.full_like(keys, -1)
        if len(self._sorted):
            places = torch.searchsorted(self._sorted, keys).clamp(max=len(self._sorted) - 1)
            found = self._sorted[places] == keys
            rows = torch.where(found, self._rows[places].long(), rows)
        if self._recent:
            missing = (rows < 0).nonzero().flatten().tolist()
            for place in missing:
                rows[place] = self._recent.get(int(keys[place]), -1)
        return rows

    def add(self, keys: Tensor) -> Tensor:
        rows = self.find(keys)
        for place in (rows < 0).nonzero().flatten().tolist():
            row = self._recent.setdefault(int(keys[place]), len(self))
            rows[place] = row
        if len(self._recent) > max(RECENT, len(self._sorted) // 8):
            self._merge()
        return rows

    def keys(self) -> Tensor:
        """Return all keys in the order of their rows."""
        self._merge()
        found = torch.empty_like(self._sorted)
        found[self._rows.long()] = self._sorted
        return found

    def _merge(self) -> None:
        if not self._recent:
            return
        keys = torch.tensor([*self._recent], dtype=torch.int64)
        rows = torch.tensor([*self._recent.values()], dtype=torch.int32)
        self._sorted, order = torch.cat([self._sorted, keys]).sort()
        self._rows = torch.cat([self._rows, rows])[order]
        self._recent = {}


def keys_of(ids: Sequence[Hashable]) -> tuple[Tensor, str]:
    """Return ids as 64-bit keys, and what kind of ids they are.

    >>> keys_of([3, 1]), keys_of(["a"])[1]
    ((tensor([3, 1]), 'int'), 'str')
    """
    kinds = set(map(_kind, ids))
    if len(kinds) > 1:
        examples = ", ".join(repr(next(i for i in ids if _kind(i) == kind)) for kind in kinds)
        raise TypeError(f"ids must be of one type to be remembered, but are mixed: {examples}.")
    kind = kinds.pop() if kinds else "int"
    if kind in ("bool", "NoneType") or " at 0x" in repr(ids[0] if len(ids) else ""):
        raise TypeError(
            f"ids must tell examples apart, now and after a restart, but they are {kind} objects "
            f"such as {ids[0]!r}. Use the position of each example in the data set."
        )
    if kind == "int":
        numbers = [operator.index(i) for i in ids]  # type: ignore[arg-type]
        try:
            return _integers(numbers), kind
        except OverflowError:  # unsigned hashes and larger
            return _integers(_wrapped(number) for number in numbers), kind
    return _integers(map(_digest, ids)), kind


def _wrapped(number: int) -> int:
    """Return an integer of 64 bits."""
    if -(2**63) <= number < 2**64:
        return number if number < 2**63 else number - 2**64
    return _digest(number)


def _kind(value: Hashable) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, str):
        return "str"
    return "int" if hasattr(value, "__index__") else type(value).__name__


def _digest(value: Hashable) -> int:
    text = value if isinstance(value, str) else repr(value)
    found = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(found, "big", signed=True)


def _integers(values: Iterable[int] | Iterator[int]) -> Tensor:
    numbers = array("q", values)
    if not numbers:
        return torch.zeros(0, dtype=torch.int64)
    return torch.frombuffer(numbers, dtype=torch.int64).clone()
