"""The figures of the reproduction, for plotly. What they mean is explained in `page`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from microclip.report.blocks import Drawing
from microclip.report.statistics import Estimate
from microclip.report.traces import (
    Look,
    escaped,
    estimates_trace,
    level,
    log_ticks,
    look,
    rounded,
    strip,
    titled,
)
from microclip_lab.reproduction.record_tables import ArmRow
from microclip_lab.reproduction.tasks import PLAIN
from microclip_lab.reproduction.theory_part import RateTable

Trace = dict[str, Any]
THIN = {"color": "var(--soft)", "dash": "dot", "width": 1.2}
COSINES = {
    "benign_benign": "benign and benign",
    "dragger_benign": "dragger and benign",
    "dragger_dragger": "dragger and dragger",
}


def cosines(by_step: Mapping[int, Mapping[str, Estimate]]) -> Drawing:
    """Draw the three mean cosines over steps."""
    traces = []
    for place, (kind, name) in enumerate(COSINES.items()):
        known = {step: figures[kind] for step, figures in by_step.items() if kind in figures}
        # draggers against the others in the colour that stands out
        traces += with_band(known, name, look(place, plain=kind == "dragger_benign"), marks=True)
    return Drawing(
        traces,
        {
            "xaxis": {"title": {"text": "step"}},
            "yaxis": {"title": {"text": "mean cosine of two gradients"}},
            "shapes": [level(0.0, THIN)],
        },
    )


def convergence(
    curves: Mapping[str, Mapping[int, Estimate]], arms: Sequence[str], lower_is_better: bool
) -> Drawing:
    """Draw error rates over steps, both logarithmic, as the paper's Figure 2 does."""
    traces = []
    place = 0
    errors: list[float] = []
    for name in arms:
        if name not in curves:
            continue
        plain = name == PLAIN
        curve = {
            step: each if lower_is_better else _turned_round(each)
            for step, each in curves[name].items()
        }
        curve = {step: each for step, each in curve.items() if each.mean > 0}
        errors += [each.mean for each in curve.values()]
        traces += with_band(curve, escaped(name), look(place, plain))
        place += not plain
    steps = [step for name in arms for step in curves.get(name, {})]
    title = "WER on validation data, %" if lower_is_better else "validation error, %"
    return Drawing(
        traces,
        {
            "xaxis": {"title": {"text": "step"}, "type": "log", **log_ticks(steps)},
            "yaxis": {"title": {"text": title}, "type": "log", **log_ticks(errors)},
        },
    )


def sweet_spot(rows: Sequence[ArmRow], plain: ArmRow | None, figure: str, title: str) -> Drawing:
    """Draw a figure by micro-batch size, and below it the gain against plain training."""
    known = [row for row in rows if figure in row.figures]
    names = [str(row.size) for row in known]
    traces = [estimates_trace(names, [row.figures[figure] for row in known], "clipped", "")]
    layout: dict[str, Any] = {
        "xaxis": {"type": "category", "title": {"text": "micro-batch size b"}},
        "yaxis": {"title": titled(title)},
        "shapes": [],
    }
    if plain is not None and figure in plain.figures:
        reached = plain.figures[figure]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": names,
                "y": [reached.mean] * len(names),
                "name": "plain training",
                "line": {"color": "var(--orange)", "dash": "dash", "width": 1.8},
                "hovertemplate": "plain: %{y:.4g}<extra></extra>",
            }
        )
        if reached.low is not None and reached.high is not None:
            layout["shapes"].append(strip(reached.low, reached.high))
    gains = [
        (str(row.size), row.gain.estimate)
        for row in known
        if row.gain is not None and row.gain.estimate is not None
    ]
    if gains:  # an axis without anything on it has no range, and cannot be drawn
        traces.append(estimates_trace([n for n, _ in gains], [e for _, e in gains], "gain", "2"))
        layout["xaxis"] |= {"anchor": "y2", "domain": [0, 1]}
        layout["yaxis"] |= {"domain": [0.56, 1]}
        layout["yaxis2"] = {
            "title": {"text": "gain, points"},
            "domain": [0, 0.44],
            "anchor": "x",
        }
        layout["shapes"].append({**level(0.0, THIN), "yref": "y2"})
    return Drawing(traces, layout)


def rates(table: RateTable) -> Drawing:
    """Draw the bounds over b, and what was measured."""
    lines: dict[str, list[float | None]] = {
        "printed": [row.printed for row in table.rows],
        "corrected": [row.corrected for row in table.rows],
        "corrected, symmetric noise": [row.symmetric for row in table.rows],
        "measured, theorem's update": [*(row.unit for row in table.rows)],
        "measured, Algorithm 1": [*(row.smallest for row in table.rows)],
    }
    sizes = [row.b for row in table.rows]
    traces: list[Trace] = []
    for place, (name, values) in enumerate(lines.items()):
        shown = look(place)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": sizes,
                "y": rounded(values),
                "name": name,
                "line": {**shown.line, "dash": "dot" if "measured" in name else "solid"},
                "marker": {"symbol": shown.symbol, "size": 7},
                "hovertemplate": "%{y:.3g}",
            }
        )
    known = [value for values in lines.values() for value in values if value is not None]
    return Drawing(
        traces,
        {
            "xaxis": {
                "title": {"text": "micro-batch size b"},
                "type": "log",
                "tickvals": sizes,
                "ticktext": [str(size) for size in sizes],
            },
            "yaxis": {"title": {"text": "gradient norm"}, "type": "log", **log_ticks(known)},
        },
    )


def with_band(
    line: Mapping[int, Estimate], name: str, looks: Look, *, marks: bool = False
) -> list[Trace]:
    """Return a line over steps, and its interval as a pale band."""
    steps = list(line)
    ends = [
        (step, each.low, each.high)
        for step, each in line.items()
        if each.low is not None and each.high is not None
    ]
    band: Trace = {
        "type": "scatter",
        "mode": "lines",
        "x": [step for step, _, _ in ends] + [step for step, _, _ in reversed(ends)],
        "y": rounded([high for _, _, high in ends] + [low for _, low, _ in reversed(ends)]),
        "fill": "toself",
        "fillcolor": looks.line["color"],
        "opacity": 0.16,
        "line": {"width": 0},
        "name": name,
        "legendgroup": name,
        "showlegend": False,
        "hoverinfo": "skip",
    }
    mean: Trace = {
        "type": "scatter",
        "mode": "lines+markers" if marks or len(steps) == 1 else "lines",
        "x": steps,
        "y": rounded([each.mean for each in line.values()]),
        "name": name,
        "legendgroup": name,
        "line": looks.line,
        "marker": {"symbol": looks.symbol, "size": 7, "color": looks.line["color"]},
        "hovertemplate": "%{y:.4g}",
    }
    return [band, mean] if ends else [mean]


def _turned_round(each: Estimate) -> Estimate:
    low, high = each.low, each.high
    return Estimate(
        100 - each.mean,
        None if high is None else 100 - high,
        None if low is None else 100 - low,
        each.count,
    )
