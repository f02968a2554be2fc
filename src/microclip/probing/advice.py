"""What the figures of a probe or a ledger suggest: whether to clip, and how far to trust that.

Knows the fitted thresholds and the decisions by kind of data; not how figures are measured.
"""

from __future__ import annotations

from collections.abc import Mapping

from microclip.probing.forecast import TABLE, described
from microclip.probing.thresholds import BY_KIND, FORECASTS

WHERE = (
    "Forecasts were fitted to plain training after a quarter of its epochs, with AdamW: take the "
    "figures there."
)


def suggestions(figures: Mapping[str, float]) -> list[str]:
    """Return the figures and what they suggest, a sentence for each clipping rule."""
    found = [described(figures), *(forecast.sentence(figures) for forecast in FORECASTS)]
    if not is_trusted():
        found.append(f"Go by your kind of data instead: {TABLE}.")
    return found


def is_trusted() -> bool:
    """Return whether any forecast beats guessing."""
    return any(forecast.beats_guessing for forecast in FORECASTS)


def by_kind() -> list[str]:
    """Return what to do by kind of data, a line each."""
    return [f"{kind}: {to_do}" for kind, to_do in BY_KIND]
