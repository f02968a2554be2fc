"""How figures are written."""

from __future__ import annotations

import math
from collections.abc import Sequence

from microclip_lab.evidence.sequential import Interval


def percent(share: float) -> str:
    """Return a share in percent.

    >>> percent(0.07)
    '7 %'
    """
    return f"{100 * share:.0f} %"


def shown(found: Interval | None, unit: str = "%") -> str:
    """Return a mean with its interval.

    >>> shown(Interval(28.44, 23.9, 32.98, 8, 1.0)), shown(Interval(0.02, 0.01, 0.03, 8, 1.0), "")
    ('+28.4 ± 4.5 %', '+0.020 ± 0.010')
    """
    if found is None:
        return "-"
    if not math.isfinite(found.mean):
        return "diverged"
    digits = 3 if unit in ("", "per doubling") else 1 if unit == "%" else 2
    half = (found.high - found.low) / 2
    return f"{found.mean:+.{digits}f} ± {half:.{digits}f} {unit}".rstrip()


def bold(found: Interval | None, unit: str = " %") -> str:
    """Return an effect in percent, bold if the interval excludes 0."""
    text = shown(found).replace(" %", unit)
    return f"**{text}**" if found is not None and (found.low > 0 or found.high < 0) else text


def whole(value: float) -> str:
    """Return an effect in whole percent, or with a digit if it is small.

    >>> whole(28.4), whole(-0.42), whole(-math.inf)
    ('+28 %', '-0.4 %', 'diverged')
    """
    if not math.isfinite(value):
        return "diverged"
    return f"{value:+.0f} %" if abs(value) >= 1.5 else f"{value:+.1f} %"


def between(values: Sequence[float]) -> str:
    """Return the range of some effects.

    >>> between([28.4]), between([2.6, 79.4, 4.0])
    ('+28 %', '+3 to +79 %')
    """
    low, high = whole(min(values)), whole(max(values))
    return low if low == high else f"{low.removesuffix(' %')} to {high}"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table as lines of Markdown."""
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    return lines + [f"| {' | '.join(row)} |" for row in rows]
