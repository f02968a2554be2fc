"""Plots of probes. Needs matplotlib, which is imported on first use.

Colors are from the palette of Okabe and Ito, which is safe for color-blind readers; markers differ,
too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from microclip.probing.result import Probe, Row
    from microclip.probing.run_probe import Moment

INK, FAINT, PLAIN = "#1f2328", "#d8dbe0", "#b34700"
COLORS = ("#0072b2", "#009e73", "#cc79a7", "#e69f00", "#5f6670", "#56b4e9")
MARKERS = "osD^vPX"


def draw_probe(probe: Probe, path: str | Path) -> None:
    """Plot gains above, norms and bounds below, against b."""
    figure = _figure(6.4)
    above, below = figure.subplots(2, 1, sharex=True)
    rules = list(dict.fromkeys(row.rule for row in probe.rows))
    drawn = [row for row in probe.rows if math.isfinite(row.gain) and row.gain > 0]
    _style(above, "What a step is worth", "times a plain step")
    above.axhline(1, color=PLAIN, linestyle="--", label="plain training")
    for number, rule in enumerate(rules):
        _draw_gains(above, [r for r in drawn if r.rule == rule], number, rule)
    _ratios(above, [row.gain for row in drawn])
    _style(below, "Micro-batch gradients and the bound", "norm")
    rows = [row for row in probe.rows if row.rule == rules[0]]
    sizes = [row.size for row in rows]
    below.fill_between(
        sizes,
        [row.norm_low for row in rows],
        [row.norm_high for row in rows],
        color=FAINT,
        label="80 % of the norms",
    )
    below.plot(sizes, [row.norm_median for row in rows], color=INK, label="median norm")
    for number, rule in enumerate(rules):
        bounds = [row.bound for row in probe.rows if row.rule == rule]
        below.plot(
            sizes,
            bounds,
            color=COLORS[number % len(COLORS)],
            marker=MARKERS[number % len(MARKERS)],
            label="bound" if len(rules) == 1 else f"bound, {rule}",
        )
    if all(row.norm_low > 0 and row.bound > 0 for row in probe.rows):
        below.set_yscale("log")
    _sizes_along(below, sizes)
    below.set_xlabel(
        f"micro-batch size b   (steps of B = {probe.batch_size})\n"
        "Above the dashed line one step lowers the loss more than a plain one,\n"
        "at these weights; it does not tell where training ends up. Bars: 95 % intervals.",
        color=INK,
    )
    for axes in (above, below):
        axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    figure.savefig(path, dpi=160, facecolor="white")


def draw_history(moments: Sequence[Moment], path: str | Path) -> None:
    """Plot the gain of each size above, the best size below, against the step."""
    figure = _figure(6.4)
    above, below = figure.subplots(2, 1, sharex=True)
    steps = [moment.step for moment in moments]
    _style(above, "What a step is worth, along the run", "times a plain step")
    above.axhline(1, color=PLAIN, linestyle="--", label="plain")
    settings = list(dict.fromkeys((r.rule, r.size) for m in moments for r in m.rows))
    several = len({rule for rule, _ in settings}) > 1
    for number, (rule, size) in enumerate(settings):
        found = {
            m.step: r.gain if 0 < r.gain < math.inf else math.nan  # a gap
            for m in moments
            for r in m.rows
            if (r.rule, r.size) == (rule, size)
        }
        above.plot(
            list(found),
            list(found.values()),
            color=COLORS[number % len(COLORS)],
            marker=MARKERS[number % len(MARKERS)],
            label=f"b = {size}" + (f", {rule}" if several else ""),
        )
    gains = [row.gain for moment in moments for row in moment.rows]
    _ratios(above, [gain for gain in gains if 0 < gain < math.inf])
    above.legend(frameon=False, fontsize=9, labelcolor=INK, ncols=3)
    _style(below, "The best size", "b")
    known = [m for m in moments if m.best is not None]
    for moment in known:
        assert moment.best is not None
        rivals = [size for _, size in moment.best.rivals]
        below.vlines(
            moment.step,
            min([moment.best.size, *rivals]),
            max([moment.best.size, *rivals]),
            color=FAINT,
            linewidth=6,
        )
    best = [m.best.size for m in known if m.best is not None]
    below.plot([m.step for m in known], best, color=COLORS[0], marker="o")
    below.set_yscale("log", base=2)
    _plain_numbers(below.yaxis, sorted({size for _, size in settings}))
    below.set_xlim(min(steps) - 0.5, max(steps) + 0.5)
    below.set_xlabel(
        "step\nDots: the size that ranks first at the weights of that step.\n"
        "Gray: sizes that cannot be distinguished from it.",
        color=INK,
    )
    figure.savefig(path, dpi=160, facecolor="white")


def _figure(height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'microclip[plot]'") from error
    return Figure(figsize=(6.4, height), layout="constrained")


def _draw_gains(axes: Any, rows: Sequence[Row], number: int, rule: str) -> None:
    """Draw gains side by side; intervals that reach beyond the axes are cut off."""
    gains = [row.gain for row in rows]
    lows = [max(row.gain_low, row.gain / 1000) for row in rows]
    highs = [min(row.gain_high, row.gain * 1000) for row in rows]
    axes.errorbar(
        [row.size * 1.06**number for row in rows],
        gains,
        yerr=[
            [max(0.0, gain - low) for gain, low in zip(gains, lows, strict=True)],
            [max(0.0, high - gain) for gain, high in zip(gains, highs, strict=True)],
        ],
        color=COLORS[number % len(COLORS)],
        marker=MARKERS[number % len(MARKERS)],
        elinewidth=1,
        capsize=3,
        label=rule,
    )


def _ratios(axes: Any, gains: Sequence[float]) -> None:
    """Use a log scale, so that 2 and 1/2 are equally far from 1; ignore wide intervals."""
    axes.set_yscale("log")
    axes.set_ylim(min([1.0, *gains]) / 2.5, max([1.0, *gains]) * 2.5)
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    if max([1.0, *gains]) / min([1.0, *gains]) < 4:
        axes.set_yticks([0.25, 0.5, 1, 2, 4, 8])
        axes.set_ylim(min([1.0, *gains]) / 2.5, max([1.0, *gains]) * 2.5)


def _style(axes: Any, title: str, vertical: str) -> None:
    axes.set_title(title, loc="left", color=INK, fontsize=12, fontweight="bold")
    axes.set_ylabel(vertical, color=INK)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))


def _sizes_along(axes: Any, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    _plain_numbers(axes.xaxis, sizes)
    axes.set_xlim(sizes[0] / 1.4, sizes[-1] * 1.4)


def _plain_numbers(axis: Any, values: Sequence[int]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis.set_major_locator(FixedLocator(values))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
