"""What figures are made of: lines, bands, intervals and levels for plotly, and their texts.

Traces and shapes are plain dictionaries. Knows nothing about which figures there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from microclip.report.run_data import Line
from microclip.report.runs import Curve
from microclip.report.statistics import Estimate

COLORS = (1, 3, 4, 5, 6, 7, 8)  # of the style sheet; the second is for plain training
DASHES = ("solid", "dash", "dot", "dashdot")
MARKS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "star", "x")
LONGEST_NAME = 40
DASHED = {"color": "var(--orange)", "dash": "dash", "width": 1.6}

Trace = dict[str, Any]


@dataclass(frozen=True)
class Look:
    """What a line looks like."""

    line: dict[str, Any]
    symbol: str
    plain: bool


def look(place: int, plain: bool = False) -> Look:
    """Return the look of the n-th line; plain training looks the same everywhere.

    Lines that share a color have different dashes.
    """
    if plain:
        return Look({"color": "var(--orange)", "dash": "dash", "width": 2.2}, MARKS[-1], True)
    color = f"var(--s{COLORS[place % len(COLORS)]})"
    pattern = DASHES[place // len(COLORS) % len(DASHES)]
    return Look({"color": color, "dash": pattern, "width": 1.8}, MARKS[place % len(MARKS)], False)


def thinned(curve: Curve, points: int) -> tuple[list[int], list[float]]:
    """Return the points of a curve, averaged if there are too many; the last stays as it is."""
    steps, values = list(curve), list(curve.values())
    if len(steps) <= points:
        return steps, rounded(values)
    pieces = np.array_split(np.arange(len(steps) - 1), points - 1)
    xs = [steps[int(piece[len(piece) // 2])] for piece in pieces]
    ys = [math.fsum(values[i] for i in piece) / len(piece) for piece in pieces]
    return [*xs, steps[-1]], rounded([*ys, values[-1]])


def rounded(values: Sequence[float | None]) -> list[Any]:
    """Return values rounded to the digits that are visible."""
    return [None if value is None else float(f"{value:.6g}") for value in values]


def cut(text: str, length: int = LONGEST_NAME) -> str:
    """Return a text that fits into a legend."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def escaped(text: str) -> str:
    """Return a text in which plotly finds no markup and no template fields."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("%{", "% {")


def titled(text: str) -> dict[str, str]:
    """Return the title of an axis."""
    return {"text": escaped(cut(text))}


def log_ticks(values: Sequence[float | None]) -> dict[str, Any]:
    """Return the ticks of a logarithmic axis for these values: 1, 2 and 5, or powers of ten."""
    known = [value for value in values if value is not None and value > 0]
    if not known or max(known) / min(known) > 1000:
        return {"dtick": 1}
    decades = range(math.floor(math.log10(min(known))), math.ceil(math.log10(max(known))) + 1)
    ticks = [factor * 10.0**power for power in decades for factor in (1, 2, 5)]
    return {"tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def line_trace(xs: Sequence[float], ys: Line, name: str, color: str, dash: str = "solid") -> Trace:
    """Return a line."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": list(xs),
        "y": rounded(ys),
        "name": name,
        "line": {"color": color, "dash": dash, "width": 1.8},
        "hovertemplate": "%{y:.3g}",
    }


def band(xs: Sequence[float], low: Line, high: Line, name: str, strength: str) -> list[Trace]:
    """Fill the area between two lines."""
    shared: Trace = {
        "type": "scatter",
        "mode": "lines",
        "x": list(xs),
        "line": {"width": 0},
        "legendgroup": name,
        "hoverinfo": "skip",
    }
    return [
        {**shared, "y": rounded(low), "showlegend": False, "name": name},
        {
            **shared,
            "y": rounded(high),
            "name": name,
            "fill": "tonexty",
            "fillcolor": f"var(--blue-{strength})",
        },
    ]


def estimates_trace(
    names: Sequence[str], estimates: Sequence[Estimate], name: str, axis: str
) -> Trace:
    """Return points with their intervals."""
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": names,
        "y": [each.mean for each in estimates],
        "xaxis": "x",
        "yaxis": f"y{axis}",
        "error_y": error_bars(
            [each.mean for each in estimates],
            [each.low for each in estimates],
            [each.high for each in estimates],
        ),
        "name": name,
        "line": {"color": "var(--blue)", "width": 1.8},
        "marker": {"color": "var(--blue)", "size": 8},
        "showlegend": not axis,
        "hovertemplate": "%{x}: %{y:.5g}<extra></extra>",
    }


def error_bars(
    means: Sequence[float], lows: Sequence[float | None], highs: Sequence[float | None]
) -> dict[str, Any]:
    """Return the bars of intervals."""
    above = [0.0 if h is None else h - m for m, h in zip(means, highs, strict=True)]
    below = [0.0 if low is None else m - low for m, low in zip(means, lows, strict=True)]
    return {
        "type": "data",
        "symmetric": False,
        "array": above,
        "arrayminus": below,
        "color": "var(--blue)",
        "thickness": 1.6,
        "width": 5,
    }


def level_trace(names: Sequence[str], value: float, name: str) -> Trace:
    """Return a dashed line at a value, with an entry in the legend."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": names,
        "y": [value] * len(names),
        "name": name,
        "line": {"color": "var(--orange)", "dash": "dash", "width": 1.8},
        "hovertemplate": f"{name}: %{{y:.5g}}<extra></extra>",
    }


def level(value: float, line: Mapping[str, Any] = DASHED) -> dict[str, Any]:
    """Return a line at a value over the whole width."""
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": value,
        "y1": value,
        "line": dict(line),
    }


def strip(low: float, high: float | None) -> dict[str, Any]:
    """Return a horizontal band over the whole width."""
    return {
        "type": "rect",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": low,
        "y1": high,
        "fillcolor": "var(--orange-band)",
        "line": {"width": 0},
        "layer": "below",
    }
