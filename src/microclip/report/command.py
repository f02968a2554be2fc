"""`microclip report`: its options, and writing the page. Heavy imports wait until it runs, so that
`--help` is quick.
"""

from __future__ import annotations

import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from microclip.report.blocks import Page


@dataclass(frozen=True)
class ReportConfig:
    """Write a page about one run or several: what was run, what clipping did, and to which data.

    A run is a folder written by microclip.report.RunFolder, or the folder of a microclip.Ledger.
    The page is a single HTML file that works offline. Runs of the same group are compared by
    micro-batch size.

    One run, and open its page:  microclip report runs/b4 --open

    All runs of a sweep:  microclip report runs/* --output sweep.html --title "The sweep"
    """

    runs: tuple[Path, ...]
    """Folders of runs or ledgers."""
    output: Path = Path("report.html")
    """Where to write the page."""
    title: str = ""
    """The heading of the page; by default made from the names of the runs."""
    gallery: int = 60
    """How many of the most suspicious examples to show."""
    open: bool = False
    """Open the page in a browser."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("runs must name at least one folder: microclip report RUN...")
        if not 0 <= self.gallery <= 1000:
            raise ValueError(f"gallery must be between 0 and 1000, but got {self.gallery}.")


def run(config: ReportConfig) -> Page:
    """Write the page and print its summary."""
    from rich.console import Console

    from microclip.report.write import write_report

    # results go to standard output, progress to standard error: each can be redirected alone
    console, log = Console(), Console(stderr=True)

    def say(text: str) -> None:
        log.print(text, soft_wrap=True, markup=False, highlight=False)

    try:
        page = write_report(
            config.runs, config.output, title=config.title, gallery=config.gallery, say=say
        )
    except ValueError as error:
        raise SystemExit(f"microclip: {error}") from error
    for sentence in (*(f"{line}." for line in page.headlines), *page.verdict):
        console.print(sentence, markup=False, highlight=False)
    console.print()
    # soft_wrap and no markup: a path must be printed unchanged, however long or odd it is
    console.print(f"page: {config.output}", soft_wrap=True, markup=False, highlight=False)
    if config.open:
        webbrowser.open(config.output.resolve().as_uri())
    return page
