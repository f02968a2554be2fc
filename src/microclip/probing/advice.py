"""What the figures of a probe or a ledger suggest: whether to clip, and how far to trust that.

Knows the fitted thresholds and the decisions by kind of data; not how figures are measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from microclip.probing.forecast import TABLE, Forecast, described
from microclip.probing.thresholds import BY_KIND, FORECASTS

WHERE = (
    "Forecasts were fitted to plain training after a quarter of its epochs, with AdamW: take the "
    "figures there."
)


def suggestions(
    figures: Mapping[str, float], forecasts: Sequence[Forecast] = FORECASTS
) -> list[str]:
    """Return the figures and what they suggest for each clipping rule, or that they do not tell."""
    if is_trusted(forecasts):
        return [described(figures), *(forecast.sentence(figures) for forecast in forecasts)]
    records = [
        f'{each.rule} right on {each.right} of {each.judged_on} (always saying "{each.guess}": '
        f"{each.guess_right})"
        for each in forecasts
        if each.thumb is not None
    ]
    why = "too few tasks have a clear result to fit a forecast on."
    if records:
        why = (
            "forecasts were no better than guessing on tasks that they were not fitted on, "
            f"{', '.join(records)}."
        )
    return [
        described(figures),
        f"Whether clipping at b = 4 pays cannot be told from that: {why} Go by your kind of data "
        f"instead: {TABLE}.",
    ]


def is_trusted(forecasts: Sequence[Forecast] = FORECASTS) -> bool:
    """Return whether any forecast beats guessing."""
    return any(forecast.beats_guessing for forecast in forecasts)


def by_kind() -> list[str]:
    """Return what to do by kind of data, a line each."""
    return [f"{kind}: {to_do}" for kind, to_do in BY_KIND]
