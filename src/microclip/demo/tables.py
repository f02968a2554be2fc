"""What the demo prints when it is done."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from microclip.demo.summary import Summary, percent, points, weights_sentence


def print_summary(summary: Summary, console: Console) -> None:
    """Print the results, what happened to wrong labels, and the sentence that follows."""
    console.print(results_table(summary))
    console.print(
        "Learning rates were chosen on clean validation data and seeds of their own; "
        "test labels are clean. Intervals are 95 %.",
        highlight=False,
    )
    console.print(weights_table(summary))
    console.print(weights_sentence(summary.weights), highlight=False)
    for sentence in (*summary.notes, summary.verdict):
        console.print()
        console.print(sentence, highlight=False, style="bold")


def results_table(summary: Summary) -> Table:
    """Return the table of settings."""
    config = summary.config
    table = Table(
        title=f"Digits, {100 * config.noise:g} % wrong training labels, {config.seeds} seeds",
        title_justify="left",
    )
    table.add_column("setting", no_wrap=True)
    table.add_column("rate", justify="right", no_wrap=True)
    table.add_column("test accuracy, %", justify="right", no_wrap=True)
    table.add_column("points against plain", justify="right", no_wrap=True)
    for row in summary.rows:
        difference = "" if row.difference is None else points(row.difference)
        table.add_row(row.name, f"{row.learning_rate:g}", percent(row.accuracy), difference)
    return table


def weights_table(summary: Summary) -> Table:
    """Return the table of weights by wrong labels."""
    table = Table(
        title=f"Micro-batches of {summary.config.watched}: weight, 1 = mean of the step",
        title_justify="left",
    )
    for heading in ("wrong labels in it", "micro-batches", "mean weight"):
        table.add_column(heading, justify="right", no_wrap=True)
    for weight in summary.weights:
        table.add_row(str(weight.wrong), f"{weight.microbatches:,}", f"{weight.weight:.2f}")
    return table
