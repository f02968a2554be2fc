"""Results of sweeps and races as tables, for a terminal and in Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from microclip.report.comparison import signed, unsigned
from microclip.report.statistics import Estimate
from microclip_lab.sweep.race_report import Place, RaceReport
from microclip_lab.sweep.summary import Interval, Summary, SweepRow

WEIGHTS = {"last": "last weights", "best": "best checkpoint"}


@dataclass(frozen=True)
class TextTable:
    """A table before formatting: the first column is text, the others are numbers."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def sweep_tables(summary: Summary) -> list[TextTable]:
    """Return a table for the weights that are compared, and one for the others."""
    judged = summary.grid.config.judge_by
    other = "best" if judged == "last" else "last"
    return [_comparison(summary, judged), _comparison(summary, other)]


def race_tables(report: RaceReport) -> list[TextTable]:
    """Return how far each candidate got, with its validation figure at each rung."""
    race = report.race
    metric = f"validation_{race.headline}"
    steps = [rung.step for rung in race.rungs]
    if len(steps) > 1 and steps[-2] == steps[-1]:
        del steps[-1]
    tested = f"test_{race.headline}"
    return [
        TextTable(
            f"{report.recipe}: {metric} at each rung, {tested} at the end",
            ("setting", "rate", *(f"step {step}" for step in steps), "dropped out", "test"),
            tuple(
                (
                    place.cell.name,
                    f"{place.learning_rate:g}",
                    *(_figure(place.figures.get(step)) for step in steps),
                    _left(place, race.steps),
                    _figure(_mean_of(place, tested)),
                )
                for place in report.places
            ),
        )
    ]


def show(tables: Sequence[TextTable], sentences: Sequence[str], console: Console) -> None:
    """Print tables and sentences."""
    for rows in tables:
        table = Table(title=rows.title, title_justify="left")
        for place, heading in enumerate(rows.headings):
            table.add_column(heading, justify="right" if place else "left", no_wrap=not place)
        for row in rows.rows:
            table.add_row(*row)
        console.print(table)
    for sentence in sentences:
        console.print()
        console.print(sentence, markup=False, highlight=False)


def markdown(title: str, tables: Sequence[TextTable], sentences: Sequence[str]) -> str:
    """Return tables and sentences in Markdown."""
    parts = [f"# {title}", *sentences[:1]]
    for rows in tables:
        lines = [
            f"**{rows.title}**",
            "",
            _line(rows.headings),
            _line(["---", *["---:"] * (len(rows.headings) - 1)]),
            *(_line(row) for row in rows.rows),
        ]
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, *sentences[1:]]) + "\n"


def _comparison(summary: Summary, which: str) -> TextTable:
    grid = summary.grid
    better = "lower" if grid.lower_is_better else "higher"
    return TextTable(
        f"{summary.recipe}: test_{grid.headline} of the {WEIGHTS[which]} ({better} is better)",
        ("setting", "rate", "mean, 95 %", "vs. plain, t", "bootstrap", "seeds"),
        tuple(_row(row, which) for row in summary.rows),
    )


def _row(row: SweepRow, which: str) -> tuple[str, ...]:
    figure = row.figure(which)
    rate = "none" if row.learning_rate is None else f"{row.learning_rate:g}"
    return (
        row.cell.name,
        rate + ("*" if row.at_edge else ""),
        "diverged" if figure.mean is None else unsigned(figure.mean),
        "" if figure.difference is None else signed(figure.difference),
        "" if figure.difference is None else _between(figure.difference, figure.bootstrap),
        str(len(figure.values)),
    )


def _between(difference: Estimate, interval: Interval | None) -> str:
    if interval is None:
        return ""
    same = Estimate(difference.mean, interval.low, interval.high, difference.count)
    return signed(same).partition(" ")[2].strip("()")


def _left(place: Place, steps: int) -> str:
    if place.won:
        return "won"
    return "at the end" if place.last_step == steps else f"at {place.last_step}"


def _mean_of(place: Place, metric: str) -> float | None:
    values = [run.metrics.get(metric) for run in place.runs.values()]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return "diverged" if math.isnan(value) else f"{value:.4g}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
