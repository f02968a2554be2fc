"""Names of domains that are the same in every process."""

from __future__ import annotations

from collections.abc import Hashable
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from typing import Any


@lru_cache(maxsize=4096)
def key(domain: Hashable) -> int:
    """Return a number for a domain's label that is the same in every process; 0 for none.

    Labels that are equal on one process have the same number, whatever their types:

    >>> key(1) == key(1.0) == key(True) != key("1")
    True
    """
    if domain is None:
        return 0
    digest = blake2b(repr(_plain(domain)).encode(), digest_size=6).digest()
    return 1 + int.from_bytes(digest, "big")  # 48 bits, which a float64 holds exactly


def _plain(label: Any) -> Any:
    """Return a label as one of the types that compare equal to it and have a lasting repr."""
    if hasattr(label, "item") and hasattr(label, "dtype"):  # a number of numpy's or torch's
        label = label.item()
    if isinstance(label, str):
        return str.__str__(label)  # without what a subclass makes of it
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
            f"Ranks cannot tell whether the domain {shown} is one of another rank's: its repr "
            "names a place in memory. Use strings or numbers for domains."
        )
    return type(label).__qualname__, shown
