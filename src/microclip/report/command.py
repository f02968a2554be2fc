"""`microclip report`: write the page, say what it comes to and where it is."""

from __future__ import annotations

import webbrowser

from rich.console import Console

from microclip.report.blocks import Page
from microclip.report.config import ReportConfig
from microclip.report.write import write_report


def run(config: ReportConfig) -> Page:
    """Write the page of some runs and print what it comes to."""
    # results to standard output, progress to standard error: one can be redirected alone
    console, log = Console(), Console(stderr=True)

    def say(text: str) -> None:
        log.print(text, soft_wrap=True, markup=False, highlight=False)

    try:
        page = write_report(
            config.runs, config.output, title=config.title, gallery=config.gallery, say=say
        )
    except ValueError as error:
        raise SystemExit(f"microclip: {error}") from error
    for sentence in page.verdict:
        console.print(sentence, markup=False, highlight=False)
    console.print()
    # soft_wrap and no markup: a path must come out as it is, however long or odd
    console.print(f"page: {config.output}", soft_wrap=True, markup=False, highlight=False)
    if config.open:
        webbrowser.open(config.output.resolve().as_uri())
    return page
