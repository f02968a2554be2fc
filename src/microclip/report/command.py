"""`microclip report`: read, assemble, write the page whole, say where it is."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from microclip.draggers.export import written
from microclip.report.assemble import assemble, investigate
from microclip.report.blocks import Page
from microclip.report.config import ReportConfig
from microclip.report.page import render


def show(config: ReportConfig) -> Page:
    """Write the page of some runs and print what it comes to."""
    # results to standard output, progress to standard error: one can be redirected alone
    console, log = Console(), Console(stderr=True)

    def say(text: str) -> None:
        log.print(text, soft_wrap=True, markup=False, highlight=False)

    try:
        findings = investigate(_once(config.runs), config.gallery, say)
        page = assemble(findings, config.title or _title(findings.runs[0].name, len(config.runs)))
        write_page(page, config.output)
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


def write_page(page: Page, path: Path) -> None:
    """Write a page that is there complete or not at all."""
    content = render(page)
    with written(path) as file:
        file.write(content)


def _once(paths: Sequence[Path]) -> list[Path]:
    return list({path.resolve(): path for path in paths}.values())


def _title(first: str, count: int) -> str:
    return f"microclip: {first[:80]}" + (f" and {count - 1} more" if count > 1 else "")
