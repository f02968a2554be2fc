"""The micro-batches of all ranks, as plain data that a step record reads.

`microclip.distributed` provides the `RankExchange` that gets them. Knows nothing of models, or of
how ranks communicate.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Protocol

import torch
from torch import Tensor


class RankExchange(Protocol):
    """Sends the norms of this rank and receives those of all ranks."""

    def exchange(
        self, step: int, norms: Tensor, sizes: Sequence[float], domains: Sequence[Hashable]
    ) -> AllMicrobatches:
        """Return the micro-batches of all ranks. Every rank calls it, once per step."""
        ...


@dataclass(frozen=True)
class AllMicrobatches:
    """The micro-batches of all ranks, rank after rank; those of size 0 are padding."""

    norms: Tensor
    sizes: Tensor
    domains: list[int]  # keys of the labels; empty if there is only one
    starts: list[int]  # where each rank's micro-batches start
    mine: range  # the rows of this rank

    def rows(self, key: int) -> Tensor | slice:
        """Return the rows of a domain."""
        if not self.domains:
            return slice(None)
        rows = [row for row, domain in enumerate(self.domains) if domain == key]
        return torch.tensor(rows, dtype=torch.long, device=self.norms.device)

    def mine_of(self, key: int) -> Tensor | slice:
        """Return which of a domain's rows belong to this rank."""
        if not self.domains:
            return slice(self.mine.start, self.mine.stop)
        rows = [row for row, domain in enumerate(self.domains) if domain == key]
        places = [place for place, row in enumerate(rows) if row in self.mine]
        return torch.tensor(places, dtype=torch.long, device=self.norms.device)

    @property
    def keys(self) -> list[int]:
        """The keys of all domains."""
        return list(dict.fromkeys(self.domains)) or [0] * min(1, len(self.norms))

    def place(self, row: int) -> tuple[int, int]:
        """Return the rank that a row belongs to, and its number on that rank."""
        rank = max(rank for rank, start in enumerate(self.starts) if start <= row)
        return rank, row - self.starts[rank]


@lru_cache(maxsize=4096)
def domain_key(domain: Hashable) -> int:
    """Return a number for a domain's label that is the same in every process; 0 for none.

    Labels that compare equal have the same key, whatever their types:

    >>> domain_key(1) == domain_key(1.0) == domain_key(True) != domain_key("1")
    True
    """
    if domain is None:
        return 0
    digest = blake2b(repr(_plain(domain)).encode(), digest_size=6).digest()
    return 1 + int.from_bytes(digest, "big")  # 48 bits, which a float64 holds exactly


def _plain(label: Any) -> Any:
    """Return a label as one of the types that compare equal to it and have a stable repr."""
    if hasattr(label, "item") and hasattr(label, "dtype"):  # a numpy or torch scalar
        label = label.item()
    if isinstance(label, str):
        return str.__str__(label)  # ignore what a subclass makes of it
    if isinstance(label, bytes):
        return bytes(label)
    if isinstance(label, tuple):
        return tuple(_plain(part) for part in label)
    if isinstance(label, frozenset):
        return "frozenset", sorted(repr(_plain(part)) for part in label)
    if label is None:
        return None
    try:
        return "number", str(Fraction(label))
    except (TypeError, ValueError, OverflowError):
        pass
    shown = repr(label)
    if " at 0x" in shown:
        raise TypeError(
            f"Ranks cannot tell whether they share the domain {shown}, because its repr contains "
            "a memory address. Use strings or numbers as domains."
        )
    return type(label).__qualname__, shown
