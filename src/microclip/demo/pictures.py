"""The demo's picture, as PNG bytes, for those who want one file; the page draws its own.

Colours are from the palette of Okabe and Ito, which people with any colour vision can tell apart;
marks and labels say the same again without colour.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from microclip.demo.summary import Estimate, Row, Summary

DOTS_PER_INCH = 160


@dataclass(frozen=True)
class Theme:
    """The colours of a page."""

    ink: str
    faint: str
    background: str
    clipped: str
    plain: str


LIGHT = Theme(
    ink="#1f2328",
    faint="#d8dbe0",
    background="#ffffff",
    clipped="#0072b2",
    plain="#b34700",
)
DARK = Theme(
    ink="#e6e8eb",
    faint="#3a4048",
    background="#16191d",
    clipped="#56b4e9",
    plain="#f0a05a",
)


def sweet_spot(summary: Summary, theme: Theme) -> bytes:
    """Draw test accuracy, and below it the difference to plain training, against b."""
    figure = Figure(figsize=(6.2, 6.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    config = summary.config
    clipped = [row for row in summary.rows if row.setting is not None]
    _style(
        above,
        theme,
        f"Test accuracy, {100 * config.noise:g} % of the training labels wrong",
        "accuracy, %",
    )
    plain = summary.plain.accuracy
    above.axhspan(plain.low, plain.high, color=theme.plain, alpha=0.18, linewidth=0)
    above.axhline(
        plain.mean, color=theme.plain, linestyle="--", label=f"plain training, {plain.mean:.1f} %"
    )
    _draw_estimates(above, theme, clipped, [row.accuracy for row in clipped], "clipped")
    _legend(above, theme, columns=2, place="best")

    _style(below, theme, "Difference to plain training, seed by seed", "percentage points")
    below.axhline(0, color=theme.plain, linestyle="--")
    _draw_differences(below, theme, clipped)
    sizes = [row.setting for row in clipped if row.setting is not None]
    below.set_xscale("log", base=2)
    below.xaxis.set_major_locator(FixedLocator(sizes))
    below.xaxis.set_minor_locator(NullLocator())
    below.xaxis.set_major_formatter(FuncFormatter(lambda b, _: f"{b:g}"))
    below.set_xlim(sizes[0] / 1.4, sizes[-1] * 1.4)
    below.set_xlabel(
        f"micro-batch size b   ({sizes[-1]} = the whole mini-batch)\n"
        f"bars and band: 95 % intervals over {config.seeds} seeds",
        color=theme.ink,
    )
    return _png(figure, theme)


def _draw_estimates(
    axes: Axes, theme: Theme, rows: Sequence[Row], estimates: Sequence[Estimate], name: str
) -> None:
    means = [estimate.mean for estimate in estimates]
    axes.errorbar(
        [row.setting or 0 for row in rows],
        means,
        yerr=[
            [estimate.mean - estimate.low for estimate in estimates],
            [estimate.high - estimate.mean for estimate in estimates],
        ],
        color=theme.clipped,
        marker="o",
        linewidth=1.8,
        capsize=4,
        label=name,
    )


def _draw_differences(axes: Axes, theme: Theme, rows: Sequence[Row]) -> None:
    """Draw the differences, large enough to see: what is far below is an arrow and its number."""
    found = {row: row.difference for row in rows if row.difference is not None}
    reach = {row: max(abs(d.low), abs(d.high)) for row, d in found.items()}
    # three times the typical size; a setting that falls out of that would flatten all the others
    limit = max(3 * statistics.median(reach.values()), 0.5)
    near = [row for row in rows if reach[row] <= limit]
    far = [row for row in rows if reach[row] > limit]
    shown = 1.15 * max((reach[row] for row in near), default=limit) or limit
    _draw_estimates(axes, theme, near, [found[row] for row in near], "")
    if not far:
        return
    axes.set_ylim(-shown, shown)
    for row in far:
        edge = math.copysign(shown, found[row].mean)
        axes.annotate(
            "",
            xy=(row.setting or 0, edge),
            xytext=(row.setting or 0, 0.4 * edge),
            arrowprops={"arrowstyle": "-|>", "color": theme.clipped, "linewidth": 1.8},
        )
        axes.annotate(
            f"{found[row].mean:+.1f}",  # longer, it would run into the next bar
            xy=(row.setting or 0, 0.7 * edge),
            xytext=(6, 0),
            textcoords="offset points",
            color=theme.ink,
            va="center",
            fontsize=9.5,
        )


def _style(axes: Axes, theme: Theme, title: str, vertical: str) -> None:
    axes.set_facecolor(theme.background)
    axes.set_title(title, loc="left", color=theme.ink, fontsize=12, fontweight="bold")
    axes.set_ylabel(vertical, color=theme.ink)
    axes.tick_params(colors=theme.ink, which="both")
    axes.grid(axis="y", color=theme.faint, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.faint)


def _legend(axes: Axes, theme: Theme, columns: int, place: Literal["best", "upper right"]) -> None:
    axes.legend(
        loc=place,
        ncols=columns,
        facecolor=theme.background,
        edgecolor=theme.faint,
        labelcolor=theme.ink,
        fontsize=9.5,
    )


def _png(figure: Figure, theme: Theme) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH, facecolor=theme.background)
    return buffer.getvalue()
