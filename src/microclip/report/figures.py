"""Figures for plotly: traces and layouts as plain dictionaries.

Colors are names from the style sheet, so that the same figure works in light and dark mode. What a
figure means is explained in `sections`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from microclip.report.blocks import Drawing
from microclip.report.comparison import Comparison, ComparisonRow, settings_of
from microclip.report.run_data import Line, Timeline
from microclip.report.runs import Curve, Run
from microclip.report.statistics import Estimate

COLORS = (1, 3, 4, 5, 6, 7, 8)  # of the style sheet; the second is for plain training
DASHES = ("solid", "dash", "dot", "dashdot")
MARKS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "star", "x")
POINTS = 400  # per line, at most
ALL_POINTS = 40_000  # per figure, all choices together
BINS = 40
LONGEST_NAME = 40

ZERO = Estimate(0.0, 0.0, 0.0, 1)
HATCHED = {"shape": "/", "fillmode": "overlay", "fgcolor": "var(--paper)", "size": 6}

Trace = dict[str, Any]


def curves(runs: Sequence[Run], metrics: Sequence[str]) -> dict[str, Drawing]:
    """Draw each metric over steps, one line per run; runs of the same setting look the same."""
    looks: dict[str, Look] = {}
    count = sum(metric in run.metrics for run in runs for metric in metrics)
    points = max(20, min(POINTS, ALL_POINTS // max(count, 1)))
    drawings = {}
    settings = settings_of(runs)
    several = len(settings) < len(runs)
    called = {id(run): setting.name for setting in settings for run in setting.runs}
    for metric in metrics:
        seen: set[str] = set()
        traces = []
        for run in runs:
            if metric not in run.metrics:
                continue
            name = escaped(cut(called[id(run)] if several and run.described else run.name))
            plain = run.is_plain
            if name not in looks:
                looks[name] = look(sum(not one.plain for one in looks.values()), plain)
            xs, ys = thinned(run.metrics[metric], points)
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines" if len(xs) > 1 else "markers",
                    "x": xs,
                    "y": ys,
                    "name": name,
                    "legendgroup": name,
                    "showlegend": name not in seen,
                    "line": looks[name].line,
                    "marker": {"color": looks[name].line["color"]},
                    "hovertemplate": f"{escaped(cut(run.name))}<br>step %{{x}}: %{{y:.5g}}"
                    "<extra></extra>",
                }
            )
            seen.add(name)
        drawings[metric] = Drawing(
            traces, {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": titled(metric)}}
        )
    return drawings


def norms(timeline: Timeline, bound: bool = True) -> Drawing:
    """Draw bands of gradient norms, and the bound."""
    steps, by_quantile = timeline.steps, timeline.norms
    traces = [
        *_band(steps, by_quantile[0.05], by_quantile[0.95], "90 % of the norms", "faint"),
        *_band(steps, by_quantile[0.25], by_quantile[0.75], "half of the norms", "strong"),
        _line(steps, by_quantile[0.5], "median norm", "var(--blue)"),
    ]
    if bound:
        traces.append(_line(steps, timeline.bound, "bound", "var(--orange)", dash="dash"))
    return Drawing(
        traces,
        {
            "xaxis": {"title": {"text": "step"}},
            "yaxis": {
                "title": {"text": "gradient norm"},
                "type": "log",
                **_log_ticks(timeline),
            },
        },
    )


def weights(timeline: Timeline) -> Drawing:
    """Draw bands of weights."""
    steps, by_quantile = timeline.steps, timeline.weights
    traces = [
        *_band(steps, by_quantile[0.05], by_quantile[0.95], "90 %", "faint"),
        *_band(steps, by_quantile[0.25], by_quantile[0.75], "half", "strong"),
        _line(steps, by_quantile[0.5], "median", "var(--blue)"),
    ]
    return Drawing(
        traces,
        {
            "xaxis": {"title": {"text": "step"}},
            "yaxis": {"title": {"text": "weight of a micro-batch"}, "rangemode": "tozero"},
        },
    )


def held_back(steps: Sequence[int], counts: Mapping[str, Sequence[int]]) -> Drawing:
    """Draw how many examples are held back over time, one area per kind, stacked."""
    traces = []
    for place, (name, each) in enumerate(counts.items()):
        strong = place == len(counts) - 1
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": list(steps),
                "y": list(each),
                "name": name,
                "stackgroup": "held",
                "line": {"color": "var(--orange)" if strong else "var(--blue)", "width": 1.8},
                "fillcolor": "var(--orange-band)" if strong else "var(--blue-strong)",
                "hovertemplate": "%{y}",
            }
        )
    layout = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": "examples held back"}, "rangemode": "tozero"},
        "showlegend": len(traces) > 1,
    }
    return Drawing(traces, layout)


def histogram(values: Mapping[str, Sequence[float]], title: str) -> Drawing:
    """Draw the distribution of values as stacked bars, one color per kind."""
    everything = np.concatenate([np.asarray(each, dtype=np.float64) for each in values.values()])
    low, high = float(everything.min()), float(everything.max())
    # a few outliers would squeeze all the others into one bar: they join the last bar
    far = float(np.quantile(everything, 0.995))
    if high - low > 4 * (far - low) > 0:
        high = far
    edges = np.linspace(low, high if high > low else low + 1, BINS + 1)
    middles = ((edges[1:] + edges[:-1]) / 2).tolist()
    traces = []
    for place, (name, each) in enumerate(values.items()):
        counts, _ = np.histogram(np.clip(each, edges[0], edges[-1]), edges)
        traces.append(
            {
                "type": "bar",
                "x": middles,
                "y": counts.tolist(),
                "name": name,
                "marker": {"color": "var(--blue)"}
                if place == 0
                else {"color": "var(--orange)", "pattern": HATCHED},
                "hovertemplate": "%{x:.3g}: %{y}<extra></extra>",
            }
        )
    layout = {
        "barmode": "stack",
        "bargap": 0.06,
        "showlegend": len(traces) > 1,
        "legend": {"traceorder": "normal"},
        "xaxis": {"title": {"text": title}},
        "yaxis": {"title": {"text": "examples"}},
    }
    return Drawing(traces, layout)


def domains_over_time(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Drawing:
    """Draw weight share / example share of each domain over time."""
    traces = []
    for place, name in enumerate(names):
        own = [row for row in rows if row["domain"] == name]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": [(row["first_step"] + row["last_step"]) / 2 for row in own],
                "y": [row["ratio"] for row in own],
                "name": escaped(cut(name)),
                "line": look(place).line,
                "marker": {"symbol": look(place).symbol, "size": 6},
                "connectgaps": True,
                "hovertemplate": "%{y:.2f}",
            }
        )
    return Drawing(
        traces,
        {
            "xaxis": {"title": {"text": "step"}},
            "yaxis": {"title": {"text": "weight share / example share"}},
            "shapes": [_level(1)],
        },
    )


def domain_ratios(rows: Sequence[Mapping[str, Any]]) -> Drawing:
    """Draw the ratio of every domain with its interval, the one held back most on top."""
    known = [row for row in rows if row["ratio"] is not None][::-1]
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": [row["ratio"] for row in known],
        "y": [escaped(cut(row["domain"])) for row in known],
        "error_x": _errors(
            [row["ratio"] for row in known],
            [row["low"] for row in known],
            [row["high"] for row in known],
        ),
        "marker": {"color": "var(--blue)", "size": 9},
        "hovertemplate": "%{y}: %{x:.2f}<extra></extra>",
        "showlegend": False,
    }
    upright = {**_level(1), "x0": 1, "x1": 1, "xref": "x", "y0": 0, "y1": 1, "yref": "paper"}
    return Drawing(
        [trace],
        {
            "xaxis": {"title": {"text": "weight share / example share"}},
            "yaxis": {"type": "category", "automargin": True},
            "shapes": [upright],
        },
    )


def sweet_spot(comparison: Comparison, metric: str) -> Drawing:
    """Draw a metric by setting with intervals, and below it the difference from plain."""
    rows = comparison.rows(metric)
    clipped = [row for row in rows if not row.setting.is_plain]
    plain = [row for row in rows if row.setting.is_plain]
    if not clipped:
        clipped, plain = plain, []
    names = [_tick(comparison, row) for row in clipped]
    values = [row.value for row in clipped]
    name = "clipped or weighted" if comparison.has_rules else "clipped"
    traces = [_estimates(names, values, name, "")]
    reached = [plain[0].value] if len(plain) == 1 else []
    scale, notes = _scale(values, [*values, *reached], "y", "{:.3g}")
    layout: dict[str, Any] = {
        "xaxis": {"type": "category", "title": {"text": "micro-batch size b"}},
        "yaxis": {"title": titled(metric), **scale},
        "shapes": [],
        "annotations": notes,
    }
    if reached:
        traces.append(_level_trace(names, reached[0].mean, "plain training"))
        if len(names) == 1:  # a line through one point would be invisible
            layout["shapes"].append(_level(reached[0].mean))
        if reached[0].low is not None:
            layout["shapes"].append(strip(reached[0].low, reached[0].high))
    differing = [row for row in clipped if row.difference is not None]
    if differing:
        ticks = [_tick(comparison, row) for row in differing]
        differences = [row.difference for row in differing if row.difference is not None]
        traces.append(_estimates(ticks, differences, "difference from plain", "2"))
        scale, notes = _scale(differences, [*differences, ZERO], "y2", "{:+.3g}")
        layout["annotations"] += notes
        layout["xaxis"] |= {"anchor": "y2", "domain": [0, 1]}
        layout["yaxis"] |= {"domain": [0.56, 1]}
        layout["yaxis2"] = {
            "domain": [0, 0.44],
            "anchor": "x",
            "title": {"text": "difference from plain"},
            **scale,
        }
        layout["shapes"].append({**_level(0), "yref": "y2"})
    if not comparison.is_curve:
        layout["xaxis"]["title"]["text"] = "setting"
        for trace in traces:
            if trace["mode"] == "lines+markers":
                trace["mode"] = "markers"
    return Drawing(traces, layout)


def _scale(
    estimates: Sequence[Estimate], everything: Sequence[Estimate], axis: str, form: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a range in which most settings can be told apart, and notes on those beyond it.

    A single outlier would flatten all the others: it gets an arrow and its value instead.
    """
    middle = statistics.median(each.mean for each in everything)
    reach = [max(abs(middle - end) for end in _ends(each)) for each in everything]
    limit = 4 * statistics.median(reach)
    far = [each for each, far_out in zip(everything, reach, strict=True) if far_out > limit > 0]
    if not far or len(far) == len(everything):
        return {}, []
    ends = [end for each in everything if each not in far for end in _ends(each)]
    margin = 0.25 * (max(ends) - min(ends))
    low, high = min(ends) - margin, max(ends) + margin
    notes = [
        {
            "x": place,  # by position: a name like "2" would be read as one
            "y": low if each.mean < middle else high,
            "yref": axis,
            "text": ("↓ " if each.mean < middle else "↑ ") + form.format(each.mean),
            "showarrow": False,
            "yanchor": "bottom" if each.mean < middle else "top",
            "bgcolor": "var(--paper)",
        }
        for place, each in enumerate(estimates)
        if not low <= each.mean <= high
    ]
    return {"range": [low, high]}, notes


def _ends(each: Estimate) -> tuple[float, float]:
    return (
        each.mean if each.low is None else each.low,
        each.mean if each.high is None else each.high,
    )


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


def _tick(comparison: Comparison, row: ComparisonRow) -> str:
    if comparison.is_curve and row.setting.microbatch_size is not None:
        return str(row.setting.microbatch_size)
    return escaped(cut(row.setting.name, 30))


def _estimates(names: Sequence[str], estimates: Sequence[Estimate], name: str, axis: str) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": names,
        "y": [each.mean for each in estimates],
        "xaxis": "x",
        "yaxis": f"y{axis}",
        "error_y": _errors(
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


def _errors(
    means: Sequence[float], lows: Sequence[float | None], highs: Sequence[float | None]
) -> dict[str, Any]:
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


def _level_trace(names: Sequence[str], value: float, name: str) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": names,
        "y": [value] * len(names),
        "name": name,
        "line": {"color": "var(--orange)", "dash": "dash", "width": 1.8},
        "hovertemplate": f"{name}: %{{y:.5g}}<extra></extra>",
    }


def _level(value: float) -> dict[str, Any]:
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": value,
        "y1": value,
        "line": {"color": "var(--orange)", "dash": "dash", "width": 1.6},
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


def _line(xs: Sequence[float], ys: Line, name: str, color: str, dash: str = "solid") -> Trace:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": list(xs),
        "y": rounded(ys),
        "name": name,
        "line": {"color": color, "dash": dash, "width": 1.8},
        "hovertemplate": "%{y:.3g}",
    }


def _log_ticks(timeline: Timeline) -> dict[str, Any]:
    """Return the ticks of a logarithmic axis: 1, 2 and 5, or only powers of ten."""
    known = [v for line in timeline.norms.values() for v in line if v is not None and v > 0]
    if not known or max(known) / min(known) > 1000:
        return {"dtick": 1}
    decades = range(math.floor(math.log10(min(known))), math.ceil(math.log10(max(known))) + 1)
    ticks = [factor * 10.0**power for power in decades for factor in (1, 2, 5)]
    return {"tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def _band(xs: Sequence[float], low: Line, high: Line, name: str, strength: str) -> list[Trace]:
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
