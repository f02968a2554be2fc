"""How figures are written."""

from __future__ import annotations


def percent(share: float) -> str:
    """Return a share in percent.

    >>> percent(0.07)
    '7 %'
    """
    return f"{100 * share:.0f} %"
