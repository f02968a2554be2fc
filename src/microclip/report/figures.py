"""Figures for plotly: traces and layouts as plain dictionaries.

Colors are names from the style sheet, so that the same figure works in light and dark mode. What a
figure means is explained in `sections`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from microclip.report.blocks import Drawing
from microclip.report.comparison import Comparison, ComparisonRow, settings_of
from microclip.report.run_data import Timeline
from microclip.report.runs import Run
from microclip.report.statistics import Estimate
from microclip.report.traces import (
    Look,
    band,
    cut,
    error_bars,
    escaped,
    estimates_trace,
    level,
    level_trace,
    line_trace,
    log_ticks,
    look,
    strip,
    thinned,
    titled,
)

POINTS = 400  # per line, at most
ALL_POINTS = 40_000  # per figure, all choices together
BINS = 40

ZERO = Estimate(0.0, 0.0, 0.0, 1)
HATCHED = {"shape": "/", "fillmode": "overlay", "fgcolor": "var(--paper)", "size": 6}


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
        *band(steps, by_quantile[0.05], by_quantile[0.95], "90 % of the norms", "faint"),
        *band(steps, by_quantile[0.25], by_quantile[0.75], "half of the norms", "strong"),
        line_trace(steps, by_quantile[0.5], "median norm", "var(--blue)"),
    ]
    if bound:
        traces.append(line_trace(steps, timeline.bound, "bound", "var(--orange)", dash="dash"))
    return Drawing(
        traces,
        {
            "xaxis": {"title": {"text": "step"}},
            "yaxis": {
                "title": {"text": "gradient norm"},
                "type": "log",
                **log_ticks([v for line in timeline.norms.values() for v in line]),
            },
        },
    )


def weights(timeline: Timeline) -> Drawing:
    """Draw bands of weights."""
    steps, by_quantile = timeline.steps, timeline.weights
    traces = [
        *band(steps, by_quantile[0.05], by_quantile[0.95], "90 %", "faint"),
        *band(steps, by_quantile[0.25], by_quantile[0.75], "half", "strong"),
        line_trace(steps, by_quantile[0.5], "median", "var(--blue)"),
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
            "shapes": [level(1)],
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
        "error_x": error_bars(
            [row["ratio"] for row in known],
            [row["low"] for row in known],
            [row["high"] for row in known],
        ),
        "marker": {"color": "var(--blue)", "size": 9},
        "hovertemplate": "%{y}: %{x:.2f}<extra></extra>",
        "showlegend": False,
    }
    upright = {**level(1), "x0": 1, "x1": 1, "xref": "x", "y0": 0, "y1": 1, "yref": "paper"}
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
    traces = [estimates_trace(names, values, name, "")]
    reached = [plain[0].value] if len(plain) == 1 else []
    scale, notes = _scale(values, [*values, *reached], "y", "{:.3g}")
    layout: dict[str, Any] = {
        "xaxis": {"type": "category", "title": {"text": "micro-batch size b"}},
        "yaxis": {"title": titled(metric), **scale},
        "shapes": [],
        "annotations": notes,
    }
    if reached:
        traces.append(level_trace(names, reached[0].mean, "plain training"))
        if len(names) == 1:  # a line through one point would be invisible
            layout["shapes"].append(level(reached[0].mean))
        if reached[0].low is not None:
            layout["shapes"].append(strip(reached[0].low, reached[0].high))
    differing = [row for row in clipped if row.difference is not None]
    if differing:
        ticks = [_tick(comparison, row) for row in differing]
        differences = [row.difference for row in differing if row.difference is not None]
        traces.append(estimates_trace(ticks, differences, "difference from plain", "2"))
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
        layout["shapes"].append({**level(0), "yref": "y2"})
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


def _tick(comparison: Comparison, row: ComparisonRow) -> str:
    if comparison.is_curve and row.setting.microbatch_size is not None:
        return str(row.setting.microbatch_size)
    return escaped(cut(row.setting.name, 30))
