"""From run folders to a file, in one call."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from microclip.draggers.export import written
from microclip.report.assemble import GALLERY, assemble, investigate
from microclip.report.blocks import Page
from microclip.report.dossier import Say
from microclip.report.page import render


def write_report(
    runs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    title: str = "",
    gallery: int = GALLERY,
    say: Say = lambda _: None,
) -> Page:
    """Write the page of some runs, as `microclip report` does, and return what is on it.

    Args:
        runs: Folders of runs (`RunFolder`), or of ledgers.
        output: The file to write; it is there complete or not at all.
        title: The heading; the runs' names unless given.
        gallery: How many of the most suspicious examples are shown.
        say: Called with a line now and then, while ledgers are read.
    """
    if isinstance(runs, str | os.PathLike):
        raise TypeError(f"runs must be a list of folders, but got the single {str(runs)!r}.")
    if not runs:
        raise ValueError("runs must name at least one folder.")
    paths = list({Path(path).resolve(): Path(path) for path in runs}.values())
    findings = investigate(paths, gallery, say)
    page = assemble(findings, title or _title(findings.runs[0].name, len(paths)))
    write_page(page, output)
    return page


def write_page(page: Page, path: str | os.PathLike[str]) -> None:
    """Write a page that is there complete or not at all."""
    content = render(page)
    with written(path) as file:
        file.write(content)


def _title(first: str, count: int) -> str:
    return f"microclip: {first[:80]}" + (f" and {count - 1} more" if count > 1 else "")
