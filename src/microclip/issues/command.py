"""`microclip issues`: its options, and printing what was found. Heavy imports wait until it runs,
so that `--help` is quick.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from microclip.issues.result import Issues


@dataclass(frozen=True)
class IssuesConfig:
    """Find examples that are probably wrong, in the record of a training run.

    A run is the folder of a microclip.Ledger, or one written by microclip.report.RunFolder. It
    needs a loss per example and a few epochs; with logits and labels on record, other labels are
    suggested.

    Look at the worst:  microclip issues runs/first

    Everything, for a spreadsheet:  microclip issues runs/first --csv issues.csv

    Retrain without them:  microclip issues runs/first --keep kept.txt
    """

    run: Path
    """The folder of a run or ledger."""
    csv: Path | None = None
    """Write the table of all examples here, as CSV."""
    parquet: Path | None = None
    """Write the same table here, as Parquet."""
    keep: Path | None = None
    """Write the ids of all other examples here: one per line, or as JSON if it ends in .json."""
    top: int = 20
    """How many flagged examples to print."""
    threshold: float = 0.5
    """Flag examples that are wrong with at least this probability."""

    def __post_init__(self) -> None:
        if self.top < 0:
            raise ValueError(f"top must be 0 or more, but got {self.top}.")


def run(config: IssuesConfig) -> Issues:
    """Print what was found, and write the files that were asked for."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from microclip.files import require_file_name
    from microclip.issues.find import find_issues

    console = Console()

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False, highlight=False)

    for path in (config.csv, config.parquet, config.keep):
        if path is not None:
            require_file_name(path)
    try:
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always", UserWarning)
            found = find_issues(ledger_in(config.run), threshold=config.threshold)
        if config.csv is not None:
            found.to_csv(config.csv)
        if config.parquet is not None:
            found.to_parquet(config.parquet)
        if config.keep is not None:
            found.to_kept_ids(config.keep)
    except ValueError as error:
        raise SystemExit(f"microclip: {error}") from error
    low, high = found.interval
    for warning in given:
        say(f"Warning: {warning.message}")
    flagged, wrong = found.flagged_count, found.wrong
    say(f"{flagged:,} of {len(found):,} examples {'is' if flagged == 1 else 'are'} flagged.")
    say(f"About {wrong:,} {'is' if wrong == 1 else 'are'} wrong: between {low:,} and {high:,}.")
    for note in found.notes:
        say(note)
    rows = found.flagged.slice(0, config.top).to_pylist()
    if rows:
        table = Table(box=None, pad_edge=False)
        for heading in ("id", "probability", "kind", "given", "suggested", "evidence"):
            table.add_column(heading, overflow="fold")
        for row in rows:
            values = (
                _shown(row["id"]),
                f"{row['probability']:.3f}",
                row["kind"],
                _shown(row["given_label"]),
                _suggestion(row),
                row["evidence"],
            )
            table.add_row(*(Text(value) for value in values))
        console.print()
        console.print(table)
    for what, path in (("table", config.csv), ("table", config.parquet), ("kept ids", config.keep)):
        if path is not None:
            say(f"{what}: {path}")
    return found


def ledger_in(path: Path) -> Path:
    """Return the folder of the ledger: the run's own folder, or the one inside it."""
    inside = path / "ledger"
    return inside if inside.is_dir() and not (path / "ledger.json").exists() else path


def _shown(value: Any) -> str:
    return "" if value is None else str(value)


def _suggestion(row: dict[str, Any]) -> str:
    if row["suggested_label"] is None or row["kind"] != "wrong label":
        return ""
    return f"{row['suggested_label']} ({row['confidence']:.2f})"
