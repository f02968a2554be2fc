"""`microclip spikes`: its options, and printing what was found. Heavy imports wait until it runs,
so that `--help` is quick.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from microclip.tasks import expect_task, find_task

if TYPE_CHECKING:
    from microclip.step_spikes.find import Spike, Spikes


@dataclass(frozen=True)
class SpikesConfig:
    """Find steps whose loss or gradient stands out, and the rows behind them.

    A run is the folder of a microclip.Ledger, or one written by microclip.report.RunFolder. Losses
    of examples show which row had the high loss; norms of micro-batches, which had the large
    gradient.

    The worst:  microclip spikes runs/first

    All rows of the worst 50, for a spreadsheet:  microclip spikes runs/first --most 50 --csv a.csv

    Run the worst step again, or another one, with a function last in tasks.py, in the current
    folder, that returns (model, loss_fn, dataset), the model in the state before that step:
      microclip spikes runs/first --replay tasks:last --step 412
    """

    run: Path
    """The folder of a run or ledger."""
    csv: Path | None = None
    """Write the rows of all spikes here, as CSV."""
    most: int = 10
    """How many spikes to print."""
    rows: int = 3
    """How many rows of each."""
    window: int = 30
    """A step is compared with this many before it."""
    threshold: float = 5.0
    """It stands out if it lies this many robust standard deviations above them."""
    replay: str | None = None
    """Run a step again: a function that returns (model, loss_fn, dataset), as module:function."""
    step: int | None = None
    """The step to run again; by default the first of the worst spike."""

    def __post_init__(self) -> None:
        if self.rows < 0:
            raise ValueError(f"rows must be 0 or more, but got {self.rows}.")
        if self.replay is not None:
            expect_task("replay", self.replay)
        if self.step is not None and self.replay is None:
            raise ValueError(f"--step {self.step} says which step to run again with --replay.")


def run(config: SpikesConfig) -> Spikes:
    """Print what was found, and write the file that was asked for."""
    from rich.console import Console

    from microclip.step_spikes.find import spikes

    console = Console()

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False, highlight=False)

    inside = config.run / "ledger"
    is_run = inside.is_dir() and not (config.run / "ledger.json").exists()
    ledger = inside if is_run else config.run
    try:
        found = spikes(
            ledger,
            window=config.window,
            threshold=config.threshold,
            most=config.most,
        )
        if config.csv is not None:
            found.to_csv(config.csv)
    except ValueError as error:
        raise SystemExit(f"microclip: {error}") from error
    spikes_found = "1 spike" if found.total == 1 else f"{found.total or 'No'} spikes"
    shown = f" These are the worst {len(found)}." if len(found) < found.total else ""
    say(f"{spikes_found} in {found.steps:,} steps.{shown}")
    for spike in found.found:
        say("")
        say(_heading(spike))
        say(f"  {spike.note}")
        for row in spike.rows.slice(0, config.rows).to_pylist():
            say(f"  {_row(row)}")
    for note in found.notes:
        say(f"\n{note}")
    if config.csv is not None:
        say(f"\nrows: {config.csv}")
    if config.replay is not None:
        say(f"\n{_replayed(config, config.replay, ledger, found)}")
    return found


def _replayed(config: SpikesConfig, task: str, ledger: Path, found: Spikes) -> str:
    """Run a step again, and return what is to be printed."""
    from microclip.step_spikes.run_replay import replay

    step = found[0].step if config.step is None and len(found) else config.step
    try:
        if step is None:
            raise ValueError("There is no spike to run again: name a step, --step 412.")
        model, loss_fn, dataset = find_task("replay", task, "(model, loss_fn, dataset)")
        return str(replay(ledger, step, model, loss_fn, dataset))
    except (ImportError, ValueError, TypeError, NotImplementedError) as error:
        raise SystemExit(f"microclip: {error}") from error


def _heading(spike: Spike) -> str:
    steps = (
        f"Step {spike.step}" if spike.last == spike.step else f"Steps {spike.step} to {spike.last}"
    )
    parts = []
    if spike.loss is not None:
        parts.append(f"loss {spike.loss:.4g}, usually {spike.usual_loss:.4g}")
    if spike.norm is not None:
        parts.append(f"gradient {spike.norm:.4g}, usually {spike.usual_norm:.4g}")
    return f"{steps}: {'; '.join(parts)} ({spike.score:.3g} standard deviations)"


def _row(row: dict[str, Any]) -> str:
    parts = [f"{row['id']}:"]
    if row["loss_share"] is not None:
        parts.append(f"loss {row['loss']:.4g} ({row['loss_share']:.0%})")
    if row["energy_share"] is not None:
        parts.append(f"gradient {row['microbatch_norm']:.4g} ({row['energy_share']:.0%} of energy)")
    return " ".join(parts)
