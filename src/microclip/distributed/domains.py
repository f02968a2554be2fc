"""Names of domains that are the same in every process."""

from __future__ import annotations

from collections.abc import Hashable
from hashlib import blake2b


def key(domain: Hashable) -> int:
    """Return a number for a domain's label that is the same in every process; 0 for none."""
    if domain is None:
        return 0
    digest = blake2b(repr(domain).encode(), digest_size=6).digest()
    return 1 + int.from_bytes(digest, "big")  # 48 bits, which a float64 holds exactly
