"""The demo's own figures; those of run folders are the report's."""

from __future__ import annotations

from microclip.demo.config import label
from microclip.demo.summary import Summary
from microclip.report.blocks import Drawing
from microclip.report.figures import look


def weights(summary: Summary) -> Drawing:
    """Draw the weight that micro-batches got, by the number of wrong labels in them."""
    wrong = [str(weight.wrong) for weight in summary.weights]
    bars = {
        "type": "bar",
        "x": wrong,
        "y": [weight.weight for weight in summary.weights],
        "text": [f"{weight.weight:.2f}" for weight in summary.weights],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": "var(--blue)"},
        "name": f"micro-batches of {summary.config.watched}",
        "hovertemplate": "%{x} wrong: %{y:.3f}<extra></extra>",
    }
    even = {
        "type": "scatter",
        "mode": "lines",
        "x": wrong,
        "y": [1.0] * len(wrong),
        "name": "all equal, as in plain training",
        "line": {"color": "var(--orange)", "dash": "dash", "width": 1.8},
        "hoverinfo": "skip",
    }
    return Drawing(
        [bars, even],
        {
            "xaxis": {"type": "category", "title": {"text": "wrong labels in the micro-batch"}},
            "yaxis": {"title": {"text": "weight / mean weight"}, "rangemode": "tozero"},
            "bargap": 0.4,
        },
    )


def rates(summary: Summary) -> Drawing:
    """Draw the validation accuracy of every learning rate that was tried."""
    batch_size = summary.config.batch_size
    drawn = [setting for setting in summary.tuning if setting != batch_size]  # b = B is plain
    tried = sorted({rate for rates in summary.tuning.values() for rate in rates})
    traces = []
    for place, setting in enumerate(drawn):
        found = sorted(summary.tuning[setting].items())
        drawn_as = look(place - 1, plain=setting is None)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": [rate for rate, _ in found],
                "y": [accuracy for _, accuracy in found],
                "name": label(setting, batch_size),
                "line": drawn_as.line,
                "marker": {"symbol": drawn_as.symbol, "size": 7},
                "hovertemplate": "%{y:.1f} %",
            }
        )
    return Drawing(
        traces,
        {
            "xaxis": {
                "type": "log",
                "title": {"text": "learning rate"},
                "tickvals": tried,
                "ticktext": [f"{rate:g}" for rate in tried],
            },
            "yaxis": {"title": {"text": "validation accuracy, %"}},
        },
    )
