"""The plot of `microclip theory`: bias, transient and their sum by b.

Colours are from the palette of Okabe and Ito, which people with any colour vision can tell apart;
marks and dashes say the same again without colour.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from microclip_lab.theory.config import TheoryConfig
from microclip_lab.theory.rates import Bound
from microclip_lab.theory.table import KINDS, SgdRate, TheoryRow, best

INK, FAINT = "#1f2328", "#d8dbe0"
COLOURS = {"printed": "#b34700", "corrected": "#56b4e9", "symmetric": "#005f46"}
MARKS = {"printed": "s", "corrected": "o", "symmetric": "^"}
DASHES = {"printed": "--", "corrected": "-", "symmetric": "-"}
WIDTHS = {"printed": 1.8, "corrected": 4.5, "symmetric": 1.4}  # the two corrected may coincide
HOW_TO_READ = (
    "How to read it: lower is better. The bias stays however long you train, the transient fades\n"
    "with the steps T. A ring marks the b at which a bound, the sum of both (bottom), is smallest."
)


def picture(config: TheoryConfig, rows: Sequence[TheoryRow], sgd: Sequence[SgdRate]) -> Figure:
    """Return a figure of the bounds."""
    figure = Figure(figsize=(7.2, 9.6), layout="constrained", facecolor="white")
    panels = figure.subplots(3, 1, sharex=True)
    parts: list[tuple[str, Callable[[Bound], float]]] = [
        ("Bias: what stays", lambda bound: bound.bias),
        (f"Transient: what is left after {config.steps:,} steps", lambda bound: bound.transient),
        ("Their sum: the bound of the gradient norm", lambda bound: bound.total),
    ]
    for axes, (title, part) in zip(panels, parts, strict=True):
        _style(axes, title)
        _draw_bounds(axes, rows, part)
    _draw_best(panels[2], rows)
    _draw_measured(panels[2], rows)
    corrected = sgd[-1]
    if corrected.bound is not None:
        panels[2].axhline(
            corrected.bound.total,
            color="#5f6670",
            linestyle=":",
            linewidth=1.8,
            label=corrected.name,
        )
    _mark_sizes(panels[2], config)
    handles, labels = panels[2].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper center", ncols=2, frameon=False, labelcolor=INK
    )
    figure.supxlabel(HOW_TO_READ, fontsize=9.5, color=INK, ha="center")
    return figure


def rendered(figure: Figure, kind: str) -> bytes:
    """Return the figure as PNG or SVG."""
    buffer = io.BytesIO()
    # text stays text in SVG, and files are reproducible
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "microclip"}):
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(buffer, format=kind, dpi=160, facecolor="white", metadata=metadata)
    return buffer.getvalue()


def _draw_bounds(axes: Axes, rows: Sequence[TheoryRow], part: Callable[[Bound], float]) -> None:
    drawn: list[float] = []
    for kind, name in KINDS.items():
        points = [(row.b, part(bound)) for row in rows if (bound := row.bounds[kind]) is not None]
        if points:
            xs, ys = zip(*points, strict=True)
            drawn += ys
            axes.plot(
                xs,
                ys,
                color=COLOURS[kind],
                marker=MARKS[kind],
                linestyle=DASHES[kind],
                linewidth=WIDTHS[kind],
                markersize=WIDTHS[kind] + 4.5,
                label=name,
            )
    if drawn and min(drawn) > 0:  # without noise there is no bias, and no logarithm of it
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))


def _draw_best(axes: Axes, rows: Sequence[TheoryRow]) -> None:
    for kind in KINDS:
        row = best(rows, kind)
        if row is not None and (bound := row.bounds[kind]) is not None:
            axes.plot(
                [row.b],
                [bound.total],
                marker="o",
                markersize=15,
                markerfacecolor="none",
                markeredgecolor=COLOURS[kind],
                markeredgewidth=1.6,
                clip_on=False,
                linestyle="none",
            )


def _draw_measured(axes: Axes, rows: Sequence[TheoryRow]) -> None:
    for name, marker, values in (
        ("simulated, unit rule (the theorems')", "x", [row.measured for row in rows]),
        ("simulated, min rule (Algorithm 1)", "+", [row.measured_min for row in rows]),
    ):
        points = [(row.b, y) for row, y in zip(rows, values, strict=True) if y is not None]
        if points:
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, marker=marker, color=INK, linestyle="none", markersize=8, label=name)


def _mark_sizes(axes: Axes, config: TheoryConfig) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(config.sizes)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda b, _: f"{b:g}"))
    axes.set_xlim(config.sizes[0] / 1.4, config.sizes[-1] * 1.4)
    slope = f", 1 + c ~ b^{config.c_slope:g}" if config.c_slope else ""
    axes.set_xlabel(
        f"micro-batch size b    (epsilon = {config.epsilon:g}, c = {config.c:g}{slope}, "
        f"sigma = {config.sigma:g}, L = {config.smoothness:g}, gap = {config.gap:g}, "
        f"B = {config.batch_size})",
        color=INK,
    )


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", color=INK, fontsize=12, fontweight="bold")
    axes.set_ylabel("gradient norm", color=INK)
    axes.tick_params(colors=INK, which="both")
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(FAINT)
