"""What a user may choose about `microclip report`. Imports nothing heavy, so `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ReportConfig:
    """Make one page of one run or several: what was run, what clipping did, and to whom.

    A run is a folder that microclip.report.RunFolder has written, or the folder of a
    microclip.Ledger. The page is one HTML file that needs nothing else, not even a network. Runs
    of the same group are compared by micro-batch size.

    One run, its page opened:  microclip report runs/b4 --open

    All runs of a sweep:  microclip report runs/* --output sweep.html --title "The sweep"
    """

    runs: tuple[Path, ...]
    """Folders of runs, or of ledgers."""
    output: Path = Path("report.html")
    """Where to write the page."""
    title: str = ""
    """The heading of the page; the runs' names unless given."""
    gallery: int = 60
    """How many of the most suspicious examples are shown."""
    open: bool = False
    """Open the page in a browser."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("runs must name at least one folder: microclip report RUN...")
        if not 0 <= self.gallery <= 1000:
            raise ValueError(f"gallery must be between 0 and 1000, but got {self.gallery}.")
